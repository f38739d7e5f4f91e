//! The orderly end of a lane: no new requests, those in flight end, and a store of this host is flushed.
//!
//! ```text
//!   a handover under way is decided ──► clients drain ──► what other hosts asked for is answered ──┐
//!                                        └ closed, or left open for another lane                   ▼
//!                        chronicle ◄── flush ◄── a copy in another store: flushed, its missing set kept
//! ```

use std::time::Duration;

use block::BlockDevice;
use chronicle::StayId;
use futures_util::future::{Either, join_all, select};
use tracing::{info, warn};

use super::Lane;
use crate::front_end::{ClientsAtEnd, PassedConnection};
use crate::stack::{GateMode, Home};

/// The longest wait for a client with passed connections while its volume's gate is closed. Its requests may wait long for
/// another host, and guests of other volumes wait for this lane.
const HELD_WAIT: Duration = Duration::from_millis(50);

impl Lane {
    /// Ends in order, and closes the connections of clients. Requests that are in flight after `deadline` are cut.
    ///
    /// A migration before its commit point is left as it is: the next start continues it. Returns the residency, if all its writes
    /// have reached the store. A volume of another host has no residency here.
    pub async fn close(&self, deadline: Duration) -> Option<StayId> {
        self.stop(deadline, ClientsAtEnd::Closed).await.0
    }

    /// Ends in order. A migration before its commit point is left as it is: the next start continues it. Returns the
    /// residency, if all its writes have reached the store, and the connections that are left open. A volume of another host
    /// has no residency here.
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
        // N.B. no request of another host stays unanswered: a request that is not taken goes back, and finds
        // the volume's next lane.
        self.reservoir.end_background();
        let attached = self.attached.take();
        let answered = join_all(attached.iter().map(|(_, service)| service.end()));
        if let Either::Right(_) = select(Box::pin(answered), self.handle.sleep(deadline)).await {
            warn!(volume = %self.settings.name, "requests of other hosts are still under way");
        }
        // N.B. no request passes from here on: what the chronicle keeps below is to be all that was written.
        self.volume.gate().end();
        self.leave_copy().await;
        let is_flushed = match self.volume.home() {
            Home::Here(store) => self.flush(&*store, deadline).await,
            // Its owner flushes it, and may be unreachable for any time.
            Home::Elsewhere(_) => false,
        };
        let is_closed = is_flushed && self.volume.gate().in_flight() == 0;
        // N.B. Kept after the last write: from here on the marks are not needed.
        if let Err(error) = self.volume.chronicler().close().await {
            warn!(volume = %self.settings.name, %error, "its chronicle is kept only as exactly as its marks");
        }
        info!(volume = %self.settings.name, passed_on = passed.len(), "no longer served");
        (is_closed.then(|| self.volume.chronicler().stay()), passed)
    }

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

    async fn let_handover_end(&self, deadline: Duration) {
        let undecided =
            self.migration.driver.borrow().as_ref().is_some_and(|driver| driver.phase().holds_a_stop());
        // For a migration that another lane drives, the closed gate shows a handover.
        let undecided = undecided
            || (self.migration.followed.get().is_some() && self.volume.gate().mode() == GateMode::Hold);
        if undecided {
            let current = &self.migration;
            let is_over = || current.driver.borrow().is_none() && current.followed.get().is_none();
            let ended = current.ended.wait_for(|| is_over().then_some(()));
            select(Box::pin(ended), self.handle.sleep(deadline)).await;
        }
    }

    /// Lets the requests of clients end; returns how many clients were cut, and the open connections.
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
