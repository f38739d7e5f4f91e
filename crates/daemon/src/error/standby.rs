//! Refusals of orders about standbys.

use api::ErrorCode;

/// Why an order about a standby is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StandbyError {
    #[error("there is no standby \"{0}\"; see: sterna standby list")]
    NotFound(String),
    #[error("\"{name}\" names several standbys: {known}; give one of these names")]
    Ambiguous { name: String, known: String },
    #[error("volume \"{volume}\" has a standby at host \"{host}\" already: {name}")]
    Exists { volume: String, host: String, name: String },
    #[error("volume \"{volume}\" cannot have a standby: {reason}")]
    Unsuitable { volume: String, reason: String },
    #[error("\"{0}\" is a standby of another host: give this order there")]
    NotHere(String),
    #[error("\"{name}\" is served here: give this order at host \"{host}\", which keeps the standby")]
    NotThere { name: String, host: String },
    #[error("\"{name}\" is kept here for host \"{host}\", which has its volumes: give this order there")]
    KeptFor { name: String, host: String },
    #[error(
        "host \"{host}\" does not answer; its part stays there; to remove only this host's: sterna standby remove {name} --force"
    )]
    Silent { name: String, host: String },
    #[error(
        "host \"{host}\" has promoted the standby \"{name}\", and without it both hosts would serve the volumes. To go on with those of \
         that host: sterna volume yield {volume}; to go on with those of this one: sterna volume promote {volume} --unasked --force, \
         for each of them"
    )]
    Replaced { name: String, volume: String, host: String },
    #[error(
        "host \"{host}\" and this one both serve the volumes of standby \"{name}\". To end that, at the host whose content is not needed: sterna volume yield {volume}; to forget it, so that both go on: --force"
    )]
    Diverged { name: String, volume: String, host: String },
    #[error("\"{name}\" is not given up: {reason}. To remove a volume: sterna volume remove")]
    NotYielded { name: String, reason: String },
    #[error(
        "\"{name}\" is not given up: it has to be certain that host \"{host}\" keeps its volumes, and it has not agreed: {reason}. If it serves \
         them: sterna volume yield {name} --unasked"
    )]
    MayBeNowhere { name: String, host: String, reason: String },
    #[error(
        "volume \"{volume}\" waits for no host of a standby; sterna volume show {volume} says how it stands"
    )]
    NotAsked { volume: String },
    #[error(
        "host \"{host}\" has promoted its standby of volume \"{volume}\": if this host serves the volume as well, both have it, and their \
         states part. If that is wanted: --force; to give up what is here instead: sterna volume yield {volume}"
    )]
    ServedElsewhere { volume: String, host: String },
    #[error(
        "the host that has the volumes does not answer, so this copy may be the last one; to go on with it: sterna standby promote; to \
         delete it anyway: sterna standby remove {0} --force"
    )]
    LastCopy(String),
    #[error(
        "the volumes of standby \"{0}\" are not all made; try again: sterna standby promote {0}; to delete them: sterna standby remove {0} --force"
    )]
    NotMade(String),
    #[error(
        "the migration {migration} has begun with it, and the standby goes on if that fails; remove it when the volumes are here; to delete it \
         now: sterna standby remove {name} --force"
    )]
    Lent { name: String, migration: String },
    #[error(
        "it was promoted: host \"{0}\" has its volumes, too; stop the guests of one of both, and remove the volumes there; see: sterna \
         standby show"
    )]
    PromotedThere(String),
    #[error(
        "volume \"{volume}\" has a standby; remove that first: sterna standby remove {name}; or keep the standby's last state, which then needs \
         this host to be off for a promotion: --force"
    )]
    HasStandby { volume: String, name: String },
    #[error(
        "host \"{host}\", which keeps the standby \"{name}\", would not know that the volumes have left: {reason}. Then nobody may promote it \
         there; to move them anyway: --standby-untold"
    )]
    WouldNotKnow { name: String, host: String, reason: String },
    #[error("host \"{host}\" refuses the standby: {reason}")]
    Refused { host: String, reason: String },
    #[error(
        "host \"{host}\" has not answered within {seconds} s: it cannot be reached, or its program is older and keeps no standbys"
    )]
    NoAnswer { host: String, seconds: u64 },
    #[error("standby \"{name}\" is not promoted: {reason}")]
    NotPromoted { name: String, reason: String },
    #[error(
        "host \"{host}\" is silent, but may still serve the volumes of standby \"{name}\"; once it is off: sterna standby promote \
         {name} --force --source-is-off {host}; to have a program switch it off first: --force --fence PROGRAM"
    )]
    MayBeServed { name: String, host: String },
    #[error("standby \"{name}\" has a test already: {test}; end it first: sterna standby test {name} --end")]
    TestRuns { name: String, test: String },
    #[error("standby \"{name}\" is not tested: {reason}")]
    NotTested { name: String, reason: String },
    #[error("standby \"{name}\" is not compared: {reason}")]
    NotChecked { name: String, reason: String },
    #[error("standby \"{name}\" is not begun with an image: {reason}")]
    NotSeeded { name: String, reason: String },
    #[error("standby \"{0}\" is being exported: wait for that, or cancel it (sterna standby show)")]
    Exporting(String),
    #[error("standby \"{name}\" is not exported: {reason}")]
    NotCarried { name: String, reason: String },
    #[error("standby \"{0}\" has no test")]
    NoTest(String),
    #[error("the test of standby \"{name}\" is not deleted yet: {reason}; it is tried again")]
    TestNotEnded { name: String, reason: String },
    #[error("the direction of \"{name}\" is not turned round: {reason}")]
    NotTurned { name: String, reason: String },
    #[error("it has the volumes of \"{0}\" still: give them up there first: sterna volume yield {0}")]
    NotGivenUp(String),
    #[error(
        "it keeps no images of these volumes that were given up; to make a whole new copy: sterna standby remove, then sterna standby add"
    )]
    NothingGivenUp,
    #[error(
        "the store \"{store}\" has no room for the {bytes} bytes of volume \"{volume}\" that only that host has: make room there, or release \
         them there: sterna volume divergence drop {volume}"
    )]
    NoRoomForDivergence { volume: String, store: String, bytes: u64 },
    #[error("there is no divergence \"{0}\"; see: sterna volume divergence list")]
    NoDivergence(String),
    #[error("the divergence \"{0}\" is just being kept; try again")]
    DivergenceBusy(String),
    #[error("the divergence \"{name}\" is not exported: {reason}")]
    NotExported { name: String, reason: String },
    #[error("the records of standbys cannot be read: {0}; repair the data folder, then restart the daemon")]
    Unreadable(String),
    #[error(
        "the data folder has no usable record of the standby: {0}; make room there, or repair it, then try again"
    )]
    Record(String),
}

