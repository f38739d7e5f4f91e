//! Assigns channels between two hosts to their subjects.
//!
//! ```text
//!   0                                   openings of migrations
//!   number × 8 + direction × 4          a standby; the number is drawn with its identity, and the direction says who has the volumes
//!   number × 8 + direction × 4 + 1      one migration: its handover, and calls on the target's stores
//!   number × 8 + direction × 4 + 2      the volume that it moved, for clients that stayed at the source
//!   number × 8 + direction × 4 + 3      the VM that goes along
//!   + 64 × 2⁵⁶ to the first of these    what the target lacks, at the source
//!   + position × 2⁵⁶                    the same for a volume that is not the migration's first; a VM's other streams
//! ```
//! The number is the migration's at its source. The direction says which of the two hosts that is. The position is that of
//! the volume in the migration, or of the stream among those of the VM's memory. So both hosts know the channel without
//! asking, also after a restart.

use migration::{HostId, MigrationId, VolumeIndex};
use transport::ChannelId;

/// Offers of migrations, and answers to them.
pub(super) const OPENINGS: ChannelId = ChannelId(0);

const NUMBER_SHIFT: u32 = 3;
const FROM_GREATER: u64 = 4;
pub(super) const KIND_MASK: u64 = 3;
const POSITION_SHIFT: u32 = 56;

/// The largest number of volumes of a migration, because positions are part of channel numbers.
pub(crate) const VOLUMES_MAX: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Migration,
    /// A volume at its new owner.
    Forwarding,
    /// A VM that moves along with its volumes.
    Vm,
    /// What the target of a migration lacks, at its source.
    Reservoir,
    /// A standby, from the host that has its volumes.
    Standby,
}

/// The subject of a channel about one migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Subject {
    pub kind: Kind,
    /// The host where the migration began.
    pub source: HostId,
    pub migration: MigrationId,
    /// The position of the volume, or of the VM's stream.
    pub volume: VolumeIndex,
}

impl Subject {
    pub(crate) fn channel(self, target: HostId) -> ChannelId {
        let kind = match self.kind {
            Kind::Migration | Kind::Reservoir => 1,
            Kind::Forwarding => 2,
            Kind::Vm => 3,
            Kind::Standby => 0,
        };
        let direction = if self.source > target { FROM_GREATER } else { 0 };
        // No migration has as many volumes.
        let offset = if self.kind == Kind::Reservoir { VOLUMES_MAX as u64 } else { 0 };
        let position = (u64::from(self.volume.0) + offset) << POSITION_SHIFT;
        ChannelId(position | (self.migration.0 << NUMBER_SHIFT) | direction | kind)
    }

    /// Returns the subject of a channel between these two hosts; `None`: this program knows none.
    pub(super) fn of(channel: ChannelId, one: HostId, other: HostId) -> Option<Self> {
        let kind = match channel.0 & KIND_MASK {
            1 => Kind::Migration,
            2 => Kind::Forwarding,
            3 => Kind::Vm,
            _ if channel.0 >> NUMBER_SHIFT != 0 => Kind::Standby,
            _ => return None,
        };
        let source = if channel.0 & FROM_GREATER == 0 { one.min(other) } else { one.max(other) };
        let position = u32::try_from(channel.0 >> POSITION_SHIFT).unwrap_or(u32::MAX);
        let (kind, volume) = match (kind, position.checked_sub(VOLUMES_MAX as u32)) {
            (Kind::Migration, Some(index)) if index < VOLUMES_MAX as u32 => {
                (Kind::Reservoir, VolumeIndex(index))
            }
            _ => (kind, VolumeIndex(position)),
        };
        let number = channel.0 & ((1 << POSITION_SHIFT) - 1);
        Some(Self { kind, source, migration: MigrationId(number >> NUMBER_SHIFT), volume })
    }

    /// Returns the subject of the migration's first volume, whose channel carries the handover.
    pub(super) fn of_first(self) -> Self {
        Self { volume: VolumeIndex(0), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_hosts_know_what_a_channel_is_about() {
        let (low, high) = (HostId([1; 32]), HostId([2; 32]));
        for (source, target) in [(low, high), (high, low)] {
            for kind in [Kind::Migration, Kind::Forwarding, Kind::Vm, Kind::Reservoir, Kind::Standby] {
                for volume in VolumeIndex::all(VOLUMES_MAX) {
                    let subject = Subject { kind, source, migration: MigrationId(77), volume };
                    let channel = subject.channel(target);
                    assert_eq!(Subject::of(channel, low, high), Some(subject));
                    assert_eq!(Subject::of(channel, high, low), Some(subject));
                }
            }
        }
        assert_eq!(Subject::of(OPENINGS, low, high), None);
    }
}
