//! Volumes that left this host with blocks missing come back before these have followed, into the images that they have left.
//!
//! ```text
//!   offered ─► the driver of their departure is set aside ─► started, durably ─► written, while what is missing is read
//!                                                                  │                  └─► owned here ─► the departure has ended
//!                                                                  └─► comes to nothing ─► the departure goes on as it was
//! ```
//! Who may, the journal says (`State::reservoir_for`). Until it says that this migration is over, the departure has no driver, and
//! its images are deleted by nobody.

use std::sync::Arc;
use std::time::{Duration, Instant};

use chronicle::Generation;
use futures_util::future::join_all;
use lane::{LaneHandle, Refused};
use migration::journal::{ImageLocation, Moved, Outcome};
use migration::session::{Event, VmPlace};
use migration::wire::{Offer, OfferedStrategy, OfferedVolume, SurveyedPlace};
use migration::{HostId, MigrationId, StayKey, VolumeId};
use tokio::time::timeout;

use crate::error::RequestError;
use crate::host::{Host, blocking};
use crate::vms::{Standing, VmError};

/// How long a departure is waited for that is not as far yet as that its driver can be set aside.
const SET_ASIDE_MAX: Duration = Duration::from_secs(5);
/// How often it is looked meanwhile.
const SET_ASIDE_POLL: Duration = Duration::from_millis(50);

/// A departure whose driver was set aside. Its session hears of that when this is dropped: by then it is in the journal why it
/// cannot go on, or it can.
pub(in crate::host) struct SetAside {
    host: Arc<Host>,
    left_by: MigrationId,
}

impl Drop for SetAside {
    fn drop(&mut self) {
        self.host.sessions.tell(self.left_by, Event::DriverLost);
    }
}

impl Host {
    /// The migration by which volumes have left that are offered again, if they come back into the images that they have left;
    /// `None`: they come as others do.
    ///
    /// # Errors
    /// [`RequestError::Invalid`]: they were to go somewhere else.
    pub(in crate::host) fn takes_back(
        &self,
        peer: HostId,
        offer: &Offer,
    ) -> Result<Option<MigrationId>, RequestError> {
        let volumes: Vec<_> = offer.volumes.iter().map(|offered| offered.volume).collect();
        let left_by = self.journal.read(|state| state.reservoir_for(peer, &volumes));
        let is_copied = offer.strategy != OfferedStrategy::PostCopy;
        let Some(left_by) = left_by.filter(|_| is_copied) else { return Ok(None) };
        for offered in &offer.volumes {
            let Some(Moved { volume, .. }) = self.left(offered.volume) else { return Ok(None) };
            let image = &volume.record.image;
            let fits = (offer.store.is_empty() || offer.store == image.store)
                && offer.format.is_none_or(|format| format == image.format);
            if !fits {
                let (name, store, format) = (&offered.name, &image.store, image.format.name());
                let text = format!(
                    "\"{name}\" lacks blocks that are in the store \"{store}\", as {format}: until it has them it moves there \
                     only; leave the store and the format out, or wait until nothing is missing"
                );
                return Err(RequestError::Invalid(text));
            }
        }
        Ok(Some(left_by))
    }

    /// Refuses to take volumes back into images of which a flush has failed while they were here: what was written before may be gone
    /// from them, or go at any time, and their owner may have read it before that.
    ///
    /// # Errors
    /// [`RequestError::Invalid`] then; the system's.
    pub(in crate::host) async fn check_images_left(&self, offer: &Offer) -> Result<(), RequestError> {
        let left = offer.volumes.iter().filter_map(|offered| {
            let stay = self.left(offered.volume)?.volume.stay;
            Some((offered.name.clone(), StayKey { volume: offered.volume, stay }))
        });
        let (left, chronicles) = (left.collect::<Vec<_>>(), self.chronicles.clone());
        blocking(move || match left.into_iter().find(|(_, key)| !chronicles.vouches(*key)) {
            None => Ok(()),
            Some((name, _)) => Err(RequestError::Invalid(format!(
                "\"{name}\" lacks blocks that are here, in an image that may have lost others: a flush of it has failed, or what \
                 became of its flushes could not be recorded; wait until nothing is missing, then it comes as a whole"
            ))),
        })
        .await
    }

