//! The flushes of the target: when one is due, and what it has confirmed.

use std::time::Duration;

use super::replica::{Confirmed, Ended};
use super::{Engine, Verdict};
use crate::planted::{Bug, broken};
use crate::strategy::{FlushId, TargetFault, VolumeAction};

/// The bytes applied at the target that trigger a flush, so that the flush at the handover is short.
const FLUSH_EVERY_BYTES: u64 = 256 << 20;

/// The state of flushes apart from the one under way, which is in [`ReplicaBlocks`](super::replica::ReplicaBlocks).
#[derive(Debug)]
pub(super) struct Flushes {
    bulk: Bulk,
    is_wanted: bool,
    /// Whether a flush of the target may have failed without a report so far.
    is_answer_owed: bool,
    next: u64,
}

/// The state of the chunks that have landed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bulk {
    Applied,
    /// All of them are applied, and the flush that confirms them is under way.
    Flushing,
    /// All of them survive a power cut.
    Durable,
}

impl Default for Flushes {
    fn default() -> Self {
        Self { bulk: Bulk::Durable, is_wanted: false, is_answer_owed: false, next: 0 }
    }
}

impl Flushes {
    pub(super) fn want(&mut self) {
        self.is_wanted = true;
    }

    pub(super) fn owe_answer(&mut self) {
        self.is_answer_owed = true;
    }

    /// Notes that a chunk has been applied, or that applied data may be lost.
    pub(super) fn bulk_is_applied(&mut self) {
        self.bulk = Bulk::Applied;
    }
}

impl Engine {
    pub(in crate::strategy) fn may_flush(&self) -> bool {
        !self.replica.is_flushing() && self.is_mirroring() && !self.gate.is_frozen()
    }

    /// Flushes the target if the verdict, or a reason common to all strategies, asks for it.
    pub(in crate::strategy) fn flush_if_due(&mut self, now: Duration, verdict: Verdict) {
        let confirms = verdict == Verdict::Confirm;
        let much = self.replica.blocks_unconfirmed() >= FLUSH_EVERY_BYTES / self.block_bytes();
        let wanted = self.flushes.is_wanted && self.replica.blocks_unconfirmed() > 0;
        if !(much || confirms || wanted || self.flushes.is_answer_owed) {
            return;
        }
        self.flushes.is_wanted = false;
        self.flushes.is_answer_owed = false;
        let flush = FlushId(self.flushes.next);
        self.flushes.next += 1;
        self.costs.tally.target_flushes += 1;
        self.replica.begin_flush(flush, now);
        if confirms {
            self.flushes.bulk = Bulk::Flushing;
        }
        self.actions.push_back(VolumeAction::FlushTarget { flush });
    }

    pub(super) fn target_flushed(&mut self, now: Duration, flush: FlushId, result: Result<(), TargetFault>) {
        let confirmed = if result.is_ok() { Confirmed::Yes } else { Confirmed::No };
        let ended = self.replica.end_flush(flush, confirmed);
        if ended == Ended::Unknown {
            return;
        }
        match result {
            Ok(()) => {
                if self.flushes.bulk == Bulk::Flushing {
                    self.flushes.bulk = Bulk::Durable;
                }
                self.faults.target_works();
            }
            Err(fault) => {
                self.flushes.bulk_is_applied();
                if !broken(Bug::FailedFlushConfirmed) {
                    self.target_lost_the_volatile();
                }
                // A request that was under way during the target's restart fails because of it.
                if ended == Ended::UnderWay {
                    self.target_failed(now, fault);
                }
            }
        }
    }

    /// Returns whether chunks have landed since the last confirming flush was requested.
    pub(in crate::strategy) fn is_bulk_applied(&self) -> bool {
        self.flushes.bulk == Bulk::Applied
    }

    pub(in crate::strategy) fn is_bulk_durable(&self) -> bool {
        self.flushes.bulk == Bulk::Durable
    }

    /// Returns whether the result of a flush is still awaited. Such a flush must not end, and fail, beside the flush of the
    /// target's promise.
    pub(super) fn awaits_flush(&self) -> bool {
        (self.flushes.is_answer_owed || self.replica.is_flushing()) && !broken(Bug::FailedFlushConfirmed)
    }
}
