//! Guests that this daemon has paused, or may pause. They are resumed only here.
//!
//! ```text
//!   paused.json   a note of each, durable before the guest may be paused, deleted once the guest runs
//! ```
//! [`migration::vm::hold`] decides the steps, which are carried out here. They are retried until the guest runs, or its
//! hypervisor has ended. [`Holds::why`] says what keeps a guest from running.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use hypervisor::{Hypervisor, HypervisorError, MigrationStatus, RunState};
use migration::vm::departure::{Then, check_can_go_on};
use migration::vm::hold::{Action, Event, Hold, Memory, Reason, Running, Seen};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::VmError;
use super::arrival::blocking;
use crate::files::listing::{Listed, Listing};
use crate::journal::now_unix_ms;

pub(crate) struct Holds {
    /// `Err` holds why the notes could not be loaded.
    notes: Result<Listing<Note>, String>,
    /// Guests that this process still has to resume.
    held: Mutex<BTreeMap<String, Arc<Held>>>,
}

#[derive(Default)]
struct Held {
    hold: tokio::sync::Mutex<Option<Hold>>,
    /// Why it does not run yet.
    why: Mutex<Option<String>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Note {
    pub(crate) name: String,
    pub(crate) reason: NotedReason,
    /// Whether it ran before, and must run again.
    pub(crate) was_running: bool,
    since_unix_ms: u64,
}

/// [`Reason`] in its stored form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum NotedReason {
    Adopt,
    Release,
    Move,
    MoveAhead,
    /// No reason of Sterna's: its guest has shut down while it moved.
    HasEnded,
    Resume,
    Missing,
    Suspend,
}

/// Whether a guest's hypervisor can be reached.
pub(crate) enum Reached {
    There(Arc<dyn Hypervisor>),
    /// It does not answer, for this reason.
    Silent(String),
    Ended,
}

/// The result of resuming a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ran {
    /// It runs, or was not to run.
    Runs,
    Ended,
    /// It may run at another host, and must not run here.
    Elsewhere,
}

impl Holds {
    /// Reads the notes. May block.
    pub(crate) fn open(data_dir: &Path) -> Arc<Self> {
        let notes = Listing::open(data_dir).map_err(|error| crate::error::with_causes(&error));
        if let Err(problem) = &notes {
            tracing::warn!(
                %problem,
                "cannot read the list of paused VMs: until that is repaired, no VM can be adopted, released or moved"
            );
        }
        Arc::new(Self { notes, held: Mutex::default() })
    }

    pub(crate) fn list(&self) -> Vec<Note> {
        self.notes.as_ref().map(Listing::list).unwrap_or_default()
    }

    pub(crate) fn get(&self, name: &str) -> Option<Note> {
        self.notes.as_ref().ok()?.get(name)
    }

    /// Returns why a paused guest does not run yet; `None`: it runs, or resuming was never tried.
    pub(crate) fn why(&self, name: &str) -> Option<String> {
        let held = self.held().get(name).cloned();
        let why = held.and_then(|held| lock(&held.why).clone());
        // A note that its reads may be refused is not a reason by itself.
        let note = self.get(name).filter(|note| note.reason != NotedReason::Missing);
        why.or_else(|| note.map(|note| format!("paused {}", note.reason.text())))
    }

    /// Returns whether a reason is known why a guest does not run.
    pub(crate) fn is_told(&self, name: &str) -> bool {
        self.held().get(name).is_some_and(|held| lock(&held.why).is_some())
    }

    /// Sets or clears the reason why a guest does not run yet.
    pub(crate) fn tell(&self, name: &str, why: Option<String>) {
        *lock(&self.of(name).why) = why;
    }

    /// Makes durable that a guest may be paused. It may be paused once this returns, and not after an error.
    pub(crate) async fn hold(
        self: &Arc<Self>,
        name: &str,
        reason: Reason,
        was_running: bool,
    ) -> Result<(), VmError> {
        let held = self.of(name);
        let mut guard = held.hold.lock().await;
        let earlier = self.get(name);
        let mut hold = Hold::free();
        hold.handle_event(Duration::ZERO, Event::Hold(reason));
        while let Some(action) = hold.poll_action() {
            match action {
                Action::Note(reason) => {
                    let note = Note {
                        name: name.to_owned(),
                        reason: reason.into(),
                        // A guest that is already paused for an earlier reason runs again after both.
                        was_running: was_running
                            || earlier
                                .as_ref()
                                .is_some_and(|note| note.was_running && note.reason != NotedReason::HasEnded),
                        since_unix_ms: now_unix_ms(),
                    };
                    let holds = Arc::clone(self);
                    blocking(move || Ok(holds.notes()?.put(&note)?)).await?;
                    hold.handle_event(Duration::ZERO, Event::Noted);
                }
                Action::MayPause => break,
                _ => {}
            }
        }
        *guard = Some(hold);
        Ok(())
    }

