//! The events: the daemon's own steps, orders, and strangers between two of its steps.

use chronicle::Generation;
use migration::custody::{
    Book, Claim, Ending, Event, Found, Handling, Kind, KnownImage, Object, Owner, Purpose, Step, Todo, Word,
    completed_by,
};
use migration::filling::Manifest;
use migration::journal::{
    ExportSettings, FailureCode, Forwarding, Hollow, ImageFormat, ImageLocation, MigratingVolume, Outcome,
    Place, Record, Side, Summary, VolumeRecord,
};
use migration::stay::{ImageRecord, opening};
use migration::{Attempt, HostId, MigrationId, VolumeId};

use super::files::{Base, DEVICES, ObjectId};
use super::{Reservoir, Serving, World};

const PEER: HostId = HostId([9; 32]);
const ATTEMPT: Attempt = Attempt(1);

pub(super) enum Act<'a> {
    Unlink,
    Rename(&'a str),
}

impl World {
    pub(super) fn step(&mut self) {
        match self.random.below(100) {
            0..=9 => self.make_volume(),
            10..=22 => self.leave(),
            23..=34 => self.end_departure(),
            35..=46 => self.come_home(),
            47..=58 => self.end_arrival(),
            59..=68 => self.add(),
            69..=74 => self.remove(),
            75..=80 => self.drop_kept(),
            81..=84 => self.stand_on(),
            85..=86 => self.a_stranger_opens(),
            87 => self.a_stranger_links(),
            88..=89 => self.files.close_strangers(),
            90..=92 => self.files.change_light(),
            93..=95 => self.release(),
            96 => self.exchange_target(),
            _ => self.restart(),
        }
    }

    /// Takes a step on a file as the daemon's custody does; returns whether it was permitted.
    pub(super) fn carry_out(&mut self, step: Step, owner: &Owner, name: &str, act: &Act<'_>) -> bool {
        let place = place_of(name);
        let mut handling = Handling::new(step, owner.clone(), place.clone());
        let opened = self.files.at(name);
        let end = loop {
            let event = match handling.next() {
                Ok(Todo::Open) => Event::Opened(self.files.look(&place), self.files.lasting(name)),
                Ok(Todo::Lock) => self.lock(opened),
                Ok(Todo::Claims) => Event::Gathered(self.book(step, owner, name, opened)),
                Ok(Todo::Compare) => Event::Compared(self.files.look(&place)),
                Ok(Todo::Act) => {
                    match act {
                        Act::Unlink => self.files.unlink(name),
                        Act::Rename(to) => {
                            self.note_name(name, to, step);
                            self.files.rename(name, to);
                        }
                    }
                    Event::Acted
                }
                Ok(Todo::Sync) => Event::Synced,
                Err(end) => break end,
            };
            handling.handle_event(event);
            if matches!(handling.next(), Ok(Todo::Lock | Todo::Claims | Todo::Compare)) {
                self.interfere(name);
            }
            // The planted bug: nothing comes between the last check and the act.
            if handling.next() == Ok(Todo::Act)
                && migration::planted::broken(migration::planted::Bug::IdentityNotCompared)
            {
                self.interfere(name);
            }
        };
        self.files.locked = None;
        self.check();
        self.files.forget_precious();
        self.say(|| format!("{step:?} of {name} for {owner:?}: {end:?}"));
        if end.is_ok() && self.state.images.get(&place).is_some_and(|known| known.purpose != Purpose::Use) {
            self.commit(vec![Record::ImageForgotten { place }]);
        }
        self.taken += u64::from(end == Ok(Ending::Taken));
        self.refused += u64::from(end.is_err());
        end == Ok(Ending::Taken)
    }

    /// Records the name that a file is about to have.
    fn note_name(&mut self, from: &str, to: &str, step: Step) {
        let Some(lasting) = self.files.lasting(from) else { return };
        let migration = self
            .state
            .unfinished()
            .find(|(_, known)| known.volumes.iter().any(|moving| moving.source.place.name() == from));
        let purpose = match (step, migration) {
            (Step::Fence, Some((migration, _))) => Purpose::Kept(migration),
            _ => self.state.purpose_of(&place_of(to)),
        };
        let known = KnownImage { lasting, purpose };
        self.commit(vec![Record::ImageKnown { place: place_of(to), known }]);
    }

