//! Restores a journal from a backup: what of it is trusted, and when volumes may be served again.
//!
//! ```text
//!   saved journal ──restore()──► nothing is this host's; saved migrations have ended; numbers continue far above the saved ones
//!                                        │ each volume waits
//!   other hosts ──Answer──► Restoration ─┼─ all confirm, and its image is fit ──► Reinstated: served
//!                                        ├─ the administrator orders it (`order`) ► Reinstated: served, a branch if in doubt
//!                                        └─ another host has it, or had it later ─► held until the administrator forgets it here
//! ```
//! Between the backup and its restoration volumes may have left, arrived, been copied between stores or been removed, without a
//! record. So an old journal gives no right to serve, to continue a migration, or to delete anything. The paired hosts know the
//! lost moves, except those that never left this host. The images ([`Look`]) or the administrator show those. Nothing here
//! sends questions: the daemon carries them ([`Restoration`]).

mod hosts;
mod knowledge;
mod machine;
mod order;
mod ruling;
mod size;

use std::collections::BTreeSet;

use chronicle::StayId;

use crate::identity::{MigrationId, VolumeId};
use crate::journal::{
    Doubt, MigratingVolume, MigrationState, Outcome, Restored, RestoredMore, RestoredVolume, Side, Stage,
    State, VolumeState,
};
use crate::planted::{Bug, broken};

pub use hosts::{Hosts, KnownBy, Lacks, Surroundings, hosts_to_ask, since};
pub use knowledge::{Knowledge, Whereabouts, Word, knowledge, knows_all};
pub use machine::{ANSWER_MAX, ASK_AGAIN, Action, Answer, Claim, Event, Look, Restoration};
pub use order::{Order, Refused, confirm, forget, order};
pub use ruling::{Claims, InDoubt, Ruling, Standing, Words, ruling};
pub use size::{Measured, SizeUnknown, size_now};

/// Milliseconds for one number. Numbers of migrations continue with the seconds since 1970, because no host uses one each
/// second. So no number of the lost time is reused, even if the same backup is restored twice.
const MS_A_NUMBER: u64 = 1000;
/// The numbers skipped if the clock is behind. One migration a minute uses as many in two years.
const NUMBERS_SKIPPED: u64 = 1 << 20;

/// Returns the journal that replaces a lost one: the state of the backup, with nothing trusted yet.
pub fn restore(backup: &State, found: &Surroundings) -> State {
    let mut state = backup.clone();
    let mut waiting: Vec<RestoredVolume> =
        state.restored.take().map_or_else(Vec::new, |earlier| earlier.volumes);
    for (id, known) in std::mem::take(&mut state.volumes) {
        let hollow = state.fillings.remove(&id).map(|filling| Doubt::Hollow { peer_name: filling.peer_name });
        let lasting = || known.record.image.place.outlasts_its_volume().then_some(Doubt::Lasting);
        let doubt = hollow.or_else(|| between_stores(&state, &known)).or_else(lasting);
        waiting.push(RestoredVolume { volume: settled(known), doubt });
    }
    state.fillings.clear();
    // **N.B.** Another host may still read missing blocks here: that is asked ([`confirm`]).
    let unfinished = state.migrations.values_mut().filter(|migration| !migration.has_ended());
    for migration in unfinished.filter(|migration| !migration.leaves_blocks()) {
        for copy in waiting_copies(migration) {
            waiting.push(copy);
        }
        end(migration, found.at_unix_ms);
    }
    // A copy that returned waits here, and is not forwarded.
    waiting.iter().for_each(|copy| drop(state.moved.remove(&copy.volume.record.volume)));
    let sized = take_sizes(found, &mut waiting, &mut state);
    let departed = departed(&state, &waiting);
    let in_question = |moving: &MigratingVolume| departed.contains(&moving.volume);
    for migration in state.migrations.values_mut().filter(|migration| !migration.has_ended()) {
        if !migration.volumes.iter().all(in_question) {
            end(migration, found.at_unix_ms);
        }
    }
    if !broken(Bug::RestoredNumbersReused) {
        let (next, by_the_clock) = (state.next_migration, found.at_unix_ms / MS_A_NUMBER);
        // The clock may be behind.
        state.next_migration =
            if by_the_clock > next { by_the_clock } else { next.saturating_add(NUMBERS_SKIPPED) };
    }
    let named = hosts::named(found, backup, &waiting).into_iter().collect();
    let list = hosts::list(found, backup);
    let more = RestoredMore { list, hosts: named, departed, sized };
    let (backup_unix_ms, restored_unix_ms) = (found.backup_unix_ms, found.at_unix_ms);
    let numbers_from = state.next_migration;
    state.restored =
        Some(Restored { backup_unix_ms, restored_unix_ms, numbers_from, volumes: waiting, more });
    state
}

