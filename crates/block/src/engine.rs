//! The contract of an I/O engine for files and sockets, and the choice of one.
//!
//! ```text
//!    FileStore, NBD connection         ask an `Engine` for I/O
//!          │
//!    ┌─────┴──────┐
//!    ring         threads              io_uring on the lane's own thread │ epoll + a pool where io_uring is refused
//!    └─────┬──────┘
//!      `Driver`                        what the executor parks on
//! ```

pub mod clock;
mod helpers;
mod pieces;
pub mod ring;
pub mod threads;
mod wakeup;

use std::cell::Cell;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;

use crate::buffer::{Buffer, BufferPool};
use crate::device::{ByteRange, Durability, IoFuture};
use crate::executor::{Driver, Unpark};

use self::ring::{RingDriver, RingOptions};
use self::threads::ThreadsDriver;

/// Opens an engine for the calling thread: the driver of its executor, and the engine of its tasks.
///
/// [`EngineChoice::Auto`] takes io_uring, or threads where the system refuses it (seccomp, sysctl, an old kernel, no memory to
/// lock), and logs which and why.
///
/// # Errors
/// [`EngineError`] if the chosen engine, or for `Auto` even the threads, cannot be opened.
pub fn open(choice: EngineChoice) -> Result<(EngineDriver, Rc<dyn Engine>), EngineError> {
    open_with(choice, || ring::open(RingOptions::default()))
}

fn open_with(
    choice: EngineChoice,
    open_ring: impl FnOnce() -> Result<(RingDriver, Rc<dyn Engine>), EngineError>,
) -> Result<(EngineDriver, Rc<dyn Engine>), EngineError> {
    let refused = match choice {
        EngineChoice::Threads => None,
        EngineChoice::Auto | EngineChoice::Ring => match open_ring() {
            Ok((driver, engine)) => {
                tracing::info!(engine = engine.name(), "opened an I/O engine");
                return Ok((EngineDriver::Ring(driver), engine));
            }
            Err(error) if choice == EngineChoice::Ring => return Err(error),
            Err(error) => Some(error),
        },
    };
    let (driver, engine) = threads::open()?;
    match refused {
        Some(reason) => {
            tracing::info!(engine = engine.name(), %reason, "opened an I/O engine without io_uring");
        }
        None => tracing::info!(engine = engine.name(), "opened an I/O engine"),
    }
    Ok((EngineDriver::Threads(driver), engine))
}

/// The choice of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineChoice {
    /// io_uring, or threads where it is refused.
    Auto,
    /// Only io_uring, which may fail.
    Ring,
    /// Threads and epoll, without io_uring.
    Threads,
}

/// Why an engine cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The system refuses it to this process.
    #[error("{operation}: {}", std::io::Error::from_raw_os_error(.errno.raw_os_error()))]
    Refused {
        /// The operation that was refused.
        operation: &'static str,
        /// The error of the system.
        errno: Errno,
    },
    /// The kernel's io_uring lacks a required operation.
    #[error("use this kernel's io_uring, which lacks {missing}")]
    TooOld {
        /// The operation that is missing.
        missing: &'static str,
    },
}

impl EngineError {
    fn refused(operation: &'static str) -> impl FnOnce(Errno) -> Self {
        move |errno| Self::Refused { operation, errno }
    }
}

/// The driver of the engine that was opened.
pub enum EngineDriver {
    /// The driver of io_uring.
    Ring(RingDriver),
    /// The driver of the threads.
    Threads(ThreadsDriver),
}

impl Driver for EngineDriver {
    fn now(&self) -> Duration {
        match self {
            Self::Ring(driver) => driver.now(),
            Self::Threads(driver) => driver.now(),
        }
    }

    fn park(&mut self, deadline: Option<Duration>) {
        match self {
            Self::Ring(driver) => driver.park(deadline),
            Self::Threads(driver) => driver.park(deadline),
        }
    }

    fn unparker(&self) -> Arc<dyn Unpark> {
        match self {
            Self::Ring(driver) => driver.unparker(),
            Self::Threads(driver) => driver.unparker(),
        }
    }
}

/// Submits I/O for the tasks of one thread.
///
/// An operation begins when its future is first polled. The future may be dropped at any moment: the engine keeps file and buffer
/// until the kernel has finished. Files are shared by `Arc` because an operation may outlive the store that started it. The lock
/// on an image (`flock`) belongs to the open file description, so it is held exactly that long (design §5.9).
pub trait Engine {
    /// Returns its name for logs and `volume show`: `io_uring` or `threads`.
    fn name(&self) -> &'static str;

    /// Returns the pool for request buffers: its memory is registered with the kernel where possible.
    fn buffers(&self) -> &BufferPool;

