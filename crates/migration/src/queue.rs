//! Decides which migrations may begin. Beyond a limit they wait in the order of their commands.
//!
//! ```text
//!   ordered ──► room? ──yes──► admitted ──► begun ──► under way ──► ended ─┐
//!                 │ no                                                     │ a turn
//!                 └──► waits ──► its place, and what it waits for ◄────────┘
//! ```
//! A migration that waits for a store keeps its place there. No later one overtakes it into any store that it needs, but
//! migrations that need none of these stores proceed. So nothing waits for ever, and no store is idle because of another.
//!
//! Only this host's own orders count. Arrivals from other hosts have [shares of their own](crate::shares), and cannot keep this
//! host's orders waiting.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::identity::{HostId, MigrationId, VolumeId};
use crate::journal::MigratingVolume;
use crate::planted::{Bug, broken};

/// The limits on migrations under way at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueLimits {
    /// The limit on this host.
    pub per_host: u32,
    /// The limit of migrations that read from or write to one store.
    pub per_store: u32,
}

/// The resources that a migration uses while it is under way, besides this host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Need {
    /// The stores that it reads from or writes to; stores of another host as `HOST:STORE`, or `HOST`.
    stores: BTreeSet<String>,
}

/// The obstacle that a migration waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// The host has reached its limit of migrations.
    Host {
        /// The limit of the host.
        limit: u32,
    },
    /// A store has reached its limit of migrations.
    Store {
        /// The name of the store.
        store: String,
        /// The limit of the store.
        limit: u32,
    },
    /// The volume lacks blocks, which are being fetched.
    Filling {
        /// The host that they come from.
        from: String,
    },
    /// The time that was ordered for its beginning has not come.
    Time {
        /// The time, in milliseconds since 1970.
        unix_ms: u64,
    },
}

/// A migration that wants to begin.
#[derive(Clone, Debug)]
pub struct Claimant {
    /// The stores that it uses.
    pub need: Need,
    /// An obstacle of its own; meanwhile it takes no room from others.
    pub own_obstacle: Option<Obstacle>,
}

/// An order, as far as its turn depends on it.
pub trait Wish: Clone {
    /// Returns the volumes that move.
    fn volumes(&self) -> &[VolumeId];

    /// Returns the stores that it uses.
    fn need(&self) -> &Need;

    /// Returns the destination host if the volumes are complete there before the handover; otherwise `None`.
    fn is_copied_to(&self) -> Option<HostId>;

    /// Returns the time, in milliseconds since 1970, before which it does not begin; `None`: it begins in its turn.
    fn not_before_unix_ms(&self) -> Option<u64>;
}

/// What turns depend on besides the queue itself.
#[derive(Clone, Debug, Default)]
pub struct Present {
    /// The operations that are under way.
    pub under_way: Vec<UnderWay>,
    /// The time of day, in milliseconds since 1970. **N.B.** It may jump.
    pub now_unix_ms: u64,
}

/// The party that has ordered a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Party {
    /// An administrator of this host.
    Own,
    /// Another host, which brings volumes.
    Peer(HostId),
}

/// An operation that is under way.
#[derive(Clone, Debug)]
pub enum UnderWay {
    /// A migration from or to this host.
    Migration {
        /// The party that ordered it.
        of: Party,
        /// The volumes that it moves.
        volumes: Vec<VolumeId>,
        /// The stores that it uses.
        need: Need,
    },
    /// A volume is being filled from another host. It counts for no limit, and may move only to that host meanwhile.
    Filling {
        /// The volume that is filled.
        volume: VolumeId,
        /// The host with the missing blocks …
        peer: HostId,
        /// … and its name.
        from: String,
        /// The volumes that came with it, itself included; they may return only together.
        together: Vec<VolumeId>,
    },
}

/// The right to begin, by its number. It counts as a migration under way until it is given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Admission(u64);

/// The decision on an order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Turn<A> {
    /// The order may begin.
    Now(A),
    /// The order must wait, at this place.
    Later(QueuePlace),
    /// A volume of the order already waits in this migration.
    Waits(MigrationId),
}

/// A migration's place in the queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueuePlace {
    /// The place, counted from 1.
    pub place: u64,
    /// The number of migrations that wait, this one included.
    pub waiting: u64,
    /// The obstacle; `None` if its turn has come and it is about to begin.
    pub obstacle: Option<Obstacle>,
}

/// The result of withdrawing a migration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Withdrawal<W> {
    /// The migration does not wait.
    Unknown,
    /// The turn of the migration has just come.
    Begins(W),
    /// The migration has left the queue.
    Withdrawn(W),
}

/// The queue of a host.
#[derive(Debug)]
pub struct Queue<W> {
    limits: QueueLimits,
    waiting_max: usize,
    /// Migrations that wait, and those whose turn it is until the journal knows them; in order.
    waiting: BTreeMap<MigrationId, Waiting<W>>,
    /// Migrations that may begin, until they are known to be under way or have failed.
    admitted: BTreeMap<Admission, Admitted>,
    next_admission: u64,
}

