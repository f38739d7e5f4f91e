//! What an answer says that is no success: a closed code for programs, a sentence for people.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Body of every answer that is no success.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// The error.
    pub error: ErrorDetail,
}

/// One error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorDetail {
    /// The cause, for programs.
    pub code: ErrorCode,
    /// The cause, and what to do next, for people. Its words may change at any time.
    pub message: String,
}

/// Causes of errors. Within a version of the API codes are only added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// No volume has this name.
    VolumeNotFound,
    /// No store has this name.
    StoreNotFound,
    /// No migration has this identity.
    MigrationNotFound,
    /// No other host has this name.
    HostNotFound,
    /// No VM has this name.
    VmNotFound,
    /// The image file that a volume was to be made of is not there.
    ImageNotFound,
    /// No image of this volume was kept.
    ReplicaNotFound,
    /// Nobody of this name may use the API over TLS.
    GrantNotFound,
    /// The API has no such path.
    RouteNotFound,
    /// The API has the path, and not for this method; the header `Allow` says for which.
    MethodNotAllowed,
    /// A volume of this name exists.
    VolumeExists,
    /// A VM of this name exists.
    VmExists,
    /// The VM runs, does not run, or is on its way; the message says which.
    VmWrongState,
    /// The VM's definition cannot be used, or the VM could not move.
    VmUnsuitable,
    /// The VM's QEMU did not start, or does not do what it is told.
    VmFailed,
    /// Somebody of this name, or with this key, may use the API over TLS already.
    GrantExists,
    /// The host has an identity already.
    IdentityExists,
    /// The host has no identity yet, or cannot use it; the message says why.
    NoIdentity,
    /// The target store has a file where the image would be.
    TargetExists,
    /// The place for the copy cannot take as many bytes as the volume has.
    TargetTooSmall,
    /// A volume was to become smaller.
    CannotShrink,
    /// The volume cannot become as large; the message says what is in the way.
    CannotGrow,
    /// The volume is in the store that it was to be moved to.
    SameStore,
    /// The store holds one volume, and has one.
    StoreOccupied,
    /// The place holds what a migration left there.
    PlaceFenced,
    /// The file in a store is no half-made target that nobody claims; only such files are deleted there.
    NotHalfMade,
    /// The store has less free space than the volume has allocated.
    NoSpace,
    /// The daemon may not open as many files as another volume needs.
    TooManyFiles,
    /// The volume is being migrated.
    AlreadyMigrating,
    /// The migration has ended, or is not under way.
    NotMigrating,
    /// The migration is past its commit point.
    TooLate,
    /// The migration has nothing that could be done once more; the message says why.
    CannotRetry,
    /// As many migrations wait for their turn as may.
    QueueFull,
    /// Nothing waits here to be promoted.
    NotPrepared,
    /// The ticket does not fit what waits here.
    TicketRefused,
    /// Clients are connected to the volume.
    VolumeInUse,
    /// Another operation on the volume is under way.
    VolumeBusy,
    /// The volume is not being served; the message says why.
    VolumeUnavailable,
    /// Another program, or another volume, has locked the image file, or is about to use it.
    ImageInUse,
    /// The image file is none that can be served.
    ImageUnsuitable,
    /// The daemon may not read or write what was named, or the client may not order that; the message says what.
    NotPermitted,
    /// The invitation is garbled, expired, redeemed or not known.
    InvitationRefused,
    /// The other host cannot be reached, or is not the one that was expected.
    HostUnreachable,
    /// The other host does not take the volume; the message says why.
    HostRefused,
    /// Migrations or forwarded volumes depend on the other host; the message says which.
    HostInUse,
    /// The request is malformed, or a value is out of range.
    InvalidRequest,
    /// The body of the request is too large.
    RequestTooLarge,
    /// The daemon is shutting down.
    ShuttingDown,
    /// The daemon's journal cannot be written; nothing that must be remembered can be begun.
    JournalFailed,
    /// A store answered with an error.
    StorageFailed,
    /// A defect of the daemon.
    Internal,
    /// A code that this program does not know: the daemon is newer.
    #[serde(other)]
    Unknown,
}

impl ErrorCode {
    /// The status of the HTTP answer.
    pub fn http_status(self) -> u16 {
        match self {
            Self::VolumeNotFound
            | Self::StoreNotFound
            | Self::MigrationNotFound
            | Self::HostNotFound
            | Self::VmNotFound
            | Self::ImageNotFound
            | Self::ReplicaNotFound
            | Self::GrantNotFound
            | Self::RouteNotFound => 404,
            Self::VolumeExists
            | Self::VmExists
            | Self::VmWrongState
            | Self::GrantExists
            | Self::IdentityExists
            | Self::NoIdentity
            | Self::TargetExists
            | Self::SameStore
            | Self::AlreadyMigrating
            | Self::NotMigrating
            | Self::TooLate
            | Self::CannotRetry
            | Self::QueueFull
            | Self::VolumeInUse
            | Self::VolumeBusy
            | Self::ImageInUse
            | Self::StoreOccupied
            | Self::PlaceFenced
            | Self::NotHalfMade
            | Self::NotPrepared
            | Self::HostRefused
            | Self::HostInUse => 409,
            Self::ImageUnsuitable
            | Self::VmUnsuitable
            | Self::TargetTooSmall
            | Self::CannotShrink
            | Self::CannotGrow
            | Self::InvitationRefused
            | Self::TicketRefused => 422,
            Self::MethodNotAllowed => 405,
            Self::InvalidRequest => 400,
            Self::NotPermitted => 403,
            Self::RequestTooLarge => 413,
            Self::NoSpace => 507,
            Self::TooManyFiles | Self::ShuttingDown | Self::VolumeUnavailable | Self::HostUnreachable => 503,
            Self::VmFailed | Self::JournalFailed | Self::StorageFailed | Self::Internal | Self::Unknown => {
                500
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{ErrorBody, ErrorCode};

    #[test]
    fn code_of_a_newer_daemon_is_read_as_unknown() {
        let text = r#"{"error":{"code":"moon_too_bright","message":"wait"},"hint":1}"#;
        let body: ErrorBody = serde_json::from_str(text).unwrap();
        assert_eq!(body.error.code, ErrorCode::Unknown);
    }

    #[test]
    fn documentation_lists_every_code_with_its_status() {
        let page = include_str!("../../../docs/api.md");
        let source = include_str!("error.rs");
        let variants = source.split("pub enum ErrorCode {").nth(1).unwrap().split("\n}").next().unwrap();
        let names = variants
            .lines()
            .map(str::trim)
            .filter(|line| line.ends_with(','))
            .map(|line| &line[..line.len() - 1]);
        let names: Vec<&str> = names.filter(|name| *name != "Unknown").collect();
        assert!(names.len() > 20);
        for name in names {
            let snake: String = name
                .char_indices()
                .flat_map(|(index, c)| {
                    (index > 0 && c.is_uppercase()).then_some('_').into_iter().chain([c.to_ascii_lowercase()])
                })
                .collect();
            let code: ErrorCode = serde_json::from_str(&format!("\"{snake}\"")).unwrap();
            let row = page.lines().find(|line| line.contains(&format!("`{snake}`"))).unwrap_or_default();
            assert!(row.starts_with(&format!("| {} |", code.http_status())), "{snake}: {row}");
        }
    }

    #[test]
    fn codes_are_written_in_snake_case() {
        assert_eq!(serde_json::to_string(&ErrorCode::TargetTooSmall).unwrap(), r#""target_too_small""#);
    }
}
