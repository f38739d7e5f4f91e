//! Writes units again whose bytes a failed flush may have lost.
//!
//! ```text
//!   a flush fails, or a daemon starts
//!        │ the units that guests have written, and that are not recorded
//!        ▼
//!     doubted ──read back, written again──► present ──a later flush──► recorded
//!        └────── a guest writes them ──────────▲
//! ```
//! A store reports a loss once. Reads may still see the lost bytes, and the next flush succeeds although the disk has older ones.
//! Beneath an incomplete volume these can be older than the handover. So a doubted unit is not recorded as present: after a power
//! cut it is missing, and has the content of the handover. It cannot become missing before that, because guests read what they
//! wrote.
//!
//! A guest's flush waits until no unit is doubted. If the store does not take them, the flush fails.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use chronicle::{BlockIndex, BlockRange, LayeredBitmap};

use super::units::{UNIT_BYTES, within, without};
use super::{Filling, FillingAction, RequestId, RewriteId, StoreFault};

/// The most units that are written again at once. Guests' changes of them wait meanwhile.
const UNITS_MAX: u64 = (1 << 20) / UNIT_BYTES;
/// The pause before units that the store did not take are written again.
const RETRY: Duration = Duration::from_millis(500);

/// The present units whose bytes may be lost.
#[derive(Debug)]
pub(super) struct Rewriting {
    doubted: LayeredBitmap,
    under_way: Option<Rewrite>,
    next: u64,
    retry_at: Option<Duration>,
    /// Whether a guest's flush has failed since the last unit became doubted. Flushes do not wait then.
    is_told: bool,
    /// Guests' changes that were under way when a flush failed. They may be lost, too.
    overtaken: BTreeSet<RequestId>,
}

#[derive(Debug)]
struct Rewrite {
    id: RewriteId,
    units: BlockRange,
    /// Whether a flush has failed meanwhile, so that these bytes may be lost again.
    is_overtaken: bool,
}

impl Rewriting {
    /// `volatile`: the units that guests wrote before the previous daemon was killed. A failed flush may have lost them.
    pub(super) fn new(volatile: LayeredBitmap) -> Self {
        Self {
            doubted: volatile,
            under_way: None,
            next: 0,
            retry_at: None,
            is_told: false,
            overtaken: BTreeSet::new(),
        }
    }

    pub(super) fn doubts(&self, units: BlockRange) -> bool {
        self.doubted.contains_any(units)
    }

    /// Returns whether a change must wait: otherwise the older bytes could be written over it.
    pub(super) fn holds(&self, units: BlockRange) -> bool {
        self.under_way.as_ref().is_some_and(|rewrite| rewrite.units.overlaps(&units))
    }

    /// Returns whether a guest's flush may be answered, which says that everything before it is durable.
    pub(super) fn may_flush(&self) -> bool {
        self.doubted.is_empty() || self.is_told
    }

    pub(super) fn is_over(&self) -> bool {
        self.doubted.is_empty() && self.under_way.is_none()
    }

    pub(super) fn deadline(&self) -> Option<(Duration, &'static str)> {
        let retry = self.retry_at.filter(|_| self.under_way.is_none() && !self.doubted.is_empty());
        retry.map(|at| (at, "the store to write again what a failed flush may have lost"))
    }

    /// Returns the first doubted units that no change touches.
    fn first_free(&self, changes: &BTreeMap<RequestId, BlockRange>) -> Option<BlockRange> {
        let mut start = BlockIndex(0);
        while let Some(run) = self.doubted.next_run(start, UNITS_MAX) {
            let mut free = vec![run];
            for busy in changes.values() {
                free = free.into_iter().flat_map(|run| without(run, *busy)).collect();
            }
            if let Some(first) = free.first() {
                return Some(*first);
            }
            start = run.end;
        }
        None
    }
}

impl Filling {
    /// Notes that a flush has failed: these units may be lost, and so may everything that is being written.
    pub(super) fn doubt(&mut self, units: &LayeredBitmap) {
        let rewriting = &mut self.rewriting;
        rewriting.is_told &= units.is_empty();
        rewriting.doubted.union_with(units);
        rewriting.overtaken = self.overwrites.keys().copied().collect();
        rewriting.under_way.iter_mut().for_each(|rewrite| rewrite.is_overtaken = true);
        self.fetches.values_mut().for_each(|fetch| fetch.is_overtaken = fetch.storing.is_some());
    }

    /// Notes that a guest has changed present units.
    pub(super) fn changed(&mut self, request: RequestId, units: BlockRange) {
        if self.rewriting.overtaken.remove(&request) {
            self.recording.doubted(units);
            self.rewriting.is_told = false;
            self.rewriting.doubted.insert(units);
        } else {
            self.rewritten_now(units);
        }
    }

    /// Notes that a guest's change has failed: it leaves doubted units as doubted as before.
    pub(super) fn change_failed(&mut self, request: RequestId) {
        self.rewriting.overtaken.remove(&request);
    }

    fn rewritten_now(&mut self, units: BlockRange) {
        for run in within(&self.rewriting.doubted, units) {
            self.recording.present(run);
        }
        self.rewriting.doubted.remove(units);
    }

    pub(super) fn rewrite_if_due(&mut self, now: Duration) {
        let rewriting = &self.rewriting;
        if rewriting.under_way.is_some() || rewriting.retry_at.is_some_and(|at| now < at) {
            return;
        }
        self.rewriting.retry_at = None;
        let Some(units) = self.rewriting.first_free(&self.overwrites) else { return };
        self.rewriting.next += 1;
        let rewrite = RewriteId(self.rewriting.next);
        self.rewriting.under_way = Some(Rewrite { id: rewrite, units, is_overtaken: false });
        self.actions.push_back(FillingAction::Rewrite { rewrite, range: self.bytes(units) });
    }

    pub(super) fn rewritten(&mut self, now: Duration, id: RewriteId, result: Result<(), StoreFault>) {
        let Some(rewrite) = self.rewriting.under_way.take_if(|rewrite| rewrite.id == id) else { return };
        match result {
            Ok(()) if rewrite.is_overtaken => {}
            Ok(()) => {
                self.rewritten_now(rewrite.units);
                self.recording.note(now);
            }
            Err(StoreFault) => {
                self.rewriting.retry_at = Some(now + RETRY);
                self.rewriting.is_told |= self.fail_waiting_flushes();
            }
        }
    }
}
