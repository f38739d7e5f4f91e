//! Journals that are restored from a backup, in a fleet of hosts with moving volumes. This is a separate simulation, with the
//! product's journals and its machine `Restoration`, but without disks. It checks which hosts may serve a volume, and from which
//! image. Journals that go back in time would break every rule of the other fleet at once.
//!
//! ```text
//!   guests write to any host that serves ──► checked: at most one host serves, and its image has all acknowledged writes
//!   volumes move between hosts and stores, step by step (moves.rs); journals are backed up at any step
//!   fault: a host's journal is an older one ──► it asks the others over unreliable links (asking.rs)
//!   administrators forget, and order what they know
//! ```
//! The same seed gives the same simulation.

mod asking;
mod host;
mod moves;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use migration::journal::Record;
use migration::{MigrationId, VolumeId};

use self::asking::Answering;
use self::host::{DEVICE_BYTES, ListFate, SIZE_STEP, SimHost};
use crate::random::Random;

const STEPS: u32 = 600;
const STEP_MAX: Duration = Duration::from_secs(4);
/// The wall clock at the beginning, and its advance with each step: journals are restored days later.
const FIRST_UNIX_MS: u64 = 1_700_000_000_000;
const STEP_UNIX_MS: u64 = 3_600_000;
const RESTORES_MAX: u32 = 3;

#[derive(Debug, Default)]
pub(crate) struct Shown {
    pub(crate) seeds: u64,
    pub(crate) writes: u64,
    pub(crate) restores: u64,
    pub(crate) confirmed: u64,
    pub(crate) ordered: u64,
    /// Volumes that proved to be another host's.
    pub(crate) given_up: u64,
    /// Orders that were refused, because other hosts contradicted them.
    pub(crate) refused: u64,
    pub(crate) violations: Vec<(u64, String)>,
}

pub(crate) fn campaign(first: u64, count: u64, until_found: bool) -> Shown {
    let mut shown = Shown::default();
    for seed in first..first.saturating_add(count) {
        let fleet = Fleet::run(seed, Telling::Silent);
        shown.seeds += 1;
        shown.add(&fleet);
        if let Some(violation) = fleet.violation {
            shown.violations.push((seed, violation));
            if until_found {
                break;
            }
        }
    }
    shown
}