    /// Returns the record of an image that is made or added.
    pub(super) fn known(&self, path: &str) -> Option<Record> {
        let known = KnownImage { lasting: self.files.lasting(path)?, purpose: Purpose::Use };
        Some(Record::ImageKnown { place: place_of(path), known })
    }

    fn lock(&mut self, opened: Option<ObjectId>) -> Event {
        let Some(object) = opened else { return Event::Locked };
        if self.files.is_held(object) {
            return Event::Held("a program".to_owned());
        }
        self.files.locked = Some(object);
        Event::Locked
    }

    fn interfere(&mut self, name: &str) {
        let is_used = self.serving.values().any(|serving| {
            serving.path == name || serving.base.as_ref().is_some_and(|(path, ..)| path == name)
        });
        match self.random.below(20) {
            0 if !is_used && (name.contains(".moved-") || name.contains(".removed")) => {
                self.files.exchange(name);
            }
            1 => self.open_if_free(name),
            _ => {}
        }
    }

    fn book(&self, step: Step, owner: &Owner, name: &str, object: Option<ObjectId>) -> Book {
        let mut book = Book::of_journal(&self.state);
        book.identify(|place| self.files.look(place));
        let found = object.map_or(Found::Gone, |object| Found::There(self.files.identity(object)));
        let mut add = |kind, path: &str, found: Found| book.add(Claim { kind, place: place_of(path), found });
        for known in
            self.state.volumes.values().filter(|known| known.record.image.format == ImageFormat::Qcow2)
        {
            let record = &known.record;
            match self.files.base_of(record.image.place.name()) {
                Base::Nothing => {}
                Base::Dark => add(Kind::Unknown { why: "EIO".to_owned() }, name, Found::Gone),
                Base::On(base) => {
                    let kind = Kind::BelowServed { volume: record.volume, name: record.name.clone() };
                    add(kind, &base, self.files.look(&place_of(&base)));
                }
            }
        }
        if name.contains(".moved-") {
            let kind = Kind::Kept { volume: "v".to_owned(), migration: MigrationId(0) };
            add(kind, name, found.clone());
        }
        if self.files.marks.contains(name) {
            add(Kind::HalfMade, name, found.clone());
        }
        let takes_away = matches!(step, Step::Discard | Step::TakeBack) && *owner != Owner::Maker;
        if takes_away && object.is_some_and(|object| self.files.is_seen_open(object)) {
            add(Kind::Foreign { holder: "a program".to_owned() }, name, found);
        }
        book
    }

    fn may(&mut self, step: Step, owner: &Owner, name: &str) -> bool {
        let object = self.files.at(name);
        let book = self.book(step, owner, name, object);
        let found = self.files.look(&place_of(name));
        let lasting = self.files.lasting(name);
        let answer = book.ask(step, owner, &Object { place: place_of(name), found, lasting });
        self.refused += u64::from(answer.is_err());
        answer.is_ok()
    }

    pub(super) fn is_lockable(&self, object: ObjectId) -> bool {
        let is_served = |serving: &Serving| {
            serving.object == object || serving.base.as_ref().is_some_and(|(_, base, _)| *base == object)
        };
        let is_filled = |(_, path): &(VolumeId, String)| self.files.at(path) == Some(object);
        !self.files.is_held(object)
            && !self.serving.values().any(is_served)
            && !self.coming.values().any(is_filled)
            && !self.reservoirs.values().any(|reservoir| reservoir.has_lane && reservoir.object == object)
    }

