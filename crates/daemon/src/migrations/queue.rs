//! The queue of this host, shared by its tasks: notifies waiting migrations of turns, and describes them. [`migration::queue`]
//! decides which may begin, and in which order.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use api::{MigrateVolume, Migration};
use migration::queue::{self, Need, Present, QueueLimits, Turn, UnderWay, Withdrawal};
use migration::{HostId, MigrationId, VolumeId};
use tokio::sync::watch;

use crate::journal::now_unix_ms;

/// How many migrations may wait: enough for manual orders, or for all VMs of a large host. A program that orders
/// without end gets an error.
pub(crate) const WAITING_MAX: usize = 1000;
/// How often the clock is read while a migration waits for its time.
const CLOCK_LOOK: Duration = Duration::from_secs(60);

#[derive(Clone, Debug)]
pub(crate) struct Wish {
    /// The volume or the VM of the order.
    pub(crate) name: String,
    pub(crate) order: MigrateVolume,
    pub(crate) volumes: Vec<VolumeId>,
    pub(crate) need: Need,
    /// The host to which the whole volume is copied before the handover; `None`: there is none.
    pub(crate) copied_to: Option<HostId>,
    /// Its description while it waits, without its place.
    pub(crate) shown: Box<Migration>,
}

#[derive(Debug)]
pub(crate) struct Queue {
    queue: Mutex<queue::Queue<Wish>>,
    /// Counts changes of places and possible turns: a migration has ended, or one was ordered.
    turns: watch::Sender<u64>,
}

/// The right to begin; it counts as a running migration until it is dropped.
#[derive(Debug)]
pub(crate) struct Admission {
    queue: Arc<Queue>,
    admission: queue::Admission,
}

impl queue::Wish for Wish {
    fn volumes(&self) -> &[VolumeId] {
        &self.volumes
    }

    fn need(&self) -> &Need {
        &self.need
    }

    fn is_copied_to(&self) -> Option<HostId> {
        self.copied_to
    }

    fn not_before_unix_ms(&self) -> Option<u64> {
        self.order.begin_unix_ms
    }
}

impl Queue {
    pub(crate) fn new(limits: QueueLimits) -> Self {
        Self { queue: Mutex::new(queue::Queue::new(limits, WAITING_MAX)), turns: watch::Sender::new(1) }
    }

    /// Asks whether a migration may begin. `under_way` is called while nothing else is admitted.
    pub(crate) fn ask(
        self: &Arc<Self>,
        wish: &Wish,
        under_way: impl FnOnce() -> Vec<UnderWay>,
    ) -> Turn<Admission> {
        let mut queue = self.lock();
        match queue.ask(wish, &at_present(under_way())) {
            Turn::Now(admission) => Turn::Now(self.admission(admission)),
            Turn::Later(place) => Turn::Later(place),
            Turn::Waits(id) => Turn::Waits(id),
        }
    }

    /// Returns what [`Queue::ask`] would return, and admits nothing.
    pub(crate) fn outlook(&self, wish: &Wish, under_way: impl FnOnce() -> Vec<UnderWay>) -> Turn<()> {
        let queue = self.lock();
        queue.outlook(wish, &at_present(under_way()))
    }

    /// Returns whether a waiting migration lacks a place on this host.
    pub(crate) fn has_used_up_the_host(&self, under_way: impl FnOnce() -> Vec<UnderWay>) -> bool {
        let queue = self.lock();
        queue.has_used_up_the_host(&at_present(under_way()))
    }

    /// Makes a migration wait; returns false if too many do.
    pub(crate) fn join(&self, id: MigrationId, wish: Wish) -> bool {
        let has_room = self.lock().join(id, wish);
        self.turn();
        has_room
    }

    pub(crate) fn is_full(&self) -> bool {
        self.lock().is_full()
    }

    /// Returns the migrations whose turn it is, in order: they must begin now.
    pub(crate) fn next(
        self: &Arc<Self>,
        under_way: impl FnOnce() -> Vec<UnderWay>,
    ) -> Vec<(MigrationId, Wish, Admission)> {
        let mut queue = self.lock();
        let begun = queue.next(&at_present(under_way())).into_iter();
        begun.map(|(id, wish, admission)| (id, wish, self.admission(admission))).collect()
    }