#[derive(Debug)]
struct Admitted {
    volumes: Vec<VolumeId>,
    need: Need,
}

#[derive(Debug)]
struct Waiting<W> {
    wish: W,
    begins: bool,
}

impl Need {
    /// Returns the stores that a migration of these volumes uses. An image served in place is in no store.
    pub fn of(volumes: &[MigratingVolume]) -> Self {
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
            Self::Filling { from } => {
                write!(f, "it still lacks blocks of host \"{from}\"")
            }
            Self::Time { .. } => write!(f, "the time that was ordered for its beginning"),
        }
    }
}

/// Returns the obstacle of each waiting migration, in order; `None` if it may begin.
pub fn judge(limits: QueueLimits, under_way: &[Need], waiting: &[Claimant]) -> Vec<Option<Obstacle>> {
    let mut on_host = under_way.len();
    let mut in_stores = BTreeMap::<&str, usize>::new();
    for store in under_way.iter().flat_map(|need| &need.stores) {
        *in_stores.entry(store).or_default() += 1;
    }
    let judged = waiting.iter().map(|Claimant { need, own_obstacle }| {
        if own_obstacle.is_some() {
            return own_obstacle.clone();
        }
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
        // Also for a waiting migration, so that a later one does not take its place.
        for store in &need.stores {
            *in_stores.entry(store).or_default() += 1;
        }
        obstacle
    });
    judged.collect()
}

impl<W: Wish> Queue<W> {
    /// Returns an empty queue, in which at most `waiting_max` migrations wait.
    pub fn new(limits: QueueLimits, waiting_max: usize) -> Self {
        let (waiting, admitted) = (BTreeMap::new(), BTreeMap::new());
        Self { limits, waiting_max, waiting, admitted, next_admission: 0 }
    }

    /// Changes the limits. Migrations beyond them continue.
    pub fn set_limits(&mut self, limits: QueueLimits) {
        self.limits = limits;
    }

    /// Decides whether an order may begin beside the operations of [`Present`].
    pub fn ask(&mut self, wish: &W, present: &Present) -> Turn<Admission> {
        match self.outlook(wish, present) {
            Turn::Now(()) => Turn::Now(self.admit(wish)),
            Turn::Later(place) => Turn::Later(place),
            Turn::Waits(id) => Turn::Waits(id),
        }
    }

    /// Returns the answer of [`Queue::ask`] without admitting anything.
    pub fn outlook(&self, wish: &W, present: &Present) -> Turn<()> {
        let is_here =
            |waiting: &Waiting<W>| waiting.wish.volumes().iter().any(|id| wish.volumes().contains(id));
        if let Some((id, _)) = self.waiting.iter().find(|(_, waiting)| is_here(waiting)) {
            return Turn::Waits(*id);
        }
        let mut line: Vec<Claimant> =
            self.in_line().map(|(_, waiting)| claimant(&waiting.wish, present)).collect();
        line.push(claimant(wish, present));
        let place = line.len() as u64;
        match judge(self.limits, &self.used(present), &line).pop().flatten() {
            None => Turn::Now(()),
            obstacle => Turn::Later(QueuePlace { place, waiting: place, obstacle }),
        }
    }

    /// Returns whether a waiting migration lacks a place on this host because its own orders have reached the limit.
    pub fn has_used_up_the_host(&self, present: &Present) -> bool {
        let line: Vec<Claimant> =
            self.in_line().map(|(_, waiting)| claimant(&waiting.wish, present)).collect();
        let judged = judge(self.limits, &self.used(present), &line);
        judged.into_iter().any(|obstacle| matches!(obstacle, Some(Obstacle::Host { .. })))
    }

    /// Adds a migration to the queue; returns `false` if it is full.
    pub fn join(&mut self, id: MigrationId, wish: W) -> bool {
        let has_room = !self.is_full();
        if has_room {
            self.waiting.insert(id, Waiting { wish, begins: false });
        }
        has_room
    }

    /// Returns whether the queue has reached its limit.
    pub fn is_full(&self) -> bool {
        self.waiting.len() >= self.waiting_max
    }

    /// Returns the migrations whose turn it is, in order. They must be begun now.
    pub fn next(&mut self, present: &Present) -> Vec<(MigrationId, W, Admission)> {
        let (ids, line): (Vec<_>, Vec<_>) =
            self.in_line().map(|(id, waiting)| (id, claimant(&waiting.wish, present))).unzip();
        let judged = judge(self.limits, &self.used(present), &line).into_iter().zip(ids);
        let begin: Vec<_> = judged.filter(|(obstacle, _)| obstacle.is_none()).map(|(_, id)| id).collect();
        let mut begun = Vec::new();
        for id in begin {
            let Some(waiting) = self.waiting.get_mut(&id) else { continue };
            waiting.begins = true;
            let wish = waiting.wish.clone();
            let admission = self.admit(&wish);
            begun.push((id, wish, admission));
        }
        begun
    }

    /// Puts a migration whose turn had come back into its former place.
    pub fn wait_again(&mut self, id: MigrationId) {
        if let Some(waiting) = self.waiting.get_mut(&id) {
            waiting.begins = false;
        }
    }

