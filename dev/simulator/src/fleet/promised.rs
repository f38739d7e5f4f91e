//! Checks that promised volumes keep their content, and that released ones are durably equal at both hosts.

use migration::MigrationId;
use migration::journal::{ImageLocation, MigratingVolume, MigrationState, Side, Stage, State};

use super::host::SimHost;
use super::place::Place;
use crate::journal::SimJournal;

impl SimHost {
    /// Remembers the content of promised volumes. It must not change until the promise is withdrawn or fulfilled (design §5.11).
    pub(super) fn note_promises(&self, journal: &SimJournal) {
        journal.look(|state, _| {
            let mut promised = self.promised.borrow_mut();
            // Promoted volumes are still compared with the promise.
            promised.retain(|id, _| {
                state.migrations.get(id).is_some_and(|m| !m.has_ended() || m.promotion.is_some())
            });
            for (id, migration) in state.unfinished() {
                match (&migration.side, &migration.stage) {
                    // A late promise is superseded by that of the next attempt.
                    (Side::Incoming { .. }, Stage::Prepared(attempt))
                        if promised.get(&id).is_none_or(|(of, _)| of != attempt) =>
                    {
                        let found = self.content_at(migration, |moving| &moving.target);
                        promised.insert(id, (*attempt, found));
                    }
                    (_, Stage::Copying) => drop(promised.remove(&id)),
                    _ => {}
                }
            }
        });
    }

    pub(super) fn promised(&self, id: MigrationId) -> Option<Vec<Vec<u64>>> {
        self.promised.borrow().get(&id).map(|(_, held)| held.clone())
    }

    pub(super) fn content_at(
        &self,
        migration: &MigrationState,
        image: impl Fn(&MigratingVolume) -> &ImageLocation,
    ) -> Vec<Vec<u64>> {
        let images = self.images.borrow();
        let content = |moving: &MigratingVolume| {
            let disk = images.get(image(moving).place.name());
            disk.map(|disk| disk.with_medium(|medium| medium.current().to_vec())).unwrap_or_default()
        };
        migration.volumes.iter().map(content).collect()
    }

    /// Checks that from the commit point until the target owns the volumes, both disks are durably equal.
    pub(super) fn check_released(&self) {
        let released: Vec<_> = {
            let state = self.journal().acknowledged();
            let unfinished = state.unfinished().filter(|(_, m)| matches!(m.stage, Stage::Released(_)));
            unfinished.map(|(id, migration)| (id, migration.clone())).collect()
        };
        for (id, migration) in released {
            if migration.side == Side::OneHost {
                self.check_same(id, &migration, self);
                continue;
            }
            let fleet = self.fleet();
            let target = fleet.as_ref().zip(migration.side.peer());
            let Some(target) = target.map(|(fleet, (peer, _))| fleet.host(Place::of(peer))) else {
                continue;
            };
            let promised = target.journal().look(|acknowledged, possible| {
                let promised = |state: &State| match state.incoming(self.place.host(), id)?.1.stage {
                    Stage::Prepared(attempt) => Some(Stage::Released(attempt)),
                    _ => None,
                };
                promised(acknowledged).filter(|_| possible.iter().all(|state| promised(state).is_some()))
            });
            let Some(promised) = promised else { continue };
            if promised != migration.stage {
                let detail = || format!("{id} is {:?} on the promise of {promised:?}", migration.stage);
                self.world.violated("owner", detail);
            }
            if migration.hollow_now().is_none() {
                self.check_same(id, &migration, target);
            }
        }
    }

    fn check_same(&self, id: MigrationId, migration: &MigrationState, target: &Self) {
        let there = target.journal().look(|state, _| {
            state.incoming(self.place.host(), id).map(|(_, incoming)| incoming.volumes.clone())
        });
        let there = there.unwrap_or_else(|| migration.volumes.clone());
        for (moving, there) in migration.volumes.iter().zip(&there) {
            let source = self.images.borrow().get(moving.source.place.name()).cloned();
            let copy = target.images.borrow().get(there.target.place.name()).cloned();
            let (Some(source), Some(copy)) = (source, copy) else {
                self.world.violated("owner", || format!("an image of {id} is gone at the commit point"));
                continue;
            };
            // Missing blocks have one image only, at the target.
            let Some(held) =
                self.left_whole(moving.volume, source.with_medium(|medium| medium.current().to_vec()))
            else {
                continue;
            };
            let lacks = self.journal().look(|state, _| state.fillings.contains_key(&moving.volume));
            source.with_medium(|source| {
                copy.with_medium(|copy| {
                    let mut pairs = held.iter().zip(copy.current());
                    if let Some(sector) = pairs.position(|(source, copy)| source != copy) {
                        let (here, there) = (held[sector], copy.current()[sector]);
                        self.world.violated("content", || {
                            format!("{id} is released, and sector {sector} is {here:x} here, {there:x} there")
                        });
                    }
                    // Blocks that arrived after the flush may be lost: they can be fetched again.
                    for (medium, name, is_left) in [(source, "source", lacks), (copy, "target", false)] {
                        if !medium.is_durable() && !is_left {
                            let detail = || format!("{id} is released and the {name} is not durable");
                            self.world.violated("content", detail);
                        }
                    }
                });
            });
        }
    }
}
