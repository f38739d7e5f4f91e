//! The end of a lane, in order: no new requests, those in flight end, the store is flushed if it is this host's.
//!
//! ```text
//!   a handover under way is decided ──► clients drain ──► what other hosts asked for is answered ──┐
//!                                        └ closed, or left open for another lane                   ▼
//!                        chronicle ◄── flush ◄── of a copy in another store: flushed, and what it lacks is kept
//! ```

use std::time::Duration;

use block::BlockDevice;
use chronicle::StayId;
use futures_util::future::{Either, join_all, select};
use tracing::{info, warn};

use super::Lane;
use crate::front_end::{ClientsAtEnd, PassedConnection};
use crate::stack::{GateMode, Home};

/// How long a client that is to be passed on is waited for while its volume's gate is closed: what it asked for waits for
/// another host, perhaps for long, and guests of other volumes wait for this lane.
const HELD_WAIT: Duration = Duration::from_millis(50);

impl Lane {
    /// Ends in order. A migration before its commit point is left as it is: the next start goes on with it. Returns the stay, if
    /// all that was written in it has reached its store, and the connections that are left open. A volume of another host
    /// has no stay here.
    pub(super) async fn stop(
        &self,
        deadline: Duration,
        clients: ClientsAtEnd,
    ) -> (Option<StayId>, Vec<PassedConnection>) {
        self.let_handover_end(deadline).await;
        let (cut, passed) = self.end_clients(deadline, clients).await;
        if cut > 0 {
            warn!(volume = %self.settings.name, connections = cut, "connections were cut");
        }
        // N.B. nothing that other hosts have asked for is left without an answer: what is not taken any more goes back to
        // where it came from, and finds whoever has the volume next.
        let attached = self.attached.take();
        let answered = join_all(attached.iter().map(|(_, service)| service.end()));
        if let Either::Right(_) = select(Box::pin(answered), self.handle.sleep(deadline)).await {
            warn!(volume = %self.settings.name, "what other hosts asked for is still under way");
        }
        self.leave_copy().await;
        let is_flushed = match self.volume.home() {
            Home::Here(store) => self.flush(&*store, deadline).await,
            // Its owner flushes it, and may be out of reach for however long.
            Home::Elsewhere(_) => false,
        };
        let is_closed = is_flushed && self.volume.gate().in_flight() == 0;
        // N.B. after the last write: from here on the marks are not needed any more.
        if let Err(error) = self.volume.chronicler().close().await {
            warn!(volume = %self.settings.name, %error, "its chronicle is kept only as the marks tell it");
        }
        info!(volume = %self.settings.name, passed_on = passed.len(), "no longer served");
        (is_closed.then(|| self.volume.chronicler().stay()), passed)
    }

    /// Flushes the volume's store for the last time; tells whether everything in it is durable.
    async fn flush(&self, store: &dyn BlockDevice, deadline: Duration) -> bool {
        match select(store.flush(), self.handle.sleep(deadline)).await {
            Either::Left((Ok(()), _)) => true,
            Either::Left((Err(error), _)) => {
                warn!(volume = %self.settings.name, %error, "the last flush failed");
                self.volume.chronicler().store_failed().await;
                false
            }
            Either::Right(_) => false,
        }
    }

    /// Waits for a migration that is being handed over.
    async fn let_handover_end(&self, deadline: Duration) {
        let undecided =
            self.migration.driver.borrow().as_ref().is_some_and(|driver| !driver.phase().can_be_cancelled());
        // Of a migration that another lane drives, this is what shows that it is being handed over.
        let undecided = undecided
            || (self.migration.followed.get().is_some() && self.volume.gate().mode() == GateMode::Hold);
        if undecided {
            let current = &self.migration;
            let is_over = || current.driver.borrow().is_none() && current.followed.get().is_none();
            let ended = current.ended.wait_for(|| is_over().then_some(()));
            select(Box::pin(ended), self.handle.sleep(deadline)).await;
        }
    }

    /// Lets the requests of clients end; returns how many were cut, and what is left open.
    async fn end_clients(&self, deadline: Duration, clients: ClientsAtEnd) -> (usize, Vec<PassedConnection>) {
        if clients == ClientsAtEnd::Closed {
            let drained: Vec<_> = self.front_ends.iter().map(|front_end| front_end.drain(deadline)).collect();
            return (join_all(drained).await.into_iter().sum(), Vec::new());
        }
        let is_held = self.volume.gate().mode() == GateMode::Hold;
        let deadline = if is_held { deadline.min(HELD_WAIT) } else { deadline };
        let passed: Vec<_> = self.front_ends.iter().map(|front_end| front_end.pass(deadline)).collect();
        let (cut, passed): (Vec<_>, Vec<_>) = join_all(passed).await.into_iter().unzip();
        (cut.into_iter().sum(), passed.into_iter().flatten().collect())
    }
}
