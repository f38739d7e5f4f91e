//! Reads that pass by the store: while the store takes no fetched bytes, guests still get them from the reservoir.
//!
//! ```text
//!   fetched ──► stored ──► the read is admitted
//!                  │ the store is full, or fails
//!                  └──► the missing parts are read for this request alone ──► admitted, with these parts
//! ```
//! Nothing of it is kept: the blocks stay missing. The reservoir is unchanged, so its bytes are what the read would have found
//! at its arrival. A write to the same blocks that is answered earlier makes them present, and then the store is read.

use std::time::Duration;

use chronicle::BlockRange;

use super::requests::{Waiting, Way};
use super::units::within;
use super::{FetchFault, FetchId, Filling, FillingAction, Refusal};

impl Filling {
    /// Lets a read that waits for missing blocks pass by a store that takes nothing.
    pub(super) fn pass_by(&mut self, waiting: Waiting) -> Waiting {
        let is_possible = self.background.store_is_failing() && !self.background.waits_for_reservoir();
        match waiting {
            Waiting::Read { request, units, since, way: Way::ThroughStore }
                if is_possible && self.missing.contains_any(units) && !self.noting.is_pending(units) =>
            {
                let fetch = FetchId(self.next_number());
                let parts = within(&self.missing, units).into_iter().map(|run| self.bytes(run)).collect();
                self.actions.push_back(FillingAction::PassBy { fetch, parts });
                Waiting::Read { request, units, since, way: Way::PastStore(fetch) }
            }
            _ => waiting,
        }
    }

    pub(super) fn passed(&mut self, now: Duration, fetch: FetchId, result: Result<(), FetchFault>) {
        let is_its = |waiting: &Waiting| matches!(waiting, Waiting::Read { way: Way::PastStore(of), .. } if *of == fetch);
        let Some(at) = self.waiting.iter().position(is_its) else { return };
        let is_seen_early = self.waiting.get(at).is_some_and(|waiting| self.is_noted_later(waiting));
        match result {
            Ok(()) if is_seen_early => self.waiting.get_mut(at).into_iter().for_each(Waiting::pass_no_more),
            Ok(()) => {
                self.background.reservoir_answers();
                self.lateness.reservoir_answers(now);
                let read = self.waiting.remove(at).map(|waiting| waiting.request());
                self.actions.extend(read.map(|request| FillingAction::AdmitWith { request, fetch }));
            }
            Err(FetchFault::Unreadable) => {
                self.lateness.reservoir_answers(now);
                let read = self.waiting.remove(at).map(|waiting| waiting.request());
                let why = Refusal::Unreadable;
                self.actions.extend(read.map(|request| FillingAction::Refuse { request, why }));
            }
            Err(FetchFault::Away) => {
                self.background.reservoir_is_away(now);
                self.waiting.get_mut(at).into_iter().for_each(Waiting::pass_no_more);
            }
        }
    }

    fn is_noted_later(&self, waiting: &Waiting) -> bool {
        matches!(waiting, Waiting::Read { units, .. } if self.noting.is_pending(*units))
    }

    /// Notes that present units are missing again: reads that pass by the store do not bring these.
    pub(super) fn missing_again(&mut self, units: BlockRange) {
        self.waiting
            .iter_mut()
            .filter(|waiting| waiting.read_of(units).is_some())
            .for_each(Waiting::pass_no_more);
    }
}

impl Waiting {
    fn pass_no_more(&mut self) {
        if let Self::Read { way, .. } = self {
            *way = Way::ThroughStore;
        }
    }
}
