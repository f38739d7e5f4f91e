//! TLS between a connection and its socket.
//!
//! rustls implements the protocol without I/O; this module moves its bytes. One receive and one send may run at a time. Both
//! belong to the connection's task, so the state is never borrowed while one of them waits.
//!
//! ```text
//!   receive ◄─ plaintext ◄─ rustls ◄─ ciphertext (at most one buffer of it) ◄─ engine.receive
//!   send    ─► in steps  ─► rustls ─► ciphertext (of one step)              ─► engine.send
//! ```
//!
//! The messages of rustls itself (a new key, an alert) are sent before the next data.

use std::cell::RefCell;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use block::engine::Engine;
use block::{Buffer, IoError};
use rustix::io::Errno;
use rustls::ServerConnection;

/// Bytes of ciphertext received at a time: four of the largest records.
const RECEIVE_LENGTH: usize = 64 << 10;
/// Bytes of plaintext encrypted at a time: 0.1 ms, for which the lane's other clients wait.
const SEND_STEP: usize = 256 << 10;
/// Bytes of ciphertext sent at a time: a step, and 22 bytes for each of its sixteen records.
const SEND_LENGTH: usize = SEND_STEP + (4 << 10);

#[derive(Debug, thiserror::Error)]
pub(in crate::nbd) enum TlsFailure {
    #[error("the connection broke: {0}")]
    Broken(#[from] IoError),
    #[error("the client left during the TLS handshake")]
    Vanished,
    /// The client's messages or certificate are not accepted.
    #[error("the TLS handshake failed: {0}")]
    Refused(#[from] rustls::Error),
    #[error("TLS has begun already")]
    Begun,
}

pub(in crate::nbd) struct Session {
    engine: Rc<dyn Engine>,
    socket: Arc<OwnedFd>,
    state: RefCell<TlsState>,
}

struct TlsState {
    connection: ServerConnection,
    /// The last received bytes; `None` before the first receive, and during one.
    ciphertext: Option<Buffer>,
    /// Start of the unused part of it.
    start: usize,
    end: usize,
}

impl Session {
    pub(super) fn new(
        engine: Rc<dyn Engine>,
        socket: Arc<OwnedFd>,
        mut connection: ServerConnection,
    ) -> Self {
        // The steps limit what is encrypted at a time; a shortened write would only complicate that.
        connection.set_buffer_limit(None);
        let state = TlsState { connection, ciphertext: None, start: 0, end: 0 };
        Self { engine, socket, state: RefCell::new(state) }
    }

    /// Carries out the handshake. A client that is refused is sent the reason.
    pub(super) async fn handshake(&self) -> Result<(), TlsFailure> {
        loop {
            self.flush().await?;
            if !self.state.borrow().connection.is_handshaking() {
                return Ok(());
            }
            if !self.receive_ciphertext().await? {
                return Err(TlsFailure::Vanished);
            }
            let accepted = self.state.borrow_mut().advance_handshake();
            if let Err(error) = accepted {
                // This sends the alert. The client may be gone, and the reason says more than that.
                let _ = self.flush().await;
                return Err(error.into());
            }
        }
    }

    /// Receives the available bytes. The count is 0 at the end of the stream, announced or not: requests contain their length, so
    /// an incomplete one is noticed.
    pub(super) async fn receive(&self, mut buffer: Buffer) -> Result<(Buffer, usize), IoError> {
        loop {
            // The receiver has the only handle to the memory.
            let target = buffer.as_mut_slice().unwrap_or_default();
            let decrypted = self.state.borrow_mut().decrypt_into(target);
            match decrypted {
                Ok(Some(count)) => return Ok((buffer, count)),
                Ok(None) => {}
                Err(error) => {
                    tracing::info!(%error, "an encrypted NBD connection failed");
                    return Err(IoError::os("decrypt", Errno::PROTO));
                }
            }
            if !self.receive_ciphertext().await? {
                return Ok((buffer, 0));
            }
        }
    }

    /// Encrypts and sends `pieces`, step by step.
    pub(super) async fn send(&self, pieces: &[Buffer]) -> Result<(), IoError> {
        let mut step = 0;
        for piece in pieces {
            let mut rest = piece.as_slice();
            while !rest.is_empty() {
                let (part, after) = rest.split_at(rest.len().min(SEND_STEP - step));
                rest = after;
                step += part.len();
                let encrypted = self.state.borrow_mut().connection.writer().write_all(part);
                encrypted.map_err(|error| IoError::from_std("encrypt", &error))?;
                if step == SEND_STEP {
                    self.flush().await?;
                    step = 0;
                }
            }
        }
        self.flush().await
    }

    pub(super) async fn end(&self) -> Result<(), IoError> {
        self.state.borrow_mut().connection.send_close_notify();
        self.flush().await
    }

    /// Sends the encrypted bytes, and the messages of rustls itself.
    async fn flush(&self) -> Result<(), IoError> {
        loop {
            if !self.state.borrow().connection.wants_write() {
                return Ok(());
            }
            let mut buffer = self.engine.buffers().take(SEND_LENGTH);
            let length =
                self.state.borrow_mut().write_ciphertext(buffer.as_mut_slice().unwrap_or_default())?;
            buffer.truncate(length);
            self.engine.send(&self.socket, vec![buffer]).await?;
        }
    }

    /// Receives ciphertext after all earlier bytes have been used. Returns `false` at the end of the stream.
    async fn receive_ciphertext(&self) -> Result<bool, IoError> {
        let kept = self.state.borrow_mut().ciphertext.take().filter(Buffer::is_unique);
        let buffer = kept.unwrap_or_else(|| self.engine.buffers().take(RECEIVE_LENGTH));
        let (buffer, count) = self.engine.receive(&self.socket, buffer).await?;
        let mut state = self.state.borrow_mut();
        (state.ciphertext, state.start, state.end) = (Some(buffer), 0, count);
        Ok(count > 0)
    }
}

impl TlsState {
    /// Uses ciphertext until the handshake is over, or more is needed. Later bytes are left.
    fn advance_handshake(&mut self) -> Result<(), rustls::Error> {
        while self.start < self.end && self.connection.is_handshaking() {
            if self.use_ciphertext()? == 0 {
                break;
            }
        }
        Ok(())
    }

    /// Decrypts as much as fits into `target`. Returns `None` if that is nothing because more ciphertext is needed, 0 at the
    /// end of the stream.
    fn decrypt_into(&mut self, target: &mut [u8]) -> Result<Option<usize>, rustls::Error> {
        let mut filled = 0;
        loop {
            match self.connection.reader().read(&mut target[filled..]) {
                Ok(0) => return Ok(Some(filled)),
                Ok(count) => {
                    filled += count;
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                // This is only an unannounced end of the stream, and rustls is never given that.
                Err(_) => return Ok(Some(filled)),
            }
            if self.start == self.end || self.use_ciphertext()? == 0 {
                return Ok(if filled > 0 { Some(filled) } else { None });
            }
        }
    }

    /// Gives rustls some of the ciphertext, and returns how much.
    fn use_ciphertext(&mut self) -> Result<usize, rustls::Error> {
        let Some(ciphertext) = &self.ciphertext else { return Ok(0) };
        let mut rest = &ciphertext.as_slice()[self.start..self.end];
        // It refuses only while plaintext is unread, which the callers exclude.
        let used = self.connection.read_tls(&mut rest).unwrap_or(0);
        self.start += used;
        self.connection.process_new_packets()?;
        Ok(used)
    }

    /// Fills `target` with ciphertext to send, and returns how much there was.
    fn write_ciphertext(&mut self, mut target: &mut [u8]) -> Result<usize, IoError> {
        let room = target.len();
        while self.connection.wants_write() && !target.is_empty() {
            let written = self.connection.write_tls(&mut target);
            written.map_err(|error| IoError::from_std("encrypt", &error))?;
        }
        Ok(room - target.len())
    }
}