    /// Puts a migration whose turn had come back to its old place.
    pub(crate) fn wait_again(&self, id: MigrationId) {
        self.lock().wait_again(id);
    }

    /// Removes a migration whose turn had come, and which has begun or ended.
    pub(crate) fn leave(&self, id: MigrationId) {
        self.lock().leave(id);
        self.turn();
    }

    pub(crate) fn withdraw(&self, id: MigrationId) -> Withdrawal<Wish> {
        let withdrawal = self.lock().withdraw(id);
        if matches!(withdrawal, Withdrawal::Withdrawn(_)) {
            self.turn();
        }
        withdrawal
    }

    /// Returns the migration that waits with this volume, or is about to begin.
    pub(crate) fn of(&self, volume: VolumeId) -> Option<MigrationId> {
        self.lock().of(volume)
    }

    /// Returns whether a migration waits, or is about to begin.
    pub(crate) fn has(&self, id: MigrationId) -> bool {
        self.lock().get(id).is_some()
    }

    /// Returns those that wait, or are about to begin, in order.
    pub(crate) fn ids(&self) -> Vec<MigrationId> {
        self.lock().ids().collect()
    }

    /// Returns the lowest number for the next migration: waiting ones have theirs already.
    pub(crate) fn next_free(&self) -> u64 {
        self.lock().next_free()
    }

    pub(crate) fn show(
        &self,
        id: MigrationId,
        under_way: impl FnOnce() -> Vec<UnderWay>,
    ) -> Option<Migration> {
        let queue = self.lock();
        let mut shown = (*queue.get(id)?.shown).clone();
        shown.change = *self.turns.borrow();
        let since = now_unix_ms().saturating_sub(shown.started_unix_ms);
        shown.seconds = since as f64 / 1000.0;
        let place = queue.place(id, &at_present(under_way())).map(place_shown);
        let reason = match &place {
            None => ITS_BEGINNING.to_owned(),
            Some(place) => {
                format!("its turn, as number {} of {}: {}", place.place, place.waiting, place.reason)
            }
        };
        shown.waiting_for = Some(api::WaitingFor { reason, remaining_ms: None });
        shown.queue = place;
        Some(shown)
    }

    /// Counts a possible turn, or a change of places.
    pub(crate) fn turn(&self) {
        self.turns.send_modify(|turns| *turns += 1);
    }

    /// Sets other limits, by which a turn may have come.
    pub(crate) fn set_limits(&self, limits: QueueLimits) {
        self.lock().set_limits(limits);
        self.turn();
    }

    /// Waits until the time comes for which a waiting migration was ordered. The clock is read again every minute, because it
    /// may be set.
    pub(crate) async fn next_time(&self) {
        let now = now_unix_ms();
        let next = self.lock().next_time(now);
        let wait =
            next.map_or(CLOCK_LOOK, |at| Duration::from_millis(at.saturating_sub(now)).min(CLOCK_LOOK));
        tokio::time::sleep(wait).await;
    }

    /// Returns a receiver of the count of [`Queue::turn`].
    pub(crate) fn turns(&self) -> watch::Receiver<u64> {
        self.turns.subscribe()
    }

    fn admission(self: &Arc<Self>, admission: queue::Admission) -> Admission {
        Admission { queue: Arc::clone(self), admission }
    }

    fn lock(&self) -> MutexGuard<'_, queue::Queue<Wish>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn at_present(under_way: Vec<UnderWay>) -> Present {
    Present { under_way, now_unix_ms: now_unix_ms() }
}

/// The reason for waiting once a turn has come.
const ITS_BEGINNING: &str = "its beginning";

pub(crate) fn place_shown(place: queue::QueuePlace) -> api::QueuePlace {
    let begins_unix_ms = match place.obstacle {
        Some(queue::Obstacle::Time { unix_ms }) => Some(unix_ms),
        _ => None,
    };
    let reason = place.obstacle.map_or_else(|| ITS_BEGINNING.to_owned(), |obstacle| obstacle.to_string());
    api::QueuePlace { place: place.place, waiting: place.waiting, reason, begins_unix_ms }
}

impl Drop for Admission {
    fn drop(&mut self) {
        self.queue.lock().give_back(self.admission);
        self.queue.turn();
    }
}

#[cfg(test)]
mod tests;
