//! The link between the two hosts: of namespaces, or a proxy where they cannot be made.

use std::net::SocketAddr;
use std::path::Path;

use anyhow::Context as _;
use tokio::process::Command;

use super::proxy::Proxy;
use crate::network::{BitRate, Cut, Hosts, Lan, NetworkError, ShapedLink};

/// Where a host listens for the other; namespaces are apart, so nobody else can have it.
const PORT: u16 = 7423;

/// What the hosts of the demo are, and what joins them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkKind {
    /// Two network namespaces and a shaped link; needs root.
    Namespaces,
    /// Two daemons of this machine and a proxy on loopback.
    Loopback,
}

/// The link, and where the hosts' daemons are started.
#[derive(Debug)]
pub(super) struct Link {
    rate: BitRate,
    form: Form,
}

#[derive(Debug)]
enum Form {
    Shaped { link: ShapedLink, hosts: Hosts },
    Proxy(Proxy),
}

impl Link {
    /// Makes it: of the kind that is asked for, or else of namespaces if they can be made.
    ///
    /// # Errors
    /// What the system says.
    pub(super) async fn create(kind: Option<LinkKind>, rate: BitRate) -> anyhow::Result<Self> {
        let form = match kind {
            Some(LinkKind::Namespaces) => shaped(rate)?,
            Some(LinkKind::Loopback) => Form::Proxy(Proxy::new(rate).await?),
            None => match shaped(rate) {
                Ok(form) => form,
                Err(why) => {
                    tracing::debug!(%why, "the hosts of the demo are on loopback");
                    Form::Proxy(Proxy::new(rate).await?)
                }
            },
        };
        Ok(Self { rate, form })
    }

    /// What it is, in a few words.
    pub(super) fn description(&self) -> String {
        match &self.form {
            Form::Shaped { .. } => format!("two network namespaces, a link of {}", self.rate),
            Form::Proxy(_) => {
                format!(
                    "two daemons on loopback, a proxy of {} between them (namespaces need root)",
                    self.rate
                )
            }
        }
    }

    /// The command that becomes `program` on a host; 0 is the one that calls, 1 the one that listens.
    pub(super) fn command(&self, host: usize, program: &Path) -> anyhow::Result<Command> {
        Ok(match &self.form {
            Form::Shaped { hosts, .. } => {
                hosts.get(host).context("there are two hosts")?.command(program).into()
            }
            Form::Proxy(_) => Command::new(program),
        })
    }

    /// A network for a guest that is on either host, beside the link; `None` where there are no namespaces.
    ///
    /// # Errors
    /// What the system says.
    pub(super) fn lan(&self) -> Result<Option<Lan>, NetworkError> {
        match &self.form {
            Form::Shaped { hosts, .. } => hosts.lan([0, 1]).map(Some),
            Form::Proxy(_) => Ok(None),
        }
    }

    /// Where the second host listens, and what the first is to call.
    pub(super) fn addresses(&self) -> (SocketAddr, SocketAddr) {
        match &self.form {
            Form::Shaped { link, .. } => {
                let address = SocketAddr::from((link.addresses()[1], PORT));
                (address, address)
            }
            // Any port: it is asked for afterwards.
            Form::Proxy(proxy) => (SocketAddr::from(([127, 0, 0, 1], 0)), proxy.address()),
        }
    }

    /// Hears where the second host really listens.
    pub(super) fn lead_to(&self, address: SocketAddr) {
        if let Form::Proxy(proxy) = &self.form {
            proxy.lead_to(address);
        }
    }

    /// Cuts it: nothing arrives. Takes milliseconds, as [`Self::restore`] does.
    pub(super) fn cut(&mut self) -> Result<(), NetworkError> {
        match &mut self.form {
            Form::Shaped { link, .. } => link.cut(Cut::Down),
            Form::Proxy(proxy) => {
                proxy.cut();
                Ok(())
            }
        }
    }

    /// Lets it carry again.
    pub(super) fn restore(&mut self) -> Result<(), NetworkError> {
        match &mut self.form {
            Form::Shaped { link, .. } => link.restore(),
            Form::Proxy(proxy) => {
                proxy.restore();
                Ok(())
            }
        }
    }
}

fn shaped(rate: BitRate) -> Result<Form, NetworkError> {
    let mut hosts = Hosts::create(super::NAMES)?;
    let link = hosts.shaped_link([0, 1], rate)?;
    Ok(Form::Shaped { link, hosts })
}
