//! Refuses a volume if another branch of its history is at this host. A forced promotion makes branches
//! ([`crate::migrations::ownership::promote`]); the administrator has to decide which one is kept.
//!
//! ```text
//!   trunk     alpha ─────────────────────────────── offered to beta: refused
//!   branch      └─ promoted by force at beta ─ is there, or its clients are and it has moved on to gamma
//! ```
//! A host identifies a volume by its identity, which branches share. A second branch would replace the first one in the
//! journal, and clients of one would read the content of the other.

use migration::journal::{AttachedVolume, ExportAccess, State, VolumeRecord};
use migration::wire::OfferedVolume;

use crate::error::{AttachmentError, RequestError};
use crate::host::Arrivals;

impl Arrivals {
    /// Refuses a volume if another branch of its history is here, or if this host forwards clients to
    /// another branch. Errors: [`RequestError::BranchPresent`], [`RequestError::BranchLedTo`].
    pub(crate) fn refuse_other_branch(&self, offered: &OfferedVolume) -> Result<(), RequestError> {
        match self.journal.read(|state| other_branch(state, offered)) {
            // If the volume left without clients, nothing is forwarded to it.
            Some(RequestError::BranchLedTo { volume, .. }) if self.volumes.service(&volume).is_none() => {
                Ok(())
            }
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

/// Returns why a host with this journal refuses an offered volume.
fn other_branch(state: &State, offered: &OfferedVolume) -> Option<RequestError> {
    let volume = |record: &VolumeRecord| record.name.clone();
    let offer = offered.generation;
    // Its lane lets no client write, and continues when the volume is here.
    let reads = |attached: &&AttachedVolume| attached.record.export.access == ExportAccess::ReadOnly;
    if state.attachment_of(offered.volume).filter(reads).is_some() {
        return Some(AttachmentError::ReadOnlyThere(offered.name.clone()).into());
    }
    if let Some(waiting) = state.restored_volume(offered.volume) {
        let (volume, here) = (volume(&waiting.volume.record), waiting.volume.record.generation);
        return Some(RequestError::BranchPresent { volume, here, offered: offer });
    }
    if let Some(here) = state.volumes.get(&offered.volume) {
        let (volume, here) = (volume(&here.record), here.record.generation);
        return Some(RequestError::BranchPresent { volume, here, offered: offer });
    }
    // N.B. the generation of a volume that left can only grow, so a lower one belongs to a branch that parted earlier. A branch
    // that has been handed over equally often is not recognised by this.
    let left = state.moved.get(&offered.volume).filter(|left| offer < left.generation)?;
    let (volume, host, there) = (volume(&left.volume.record), left.host_name.clone(), left.generation);
    Some(RequestError::BranchLedTo { volume, host, there, offered: offer })
}

#[cfg(test)]
mod tests {
    use chronicle::Generation;
    use migration::journal::{
        Entry, ExportSettings, Forwarding, ImageFormat, ImageLocation, MigratingVolume, Origin, Record, Side,
    };
    use migration::wire::LeftBehind;
    use migration::{Attempt, HostId, MigrationId, VolumeId};

    use super::*;

    const VOLUME: VolumeId = VolumeId([1; 16]);

    fn offered(volume: VolumeId, generation: u64) -> OfferedVolume {
        OfferedVolume {
            volume,
            name: "other".to_owned(),
            size_bytes: 1 << 20,
            block_size_bytes: 4096,
            generation: Generation(generation),
            format: ImageFormat::Raw,
            left_behind: LeftBehind::Nothing,
            origin: Origin::Unknown,
        }
    }

    /// Returns the state of a host that has a volume of generation 2, or that the volume has left as generation 3.
    fn state(has_left: bool) -> State {
        let image = |path: &str| ImageLocation::raw_file("a", path);
        let migration = MigrationId(1);
        let added = Record::VolumeAdded(VolumeRecord {
            volume: VOLUME,
            name: "v".to_owned(),
            size_bytes: 1 << 20,
            block_size_bytes: 4096,
            image: image("/a/v.img"),
            generation: Generation(2),
            export: ExportSettings::default(),
        });
        let side = Side::Outgoing {
            peer: HostId([3; 32]),
            peer_name: "gamma".to_owned(),
            store: String::new(),
            forwarding: Forwarding::Always,
        };
        let moving = MigratingVolume { volume: VOLUME, source: image("/a/v.img"), target: image("") };
        let leaves = [
            Record::MigrationStarted { migration, volumes: vec![moving], keep_source: false, side },
            Record::Released { migration, attempt: Attempt(1), generations: vec![(VOLUME, Generation(3))] },
        ];
        let mut state = State::default();
        let records = std::iter::once(added).chain(leaves.into_iter().filter(|_| has_left));
        state.apply(&Entry { at_unix_ms: 0, records: records.collect() }).unwrap();
        state
    }

    #[test]
    fn a_volume_that_is_here_is_no_arrival_whatever_it_is_called() {
        let refused = other_branch(&state(false), &offered(VOLUME, 1));
        assert!(matches!(
            refused,
            Some(RequestError::BranchPresent { volume, here: Generation(2), .. }) if volume == "v"
        ));
        assert!(other_branch(&state(false), &offered(VolumeId([2; 16]), 1)).is_none());
    }

    #[test]
    fn a_volume_that_left_comes_home_and_a_branch_that_parted_before_that_does_not() {
        let state = state(true);
        assert!(other_branch(&state, &offered(VOLUME, 3)).is_none());
        let refused = other_branch(&state, &offered(VOLUME, 2));
        assert!(matches!(refused, Some(RequestError::BranchLedTo { host, .. }) if host == "gamma"));
    }
}