    /// Resumes a guest when its reason for a pause has ended. Resolves, without a time limit, once the guest runs, has ended,
    /// or must not run here. If the future is dropped, the guest may be paused, and the note remains.
    pub(crate) async fn let_run(
        self: &Arc<Self>,
        name: &str,
        find: impl Fn() -> BoxFuture<'static, Reached>,
    ) -> Ran {
        let held = self.of(name);
        let mut guard = held.hold.lock().await;
        let Some(note) = self.get(name) else {
            *guard = None;
            return Ran::Runs;
        };
        let mut hold = guard.take().unwrap_or_else(|| Hold::found(note.reason.into()));
        let began = Instant::now();
        let mut ran = Ran::Runs;
        let mut reached = None;
        let is_move = matches!(
            note.reason,
            NotedReason::Move | NotedReason::MoveAhead | NotedReason::HasEnded | NotedReason::Suspend
        );
        hold.handle_event(
            Duration::ZERO,
            match (note.was_running, is_move) {
                (true, _) => Event::LetRun,
                // Its move is abandoned all the same.
                (false, true) => Event::LetStay,
                (false, false) => Event::Gone,
            },
        );
        while !hold.is_free() {
            let Some(action) = hold.poll_action() else {
                match hold.poll_timeout() {
                    Some((until, _)) => tokio::time::sleep_until(began + until).await,
                    None => break,
                }
                hold.handle_timeout(began.elapsed());
                continue;
            };
            let event = match action {
                Action::Look | Action::Abandon | Action::Continue => {
                    let found = match reached.take() {
                        Some(vm) => Reached::There(vm),
                        None => find().await,
                    };
                    match found {
                        Reached::There(vm) => {
                            let done = carry_out(&*vm, &action).await;
                            // A hypervisor whose connection has ended is searched again.
                            reached = done.is_ok().then_some(vm);
                            done.unwrap_or_else(|error| Event::Refused(error.to_string()))
                        }
                        Reached::Silent(reason) => Event::Refused(reason),
                        Reached::Ended => {
                            ran = Ran::Ended;
                            Event::Gone
                        }
                    }
                }
                Action::Tell(reason) => {
                    tracing::error!(vm = %name, reason, "cannot resume the VM yet; trying until it runs");
                    *lock(&held.why) =
                        Some(format!("paused {}, and cannot be resumed yet: {reason}", note.reason.text()));
                    continue;
                }
                Action::MustNotRun => {
                    ran = Ran::Elsewhere;
                    continue;
                }
                Action::Forget => {
                    // A guest that has shut down is not resumed later either, until it is started.
                    if note.reason != NotedReason::HasEnded {
                        self.remove_note(name).await;
                    }
                    Event::Forgotten
                }
                Action::Note(_) | Action::MayPause => continue,
            };
            hold.handle_event(began.elapsed(), event);
        }
        *lock(&held.why) = None;
        ran
    }

    /// Makes durable what a guest that is held for a move is to do, because its user has paused, resumed or shut it down
    /// meanwhile. After an error the earlier note holds.
    pub(crate) async fn note_then(self: &Arc<Self>, name: &str, then: Then) -> Result<(), VmError> {
        let Some(note) = self.get(name) else { return Ok(()) };
        let reason = if then == Then::HasEnded { NotedReason::HasEnded } else { note.reason };
        let note = Note { was_running: then == Then::Runs, reason, ..note };
        let holds = Arc::clone(self);
        blocking(move || Ok(holds.notes()?.put(&note)?)).await
    }

    /// Checks whether a guest in this state may be resumed; fails with [`VmError::CannotGoOn`].
    pub(crate) fn check_can_go_on(&self, name: &str, state: &RunState) -> Result<(), VmError> {
        let has_ended = self.get(name).is_some_and(|note| note.reason == NotedReason::HasEnded);
        // A hypervisor that has abandoned a move does not say what its guest did before.
        let state = if has_ended && *state == RunState::PostMigrate { &RunState::Shutdown } else { state };
        let cannot = |why: &str| VmError::CannotGoOn { vm: name.to_owned(), why: why.to_owned() };
        check_can_go_on(state.as_str()).map_err(cannot)
    }