    fn make_volume(&mut self) {
        if self.volumes_made >= 5 {
            return;
        }
        self.volumes_made += 1;
        let volume = VolumeId([self.volumes_made; 16]);
        let on_device = self.random.percent(60)
            && self.may(Step::ServeReadWrite, &Owner::Administrator(Word::Plain), DEVICES[0]);
        let free_device = self.files.at(DEVICES[0]).is_some_and(|device| self.is_lockable(device));
        let path = if on_device && free_device { DEVICES[0].to_owned() } else { path_of(volume) };
        let object = match self.files.at(&path) {
            Some(object) => object,
            None => self.files.make(&path, None),
        };
        self.serve(volume, &path, object, "s", true);
    }

    fn serve(&mut self, volume: VolumeId, path: &str, object: ObjectId, store: &str, is_written: bool) {
        let base = match self.files.base_of(path) {
            Base::On(base) => self.files.at(&base).and_then(|below| {
                let content = self.files.content(below)?;
                Some((base, below, content))
            }),
            Base::Nothing | Base::Dark => None,
        };
        let format = if base.is_some() { ImageFormat::Qcow2 } else { ImageFormat::Raw };
        let image = ImageLocation { store: store.to_owned(), place: place_of(path), format };
        if let Some((migration, _)) =
            self.reservoirs.iter().find(|(_, reservoir)| is_written && reservoir.object == object)
        {
            let migration = *migration;
            self.violated(|| {
                format!("{path} is written to, and the new owner by {migration} still reads it")
            });
        }
        // N.B. an administrator who serves an image by its name means the present file.
        self.files.accept(object);
        let added = Record::VolumeAdded(record(volume, image));
        let known = self.known(path);
        self.commit([added].into_iter().chain(known).collect());
        self.serving.insert(volume, Serving { path: path.to_owned(), object, is_written, base });
        self.say(|| format!("{volume} is served from {path}"));
    }

    fn leave(&mut self) {
        let Some(volume) = self.pick_served() else { return };
        let Some(known) = self.state.volumes.get(&volume) else { return };
        let (source, generation) = (known.record.image.clone(), known.record.generation);
        if known.record.image.is_adopted() {
            return;
        }
        let migration = MigrationId(self.state.next_migration);
        let side = Side::Outgoing {
            peer: PEER,
            peer_name: "b".to_owned(),
            store: "s".to_owned(),
            forwarding: Forwarding::WhileConnected,
        };
        let volumes = vec![MigratingVolume { volume, source: source.clone(), target: source.clone() }];
        let started = Record::MigrationStarted { migration, volumes, keep_source: true, side };
        let is_hollow = self.random.percent(50);
        let hollow =
            Hollow { attempt: ATTEMPT, manifests: vec![(volume, Manifest { units: 1, checksum: 1 })] };
        let generations = vec![(volume, generation.next())];
        let released = Record::Released { migration, attempt: ATTEMPT, generations };
        let hollow = is_hollow.then_some(Record::Hollow { migration, hollow });
        let Some(serving) = self.serving.remove(&volume) else { return };
        let look = self.files.appearance(&serving.path);
        self.commit([Some(started), hollow, Some(released)].into_iter().flatten().collect());
        if let (true, Some(look), Some(content)) = (is_hollow, look, self.files.content(serving.object)) {
            let reservoir = Reservoir {
                volume,
                path: serving.path,
                object: serving.object,
                content,
                record: ImageRecord::Closed(look),
                has_lane: true,
            };
            self.reservoirs.insert(migration, reservoir);
        }
        self.say(|| format!("{volume} leaves by {migration}, hollow: {is_hollow}"));
    }

    fn end_departure(&mut self) {
        let leaving = self.state.unfinished().find(|(_, known)| matches!(known.side, Side::Outgoing { .. }));
        let Some((migration, known)) = leaving else { return };
        let Some(moving) = known.volumes.first().cloned() else { return };
        self.pull(migration);
        let (path, owner) = (moving.source.place.name().to_owned(), Owner::Migration(migration));
        let kept = format!("{path}.moved-{migration}");
        self.reservoirs.remove(&migration);
        if moving.source.place.file().is_some() {
            if self.random.percent(70) {
                if self.carry_out(Step::Fence, &owner, &path, &Act::Rename(&kept))
                    && let Some(content) = self.files.at(&kept).and_then(|object| self.files.content(object))
                {
                    self.kept.insert(moving.volume, (kept, content));
                }
            } else if !self.carry_out(Step::Discard, &owner, &path, &Act::Unlink) {
                self.carry_out(Step::Fence, &owner, &path, &Act::Rename(&kept));
            }
        }
        let outcome = Outcome::Moved { left_over: String::new() };
        self.commit(vec![Record::MigrationEnded { migration, outcome, summary: Summary::default() }]);
    }

