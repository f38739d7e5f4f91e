//! Which migrations may begin: beyond a limit they wait for their turn, in the order in which they were ordered.
//!
//! ```text
//!   ordered ──► room? ──yes──► admitted ──► begun ──► under way ──► ended ─┐
//!                 │ no                                                     │ a turn
//!                 └──► waits ──► its place, and what it waits for ◄────────┘
//! ```
//! One that waits for a store keeps its place there: what was ordered later does not overtake it into any store that it
//! needs, but what needs none of them goes on. So nothing waits for ever, and no store stands idle for another's sake.
//!
//! Only what was ordered here takes places. What other hosts bring has [shares of its own](crate::shares): none of them can keep
//! this host's orders waiting.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::identity::{HostId, MigrationId, VolumeId};
use crate::journal::MigratingVolume;
use crate::planted::{Bug, broken};

/// How many migrations are under way at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueLimits {
    /// On this host.
    pub per_host: u32,
    /// That read from or write to one store.
    pub per_store: u32,
}

/// What a migration uses while it is under way, besides this host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Need {
    /// Stores that it reads from or writes to; those of another host as `HOST:STORE`, or `HOST`.
    stores: BTreeSet<String>,
}

/// What a migration waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Obstacle {
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
    /// It lacks blocks, which still come.
    Filling {
        /// The host that they come from.
        from: String,
    },
}

/// One that wants to begin.
#[derive(Clone, Debug)]
pub struct Claimant {
    /// What it uses.
    pub need: Need,
    /// What it waits for whatever room there is; it takes no room from others meanwhile.
    pub own_obstacle: Option<Obstacle>,
}

/// What is ordered, as far as its turn depends on it.
pub trait Wish: Clone {
    /// The volumes that move.
    fn volumes(&self) -> &[VolumeId];

    /// What it uses.
    fn need(&self) -> &Need;

    /// The host that they go to, if all of them is copied there before it is handed over; `None`: to none, or with blocks missing.
    fn is_copied_to(&self) -> Option<HostId>;
}

/// Who has ordered a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Party {
    /// Somebody at this host.
    Own,
    /// Another host, which brings volumes.
    Peer(HostId),
}

/// What is under way.
#[derive(Clone, Debug)]
pub enum UnderWay {
    /// A migration.
    Migration {
        /// Whose order it is.
        of: Party,
        /// Its volumes.
        volumes: Vec<VolumeId>,
        /// What it uses.
        need: Need,
    },
    /// A volume lacks blocks that another host has. It counts for no limit, and moves meanwhile to no host but that one.
    Filling {
        /// Which.
        volume: VolumeId,
        /// The other host …
        peer: HostId,
        /// … by name.
        from: String,
        /// Those that came with it, itself included: they go back together, or not yet.
        together: Vec<VolumeId>,
    },
}

/// The right to begin, by its number; it counts as a migration under way until it is given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Admission(u64);

/// What becomes of an order, or would.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Turn<A> {
    /// It may begin.
    Now(A),
    /// It must wait, at this place.
    Later(QueuePlace),
    /// A volume of it waits already, in this migration.
    Waits(MigrationId),
}

/// Where in the queue something is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueuePlace {
    /// Its place, from 1.
    pub place: u64,
    /// How many wait, it included.
    pub waiting: u64,
    /// What it waits for; `None`: its turn has come, and it is about to begin.
    pub obstacle: Option<Obstacle>,
}

/// What becomes of the wish to withdraw a migration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Withdrawal<W> {
    /// It does not wait.
    Unknown,
    /// Its turn has just come.
    Begins(W),
    /// It waits no more.
    Withdrawn(W),
}

/// The queue of a host.
#[derive(Debug)]
pub struct Queue<W> {
    limits: QueueLimits,
    /// As many wait at most.
    waiting_max: usize,
    /// Those that wait, and those whose turn it is until the journal knows them; in order.
    waiting: BTreeMap<MigrationId, Waiting<W>>,
    /// Those that may begin, until they are known to be under way or to have come to nothing.
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
    /// Whether its turn has come.
    begins: bool,
}

