//! Flushes of the owner's stores: what a power cut, or a flush that fails, can take from the owner is not forgotten.

use chronicle::{BlockRange, Epoch, LayeredBitmap};

use super::{Action, Replication};
use crate::identity::VolumeIndex;
use crate::planted::{Bug, broken};

/// Flushes of the owner's stores.
#[derive(Debug)]
pub(super) struct Flushes {
    /// Blocks of each volume that were written since the last flush began.
    pub(super) unflushed: Vec<LayeredBitmap>,
    /// The epoch to be forgotten after the flush that is under way, and the blocks that it covers. No epoch and no blocks if another
    /// flush has failed meanwhile: then its success says nothing.
    pub(super) under_way: Option<(Option<Epoch>, Vec<LayeredBitmap>)>,
    /// An epoch that was acknowledged since that flush began.
    pub(super) next: Option<Epoch>,
}

impl Replication {
    /// Flushes the owner's stores after the standby has confirmed an epoch: what a power cut can take from the owner is not forgotten.
    pub(super) fn flush_before_forgetting(&mut self, epoch: Epoch) {
        if broken(Bug::AcknowledgedUnflushed) {
            self.forget(epoch);
        } else if self.flushes.under_way.is_some() {
            self.flushes.next = Some(epoch);
        } else {
            let fresh: Vec<_> =
                self.flushes.unflushed.iter().map(|set| LayeredBitmap::new(set.blocks())).collect();
            let mut covered = std::mem::replace(&mut self.flushes.unflushed, fresh);
            // A flush does not cover writes in flight.
            for (volume, blocks) in self.writes.in_flight() {
                self.flushes.unflushed[volume.index()].insert(blocks);
                covered[volume.index()].insert(blocks);
            }
            self.flushes.under_way = Some((Some(epoch), covered));
            self.outbox.push(Action::FlushStores);
        }
    }

    pub(super) fn end_flush(&mut self) {
        let Some((epoch, _)) = self.flushes.under_way.take() else { return };
        epoch.into_iter().for_each(|epoch| self.forget(epoch));
        if let Some(next) = self.flushes.next.take() {
            self.flush_before_forgetting(next);
        }
    }

    pub(super) fn forget(&mut self, through: Epoch) {
        self.record.acknowledged = Some(through);
        self.make_durable();
        self.outbox.push_after_record(Action::Forget { through });
    }

    /// Counts everything as missing that was written since the last successful flush began.
    pub(super) fn fail_flush(&mut self) {
        if let Some((epoch, covered)) = &mut self.flushes.under_way {
            for (unflushed, covered) in self.flushes.unflushed.iter_mut().zip(covered.drain(..)) {
                unflushed.union_with(&covered);
            }
            *epoch = None;
        }
        self.flushes.next = None;
        if broken(Bug::FailedFlushForgotten) {
            return;
        }
        self.writes.fail_flush();
        let lost: Vec<(VolumeIndex, BlockRange)> = (0..)
            .map(VolumeIndex)
            .zip(&self.flushes.unflushed)
            .flat_map(|(volume, set)| set.runs().map(move |run| (volume, run)))
            .collect();
        if !lost.is_empty() {
            self.carried_by = self.epochs.open_number();
        }
        for (volume, blocks) in lost {
            self.overwrite(volume, blocks);
            self.epochs.change_open(volume, blocks);
        }
    }
}