/// Returns the volumes that had gone to another host, and may have returned since. A volume whose name another volume has taken
/// is left out, because no client asks for it by that name.
fn departed(state: &State, waiting: &[RestoredVolume]) -> BTreeSet<VolumeId> {
    if broken(Bug::RestoredDeparture) {
        return BTreeSet::new();
    }
    let mut names: BTreeSet<&str> = waiting.iter().map(|copy| copy.volume.record.name.as_str()).collect();
    let departed = state.moved.iter().filter(|(_, moved)| names.insert(&moved.volume.record.name));
    departed.map(|(volume, _)| *volume).collect()
}

/// Adopts larger sizes from a later journal: a volume only grows.
fn take_sizes(found: &Surroundings, waiting: &mut [RestoredVolume], state: &mut State) -> BTreeSet<VolumeId> {
    let departed = state.moved.values_mut().map(|moved| &mut moved.volume.record);
    let records = waiting.iter_mut().map(|copy| &mut copy.volume.record).chain(departed);
    let sized = records.filter_map(|record| {
        let later = *found.sizes.get(&record.volume)?;
        record.size_bytes = record.size_bytes.max(later);
        Some(record.volume)
    });
    sized.collect()
}

/// Returns the doubt about a volume between two stores past the commit point: either store may have it.
fn between_stores(state: &State, known: &VolumeState) -> Option<Doubt> {
    let released = state.unfinished().filter(|(_, migration)| matches!(migration.stage, Stage::Released(_)));
    let mut moving = released.flat_map(|(_, migration)| &migration.volumes);
    let moving = moving.find(|moving| moving.volume == known.record.volume)?;
    Some(Doubt::BetweenStores { other: moving.target.clone() })
}

/// Returns a volume without its unfinished operations.
fn settled(mut known: VolumeState) -> VolumeState {
    // **N.B.** An image that has grown since must not be cut to the intended size.
    known.resizing_to = None;
    known
}

/// Returns the complete copies that waited for their source. They do not continue by themselves: the release may have come since.
fn waiting_copies(migration: &MigrationState) -> Vec<RestoredVolume> {
    let (Side::Incoming { peer, peer_name, volumes, .. }, Stage::Prepared(_)) =
        (&migration.side, &migration.stage)
    else {
        return Vec::new();
    };
    let doubt = || match migration.is_hollow() {
        true => Doubt::Hollow { peer_name: peer_name.clone() },
        false => Doubt::Copy { peer: *peer, peer_name: peer_name.clone() },
    };
    let copies = volumes.iter().map(|record| {
        let mut record = record.clone();
        record.generation = record.generation.next();
        let added_unix_ms = migration.started_unix_ms;
        let volume = VolumeState { record, stay: StayId::Made, added_unix_ms, resizing_to: None };
        RestoredVolume { volume, doubt: Some(doubt()) }
    });
    copies.collect()
}

/// Ends a migration in this journal. **N.B.** Nothing is deleted: an image that was partial at the backup may be the volume now.
fn end(migration: &mut MigrationState, at_unix_ms: u64) {
    let why = "the journal was restored from a backup".to_owned();
    let outcome = match &migration.stage {
        Stage::Released(_) | Stage::Owned(_) => Outcome::Moved { left_over: String::new() },
        Stage::HandedBack => Outcome::HandedBack { detail: why },
        Stage::Discarding(outcome) | Stage::Ended(outcome) => outcome.clone(),
        Stage::Copying | Stage::Prepared(_) => {
            Outcome::Failed { code: crate::journal::FailureCode::DaemonStopped, detail: why }
        }
    };
    migration.stage = Stage::Ended(outcome);
    migration.ended_unix_ms = Some(at_unix_ms);
    migration.returning.clear();
    migration.hollow = None;
}

/// Returns a number for the residency of a reinstated volume, which no migration of this journal has.
fn next_stay(state: &State) -> MigrationId {
    MigrationId(state.next_migration)
}