    /// The image that a volume comes back into, by which migration it was left, and of which generation it is.
    pub(in crate::host) fn left_image(
        &self,
        volume: VolumeId,
    ) -> Option<(ImageLocation, (MigrationId, Generation))> {
        let Moved { volume, migration, .. } = self.left(volume)?;
        Some((volume.record.image, (migration, volume.record.generation)))
    }

    fn left(&self, volume: VolumeId) -> Option<Moved> {
        self.journal.read(|state| state.moved.get(&volume).cloned())
    }

    /// Where a volume would come back to.
    pub(in crate::host) fn place_of_left(&self, offered: &OfferedVolume) -> Option<SurveyedPlace> {
        let (image, _) = self.left_image(offered.volume)?;
        let space = self.stores.get(&image.store).ok().and_then(|store| store.space().ok().flatten());
        Some(SurveyedPlace {
            volume: offered.volume,
            has_replica: true,
            place: image.place.name().to_owned(),
            store: image.store,
            format: image.format,
            free_bytes: space.map(|space| space.free),
        })
    }

    /// Ends the drivers of a departure on these lanes; what the volumes' owner lacks goes on to be read there.
    ///
    /// # Errors
    /// [`RequestError`]: the departure is not as far, or has ended just now.
    pub(in crate::host) async fn set_aside(
        self: &Arc<Self>,
        left_by: MigrationId,
        lanes: &[(String, LaneHandle)],
    ) -> Result<SetAside, RequestError> {
        let deadline = Instant::now() + SET_ASIDE_MAX;
        loop {
            let asked = join_all(lanes.iter().map(|(_, lane)| lane.set_aside(left_by))).await;
            match asked.into_iter().zip(lanes).find_map(|(asked, (name, _))| Some((asked.err()?, name))) {
                None => return Ok(SetAside { host: Arc::clone(self), left_by }),
                Some((Refused::TooLate(_), _)) if Instant::now() < deadline => {
                    tokio::time::sleep(SET_ASIDE_POLL).await;
                }
                Some((refused, name)) => {
                    let (volume, reason) = (name.clone(), refused.to_string());
                    return Err(RequestError::VolumeUnavailable { volume, reason });
                }
            }
        }
    }

    /// Lets a VM come again that has left with volumes which come back: it runs where they are, and what is here of it is of no use.
    ///
    /// **N.B.** Only once the driver of its departure is set aside, which is so in *filling* only: then it runs at the other host.
    ///
    /// # Errors
    /// [`RequestError`]: the rest of its memory is here, or that it has left cannot be noted.
    pub(in crate::host) async fn let_vm_come_again(
        self: &Arc<Self>,
        left_by: MigrationId,
        vm: &str,
    ) -> Result<(), RequestError> {
        let names = self.journal.read(|state| state.migrations.get(&left_by).map(|left| left.names.clone()));
        let leaves = names.and_then(|names| self.vm_of_departure(&names));
        if leaves.as_deref() == Some(vm) {
            if timeout(SET_ASIDE_MAX, self.moving.memory_has_gone(left_by)).await.is_err() {
                let (vm, why) = (vm.to_owned(), "has memory here that follows it");
                return Err(VmError::Busy { vm, why }.into());
            }
            let hooks = self.moving.forget(left_by, VmPlace::Elsewhere).await;
            if let Some(hooks) = hooks {
                // It may take long, and nobody waits for it.
                tokio::spawn(async move { hooks.after(&moved()).await });
            }
            self.note_vm(vm, Standing::Leaving, VmPlace::Elsewhere).await?;
        }
        self.check_vm_name(vm)
    }

    /// Has a departure look whether it goes on, or has ended.
    pub(in crate::host) fn look_again(&self, left_by: MigrationId) {
        self.sessions.tell(left_by, Event::LookAgain);
    }
}

fn moved() -> Outcome {
    Outcome::Moved { left_over: String::new() }
}
