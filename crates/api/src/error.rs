//! Errors of the API: a code of a closed set for programs, and a message for users.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Body of every error answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// The error with its code and message.
    pub error: ErrorDetail,
}

/// An error with its code and message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorDetail {
    /// The cause, for programs.
    pub code: ErrorCode,
    /// The cause, and what to do next, for users. The text may change at any time.
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
    /// The image for the volume does not exist.
    ImageNotFound,
    /// No image of this volume was kept.
    ReplicaNotFound,
    /// No grant has this name.
    GrantNotFound,
    /// No standby has this name.
    StandbyNotFound,
    /// There is no evacuation, or none that runs.
    EvacuationNotFound,
    /// The API has no such path.
    RouteNotFound,
    /// The path exists, but not with this method; the header `Allow` lists the allowed ones.
    MethodNotAllowed,
    /// A volume of this name exists.
    VolumeExists,
    /// The volume has a standby at that host.
    StandbyExists,
    /// The standby cannot be made or promoted; the message has the reason.
    StandbyRefused,
    /// Nothing but this prevents the promotion: the host that had the volumes may still serve them. The order must say that it is off.
    StandbyMayBeServed,
    /// A VM of this name exists.
    VmExists,
    /// The VM runs, does not run, or is moving; the message says which.
    VmWrongState,
    /// The VM's definition cannot be used, or the VM could not move.
    VmUnsuitable,
    /// The VM's QEMU did not start, or a command of it failed.
    VmFailed,
    /// A grant with this name or key exists.
    GrantExists,
    /// An evacuation runs already.
    EvacuationRuns,
    /// The host is drained, or is being evacuated: it takes nothing new.
    HostDrained,
    /// The host has an identity already.
    IdentityExists,
    /// The host has no identity yet, or cannot use it; the message says why.
    NoIdentity,
    /// The target store has a file where the image would be.
    TargetExists,
    /// The place for the copy is smaller than the volume.
    TargetTooSmall,
    /// The new size is smaller than the volume; volumes do not shrink.
    CannotShrink,
    /// The volume cannot grow to this size; the message has the reason.
    CannotGrow,
    /// The volume is already in the target store.
    SameStore,
    /// The store can hold one volume, and already has one.
    StoreOccupied,
    /// The place holds an old copy that a migration has left.
    PlaceFenced,
    /// The file is not a half-made target without an owner; only such files may be deleted.
    NotHalfMade,
    /// The store has less free space than the volume has allocated.
    NoSpace,
    /// The daemon may not open enough files for another volume.
    TooManyFiles,
    /// The volume is being migrated.
    AlreadyMigrating,
    /// The migration has ended, or is not under way.
    NotMigrating,
    /// The migration has passed its commit point.
    TooLate,
    /// The migration cannot be repeated; the message has the reason.
    CannotRetry,
    /// The queue of migrations is full.
    QueueFull,
    /// There is no copy here that could be promoted.
    NotPrepared,
    /// The ticket does not belong to the copy that waits here.
    TicketRefused,
    /// Clients are connected to the volume.
    VolumeInUse,
    /// Another operation on the volume is under way.
    VolumeBusy,
    /// The volume is not served; the message has the reason.
    VolumeUnavailable,
    /// Another program, or another volume, has locked the image file, or is about to use it.
    ImageInUse,
    /// The image cannot be served.
    ImageUnsuitable,
    /// The daemon may not use the named object, or the client may not give this order; the message says which.
    NotPermitted,
    /// The invitation or access token is malformed, expired, already redeemed or unknown.
    InvitationRefused,
    /// The other host cannot be reached, or is not the expected one.
    HostUnreachable,
    /// The other host refuses the volume; the message has the reason.
    HostRefused,
    /// Migrations or forwarded volumes depend on the other host; the message says which.
    HostInUse,
    /// The request is malformed, or a value is out of range.
    InvalidRequest,
    /// The body of the request is too large.
    RequestTooLarge,
    /// The daemon is shutting down.
    ShuttingDown,
    /// The daemon's journal cannot be written, so no durable operation can begin.
    JournalFailed,
    /// A store has reported an error.
    StorageFailed,
    /// The daemon has a defect.
    Internal,
    /// A code that this program does not know, because the daemon is newer.
    #[serde(other)]
    Unknown,
}

impl ErrorCode {
    /// Returns the status of the HTTP answer.
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
            | Self::StandbyNotFound
            | Self::EvacuationNotFound
            | Self::RouteNotFound => 404,
            Self::VolumeExists
            | Self::StandbyExists
            | Self::StandbyRefused
            | Self::StandbyMayBeServed
            | Self::VmExists
            | Self::VmWrongState
            | Self::GrantExists
            | Self::EvacuationRuns
            | Self::HostDrained
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
