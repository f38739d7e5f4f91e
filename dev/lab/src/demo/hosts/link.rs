//! The link between the two hosts: of namespaces, or a proxy if they cannot be made.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::Command;

use anyhow::Context as _;
use testbed::LinkState;

use crate::network::{BitRate, Cut, Hosts, Lan, NetworkError, ShapedLink};

/// The second host's port in a namespace, where no other program can use it.
const PORT: u16 = 7423;

/// The kernel chooses the port, which is read afterwards.
const ANY_PORT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// The kinds of hosts in the demo, and of their link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkKind {
    /// Two network namespaces and a shaped link; needs root.
    Namespaces,
    /// Two daemons of this machine and a proxy on loopback.
    Loopback,
}

#[derive(Debug)]
pub(crate) struct Link {
    rate: BitRate,
    form: Form,
}

#[derive(Debug)]
enum Form {
    Shaped { link: ShapedLink, hosts: Hosts },
    Proxy(testbed::Link),
    Direct,
}

impl Link {
    /// Makes a link of the requested kind; without a request, one of namespaces if they can be made.
    pub(crate) fn create(kind: Option<LinkKind>, rate: BitRate) -> anyhow::Result<Self> {
        let form = match kind {
            Some(LinkKind::Namespaces) => shaped(rate)?,
            Some(LinkKind::Loopback) => proxy(rate)?,
            None => match shaped(rate) {
                Ok(form) => form,
                Err(why) => {
                    tracing::debug!(%why, "the hosts of the demo are on loopback");
                    proxy(rate)?
                }
            },
        };
        Ok(Self { rate, form })
    }

    /// Returns no link between two daemons of this machine: as fast as loopback, and never cut.
    pub(crate) fn direct() -> Self {
        Self { rate: BitRate::bits(u64::MAX), form: Form::Direct }
    }

    pub(super) fn description(&self) -> String {
        match &self.form {
            Form::Shaped { .. } => format!("two network namespaces, a link of {}", self.rate),
            Form::Direct => "two daemons on loopback".to_owned(),
            Form::Proxy(_) => {
                format!(
                    "two daemons on loopback, a proxy of {} between them (namespaces need root)",
                    self.rate
                )
            }
        }
    }

    /// Returns the command that becomes `program` on a host; host 0 connects, host 1 listens.
    pub(super) fn command(&self, host: usize, program: &Path) -> anyhow::Result<Command> {
        Ok(match &self.form {
            Form::Shaped { hosts, .. } => hosts.get(host).context("there are two hosts")?.command(program),
            Form::Proxy(_) | Form::Direct => Command::new(program),
        })
    }

    /// Makes a network for a guest on either host, beside the link; `None` without namespaces.
    pub(super) fn lan(&self) -> Result<Option<Lan>, NetworkError> {
        match &self.form {
            Form::Shaped { hosts, .. } => hosts.lan([0, 1]).map(Some),
            Form::Proxy(_) | Form::Direct => Ok(None),
        }
    }

    /// Returns where the second host listens, and the address that the first uses; `None`: the same address.
    pub(super) fn addresses(&self) -> (SocketAddr, Option<SocketAddr>) {
        match &self.form {
            Form::Shaped { link, .. } => {
                let address = SocketAddr::from((link.addresses()[1], PORT));
                (address, Some(address))
            }
            Form::Proxy(proxy) => (ANY_PORT, Some(proxy.address())),
            Form::Direct => (ANY_PORT, None),
        }
    }

    /// Sets the second host's real address as the proxy's target.
    pub(super) fn lead_to(&self, address: SocketAddr) {
        if let Form::Proxy(proxy) = &self.form {
            proxy.lead_to(address);
        }
    }

    pub(super) fn cut(&mut self) -> Result<(), NetworkError> {
        match &mut self.form {
            Form::Shaped { link, .. } => link.cut(Cut::Down),
            Form::Proxy(proxy) => {
                proxy.set(LinkState::Cut);
                Ok(())
            }
            Form::Direct => Ok(()),
        }
    }

    pub(super) fn restore(&mut self) -> Result<(), NetworkError> {
        match &mut self.form {
            Form::Shaped { link, .. } => link.restore(),
            Form::Proxy(proxy) => {
                proxy.set(LinkState::Up);
                Ok(())
            }
            Form::Direct => Ok(()),
        }
    }
}

fn shaped(rate: BitRate) -> Result<Form, NetworkError> {
    let mut hosts = Hosts::create(super::NAMES)?;
    let link = hosts.shaped_link([0, 1], rate)?;
    Ok(Form::Shaped { link, hosts })
}

fn proxy(rate: BitRate) -> anyhow::Result<Form> {
    Ok(Form::Proxy(testbed::Link::new(Some(rate.bytes_per_second()))?))
}