impl Need {
    /// What a migration of these volumes uses. An image that is served in place is in no store.
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
                write!(f, "not all of it has come from host \"{from}\" yet")
            }
        }
    }
}

/// What each of those that wait waits for, in their order; `None`: it may begin.
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
        // Also of one that waits: nobody behind it takes its place.
        for store in &need.stores {
            *in_stores.entry(store).or_default() += 1;
        }
        obstacle
    });
    judged.collect()
}

impl<W: Wish> Queue<W> {
    /// Nothing waits, and so many may.
    pub fn new(limits: QueueLimits, waiting_max: usize) -> Self {
        let (waiting, admitted) = (BTreeMap::new(), BTreeMap::new());
        Self { limits, waiting_max, waiting, admitted, next_admission: 0 }
    }

    /// Other limits hold from now on. Who is beyond them goes on.
    pub fn set_limits(&mut self, limits: QueueLimits) {
        self.limits = limits;
    }

    /// Asks whether something may begin beside what is `under_way`.
    pub fn ask(&mut self, wish: &W, under_way: Vec<UnderWay>) -> Turn<Admission> {
        match self.outlook(wish, under_way) {
            Turn::Now(()) => Turn::Now(self.admit(wish)),
            Turn::Later(place) => Turn::Later(place),
            Turn::Waits(id) => Turn::Waits(id),
        }
    }

    /// Says what [`Queue::ask`] would say; nothing is admitted.
    pub fn outlook(&self, wish: &W, under_way: Vec<UnderWay>) -> Turn<()> {
        let is_here =
            |waiting: &Waiting<W>| waiting.wish.volumes().iter().any(|id| wish.volumes().contains(id));
        if let Some((id, _)) = self.waiting.iter().find(|(_, waiting)| is_here(waiting)) {
            return Turn::Waits(*id);
        }
        let mut line: Vec<Claimant> =
            self.in_line().map(|(_, waiting)| claimant(&waiting.wish, &under_way)).collect();
        line.push(claimant(wish, &under_way));
        let place = line.len() as u64;
        match judge(self.limits, &self.used(under_way), &line).pop().flatten() {
            None => Turn::Now(()),
            obstacle => Turn::Later(QueuePlace { place, waiting: place, obstacle }),
        }
    }

    /// Whether one that waits has no place on this host, because as many of its own orders are under way as may be.
    pub fn has_used_up_the_host(&self, under_way: Vec<UnderWay>) -> bool {
        let line: Vec<Claimant> =
            self.in_line().map(|(_, waiting)| claimant(&waiting.wish, &under_way)).collect();
        let judged = judge(self.limits, &self.used(under_way), &line);
        judged.into_iter().any(|obstacle| matches!(obstacle, Some(Obstacle::Host { .. })))
    }

    /// Lets a migration wait; false: too many do.
    pub fn join(&mut self, id: MigrationId, wish: W) -> bool {
        let has_room = !self.is_full();
        if has_room {
            self.waiting.insert(id, Waiting { wish, begins: false });
        }
        has_room
    }

    /// Whether as many wait as may.
    pub fn is_full(&self) -> bool {
        self.waiting.len() >= self.waiting_max
    }