    /// Fills all of `buffer` from `offset` of the file; bytes beyond the end of the file are an error (EIO).
    fn read_at(&self, file: &Arc<OwnedFd>, offset: u64, buffer: Buffer) -> IoFuture<'static, Buffer>;

    /// Writes all of `data` at `offset` of the file.
    fn write_at(
        &self,
        file: &Arc<OwnedFd>,
        offset: u64,
        data: Buffer,
        durability: Durability,
    ) -> IoFuture<'static, ()>;

    /// Makes all writes durable with `fdatasync`.
    fn sync(&self, file: &Arc<OwnedFd>) -> IoFuture<'static, ()>;

    /// Calls `fallocate` with the given mode.
    fn allocate(&self, file: &Arc<OwnedFd>, mode: AllocateMode, range: ByteRange) -> IoFuture<'static, ()>;

    /// Accepts one connection of a listening socket.
    fn accept(&self, listener: &Arc<OwnedFd>) -> IoFuture<'static, OwnedFd>;

    /// Receives the bytes that are there, at most the length of `buffer`; the count is 0 at the end of the stream.
    fn receive(&self, socket: &Arc<OwnedFd>, buffer: Buffer) -> IoFuture<'static, (Buffer, usize)>;

    /// Receives likewise, until `interrupt` is raised: then it takes what has arrived, without waiting. No byte is lost: the rest
    /// stays in the socket. After raising the interrupt, poll the future.
    fn receive_unless(
        &self,
        interrupt: &Interrupt,
        socket: &Arc<OwnedFd>,
        buffer: Buffer,
    ) -> IoFuture<'static, Received>;

    /// Accepts one connection until `interrupt` is raised, likewise; `None` if no client has come.
    fn accept_unless(
        &self,
        interrupt: &Interrupt,
        listener: &Arc<OwnedFd>,
    ) -> IoFuture<'static, Option<OwnedFd>>;

    /// Sends all of `pieces` in order, at most [`SEND_PIECES_MAX`] of them.
    fn send(&self, socket: &Arc<OwnedFd>, pieces: Vec<Buffer>) -> IoFuture<'static, ()>;

    /// Releases `file`: the engine keeps no reference to it beyond operations in flight.
    ///
    /// An engine may keep a registered file, and so its lock, as long as any handle to it lives. A caller that shares a file with
    /// another thread calls this when the lane has finished with it.
    fn release(&self, file: &Arc<OwnedFd>) {
        let _ = file;
    }

    /// Runs work that may sleep on a helper thread; resolves when it has ended.
    ///
    /// `work` sends its results itself. Dropping the future does not stop the work.
    fn run_blocking(&self, work: Box<dyn FnOnce() + Send>) -> IoFuture<'static, ()>;
}

/// The result of [`Engine::receive_unless`].
pub enum Received {
    /// The number of bytes at the buffer's start; 0 at the end of the stream.
    Bytes(Buffer, usize),
    /// No bytes: it was interrupted first.
    Interrupted(Buffer),
}

/// Ends the waits of all operations that were given a clone of it.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Rc<Cell<bool>>);

impl Interrupt {
    /// Ends those waits for good. Poll each operation afterwards: this wakes no task.
    pub fn raise(&self) {
        self.0.set(true);
    }

    pub(crate) fn is_raised(&self) -> bool {
        self.0.get()
    }
}

/// The limit of pieces in one [`Engine::send`]; the kernel takes 1,024 (UIO_MAXIOV).
pub const SEND_PIECES_MAX: usize = 256;

/// Modes of [`Engine::allocate`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllocateMode {
    /// Makes a hole of the range, without changing the size.
    PunchHole,
    /// Zeroes the range and keeps it allocated, without changing the size.
    ZeroRange,
}

/// Runs `work` on a helper thread of `engine` and returns its result.
///
/// # Errors
/// [`crate::IoError::Closed`] if the engine is shut down before the work has run.
pub async fn run_blocking<T: Send + 'static>(
    engine: &Rc<dyn Engine>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, crate::IoError> {
    let (sender, receiver) = futures_channel::oneshot::channel();
    engine
        .run_blocking(Box::new(move || {
            let _ = sender.send(work());
        }))
        .await?;
    receiver.await.map_err(|_| crate::IoError::Closed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_taken_where_the_ring_is_refused_unless_only_the_ring_will_do() {
        let refuse = || Err(EngineError::Refused { operation: "set up an io_uring", errno: Errno::PERM });
        let (_, engine) = open_with(EngineChoice::Auto, refuse).unwrap();
        assert_eq!(engine.name(), "threads");
        let Err(error) = open_with(EngineChoice::Ring, refuse) else { panic!("it was refused") };
        assert!(error.to_string().starts_with("set up an io_uring: Operation not permitted"), "{error}");
        let (_, engine) = open_with(EngineChoice::Threads, || panic!("it is not asked for")).unwrap();
        assert_eq!(engine.name(), "threads");
    }
}
