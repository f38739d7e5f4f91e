//! Takes back volumes that left this host with blocks missing, before these have followed, into the images that they left.
//!
//! ```text
//!   offered ─► the departure's driver is set aside ─► started, durably ─► written, while missing blocks are read
//!                                                                  │                  └─► owned here ─► the departure has ended
//!                                                                  └─► fails ─► the departure continues as before
//! ```
//! The journal decides which host may do this (`State::reservoir_for`). Until the journal has the end of this migration, the
//! departure has no driver, and its images are not deleted.

use std::sync::Arc;
use std::time::{Duration, Instant};

use chronicle::Generation;
use futures_util::future::join_all;
use lane::{Aside, LaneHandle, Refused};
use migration::journal::{ImageLocation, Moved, Outcome};
use migration::session::{Event, VmPlace};
use migration::wire::{Offer, OfferedStrategy, OfferedVolume, SurveyedPlace};
use migration::{HostId, MigrationId, StayKey, VolumeId};
use tokio::time::timeout;

use crate::error::RequestError;
use crate::host::{Arrivals, blocking};
use crate::vms::{Standing, VmError};

/// How long this waits until a departure's driver can be set aside.
const SET_ASIDE_MAX: Duration = Duration::from_secs(5);
const SET_ASIDE_POLL: Duration = Duration::from_millis(50);

/// A departure whose driver was set aside. Dropping this makes its session check the journal for what to do.
pub(crate) struct SetAside {
    host: Arc<Arrivals>,
    left_by: MigrationId,
}

impl Drop for SetAside {
    fn drop(&mut self) {
        self.host.sessions.tell(self.left_by, Event::DriverLost);
    }
}

impl Arrivals {
    /// Returns the migration by which the offered volumes left, if they return to the images that they left; `None`: they come
    /// like any others. Errors: [`RequestError::Invalid`]: the offer names another place for them.
    pub(crate) fn takes_back(
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
                    "\"{name}\" lacks blocks that are in the store \"{store}\", as {format}: until it is complete, it can move \
                     only there; leave the store and the format out, or wait until it is complete"
                );
                return Err(RequestError::Invalid(text));
            }
        }
        Ok(Some(left_by))
    }

    /// Refuses to take volumes back into images of which a flush failed during their residency. Earlier writes may be gone from
    /// them, or go at any time, and the owner may have read these before. Other errors are the system's.
    pub(crate) async fn check_images_left(&self, offer: &Offer) -> Result<(), RequestError> {
        let left = offer.volumes.iter().filter_map(|offered| {
            let stay = self.left(offered.volume)?.volume.stay;
            Some((offered.name.clone(), StayKey { volume: offered.volume, stay }))
        });
        let (left, chronicles) = (left.collect::<Vec<_>>(), self.chronicles.clone());
        blocking(move || match left.into_iter().find(|(_, key)| !chronicles.vouches(*key)) {
            None => Ok(()),
            Some((name, _)) => Err(RequestError::Invalid(format!(
                "\"{name}\" lacks blocks that an image here has, and that image may have lost other blocks: a flush of it has \
                 failed, or could not be recorded; wait until the volume is complete: its return then copies everything"
            ))),
        })
        .await
    }

    /// Returns the image that a volume returns to, the migration by which it left, and the image's generation.
    pub(crate) fn left_image(&self, volume: VolumeId) -> Option<(ImageLocation, (MigrationId, Generation))> {
        let Moved { volume, migration, .. } = self.left(volume)?;
        Some((volume.record.image, (migration, volume.record.generation)))
    }

    fn left(&self, volume: VolumeId) -> Option<Moved> {
        self.journal.read(|state| state.moved.get(&volume).cloned())
    }

    pub(crate) fn place_of_left(&self, offered: &OfferedVolume) -> Option<SurveyedPlace> {
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

    /// Ends the drivers of a departure on these lanes; an owner still reads missing blocks here. Fails if the departure is not
    /// as far as `aside` says, or has just ended.
    pub(crate) async fn set_aside(
        self: &Arc<Self>,
        left_by: MigrationId,
        aside: Aside,
        lanes: &[(String, LaneHandle)],
    ) -> Result<SetAside, RequestError> {
        let deadline = Instant::now() + SET_ASIDE_MAX;
        loop {
            let asked = join_all(lanes.iter().map(|(_, lane)| lane.set_aside(left_by, aside))).await;
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

    /// Lets a VM return that left with volumes which now return. It runs where the volumes are, and its remains here are of no
    /// use. **N.B.** only once the driver of its departure is set aside. This happens only in *filling*, when the VM runs at the
    /// other host. Fails if the rest of its memory is here, or if its departure cannot be recorded.
    pub(crate) async fn let_vm_come_again(
        self: &Arc<Self>,
        left_by: MigrationId,
        vm: &str,
    ) -> Result<(), RequestError> {
        let names = self.journal.read(|state| state.migrations.get(&left_by).map(|left| left.names.clone()));
        let leaves = names.and_then(|names| self.vm_orders.vm_of_departure(&names));
        if leaves.as_deref() == Some(vm) {
            if timeout(SET_ASIDE_MAX, self.moving.memory_has_gone(left_by)).await.is_err() {
                let (vm, why) = (vm.to_owned(), "has memory here that follows it");
                return Err(VmError::Busy { vm, why }.into());
            }
            let hooks = self.moving.forget(left_by, VmPlace::Elsewhere).await;
            if let Some(hooks) = hooks {
                // It may take long, and nothing waits for it.
                tokio::spawn(async move { hooks.after(&moved()).await });
            }
            self.vm_orders.note_vm(vm, Standing::Leaving, VmPlace::Elsewhere).await?;
        }
        self.vm_orders.check_vm_name(vm)
    }

    /// Has a departure check whether it can be resumed or has ended.
    pub(crate) fn look_again(&self, left_by: MigrationId) {
        self.sessions.tell(left_by, Event::LookAgain);
    }
}

fn moved() -> Outcome {
    Outcome::Moved { left_over: String::new() }
}
