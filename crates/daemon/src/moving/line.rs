//! The way between the two hosts of a machine that moves: words, and the streams of its memory.
//!
//! ```text
//!   hypervisor ══socket══► read ─ window ─► Data ══ session ══► Data ─► write ══socket══► hypervisor
//!                                  ▲                                      │
//!                                  └──────────────── Taken ◄──────────────┘       the same in the other direction
//! ```
//! Each stream has a channel of the session, and a window; words go with the main one's.
//!
//! How much of the memory is on its way is bounded by the [`Window`], so that the words of the handover and guests' blocks do
//! not stand behind it, and a hypervisor that takes nothing stops the one that sends.

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

use api::MEMORY_STREAMS_MAX;
use bytes::Bytes;
use futures_channel::mpsc as arriving;
use futures_util::StreamExt;
use lane::peer::ChannelEvent;
use tokio::sync::{mpsc, watch};
use transport::Priority;

use super::stream::{PIECE_BYTES, Piece, Stream};
use super::window::Window;
use super::words::{Terms, Word};
use crate::vms::PARCEL_BYTES_MAX;

/// The first of the streams over which memory goes after a stream has broken, each attempt over another one: what is left of
/// an earlier one must not be taken for its own.
pub(super) const FIRST_RECOVERY_STREAM: u8 = MEMORY_STREAMS_MAX + 1;

/// The channels of a session that are about one machine.
pub(crate) trait Way: std::marker::Send + Sync {
    /// Opens the channel of one of its streams, 0 for the main one. What comes over it from now on is heard, until the
    /// sending end is dropped; an earlier opening of the same hears nothing any more.
    fn open(&self, stream: u8) -> (Arc<dyn Send>, arriving::UnboundedReceiver<ChannelEvent>);
}

/// The sending end of a channel to another host.
pub(crate) trait Send: std::marker::Send + Sync {
    /// Queues a message; never blocks.
    fn send(&self, priority: Priority, head: Bytes, payload: Bytes);
}

/// What is heard of the other host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    /// It has said nothing yet.
    Nothing,
    /// All of the parcel is here: could the machine be run?
    Check,
    /// It could be run there, as far as can be seen.
    Fits,
    /// The machine is started there, and waits for its memory.
    Waiting,
    /// It is loaded there, and stands still.
    Loaded,
    /// It is to be started here.
    Start,
    /// The volumes are the target's.
    Owned,
    /// All of the memory is at the target.
    Complete,
    /// The rest of the memory is to come, or is expected, over this stream.
    Recover(u8),
    /// It will not come to that, for this reason.
    Failed(String),
    /// The memory is lost, for this reason.
    Lost(String),
}

impl Heard {
    /// Whether nothing comes after it.
    fn is_end(&self) -> bool {
        matches!(self, Self::Failed(_) | Self::Lost(_))
    }
}

/// One end of the way between the hosts of a machine that moves.
pub(crate) struct Line {
    way: Arc<dyn Way>,
    sender: Arc<dyn Send>,
    heard: watch::Receiver<Heard>,
    window: Arc<Window>,
    received: Arc<Mutex<Received>>,
    /// The main stream.
    main: Stream,
    listens: tokio::task::JoinHandle<()>,
}

/// What has come that is not a word.
#[derive(Debug, Default)]
struct Received {
    /// What is needed to run the machine.
    parcel: Vec<u8>,
    /// Which way its memory is wished, or agreed, to go.
    terms: Terms,
}

impl Line {
    /// Opens the main channel of `way`, and begins to listen.
    pub(crate) fn new(way: Arc<dyn Way>) -> Self {
        Self::open(way, Carries::MainStream)
    }

    /// As [`Line::new`], for words and side streams only: what comes of an earlier main stream is left out.
    pub(crate) fn without_main(way: Arc<dyn Way>) -> Self {
        let line = Self::open(way, Carries::Words);
        line.main.refuse();
        line
    }

    fn open(way: Arc<dyn Way>, carries: Carries) -> Self {
        let (sender, arrivals) = way.open(0);
        let (heard_sender, heard) = watch::channel(Heard::Nothing);
        let (pieces_sender, pieces) = mpsc::unbounded_channel();
        let window = Arc::new(Window::new());
        let received = Arc::<Mutex<Received>>::default();
        let ear = Ear {
            heard: heard_sender,
            pieces: pieces_sender,
            window: Arc::clone(&window),
            received: Arc::clone(&received),
            carries,
        };
        let main = Stream::new(Arc::clone(&sender), Arc::clone(&window), pieces);
        let listens = tokio::spawn(ear.listen(arrivals));
        Self { way, sender, heard, window, received, main, listens }
    }

