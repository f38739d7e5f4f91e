//! Places for the API's connections: a bounded number, of which those that ask for nothing give way to newcomers.
//!
//! ```text
//!   taken ──► idle ◄──────────────────────────────┐
//!              │ └─► at work: a request is answered ─┘ when the answer has gone out and the next request is waited for
//!              └─► wanted: it is the oldest idle one, and somebody needs its place
//! ```
//! A client that only connects, or that keeps its connection for later, is told by that to connect again.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// API connections at a time: many times the people and scripts that look at one host, and few enough for the files
/// that a process may have open.
const CONNECTIONS_MAX: usize = 256;

pub(super) struct Places {
    free: Arc<Semaphore>,
    taken: Mutex<Taken>,
    /// A place that was at work is idle.
    idled: Notify,
}

/// The places that are taken, by the order in which they were.
#[derive(Default)]
struct Taken {
    next: u64,
    places: BTreeMap<u64, Arc<Claim>>,
}

/// What is known of a place that is taken.
#[derive(Default)]
struct Claim {
    /// Whether a request of it is under way.
    at_work: AtomicBool,
    /// Whether its service has not answered yet.
    asked: AtomicBool,
    wanted: AtomicBool,
    told: Notify,
}

/// A connection's place; others have it when this is dropped.
pub(super) struct Place {
    number: u64,
    claim: Arc<Claim>,
    places: Weak<Places>,
    _permit: OwnedSemaphorePermit,
}

/// Says that a request is being answered, until it is dropped.
pub(super) struct Asked(Arc<Claim>);

impl Places {
    /// All of them, free.
    pub(super) fn new() -> Arc<Self> {
        Self::with(CONNECTIONS_MAX)
    }

    pub(super) fn with(count: usize) -> Arc<Self> {
        let free = Arc::new(Semaphore::new(count));
        Arc::new(Self { free, taken: Mutex::default(), idled: Notify::new() })
    }

    /// Takes a place, that of the oldest idle connection if there is no other; waits while all are at work.
    pub(super) async fn take(self: &Arc<Self>) -> Arc<Place> {
        loop {
            let idled = self.idled.notified();
            if self.free.available_permits() == 0 {
                self.ask_for_one();
            }
            let permit = tokio::select! {
                permit = Arc::clone(&self.free).acquire_owned() => permit,
                () = idled => continue,
            };
            // The semaphore is never closed.
            let Ok(permit) = permit else { continue };
            let mut taken = self.lock();
            let (number, claim) = (taken.next, Arc::<Claim>::default());
            taken.next += 1;
            taken.places.insert(number, Arc::clone(&claim));
            return Arc::new(Place { number, claim, places: Arc::downgrade(self), _permit: permit });
        }
    }

    /// Has the oldest idle connection give its place up, unless one does already.
    fn ask_for_one(&self) {
        let taken = self.lock();
        let idle = taken.places.values().find(|claim| !claim.at_work.load(Ordering::Acquire));
        if let Some(claim) = idle {
            claim.wanted.store(true, Ordering::Release);
            claim.told.notify_one();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    /// A request has come whole, and is being answered until what this returns is dropped.
    pub(super) fn is_asked(&self) -> Asked {
        self.claim.at_work.store(true, Ordering::Release);
        self.claim.asked.store(true, Ordering::Release);
        Asked(Arc::clone(&self.claim))
    }

    /// The connection waits for its client, and has nothing left to send.
    pub(super) fn waits(&self) {
        let was_at_work =
            !self.claim.asked.load(Ordering::Acquire) && self.claim.at_work.swap(false, Ordering::AcqRel);
        if let (true, Some(places)) = (was_at_work, self.places.upgrade()) {
            places.idled.notify_one();
        }
    }

    /// Resolves when somebody else needs the place, and its connection is idle.
    pub(super) async fn wanted(&self) {
        loop {
            self.claim.told.notified().await;
            if self.claim.wanted.swap(false, Ordering::AcqRel) && !self.claim.at_work.load(Ordering::Acquire)
            {
                return;
            }
            // A request has come in between: another one is asked.
            if let Some(places) = self.places.upgrade() {
                places.idled.notify_one();
            }
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(places) = self.places.upgrade() {
            places.lock().places.remove(&self.number);
        }
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        self.0.asked.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn the_oldest_idle_connection_makes_room_and_one_at_work_does_not() {
        let places = Places::with(2);
        let (working, idle) = (places.take().await, places.take().await);
        let asked = working.is_asked();
        let newcomer = {
            let places = Arc::clone(&places);
            tokio::spawn(async move { places.take().await })
        };
        idle.wanted().await;
        assert!(working.wanted().now_or_never().is_none());
        drop(idle);
        let newcomer = newcomer.await.unwrap();
        // Both are at work: who comes waits until one of them is not.
        let second = newcomer.is_asked();
        let later = {
            let places = Arc::clone(&places);
            tokio::spawn(async move { places.take().await })
        };
        working.waits();
        assert!(working.wanted().now_or_never().is_none(), "its answer has not gone out");
        drop(asked);
        working.waits();
        working.wanted().await;
        drop(working);
        later.await.unwrap();
        drop(second);
    }

    #[tokio::test]
    async fn a_place_that_is_given_back_is_taken_without_asking() {
        let places = Places::with(1);
        drop(places.take().await);
        let place = places.take().await;
        assert!(place.wanted().now_or_never().is_none());
    }
}
