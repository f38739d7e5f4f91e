//! Who may begin: migrations beyond a limit wait for their turn, in the order in which they were ordered.
//!
//! ```text
//!   ordered ──► room? ──yes──► admitted ──► begun ──► under way ──► ended ─┐
//!                 │ no                                                     │ a turn
//!                 └──► waits ──► its place, and what it waits for ◄────────┘
//! ```
//! One that waits for a store keeps its place there: what was ordered later does not overtake it into any store that it
//! needs, but what needs none of them goes on. So nothing waits for ever, and no store stands idle for another's sake.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use api::{MigrateVolume, Migration};
use migration::journal::MigratingVolume;
use migration::{MigrationId, VolumeId};
use tokio::sync::watch;

use crate::config::QueueLimits;
use crate::journal::now_unix_ms;

/// Migrations that wait at most: what somebody orders by hand or for all VMs of a large host; a program that orders
/// without end is told so.
pub(crate) const WAITING_MAX: usize = 1000;

/// What a migration uses while it is under way, besides this host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Need {
    /// Stores that it reads from or writes to; those of another host as `HOST:STORE`, or `HOST`.
    stores: BTreeSet<String>,
}

/// What a migration waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Obstacle {
    /// The host has as many migrations as it may have.
    Host {
        /// How many that are.
        limit: u32,
    },
    /// A store has as many.
    Store {
        /// Which.
        store: String,
        /// How many that are.
        limit: u32,
    },
}

/// What is ordered, as far as its turn depends on it.
#[derive(Clone, Debug)]
pub(crate) struct Wish {
    /// The volume, or the VM, that it is ordered for.
    pub(crate) name: String,
    /// What is ordered.
    pub(crate) order: MigrateVolume,
    /// The volumes that move.
    pub(crate) volumes: Vec<VolumeId>,
    /// What it uses.
    pub(crate) need: Need,
    /// As people see it while it waits; its place is added.
    pub(crate) shown: Box<Migration>,
}

/// A migration that is under way.
#[derive(Clone, Debug)]
pub(crate) struct UnderWay {
    /// Its volumes.
    pub(crate) volumes: Vec<VolumeId>,
    /// What it uses.
    pub(crate) need: Need,
}

/// The queue of a host.
#[derive(Debug)]
pub(crate) struct Queue {
    limits: QueueLimits,
    desk: Mutex<Desk>,
    /// Counts changes of places and what may be a turn: a migration that ended, one that was ordered.
    turns: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Desk {
    /// Those that wait, and those whose turn it is until the journal knows them; in order.
    waiting: BTreeMap<MigrationId, Waiting>,
    /// Those that may begin, until they are known to be under way or to have come to nothing.
    admitted: BTreeMap<u64, Admitted>,
    next_admission: u64,
}

#[derive(Debug)]
struct Waiting {
    wish: Wish,
    /// Whether its turn has come.
    begins: bool,
}

#[derive(Debug)]
struct Admitted {
    volumes: Vec<VolumeId>,
    need: Need,
}

/// The right to begin; it counts as a migration under way until it is dropped.
#[derive(Debug)]
pub(crate) struct Admission {
    queue: Arc<Queue>,
    number: u64,
}

/// What becomes of an order.
#[derive(Debug)]
pub(crate) enum Turn {
    /// It may begin.
    Now(Admission),
    /// It must wait.
    Later,
    /// A volume of it waits already, in this migration.
    Waits(MigrationId),
}

/// What would become of an order.
#[derive(Debug)]
pub(crate) enum Outlook {
    /// It might begin.
    Now,
    /// It would wait.
    Later(api::QueuePlace),
    /// A volume of it waits already, in this migration.
    Waits(MigrationId),
}

/// What becomes of the wish to withdraw a migration.
#[derive(Debug)]
pub(crate) enum Withdrawal {
    /// It does not wait.
    Unknown,
    /// Its turn has just come.
    Begins {
        /// What it was ordered for.
        name: String,
    },
    /// It waits no more.
    Withdrawn(Box<Wish>),
}

impl Need {
    /// What a migration of these volumes uses. An image that is served in place is in no store.
    pub(crate) fn of(volumes: &[MigratingVolume]) -> Self {
        let stores = volumes.iter().flat_map(|moving| [&moving.source.store, &moving.target.store]);
        Self { stores: stores.filter(|store| !store.is_empty()).cloned().collect() }
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let migrations = |count: &u32| {
            if *count == 1 { "one migration".to_owned() } else { format!("{count} migrations") }
        };
        match self {
            Self::Host { limit } => {
                write!(
                    f,
                    "this host has {} under way, as many as limits.migrations_per_host allows",
                    migrations(limit)
                )
            }
            Self::Store { store, limit } => write!(
                f,
                "the store \"{store}\" has {} under way or before this one, as many as limits.migrations_per_store allows",
                migrations(limit)
            ),
        }
    }
}

/// What each of those that wait waits for, in their order; `None`: it may begin.
pub(crate) fn judge(limits: QueueLimits, under_way: &[Need], waiting: &[Need]) -> Vec<Option<Obstacle>> {
    let mut on_host = under_way.len();
    let mut in_stores = BTreeMap::<&str, usize>::new();
    for store in under_way.iter().flat_map(|need| &need.stores) {
        *in_stores.entry(store).or_default() += 1;
    }
    let judged = waiting.iter().map(|need| {
        let is_full = |store: &&String| {
            in_stores.get(store.as_str()).is_some_and(|count| *count >= limits.per_store as usize)
        };
        let obstacle = if on_host >= limits.per_host as usize {
            Some(Obstacle::Host { limit: limits.per_host })
        } else if let Some(store) = need.stores.iter().find(is_full) {
            Some(Obstacle::Store { store: store.clone(), limit: limits.per_store })
        } else {
            on_host += 1;
            None
        };
        // Also of one that waits: nobody behind it takes its place.
        for store in &need.stores {
            *in_stores.entry(store).or_default() += 1;
        }
        obstacle
    });
    judged.collect()
}

impl Queue {
    /// Nothing waits.
    pub(crate) fn new(limits: QueueLimits) -> Self {
        Self { limits, desk: Mutex::default(), turns: watch::Sender::new(1) }
    }