    /// The main stream.
    pub(crate) fn main(&self) -> &Stream {
        &self.main
    }

    /// Opens so many streams beside the main one. Open them before the other host is told to use them.
    pub(crate) fn side_streams(&self, count: u8) -> Vec<SideStream> {
        self.window.share(usize::from(count).max(1));
        let sides: Vec<_> = (1..=count).map(|number| self.side_stream(number)).collect();
        sides.iter().for_each(|side| side.window.share(usize::from(count)));
        sides
    }

    /// Opens the stream of an attempt to go on after a stream has broken, by its number: [`FIRST_RECOVERY_STREAM`] or more.
    pub(crate) fn recovery_stream(&self, number: u8) -> SideStream {
        self.side_stream(number)
    }

    /// Opens another stream, by its number from 1 on.
    fn side_stream(&self, number: u8) -> SideStream {
        let (sender, arrivals) = self.way.open(number);
        let (pieces_sender, pieces) = mpsc::unbounded_channel();
        // Words go with the main stream's channel: nobody hears them here.
        let (heard, _) = watch::channel(Heard::Nothing);
        let (window, received) = (Arc::new(Window::new()), Arc::default());
        let carries = Carries::Words;
        let ear = Ear { heard, pieces: pieces_sender, window: Arc::clone(&window), received, carries };
        let stream = Stream::new(sender, Arc::clone(&window), pieces);
        SideStream { stream, window, listens: tokio::spawn(ear.listen(arrivals)) }
    }

    /// Tells the other host.
    pub(crate) fn say(&self, word: &Word) {
        self.sender.send(Priority::Control, word.encode().into(), Bytes::new());
    }

    /// Sends what the other host must have to run the machine, and asks whether it could.
    pub(crate) fn offer(&self, parcel: Vec<u8>, terms: Terms) {
        let mut parcel = Bytes::from(parcel);
        while !parcel.is_empty() {
            let piece = parcel.split_to(parcel.len().min(PIECE_BYTES));
            self.sender.send(Priority::Memory, Word::Parcel.encode().into(), piece);
        }
        // An older daemon knows no terms, and takes what has always been.
        if terms != Terms::default() {
            self.sender.send(Priority::Memory, Word::Terms(terms).encode().into(), Bytes::new());
        }
        self.sender.send(Priority::Memory, Word::Check.encode().into(), Bytes::new());
    }

    /// Says that the machine could be run here, and on which terms its memory comes.
    pub(crate) fn accept(&self, terms: Terms) {
        if terms != Terms::default() {
            self.say(&Word::Terms(terms));
        }
        self.say(&Word::Fits);
    }

    /// The terms that the other host has named last.
    pub(crate) fn terms(&self) -> Terms {
        lock(&self.received).terms
    }

    /// What the other host has sent to run the machine.
    pub(crate) fn parcel(&self) -> Vec<u8> {
        std::mem::take(&mut lock(&self.received).parcel)
    }

    /// Waits until the other host has said `wanted`.
    ///
    /// # Errors
    /// The reason why that will not come.
    pub(crate) async fn hear(&self, wanted: &Heard) -> Result<(), String> {
        let mut heard = self.heard.clone();
        let found = heard.wait_for(|heard| heard == wanted || heard.is_end()).await;
        match found.as_deref() {
            Ok(Heard::Failed(detail) | Heard::Lost(detail)) => Err(detail.clone()),
            Ok(_) => Ok(()),
            Err(_) => Err("the other host is not heard any more".to_owned()),
        }
    }

    /// Waits until something else is heard than `known`, and returns it.
    pub(crate) async fn next(&self, known: &Heard) -> Heard {
        let mut heard = self.heard.clone();
        match heard.wait_for(|heard| heard != known).await.as_deref() {
            Ok(news) => news.clone(),
            Err(_) => Heard::Failed("the other host is not heard any more".to_owned()),
        }
    }

    /// What was heard last.
    pub(crate) fn heard(&self) -> Heard {
        self.heard.borrow().clone()
    }

