//! Applies the records of a handover to a host's volumes and reservations.

use chronicle::{Generation, StayId};

use super::image::{ImageLocation, Reservation, ReservedContent};
use super::record::MigratingVolume;
use super::side::{Branch, Moved, Promotion, Side};
use super::stage::Stage;
use super::state::{Inconsistent, MigrationState, State, VolumeState};
use crate::identity::{MigrationId, VolumeId};
use crate::planted::{Bug, broken};

impl State {
    /// Applies *released*: the volumes of an outgoing migration leave this host. On one host that happens at *owned*.
    pub(super) fn volumes_leave(
        &mut self,
        at_unix_ms: u64,
        migration: MigrationId,
        generations: &[(VolumeId, Generation)],
    ) -> Result<(), Inconsistent> {
        let state = self.migration(migration)?.clone();
        let Side::Outgoing { peer, peer_name, forwarding, .. } = &state.side else { return Ok(()) };
        for moving in &state.volumes {
            // A repeated record finds them moved already.
            if self.moved.get(&moving.volume).is_some_and(|moved| moved.migration == migration) {
                continue;
            }
            let volume = self.volumes.remove(&moving.volume);
            let volume = volume.ok_or(Inconsistent::UnknownVolume(moving.volume))?;
            let generation =
                generation_of(moving.volume, generations).unwrap_or_else(|| volume.record.generation.next());
            let moved = Moved {
                volume,
                migration,
                host: *peer,
                host_name: peer_name.clone(),
                generation,
                forwarding: *forwarding,
                at_unix_ms,
            };
            self.attachment_goes(moving.volume, moved.host, true);
            self.moved.insert(moving.volume, moved);
        }
        self.fence_sources(migration, &state);
        Ok(())
    }

    /// Applies *owned* or *promoted*: the volumes are at the target.
    pub(super) fn volumes_arrive(
        &mut self,
        at_unix_ms: u64,
        migration: MigrationId,
        generations: &[(VolumeId, Generation)],
    ) -> Result<(), Inconsistent> {
        let state = self.migration(migration)?.clone();
        match &state.side {
            Side::OneHost => {
                self.fence_sources(migration, &state);
                self.change_images(&state, generations, |moving| &moving.target)?;
            }
            Side::Incoming { peer, volumes, .. } => {
                for record in volumes {
                    let mut record = record.clone();
                    if let Some(generation) = generation_of(record.volume, generations) {
                        record.generation = generation;
                    }
                    self.reservations.remove(&record.image.place);
                    self.take_departed(record.volume);
                    self.attachments_return(record.volume, *peer);
                    if let Some(moved) = self.moved.remove(&record.volume) {
                        self.migration(migration)?.returning.push(moved);
                    }
                    let stay = StayId::Arrived(migration.0);
                    let volume = VolumeState { stay, added_unix_ms: at_unix_ms, resizing_to: None, record };
                    self.volumes.insert(volume.record.volume, volume);
                }
            }
            Side::Outgoing { .. } => {}
        }
        Ok(())
    }

    /// Applies *handed back*: the volumes are at the source.
    pub(super) fn volumes_return(
        &mut self,
        migration: MigrationId,
        generations: &[(VolumeId, Generation)],
    ) -> Result<(), Inconsistent> {
        let state = self.migration(migration)?.clone();
        self.reserve_targets(migration, &state, ReservedContent::HalfMade);
        match state.side {
            Side::OneHost => self.change_images(&state, generations, |moving| &moving.source)?,
            Side::Outgoing { .. } => {
                for moving in &state.volumes {
                    let Some(moved) = self.moved.remove(&moving.volume) else { continue };
                    self.attachment_goes(moving.volume, moved.host, false);
                    let mut volume = moved.volume;
                    volume.record.generation =
                        generation_of(moving.volume, generations).unwrap_or_else(|| moved.generation.next());
                    self.reservations.remove(&volume.record.image.place);
                    self.volumes.insert(moving.volume, volume);
                }
            }
            Side::Incoming { .. } => {
                for moving in &state.volumes {
                    self.volumes.remove(&moving.volume);
                }
                let returning = std::mem::take(&mut self.migration(migration)?.returning);
                self.moved.extend(returning.into_iter().map(|moved| (moved.volume.record.volume, moved)));
            }
        }
        Ok(())
    }

