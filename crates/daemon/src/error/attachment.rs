//! Refusals of orders about volumes that are attached at hosts which do not have them.

use api::ErrorCode;

/// Why an order about an attachment is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AttachmentError {
    #[error(
        "there is no paired host \"{host}\"; there are: {known}; to pair with one: sterna host invite, and there: sterna host join"
    )]
    UnknownHost { host: String, known: String },
    #[error("\"{0}\" is this host, which has the volume; name another host")]
    ThisHost(String),
    #[error(
        "volume \"{volume}\" is attached at host \"{host}\" already; to end that: sterna volume detach {volume} --at {host}"
    )]
    Already { volume: String, host: String },
    #[error(
        "volume \"{volume}\" is not attached at host \"{host}\" by this host; see: sterna volume show {volume}. If another host has \
         attached it there, run at \"{host}\": sterna volume detach {volume}. An attachment ends when the volume moves to that host"
    )]
    NotGiven { volume: String, host: String },
    #[error("volume \"{0}\" is not attached here; see: sterna volume list")]
    NotAttached(String),
    /// The volume is attached here, and the order is for the host that has it.
    #[error(
        "volume \"{volume}\" is attached here, and host \"{host}\" has it or leads to the host that has it: do it there; to stop \
         offer it here: sterna volume detach {volume}"
    )]
    AttachedHere { volume: String, host: String },
    /// Sent to the host that offers it.
    #[error(
        "volume \"{volume}\" is attached there by host \"{host}\" already; to end that, there: sterna volume detach {volume}"
    )]
    AttachedByAnother { volume: String, host: String },
    #[error(
        "volume \"{volume}\" is attached there with another access already; to end that, there: sterna volume detach {volume}"
    )]
    OtherAccess { volume: String },
    /// Sent to the host that offers it.
    #[error("it has volume \"{0}\" itself")]
    HasIt(String),
    #[error("volume \"{0}\" is arriving there; wait for that")]
    Arrives(String),
    /// Sent to the host that offers it.
    #[error(
        "it keeps a standby of volume \"{volume}\" (\"{standby}\"): a promotion would need the name; remove the standby first"
    )]
    HasStandby { volume: String, standby: String },
    /// Sent to the host that offers it.
    #[error(
        "volume \"{0}\" was there before, so its clients there may write; attach it without --read-only, or first make that host \
         forget it: sterna volume remove {0}"
    )]
    WasThere(String),
    /// Sent to the host that offers it.
    #[error("it offers {0} attached volumes of this host, and no more; detach some first")]
    TooMany(usize),
    /// Sent to the host that offers it.
    #[error(
        "volume \"{0}\" is attached there for reading only; detach it there first, and try again: sterna volume detach {0}"
    )]
    ReadOnlyThere(String),
    #[error("clients may only read volume \"{0}\" here, so it can be attached with --read-only only")]
    ReadOnlyHere(String),
    #[error("host \"{host}\" refuses: {detail}")]
    Refused { host: String, detail: String },
    #[error(
        "host \"{host}\" did not answer within {seconds} s; its program may be older than attachments (sterna host show {host}); \
         run the same command again, or end what may have begun: sterna volume detach {volume} --at {host} --force"
    )]
    NoAnswer { volume: String, host: String, seconds: u64 },
    #[error(
        "volume \"{volume}\" is attached at {hosts}; detach it first: sterna volume detach {volume} --at HOST; to remove it anyway, \
         which disconnects clients there: --force"
    )]
    AttachedElsewhere { volume: String, hosts: String },
}

impl AttachmentError {
    pub(crate) fn code(&self) -> ErrorCode {
        match self {
            Self::UnknownHost { .. } => ErrorCode::HostNotFound,
            Self::ThisHost(_) | Self::ReadOnlyHere(_) => ErrorCode::InvalidRequest,
            Self::NotGiven { .. } | Self::NotAttached(_) | Self::AttachedHere { .. } => {
                ErrorCode::VolumeNotFound
            }
            Self::Already { .. }
            | Self::AttachedByAnother { .. }
            | Self::OtherAccess { .. }
            | Self::HasIt(_)
            | Self::HasStandby { .. }
            | Self::WasThere(_) => ErrorCode::VolumeExists,
            Self::Arrives(_) => ErrorCode::VolumeBusy,
            Self::TooMany(_) => ErrorCode::QueueFull,
            Self::Refused { .. } => ErrorCode::HostRefused,
            Self::NoAnswer { .. } => ErrorCode::HostUnreachable,
            Self::ReadOnlyThere(_) | Self::AttachedElsewhere { .. } => ErrorCode::VolumeInUse,
        }
    }
}
