//! Turns: what concerns one host is done one after the other.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use migration::HostId;
use tokio::sync::OwnedMutexGuard;

use super::lock;

/// A turn for each host.
#[derive(Default)]
pub(super) struct Turns(Mutex<BTreeMap<HostId, Arc<tokio::sync::Mutex<()>>>>);

impl Turns {
    /// Waits for the turn of a host, which ends when the result is dropped.
    pub(super) async fn of(&self, host: HostId) -> OwnedMutexGuard<()> {
        let turn = Arc::clone(lock(&self.0).entry(host).or_default());
        turn.lock_owned().await
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn one_host_is_served_at_a_time_and_others_do_not_wait() {
        let (turns, one, other) = (Turns::default(), HostId([1; 32]), HostId([2; 32]));
        let first = turns.of(one).now_or_never().unwrap();
        assert!(turns.of(one).now_or_never().is_none());
        assert!(turns.of(other).now_or_never().is_some());
        drop(first);
        assert!(turns.of(one).now_or_never().is_some());
    }
}
