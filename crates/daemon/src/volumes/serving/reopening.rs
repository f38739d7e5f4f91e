//! Opens the stores of volumes whose last operation was interrupted, or that are at another host.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use block::store::image::Patience;
use block::store::{Holder, Opened};
use lane::LaneStore;
use migration::journal::{Moved, Record, VolumeRecord};
use migration::{VolumeId, VolumeIndex};

use crate::error::RequestError;
use crate::host::{Serving, blocking};
use crate::images::growing::{self, Grown};
use crate::images::opening;
use crate::peers::channel::{Kind, Subject};

/// How long resumed migrations wait for the last writes of a killed daemon.
const GHOST_WAIT_MAX: Duration = Duration::from_secs(10);

impl Serving {
    pub(crate) fn store_elsewhere(&self, moved: &Moved) -> Result<LaneStore, RequestError> {
        let session = self.hosts.session_with(moved.host)?;
        let (source, migration, id) = (self.peers.own(), moved.migration, moved.volume.record.volume);
        let volume = self.journal.read(|state| {
            if state.attachment_of(id).is_some_and(|attached| !attached.has_left) {
                // The number is that of the attachment, which has one volume.
                return Some(VolumeIndex(0));
            }
            let volumes = &state.migrations.get(&migration)?.volumes;
            VolumeIndex::all(volumes.len())
                .zip(volumes)
                .find(|(_, moving)| moving.volume == id)
                .map(|(index, _)| index)
        });
        let subject = |volume| Subject { kind: Kind::Forwarding, source, migration, volume };
        // A migration is not forgotten while a volume that left by it is forwarded.
        let forgotten = || RequestError::Internal(format!("the journal has forgotten migration {migration}"));
        let line = self.peers.line(&session, subject(volume.ok_or_else(forgotten)?));
        Ok(LaneStore::Elsewhere { channel: line, size_bytes: moved.volume.record.size_bytes })
    }

    /// Opens the image of a volume whose migration is resumed, after the last writes of a killed daemon.
    pub(crate) async fn open_for_resuming(&self, record: &VolumeRecord) -> Result<Opened, RequestError> {
        let (record, deadline) = (record.clone(), Instant::now() + GHOST_WAIT_MAX);
        let finder = self.finders.of(&record.name);
        let image = record.image.clone();
        let patience =
            move |_: &Holder| if Instant::now() < deadline { Patience::Wait } else { Patience::GiveUp };
        let custody = self.custody.clone();
        let opened = blocking(move || opening::open(&custody, &record, None, &finder, patience)).await?;
        Ok(self.stores.impair(&image, opened))
    }

    /// Forgets where a volume went. Forwarded clients are disconnected.
    pub(crate) async fn forget_moved(&self, volume: VolumeId) -> Result<(), RequestError> {
        Ok(self.journal.commit(vec![Record::MovedForgotten { volume }]).await?)
    }

    /// Brings the image of a volume to the size in the journal, after an interrupted growth. A volume that cannot grow keeps
    /// its old size, so that its guest does not wait for space. Fails if the image cannot be used now.
    pub(crate) async fn finish_resize(
        self: &Arc<Self>,
        name: &str,
        attempt: &Arc<AtomicBool>,
    ) -> Result<(), RequestError> {
        let interrupted = self.journal.read(|state| {
            let (_, volume) = state.volume_named(name)?;
            Some((volume.record.clone(), volume.resizing_to?))
        });
        let Some((record, size)) = interrupted else { return Ok(()) };
        tracing::warn!(volume = %name, from = record.size_bytes, to = size, "ending a resize that was interrupted");
        let (volume, former) = (record.volume, record.size_bytes);
        let (host, given_up) = (Arc::clone(self), Arc::clone(attempt));
        let grown = blocking(move || {
            let image = host.wait_for_image(&record, Some(size), &given_up)?;
            Ok(growing::finish(image, size)?)
        });
        let size_bytes = match grown.await? {
            Grown::Larger => size,
            Grown::AsBefore(error) => {
                tracing::error!(volume = %name, %error, "the volume keeps the size that it had");
                former
            }
        };
        Ok(self.journal.commit(vec![Record::Resized { volume, size_bytes }]).await?)
    }
}
