//! Fails requests on purpose: for tests, and for users who want to see what a broken disk does to a migration.
//!
//! Ships with the product, so both use the same faults.

use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Operation, Operations};
use crate::buffer::Buffer;
use crate::change::Change;
use crate::device::{BlockDevice, ByteRange, Extent, Geometry, IoFuture, ZeroMode};
use crate::error::IoError;
use crate::growth::Growth;
use crate::random::Random;

/// The probability of certainty: probabilities are counted in millionths.
pub const CERTAIN: u32 = 1_000_000;

/// Fails requests as its rules say.
pub struct Fault {
    inner: Rc<dyn BlockDevice>,
    switch: FaultSwitch,
}

/// The rules of a [`Fault`], which can be changed while it works, from any thread; clones share them.
#[derive(Clone)]
pub struct FaultSwitch {
    state: Arc<Mutex<FaultState>>,
}

/// Which requests fail, and how.
#[derive(Clone, Copy, Debug)]
pub struct FaultRule {
    /// The kinds of requests that fail.
    pub operations: Operations,
    /// The range of requests that fail; `None`: any range, and flushes.
    pub range: Option<ByteRange>,
    /// How many such requests pass before the first fails.
    pub after: u64,
    /// The probability of a failure in millionths; [`CERTAIN`]: every request fails.
    pub probability: u32,
    /// How many requests fail before the rule is spent; `None`: no limit.
    pub count: Option<u64>,
    /// The error of failed requests.
    pub error: IoError,
    /// The effect of a change that fails.
    pub effect: Effect,
}

/// How much of a failed write, discard or write-zeroes is applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing of it is applied.
    None,
    /// Its first half is applied, in whole blocks.
    Half,
    /// All of it is applied: only its answer is lost.
    Whole,
}

struct FaultState {
    rules: Vec<FaultRule>,
    random: Random,
    failed: u64,
}

impl FaultRule {
    /// Returns a rule by which every request of these kinds fails with `error` and changes nothing.
    pub fn always(operations: Operations, error: IoError) -> Self {
        let (probability, effect) = (CERTAIN, Effect::None);
        Self { operations, range: None, after: 0, probability, count: None, error, effect }
    }
}

impl Fault {
    /// Puts the filter over `inner`, without rules; `seed` determines the requests that rules with a probability hit.
    pub fn new(inner: Rc<dyn BlockDevice>, seed: u64) -> (Self, FaultSwitch) {
        let switch = FaultSwitch::new(seed);
        (Self::with(switch.clone(), inner), switch)
    }

    /// Puts the filter over `inner`. Devices with the same switch share its counts.
    pub fn with(switch: FaultSwitch, inner: Rc<dyn BlockDevice>) -> Self {
        Self { inner, switch }
    }

    fn verdict(&self, operation: Operation, range: Option<ByteRange>) -> Option<(IoError, Effect)> {
        self.switch.lock().verdict(operation, range)
    }

    fn half(&self, range: ByteRange) -> ByteRange {
        let half = range.length / 2;
        ByteRange::new(range.offset, half - half % u64::from(self.inner.geometry().alignment))
    }
}

impl FaultSwitch {
    /// Makes a switch without rules; `seed` determines the requests that rules with a probability hit.
    pub fn new(seed: u64) -> Self {
        let state = FaultState { rules: Vec::new(), random: Random::new(seed), failed: 0 };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    /// Adds a rule; the first one that matches a request decides.
    pub fn add(&self, rule: FaultRule) {
        self.lock().rules.push(rule);
    }

    /// Removes all rules that were added.
    pub fn clear(&self) {
        self.lock().rules.clear();
    }

    /// Returns the number of failed requests so far.
    pub fn failed(&self) -> u64 {
        self.lock().failed
    }

    fn lock(&self) -> MutexGuard<'_, FaultState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BlockDevice for Fault {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
        match self.verdict(Operation::Read, Some(ByteRange::new(offset, buffer.len() as u64))) {
            Some((error, _)) => failed(error),
            None => self.inner.read(offset, buffer),
        }
    }

    fn change(&self, change: Change) -> IoFuture<'_, ()> {
        let range = change.range();
        match self.verdict(Operation::of(&change), Some(range)) {
            None => self.inner.change(change),
            Some((error, Effect::None)) => failed(error),
            Some((error, Effect::Half)) => {
                Box::pin(fail_after(self.inner.change(change.part(self.half(range))), error))
            }
            Some((error, Effect::Whole)) => Box::pin(fail_after(self.inner.change(change), error)),
        }
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        match self.verdict(Operation::Flush, None) {
            Some((error, _)) => failed(error),
            None => self.inner.flush(),
        }
    }

    fn growth(&self) -> Option<&dyn Growth> {
        self.inner.growth()
    }

    fn zeroes_fast(&self, mode: ZeroMode) -> bool {
        self.inner.zeroes_fast(mode)
    }

    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        match self.verdict(Operation::Allocation, Some(range)) {
            Some((error, _)) => failed(error),
            None => self.inner.allocation(range),
        }
    }

    fn own_allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        match self.verdict(Operation::Allocation, Some(range)) {
            Some((error, _)) => failed(error),
            None => self.inner.own_allocation(range),
        }
    }
}

