//! The channel between the two hosts of a moving VM: messages, and the streams of its memory.
//!
//! ```text
//!   hypervisor ══socket══► read ─ window ─► Data ══ session ══► Data ─► write ══socket══► hypervisor
//!                                  ▲                                      │
//!                                  └──────────────── Taken ◄──────────────┘       the same in the other direction
//! ```
//! Each stream has a channel of the session, and a window. Messages use the main stream's channel.
//! The [`Window`] limits how much memory is on its way. So the messages of the handover and guests' blocks do not queue behind
//! memory, and a hypervisor that stops reading stops the sending one.

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

use api::MEMORY_STREAMS_MAX;
use bytes::Bytes;
use futures_channel::mpsc as arriving;
use futures_util::StreamExt;
use lane::peer::ChannelEvent;
use tokio::sync::{mpsc, watch};
use transport::Priority;

use super::fault::PeerFault;
use super::message::{Terms, VmMessage};
use super::stream::{PIECE_BYTES, Piece, Stream};
use super::window::Window;
use crate::vms::MANIFEST_BYTES_MAX;

/// The first of the streams for memory after a stream has broken. Each attempt uses another one, so that leftovers of an
/// earlier attempt are not read as its own.
pub(super) const FIRST_RECOVERY_STREAM: u8 = MEMORY_STREAMS_MAX + 1;

pub(crate) trait VmStreams: std::marker::Send + Sync {
    /// Opens the channel of a stream, 0 for the main one, and receives from it until the sending end is dropped. An earlier
    /// opening of the same stream receives nothing from then on.
    fn open(&self, stream: u8) -> (Arc<dyn Send>, arriving::UnboundedReceiver<ChannelEvent>);
}

pub(crate) trait Send: std::marker::Send + Sync {
    /// Queues a message without blocking.
    fn send(&self, priority: Priority, head: Bytes, payload: Bytes);
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PeerStatus {
    Nothing,
    /// The whole VM description is here; the other host asks whether the VM could run.
    Check,
    /// As far as can be checked, the VM could run there.
    Fits,
    /// The VM is started there, and waits for its memory.
    Waiting,
    /// It is loaded there, and stands still.
    Loaded,
    /// It is to be started here.
    Start,
    Owned,
    Complete,
    /// The rest of the memory is to come, or is expected, over this stream.
    Recover(u8),
    /// The move fails, for this reason.
    Failed(String),
    Lost(String),
}

impl PeerStatus {
    /// Returns whether no further status follows.
    fn is_end(&self) -> bool {
        matches!(self, Self::Failed(_) | Self::Lost(_))
    }

    /// Returns whether this status includes the earlier one, which a receiver may have missed.
    pub(crate) fn implies(&self, earlier: &Self) -> bool {
        self == earlier || matches!((self, earlier), (Self::Complete, Self::Loaded))
    }
}

/// One end of the channel between the hosts of a moving VM.
pub(crate) struct VmChannel {
    streams: Arc<dyn VmStreams>,
    sender: Arc<dyn Send>,
    peer: watch::Receiver<PeerStatus>,
    window: Arc<Window>,
    offered: Arc<Mutex<Offered>>,
    main: Stream,
    listens: tokio::task::JoinHandle<()>,
}

/// What the other host has offered, or agreed on.
#[derive(Debug, Default)]
struct Offered {
    manifest: Vec<u8>,
    /// The requested or agreed way of the VM's memory.
    terms: Terms,
    last: Last,
}

/// The state of a stopped VM besides its memory and its volumes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Last {
    /// Its files, if they have changed since they were first sent.
    pub(crate) files: Vec<u8>,
    pub(crate) stays_paused: bool,
}

impl VmChannel {
    /// Opens the main channel of `streams`, and begins to receive.
    pub(crate) fn new(streams: Arc<dyn VmStreams>) -> Self {
        Self::open(streams, Carries::MainStream)
    }

