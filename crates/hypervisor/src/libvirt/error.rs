//! Why libvirt did not do what it was asked.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// libvirt's `VIR_ERR_NO_SUPPORT`: this libvirt has no such call.
const NO_SUPPORT: i32 = 3;
/// libvirt's `VIR_ERR_RPC`: the daemon knows no such procedure.
const NO_PROCEDURE: i32 = 39;
/// libvirt's `VIR_ERR_NO_DOMAIN`.
const NO_DOMAIN: i32 = 42;

/// Why something was not done by libvirt.
#[derive(Debug, thiserror::Error)]
pub enum LibvirtError {
    /// Nobody listens there.
    #[error("libvirt cannot be reached at {}: {source}; is libvirtd or virtqemud running?", socket.display())]
    Unreachable {
        /// Where.
        socket: PathBuf,
        /// What the system answered.
        source: io::Error,
    },
    /// The connection has ended. Whether the request was carried out is not known.
    #[error("the connection to libvirt has ended: {0}")]
    Gone(io::Error),
    /// It did not answer in time. Whether it carries the request out is not known.
    #[error("libvirt has not answered for {} s", .0.as_secs())]
    Silent(Duration),
    /// It has answered that it does not do it.
    #[error("libvirt says: {message}")]
    Refused {
        /// libvirt's number of the error.
        code: i32,
        /// In libvirt's words.
        message: String,
    },
    /// It asks for more than a connection to its socket.
    #[error(
        "libvirt at {} wants {kind}, which Sterna does not speak; run the daemon as root, or let its user in without that \
         (auth_unix_rw = \"none\" in libvirtd.conf or virtqemud.conf)", socket.display()
    )]
    Authentication {
        /// What it wants.
        kind: &'static str,
        /// Where.
        socket: PathBuf,
    },
    /// It answers what is no answer.
    #[error("libvirt sent {0}")]
    Malformed(&'static str),
    /// A definition of a domain is none.
    #[error("the domain's definition cannot be read: {0}")]
    Definition(String),
}

impl LibvirtError {
    /// Whether there is no such domain.
    pub fn is_no_domain(&self) -> bool {
        matches!(self, Self::Refused { code: NO_DOMAIN, .. })
    }

    /// Whether this libvirt does not know what was asked for.
    pub(super) fn is_unsupported(&self) -> bool {
        matches!(self, Self::Refused { code: NO_SUPPORT | NO_PROCEDURE, .. })
    }
}
