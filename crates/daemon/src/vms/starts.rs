//! The VMs that are still to be started, and how far that is: the machine of [`migration::vm::start`] with the daemon's clock.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use api::AwaitedStart;
use migration::vm::start::{Candidate, Phase, Retry, Starts};
use tokio::sync::Notify;

/// The starts that are still to come.
pub(crate) struct AwaitedStarts {
    began: Instant,
    state: Mutex<State>,
    changed: Notify,
}

struct State {
    starts: Starts,
    /// Why the last attempt of each has failed.
    reasons: BTreeMap<String, String>,
    /// VMs whose readiness a task watches.
    watched: BTreeSet<String>,
    /// Whether a task carries the starts out.
    is_carried_out: bool,
}

/// What the task that carries out the starts does next.
#[derive(Debug, Default)]
pub(super) struct Next {
    pub(super) start: Vec<String>,
    pub(super) watch: Vec<String>,
    /// The time until something changes by itself.
    pub(super) wait: Option<Duration>,
    pub(super) is_over: bool,
}

impl Default for AwaitedStarts {
    fn default() -> Self {
        Self::new(Retry::UntilStarted)
    }
}

impl AwaitedStarts {
    pub(super) fn new(retry: Retry) -> Self {
        let starts = Starts::new(retry, [], Duration::ZERO);
        let (reasons, watched) = (BTreeMap::new(), BTreeSet::new());
        let state = State { starts, reasons, watched, is_carried_out: false };
        Self { began: Instant::now(), state: Mutex::new(state), changed: Notify::new() }
    }

    /// Adds VMs. Returns whether the caller is to carry the starts out.
    pub(super) fn add(&self, candidates: Vec<Candidate>) -> bool {
        let mut state = self.now();
        state.starts.add(candidates);
        self.changed.notify_one();
        !std::mem::replace(&mut state.is_carried_out, true)
    }

    /// Returns what is to be done now. If it is over, the caller stops carrying the starts out.
    pub(super) fn next(&self) -> Next {
        let mut state = self.now();
        let start = std::iter::from_fn(|| state.starts.poll()).collect();
        let watched: BTreeSet<String> = state.starts.watched().into_iter().collect();
        let watch = watched.difference(&state.watched).cloned().collect();
        state.watched = watched;
        let is_over = state.starts.is_over();
        if is_over {
            state.is_carried_out = false;
        }
        let wait = state.starts.poll_timeout().map(|at| at.saturating_sub(self.began.elapsed()));
        Next { start, watch, wait, is_over }
    }

    /// Waits until something has changed.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    pub(super) fn started(&self, name: &str) {
        let mut state = self.now();
        state.starts.started(name);
        state.reasons.remove(name);
        self.changed.notify_one();
    }

    pub(super) fn failed(&self, name: &str, reason: String) {
        let mut state = self.now();
        state.starts.failed(name);
        state.reasons.insert(name.to_owned(), reason);
        self.changed.notify_one();
    }

    pub(super) fn ready(&self, name: &str) {
        self.now().starts.ready(name);
        self.changed.notify_one();
    }

    /// Forgets a VM. Returns whether it was still to be started.
    pub(super) fn withdraw(&self, name: &str) -> bool {
        let mut state = self.now();
        let was_awaited = state.starts.is_to_start(name);
        state.starts.withdraw(name);
        state.reasons.remove(name);
        self.changed.notify_one();
        was_awaited
    }

    pub(super) fn is_to_start(&self, name: &str) -> bool {
        self.now().starts.is_to_start(name)
    }

    pub(super) fn is_watched(&self, name: &str) -> bool {
        self.now().starts.phase(name) == Some(Phase::Watched)
    }

    /// Returns whether a VM was not ready in time.
    pub(super) fn is_late(&self, name: &str) -> bool {
        self.now().starts.phase(name) == Some(Phase::Done { is_late: true })
    }

    /// Returns the start of a VM that is still to come.
    pub(super) fn awaited(&self, name: &str) -> Option<AwaitedStart> {
        let state = self.now();
        if !state.starts.is_to_start(name) {
            return None;
        }
        let failed_attempts = state.starts.failures(name);
        Some(AwaitedStart { failed_attempts, reason: state.reasons.get(name).cloned() })
    }

    /// Returns why the last attempt of a VM has failed.
    pub(super) fn reason(&self, name: &str) -> Option<String> {
        self.now().reasons.get(name).cloned()
    }

    /// Returns the state at the present time.
    fn now(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.starts.handle_timeout(self.began.elapsed());
        state
    }
}