impl FaultState {
    fn verdict(&mut self, operation: Operation, range: Option<ByteRange>) -> Option<(IoError, Effect)> {
        let random = &mut self.random;
        let rule = self.rules.iter_mut().find_map(|rule| {
            let is_due = rule.names(operation, range) && rule.is_due();
            let hits = is_due
                && (rule.probability >= CERTAIN
                    || random.below(u64::from(CERTAIN)) < u64::from(rule.probability));
            hits.then_some(rule)
        })?;
        rule.count = rule.count.map(|count| count - 1);
        self.failed += 1;
        Some((rule.error, rule.effect))
    }
}

impl FaultRule {
    fn names(&self, operation: Operation, range: Option<ByteRange>) -> bool {
        let is_there = self.range.is_none_or(|ours| range.is_some_and(|theirs| ours.overlaps(&theirs)));
        self.count != Some(0) && self.operations.contains(operation) && is_there
    }

    fn is_due(&mut self) -> bool {
        let is_due = self.after == 0;
        self.after = self.after.saturating_sub(1);
        is_due
    }
}

fn failed<T: 'static>(error: IoError) -> IoFuture<'static, T> {
    Box::pin(std::future::ready(Err(error)))
}

async fn fail_after(request: IoFuture<'_, ()>, error: IoError) -> Result<(), IoError> {
    request.await?;
    Err(error)
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use rustix::io::Errno;

    use super::*;
    use crate::device::Durability;
    use crate::store::MemoryStore;

    const BROKEN: IoError = IoError::Os { operation: "write", errno: Errno::IO };

    fn disk(seed: u64) -> (Fault, FaultSwitch) {
        Fault::new(Rc::new(MemoryStore::new(1 << 16)), seed)
    }

    fn write(fault: &Fault, offset: u64, length: usize) -> Result<(), IoError> {
        let data = Buffer::copy_of(&vec![1; length]);
        fault.write(offset, data, Durability::Volatile).now_or_never().unwrap()
    }

    fn read(fault: &Fault) -> Vec<u8> {
        let read = fault.read(0, Buffer::zeroed(1 << 16)).now_or_never().unwrap();
        read.unwrap().as_slice().to_vec()
    }

    #[test]
    fn a_rule_hits_its_operations_in_its_range_as_often_as_it_says() {
        let (fault, switch) = disk(1);
        let range = Some(ByteRange::new(8192, 4096));
        let rule = FaultRule { range, count: Some(2), ..FaultRule::always(Operations::CHANGES, BROKEN) };
        switch.add(rule);
        assert_eq!(write(&fault, 4096, 4096), Ok(()));
        assert_eq!(write(&fault, 4096, 8192), Err(BROKEN));
        assert_eq!(fault.discard(ByteRange::new(8192, 4096)).now_or_never(), Some(Err(BROKEN)));
        assert_eq!(write(&fault, 8192, 4096), Ok(()), "the rule is spent");
        assert_eq!(switch.failed(), 2);
        switch.add(FaultRule::always(Operations::of(&[Operation::Flush]), BROKEN));
        assert_eq!(fault.flush().now_or_never(), Some(Err(BROKEN)));
        switch.clear();
        assert_eq!(fault.flush().now_or_never(), Some(Ok(())));
    }

    #[test]
    fn a_rule_lets_so_many_requests_pass_first() {
        let (fault, switch) = disk(1);
        let rule = FaultRule::always(Operations::of(&[Operation::Write]), BROKEN);
        switch.add(FaultRule { after: 2, count: Some(1), ..rule });
        assert_eq!(fault.flush().now_or_never(), Some(Ok(())), "it is not counted");
        let writes = [0; 4].map(|_| write(&fault, 0, 4096));
        assert_eq!(writes, [Ok(()), Ok(()), Err(BROKEN), Ok(())]);
    }

    #[test]
    fn the_same_seed_hits_the_same_requests() {
        let hits = |seed| {
            let (fault, switch) = disk(seed);
            switch.add(FaultRule { probability: CERTAIN / 4, ..FaultRule::always(Operations::ALL, BROKEN) });
            (0..1000).map(|_| write(&fault, 0, 4096).is_err()).collect::<Vec<_>>()
        };
        assert_eq!(hits(7), hits(7));
        assert_ne!(hits(7), hits(8));
        let count = hits(7).into_iter().filter(|hit| *hit).count();
        assert!((150..350).contains(&count), "{count} of 1000");
    }

    #[test]
    fn what_fails_is_applied_as_far_as_the_rule_says() {
        for (effect, applied) in [(Effect::None, 0), (Effect::Half, 4096), (Effect::Whole, 12_288)] {
            let (fault, switch) = disk(1);
            switch.add(FaultRule { effect, ..FaultRule::always(Operations::CHANGES, BROKEN) });
            assert_eq!(write(&fault, 0, 12_288), Err(BROKEN));
            assert_eq!(read(&fault).iter().filter(|byte| **byte == 1).count(), applied, "{effect:?}");
        }
    }
}