    /// Removes a migration whose turn had come, because it has begun or ended.
    pub fn leave(&mut self, id: MigrationId) {
        self.waiting.remove(&id);
    }

    /// Removes a waiting migration from the queue.
    pub fn withdraw(&mut self, id: MigrationId) -> Withdrawal<W> {
        match self.waiting.get(&id) {
            None => Withdrawal::Unknown,
            Some(Waiting { begins: true, wish }) => Withdrawal::Begins(wish.clone()),
            Some(_) => match self.waiting.remove(&id) {
                Some(waiting) => Withdrawal::Withdrawn(waiting.wish),
                None => Withdrawal::Unknown,
            },
        }
    }

    /// Gives back the right to begin, once the migration is known to be under way or has failed.
    pub fn give_back(&mut self, admission: Admission) {
        self.admitted.remove(&admission);
    }

    /// Returns the migration of this volume that waits or is about to begin.
    pub fn of(&self, volume: VolumeId) -> Option<MigrationId> {
        let mut waiting = self.waiting.iter();
        waiting.find(|(_, waiting)| waiting.wish.volumes().contains(&volume)).map(|(id, _)| *id)
    }

    /// Returns the order that waits, or is about to begin, under this number.
    pub fn get(&self, id: MigrationId) -> Option<&W> {
        self.waiting.get(&id).map(|waiting| &waiting.wish)
    }

    /// Returns the migrations that wait or are about to begin, in order.
    pub fn ids(&self) -> impl Iterator<Item = MigrationId> {
        self.waiting.keys().copied()
    }

    /// Returns the lowest number for the next migration, behind those that wait.
    pub fn next_free(&self) -> u64 {
        self.waiting.last_key_value().map_or(0, |(id, _)| id.0 + 1)
    }

    /// Returns the next time, in milliseconds since 1970, at which a waiting migration's ordered time comes.
    pub fn next_time(&self, now_unix_ms: u64) -> Option<u64> {
        let times = self.in_line().filter_map(|(_, waiting)| waiting.wish.not_before_unix_ms());
        times.filter(|unix_ms| *unix_ms > now_unix_ms).min()
    }

    /// Returns the place of a waiting migration; `None` if it does not wait, or its turn has come.
    pub fn place(&self, id: MigrationId, present: &Present) -> Option<QueuePlace> {
        let (ids, line): (Vec<_>, Vec<_>) =
            self.in_line().map(|(id, waiting)| (id, claimant(&waiting.wish, present))).unzip();
        let index = ids.iter().position(|waits| *waits == id)?;
        let obstacle = judge(self.limits, &self.used(present), &line).into_iter().nth(index).flatten();
        Some(QueuePlace { place: index as u64 + 1, waiting: ids.len() as u64, obstacle })
    }

    fn admit(&mut self, wish: &W) -> Admission {
        let admission = Admission(self.next_admission);
        self.next_admission += 1;
        self.admitted
            .insert(admission, Admitted { volumes: wish.volumes().to_vec(), need: wish.need().clone() });
        admission
    }

    /// Returns the resources used by operations under way and by admitted ones. An operation in both states counts once.
    fn used(&self, present: &Present) -> Vec<Need> {
        let is_admitted =
            |volume: &VolumeId| self.admitted.values().any(|admitted| admitted.volumes.contains(volume));
        let others = present.under_way.iter().filter_map(|other| match other {
            UnderWay::Migration { of: Party::Peer(_), .. } if !broken(Bug::PlacesCountedTogether) => None,
            UnderWay::Migration { volumes, need, .. } => {
                (!volumes.iter().any(is_admitted)).then(|| need.clone())
            }
            UnderWay::Filling { .. } => None,
        });
        self.admitted.values().map(|admitted| admitted.need.clone()).chain(others).collect()
    }

    fn in_line(&self) -> impl Iterator<Item = (MigrationId, &Waiting<W>)> {
        self.waiting.iter().filter(|(_, waiting)| !waiting.begins).map(|(id, waiting)| (*id, waiting))
    }
}

fn claimant<W: Wish>(wish: &W, present: &Present) -> Claimant {
    let goes_back = |peer: &HostId, together: &[VolumeId]| {
        wish.is_copied_to() == Some(*peer)
            && wish.volumes().len() == together.len()
            && wish.volumes().iter().all(|volume| together.contains(volume))
    };
    let filling = present.under_way.iter().find_map(|other| match other {
        UnderWay::Filling { volume, peer, from, together }
            if wish.volumes().contains(volume) && !goes_back(peer, together) =>
        {
            Some(Obstacle::Filling { from: from.clone() })
        }
        _ => None,
    });
    let later = wish.not_before_unix_ms().filter(|unix_ms| *unix_ms > present.now_unix_ms);
    let own_obstacle = later.map(|unix_ms| Obstacle::Time { unix_ms }).or(filling);
    Claimant { need: wish.need().clone(), own_obstacle }
}

#[cfg(test)]
mod tests;
