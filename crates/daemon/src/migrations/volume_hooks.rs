//! Runs hooks before and after volumes without a VM change hands.
//!
//! ```text
//!   source                                              target
//!   copied ── Start, again until it is answered ──────► runs its hook, once
//!            ◄───────────────── Waiting, or Failed ────
//!   runs its hook ──► the gates close
//! ```
//! With a stopped VM, the question to the target is whether it has kept the VM (`vms/orders/cold.rs`).
//! Guests work meanwhile. Unlike the memory of a VM, nothing here is lost with a process: a restarted daemon is asked again,
//! and runs its hook again.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_channel::mpsc::UnboundedReceiver;
use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use lane::peer::ChannelEvent;
use migration::{MigrationId, Phase};
use tokio::task::{AbortHandle, JoinSet};
use transport::Priority;

use crate::config::HOOK_TIMEOUT_S;
use crate::hooks::{HookFault, HookRunner};
use crate::vms::moving::channel::Send;
use crate::vms::moving::message::VmMessage;
use crate::vms::moving::{MoveFault, PeerFault};

/// How long the other host may take: as long as the longest hook, and a reserve.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60 + *HOOK_TIMEOUT_S.end());
/// The pause before it is asked again: it may have been restarted, and have lost the question.
const ASK_INTERVAL: Duration = Duration::from_secs(1);

pub(crate) struct VolumeHooks {
    runtime: tokio::runtime::Handle,
    known: Mutex<BTreeMap<MigrationId, Known>>,
}

/// The channel to the other host: its sending end, and its receiving end.
pub(crate) type HooksChannel = (Arc<dyn Send>, UnboundedReceiver<ChannelEvent>);

/// A question to the target: resolves when it agrees to the handover, or with the reason why not.
pub(crate) type Question = BoxFuture<'static, Result<(), VolumeHooksFault>>;

struct Known {
    hooks: Arc<HookRunner>,
    /// The question to the target, until it is asked; `None`: the target is this host.
    question: Option<Question>,
    runs: Option<AbortHandle>,
}

impl VolumeHooks {
    pub(crate) fn new(runtime: tokio::runtime::Handle) -> Arc<Self> {
        Arc::new(Self { runtime, known: Mutex::default() })
    }

    /// Registers volumes that leave by this migration after this question, or that go to another store of this host.
    pub(crate) fn leaves(&self, migration: MigrationId, hooks: Arc<HookRunner>, question: Option<Question>) {
        self.known().insert(migration, Known { hooks, question, runs: None });
    }

    /// Forgets an ended migration; returns its hooks, some of which may still have to run.
    pub(crate) fn forget(&self, migration: MigrationId) -> Option<Arc<HookRunner>> {
        self.known().remove(&migration).map(|known| known.hooks)
    }

    /// Runs the hooks of both hosts before the handover; called on a lane's thread. See [`lane::Control::run_hooks`].
    pub(crate) fn run(
        &self,
        migration: MigrationId,
    ) -> impl Future<Output = Result<(), VolumeHooksFault>> + use<> {
        let task = self.known().get_mut(&migration).map(|known| {
            let (hooks, question) = (Arc::clone(&known.hooks), known.question.take());
            let task = self.runtime.spawn(async move {
                if let Some(question) = question {
                    question.await?;
                }
                Ok(hooks.before().await?)
            });
            known.runs = Some(task.abort_handle());
            task
        });
        async move {
            let task = task.ok_or(VolumeHooksFault::NotKnown)?;
            task.await.unwrap_or(Err(VolumeHooksFault::GivenUp))
        }
    }

    /// Handles a new phase of a migration; called on a lane's thread.
    pub(crate) fn entered(&self, migration: MigrationId, phase: Phase) {
        if phase == Phase::Discarding
            && let Some(runs) = self.known().get_mut(&migration).and_then(|known| known.runs.take())
        {
            runs.abort();
        }
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<MigrationId, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why the hooks before a handover did not succeed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum VolumeHooksFault {
    #[error("it is unknown which hook must run before")]
    NotKnown,
    #[error("it was given up")]
    GivenUp,
    /// The other host failed.
    #[error(transparent)]
    Peer(#[from] PeerFault),
    #[error("{} s were not enough for the other host's hooks", ANSWER_TIMEOUT.as_secs())]
    Overdue,
    #[error(transparent)]
    Hook(#[from] HookFault),
    /// The target does not keep the VM of the volumes.
    #[error(transparent)]
    Vm(#[from] MoveFault),
}

/// Asks the target to run its hook.
pub(crate) async fn ask((sender, mut arrivals): HooksChannel) -> Result<(), VolumeHooksFault> {
    let answered = async {
        loop {
            send(&*sender, &VmMessage::Start);
            let heard = async {
                while let Some(arrival) = arrivals.next().await {
                    match word(&arrival) {
                        Some(VmMessage::Waiting) => return Ok(()),
                        Some(VmMessage::Failed { detail }) => return Err(PeerFault(detail)),
                        _ => {}
                    }
                }
                Err(PeerFault::silent())
            };
            if let Ok(answer) = tokio::time::timeout(ASK_INTERVAL, heard).await {
                return answer;
            }
        }
    };
    Ok(tokio::time::timeout(ANSWER_TIMEOUT, answered).await.map_err(|_| VolumeHooksFault::Overdue)??)
}

/// Answers each question of the source. Runs the `before` hook once, and repeats its answer. Ends when it is aborted.
pub(crate) async fn answer((sender, mut arrivals): HooksChannel, hooks: Arc<HookRunner>) {
    // Dropping this ends a running hook.
    let mut before = JoinSet::new();
    let mut said: Option<VmMessage> = None;
    loop {
        tokio::select! {
            arrival = arrivals.next() => {
                let Some(arrival) = arrival else { return };
                match word(&arrival) {
                    Some(VmMessage::Start) => {}
                    Some(VmMessage::Keep { .. }) => {
                        send(&*sender, &VmMessage::failed("its daemon was restarted before it kept the VM"));
                        continue;
                    }
                    _ => continue,
                }
                match &said {
                    Some(said) => send(&*sender, said),
                    None if before.is_empty() => drop(before.spawn(run(Arc::clone(&hooks)))),
                    // The source is answered when it has ended.
                    None => {}
                }
            }
            Some(ended) = before.join_next() => {
                let ended = ended.unwrap_or_else(|_| VmMessage::failed("the hook was given up"));
                send(&*sender, &ended);
                said = Some(ended);
            }
        }
    }
}

async fn run(hooks: Arc<HookRunner>) -> VmMessage {
    match hooks.before().await {
        Ok(()) => VmMessage::Waiting,
        Err(fault) => VmMessage::failed(&fault.to_string()),
    }
}

fn send(sender: &dyn Send, message: &VmMessage) {
    sender.send(Priority::Control, message.encode().into(), Bytes::new());
}

fn word(arrival: &ChannelEvent) -> Option<VmMessage> {
    let ChannelEvent::Message { head, .. } = arrival else { return None };
    match VmMessage::decode(head) {
        Ok(message) => Some(message),
        Err(error) => {
            tracing::warn!(%error, "the other host sent an invalid message about its hooks");
            None
        }
    }
}

#[cfg(test)]
mod tests;