    /// Does the same as [`VmChannel::new`], for messages and side streams only: data of an earlier main stream is dropped.
    pub(crate) fn without_main(streams: Arc<dyn VmStreams>) -> Self {
        let channel = Self::open(streams, Carries::Messages);
        channel.main.refuse();
        channel
    }

    fn open(streams: Arc<dyn VmStreams>, carries: Carries) -> Self {
        let (sender, arrivals) = streams.open(0);
        let (peer_sender, peer) = watch::channel(PeerStatus::Nothing);
        let (pieces_sender, pieces) = mpsc::unbounded_channel();
        let window = Arc::new(Window::new());
        let offered = Arc::<Mutex<Offered>>::default();
        let listener = Listener {
            peer: peer_sender,
            pieces: pieces_sender,
            window: Arc::clone(&window),
            offered: Arc::clone(&offered),
            carries,
        };
        let main = Stream::new(Arc::clone(&sender), Arc::clone(&window), pieces);
        let listens = tokio::spawn(listener.listen(arrivals));
        Self { streams, sender, peer, window, offered, main, listens }
    }

    pub(crate) fn main(&self) -> &Stream {
        &self.main
    }

    /// Opens this many streams besides the main one. Call this before the other host learns the number.
    pub(crate) fn side_streams(&self, count: u8) -> Vec<SideStream> {
        self.window.share(usize::from(count).max(1));
        let sides: Vec<_> = (1..=count).map(|number| self.side_stream(number)).collect();
        sides.iter().for_each(|side| side.window.share(usize::from(count)));
        sides
    }

    /// Opens the stream of an attempt to recover from a broken stream; its number is at least [`FIRST_RECOVERY_STREAM`].
    pub(crate) fn recovery_stream(&self, number: u8) -> SideStream {
        self.side_stream(number)
    }

    /// Opens another stream, with a number from 1 on.
    fn side_stream(&self, number: u8) -> SideStream {
        let (sender, arrivals) = self.streams.open(number);
        let (pieces_sender, pieces) = mpsc::unbounded_channel();
        // Messages use the main stream's channel, so nothing receives them here.
        let (peer, _) = watch::channel(PeerStatus::Nothing);
        let (window, offered) = (Arc::new(Window::new()), Arc::default());
        let carries = Carries::Messages;
        let listener =
            Listener { peer, pieces: pieces_sender, window: Arc::clone(&window), offered, carries };
        let stream = Stream::new(sender, Arc::clone(&window), pieces);
        SideStream { stream, window, listens: tokio::spawn(listener.listen(arrivals)) }
    }

    pub(crate) fn send(&self, message: &VmMessage) {
        self.sender.send(Priority::Control, message.encode().into(), Bytes::new());
    }

    /// Sends the VM description, and asks whether the other host could run the VM.
    pub(crate) fn offer(&self, manifest: Vec<u8>, terms: Terms) {
        let mut manifest = Bytes::from(manifest);
        while !manifest.is_empty() {
            let piece = manifest.split_to(manifest.len().min(PIECE_BYTES));
            self.sender.send(Priority::Memory, VmMessage::Manifest.encode().into(), piece);
        }
        self.sender.send(Priority::Memory, VmMessage::Terms(terms).encode().into(), Bytes::new());
        self.sender.send(Priority::Memory, VmMessage::Check.encode().into(), Bytes::new());
    }

    /// Sends the last state of a stopped VM. Memory that is sent later arrives later.
    pub(crate) fn send_last(&self, last: Last) {
        let mut files = Bytes::from(last.files);
        while !files.is_empty() {
            let piece = files.split_to(files.len().min(PIECE_BYTES));
            self.sender.send(Priority::Memory, VmMessage::Files.encode().into(), piece);
        }
        if last.stays_paused {
            self.sender.send(Priority::Memory, VmMessage::StaysPaused.encode().into(), Bytes::new());
        }
    }