pub(crate) fn replay(seed: u64, telling: Telling) -> Option<String> {
    Fleet::run(seed, telling).violation
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Telling {
    Silent,
    Printed,
}

impl Shown {
    fn add(&mut self, fleet: &Fleet) {
        self.writes += fleet.shown.writes;
        self.restores += fleet.shown.restores;
        self.confirmed += fleet.shown.confirmed;
        self.ordered += fleet.shown.ordered;
        self.given_up += fleet.shown.given_up;
        self.refused += fleet.shown.refused;
    }
}

struct Fleet {
    random: Random,
    /// Whether lists of hosts stay as they are: then other events are more frequent.
    keeps_lists: bool,
    now: Duration,
    step: u32,
    hosts: Vec<SimHost>,
    acknowledged: BTreeMap<VolumeId, u64>,
    sizes: BTreeMap<VolumeId, u64>,
    answers: Vec<Answering>,
    /// Migrations that were released, by host, with those that its journal has lost.
    released: BTreeSet<(usize, MigrationId)>,
    down: Vec<(usize, usize)>,
    shown: Shown,
    violation: Option<String>,
    telling: Telling,
}

impl Fleet {
    fn run(seed: u64, telling: Telling) -> Self {
        let mut random = Random::new(seed ^ 0x5E57_02ED);
        let count = 2 + random.index(3);
        let hosts: Vec<SimHost> = (0..count).map(SimHost::new).collect();
        let mut fleet = Self {
            random,
            keeps_lists: seed.is_multiple_of(2),
            now: Duration::ZERO,
            step: 0,
            hosts,
            acknowledged: BTreeMap::new(),
            sizes: BTreeMap::new(),
            answers: Vec::new(),
            released: BTreeSet::new(),
            down: Vec::new(),
            shown: Shown::default(),
            violation: None,
            telling,
        };
        for number in 0..1 + fleet.random.index(2) {
            let (at, volume) = (fleet.random.index(count), VolumeId([number as u8 + 1; 16]));
            fleet.hosts[at].make(volume);
            fleet.acknowledged.insert(volume, 0);
            fleet.sizes.insert(volume, SIZE_STEP);
        }
        let all: Vec<_> = fleet.hosts.iter().map(|host| host.id).collect();
        for host in &mut fleet.hosts {
            host.has_device |= fleet.keeps_lists;
            host.list.paired = all.iter().copied().filter(|id| *id != host.id).collect();
        }
        for step in 0..STEPS {
            fleet.step = step;
            fleet.step();
            if fleet.violation.is_some() {
                break;
            }
        }
        fleet
    }

    fn step(&mut self) {
        self.now += self.random.duration(Duration::from_millis(10), STEP_MAX);
        match self.random.below(100) {
            0..=19 => self.write(),
            20..=22 => self.grow(),
            23..=24 if !self.keeps_lists => self.change_list(),
            25..=30 => self.begin_between_stores(),
            31..=40 => self.begin_between_hosts(),
            41..=72 => self.advance(),
            73..=76 => self.back_up(),
            77..=78 => self.put_back(),
            79..=82 => self.change_link(),
            83..=84 => self.forget_where_one_went(),
            85..=92 => self.order(),
            _ => {}
        }
        self.ask_and_answer();
        self.write();
    }

    /// Writes as a guest of each volume, to any host that serves it.
    fn write(&mut self) {
        let volumes: Vec<VolumeId> = self.acknowledged.keys().copied().collect();
        for volume in volumes {
            let serving: Vec<usize> =
                (0..self.hosts.len()).filter(|host| self.hosts[*host].serves(volume)).collect();
            if let [one, other, ..] = serving[..] {
                self.violated(|| format!("hosts {one} and {other} serve volume {volume}"));
                return;
            }
            let Some(host) = serving.first().copied() else {
                if self.is_led_round(volume) {
                    self.violated(|| format!("each host says that another one has volume {volume}"));
                    return;
                }
                continue;
            };
            let acknowledged = self.acknowledged[&volume];
            let Some(image) = self.hosts[host].image_of(volume) else { continue };
            if image.writes != acknowledged {
                let found = image.writes;
                self.violated(|| {
                    format!("host {host} serves write {found} of volume {volume}, of {acknowledged}")
                });
                return;
            }
            let (size, record) = (self.sizes[&volume], &self.hosts[host].state.volumes[&volume].record);
            if record.size_bytes != size {
                let found = record.size_bytes;
                self.violated(|| {
                    format!("host {host} serves {found} bytes of volume {volume}, which has {size}")
                });
                return;
            }
            if self.is_gate_closed(host, volume) {
                continue;
            }
            self.hosts[host].write(volume, acknowledged + 1);
            self.acknowledged.insert(volume, acknowledged + 1);
            self.shown.writes += 1;
        }
    }

    /// Returns whether hosts forward in a circle for a volume that no host has, moves, or asks about.
    fn is_led_round(&self, volume: VolumeId) -> bool {
        let knows = |host: &SimHost| {
            host.state.volumes.contains_key(&volume)
                || host.state.questioned(volume).is_some()
                || host.is_moving(volume)
        };
        if self.hosts.iter().any(knows) {
            return false;
        }
        let leads = |at: usize| {
            let to = self.hosts[at].state.moved.get(&volume)?.host;
            self.hosts.iter().position(|host| host.id == to)
        };
        (0..self.hosts.len()).any(|first| {
            let course = std::iter::successors(leads(first), |at| leads(*at));
            course.take(self.hosts.len()).any(|at| at == first)
        })
    }

    fn back_up(&mut self) {
        let host = self.random.index(self.hosts.len());
        self.say(|| format!("host {host} is backed up"));
        let at_unix_ms = self.unix_ms();
        self.hosts[host].back_up(at_unix_ms);
    }

    fn grow(&mut self) {
        let host = self.random.index(self.hosts.len());
        let here = &mut self.hosts[host];
        let idle = here
            .state
            .volumes
            .keys()
            .copied()
            .find(|volume| here.serves(*volume) && !here.is_moving(*volume));
        let Some(volume) = idle else { return };
        let size_bytes = self.sizes[&volume] + SIZE_STEP;
        if size_bytes <= DEVICE_BYTES && here.commit(vec![Record::Resized { volume, size_bytes }]) {
            here.grow(volume, size_bytes);
            self.sizes.insert(volume, size_bytes);
        }
    }

    fn change_list(&mut self) {
        let (one, other) = (self.random.index(self.hosts.len()), self.random.index(self.hosts.len()));
        if one == other {
            return;
        }
        let (ids, at_unix_ms) = ([self.hosts[one].id, self.hosts[other].id], self.unix_ms());
        if self.random.percent(15) {
            self.say(|| format!("host {one} forgets host {other}"));
            self.hosts[one].remove_host(ids[1], at_unix_ms);
        } else {
            self.hosts[one].list.paired.insert(ids[1]);
            self.hosts[other].list.paired.insert(ids[0]);
        }
    }

    fn unix_ms(&self) -> u64 {
        FIRST_UNIX_MS + u64::from(self.step) * STEP_UNIX_MS
    }

    /// Replaces a host's journal by an older one of its own: the fault.
    fn put_back(&mut self) {
        let host = self.random.index(self.hosts.len());
        let backups = self.hosts[host].backups.len();
        if backups == 0 || self.shown.restores >= u64::from(RESTORES_MAX) {
            return;
        }
        // Mostly a recent one: an old backup has little in common with the present state.
        let back = self.random.index(backups.min(4));
        self.say(|| format!("host {host} is put back to backup {}", backups - 1 - back));
        let fate = match self.random.below(6) {
            _ if self.keeps_lists => ListFate::Kept,
            0 => ListFate::Lost,
            1 => ListFate::OfAnotherTime,
            _ => ListFate::Kept,
        };
        let (at_unix_ms, has_later) = (self.unix_ms(), self.random.percent(50));
        self.say(|| format!("its list of hosts is {fate:?}"));
        self.hosts[host].put_back(backups - 1 - back, at_unix_ms, fate, has_later);
        self.shown.restores += 1;
    }

    fn change_link(&mut self) {
        let (one, other) = (self.random.index(self.hosts.len()), self.random.index(self.hosts.len()));
        let pair = (one.min(other), one.max(other));
        if self.down.contains(&pair) {
            self.down.retain(|down| *down != pair);
        } else if one != other {
            self.down.push(pair);
        }
    }

    fn is_connected(&self, one: usize, other: usize) -> bool {
        let is_paired =
            |one: usize, other: usize| self.hosts[one].list.paired.contains(&self.hosts[other].id);
        is_paired(one, other)
            && is_paired(other, one)
            && !self.down.contains(&(one.min(other), one.max(other)))
    }

    fn violated(&mut self, what: impl FnOnce() -> String) {
        let what = what();
        self.say(|| format!("violation: {what}"));
        self.violation.get_or_insert(what);
    }

    fn say(&self, what: impl FnOnce() -> String) {
        if self.telling == Telling::Printed {
            println!("{:>9.3} {}", self.now.as_secs_f64(), what());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn journals_that_are_put_back_never_make_two_owners_nor_lose_what_was_acknowledged() {
        let shown = campaign(0, 2000, false);
        assert_eq!(shown.violations, []);
        for seen in
            [shown.writes, shown.restores, shown.confirmed, shown.ordered, shown.given_up, shown.refused]
        {
            assert!(seen > 100, "{shown:?}");
        }
    }
}
