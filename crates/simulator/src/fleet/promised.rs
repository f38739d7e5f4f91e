//! What was promised is there, and what is released on the strength of it is the same at both hosts, durably.

use migration::MigrationId;
use migration::journal::{ImageLocation, MigratingVolume, MigrationState, Side, Stage, State};

use super::host::SimHost;
use super::place::Place;
use crate::journal::SimJournal;

impl SimHost {
    /// Remembers what volumes held when they were promised to be taken over. Nothing changes that from then on, until
    /// the promise is taken back or redeemed (design §5.11).
    pub(super) fn note_promises(&self, journal: &SimJournal) {
        journal.look(|state, _| {
            let mut promised = self.promised.borrow_mut();
            // What was promoted is still compared with what was promised.
            promised.retain(|id, _| {
                state.migrations.get(id).is_some_and(|m| !m.has_ended() || m.promotion.is_some())
            });
            for (id, migration) in state.unfinished() {
                match (&migration.side, &migration.stage) {
                    // A promise that comes late is overtaken by that of the next try.
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

    /// What volumes held when they were promised, if they are the ones of this migration.
    pub(super) fn promised(&self, id: MigrationId) -> Option<Vec<Vec<u64>>> {
        self.promised.borrow().get(&id).map(|(_, held)| held.clone())
    }

    /// What images of a migration hold.
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

    /// At the commit point, until the target owns the volumes, both disks hold the same, durably.
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
            // Of what is missing here there is one image, that at the target.
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
                    // What has come since it was flushed, of what it lacked, is not missed when it is lost.
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