    fn pull(&mut self, migration: MigrationId) {
        let Some(reservoir) = self.reservoirs.get(&migration).filter(|reservoir| reservoir.has_lane) else {
            return;
        };
        let found = self.files.at(&reservoir.path).and_then(|object| self.files.content(object));
        if found != Some(reservoir.content) {
            let (path, volume) = (reservoir.path.clone(), reservoir.volume);
            self.violated(|| {
                format!("the new owner of {volume} reads what is not in {path} any more as it was")
            });
        }
    }

    /// Begins a return, into the kept image or a new one.
    fn come_home(&mut self) {
        let away: Vec<VolumeId> = self.state.moved.keys().copied().collect();
        let Some(volume) = self.one_of(&away) else { return };
        let Some(moved) = self.state.moved.get(&volume).cloned() else { return };
        let image = moved.volume.record.image.clone();
        let path = path_of(volume);
        let is_over = self.state.is_departure_over(&moved);
        if !is_over || self.files.at(&path).is_some() || self.coming.values().any(|(of, _)| *of == volume) {
            return;
        }
        let image = ImageLocation { place: place_of(&path), format: ImageFormat::Raw, ..image };
        self.files.make(&path, None);
        self.files.marks.insert(path.clone());
        let migration = MigrationId(self.state.next_migration);
        let coming = record(volume, image.clone());
        let side = Side::Incoming {
            peer: PEER,
            peer_name: "b".to_owned(),
            remote: migration,
            volumes: vec![coming],
        };
        let source = ImageLocation::raw_file("b", "");
        let volumes = vec![MigratingVolume { volume, source, target: image }];
        let started = Record::MigrationStarted { migration, volumes, keep_source: false, side };
        let known = self.known(&path);
        self.commit([started].into_iter().chain(known).collect());
        self.coming.insert(migration, (volume, path.clone()));
        if let Some((kept, content)) = self.kept.remove(&volume)
            && self.files.at(&kept).and_then(|object| self.files.content(object)) == Some(content)
            && self.carry_out(Step::TakeBack, &Owner::Migration(migration), &kept, &Act::Rename(&path))
        {
            self.taken_back += 1;
        }
        if let Some(object) = self.files.at(&path) {
            let writes = self.acknowledged.get(&volume).copied().unwrap_or_default();
            self.files.write(object, volume, writes);
        }
    }

    fn end_arrival(&mut self) {
        let Some((migration, (volume, path))) =
            self.coming.first_key_value().map(|(id, known)| (*id, known.clone()))
        else {
            return;
        };
        let summary = Summary::default();
        if self.random.percent(30) || !self.is_as_filled(migration, &path) {
            let outcome = Outcome::Failed { code: FailureCode::Internal, detail: String::new() };
            self.commit(vec![Record::Discarding { migration, outcome: outcome.clone() }]);
            if self.carry_out(Step::Discard, &Owner::Migration(migration), &path, &Act::Unlink) {
                self.files.marks.remove(&path);
            }
            self.coming.remove(&migration);
            self.commit(vec![Record::MigrationEnded { migration, outcome, summary }]);
            return;
        }
        self.coming.remove(&migration);
        let generations = vec![(volume, Generation(migration.0 + 10))];
        let owned = Record::Owned { migration, attempt: ATTEMPT, generations };
        self.commit(vec![Record::TargetPrepared { migration, attempt: ATTEMPT }, owned.clone()]);
        for place in completed_by(&[owned], &self.state) {
            self.files.marks.remove(place.name());
        }
        let Some(object) = self.files.at(&path) else { return };
        self.only_copy.insert(object);
        self.serving.insert(volume, Serving { path, object, is_written: true, base: None });
        if self.random.percent(50) {
            // A crash may come before the end.
            let outcome = Outcome::Moved { left_over: String::new() };
            self.commit(vec![Record::MigrationEnded { migration, outcome, summary }]);
        }
    }