    /// Those whose turn it is, in order: they are to be begun now.
    pub fn next(&mut self, under_way: Vec<UnderWay>) -> Vec<(MigrationId, W, Admission)> {
        let (ids, line): (Vec<_>, Vec<_>) =
            self.in_line().map(|(id, waiting)| (id, claimant(&waiting.wish, &under_way))).unzip();
        let judged = judge(self.limits, &self.used(under_way), &line).into_iter().zip(ids);
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

    /// A migration whose turn had come waits again, where it was.
    pub fn wait_again(&mut self, id: MigrationId) {
        if let Some(waiting) = self.waiting.get_mut(&id) {
            waiting.begins = false;
        }
    }

    /// A migration whose turn had come has begun, or has ended.
    pub fn leave(&mut self, id: MigrationId) {
        self.waiting.remove(&id);
    }

    /// Takes a migration out that waits.
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

    /// Gives back the right to begin: its migration is known to be under way, or has come to nothing.
    pub fn give_back(&mut self, admission: Admission) {
        self.admitted.remove(&admission);
    }

    /// The migration that waits with this volume, or is about to begin.
    pub fn of(&self, volume: VolumeId) -> Option<MigrationId> {
        let mut waiting = self.waiting.iter();
        waiting.find(|(_, waiting)| waiting.wish.volumes().contains(&volume)).map(|(id, _)| *id)
    }

    /// What waits, or is about to begin, under this number.
    pub fn get(&self, id: MigrationId) -> Option<&W> {
        self.waiting.get(&id).map(|waiting| &waiting.wish)
    }

    /// Those that wait, or are about to begin, in order.
    pub fn ids(&self) -> impl Iterator<Item = MigrationId> {
        self.waiting.keys().copied()
    }

    /// The number that the next migration may have at the earliest: those that wait have theirs already.
    pub fn next_free(&self) -> u64 {
        self.waiting.last_key_value().map_or(0, |(id, _)| id.0 + 1)
    }

    /// Where a migration is that waits; `None`: it does not, or its turn has come.
    pub fn place(&self, id: MigrationId, under_way: Vec<UnderWay>) -> Option<QueuePlace> {
        let (ids, line): (Vec<_>, Vec<_>) =
            self.in_line().map(|(id, waiting)| (id, claimant(&waiting.wish, &under_way))).unzip();
        let index = ids.iter().position(|waits| *waits == id)?;
        let obstacle = judge(self.limits, &self.used(under_way), &line).into_iter().nth(index).flatten();
        Some(QueuePlace { place: index as u64 + 1, waiting: ids.len() as u64, obstacle })
    }

    fn admit(&mut self, wish: &W) -> Admission {
        let admission = Admission(self.next_admission);
        self.next_admission += 1;
        self.admitted
            .insert(admission, Admitted { volumes: wish.volumes().to_vec(), need: wish.need().clone() });
        admission
    }

    /// What is used: by those under way, and by those that may begin. One that is both is counted once.
    fn used(&self, under_way: Vec<UnderWay>) -> Vec<Need> {
        let is_admitted =
            |volume: &VolumeId| self.admitted.values().any(|admitted| admitted.volumes.contains(volume));
        let others = under_way.into_iter().filter_map(|other| match other {
            UnderWay::Migration { of: Party::Peer(_), .. } if !broken(Bug::PlacesCountedTogether) => None,
            UnderWay::Migration { volumes, need, .. } => (!volumes.iter().any(is_admitted)).then_some(need),
            UnderWay::Filling { .. } => None,
        });
        self.admitted.values().map(|admitted| admitted.need.clone()).chain(others).collect()
    }

    /// Those whose turn has not come.
    fn in_line(&self) -> impl Iterator<Item = (MigrationId, &Waiting<W>)> {
        self.waiting.iter().filter(|(_, waiting)| !waiting.begins).map(|(id, waiting)| (*id, waiting))
    }
}

fn claimant<W: Wish>(wish: &W, under_way: &[UnderWay]) -> Claimant {
    let goes_back = |peer: &HostId, together: &[VolumeId]| {
        wish.is_copied_to() == Some(*peer)
            && wish.volumes().len() == together.len()
            && wish.volumes().iter().all(|volume| together.contains(volume))
    };
    let own_obstacle = under_way.iter().find_map(|other| match other {
        UnderWay::Filling { volume, peer, from, together }
            if wish.volumes().contains(volume) && !goes_back(peer, together) =>
        {
            Some(Obstacle::Filling { from: from.clone() })
        }
        _ => None,
    });
    Claimant { need: wish.need().clone(), own_obstacle }
}

#[cfg(test)]
mod tests;
