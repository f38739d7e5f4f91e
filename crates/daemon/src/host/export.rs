//! How volumes are offered: what a request says of it, the journal remembers, and the configuration otherwise says.

use migration::journal::{ExportAccess, ExportSettings};

use super::Host;
use crate::config::{SocketAccess, SocketMode};
use crate::error::RequestError;

impl Host {
    /// Who may use a volume's unix socket.
    ///
    /// # Errors
    /// [`RequestError::Invalid`]: its owner is no longer known to this host.
    pub(super) fn socket_access(&self, settings: &ExportSettings) -> Result<SocketAccess, RequestError> {
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
}

/// What a request says, checked.
///
/// # Errors
/// [`RequestError::Invalid`].
pub(super) fn export_settings(asked: &api::ExportSettings) -> Result<ExportSettings, RequestError> {
    let invalid = |fault: crate::config::SocketFault| RequestError::Invalid(fault.to_string());
    let mode = asked.socket_mode.as_deref().map(str::parse::<SocketMode>).transpose().map_err(invalid)?;
    // The name is remembered, not its number: that is looked up when the socket is made.
    if let Some(owner) = &asked.socket_owner {
        owner.parse::<crate::config::SocketOwner>().map_err(invalid)?;
    }
    Ok(ExportSettings {
        access: if asked.read_only { ExportAccess::ReadOnly } else { ExportAccess::ReadWrite },
        listen: None,
        socket_mode: mode.map(SocketMode::bits),
        socket_owner: asked.socket_owner.clone(),
        connections_max: None,
    })
}
