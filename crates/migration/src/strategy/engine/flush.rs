//! Flushes of the target: when one is due, and what it has confirmed.

use std::time::Duration;

use super::replica::{Confirmed, Ended};
use super::{Engine, Verdict};
use crate::planted::{Bug, broken};
use crate::strategy::{FlushId, TargetFault, VolumeAction};

/// Bytes applied at the target before they are flushed, so that the flush at the handover finds little to do.
const FLUSH_EVERY_BYTES: u64 = 256 << 20;

/// What is known of flushes besides the one under way, which [`ReplicaBlocks`](super::replica::ReplicaBlocks) has.
#[derive(Debug)]
pub(super) struct Flushes {
    /// Whether what the mover has copied is durable.
    bulk: Bulk,
    /// Whether somebody wants what the target has to be durable soon.
    is_wanted: bool,
    /// Whether a flush of the target may have failed that nobody has told of yet.
    is_answer_owed: bool,
    next: u64,
}

/// What has become of the chunks that have landed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bulk {
    /// The target has applied them.
    Applied,
    /// The last of them have been applied, and the flush that confirms them is under way.
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

    /// A chunk has been applied, or what was applied may be lost.
    pub(super) fn bulk_is_applied(&mut self) {
        self.bulk = Bulk::Applied;
    }
}

impl Engine {
    /// Tells whether the target may be flushed.
    pub(in crate::strategy) fn may_flush(&self) -> bool {
        !self.replica.is_flushing() && self.is_mirroring() && !self.gate.is_frozen()
    }

    /// Flushes the target if there is a reason to: the verdict, or one that is the same for all strategies.
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
                // A request that was under way when the target was started again fails for that.
                if ended == Ended::UnderWay {
                    self.target_failed(now, fault);
                }
            }
        }
    }

    /// Tells whether chunks have landed that no flush has been asked for as the last one.
    pub(in crate::strategy) fn is_bulk_applied(&self) -> bool {
        self.flushes.bulk == Bulk::Applied
    }

    /// Tells whether every chunk that has landed survives a power cut.
    pub(in crate::strategy) fn is_bulk_durable(&self) -> bool {
        self.flushes.bulk == Bulk::Durable
    }

    /// Tells whether how a flush of the target ends is still to be heard: it must not end, and fail, beside one by which the
    /// target promises.
    pub(super) fn awaits_flush(&self) -> bool {
        (self.flushes.is_answer_owed || self.replica.is_flushing()) && !broken(Bug::FailedFlushConfirmed)
    }
}
