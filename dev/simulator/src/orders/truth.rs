//! The journals and what is true: kills and starts, records that become durable, and what must hold from then on.

use migration::journal::{
    Entry, Inconsistent, MigrationState, Outcome, Promotion, Record, Side, Stage, State,
};
use migration::recovery::{self, Step};
use migration::source::SourceEvent;
use migration::target::TargetEvent;
use migration::{MigrationId, Source, Target};

use super::host::{By, VOLUME};
use super::world::{MISSING_FORGOTTEN, World};

impl World {
    /// Deletes an image; nothing may need it.
    pub(super) fn delete(&mut self, at: usize, path: &str) {
        let host = &self.hosts[at];
        if host.own_image().as_deref() == Some(path) {
            return self.violated(|| format!("host {at}: {path} is deleted, and owns the volume"));
        }
        let is_needed = |(id, left): (MigrationId, &MigrationState)| {
            matches!((&left.side, &left.stage), (Side::Outgoing { .. }, Stage::Released(_)))
                && left.volumes[0].source.place.name() == path
                && host.state.moved.get(&VOLUME).is_some_and(|moved| moved.migration == id)
                && !self.whole_there.contains(&(at, id))
        };
        if host.state.unfinished().any(is_needed) {
            return self
                .violated(|| format!("host {at}: {path} is deleted, and only it has blocks of the volume"));
        }
        self.hosts[at].images.remove(path);
    }

    pub(super) fn kill(&mut self, at: usize) {
        if !self.hosts[at].is_up {
            return;
        }
        self.say(|| format!("host {at}: killed"));
        self.hosts[at].forget_its_memory();
        let commits = std::mem::take(&mut self.hosts[at].commits);
        let kept = self.random.index(commits.len() + 1);
        for commit in commits.into_iter().take(kept) {
            if commit.by != By::Filling || self.hosts[at].lacks_blocks() {
                self.commit(at, &commit.records);
            }
        }
        if self.has_faults && self.hosts[at].lacks_blocks() && self.random.percent(MISSING_FORGOTTEN) {
            self.say(|| format!("host {at}: what is missing is not known any more"));
            self.hosts[at].knows_missing = false;
        }
    }

    pub(super) fn start(&mut self, at: usize) {
        (self.hosts[at].is_up, self.hosts[at].is_open) = (true, true);
        for step in recovery::recover(&self.hosts[at].state.clone()) {
            match step {
                Step::Commit(records) => drop(self.commit(at, &records)),
                Step::Discard(image) => self.delete(at, image.place.name()),
                Step::Resume(id) => self.resume(at, id),
                step @ Step::Retire(..) => self.violated(|| format!("between hosts: {step:?}")),
            }
        }
    }

    pub(super) fn resume(&mut self, at: usize, id: MigrationId) {
        let (now, host) = (self.now, &mut self.hosts[at]);
        let Some(recorded) = host.state.migrations.get(&id).cloned() else { return };
        let is_cancelled = !migration::orders::goes_on(&recorded);
        match recorded.side {
            Side::Outgoing { .. } if host.state.taken_back_by(id).is_none() => {
                let source = host.settings(id).and_then(|settings| Source::resume(now, settings, &recorded));
                host.source = source.map(|source| (id, source));
                if is_cancelled {
                    self.tell_source(at, id, SourceEvent::Cancel);
                }
            }
            Side::Incoming { .. } => {
                host.target = Target::resume(now, id, &recorded).map(|target| (id, target));
                if is_cancelled {
                    self.tell_target(at, id, TargetEvent::Cancel);
                }
            }
            _ => {}
        }
        self.drain(at);
    }

    /// Makes records durable, all or none; returns whether the journal takes them.
    pub(super) fn commit(&mut self, at: usize, records: &[Record]) -> bool {
        let before = self.hosts[at].state.clone();
        let mut next = before.clone();
        match next.apply(&Entry { at_unix_ms: 1, records: records.to_vec() }) {
            Ok(()) => {}
            Err(Inconsistent::Overtaken(_)) => return false,
            Err(error) => {
                self.violated(|| format!("host {at}: {error}"));
                return false;
            }
        }
        self.hosts[at].state = next;
        for record in records {
            self.say(|| format!("host {at}: {record:?}"));
            self.became_true(at, &before, record);
        }
        for (_, remote, message) in recovery::asked_by_itself(&before, records) {
            self.target_hears(at, remote, message);
        }
        self.check_owners();
        true
    }

    fn became_true(&mut self, at: usize, before: &State, record: &Record) {
        let is_new = !before.volumes.contains_key(&VOLUME);
        match record {
            Record::Released { migration, .. } if !is_new => {
                let left = self.branches[self.hosts[at].branch];
                self.left.insert((at, *migration), left);
            }
            Record::Owned { migration, .. } if is_new => self.came(at, *migration, None),
            Record::Promoted { migration, promotion, .. } if is_new => {
                self.came(at, *migration, Some(promotion));
            }
            Record::HandedBack { migration, .. } => {
                if let Some(branch) = self.branch_of.get(&(at, *migration)) {
                    self.hosts[at].branch = *branch;
                }
            }
            Record::Filled { .. } => {
                if let Some(filling) = before.fillings.get(&VOLUME) {
                    self.whole_there.insert((1 - at, filling.remote));
                }
            }
            Record::MissingGivenUp { .. } => {
                let host = &self.hosts[at];
                let image = host.own_image().and_then(|path| host.images.get(&path).copied());
                let known = &mut self.branches[host.branch];
                for (known, found) in known.iter_mut().zip(image.unwrap_or_default()) {
                    *known = known.filter(|_| found.is_some());
                }
            }
            Record::MigrationEnded { migration, outcome: Outcome::Moved { .. }, .. }
                if self.cancelled.contains(&(at, *migration)) =>
            {
                self.violated(|| {
                    format!("host {at}: it was answered that {migration} is cancelled, and it has moved")
                });
            }
            _ => {}
        }
    }

    /// Sees a volume come to a host: of which branch it is, and with what it begins.
    fn came(&mut self, at: usize, migration: MigrationId, promotion: Option<&Promotion>) {
        let is_forced = matches!(promotion, Some(Promotion::Force { .. }));
        let host = &self.hosts[at];
        let Some(recorded) = host.state.migrations.get(&migration) else { return };
        let is_hollow = recorded.is_hollow() || host.lacks_blocks();
        let (number, begins_with) = match &recorded.side {
            Side::Incoming { remote, .. } => {
                ((1 - at, *remote), host.own_image().and_then(|path| host.images.get(&path).copied()))
            }
            _ => ((at, migration), self.left.get(&(at, migration)).copied()),
        };
        let comes = matches!(recorded.side, Side::Incoming { .. });
        let branch = match (is_forced, self.branch_of.get(&number)) {
            (false, Some(branch)) => *branch,
            _ => {
                self.branches.push(begins_with.unwrap_or_default());
                self.branches.len() - 1
            }
        };
        if comes && !is_hollow {
            self.whole_there.insert(number);
        }
        let host = &mut self.hosts[at];
        (host.branch, host.knows_missing, host.is_open) = (branch, true, !comes);
        self.say(|| format!("host {at}: has branch {branch}"));
    }

    fn check_owners(&mut self) {
        let [one, other] = &self.hosts;
        if !one.owns() || !other.owns() {
            return;
        }
        if one.branch == other.branch {
            let branch = one.branch;
            self.violated(|| format!("both hosts own the volume in branch {branch}"));
        } else if one.generation() == other.generation() {
            let generation = one.generation();
            self.violated(|| format!("both hosts own the volume with generation {generation:?}"));
        }
    }
}