    /// Returns the last state of a stopped VM; it is complete once the VM is loaded.
    pub(crate) fn last(&self) -> Last {
        std::mem::take(&mut lock(&self.offered).last)
    }

    /// Answers that the VM could run here, and on which terms its memory comes.
    pub(crate) fn accept(&self, terms: Terms) {
        self.send(&VmMessage::Terms(terms));
        self.send(&VmMessage::Fits);
    }

    /// Returns the terms that the other host has named last.
    pub(crate) fn terms(&self) -> Terms {
        lock(&self.offered).terms
    }

    /// Returns the VM description that the other host has sent.
    pub(crate) fn manifest(&self) -> Vec<u8> {
        std::mem::take(&mut lock(&self.offered).manifest)
    }

    /// Waits for the status `wanted`, or one that includes it. The error says why that will not come.
    pub(crate) async fn wait_for(&self, wanted: &PeerStatus) -> Result<(), PeerFault> {
        let mut peer = self.peer.clone();
        let found = peer.wait_for(|peer| peer.implies(wanted) || peer.is_end()).await;
        match found.as_deref() {
            Ok(PeerStatus::Failed(detail) | PeerStatus::Lost(detail)) => Err(PeerFault(detail.clone())),
            Ok(_) => Ok(()),
            Err(_) => Err(PeerFault::silent()),
        }
    }

    /// Waits for another status than `known`, and returns it.
    pub(crate) async fn peer_changed(&self, known: &PeerStatus) -> PeerStatus {
        let mut peer = self.peer.clone();
        match peer.wait_for(|peer| peer != known).await.as_deref() {
            Ok(news) => news.clone(),
            Err(_) => PeerStatus::Failed(PeerFault::silent().0),
        }
    }

    pub(crate) fn peer_status(&self) -> PeerStatus {
        self.peer.borrow().clone()
    }

    /// Resolves with the reason when the other host says that the memory is lost.
    pub(crate) async fn lost(&self) -> PeerFault {
        let mut peer = self.peer.clone();
        if let Ok(PeerStatus::Lost(detail)) =
            peer.wait_for(|peer| matches!(peer, PeerStatus::Lost(_))).await.as_deref()
        {
            return PeerFault(detail.clone());
        }
        // The memory is not lost, so this never resolves.
        std::future::pending().await
    }

    /// Resolves with the reason when the other host says that the move fails.
    pub(crate) async fn failed(&self) -> PeerFault {
        self.failure().await.unwrap_or_else(PeerFault::silent)
    }

    /// Does the same without this end of the channel; `None`: this end is gone.
    pub(crate) fn failure(&self) -> impl Future<Output = Option<PeerFault>> + use<> {
        let mut peer = self.peer.clone();
        async move {
            match peer.wait_for(PeerStatus::is_end).await.as_deref() {
                Ok(PeerStatus::Failed(detail) | PeerStatus::Lost(detail)) => Some(PeerFault(detail.clone())),
                _ => None,
            }
        }
    }
}

impl Drop for VmChannel {
    fn drop(&mut self) {
        self.listens.abort();
    }
}

pub(crate) struct SideStream {
    pub(crate) stream: Stream,
    window: Arc<Window>,
    listens: tokio::task::JoinHandle<()>,
}

impl Drop for SideStream {
    fn drop(&mut self) {
        self.listens.abort();
    }
}

