//! The way between the two hosts of a machine that moves: words, and the stream of its memory.
//!
//! ```text
//!   hypervisor ══socket══► read ─ window ─► Data ══ session ══► Data ─► write ══socket══► hypervisor
//!                                  ▲                                      │
//!                                  └──────────────── Taken ◄──────────────┘       the same in the other direction
//! ```
//! How much of the memory is on its way is bounded by the [`Window`], so that the words of the handover and guests' blocks do
//! not stand behind it, and a hypervisor that takes nothing stops the one that sends.

use std::any::Any;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use futures_channel::mpsc as arriving;
use futures_util::StreamExt;
use lane::peer::Arrival;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, watch};
use transport::Priority;

use super::window::Window;
use super::words::Word;
use crate::vms::PARCEL_BYTES_MAX;

/// Bytes that are sent at once at most.
const PIECE_BYTES: usize = 256 << 10;

/// The sending end of a line to another host.
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
    /// It will not come to that, for this reason.
    Failed(String),
}

/// One end of the way between the hosts of a machine that moves.
pub(crate) struct Line {
    sender: Arc<dyn Send>,
    heard: watch::Receiver<Heard>,
    window: Arc<Window>,
    /// What has come of what is needed to run the machine.
    parcel: Arc<Mutex<Vec<u8>>>,
    /// What has come of the memory; taken once, by whoever carries it.
    memory: tokio::sync::Mutex<mpsc::UnboundedReceiver<Piece>>,
    listens: tokio::task::JoinHandle<()>,
}

/// A piece of the memory that has come, and the right to send as much again.
enum Piece {
    Data(Bytes, Box<dyn Any + std::marker::Send>),
    End,
}

impl Line {
    /// Begins to listen to `arrivals`.
    pub(crate) fn new(sender: Arc<dyn Send>, arrivals: arriving::UnboundedReceiver<Arrival>) -> Self {
        let (heard_sender, heard) = watch::channel(Heard::Nothing);
        let (pieces, memory) = mpsc::unbounded_channel();
        let window = Arc::new(Window::new());
        let parcel = Arc::<Mutex<Vec<u8>>>::default();
        let ear =
            Ear { heard: heard_sender, pieces, window: Arc::clone(&window), parcel: Arc::clone(&parcel) };
        let listens = tokio::spawn(ear.listen(arrivals));
        Self { sender, heard, window, parcel, memory: tokio::sync::Mutex::new(memory), listens }
    }

    /// Tells the other host.
    pub(crate) fn say(&self, word: &Word) {
        self.sender.send(Priority::Control, word.encode().into(), Bytes::new());
    }

    /// Sends what the other host must have to run the machine, and asks whether it could.
    pub(crate) fn offer(&self, parcel: Vec<u8>) {
        let mut parcel = Bytes::from(parcel);
        while !parcel.is_empty() {
            let piece = parcel.split_to(parcel.len().min(PIECE_BYTES));
            self.sender.send(Priority::Memory, Word::Parcel.encode().into(), piece);
        }
        self.sender.send(Priority::Memory, Word::Check.encode().into(), Bytes::new());
    }

