//! What the journal says, and what it lets be done with the images.

use migration::journal::Stage;

use super::Host;
use crate::checker::owner::{Permission, permission, wrong_generation};
use crate::disk::Role;
use crate::journal::SimJournal;

impl Host {
    /// What is true, or may be, has changed: so has what may be done with the images.
    pub(super) fn journal_changed(&self, journal: &SimJournal) {
        let wrong = journal.look(|acknowledged, possible| {
            for (path, disk) in self.images.borrow().iter() {
                let certain = permission(acknowledged, path);
                let allowed =
                    possible.iter().map(|state| permission(state, path)).fold(certain, Permission::min);
                disk.set_permission(allowed);
            }
            let wrong = wrong_generation(&self.state.borrow(), acknowledged);
            *self.state.borrow_mut() = acknowledged.clone();
            wrong
        });
        if let Some(wrong) = wrong {
            self.world.violated("owner", || wrong);
        }
        self.check_released();
        if journal.is_closed() {
            self.give_up_soon();
        }
    }

    /// At the commit point both stores hold the same, durably.
    pub(super) fn check_released(&self) {
        let state = self.state.borrow();
        for (id, migration) in state.unfinished() {
            if !matches!(migration.stage, Stage::Released(_)) {
                continue;
            }
            for moving in &migration.volumes {
                let images = self.images.borrow();
                let (Some(source), Some(target)) =
                    (images.get(moving.source.place.name()), images.get(moving.target.place.name()))
                else {
                    self.world.violated("owner", || format!("an image of {id} is gone at the commit point"));
                    continue;
                };
                source.with_medium(|source| {
                    target.with_medium(|target| {
                        let pairs = source.current().iter().zip(target.current());
                        if let Some(sector) = pairs.clone().position(|(source, target)| source != target) {
                            let (here, there) = (source.current()[sector], target.current()[sector]);
                            self.world.violated("content", || {
                                format!("{id} is released, and sector {sector} is {here:x} at the source, {there:x} at the target")
                            });
                        }
                        if !target.is_durable() {
                            self.world.violated("content", || format!("{id} is released to a target that is not durable"));
                        }
                        if !source.is_durable() {
                            self.world.violated("content", || format!("{id} is released by a source that is not durable"));
                        }
                    });
                });
            }
        }
    }

    /// Deletes an image; `false` if it is not there.
    pub(crate) fn delete_image(&self, path: &str) -> bool {
        self.check_deletion(path);
        self.world.note("delete", 0, 0);
        let image = self.images.borrow_mut().remove(path);
        // What a stopped copying still asks of it is of no concern to the next migration.
        image.inspect(|image| image.set_role(Role::Bystander)).is_some()
    }

    /// Keeps an image under another name.
    pub(crate) fn fence_image(&self, path: &str) {
        self.check_deletion(path);
        let image = self.images.borrow_mut().remove(path);
        if let Some(image) = image {
            image.set_permission(Permission::Forbidden);
            let fenced = format!("{path}.fenced");
            self.excused.borrow_mut().insert(fenced.clone());
            self.images.borrow_mut().insert(fenced, image);
        }
    }

    /// Somebody was told that the image could not be dealt with.
    pub(crate) fn excuse_image(&self, path: &str) {
        self.excused.borrow_mut().insert(path.to_owned());
    }

    pub(super) fn check_deletion(&self, path: &str) {
        let owns = self.journal.look(|acknowledged, possible| {
            std::iter::once(acknowledged)
                .chain(possible)
                .any(|state| permission(state, path) == Permission::Owner)
        });
        if owns {
            self.world.violated("owner", || format!("{path} is deleted, and owns a volume"));
        }
    }
}
