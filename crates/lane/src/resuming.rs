//! Remembers, while a volume is copied to another host or store, what the copy there lacks: a restart goes on from the last time.
//!
//! ```text
//!   every so often:   the target flushes ──► what it lacks is taken down, the epoch ends, the source flushes ──► kept
//!   stopped in order, of a copy on this host: nothing more is copied ──► the same, and nothing has been written since
//!   after a restart:  lacking then  ∪  what the chronicle says was written since
//! ```
//! A target that names the blocks that it holds would not be enough: which of them guests have written since they were
//! sent, only the source knows. So the source remembers, and need not ask.

use std::rc::Rc;
use std::time::Duration;

use block::Handle;
use chronicle::{Generation, ReplicaOf};
use migration::MigrationId;
use migration::strategy::VolumeEvent;
use tracing::warn;

use crate::stack::Volume;

/// Time between two times at least: each is a flush there, and a small file here.
const INTERVAL_MIN: Duration = Duration::from_secs(1);
/// Time between two times at most.
const INTERVAL_MAX: Duration = Duration::from_secs(30);
/// Between these it is so much of what the copying has taken so far: what a restart costs is that much, about.
const INTERVAL_PART: u32 = 20;
/// How long the target is given to flush, of the interval. One that takes longer is counted the next time.
const FLUSH_PART: u32 = 4;

/// How long what is under way to a target on this host may take to arrive in the end: guests wait meanwhile, and what has not arrived
/// is copied again.
const SETTLE_MAX: Duration = Duration::from_millis(500);
/// How often it is looked whether it has.
const SETTLE_LOOK: Duration = Duration::from_millis(1);

/// How often it is remembered.
#[derive(Clone, Copy, Debug)]
pub struct Rhythm {
    /// Time between two times at least.
    pub interval_min: Duration,
    /// Time between two times at most.
    pub interval_max: Duration,
}

impl Default for Rhythm {
    fn default() -> Self {
        Self { interval_min: INTERVAL_MIN, interval_max: INTERVAL_MAX }
    }
}

/// Remembers the copy that `migration` makes, perhaps of the replica `consumed`, until `is_over` says that it makes none any more.
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
            warn!(%migration, %error, "how far the copying is cannot be kept; a restart would begin again");
        }
        if let Some((consumed, generation)) = consumed
            && volume.chronicler().lacking(consumed, generation).is_some()
            && volume.chronicler().lacking(of, volume.generation()).is_some()
            && let Err(error) = volume.chronicler().forget(consumed).await
        {
            warn!(%migration, %error, "the replica that becomes the target is not forgotten yet");
        }
    }
    // What is left of a migration that was given up is none of anybody's any more.
    // By then the volume may have been away and back, and a later replica may be at the same host.
    let consumed =
        consumed.filter(|(of, generation)| volume.chronicler().lacking(*of, *generation).is_some());
    for gone in consumed.map(|(of, _)| of).into_iter().chain([of]) {
        if let Err(error) = volume.chronicler().forget(gone).await {
            warn!(%migration, %error, "what is kept of a migration that has ended stays until the next time");
        }
    }
}

/// Remembers, as exactly as can be had, the copy that `migration` makes on this host, at the end of its daemon: what is under way there
/// arrives and is made durable, and what the copy lacks then is kept. Nothing is copied any more.
///
/// **N.B.** After the last guest's write: what is kept before it would have to be copied again. Behind a gate that is closed for the
/// handover nothing more is asked of the stores; what was kept last counts then.
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
        warn!(%migration, %error, "how far the copying is could not be kept in the end; the next daemon copies more again");
    }
}
