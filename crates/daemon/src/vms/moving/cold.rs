//! The conversation of two hosts about a stopped VM that moves with its volumes.
//!
//! ```text
//!   source                                         target
//!     │ ── Manifest …, Keep, until answered ──────► │ keeps the VM durably, or has kept it
//!     │ ◄──────────────────────── Kept, or Failed ─ │
//! ```
//! The source asks before the copying, and again before the handover ([`migration::vm::cold`]). Each question is complete in
//! itself, so a killed daemon on either side loses nothing.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_channel::mpsc::UnboundedReceiver;
use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use lane::peer::ChannelEvent;
use migration::vm::cold::Purpose;
use tokio::sync::Mutex;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::timeout;
use transport::Priority;

use super::channel::Send;
use super::fault::{MoveFault, PeerFault};
use super::message::VmMessage;
use super::stream::PIECE_BYTES;
use crate::hooks::HookRunner;
use crate::vms::MANIFEST_BYTES_MAX;

/// How long a source asks, and how often.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// The pause before the target is asked again: it may have been restarted, and have lost the question.
    pub(crate) again: Duration,
    pub(crate) limit: Duration,
}

/// The channel to the other host: its sending end, and its receiving end.
pub(crate) type ColdChannel = (Arc<dyn Send>, UnboundedReceiver<ChannelEvent>);

/// The host's part for a stopped VM that arrives.
pub(crate) trait ColdKeeper: std::marker::Send + Sync {
    /// Keeps the described VM durably, unless it is kept already, and takes the other steps for this purpose.
    fn keep(&self, description: Vec<u8>, purpose: Purpose) -> BoxFuture<'_, Result<(), MoveFault>>;
}

/// A stopped VM that arrives.
pub(crate) struct ColdArrival {
    hooks: Arc<HookRunner>,
    answers: AbortHandle,
    turn: Arc<Mutex<Turn>>,
}

/// Whether the VM may still be kept. Its lock is held while it is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    Open,
    /// The migration has ended.
    Over,
}

impl ColdArrival {
    /// Begins to answer the source.
    pub(crate) fn begin(
        runtime: &tokio::runtime::Handle,
        channel: ColdChannel,
        (keeper, turn): (Arc<dyn ColdKeeper>, Arc<Mutex<Turn>>),
        hooks: Arc<HookRunner>,
    ) -> Self {
        let answers = runtime.spawn(answer(channel, keeper)).abort_handle();
        Self { hooks, answers, turn }
    }

    /// Ends the answers at once.
    pub(crate) fn abort(&self) {
        self.answers.abort();
    }

    /// Ends the answers. On return no keeping of the VM is under way.
    pub(crate) async fn end(self) -> Arc<HookRunner> {
        self.abort();
        *self.turn.lock().await = Turn::Over;
        self.hooks
    }
}

/// Asks the target until it has kept the described VM for this purpose. The error says why it does not.
pub(crate) async fn ask(
    (sender, mut arrivals): ColdChannel,
    description: Vec<u8>,
    purpose: Purpose,
    Patience { again, limit }: Patience,
) -> Result<(), MoveFault> {
    let description = Bytes::from(description);
    let answered = async {
        loop {
            send_question(&*sender, description.clone(), purpose);
            if let Ok(answer) = timeout(again, heard(&mut arrivals, purpose)).await {
                return answer;
            }
        }
    };
    let what = "the other host to keep the VM";
    Ok(timeout(limit, answered).await.map_err(|_| MoveFault::Overdue { what, limit })??)
}

fn send_question(sender: &dyn Send, mut description: Bytes, purpose: Purpose) {
    // A longer description would not have been encoded.
    let bytes = u32::try_from(description.len()).unwrap_or(u32::MAX);
    while !description.is_empty() {
        let piece = description.split_to(description.len().min(PIECE_BYTES));
        sender.send(Priority::Memory, VmMessage::Manifest.encode().into(), piece);
    }
    let keep = VmMessage::Keep { hands_over: purpose == Purpose::Handover, bytes };
    sender.send(Priority::Memory, keep.encode().into(), Bytes::new());
}