    /// What the other host has sent to run the machine.
    pub(crate) fn parcel(&self) -> Vec<u8> {
        std::mem::take(&mut *self.parcel.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Waits until the other host has said `wanted`.
    ///
    /// # Errors
    /// The reason why that will not come.
    pub(crate) async fn hear(&self, wanted: &Heard) -> Result<(), String> {
        let mut heard = self.heard.clone();
        let found = heard.wait_for(|heard| heard == wanted || matches!(heard, Heard::Failed(_))).await;
        match found.as_deref() {
            Ok(Heard::Failed(detail)) => Err(detail.clone()),
            Ok(_) => Ok(()),
            Err(_) => Err("the other host is not heard any more".to_owned()),
        }
    }

    /// Resolves with the reason when the other host says that it will not come to that.
    pub(crate) async fn failed(&self) -> String {
        let mut heard = self.heard.clone();
        match heard.wait_for(|heard| matches!(heard, Heard::Failed(_))).await.as_deref() {
            Ok(Heard::Failed(detail)) => detail.clone(),
            _ => "the other host is not heard any more".to_owned(),
        }
    }

    /// Carries what the hypervisor writes into `socket` to the other host, and what comes from there back, until both
    /// have ended. That the future is dropped breaks the socket, which is what a hypervisor understands that hangs.
    ///
    /// # Errors
    /// The socket's.
    pub(crate) async fn carry(&self, socket: UnixStream) -> io::Result<()> {
        let (reader, writer) = socket.into_split();
        tokio::try_join!(self.outward(reader), self.inward(writer)).map(drop)
    }

    async fn outward(&self, mut reader: OwnedReadHalf) -> io::Result<()> {
        loop {
            let mut piece = bytes::BytesMut::with_capacity(PIECE_BYTES);
            let bytes = reader.read_buf(&mut piece).await?;
            if bytes == 0 {
                self.sender.send(Priority::Memory, Word::End.encode().into(), Bytes::new());
                return Ok(());
            }
            self.window.enter(bytes).await;
            self.sender.send(Priority::Memory, Word::Data.encode().into(), piece.freeze());
        }
    }

    async fn inward(&self, mut writer: OwnedWriteHalf) -> io::Result<()> {
        let mut memory = self.memory.lock().await;
        while let Some(Piece::Data(data, credit)) = memory.recv().await {
            writer.write_all(&data).await?;
            // A payload's length has a limit far below.
            self.say(&Word::Taken { bytes: u32::try_from(data.len()).unwrap_or(u32::MAX) });
            drop(credit);
        }
        writer.shutdown().await
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.listens.abort();
    }
}

/// Takes what comes, and gives it to whoever waits for it.
struct Ear {
    heard: watch::Sender<Heard>,
    pieces: mpsc::UnboundedSender<Piece>,
    window: Arc<Window>,
    parcel: Arc<Mutex<Vec<u8>>>,
}

impl Ear {
    async fn listen(self, mut arrivals: arriving::UnboundedReceiver<Arrival>) {
        while let Some(arrival) = arrivals.next().await {
            match arrival {
                Arrival::Sent { head, payload, credit } => match Word::decode(&head) {
                    Ok(word) => self.take(word, payload, credit),
                    Err(error) => self
                        .tell(Heard::Failed(format!("what the other host says is not understood: {error}"))),
                },
                // The session sends again what was lost. How long that may take, whoever waits decides.
                Arrival::Lost(reason) => tracing::warn!(reason, "the way of a machine that moves is broken"),
                Arrival::Back => {}
                Arrival::Restarted => {
                    self.tell(Heard::Failed("the daemon of the other host was started again".to_owned()));
                }
            }
        }
    }

    fn take(&self, word: Word, payload: Bytes, credit: Box<dyn Any + std::marker::Send>) {
        match word {
            Word::Parcel => self.take_parcel(&payload),
            Word::Check => self.tell(Heard::Check),
            Word::Fits => self.tell(Heard::Fits),
            Word::Start => self.tell(Heard::Start),
            Word::Waiting => self.tell(Heard::Waiting),
            Word::Loaded => self.tell(Heard::Loaded),
            Word::Failed { detail } => self.tell(Heard::Failed(detail)),
            // Whoever carried the memory may have given up.
            Word::Data => drop(self.pieces.send(Piece::Data(payload, credit))),
            Word::End => drop(self.pieces.send(Piece::End)),
            Word::Taken { bytes } => self.window.taken(bytes as usize),
        }
    }

    fn take_parcel(&self, piece: &[u8]) {
        let mut parcel = self.parcel.lock().unwrap_or_else(PoisonError::into_inner);
        if parcel.len() + piece.len() > PARCEL_BYTES_MAX {
            drop(parcel);
            self.tell(Heard::Failed("the other host sends more than a machine can need".to_owned()));
        } else {
            parcel.extend_from_slice(piece);
        }
    }

    fn tell(&self, news: Heard) {
        // What has failed stays so.
        self.heard.send_if_modified(|known| {
            let changes = !matches!(known, Heard::Failed(_));
            if changes {
                *known = news;
            }
            changes
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::window::BYTES_MIN;
    use super::*;

    /// Two lines that are each other's way.
    struct Wire(arriving::UnboundedSender<Arrival>);

    impl Send for Wire {
        fn send(&self, _: Priority, head: Bytes, payload: Bytes) {
            // The other end may be gone.
            let _ = self.0.unbounded_send(Arrival::Sent { head, payload, credit: Box::new(()) });
        }
    }

    fn lines() -> (Line, Line) {
        let (to_target, at_target) = arriving::unbounded();
        let (to_source, at_source) = arriving::unbounded();
        (Line::new(Arc::new(Wire(to_target)), at_source), Line::new(Arc::new(Wire(to_source)), at_target))
    }

    #[tokio::test]
    async fn more_than_the_window_passes_and_the_answer_comes_back() {
        let (source, target) = lines();
        let (mut hypervisor, here) = UnixStream::pair().unwrap();
        let (mut other, there) = UnixStream::pair().unwrap();
        let sent: Vec<u8> = (0..(64 << 20) + 77_usize).map(|at| (at / 1000) as u8).collect();
        let expected = sent.clone();
        let sends = async move {
            hypervisor.write_all(&sent).await.unwrap();
            hypervisor.shutdown().await.unwrap();
            let mut answer = Vec::new();
            hypervisor.read_to_end(&mut answer).await.unwrap();
            answer
        };
        let takes = async move {
            let mut came = Vec::new();
            other.read_to_end(&mut came).await.unwrap();
            other.write_all(b"loaded").await.unwrap();
            other.shutdown().await.unwrap();
            came
        };
        let (carried, brought, answer, came) =
            tokio::join!(source.carry(here), target.carry(there), sends, takes);
        carried.unwrap();
        brought.unwrap();
        assert_eq!(answer, b"loaded");
        assert!(came == expected, "the memory came as it was sent");
    }

    #[tokio::test]
    async fn no_more_than_the_window_is_sent_to_a_host_that_takes_nothing_or_lies() {
        let (to_target, mut at_target) = arriving::unbounded();
        let (to_source, at_source) = arriving::unbounded();
        let source = Line::new(Arc::new(Wire(to_target)), at_source);
        // It says that it has taken what it was never sent.
        Wire(to_source.clone()).send(
            Priority::Control,
            Word::Taken { bytes: u32::MAX }.encode().into(),
            Bytes::new(),
        );
        Wire(to_source).send(Priority::Control, Word::Waiting.encode().into(), Bytes::new());
        source.hear(&Heard::Waiting).await.unwrap();
        let (mut hypervisor, here) = UnixStream::pair().unwrap();
        let writes = tokio::spawn(async move {
            loop {
                if hypervisor.write_all(&[1; 65536]).await.is_err() {
                    return;
                }
            }
        });
        let mut sent = 0;
        {
            let carried = source.carry(here);
            let arrives = async {
                while sent < BYTES_MIN - PIECE_BYTES {
                    if let Some(Arrival::Sent { payload, .. }) = at_target.next().await {
                        sent += payload.len();
                    }
                }
            };
            tokio::select! { _ = carried => panic!("it waits"), () = arrives => {} }
        }
        while let Ok(Arrival::Sent { payload, .. }) = at_target.try_recv() {
            sent += payload.len();
        }
        assert!(sent <= BYTES_MIN);
        // The socket is broken by then.
        writes.await.unwrap();
    }

    #[tokio::test]
    async fn a_parcel_comes_whole_and_no_larger_than_it_may_be() {
        let (source, target) = lines();
        let parcel: Vec<u8> = (0..PIECE_BYTES * 3 + 5).map(|at| (at / 7) as u8).collect();
        source.offer(parcel.clone());
        target.hear(&Heard::Check).await.unwrap();
        assert!(target.parcel() == parcel, "it came as it was sent");
        source.offer(vec![0; PARCEL_BYTES_MAX + 1]);
        assert!(target.failed().await.contains("more than a machine can need"));
    }

    #[tokio::test]
    async fn a_reason_reaches_whoever_waits_and_stays() {
        let (source, target) = lines();
        target.say(&Word::failed("no such machine type"));
        target.say(&Word::Waiting);
        assert_eq!(source.hear(&Heard::Waiting).await, Err("no such machine type".to_owned()));
        assert_eq!(source.failed().await, "no such machine type");
    }
}
