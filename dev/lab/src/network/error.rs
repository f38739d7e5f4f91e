//! The errors of making or changing hosts and links.

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
        /// The kernel's error, unchanged.
        source: io::Error,
    },
    /// TUN devices cannot be made.
    #[error(
        "no TUN device can be made: that needs /dev/net/tun and the module tun; try `modprobe tun` (in a container, \
         pass the device on)"
    )]
    NoTun {
        /// The kernel's error, unchanged.
        source: io::Error,
    },
    /// A program is not installed.
    #[error(
        "{program} is needed and not installed: on Debian it is in the package {package} (apt-get install {package})"
    )]
    NoProgram {
        /// The program's name, as executed.
        program: &'static str,
        /// The Debian package that contains it.
        package: &'static str,
    },
    /// A command failed with an exit status.
    #[error("`{command}` ended with {status}: {said}")]
    Command {
        /// The command, as it would be typed.
        command: String,
        /// The exit status of the command.
        status: ExitStatus,
        /// The command's output on standard error.
        said: String,
    },
    /// The namespace has no address left for another link.
    #[error("{links} links are the most between the hosts of one network; make another `Hosts`")]
    TooManyLinks {
        /// The greatest number of links.
        links: usize,
    },
    /// The thread of a wide-area link has ended too early.
    #[error("the emulator of a wide-area link has ended by itself; its link is gone, make it anew")]
    EmulatorEnded,
    /// A system call has failed.
    #[error("failed to {what}")]
    System {
        /// The attempted action, as a verb.
        what: &'static str,
        /// The kernel's error, unchanged.
        source: io::Error,
    },
}

impl NetworkError {
    /// Returns a conversion for `map_err` that adds the attempted action.
    pub(super) fn system<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::System { what, source: source.into() }
    }
}
