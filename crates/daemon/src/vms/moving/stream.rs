//! One stream of a VM's memory: from a hypervisor's socket over a channel of the session to the other hypervisor's.
//!
//! ```text
//!   main one   ══► Data … End ══►  connected first
//!   others     ══► Data … End ══►  connected in any order, each when its first bytes are there
//! ```
//! A hypervisor with several streams reads the beginning of each when it connects, and does nothing else until that has come.
//! It takes the first that connects for the main one. [`Turn`] ensures the right order.

use std::any::Any;
use std::io;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{Mutex, mpsc, watch};
use transport::Priority;

use super::channel::Send;
use super::message::VmMessage;
use super::window::Window;

/// The largest number of bytes that is sent at once.
pub(super) const PIECE_BYTES: usize = 256 << 10;

/// A piece of received memory, and the right to send as much again.
pub(super) enum Piece {
    /// Output of the remote hypervisor.
    Data(Bytes, Box<dyn Any + std::marker::Send>),
    /// The remote hypervisor has ended its output.
    End,
}

pub(crate) struct Stream {
    sender: Arc<dyn Send>,
    /// The limit of what may be on its way.
    window: Arc<Window>,
    /// The received pieces, taken once by the task that carries them.
    pieces: Mutex<mpsc::UnboundedReceiver<Piece>>,
}

/// When a stream is connected to the receiving hypervisor.
#[derive(Clone)]
pub(crate) enum Turn {
    /// When its first bytes are there; then the others may connect.
    Main(watch::Sender<bool>),
    /// When its first bytes are there, but after the main one.
    AfterMain(watch::Receiver<bool>),
}

impl Stream {
    /// Makes a stream that sends by `sender` and receives from `pieces`.
    pub(super) fn new(
        sender: Arc<dyn Send>,
        window: Arc<Window>,
        pieces: mpsc::UnboundedReceiver<Piece>,
    ) -> Self {
        Self { sender, window, pieces: Mutex::new(pieces) }
    }

    /// Drops everything that comes.
    pub(super) fn refuse(&self) {
        if let Ok(mut pieces) = self.pieces.try_lock() {
            pieces.close();
        }
    }

    /// Carries the hypervisor's output from `socket` to the other host, and the answers back, until both have ended. Dropping
    /// the future breaks the socket, which even a hanging hypervisor notices. Fails with the socket's errors.
    pub(crate) async fn carry(&self, socket: UnixStream) -> io::Result<()> {
        let (reader, writer) = socket.into_split();
        let mut pieces = self.pieces.lock().await;
        tokio::try_join!(self.outward(reader), self.inward(writer, &mut pieces, None)).map(drop)
    }

    /// Does the same as [`Stream::carry`], with a hypervisor that listens at `socket`, once it is this stream's turn to connect.
    pub(crate) async fn connect_and_carry(&self, socket: &Path, turn: Turn) -> io::Result<()> {
        let mut pieces = self.pieces.lock().await;
        let first = match pieces.recv().await {
            Some(Piece::End) | None => {
                self.sender.send(Priority::Memory, VmMessage::End.encode().into(), Bytes::new());
                return Ok(());
            }
            first => first,
        };
        let connected = match turn {
            Turn::Main(is_connected) => {
                let connected = UnixStream::connect(socket).await?;
                is_connected.send_replace(true);
                connected
            }
            Turn::AfterMain(mut is_connected) => {
                let gone = |_| io::Error::from(io::ErrorKind::BrokenPipe);
                is_connected.wait_for(|is_connected| *is_connected).await.map_err(gone)?;
                UnixStream::connect(socket).await?
            }
        };
        let (reader, writer) = connected.into_split();
        tokio::try_join!(self.outward(reader), self.inward(writer, &mut pieces, first)).map(drop)
    }

    async fn outward(&self, mut reader: OwnedReadHalf) -> io::Result<()> {
        loop {
            let mut piece = bytes::BytesMut::with_capacity(PIECE_BYTES);
            let bytes = reader.read_buf(&mut piece).await?;
            if bytes == 0 {
                self.sender.send(Priority::Memory, VmMessage::End.encode().into(), Bytes::new());
                return Ok(());
            }
            self.window.enter(bytes).await;
            self.sender.send(Priority::Memory, VmMessage::Data.encode().into(), piece.freeze());
        }
    }

    /// Writes received data, beginning with `first` if that has been taken already.
    async fn inward(
        &self,
        mut writer: OwnedWriteHalf,
        pieces: &mut mpsc::UnboundedReceiver<Piece>,
        first: Option<Piece>,
    ) -> io::Result<()> {
        let mut next = first;
        loop {
            let piece = match next.take() {
                Some(piece) => Some(piece),
                None => pieces.recv().await,
            };
            let Some(Piece::Data(data, credit)) = piece else { break };
            writer.write_all(&data).await?;
            // A payload's length has a limit far below.
            let taken = VmMessage::Taken { bytes: u32::try_from(data.len()).unwrap_or(u32::MAX) };
            self.sender.send(Priority::Control, taken.encode().into(), Bytes::new());
            drop(credit);
        }
        writer.shutdown().await
    }
}
