//! Files that others put under the names of images, and a daemon that is killed and starts again meanwhile.

use migration::custody::{Opening, Owner, Step, may_promise, opening};
use migration::journal::{Entry, Frames, HEADER, Record, State, encode};
use migration::{MigrationId, VolumeId};

use super::World;
use super::life::{Act, place_of};

impl World {
    /// The daemon is killed. Until it starts again somebody exchanges files; what it cannot know it must not take for its own.
    pub(super) fn start_again(&mut self) {
        match read_anew(&self.state) {
            Ok(state) => self.state = state,
            Err(error) => self.violated(|| format!("a restart cannot read the journal: {error:#}")),
        }
        if self.random.percent(60) {
            self.exchange_one();
        }
        if self.random.percent(20) {
            let name = format!("/s/v{}.img.removed", self.random.below(5) + 1);
            if self.files.at(&name).is_none() {
                self.files.put_of_others(&name);
            }
        }
        self.open_volumes();
        self.clear_away();
    }

    /// Somebody puts another file in the place of one.
    fn exchange_one(&mut self) {
        let names: Vec<String> =
            self.files.names().into_iter().filter(|name| self.may_be_exchanged(name)).collect();
        if let Some(name) = self.one_of(&names) {
            self.files.swap(&name);
            self.say(|| format!("{name} is another file from now on"));
        }
    }

    /// What another host or a chain reads, or a program, is exchanged by nobody: the rules are not about that.
    fn may_be_exchanged(&self, name: &str) -> bool {
        let is_read = self.reservoirs.values().any(|reservoir| reservoir.path == name);
        let is_base =
            self.serving.values().any(|serving| serving.base.as_ref().is_some_and(|(path, ..)| path == name));
        let is_held = self.files.at(name).is_some_and(|object| self.files.is_held(object));
        name.starts_with("/s/") && !is_read && !is_base && !is_held
    }

    /// Every volume is opened anew by the name of its image.
    fn open_volumes(&mut self) {
        let volumes: Vec<(VolumeId, String)> = self
            .state
            .volumes
            .iter()
            .map(|(id, known)| (*id, known.record.image.place.name().to_owned()))
            .collect();
        for (volume, path) in volumes {
            let place = place_of(&path);
            let was_served = self.serving.remove(&volume);
            match opening(self.state.images.get(&place), self.files.lasting(&path)) {
                Opening::Refuse => {
                    self.say(|| format!("{volume} is not served: {path} is another file"));
                    self.accept(volume, &path);
                    continue;
                }
                Opening::Note(known) => self.commit(vec![Record::ImageKnown { place, known }]),
                Opening::Use => {}
            }
            let (Some(object), Some(mut serving)) = (self.files.at(&path), was_served) else { continue };
            if self.files.is_of_others(object) {
                self.violated(|| {
                    format!("{volume} is served from {path}, which somebody else has put there")
                });
            }
            serving.object = object;
            self.serving.insert(volume, serving);
        }
    }

    /// Somebody says that what has the name is the image: it is a backup that was put back.
    fn accept(&mut self, volume: VolumeId, path: &str) {
        let Some(object) = self.files.at(path).filter(|_| self.random.percent(40)) else { return };
        if !self.is_lockable(object) {
            return;
        }
        let known = self.known(path);
        self.commit(known.into_iter().collect());
        self.files.accept(object);
        self.say(|| format!("{volume} is served from what {path} is by order"));
        let serving = super::Serving { path: path.to_owned(), object, is_written: true, base: None };
        self.serving.insert(volume, serving);
    }

    /// What a removal that was interrupted has left goes.
    fn clear_away(&mut self) {
        let left: Vec<String> =
            self.files.names().into_iter().filter(|name| name.ends_with(".removed")).collect();
        for name in left {
            self.carry_out(Step::Discard, &Owner::Housekeeping, &name, &Act::Unlink);
        }
    }

    /// Somebody exchanges a target while it is filled.
    pub(super) fn exchange_target(&mut self) {
        let targets: Vec<String> = self.coming.values().map(|(_, path)| path.clone()).collect();
        let Some(path) = self.one_of(&targets).filter(|path| self.may_be_exchanged(path)) else { return };
        self.files.swap(&path);
        self.say(|| format!("the target {path} is another file from now on"));
    }

    /// Whether the name of a target leads to what was filled.
    pub(super) fn is_as_filled(&mut self, migration: MigrationId, path: &str) -> bool {
        let (place, found) = (place_of(path), self.files.lasting(path));
        let is_promised = may_promise(&place, self.state.images.get(&place), found.as_ref());
        let is_other = self.files.at(path).is_none_or(|object| self.files.is_of_others(object));
        if is_promised && is_other {
            self.violated(|| format!("{migration} promises {path}, which is not what it has filled"));
        }
        is_promised
    }
}

/// Returns the state that a daemon reads at its start: some of it is not in the snapshot itself.
fn read_anew(state: &State) -> anyhow::Result<State> {
    let mut bytes = HEADER.to_vec();
    encode(0, &Entry { at_unix_ms: 0, records: state.snapshot() }, &mut bytes)?;
    let mut read = State::default();
    for entry in Frames::new(&bytes)? {
        read.apply(&entry)?;
    }
    Ok(read)
}