async fn heard(arrivals: &mut UnboundedReceiver<ChannelEvent>, purpose: Purpose) -> Result<(), PeerFault> {
    let wanted = VmMessage::Kept { hands_over: purpose == Purpose::Handover };
    while let Some(arrival) = arrivals.next().await {
        let ChannelEvent::Message { head, .. } = arrival else { continue };
        match VmMessage::decode(&head) {
            Ok(VmMessage::Failed { detail }) => return Err(PeerFault(detail)),
            Ok(message) if message == wanted => return Ok(()),
            Ok(_) => {}
            Err(error) => {
                return Err(PeerFault(format!("the other host sent an invalid message: {error}")));
            }
        }
    }
    Err(PeerFault::silent())
}

/// Answers each question of the source. Ends when it is aborted; a hook that runs is then killed.
async fn answer((sender, mut arrivals): ColdChannel, keeper: Arc<dyn ColdKeeper>) {
    let mut work = JoinSet::new();
    let mut description = Description::default();
    loop {
        tokio::select! {
            arrival = arrivals.next() => {
                let Some(arrival) = arrival else { return };
                match description.take(&arrival) {
                    Ok(None) => {}
                    // The source is answered when this has ended.
                    Ok(Some(_)) if !work.is_empty() => {}
                    Ok(Some((description, purpose))) => {
                        let keeper = Arc::clone(&keeper);
                        work.spawn(async move { (purpose, keeper.keep(description, purpose).await) });
                    }
                    Err(detail) => say(&*sender, &VmMessage::failed(&detail)),
                }
            }
            Some(done) = work.join_next() => say(&*sender, &match done {
                Ok((purpose, Ok(()))) => VmMessage::Kept { hands_over: purpose == Purpose::Handover },
                Ok((_, Err(reason))) => {
                    tracing::warn!(%reason, "cannot keep an arriving VM");
                    VmMessage::failed(&reason.to_string())
                }
                Err(error) => VmMessage::failed(&error.to_string()),
            }),
        }
    }
}

fn say(sender: &dyn Send, message: &VmMessage) {
    sender.send(Priority::Control, message.encode().into(), Bytes::new());
}

/// A description that arrives in pieces.
#[derive(Default)]
struct Description(Vec<u8>);

impl Description {
    /// Takes an event of the channel; returns a question once it is complete. A question whose beginning was lost is dropped, and
    /// will be repeated. The error is the answer to an invalid one.
    pub(crate) fn take(&mut self, arrival: &ChannelEvent) -> Result<Option<(Vec<u8>, Purpose)>, String> {
        let (head, payload) = match arrival {
            ChannelEvent::Message { head, payload, .. } => (head, payload),
            // Nothing follows what a former process has sent of its question.
            ChannelEvent::PeerRestarted => {
                self.0.clear();
                return Ok(None);
            }
            ChannelEvent::Lost(_) | ChannelEvent::Restored => return Ok(None),
        };
        match VmMessage::decode(head) {
            Ok(VmMessage::Manifest) => {
                if self.0.len() + payload.len() > MANIFEST_BYTES_MAX {
                    self.0.clear();
                }
                self.0.extend_from_slice(payload);
                Ok(None)
            }
            Ok(VmMessage::Keep { bytes, .. }) if bytes as usize > MANIFEST_BYTES_MAX => {
                self.0.clear();
                Err("the other host sends more than a VM can need".to_owned())
            }
            Ok(VmMessage::Keep { hands_over, bytes }) => {
                let description = std::mem::take(&mut self.0);
                let purpose = if hands_over { Purpose::Handover } else { Purpose::Copying };
                Ok((description.len() == bytes as usize).then_some((description, purpose)))
            }
            Ok(_) => Ok(None),
            Err(error) => {
                self.0.clear();
                Err(format!("the other host sent an invalid message: {error}"))
            }
        }
    }
}

#[cfg(test)]
mod tests;