/// Receives messages, and passes them to their receivers.
struct Listener {
    peer: watch::Sender<PeerStatus>,
    pieces: mpsc::UnboundedSender<Piece>,
    window: Arc<Window>,
    offered: Arc<Mutex<Offered>>,
    carries: Carries,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Carries {
    /// The whole move of a VM: the main stream of its memory, and messages.
    MainStream,
    /// Messages only: the recovery of a VM whose main stream has broken.
    Messages,
}

impl Listener {
    async fn listen(self, mut arrivals: arriving::UnboundedReceiver<ChannelEvent>) {
        while let Some(arrival) = arrivals.next().await {
            match arrival {
                ChannelEvent::Message { head, payload, credit } => match VmMessage::decode(&head) {
                    // The source asks for another stream: `Host::post_copy_request` answers it.
                    Ok(VmMessage::Recover { .. }) if self.carries == Carries::MainStream => {
                        return self.tell(PeerStatus::Failed("it continues over another stream".to_owned()));
                    }
                    Ok(message) => self.take(message, payload, credit),
                    Err(error) => self
                        .tell(PeerStatus::Failed(format!("the other host sent an invalid message: {error}"))),
                },
                // The session sends lost messages again. The waiting receiver decides how long that may take.
                ChannelEvent::Lost(reason) => tracing::warn!(reason, "the channel of a moving VM is broken"),
                ChannelEvent::Restored => {}
                ChannelEvent::PeerRestarted => {
                    self.tell(PeerStatus::Failed(
                        "the daemon of the other host was started again".to_owned(),
                    ));
                }
            }
        }
    }

    fn take(&self, message: VmMessage, payload: Bytes, credit: Box<dyn Any + std::marker::Send>) {
        match message {
            VmMessage::Manifest => self.take_piece(&payload, |offered| &mut offered.manifest),
            VmMessage::Files => self.take_piece(&payload, |offered| &mut offered.last.files),
            VmMessage::StaysPaused => lock(&self.offered).last.stays_paused = true,
            VmMessage::Terms(terms) => lock(&self.offered).terms = terms,
            VmMessage::Check => self.tell(PeerStatus::Check),
            VmMessage::Fits => self.tell(PeerStatus::Fits),
            VmMessage::Start => self.tell(PeerStatus::Start),
            VmMessage::Waiting => self.tell(PeerStatus::Waiting),
            VmMessage::Loaded => self.tell(PeerStatus::Loaded),
            VmMessage::Owned => self.tell(PeerStatus::Owned),
            VmMessage::Complete => self.tell(PeerStatus::Complete),
            VmMessage::Recover { stream } | VmMessage::Recovering { stream } => {
                self.tell(PeerStatus::Recover(stream));
            }
            VmMessage::Failed { detail } => self.tell(PeerStatus::Failed(detail)),
            VmMessage::Lost { detail } => self.tell(PeerStatus::Lost(detail)),
            // The task that carries the memory may have ended.
            VmMessage::Data => drop(self.pieces.send(Piece::Data(payload, credit))),
            VmMessage::End => drop(self.pieces.send(Piece::End)),
            VmMessage::Taken { bytes } => self.window.taken(bytes as usize),
            // They are about a VM without memory.
            VmMessage::Keep { .. } | VmMessage::Kept { .. } => {
                self.tell(PeerStatus::Failed("the other host moves it as a stopped VM".to_owned()));
            }
        }
    }

    fn take_piece(&self, piece: &[u8], of: impl Fn(&mut Offered) -> &mut Vec<u8>) {
        let mut offered = lock(&self.offered);
        let whole = of(&mut offered);
        if whole.len() + piece.len() > MANIFEST_BYTES_MAX {
            drop(offered);
            self.tell(PeerStatus::Failed("the other host sends more than a VM can need".to_owned()));
        } else {
            whole.extend_from_slice(piece);
        }
    }

    fn tell(&self, news: PeerStatus) {
        // A failure is final, except that it may become a loss.
        self.peer.send_if_modified(|known| {
            let changes = !known.is_end() || matches!(news, PeerStatus::Lost(_));
            if changes {
                *known = news;
            }
            changes
        });
    }
}

/// The received data stays consistent after a panic of another holder.
fn lock(offered: &Mutex<Offered>) -> std::sync::MutexGuard<'_, Offered> {
    offered.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
pub(super) mod tests;
