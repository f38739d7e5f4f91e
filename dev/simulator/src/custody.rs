//! Simulates the handling of images: one host with the product's journal, custody and order of steps, and files and devices that
//! others use as well.
//!
//! ```text
//!   volumes are made, leave (kept, deleted, or read by their new owner), return, are removed          (life.rs)
//!   administrators add images under any of their names, drop, release; the daemon restarts            (life.rs)
//!   somebody puts other files under the names of images, also while the daemon is killed                (swaps.rs)
//!   strangers open images, make overlays over them, exchange them between two steps of the daemon     (files.rs)
//!   checked: images that a guest, a chain, a stranger or another host uses keep existence, name and content
//! ```
//! The same seed gives the same simulation.

mod files;
mod life;
mod swaps;

use std::collections::{BTreeMap, BTreeSet};

use migration::journal::{Entry, Record, State};
use migration::stay::ImageRecord;
use migration::{MigrationId, VolumeId};

use self::files::{Content, Files, ObjectId};
use crate::random::Random;
use crate::restored::Telling;

const STEPS: u32 = 150;

#[derive(Debug, Default)]
pub(crate) struct Shown {
    pub(crate) seeds: u64,
    pub(crate) taken: u64,
    pub(crate) refused: u64,
    pub(crate) taken_back: u64,
    pub(crate) violations: Vec<(u64, String)>,
}

pub(crate) fn campaign(first: u64, count: u64, until_found: bool) -> Shown {
    let mut shown = Shown::default();
    for seed in first..first.saturating_add(count) {
        let world = World::run(seed, Telling::Silent);
        shown.seeds += 1;
        shown.taken += world.taken;
        shown.refused += world.refused;
        shown.taken_back += world.taken_back;
        if let Some(violation) = world.violation {
            shown.violations.push((seed, violation));
            if until_found {
                break;
            }
        }
    }
    shown
}

pub(crate) fn replay(seed: u64, telling: Telling) -> Option<String> {
    World::run(seed, telling).violation
}

#[derive(Clone, Debug)]
struct Serving {
    path: String,
    object: ObjectId,
    is_written: bool,
    base: Option<(String, ObjectId, Content)>,
}

#[derive(Clone, Debug)]
struct Reservoir {
    volume: VolumeId,
    path: String,
    object: ObjectId,
    content: Content,
    record: ImageRecord,
    has_lane: bool,
}

struct World {
    random: Random,
    state: State,
    files: Files,
    serving: BTreeMap<VolumeId, Serving>,
    reservoirs: BTreeMap<MigrationId, Reservoir>,
    coming: BTreeMap<MigrationId, (VolumeId, String)>,
    kept: BTreeMap<VolumeId, (String, Content)>,
    acknowledged: BTreeMap<VolumeId, u64>,
    /// Images that alone hold the last acknowledged write.
    only_copy: BTreeSet<ObjectId>,
    volumes_made: u8,
    taken: u64,
    refused: u64,
    taken_back: u64,
    violation: Option<String>,
    telling: Telling,
}

impl World {
    fn run(seed: u64, telling: Telling) -> Self {
        let mut random = Random::new(seed);
        let files = Files::new(random.fork());
        let mut world = Self {
            random,
            state: State::default(),
            files,
            serving: BTreeMap::new(),
            reservoirs: BTreeMap::new(),
            coming: BTreeMap::new(),
            kept: BTreeMap::new(),
            acknowledged: BTreeMap::new(),
            only_copy: BTreeSet::new(),
            volumes_made: 0,
            taken: 0,
            refused: 0,
            taken_back: 0,
            violation: None,
            telling,
        };
        for _ in 0..STEPS {
            world.step();
            world.write();
            world.check();
            if world.violation.is_some() {
                break;
            }
        }
        if world.violation.is_none() {
            world.lose_data_folder();
        }
        world
    }

    fn commit(&mut self, records: Vec<Record>) {
        let entry = Entry { at_unix_ms: 0, records };
        if let Err(error) = self.state.apply(&entry) {
            self.violated(|| format!("the journal refuses {entry:?}: {error}"));
        }
    }

    fn write(&mut self) {
        for (volume, serving) in &self.serving {
            if serving.is_written && self.random.percent(50) {
                let acknowledged = self.acknowledged.entry(*volume).or_default();
                *acknowledged += 1;
                self.files.write(serving.object, *volume, *acknowledged);
            }
        }
    }

    fn check(&mut self) {
        let mut wrong = Vec::new();
        for (volume, serving) in &self.serving {
            if self.files.at(&serving.path) != Some(serving.object) {
                wrong.push(format!("the image {} of {volume} is not there", serving.path));
            }
            if let Some((path, object, content)) = &serving.base
                && (self.files.at(path) != Some(*object) || self.files.content(*object) != Some(*content))
            {
                wrong.push(format!("{path}, which {volume} stands on, is not what it was"));
            }
        }
        for (migration, reservoir) in &self.reservoirs {
            if self.files.at(&reservoir.path) != Some(reservoir.object) {
                wrong.push(format!("{}, which another host reads, has gone ({migration})", reservoir.path));
            }
        }
        wrong.extend(self.files.wronged());
        if let Some(wrong) = wrong.pop() {
            self.violated(|| wrong);
        }
    }

    fn violated(&mut self, what: impl FnOnce() -> String) {
        let what = what();
        self.say(|| format!("violation: {what}"));
        self.violation.get_or_insert(what);
    }

    fn say(&self, what: impl FnOnce() -> String) {
        if self.telling == Telling::Printed {
            println!("{}", what());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_anybody_uses_is_deleted_renamed_or_written_over() {
        let shown = campaign(0, 2000, false);
        assert_eq!(shown.violations, []);
        for seen in [shown.taken, shown.refused, shown.taken_back] {
            assert!(seen > 200, "{shown:?}");
        }
    }
}
