//! Starts VMs in their order: after a boot of the host, when ordered, and after a promotion.
//!
//! ```text
//!   due ─► starting ─┬─ started ─┬───────────────► done
//!                    │           └─ watched ─ready─┘ or its time is over: done, late
//!                    └─ failed ─► tried again, after 2 s, 4 s … 60 s, until it starts or is withdrawn
//! ```
//! VMs of one order start together, and the next order follows when all of them are done. A VM that does not start, or does not
//! get ready, holds the later ones up for its own `wait_max` at most. **N.B.** One broken VM must not keep a site down.

use std::collections::BTreeMap;
use std::time::Duration;

/// How many VMs are being started at a time: more only take the disks from each other.
pub const AT_ONCE: usize = 4;
/// The wait after the first failure. It doubles with each further one.
pub const RETRY_FIRST: Duration = Duration::from_secs(2);
/// The longest wait between two attempts.
pub const RETRY_MAX: Duration = Duration::from_secs(60);

/// A VM that is to start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Its name, unique at the host.
    pub name: String,
    /// VMs with a lower one start first.
    pub order: u16,
    /// Whether later VMs wait until it is ready, and not only until it has started.
    pub is_watched: bool,
    /// The longest that it holds up later VMs, from its first attempt on.
    pub wait_max: Duration,
}

/// Whether a VM that could not be started is tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// Until it has started, or is withdrawn.
    UntilStarted,
    /// Never: the order fails.
    Never,
}

/// Where a VM is on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// VMs of a lower order are not done, or as many as may be are being started.
    Due,
    /// The daemon is starting it.
    Starting,
    /// It has failed so many times, and is tried again at this time; `None`: it is not tried again.
    Failed {
        /// How many attempts have failed.
        attempts: u32,
        /// The time of the next attempt.
        again_at: Option<Duration>,
    },
    /// It has started, and later VMs wait until it is ready.
    Watched,
    /// It has started, and holds up nobody. It need not be watched.
    Done {
        /// Whether it did not get ready within its time.
        is_late: bool,
    },
}

#[derive(Clone, Debug)]
struct Entry {
    candidate: Candidate,
    phase: Phase,
    failures: u32,
    /// The time until which it holds up later ones, once it was tried.
    held_until: Option<Duration>,
}

impl Entry {
    fn holds_up(&self, now: Duration) -> bool {
        let is_through = matches!(self.phase, Phase::Done { .. } | Phase::Failed { again_at: None, .. });
        !is_through && self.held_until.is_none_or(|until| now < until)
    }
}

/// Starts VMs in their order. Times are durations since any fixed moment.
#[derive(Clone, Debug)]
pub struct Starts {
    retry: Retry,
    entries: BTreeMap<String, Entry>,
    now: Duration,
}

impl Starts {
    /// Makes a machine that starts these VMs.
    pub fn new(retry: Retry, candidates: impl IntoIterator<Item = Candidate>, now: Duration) -> Self {
        let mut starts = Self { retry, entries: BTreeMap::new(), now };
        starts.add(candidates);
        starts
    }

    /// Adds VMs. A VM that is being started stays where it is.
    pub fn add(&mut self, candidates: impl IntoIterator<Item = Candidate>) {
        for candidate in candidates {
            let is_on_its_way = self.entries.get(&candidate.name).is_some_and(|known| {
                !matches!(known.phase, Phase::Done { .. } | Phase::Failed { again_at: None, .. })
            });
            if !is_on_its_way {
                let name = candidate.name.clone();
                let entry = Entry { candidate, phase: Phase::Due, failures: 0, held_until: None };
                self.entries.insert(name, entry);
            }
        }
    }

    /// Takes the present time.
    pub fn handle_timeout(&mut self, now: Duration) {
        self.now = now.max(self.now);
        for entry in self.entries.values_mut() {
            let is_over = entry.held_until.is_some_and(|until| until <= self.now);
            if entry.phase == Phase::Watched && is_over {
                entry.phase = Phase::Done { is_late: true };
            }
        }
    }

