//! Serves a volume that is being reverted: its lane makes it equal to the snapshot before any client is let in.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use block::store::Opened;
use block::store::image::Patience;
use lane::{LaneHandle, Refused, Reverted};
use migration::VolumeId;
use migration::journal::VolumeRecord;

use super::Serving;
use crate::error::RequestError;
use crate::host::blocking;
use crate::images::opening;
use crate::volumes::registry::Service;

/// The time between two reports of the progress.
const SAID_EVERY: Duration = Duration::from_secs(1);

/// The snapshot that a volume becomes equal to.
pub(super) struct Snapshot {
    name: String,
    store: Opened,
}

impl Serving {
    /// Opens the snapshot that a volume is being reverted to; `None`: it is not.
    pub(super) async fn snapshot_to_revert_to(
        self: &Arc<Self>,
        record: &VolumeRecord,
    ) -> Result<Option<Snapshot>, RequestError> {
        let ordered = self.journal.read(|state| {
            let snapshot = state.reverts.get(&record.volume)?;
            Some(state.volumes.get(snapshot).map(|known| known.record.clone()))
        });
        let volume = &record.name;
        let Some(snapshot) = ordered else { return Ok(None) };
        let lost = |why: String| RequestError::VolumeUnavailable {
            volume: volume.clone(),
            reason: format!(
                "it was to be reverted to a snapshot, perhaps a part of it is, and {why}. Bring the snapshot back; or revert it to \
                 another one: sterna volume revert {volume} SNAPSHOT; or remove it: sterna volume remove {volume}"
            ),
        };
        let Some(snapshot) = snapshot else {
            return Err(lost("the snapshot is not here".to_owned()));
        };
        match self.open_snapshot(&snapshot).await {
            Ok(store) => Ok(Some(Snapshot { name: snapshot.name, store })),
            Err(error) => Err(lost(format!("{} cannot be opened: {}", snapshot.name, error.message()))),
        }
    }

    /// Opens the image of a snapshot: the one that is there now, not the one that its lane has open.
    pub(crate) async fn open_snapshot(
        self: &Arc<Self>,
        snapshot: &VolumeRecord,
    ) -> Result<Opened, RequestError> {
        let (host, snapshot) = (Arc::clone(self), snapshot.clone());
        blocking(move || {
            let finder = host.finders.of(&snapshot.name);
            let store = opening::open(&host.custody, &snapshot, None, &finder, |_| Patience::GiveUp)?;
            Ok(host.stores.impair(&snapshot.image, store))
        })
        .await
    }

    /// Reverts a volume whose lane has begun; it serves clients then. After an error the lane has ended.
    pub(super) async fn revert(
        self: &Arc<Self>,
        record: &VolumeRecord,
        lane: &LaneHandle,
        snapshot: Snapshot,
        attempt: &Arc<AtomicBool>,
    ) -> Result<(), RequestError> {
        let shared = Arc::<Reverted>::default();
        let reverting = lane.revert(snapshot.store, Arc::clone(&shared));
        tokio::pin!(reverting);
        let reverted = loop {
            let percent = 100 * shared.bytes_done.load(Ordering::Relaxed) / record.size_bytes.max(1);
            let reason = format!("it is being reverted to {}: {percent} %", snapshot.name);
            self.volumes.set(&record.name, attempt, Service::Waiting(reason));
            tokio::select! {
                reverted = &mut reverting => break reverted,
                () = tokio::time::sleep(SAID_EVERY) => {}
                () = self.given_up(attempt) => break Err(Refused::Ended),
            }
        };
        let Err(refused) = reverted else { return Ok(()) };
        lane.stop(self.limits.now().stop_wait_max).await;
        let (volume, snapshot) = (record.name.clone(), &snapshot.name);
        let advice = match &refused {
            Refused::Unwritten(error) if error.is_no_space() => {
                "Make room in its store, and it goes on by itself"
            }
            _ => "If that stays so, repair the disk",
        };
        let reason = format!(
            "it is reverted to {snapshot} in part only, and tried again: {refused}. {advice}; or revert it to another snapshot: sterna \
             volume revert {volume} SNAPSHOT; or remove it: sterna volume remove {volume}"
        );
        Err(RequestError::VolumeUnavailable { volume, reason })
    }

    /// Returns the volume that is reverted to this snapshot at present.
    pub(crate) fn reverting_to(&self, snapshot: VolumeId) -> Option<String> {
        self.journal.read(|state| {
            let volume = state.reverting_to(snapshot)?;
            Some(state.volumes.get(&volume)?.record.name.clone())
        })
    }
}
