//! Which channel between two hosts is about what.
//!
//! ```text
//!   0                                   openings of migrations
//!   number × 8 + direction × 4 + 1      one migration: its handover, and calls on the target's stores
//!   number × 8 + direction × 4 + 2      the volume that it moved, for clients that stayed at the source
//!   number × 8 + direction × 4 + 3      the machine that goes along
//! ```
//! The number is the migration's at its source; the direction says which of the two hosts that is. So both know the
//! channel without asking, also after a restart.

use migration::{HostId, MigrationId};
use transport::ChannelId;

/// Openings of migrations, and answers to them.
pub(super) const OPENINGS: ChannelId = ChannelId(0);

const NUMBER_SHIFT: u32 = 3;
const FROM_GREATER: u64 = 4;
const KIND_MASK: u64 = 3;

/// What a channel is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A migration.
    Migration,
    /// A volume at its new owner.
    Forwarding,
    /// A machine that goes along with its volumes.
    Machine,
}

/// A channel that is about one migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Subject {
    /// What it is about.
    pub kind: Kind,
    /// Where the migration began.
    pub source: HostId,
    /// Its number there.
    pub migration: MigrationId,
}

impl Subject {
    /// The channel of this subject between its source and the other host.
    pub(super) fn channel(self, target: HostId) -> ChannelId {
        let kind = match self.kind {
            Kind::Migration => 1,
            Kind::Forwarding => 2,
            Kind::Machine => 3,
        };
        let direction = if self.source > target { FROM_GREATER } else { 0 };
        ChannelId((self.migration.0 << NUMBER_SHIFT) | direction | kind)
    }

    /// What the channel is about, between these two hosts; `None`: nothing that this program knows.
    pub(super) fn of(channel: ChannelId, one: HostId, other: HostId) -> Option<Self> {
        let kind = match channel.0 & KIND_MASK {
            1 => Kind::Migration,
            2 => Kind::Forwarding,
            3 => Kind::Machine,
            _ => return None,
        };
        let source = if channel.0 & FROM_GREATER == 0 { one.min(other) } else { one.max(other) };
        Some(Self { kind, source, migration: MigrationId(channel.0 >> NUMBER_SHIFT) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_hosts_know_what_a_channel_is_about() {
        let (low, high) = (HostId([1; 32]), HostId([2; 32]));
        for (source, target) in [(low, high), (high, low)] {
            for kind in [Kind::Migration, Kind::Forwarding, Kind::Machine] {
                let subject = Subject { kind, source, migration: MigrationId(77) };
                let channel = subject.channel(target);
                assert_eq!(Subject::of(channel, low, high), Some(subject));
                assert_eq!(Subject::of(channel, high, low), Some(subject));
            }
        }
        assert_eq!(Subject::of(OPENINGS, low, high), None);
    }
}
