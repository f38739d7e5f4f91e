//! Places for the API's connections: a limited number, of which idle ones give way to new connections.
//!
//! ```text
//!   taken ──► idle ◄──────────────────────────────┐
//!              │ └─► at work: a request is answered ─┘ once the answer is sent and the next request is awaited
//!              └─► wanted: it is the oldest idle one, and a new connection needs its place
//! ```
//! A client whose idle connection is closed by this must connect again.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// The number of API connections: many times what users and scripts need, and few enough for a process's limit of open files.
const CONNECTIONS_MAX: usize = 256;

pub(super) struct Places {
    free: Arc<Semaphore>,
    taken: Mutex<Taken>,
    /// A place that was at work is idle.
    idled: Notify,
}

/// The places in use, by age.
#[derive(Default)]
struct Taken {
    next: u64,
    places: BTreeMap<u64, Arc<Claim>>,
}

#[derive(Default)]
struct Claim {
    /// Whether a request on it is being answered.
    at_work: AtomicBool,
    /// Whether its service has not answered yet.
    asked: AtomicBool,
    wanted: AtomicBool,
    told: Notify,
}

/// A connection's place, which is released when this is dropped.
pub(super) struct Place {
    number: u64,
    claim: Arc<Claim>,
    places: Weak<Places>,
    _permit: OwnedSemaphorePermit,
}

/// Marks a request as being answered, until it is dropped.
pub(super) struct Asked(Arc<Claim>);

impl Places {
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

    /// Makes the oldest idle connection give its place up, unless one does already.
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
    /// Marks a complete request as being answered, until the result is dropped.
    pub(super) fn is_asked(&self) -> Asked {
        self.claim.at_work.store(true, Ordering::Release);
        self.claim.asked.store(true, Ordering::Release);
        Asked(Arc::clone(&self.claim))
    }

    /// Marks the connection as waiting for its client, with nothing left to send.
    pub(super) fn waits(&self) {
        let was_at_work =
            !self.claim.asked.load(Ordering::Acquire) && self.claim.at_work.swap(false, Ordering::AcqRel);
        if let (true, Some(places)) = (was_at_work, self.places.upgrade()) {
            places.idled.notify_one();
        }
    }

    /// Resolves when another connection needs the place, and this one is idle.
    pub(super) async fn wanted(&self) {
        loop {
            self.claim.told.notified().await;
            if self.claim.wanted.swap(false, Ordering::AcqRel) && !self.claim.at_work.load(Ordering::Acquire)
            {
                return;
            }
            // A request has come in between, so another connection is asked.
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
        // Both are at work, so a new connection waits until one of them is idle.
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