    /// Forgets where a volume went. Refused while its migration is unfinished, because no other trace of the volume exists.
    pub(super) fn forget_moved(&mut self, volume: VolumeId) -> Result<(), Inconsistent> {
        let moved = self.moved.get(&volume).ok_or(Inconsistent::UnknownVolume(volume))?;
        let migration = moved.migration;
        let is_under_way = |state: &&MigrationState| !state.has_ended() && !broken(Bug::ForgottenUnderWay);
        if let Some(state) = self.migrations.get(&migration).filter(is_under_way) {
            let stage = state.stage.clone();
            return Err(Inconsistent::OutOfOrder { migration, stage, record: "forgotten" });
        }
        self.moved.remove(&volume);
        self.take_departed(volume);
        Ok(())
    }

    pub(super) fn open_branches(
        &mut self,
        migration: MigrationId,
        promotion: &Promotion,
    ) -> Result<(), Inconsistent> {
        let state = self.migration(migration)?;
        let repeated = state.promotion.replace(promotion.clone()).is_some();
        let side = state.side.clone();
        let Promotion::Force { branches } = promotion else { return Ok(()) };
        let shared = |volume: VolumeId| match &side {
            Side::Incoming { volumes, .. } => {
                volumes.iter().find(|record| record.volume == volume).map(|record| record.generation)
            }
            Side::Outgoing { .. } => self.moved.get(&volume).map(|left| left.volume.record.generation),
            Side::OneHost => None,
        };
        let begun = branches.iter().filter(|_| !repeated);
        let begun = begun.filter_map(|(volume, id)| Some((*volume, *id, shared(*volume)?)));
        for (volume, id, from) in begun.collect::<Vec<_>>() {
            self.branches.entry(volume).or_default().push(Branch { id, migration, from });
        }
        Ok(())
    }

    /// Fences those targets whose content outlasts a volume.
    pub(super) fn reserve_targets(
        &mut self,
        migration: MigrationId,
        state: &MigrationState,
        content: ReservedContent,
    ) {
        if state.side.has_target() {
            self.fence(migration, state, content, |moving| &moving.target);
        }
    }

    fn fence_sources(&mut self, migration: MigrationId, state: &MigrationState) {
        let left = if state.keep_source { ReservedContent::Kept } else { ReservedContent::Left };
        self.fence(migration, state, left, |moving| &moving.source);
    }

    fn fence(
        &mut self,
        migration: MigrationId,
        state: &MigrationState,
        content: ReservedContent,
        image: impl Fn(&MigratingVolume) -> &ImageLocation,
    ) {
        for (moving, volume) in state.volumes.iter().zip(&state.names) {
            let place = &image(moving).place;
            if place.outlasts_its_volume() {
                self.reservations
                    .insert(place.clone(), Reservation { volume: volume.clone(), migration, content });
            }
        }
    }

    fn change_images(
        &mut self,
        state: &MigrationState,
        generations: &[(VolumeId, Generation)],
        image: impl Fn(&MigratingVolume) -> &ImageLocation,
    ) -> Result<(), Inconsistent> {
        for moving in &state.volumes {
            let image = image(moving);
            self.reservations.remove(&image.place);
            let volume = self.volume(moving.volume)?;
            volume.record.image.clone_from(image);
            if let Some(generation) = generation_of(moving.volume, generations) {
                volume.record.generation = generation;
            }
        }
        Ok(())
    }
}

impl MigrationState {
    /// Returns the attempt for which this host has promised, released or owned something; [`crate::Attempt::NONE`] before.
    pub fn attempt(&self) -> crate::Attempt {
        match self.stage {
            Stage::Prepared(attempt) | Stage::Released(attempt) | Stage::Owned(attempt) => attempt,
            Stage::Copying | Stage::HandedBack | Stage::Discarding(_) | Stage::Ended(_) => {
                crate::Attempt::NONE
            }
        }
    }
}

fn generation_of(volume: VolumeId, generations: &[(VolumeId, Generation)]) -> Option<Generation> {
    generations.iter().find(|(id, _)| *id == volume).map(|(_, generation)| *generation)
}
