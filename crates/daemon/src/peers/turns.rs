//! Limits how many slow questions one host may ask at a time: offers, preflight checks, probes. Each may start a QEMU, search
//! stores, and wait. Further questions are refused with the advice to ask again later.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use migration::HostId;
use migration::wire::{Refusal, RefusalCode};

use super::lock;

/// The number of concurrent answers to one host: more than a host within its own limits needs.
const TURNS_MAX: usize = 32;

/// The number of running answers by host.
#[derive(Default)]
pub(super) struct Turns(Mutex<BTreeMap<HostId, usize>>);

/// A question that is being answered, until this is dropped.
pub(super) struct Turn {
    turns: Arc<Turns>,
    host: HostId,
}

impl Turns {
    /// Takes a turn for a host; `None`: it has reached its limit.
    pub(super) fn take(self: &Arc<Self>, host: HostId) -> Option<Turn> {
        let mut turns = lock(&self.0);
        let count = turns.entry(host).or_default();
        if *count >= TURNS_MAX {
            return None;
        }
        *count += 1;
        Some(Turn { turns: Arc::clone(self), host })
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut turns = lock(&self.turns.0);
        if let Some(count) = turns.get_mut(&self.host) {
            *count -= 1;
            if *count == 0 {
                turns.remove(&self.host);
            }
        }
    }
}

/// Returns the refusal for a host without a free turn.
pub(super) fn refusal() -> Refusal {
    let detail = format!("it answers {TURNS_MAX} questions of this host already; try again later");
    Refusal { code: RefusalCode::Busy, detail }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_asks_much_at_a_time_takes_no_turns_of_others() {
        let turns = Arc::<Turns>::default();
        let [one, other] = [HostId([1; 32]), HostId([2; 32])];
        let mut taken: Vec<_> = std::iter::from_fn(|| turns.take(one)).collect();
        assert_eq!(taken.len(), TURNS_MAX);
        assert!(turns.take(other).is_some());
        taken.pop();
        assert!(turns.take(one).is_some());
        drop(taken);
        assert!(lock(&turns.0).is_empty());
    }
}
