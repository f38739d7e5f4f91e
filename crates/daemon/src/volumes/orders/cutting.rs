//! Conducts the cut of copies: runs the machine ([`migration::duplication`]) between the lanes of the volumes.
//!
//! ```text
//!   lane 0 ─┐                              ┌─► lane 0
//!   lane 1 ─┼─ reports ─► machine ─ orders ┼─► lane 1      a lane whose conductor is gone opens its gate, and its copy is of no use
//!   lane 2 ─┘                              └─► lane 2
//! ```

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_channel::mpsc;
use futures_util::StreamExt as _;
use lane::{Duplicated, REPORT_INTERVAL};
use migration::duplication::{Duplication, DuplicationAction, DuplicationEvent};
use tokio::time::Instant;

/// The ways to the lanes of one order.
pub(super) struct Lines {
    pub(super) reported: mpsc::UnboundedReceiver<DuplicationEvent>,
    pub(super) orders: Vec<mpsc::UnboundedSender<DuplicationAction>>,
    /// Each may be cancelled, which cancels all.
    pub(super) shared: Vec<Arc<Duplicated>>,
}

/// Decides when the copies are cut off. Never resolves: the order ends with the lanes' answers.
pub(super) async fn conduct(mut lines: Lines, held_max: Duration) {
    let begun = Instant::now();
    let mut machine = Duplication::new(lines.orders.len(), held_max);
    loop {
        while let Some(action) = machine.poll_action() {
            for orders in &lines.orders {
                // The order of a lane that has ended has failed: it has reported that.
                let _ = orders.unbounded_send(action);
            }
        }
        if machine.is_over() {
            return std::future::pending().await;
        }
        // Whether it is cancelled is looked at as often.
        let looks_at = begun.elapsed() + REPORT_INTERVAL;
        let at = machine.poll_timeout().map_or(looks_at, |(at, _)| at.min(looks_at));
        let event = tokio::select! {
            event = lines.reported.next() => event,
            () = tokio::time::sleep_until(begun + at) => None,
        };
        let now = begun.elapsed();
        match event {
            Some(event) => machine.handle_event(now, event),
            None => machine.handle_timeout(now),
        }
        if lines.shared.iter().any(|shared| shared.is_cancelled.load(Ordering::SeqCst)) {
            machine.handle_event(now, DuplicationEvent::Cancelled);
        }
    }
}