    /// Asks whether something may begin. `under_way` is asked while nothing else is admitted.
    pub(crate) fn ask(self: &Arc<Self>, wish: &Wish, under_way: impl FnOnce() -> Vec<UnderWay>) -> Turn {
        let mut desk = self.lock();
        if let Some(id) = desk.of(wish) {
            return Turn::Waits(id);
        }
        let used = desk.used(under_way());
        let mut waiting: Vec<Need> = desk.in_line().map(|(_, waiting)| waiting.wish.need.clone()).collect();
        waiting.push(wish.need.clone());
        match judge(self.limits, &used, &waiting).pop().flatten() {
            None => Turn::Now(self.admit(&mut desk, wish)),
            Some(_) => Turn::Later,
        }
    }

    /// Says what [`Queue::ask`] would say; nothing is admitted.
    pub(crate) fn outlook(&self, wish: &Wish, under_way: impl FnOnce() -> Vec<UnderWay>) -> Outlook {
        let desk = self.lock();
        if let Some(id) = desk.of(wish) {
            return Outlook::Waits(id);
        }
        let used = desk.used(under_way());
        let mut waiting: Vec<Need> = desk.in_line().map(|(_, waiting)| waiting.wish.need.clone()).collect();
        waiting.push(wish.need.clone());
        let place = waiting.len() as u64;
        match judge(self.limits, &used, &waiting).pop().flatten() {
            None => Outlook::Now,
            Some(obstacle) => {
                Outlook::Later(api::QueuePlace { place, waiting: place, reason: obstacle.to_string() })
            }
        }
    }

    /// Lets a migration wait; false: too many do.
    pub(crate) fn join(&self, id: MigrationId, wish: Wish) -> bool {
        let mut desk = self.lock();
        let has_room = desk.waiting.len() < WAITING_MAX;
        if has_room {
            desk.waiting.insert(id, Waiting { wish, begins: false });
        }
        drop(desk);
        self.turn();
        has_room
    }

    /// Whether as many wait as may.
    pub(crate) fn is_full(&self) -> bool {
        self.lock().waiting.len() >= WAITING_MAX
    }

    /// Those whose turn it is, in order: they are to be begun now.
    pub(crate) fn next(
        self: &Arc<Self>,
        under_way: impl FnOnce() -> Vec<UnderWay>,
    ) -> Vec<(MigrationId, Wish, Admission)> {
        let mut desk = self.lock();
        let used = desk.used(under_way());
        let (ids, needs): (Vec<_>, Vec<_>) =
            desk.in_line().map(|(id, waiting)| (id, waiting.wish.need.clone())).unzip();
        let judged = judge(self.limits, &used, &needs).into_iter().zip(ids);
        let begin: Vec<_> = judged.filter(|(obstacle, _)| obstacle.is_none()).map(|(_, id)| id).collect();
        let mut begun = Vec::new();
        for id in begin {
            let Some(waiting) = desk.waiting.get_mut(&id) else { continue };
            waiting.begins = true;
            let wish = waiting.wish.clone();
            let admission = self.admit(&mut desk, &wish);
            begun.push((id, wish, admission));
        }
        begun
    }

    /// A migration whose turn had come waits again, where it was.
    pub(crate) fn wait_again(&self, id: MigrationId) {
        if let Some(waiting) = self.lock().waiting.get_mut(&id) {
            waiting.begins = false;
        }
    }

    /// A migration whose turn had come has begun, or has ended.
    pub(crate) fn leave(&self, id: MigrationId) {
        self.lock().waiting.remove(&id);
        self.turn();
    }