    fn add(&mut self) {
        let names = self.files.names();
        let Some(name) = self.one_of(&names) else { return };
        let Some(object) = self.files.at(&name) else { return };
        if self.volumes_made >= 250 || name.contains("away") {
            return;
        }
        let is_written = self.random.percent(50);
        let word = if self.random.percent(30) { Word::Insists } else { Word::Plain };
        let step = if is_written { Step::ServeReadWrite } else { Step::ServeReadOnly };
        if !self.may(step, &Owner::Administrator(word), &name) || !self.is_lockable(object) {
            return;
        }
        // Opening an overlay locks its backing file.
        if let Base::On(base) = self.files.base_of(&name)
            && !self.files.at(&base).is_some_and(|below| self.is_lockable(below))
        {
            return;
        }
        self.volumes_made += 1;
        let volume = VolumeId([self.volumes_made; 16]);
        self.serve(volume, &name, object, "", is_written);
    }

    /// Removes a volume, and the image if Sterna made it.
    fn remove(&mut self) {
        let Some(volume) = self.pick_served() else { return };
        let Some(known) = self.state.volumes.get(&volume).cloned() else { return };
        let is_moving = self.state.unfinished().any(|(_, migration)| {
            !migration.has_arrived() && migration.volumes.iter().any(|moving| moving.volume == volume)
        });
        if is_moving {
            return;
        }
        let (path, owner) = (known.record.image.place.name().to_owned(), Owner::Volume(volume));
        // A name that is in use is not given again.
        let aside = format!("{path}.removed");
        if self.files.at(&aside).is_some() {
            return;
        }
        self.serving.remove(&volume);
        if known.record.image.is_adopted() || known.record.image.place.file().is_none() {
            self.commit(vec![Record::VolumeRemoved { volume }]);
            return;
        }
        if self.carry_out(Step::Rename, &owner, &path, &Act::Rename(&aside)) {
            self.commit(vec![Record::VolumeRemoved { volume }]);
            // It may be killed before that.
            if self.random.percent(70) {
                self.carry_out(Step::Discard, &owner, &aside, &Act::Unlink);
            }
        } else if let Some(object) = self.files.at(&path).filter(|object| self.is_lockable(*object)) {
            self.serving.insert(volume, Serving { path, object, is_written: true, base: None });
        }
    }

    fn drop_kept(&mut self) {
        let kept: Vec<String> =
            self.files.names().into_iter().filter(|name| name.contains(".moved-")).collect();
        let Some(name) = self.one_of(&kept) else { return };
        let by_name = Owner::Administrator(Word::Plain);
        let owner = if self.random.percent(50) { by_name } else { Owner::Housekeeping };
        self.kept.retain(|_, (path, _)| *path != name);
        // An administrator who names a file of which the journal knows nothing means the file that has the name.
        if owner != Owner::Housekeeping
            && !self.state.images.contains_key(&place_of(&name))
            && let Some(object) = self.files.at(&name)
        {
            self.files.accept(object);
        }
        self.carry_out(Step::Discard, &owner, &name, &Act::Unlink);
    }

    /// Makes and serves an overlay over an image.
    fn stand_on(&mut self) {
        let kept: Vec<String> =
            self.files.names().into_iter().filter(|name| name.contains(".moved-")).collect();
        let Some(base) = self.one_of(&kept) else { return };
        if !self.files.at(&base).is_some_and(|object| self.is_lockable(object)) {
            return;
        }
        if !matches!(self.files.base_of(&base), Base::Nothing) || self.volumes_made >= 250 {
            return;
        }
        self.volumes_made += 1;
        let (volume, top) = (VolumeId([self.volumes_made; 16]), format!("/t/{}.qcow2", self.volumes_made));
        let object = self.files.make(&top, Some(base));
        self.serve(volume, &top, object, "", true);
    }

