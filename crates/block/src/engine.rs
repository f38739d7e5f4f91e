//! How files and sockets are read and written: the contract of an I/O engine, and the choice of one.
//!
//! ```text
//!    FileStore, NBD connection         ask an `Engine` for I/O
//!          │
//!    ┌─────┴──────┐
//!    ring         threads              io_uring on the lane's own thread │ epoll + a pool where io_uring is refused
//!    └─────┬──────┘
//!      `Driver`                        what the executor parks on
//! ```

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use crate::buffer::{Buffer, BufferPool};
use crate::device::{ByteRange, Durability, IoFuture};

/// Submits I/O for the tasks of one thread.
///
/// Every future may be dropped at any moment: the engine keeps file and buffer until the kernel is done with them.
/// Files are shared by `Arc` because an operation may outlive the store that started it; the lock on an image
/// (`flock`) belongs to the open file description, so it is held exactly that long (design §5.9).
pub trait Engine {
    /// Name for logs and `volume show`: `io_uring` or `threads`.
    fn name(&self) -> &'static str;

    /// The pool from which request buffers are best taken: its memory is registered with the kernel where possible.
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

    /// `fdatasync`.
    fn sync(&self, file: &Arc<OwnedFd>) -> IoFuture<'static, ()>;

    /// `fallocate` with the given mode.
    fn allocate(&self, file: &Arc<OwnedFd>, mode: AllocateMode, range: ByteRange) -> IoFuture<'static, ()>;

    /// Accepts one connection.
    fn accept(&self, listener: &Arc<OwnedFd>) -> IoFuture<'static, OwnedFd>;

    /// Receives what is there, at most the length of `buffer`; the count is 0 at the end of the stream.
    fn receive(&self, socket: &Arc<OwnedFd>, buffer: Buffer) -> IoFuture<'static, (Buffer, usize)>;

    /// Sends all of `pieces`, in order. At most [`SEND_PIECES_MAX`] of them.
    fn send(&self, socket: &Arc<OwnedFd>, pieces: Vec<Buffer>) -> IoFuture<'static, ()>;

    /// Runs work that may sleep on a helper thread; the future resolves when it has ended.
    ///
    /// Results travel in what `work` captures. Dropping the future does not stop the work.
    fn run_blocking(&self, work: Box<dyn FnOnce() + Send>) -> IoFuture<'static, ()>;
}

/// Pieces of one [`Engine::send`]; the kernel takes 1,024 (UIO_MAXIOV).
pub const SEND_PIECES_MAX: usize = 256;

/// Modes of [`Engine::allocate`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllocateMode {
    /// Makes a hole of the range; the size stays.
    PunchHole,
    /// Zeroes the range and keeps it allocated; the size stays.
    ZeroRange,
}

/// Runs `work` on a helper thread of `engine` and returns what it returned.
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
            // The receiver is gone only if the caller no longer wants the result.
            let _ = sender.send(work());
        }))
        .await?;
    receiver.await.map_err(|_| crate::IoError::Closed)
}