    /// Deletes the note of a guest that this host must not resume, or has never paused.
    pub(crate) async fn forget(self: &Arc<Self>, name: &str) {
        let held = self.of(name);
        let mut guard = held.hold.lock().await;
        *guard = None;
        self.tell(name, None);
        if self.get(name).is_some() {
            self.remove_note(name).await;
        }
    }

    async fn remove_note(self: &Arc<Self>, name: &str) {
        let (holds, removed) = (Arc::clone(self), name.to_owned());
        let done = blocking(move || Ok(holds.notes()?.remove(&removed).map(drop)?)).await;
        if let Err(error) = done {
            // A later daemon finds the guest running, and does nothing.
            tracing::warn!(vm = %name, %error, "the note of a VM that was paused is left over");
        }
    }

    fn notes(&self) -> Result<&Listing<Note>, VmError> {
        self.notes.as_ref().map_err(|problem| VmError::Unusable(problem.clone()))
    }

    fn of(&self, name: &str) -> Arc<Held> {
        Arc::clone(self.held().entry(name.to_owned()).or_default())
    }

    fn held(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Held>>> {
        lock(&self.held)
    }
}

async fn carry_out(vm: &dyn Hypervisor, action: &Action) -> Result<Event, HypervisorError> {
    match action {
        Action::Abandon => vm.abandon().await.map(|()| Event::Done),
        Action::Continue => vm.resume().await.map(|()| Event::Done),
        _ => look(vm).await.map(Event::Seen),
    }
}

async fn look(vm: &dyn Hypervisor) -> Result<Seen, HypervisorError> {
    let memory = match vm.memory_progress().await?.status {
        MigrationStatus::Setup | MigrationStatus::Active | MigrationStatus::PreSwitchover => Memory::Moving,
        MigrationStatus::Device | MigrationStatus::Cancelling => Memory::Ending,
        status if status.is_post_copy() => Memory::Ahead,
        _ => Memory::Still,
    };
    let running = match vm.run_state().await? {
        RunState::Running => Running::Yes,
        // N.B. a guest that waits for its memory would run at once with an incomplete memory.
        RunState::FinishMigrate | RunState::PostMigrate => Running::No,
        state if check_can_go_on(state.as_str()).is_ok() => Running::Paused,
        _ => Running::Ended,
    };
    Ok(Seen { running, memory, is_over_nothing: vm.has_disk_over_nothing().await? })
}

impl NotedReason {
    fn text(self) -> &'static str {
        match self {
            Self::Adopt => "while its disks are adopted",
            Self::Release => "while it is given its disks back",
            Self::Move | Self::MoveAhead => "for its move to another host",
            Self::HasEnded => "since its guest shut down while it moved",
            Self::Resume => "for some time",
            Self::Missing => "while a disk waits for blocks of another host",
            Self::Suspend => "while its memory is written to a file",
        }
    }
}

impl From<Reason> for NotedReason {
    fn from(reason: Reason) -> Self {
        match reason {
            Reason::Adopt => Self::Adopt,
            Reason::Release => Self::Release,
            Reason::Move => Self::Move,
            Reason::MoveAhead => Self::MoveAhead,
            Reason::Resume => Self::Resume,
            Reason::Missing => Self::Missing,
            Reason::Suspend => Self::Suspend,
        }
    }
}

impl From<NotedReason> for Reason {
    fn from(reason: NotedReason) -> Self {
        match reason {
            NotedReason::Adopt => Self::Adopt,
            NotedReason::Release => Self::Release,
            NotedReason::Move | NotedReason::HasEnded => Self::Move,
            NotedReason::MoveAhead => Self::MoveAhead,
            NotedReason::Resume => Self::Resume,
            NotedReason::Missing => Self::Missing,
            NotedReason::Suspend => Self::Suspend,
        }
    }
}

impl Listed for Note {
    const FILE: &'static str = "paused.json";
    const VERSION: u32 = 1;
    const KEY: &'static str = "paused";
    const OTHERWISE: &'static str =
        "no list of paused VMs: remove it, and resume each VM: sterna vm resume NAME";

    fn name(&self) -> &str {
        &self.name
    }
}

/// The locked data stays consistent after a panic of another holder.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
