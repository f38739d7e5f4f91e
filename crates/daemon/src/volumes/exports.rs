//! How volumes are exported: the settings of a request, of the journal, and of the configuration.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use hypervisor::qemu::{ExportAddress, RECONNECT_SECONDS};
use lane::{Credentials, Encryption, Listeners};
use migration::journal::{ExportAccess, ExportSettings, VolumeRecord};

use crate::config::{Config, NbdConfig, SocketAccess, SocketMode, TlsPolicy};
use crate::error::{RequestError, with_causes};
use crate::files::sockets::{self, SocketFolder};
use crate::host::Parts;

/// The addresses of volumes: their sockets and ports, and the TLS of these.
pub(crate) struct Exports {
    pub(crate) config: Arc<Config>,
    pub(crate) encryption: Encryption,
    pub(crate) sockets: Arc<SocketFolder>,
}

impl Exports {
    pub(crate) fn new(parts: &Parts) -> Arc<Self> {
        let Parts { config, encryption, sockets, .. } = parts.clone();
        Arc::new(Self { config, encryption, sockets })
    }

    pub(crate) fn tcp_uri(&self, record: &VolumeRecord) -> Option<String> {
        let scheme = match self.encryption {
            Encryption::Off => "nbd",
            Encryption::Offered(_) | Encryption::Required(_) => "nbds",
        };
        record.export.listen.as_ref().map(|address| format!("{scheme}://{address}/{}", record.name))
    }

    /// Listens for a volume's clients, at its socket and its port.
    pub(crate) fn listeners(&self, record: &VolumeRecord) -> Result<Listeners, RequestError> {
        let access = self.socket_access(&record.export)?;
        let unix = self.sockets.bind_volume(&record.name, &access).map_err(|error| {
            let (volume, reason) = (record.name.clone(), with_causes(&error));
            RequestError::VolumeUnavailable { volume, reason }
        })?;
        Ok(Listeners::nbd(unix, self.listen_on_port(record)?))
    }

    /// Listens on a volume's port, if it has one; fails with [`RequestError::VolumeUnavailable`].
    pub(crate) fn listen_on_port(
        &self,
        record: &VolumeRecord,
    ) -> Result<Option<(OwnedFd, Encryption)>, RequestError> {
        let Some(address) = &record.export.listen else { return Ok(None) };
        let volume = record.name.clone();
        let listener = if let Some(left) = self.sockets.listening().claim_port(&volume, address) {
            TcpListener::from(left)
        } else {
            let listener = sockets::listen(address).map_err(|error| {
                let reason = format!("cannot listen on its port {address}: {error}");
                RequestError::VolumeUnavailable { volume: volume.clone(), reason }
            })?;
            self.sockets.listening().made_port(&volume, listener.as_fd());
            listener
        };
        if let Some(missing) = self.missing_address(record) {
            tracing::warn!(%volume, %missing, "the volume is served there as soon as the address is this host's");
        }
        let is_local = listener.local_addr().is_ok_and(|address| address.ip().is_loopback());
        if matches!(self.encryption, Encryption::Off) && !is_local {
            tracing::warn!(%volume, %address, "any machine that reaches this port can use the volume: no TLS is configured");
        }
        Ok(Some((listener.into(), self.encryption.clone())))
    }

    /// Returns the address of a volume's port if this host does not have that address. Clients cannot reach the volume there yet.
    #[expect(clippy::unused_self, reason = "it is asked of the host beside what else is asked of it")]
    pub(crate) fn missing_address(&self, record: &VolumeRecord) -> Option<SocketAddr> {
        let address: SocketAddr = record.export.listen.as_ref()?.parse().ok()?;
        let tried = UdpSocket::bind((address.ip(), 0));
        tried.is_err_and(|error| error.kind() == ErrorKind::AddrNotAvailable).then_some(address)
    }

    /// Returns who may use a volume's unix socket; [`RequestError::Invalid`]: this host does not know its owner.
    pub(crate) fn socket_access(&self, settings: &ExportSettings) -> Result<SocketAccess, RequestError> {
        let otherwise = &self.config.volume_sockets;
        let owner = settings.socket_owner.as_deref().map(|owner| {
            owner
                .parse()
                .map_err(|fault: crate::config::SocketFault| RequestError::Invalid(fault.to_string()))
        });
        Ok(SocketAccess {
            mode: settings.socket_mode.map_or(otherwise.mode, SocketMode::from_bits),
            owner: owner.transpose()?.or_else(|| otherwise.owner.clone()),
        })
    }

    pub(crate) fn export_named(&self, volume: &str) -> ExportAddress {
        ExportAddress {
            socket: self.sockets.volume_socket(volume),
            export: volume.to_owned(),
            reconnect_s: RECONNECT_SECONDS,
        }
    }
}

impl Exports {
    /// Reads the certificates of volumes' ports again, for connections that begin later. May block.
    pub(crate) fn read_certificates(&self) {
        let (Encryption::Offered(credentials) | Encryption::Required(credentials), Some(tls)) =
            (&self.encryption, &self.config.nbd.tls)
        else {
            return;
        };
        match credentials.reload(&tls.files) {
            Ok(()) => {
                tracing::info!(certificate = %tls.files.certificate.display(), "reloaded certificates");
            }
            Err(error) => {
                let reason = with_causes(&error);
                tracing::error!(%reason, "cannot reload certificates; the previous ones stay in use");
            }
        }
    }
}

/// Returns the configured TLS of the volumes' ports. May block. Errors: [`lane::CredentialsError`].
pub(crate) fn encryption(config: &NbdConfig) -> Result<Encryption, lane::CredentialsError> {
    let Some(tls) = &config.tls else { return Ok(Encryption::Off) };
    let credentials = Credentials::load(&tls.files)?;
    Ok(match tls.policy {
        TlsPolicy::Offered => Encryption::Offered(credentials),
        TlsPolicy::Required => Encryption::Required(credentials),
    })
}

fn listen_address(text: &str) -> Result<SocketAddr, RequestError> {
    let invalid = |why: &str| RequestError::Invalid(format!("--listen {text}: {why}"));
    let address: SocketAddr = text
        .parse()
        .map_err(|_| invalid("write ADDRESS:PORT, for example 192.0.2.1:10809 or [2001:db8::1]:10809"))?;
    if address.port() == 0 {
        return Err(invalid("clients must know the port: choose one, for example 10809"));
    }
    Ok(address)
}

pub(crate) fn export_settings(asked: &api::ExportSettings) -> Result<ExportSettings, RequestError> {
    let invalid = |fault: crate::config::SocketFault| RequestError::Invalid(fault.to_string());
    let mode = asked.socket_mode.as_deref().map(str::parse::<SocketMode>).transpose().map_err(invalid)?;
    // The journal keeps the name, not its number, which is looked up when the socket is made.
    if let Some(owner) = &asked.socket_owner {
        owner.parse::<crate::config::SocketOwner>().map_err(invalid)?;
    }
    let listen = asked.listen.as_deref().map(listen_address).transpose()?;
    if asked.connections_max == Some(0) {
        return Err(RequestError::Invalid("no client could connect with at most 0 connections".to_owned()));
    }
    Ok(ExportSettings {
        access: if asked.read_only { ExportAccess::ReadOnly } else { ExportAccess::ReadWrite },
        listen: listen.map(|address| address.to_string()),
        socket_mode: mode.map(SocketMode::bits),
        socket_owner: asked.socket_owner.clone(),
        connections_max: asked.connections_max,
    })
}