    /// Takes a migration out that waits.
    pub(crate) fn withdraw(&self, id: MigrationId) -> Withdrawal {
        let mut desk = self.lock();
        let withdrawal = match desk.waiting.get(&id) {
            None => return Withdrawal::Unknown,
            Some(Waiting { begins: true, wish }) => return Withdrawal::Begins { name: wish.name.clone() },
            Some(_) => desk.waiting.remove(&id),
        };
        drop(desk);
        self.turn();
        withdrawal.map_or(Withdrawal::Unknown, |waiting| Withdrawal::Withdrawn(Box::new(waiting.wish)))
    }

    /// The migration that waits with this volume, or is about to begin.
    pub(crate) fn of(&self, volume: VolumeId) -> Option<MigrationId> {
        let desk = self.lock();
        let mut waiting = desk.waiting.iter();
        waiting.find(|(_, waiting)| waiting.wish.volumes.contains(&volume)).map(|(id, _)| *id)
    }

    /// Whether a migration waits, or is about to begin.
    pub(crate) fn has(&self, id: MigrationId) -> bool {
        self.lock().waiting.contains_key(&id)
    }

    /// Those that wait, or are about to begin, in order.
    pub(crate) fn ids(&self) -> Vec<MigrationId> {
        self.lock().waiting.keys().copied().collect()
    }

    /// The number that the next migration may have at the earliest: those that wait have theirs already.
    pub(crate) fn next_free(&self) -> u64 {
        self.lock().waiting.last_key_value().map_or(0, |(id, _)| id.0 + 1)
    }

    /// A migration that waits, as people see it.
    pub(crate) fn show(
        &self,
        id: MigrationId,
        under_way: impl FnOnce() -> Vec<UnderWay>,
    ) -> Option<Migration> {
        let desk = self.lock();
        let waiting = desk.waiting.get(&id)?;
        let mut shown = (*waiting.wish.shown).clone();
        shown.change = *self.turns.borrow();
        let since = now_unix_ms().saturating_sub(shown.started_unix_ms);
        shown.seconds = since as f64 / 1000.0;
        if waiting.begins {
            shown.waiting_for =
                Some(api::WaitingFor { reason: "its beginning".to_owned(), remaining_ms: None });
            return Some(shown);
        }
        let line: Vec<(MigrationId, Need)> =
            desk.in_line().map(|(id, waiting)| (id, waiting.wish.need.clone())).collect();
        let used = desk.used(under_way());
        let needs: Vec<Need> = line.iter().map(|(_, need)| need.clone()).collect();
        let place = line.iter().position(|(waits, _)| *waits == id)?;
        let obstacle = judge(self.limits, &used, &needs).into_iter().nth(place).flatten();
        let reason = obstacle.map_or_else(|| "its beginning".to_owned(), |obstacle| obstacle.to_string());
        let place = api::QueuePlace { place: place as u64 + 1, waiting: line.len() as u64, reason };
        let reason = format!("its turn, as number {} of {}: {}", place.place, place.waiting, place.reason);
        shown.waiting_for = Some(api::WaitingFor { reason, remaining_ms: None });
        shown.queue = Some(place);
        Some(shown)
    }

    /// Counts what may be a turn, or has changed somebody's place.
    pub(crate) fn turn(&self) {
        self.turns.send_modify(|turns| *turns += 1);
    }

    /// What [`Queue::turn`] counts.
    pub(crate) fn turns(&self) -> watch::Receiver<u64> {
        self.turns.subscribe()
    }

    fn admit(self: &Arc<Self>, desk: &mut Desk, wish: &Wish) -> Admission {
        let number = desk.next_admission;
        desk.next_admission += 1;
        let admitted = Admitted { volumes: wish.volumes.clone(), need: wish.need.clone() };
        desk.admitted.insert(number, admitted);
        Admission { queue: Arc::clone(self), number }
    }

    fn lock(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Desk {
    /// The migration that waits with a volume of this one.
    fn of(&self, wish: &Wish) -> Option<MigrationId> {
        let is_here = |waiting: &Waiting| waiting.wish.volumes.iter().any(|id| wish.volumes.contains(id));
        self.waiting.iter().find(|(_, waiting)| is_here(waiting)).map(|(id, _)| *id)
    }

    /// What is used: by those under way, and by those that may begin. One that is both is counted once.
    fn used(&self, under_way: Vec<UnderWay>) -> Vec<Need> {
        let is_admitted =
            |volume: &VolumeId| self.admitted.values().any(|admitted| admitted.volumes.contains(volume));
        let others = under_way.into_iter().filter(|other| !other.volumes.iter().any(is_admitted));
        let others = others.map(|other| other.need);
        self.admitted.values().map(|admitted| admitted.need.clone()).chain(others).collect()
    }

    /// Those whose turn has not come.
    fn in_line(&self) -> impl Iterator<Item = (MigrationId, &Waiting)> {
        self.waiting.iter().filter(|(_, waiting)| !waiting.begins).map(|(id, waiting)| (*id, waiting))
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        self.queue.lock().admitted.remove(&self.number);
        self.queue.turn();
    }
}

#[cfg(test)]
mod tests;
