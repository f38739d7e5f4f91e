//! Records the missing set of a copy while a volume is copied to another host or store. A restart continues from the last
//! record.
//!
//! ```text
//!   regularly:                         the target flushes ──► missing set taken, epoch ends, source flushes ──► kept
//!   orderly stop, copy on this host:   copying has stopped ──► the same, and nothing has been written since
//!   after a restart:                   kept missing set  ∪  writes since, as the chronicle says
//! ```
//! A target's list of blocks would not be enough: only the source knows which of them guests have written since. So the source
//! keeps the record, and need not ask.

use std::rc::Rc;
use std::time::Duration;

use block::Handle;
use chronicle::{Generation, ReplicaOf};
use migration::MigrationId;
use migration::strategy::VolumeEvent;
use tracing::warn;

use crate::stack::Volume;

/// The shortest time between two records: each is a flush at the target, and a small file here.
const INTERVAL_MIN: Duration = Duration::from_secs(1);
const INTERVAL_MAX: Duration = Duration::from_secs(30);
/// Between these limits, the interval is this part of the copying time so far: a restart loses about that much.
const INTERVAL_PART: u32 = 20;
/// The part of the interval within which the target has to flush. A later flush counts for the next record.
const FLUSH_PART: u32 = 4;

/// How long requests in flight to a target on this host may take at the end. Guests wait meanwhile, and what has not
/// arrived is copied again.
const SETTLE_MAX: Duration = Duration::from_millis(500);
const SETTLE_LOOK: Duration = Duration::from_millis(1);

/// How often the missing set is kept.
#[derive(Clone, Copy, Debug)]
pub struct Rhythm {
    /// The shortest time between two records.
    pub interval_min: Duration,
    /// The longest time between two records.
    pub interval_max: Duration,
}

impl Default for Rhythm {
    fn default() -> Self {
        Self { interval_min: INTERVAL_MIN, interval_max: INTERVAL_MAX }
    }
}

/// Keeps the missing set of the copy that `migration` makes, perhaps from the replica `consumed`, until `is_over` returns true.
pub async fn remember(
    handle: Handle,
    volume: Rc<Volume>,
    migration: MigrationId,
    rhythm: Rhythm,
    consumed: Option<(ReplicaOf, Generation)>,
    is_over: impl Fn() -> bool,
) {
    let (began, of) = (handle.now(), ReplicaOf::Migration(migration.0));
    loop {
        let part = (handle.now() - began) / INTERVAL_PART;
        let interval = part.max(rhythm.interval_min).min(rhythm.interval_max);
        handle.sleep(interval - interval / FLUSH_PART).await;
        if is_over() {
            break;
        }
        if let Some(copy) = volume.copy() {
            copy.event(VolumeEvent::FlushWanted);
        }
        handle.sleep(interval / FLUSH_PART).await;
        let lacking = || volume.copy()?.with_machine(|machine| machine.lacking());
        let (generation, store) = (volume.generation(), || Some(volume.store_for_us()));
        if let Err(error) = volume.chronicler().refer_to(of, generation, store, lacking).await {
            warn!(%migration, %error, "cannot record the progress of the copy; a restart would begin again");
        }
        if let Some((consumed, generation)) = consumed
            && volume.chronicler().lacking(consumed, generation).is_some()
            && volume.chronicler().lacking(of, volume.generation()).is_some()
            && let Err(error) = volume.chronicler().forget(consumed).await
        {
            warn!(%migration, %error, "cannot delete the record of the replica that becomes the target yet");
        }
    }
    // The kept copy of an abandoned migration is obsolete. By then the volume may have been away and back, and a later replica
    // may be at the same host.
    let consumed =
        consumed.filter(|(of, generation)| volume.chronicler().lacking(*of, *generation).is_some());
    for gone in consumed.map(|(of, _)| of).into_iter().chain([of]) {
        if let Err(error) = volume.chronicler().forget(gone).await {
            warn!(%migration, %error, "cannot delete the progress record of an ended migration; trying again later");
        }
    }
}

/// Keeps the exact missing set of the copy that `migration` makes on this host, at its daemon's end. Requests in flight arrive
/// and are made durable first. Copying stops.
///
/// **N.B.** Call this after the last guest's write: later writes would have to be copied again. If the gate is closed for a
/// handover the stores get no more requests, and the last record counts.
pub async fn leave(handle: &Handle, volume: &Volume, migration: MigrationId) {
    let Some(copy) = volume.copy() else { return };
    copy.event(VolumeEvent::Pause);
    let until = handle.now() + SETTLE_MAX;
    while !copy.with_machine(|machine| machine.is_settled()) && handle.now() < until {
        copy.event(VolumeEvent::FlushWanted);
        handle.sleep(SETTLE_LOOK).await;
    }
    let (generation, store) = (volume.generation(), || Some(volume.store_for_us()));
    let lacking = || volume.copy()?.with_machine(|machine| machine.lacking());
    let kept = volume.chronicler().refer_to(ReplicaOf::Migration(migration.0), generation, store, lacking);
    if let Err(error) = kept.await {
        warn!(%migration, %error, "cannot record the final progress of the copy; the next daemon copies more again");
    }
}