impl StandbyError {
    pub(crate) fn code(&self) -> ErrorCode {
        match self {
            Self::NotFound(_) | Self::NoTest(_) | Self::NoDivergence(_) => ErrorCode::StandbyNotFound,
            Self::Ambiguous { .. } => ErrorCode::InvalidRequest,
            Self::Exists { .. } => ErrorCode::StandbyExists,
            Self::Unsuitable { .. }
            | Self::NotHere(_)
            | Self::LastCopy(_)
            | Self::NotMade(_)
            | Self::Lent { .. }
            | Self::HasStandby { .. }
            | Self::PromotedThere(_)
            | Self::Replaced { .. }
            | Self::Diverged { .. }
            | Self::NotYielded { .. }
            | Self::MayBeNowhere { .. }
            | Self::WouldNotKnow { .. }
            | Self::NotAsked { .. }
            | Self::ServedElsewhere { .. }
            | Self::NotThere { .. }
            | Self::KeptFor { .. }
            | Self::TestRuns { .. }
            | Self::NotSeeded { .. }
            | Self::NotCarried { .. }
            | Self::Exporting(_)
            | Self::NotChecked { .. }
            | Self::NotTested { .. }
            | Self::TestNotEnded { .. }
            | Self::NotTurned { .. }
            | Self::NotGivenUp(_)
            | Self::NothingGivenUp
            | Self::DivergenceBusy(_)
            | Self::NotExported { .. }
            | Self::NotPromoted { .. } => ErrorCode::StandbyRefused,
            Self::MayBeServed { .. } => ErrorCode::StandbyMayBeServed,
            Self::Silent { .. } | Self::NoAnswer { .. } => ErrorCode::HostUnreachable,
            Self::Refused { .. } => ErrorCode::HostRefused,
            Self::Unreadable(_) | Self::Record(_) | Self::NoRoomForDivergence { .. } => {
                ErrorCode::StorageFailed
            }
        }
    }
}
