//! Incomplete volumes return to the host that has the missing blocks, into the images that they left.

use futures_channel::oneshot;

use chronicle::Generation;
use lane::Aside;
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
        let is_filling = self.with_serving(|serving| {
            let source = serving.source.borrow();
            let half = source.as_ref().filter(|half| half.driver.migration() == left_by);
            half.is_some_and(|half| half.driver.phase() == Phase::Filling)
        });
        if is_filling != Some(true) {
            return Err(gone());
        }
        for lane in self.lanes().into_iter().flatten() {
            lane.lane.set_aside(left_by, Aside::Filling).await.map_err(|_| gone())?;
        }
        // N.B. the driver may have learned at this very instant that nothing is missing.
        let session =
            self.with_serving(|serving| serving.ends.remove(&left_by)).flatten().ok_or_else(gone)?;
        self.departure_ended(left_by, None);
        Ok(SetAside::new(session))
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

    pub(super) fn offer_reservoirs_again(&self, peer: Place, left_by: MigrationId, coming: &MigrationState) {
        if !matches!(coming.stage, Stage::Copying | Stage::Prepared(_)) {
            return;
        }
        self.offer_reservoirs(peer, left_by);
    }
}