    /// A VM runs: it has started, or ran already.
    pub fn started(&mut self, name: &str) {
        let (now, Some(entry)) = (self.now, self.entries.get_mut(name)) else { return };
        if matches!(entry.phase, Phase::Starting | Phase::Due | Phase::Failed { .. }) {
            let in_time = entry.held_until.is_none_or(|until| now < until);
            entry.phase = match entry.candidate.is_watched {
                true if in_time => Phase::Watched,
                is_watched => Phase::Done { is_late: is_watched },
            };
            // Another order may have started it before its turn.
            entry.held_until.get_or_insert(now + entry.candidate.wait_max);
        }
    }

    /// A VM could not be started.
    pub fn failed(&mut self, name: &str) {
        let (now, retry) = (self.now, self.retry);
        let Some(entry) = self.entries.get_mut(name) else { return };
        if entry.phase == Phase::Starting {
            let wait = RETRY_FIRST.saturating_mul(1 << entry.failures.min(5)).min(RETRY_MAX);
            entry.failures = entry.failures.saturating_add(1);
            let again_at = (retry == Retry::UntilStarted).then_some(now + wait);
            entry.phase = Phase::Failed { attempts: entry.failures, again_at };
        }
    }

    /// A watched VM is ready.
    pub fn ready(&mut self, name: &str) {
        if let Some(entry) = self.entries.get_mut(name).filter(|entry| entry.phase == Phase::Watched) {
            entry.phase = Phase::Done { is_late: false };
        }
    }

    /// Forgets a VM: it was stopped or removed, or is not to start at a boot.
    pub fn withdraw(&mut self, name: &str) {
        self.entries.remove(name);
    }

    /// Returns the VM that is to be started now, if there is one. The daemon starts it, then calls [`Self::started`] or
    /// [`Self::failed`].
    pub fn poll(&mut self) -> Option<String> {
        let now = self.now;
        let holding = self.entries.values().filter(|entry| entry.holds_up(now));
        let lowest = holding.map(|entry| entry.candidate.order).min().unwrap_or(u16::MAX);
        let starting = self.entries.values().filter(|entry| entry.phase == Phase::Starting).count();
        if starting >= AT_ONCE {
            return None;
        }
        let may_start = |entry: &&mut Entry| match entry.phase {
            Phase::Due => entry.candidate.order <= lowest,
            Phase::Failed { again_at: Some(at), .. } => at <= now,
            _ => false,
        };
        // VMs that have not been tried go before those that have failed.
        let next = self.entries.values_mut().filter(may_start);
        let entry = next.min_by_key(|entry| (entry.failures, entry.candidate.order))?;
        entry.phase = Phase::Starting;
        entry.held_until.get_or_insert(now + entry.candidate.wait_max);
        Some(entry.candidate.name.clone())
    }

    /// Returns the time at which something changes by itself.
    pub fn poll_timeout(&self) -> Option<Duration> {
        let next = |entry: &Entry| {
            let held = entry.held_until.filter(|_| entry.holds_up(self.now));
            match entry.phase {
                Phase::Failed { again_at: Some(at), .. } => Some(held.map_or(at, |held| held.min(at))),
                Phase::Starting | Phase::Watched => held,
                _ => None,
            }
        };
        self.entries.values().filter_map(next).filter(|at| *at > self.now).min()
    }

    /// Returns the VMs to look at: whether they are ready.
    pub fn watched(&self) -> Vec<String> {
        let watched = self.entries.iter().filter(|(_, entry)| entry.phase == Phase::Watched);
        watched.map(|(name, _)| name.clone()).collect()
    }

    /// Returns where a VM is; `None`: it is none of these.
    pub fn phase(&self, name: &str) -> Option<Phase> {
        self.entries.get(name).map(|entry| entry.phase)
    }

    /// Returns how many attempts to start a VM have failed.
    pub fn failures(&self, name: &str) -> u32 {
        self.entries.get(name).map_or(0, |entry| entry.failures)
    }

    /// Returns whether a VM is still to be started.
    pub fn is_to_start(&self, name: &str) -> bool {
        matches!(
            self.phase(name),
            Some(Phase::Due | Phase::Starting | Phase::Failed { again_at: Some(_), .. })
        )
    }

    /// Returns whether every VM is done, or has failed for good.
    pub fn is_over(&self) -> bool {
        let is_through =
            |entry: &Entry| matches!(entry.phase, Phase::Done { .. } | Phase::Failed { again_at: None, .. });
        self.entries.values().all(is_through)
    }
}

#[cfg(test)]
mod tests;
