//! Why hosts or links cannot be made or changed.

use std::io;
use std::process::ExitStatus;

/// A failure of the network of the lab.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// The kernel does not let this user make namespaces.
    #[error(
        "network namespaces are refused: they need root, with CAP_SYS_ADMIN and CAP_NET_ADMIN; run this as root \
         (in a container, with these capabilities)"
    )]
    Refused {
        /// What the kernel said.
        source: io::Error,
    },
    /// TUN devices cannot be made.
    #[error(
        "no TUN device can be made: that needs /dev/net/tun and the module tun; try `modprobe tun` (in a container, \
         pass the device on)"
    )]
    NoTun {
        /// What the kernel said.
        source: io::Error,
    },
    /// A program is not installed.
    #[error(
        "{program} is needed and not installed: on Debian it is in the package {package} (apt-get install {package})"
    )]
    NoProgram {
        /// What is executed.
        program: &'static str,
        /// What it is in.
        package: &'static str,
    },
    /// A command did not do what it was told.
    #[error("`{command}` ended with {status}: {said}")]
    Command {
        /// The command, as it would be typed.
        command: String,
        /// How it ended.
        status: ExitStatus,
        /// What it said.
        said: String,
    },
    /// A namespace has as many links as there are addresses for.
    #[error("{links} links are the most between the hosts of one network; make another `Hosts`")]
    TooManyLinks {
        /// How many there can be.
        links: usize,
    },
    /// The thread of a wide-area link has ended before its time.
    #[error("the emulator of a wide-area link has ended by itself; its link is gone, make it anew")]
    EmulatorEnded,
    /// A call of the system failed.
    #[error("failed to {what}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

impl NetworkError {
    /// For `map_err`: names what was tried.
    pub(super) fn system<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::System { what, source: source.into() }
    }
}
