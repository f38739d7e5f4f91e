//! A client of QEMU's machine protocol. It carries commands, answers and events, without knowing their meaning.
//!
//! ```text
//!   execute() ──► lines ──► writer task ──► socket ──► reader task ──┬─► by identity: the waiting caller
//!      ▲                                                              │
//!      └──────────────── answer, silence, or gone ◄───────────────────┴─► events(), to all listeners
//! ```
//!
//! Each command waits for its own answer, until its own deadline; a later answer is dropped. A separate task writes the lines, so
//! a dropped call leaves no partial line behind ([`exchange`]).

pub(super) mod exchange;
pub(super) mod reader;
mod wire;

use std::io;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio::sync::{broadcast, watch};
use tokio::time::timeout;

use self::exchange::{Band, Exchange, Garbled};
use self::reader::Lines;
use super::error::QmpError;
use super::version::Version;

pub use wire::Event;

/// How long a monitor may take to greet. QEMU does so at once when it has no other client; while it starts, or waits for a disk,
/// it may take seconds.
pub(super) const GREETING_DEADLINE: Duration = Duration::from_secs(10);

/// A connection to one monitor. Dropping it closes the connection, and QEMU serves the next client.
#[derive(Debug)]
pub struct Qmp {
    version: Version,
    process: Option<i32>,
    user: Option<u32>,
    exchange: Exchange,
}

impl Qmp {
    /// Connects to a monitor, receives its greeting and agrees on capabilities.
    ///
    /// # Errors
    /// If nothing listens there, it is no monitor, or it serves another client.
    pub async fn connect(socket: &Path) -> Result<Self, QmpError> {
        Self::connect_within(socket, GREETING_DEADLINE).await
    }

    async fn connect_within(socket: &Path, deadline: Duration) -> Result<Self, QmpError> {
        let connect = |source| QmpError::Connect { socket: socket.to_owned(), source };
        Self::over(UnixStream::connect(socket).await.map_err(connect)?, socket, deadline).await
    }

    pub(super) async fn over(
        stream: UnixStream,
        socket: &Path,
        deadline: Duration,
    ) -> Result<Self, QmpError> {
        let peer = stream.peer_cred().ok();
        let process = peer.and_then(|credentials| credentials.pid());
        let user = peer.map(|credentials| credentials.uid());
        let (input, output) = stream.into_split();
        let mut input = Lines::new(input);
        let greeting = timeout(deadline, input.next()).await;
        let silent = |_| QmpError::NoGreeting { socket: socket.to_owned(), waited: deadline };
        let greeting = match greeting.map_err(silent)? {
            Err(error) if error.kind() != io::ErrorKind::InvalidData => {
                return Err(QmpError::HungUp { socket: socket.to_owned() });
            }
            greeting => greeting.ok(),
        };
        let version = greeting.as_deref().and_then(wire::decode_greeting);
        let version = version.ok_or_else(|| QmpError::NotAMonitor { socket: socket.to_owned() })?;
        let exchange = Exchange::begin(input, output, 1, Garbled::Ends);
        let qmp = Self { version, process, user, exchange };
        qmp.execute("qmp_capabilities", json!({}), GREETING_DEADLINE).await?;
        Ok(qmp)
    }

    /// Returns the version in QEMU's greeting.
    pub fn version(&self) -> &Version {
        &self.version
    }

    /// Returns the process that listens at the socket; `None` if the kernel does not report it.
    ///
    /// It is the one that bound the socket: QEMU, unless another program did so for it.
    pub fn process(&self) -> Option<i32> {
        self.process
    }

    /// Returns the user of that process when it began to listen; `None` if the kernel does not report it.
    pub fn user(&self) -> Option<u32> {
        self.user
    }

    /// Runs a command, and returns its result.
    ///
    /// `arguments` is an object. Several commands may wait at the same time; QEMU carries them out in order. A command whose
    /// future is dropped may or may not be carried out.
    ///
    /// # Errors
    /// If QEMU refuses it, does not answer until `deadline` is over, or is gone.
    pub async fn execute(
        &self,
        command: &str,
        arguments: Value,
        deadline: Duration,
    ) -> Result<Value, QmpError> {
        self.exchange.execute(Band::InOrder, command, arguments, deadline).await
    }

    /// Returns the events from now on.
    pub fn events(&self) -> Events {
        self.exchange.events()
    }

    /// Waits until the connection has ended, and returns how.
    pub async fn closed(&self) -> String {
        self.exchange.closed().await
    }
}

/// The events of a QEMU, for one listener.
#[derive(Debug)]
pub struct Events {
    receiver: broadcast::Receiver<Event>,
    gone: watch::Receiver<Option<String>>,
}

/// What a listener receives.
#[derive(Clone, Debug, PartialEq)]
pub enum Heard {
    /// The next event of QEMU.
    Event(Event),
    /// The number of events that a slow listener has missed, perhaps including the one that it waits for.
    Missed(u64),
    /// The connection has ended; no events follow.
    Gone,
}

impl Events {
    /// Waits for the next event. Dropping the future loses none.
    pub async fn next(&mut self) -> Heard {
        let received = tokio::select! {
            biased;
            received = self.receiver.recv() => received,
            // Events before the end come before it.
            _ = self.gone.wait_for(Option::is_some) => match self.receiver.try_recv() {
                Ok(event) => Ok(event),
                Err(broadcast::error::TryRecvError::Lagged(missed)) => {
                    Err(broadcast::error::RecvError::Lagged(missed))
                }
                Err(_) => Err(broadcast::error::RecvError::Closed),
            },
        };
        match received {
            Ok(event) => Heard::Event(event),
            Err(broadcast::error::RecvError::Lagged(missed)) => Heard::Missed(missed),
            Err(broadcast::error::RecvError::Closed) => Heard::Gone,
        }
    }
}

#[cfg(test)]
mod tests;