    fn a_stranger_opens(&mut self) {
        let names = self.files.names();
        if let Some(name) = self.one_of(&names) {
            self.open_if_free(&name);
        }
    }

    /// Somebody gives an image another name.
    fn a_stranger_links(&mut self) {
        let names = self.files.names();
        if let Some(name) = self.one_of(&names).filter(|name| !DEVICES.contains(&name.as_str())) {
            self.files.link(&name);
        }
    }

    /// Opens an image as a program that respects locks.
    fn open_if_free(&mut self, name: &str) {
        let object = self.files.at(name);
        if object.is_some_and(|object| self.is_lockable(object) || self.files.is_held(object)) {
            self.files.open_by_stranger(name);
        }
    }

    /// Releases and serves the device, as an administrator would.
    fn release(&mut self) {
        let [name, alias] = DEVICES;
        if self.may(Step::Release, &Owner::Administrator(Word::Plain), name) {
            self.commit(vec![Record::ReservationLifted { place: place_of(name) }]);
        }
        let Some(object) = self.files.at(alias) else { return };
        let by_name = Owner::Administrator(Word::Insists);
        if self.may(Step::ServeReadWrite, &by_name, alias)
            && self.is_lockable(object)
            && self.volumes_made < 250
        {
            self.volumes_made += 1;
            self.serve(VolumeId([self.volumes_made; 16]), alias, object, "", true);
        }
    }

    /// Restarts the daemon. Meanwhile another program may have changed a reservoir.
    fn restart(&mut self) {
        self.start_again();
        let touched = self.random.percent(30).then(|| self.reservoirs.values().next().cloned()).flatten();
        if let Some(touched) = touched
            && !self.files.is_held(touched.object)
        {
            self.files.write(touched.object, VolumeId([255; 16]), 1);
        }
        let is_late = self.random.percent(50);
        for reservoir in self.reservoirs.values_mut() {
            let look = self.files.appearance(&reservoir.path);
            let is_as_left = opening::check_left(Some(&reservoir.record), look.as_ref()).is_ok();
            reservoir.has_lane = is_as_left && !is_late;
        }
    }

    /// Loses the data folder. Images marked as half-made are dropped by name.
    pub(super) fn lose_data_folder(&mut self) {
        self.files.forget_others();
        self.state = migration::journal::State::default();
        let current: Vec<ObjectId> = self.serving.values().map(|serving| serving.object).collect();
        self.serving.clear();
        self.reservoirs.clear();
        for name in self.files.marks.clone() {
            let Some(object) = self.files.at(&name) else { continue };
            let is_current = current.contains(&object) && self.only_copy.contains(&object);
            let by_name = Owner::Administrator(Word::Plain);
            if self.carry_out(Step::Discard, &by_name, &name, &Act::Unlink) && is_current {
                self.violated(|| format!("{name} is dropped as half-made, and was the only current image"));
            }
        }
    }

    fn pick_served(&mut self) -> Option<VolumeId> {
        let served: Vec<VolumeId> = self.serving.keys().copied().collect();
        self.one_of(&served)
    }

    pub(super) fn one_of<T: Clone>(&mut self, all: &[T]) -> Option<T> {
        if all.is_empty() { None } else { Some(all[self.random.index(all.len())].clone()) }
    }
}

pub(super) fn place_of(name: &str) -> Place {
    if DEVICES.contains(&name) { Place::Device(name.to_owned()) } else { Place::File(name.to_owned()) }
}

fn path_of(volume: VolumeId) -> String {
    format!("/s/v{}.img", volume.0[0])
}

fn record(volume: VolumeId, image: ImageLocation) -> VolumeRecord {
    VolumeRecord {
        volume,
        name: format!("v{}", volume.0[0]),
        size_bytes: 1 << 20,
        block_size_bytes: 4096,
        image,
        generation: Generation(0),
        export: ExportSettings::default(),
    }
}
