//! Incomplete volumes return to the host that has the missing blocks, into the images that they left.

use futures_channel::oneshot;
use std::rc::Rc;

use block::BlockDevice;
use chronicle::Generation;
use lane::filling::FillingStore;
use migration::journal::{FailureCode, MigratingVolume, MigrationState, Outcome, Side, Stage};
use migration::strategy::Strategy;
use migration::{Failure, MigrationId, Phase, StayKey, VolumeId};

use super::host::SimHost;
use super::place::Place;
use super::vm_note::VmNote;

/// The store name in a migration that returns volumes to their missing blocks.
pub(super) const GOES_BACK: &str = "where what is missing is";

/// A driver that was ended early: its session learns of it when this is dropped.
pub(super) struct SetAside(Option<oneshot::Sender<Option<Outcome>>>);

impl SetAside {
    pub(super) fn new(session: oneshot::Sender<Option<Outcome>>) -> Self {
        Self(Some(session))
    }
}

impl Drop for SetAside {
    fn drop(&mut self) {
        let _ = self.0.take().map(|session| session.send(None));
    }
}

pub(super) fn goes_back(known: &MigrationState) -> bool {
    matches!(&known.side, Side::Outgoing { store, .. } if store == GOES_BACK)
}

impl SimHost {
    /// Returns the strategy of a migration's volumes. Volumes that return to their missing blocks are copied completely.
    pub(super) fn strategy_of(&self, known: &MigrationState) -> Strategy {
        if goes_back(known) { self.manner.strategy_back } else { self.manner.strategy }
    }

    pub(super) fn filling_of(&self, index: usize) -> Option<Rc<FillingStore>> {
        let filling = self.with_serving(|serving| serving.fillings.get(index)?.upgrade())?;
        filling.filter(|filling| filling.lacks_blocks())
    }

    pub(super) fn lacks_blocks(&self) -> bool {
        (0..self.manner.block_sizes.len()).any(|index| self.filling_of(index).is_some())
    }

    /// Returns the host to which incomplete volumes may return, if they have nothing else to do.
    pub(super) fn may_go_back_to(&self) -> Option<Place> {
        let serving = self.serving.borrow();
        let rests =
            serving.as_ref()?.sessions.is_empty() && !self.is_stopping.get() && !self.has_unsettled_vm();
        let from = self.journal().look(|state, possible| {
            let rests = rests && possible.is_empty() && state.unfinished().next().is_none();
            state.fillings.values().next().map(|filling| filling.peer).filter(|_| rests)
        })?;
        Some(Place::of(from))
    }

    /// Returns the departure of the offered volumes, if they may return into the images that they left.
    pub(super) fn may_take_back(&self, from: Place, offered: &MigrationState) -> Option<MigrationId> {
        let volumes: Vec<_> = offered.volumes.iter().map(|moving| moving.volume).collect();
        let (left_by, left) = self.journal().look(|state, possible| {
            let left_by = state.reservoir_for(from.host(), &volumes).filter(|_| possible.is_empty())?;
            let stay = |volume: &VolumeId| state.moved.get(volume).map(|moved| moved.volume.stay);
            let left =
                volumes.iter().filter_map(|volume| Some(StayKey { volume: *volume, stay: stay(volume)? }));
            Some((left_by, left.collect::<Vec<_>>()))
        })?;
        // After a failed flush old data may vanish, although its owner may have read it before.
        if !left.into_iter().all(|key| self.chronicles.vouches(key)) {
            return None;
        }
        let serving = self.serving.borrow();
        let serving = serving.as_ref().filter(|serving| serving.sessions.len() == 1)?;
        let source = serving.source.borrow();
        let is_filling = source.as_ref()?.driver.phase() == Phase::Filling;
        (is_filling && !self.is_stopping.get() && goes_back(offered)).then_some(left_by)
    }

    pub(super) async fn set_aside(&self, left_by: MigrationId) -> Result<SetAside, Failure> {
        let gone = || Failure { code: FailureCode::Internal, detail: "it is over".to_owned() };
        let (asked, given) = oneshot::channel();
        let is_asked = self.with_serving(|serving| {
            let mut source = serving.source.borrow_mut();
            let half = source.as_mut().filter(|half| half.driver.migration() == left_by);
            let half = half.filter(|half| half.driver.phase() == Phase::Filling)?;
            half.set_aside.take()?.send(asked).ok()
        });
        is_asked.flatten().ok_or_else(gone)?;
        given.await.map_err(|_| gone())
    }

    pub(super) async fn let_vm_come_again(&self) -> Result<(), Failure> {
        if self.vm_note.get() != VmNote::Leaving {
            return Ok(());
        }
        let noted = self.note_vm(VmNote::Nothing).await;
        noted.map_err(|detail| Failure { code: FailureCode::Internal, detail })
    }

    pub(super) fn places_for(
        &self,
        offered: &[MigratingVolume],
        takes_back: Option<MigrationId>,
    ) -> Vec<MigratingVolume> {
        let left = takes_back.and_then(|id| {
            self.journal().look(|state, _| state.migrations.get(&id).map(|left| left.volumes.clone()))
        });
        let mut places = offered.to_vec();
        for moving in &mut places {
            let left = left.iter().flatten().find(|left| left.volume == moving.volume);
            if let Some(left) = left {
                moving.target = left.source.clone();
            }
        }
        places
    }

    /// Returns departure and generation of the images into which volumes return; `None` if they do not.
    pub(super) fn left_in_place(&self, recorded: &MigrationState) -> Option<(MigrationId, Generation)> {
        let moving = recorded.volumes.first()?;
        self.journal().look(|state, _| {
            let moved = state.moved.get(&moving.volume)?;
            let is_left = state.is_reservoir(moving.target.place.name());
            is_left.then_some((moved.migration, moved.volume.record.generation))
        })
    }

    pub(super) fn reopen_reservoirs(&self, peer: Place, left_by: MigrationId, coming: &MigrationState) {
        if !matches!(coming.stage, Stage::Copying | Stage::Prepared(_)) {
            return;
        }
        let reservoirs = coming.volumes.iter().enumerate().filter_map(|(index, moving)| {
            let disk = self.images.borrow().get(moving.target.place.name()).cloned()?;
            let reservoir = self.with_serving(|serving| serving.reservoir_of(index))?;
            reservoir.reopen(left_by, disk as Rc<dyn BlockDevice>);
            Some(reservoir)
        });
        self.offer_reservoirs_of(peer, left_by, &reservoirs.collect::<Vec<_>>());
    }
}