    /// Resolves with the reason when the other host says that the memory is lost.
    pub(crate) async fn lost(&self) -> String {
        let mut heard = self.heard.clone();
        if let Ok(Heard::Lost(detail)) =
            heard.wait_for(|heard| matches!(heard, Heard::Lost(_))).await.as_deref()
        {
            return detail.clone();
        }
        // Somebody else hears it from now on.
        std::future::pending().await
    }

    /// Resolves with the reason when the other host says that it will not come to that.
    pub(crate) async fn failed(&self) -> String {
        let mut heard = self.heard.clone();
        match heard.wait_for(Heard::is_end).await.as_deref() {
            Ok(Heard::Failed(detail) | Heard::Lost(detail)) => detail.clone(),
            _ => "the other host is not heard any more".to_owned(),
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.listens.abort();
    }
}

/// A stream beside the main one.
pub(crate) struct SideStream {
    /// The stream.
    pub(crate) stream: Stream,
    window: Arc<Window>,
    listens: tokio::task::JoinHandle<()>,
}

impl Drop for SideStream {
    fn drop(&mut self) {
        self.listens.abort();
    }
}

/// Takes what comes, and gives it to whoever waits for it.
struct Ear {
    heard: watch::Sender<Heard>,
    pieces: mpsc::UnboundedSender<Piece>,
    window: Arc<Window>,
    received: Arc<Mutex<Received>>,
    carries: Carries,
}

/// What a line is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Carries {
    /// A machine that moves, from the beginning.
    MainStream,
    /// What becomes of one whose main stream has broken.
    Words,
}

impl Ear {
    async fn listen(self, mut arrivals: arriving::UnboundedReceiver<ChannelEvent>) {
        while let Some(arrival) = arrivals.next().await {
            match arrival {
                ChannelEvent::Message { head, payload, credit } => match Word::decode(&head) {
                    // It asks again, and is heard by whoever sees to machines whose stream has broken.
                    Ok(Word::Recover { .. }) if self.carries == Carries::MainStream => {
                        return self.tell(Heard::Failed("it goes on over another stream".to_owned()));
                    }
                    Ok(word) => self.take(word, payload, credit),
                    Err(error) => self
                        .tell(Heard::Failed(format!("what the other host says is not understood: {error}"))),
                },
                // The session sends again what was lost. How long that may take, whoever waits decides.
                ChannelEvent::Lost(reason) => tracing::warn!(reason, "the way of a VM that moves is broken"),
                ChannelEvent::Restored => {}
                ChannelEvent::PeerRestarted => {
                    self.tell(Heard::Failed("the daemon of the other host was started again".to_owned()));
                }
            }
        }
    }

    fn take(&self, word: Word, payload: Bytes, credit: Box<dyn Any + std::marker::Send>) {
        match word {
            Word::Parcel => self.take_parcel(&payload),
            Word::Terms(terms) => lock(&self.received).terms = terms,
            Word::Check => self.tell(Heard::Check),
            Word::Fits => self.tell(Heard::Fits),
            Word::Start => self.tell(Heard::Start),
            Word::Waiting => self.tell(Heard::Waiting),
            Word::Loaded => self.tell(Heard::Loaded),
            Word::Owned => self.tell(Heard::Owned),
            Word::Complete => self.tell(Heard::Complete),
            Word::Recover { stream } | Word::Recovering { stream } => self.tell(Heard::Recover(stream)),
            Word::Failed { detail } => self.tell(Heard::Failed(detail)),
            Word::Lost { detail } => self.tell(Heard::Lost(detail)),
            // Whoever carried the memory may have given up.
            Word::Data => drop(self.pieces.send(Piece::Data(payload, credit))),
            Word::End => drop(self.pieces.send(Piece::End)),
            Word::Taken { bytes } => self.window.taken(bytes as usize),
        }
    }

    fn take_parcel(&self, piece: &[u8]) {
        let mut received = lock(&self.received);
        if received.parcel.len() + piece.len() > PARCEL_BYTES_MAX {
            drop(received);
            self.tell(Heard::Failed("the other host sends more than a VM can need".to_owned()));
        } else {
            received.parcel.extend_from_slice(piece);
        }
    }

    fn tell(&self, news: Heard) {
        // What has failed stays so, but what is lost is that as well.
        self.heard.send_if_modified(|known| {
            let changes = !known.is_end() || matches!(news, Heard::Lost(_));
            if changes {
                *known = news;
            }
            changes
        });
    }
}

/// A panic elsewhere leaves what has come as it was.
fn lock(received: &Mutex<Received>) -> std::sync::MutexGuard<'_, Received> {
    received.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
