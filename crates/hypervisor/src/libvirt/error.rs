//! The errors of libvirt's calls.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// libvirt's `VIR_ERR_NO_SUPPORT`: this libvirt has no such call.
const NO_SUPPORT: i32 = 3;
/// libvirt's `VIR_ERR_RPC`: the daemon knows no such procedure.
const NO_PROCEDURE: i32 = 39;
const NO_DOMAIN: i32 = 42;

/// The reason why a call to libvirt failed.
#[derive(Debug, thiserror::Error)]
pub enum LibvirtError {
    /// No daemon listens at the socket.
    #[error("libvirt cannot be reached at {}: {source}; is libvirtd or virtqemud running?", socket.display())]
    Unreachable {
        /// The path of the socket.
        socket: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The connection has ended. The request may or may not have been carried out.
    #[error("the connection to libvirt has ended: {0}")]
    Gone(io::Error),
    /// It did not answer in time. It may still carry the request out.
    #[error("libvirt has not answered for {} s", .0.as_secs())]
    Silent(Duration),
    /// It has refused the request.
    #[error("libvirt says: {message}")]
    Refused {
        /// libvirt's number of the error.
        code: i32,
        /// libvirt's text of the error.
        message: String,
    },
    /// It requires more than access to its socket.
    #[error(
        "libvirt at {} requires {kind}, which Sterna does not support; run the daemon as root, or let its user in without \
         authentication (auth_unix_rw = \"none\" in libvirtd.conf or virtqemud.conf)", socket.display()
    )]
    Authentication {
        /// The authentication that it requires.
        kind: &'static str,
        /// The path of the socket.
        socket: PathBuf,
    },
    /// Its answer is invalid.
    #[error("libvirt sent {0}")]
    Malformed(&'static str),
    /// A domain's definition is invalid.
    #[error("the domain's definition cannot be read: {0}")]
    Definition(String),
}

impl LibvirtError {
    /// Returns whether there is no such domain.
    pub fn is_no_domain(&self) -> bool {
        matches!(self, Self::Refused { code: NO_DOMAIN, .. })
    }

    pub(super) fn is_unsupported(&self) -> bool {
        matches!(self, Self::Refused { code: NO_SUPPORT | NO_PROCEDURE, .. })
    }
}
