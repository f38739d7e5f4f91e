//! The engine for places where io_uring is refused: epoll for sockets, threads for files.
//!
//! ```text
//!   sockets:  try it now ──EAGAIN──► wait for readiness (epoll) ──► try again
//!   files:    helper thread ──► result and waker ──► eventfd ends the driver's epoll_wait
//! ```
//!
//! The contract is the ring's, at the price of two more hops per file request. A file operation whose future is dropped runs to
//! its end on its thread, which owns file and buffers. A dropped socket operation has not happened.

mod readiness;

use std::cell::RefCell;
use std::future::{Future as _, poll_fn};
use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::{Errno, ReadWriteFlags};
use rustix::net::{RecvFlags, SocketFlags};

use self::readiness::{Direction, Poller, Ready};
use super::helpers::Helpers;
use super::pieces::{send_now, unsent};
use super::wakeup::Wakeup;
use super::{AllocateMode, Engine, EngineError, Interrupt, Received, SEND_PIECES_MAX, clock};
use crate::buffer::{Buffer, BufferPool};
use crate::device::{ByteRange, Durability, IoFuture};
use crate::error::IoError;
use crate::executor::{Driver, Unpark};

/// Threads for file operations of one lane: as many as a disk needs requests in flight to be busy.
const FILE_THREADS_MAX: usize = 16;

/// Helper threads of one lane, separate from those for files: work that hangs does not delay reads and writes.
const HELPER_THREADS_MAX: usize = 4;

/// Makes the engine for the calling thread, and the driver of its executor.
///
/// # Errors
/// [`EngineError::Refused`] if the system has no more descriptors.
pub fn open() -> Result<(ThreadsDriver, Rc<dyn Engine>), EngineError> {
    let wakeup = Wakeup::new().map_err(EngineError::refused("make an eventfd"))?;
    let poller = Poller::new(wakeup.eventfd()).map_err(EngineError::refused("make an epoll descriptor"))?;
    let poller = Rc::new(RefCell::new(poller));
    let engine = ThreadsEngine {
        poller: Rc::clone(&poller),
        buffers: BufferPool::new(),
        files: Rc::new(Helpers::new("sterna-file", FILE_THREADS_MAX)),
        helpers: Rc::new(Helpers::new("sterna-helper", HELPER_THREADS_MAX)),
    };
    Ok((ThreadsDriver { poller, wakeup, woken: Vec::new() }, Rc::new(engine)))
}

/// The driver of an executor: one `epoll_wait` a turn.
pub struct ThreadsDriver {
    poller: Rc<RefCell<Poller>>,
    wakeup: Arc<Wakeup>,
    /// Scratch space: the tasks to wake once the poller is not borrowed.
    woken: Vec<Waker>,
}

impl Driver for ThreadsDriver {
    fn now(&self) -> Duration {
        clock::now()
    }

    fn park(&mut self, deadline: Option<Duration>) {
        let left = deadline.map(|deadline| deadline.saturating_sub(clock::now()));
        let may_wait = left != Some(Duration::ZERO) && self.wakeup.prepare_wait();
        let limit = if may_wait { left } else { Some(Duration::ZERO) };
        self.poller.borrow_mut().wait(limit, &mut self.woken);
        self.wakeup.resume();
        self.woken.drain(..).for_each(Waker::wake);
        self.wakeup.resume();
    }

    fn unparker(&self) -> Arc<dyn Unpark> {
        Arc::clone(&self.wakeup) as Arc<dyn Unpark>
    }
}

struct ThreadsEngine {
    poller: Rc<RefCell<Poller>>,
    buffers: BufferPool,
    files: Rc<Helpers>,
    helpers: Rc<Helpers>,
}

impl ThreadsEngine {
    fn on_file<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, IoError> + Send + 'static,
    ) -> IoFuture<'static, T> {
        let files = Rc::clone(&self.files);
        Box::pin(async move { files.submit(work)?.await.map_err(|_| IoError::Closed)? })
    }

    fn on_socket<T: 'static>(
        &self,
        operation: &'static str,
        socket: &Arc<OwnedFd>,
        direction: Direction,
        mut attempt: impl FnMut(&OwnedFd) -> Result<T, Errno> + 'static,
    ) -> IoFuture<'static, T> {
        let (poller, socket) = (Rc::clone(&self.poller), Arc::clone(socket));
        Box::pin(async move {
            loop {
                match attempt(&socket) {
                    Ok(value) => return Ok(value),
                    Err(Errno::INTR) => {}
                    Err(Errno::AGAIN) => Ready::new(&poller, &socket, direction).await?,
                    Err(errno) => return Err(IoError::os(operation, errno)),
                }
            }
        })
    }
}

impl Engine for ThreadsEngine {
    fn name(&self) -> &'static str {
        "threads"
    }

    fn buffers(&self) -> &BufferPool {
        &self.buffers
    }

    fn read_at(&self, file: &Arc<OwnedFd>, offset: u64, mut buffer: Buffer) -> IoFuture<'static, Buffer> {
        let file = Arc::clone(file);
        self.on_file(move || {
            let fail = |errno| IoError::os("read", errno);
            let bytes = buffer.as_mut_slice().ok_or(fail(Errno::INVAL))?;
            let mut done = 0;
            while done < bytes.len() {
                match rustix::io::pread(&file, &mut bytes[done..], offset + done as u64) {
                    // The file ends before the request does.
                    Ok(0) => return Err(fail(Errno::IO)),
                    Ok(count) => done += count,
                    Err(Errno::INTR) => {}
                    Err(errno) => return Err(fail(errno)),
                }
            }
            Ok(buffer)
        })
    }

    fn write_at(
        &self,
        file: &Arc<OwnedFd>,
        offset: u64,
        data: Buffer,
        durability: Durability,
    ) -> IoFuture<'static, ()> {
        let file = Arc::clone(file);
        let flags = match durability {
            Durability::Volatile => ReadWriteFlags::empty(),
            Durability::Durable => ReadWriteFlags::DSYNC,
        };
        self.on_file(move || {
            let mut rest = data.as_slice();
            while !rest.is_empty() {
                let position = offset + (data.len() - rest.len()) as u64;
                match rustix::io::pwritev2(&file, &[IoSlice::new(rest)], position, flags) {
                    Ok(0) => return Err(IoError::os("write", Errno::IO)),
                    Ok(count) => rest = &rest[count..],
                    Err(Errno::INTR) => {}
                    Err(errno) => return Err(IoError::os("write", errno)),
                }
            }
            Ok(())
        })
    }

    fn sync(&self, file: &Arc<OwnedFd>) -> IoFuture<'static, ()> {
        let file = Arc::clone(file);
        self.on_file(move || rustix::fs::fdatasync(&file).map_err(|errno| IoError::os("flush", errno)))
    }

    fn allocate(&self, file: &Arc<OwnedFd>, mode: AllocateMode, range: ByteRange) -> IoFuture<'static, ()> {
        let file = Arc::clone(file);
        let (operation, flags) = match mode {
            AllocateMode::PunchHole => ("punch a hole", FallocateFlags::PUNCH_HOLE),
            AllocateMode::ZeroRange => ("zero a range", FallocateFlags::ZERO_RANGE),
        };
        self.on_file(move || {
            let flags = flags | FallocateFlags::KEEP_SIZE;
            rustix::io::retry_on_intr(|| rustix::fs::fallocate(&file, flags, range.offset, range.length))
                .map_err(|errno| IoError::os(operation, errno))
        })
    }

    fn accept(&self, listener: &Arc<OwnedFd>) -> IoFuture<'static, OwnedFd> {
        // There is no flag for one call, and a connection may vanish between readiness and accept.
        if let Err(errno) = set_nonblocking(listener) {
            return Box::pin(std::future::ready(Err(IoError::os("accept", errno))));
        }
        self.on_socket("accept", listener, Direction::In, |listener| {
            rustix::net::accept_with(listener, SocketFlags::CLOEXEC)
        })
    }

    fn receive(&self, socket: &Arc<OwnedFd>, buffer: Buffer) -> IoFuture<'static, (Buffer, usize)> {
        let mut kept = Some(buffer);
        self.on_socket("receive", socket, Direction::In, move |socket| {
            let mut buffer = kept.take().ok_or(Errno::INVAL)?;
            let bytes = buffer.as_mut_slice().ok_or(Errno::INVAL)?;
            match rustix::net::recv(socket, bytes, RecvFlags::DONTWAIT) {
                Ok((count, _)) => Ok((buffer, count)),
                Err(errno) => {
                    kept = Some(buffer);
                    Err(errno)
                }
            }
        })
    }

    fn receive_unless(
        &self,
        interrupt: &Interrupt,
        socket: &Arc<OwnedFd>,
        mut buffer: Buffer,
    ) -> IoFuture<'static, Received> {
        let (poller, socket, interrupt) = (Rc::clone(&self.poller), Arc::clone(socket), interrupt.clone());
        Box::pin(async move {
            loop {
                let bytes = buffer.as_mut_slice().ok_or(IoError::os("receive", Errno::INVAL))?;
                match rustix::net::recv(&socket, bytes, RecvFlags::DONTWAIT) {
                    Ok((count, _)) => return Ok(Received::Bytes(buffer, count)),
                    Err(Errno::INTR) => {}
                    Err(Errno::AGAIN) if interrupt.is_raised() => return Ok(Received::Interrupted(buffer)),
                    Err(Errno::AGAIN) => ready_or_interrupted(&poller, &socket, &interrupt).await?,
                    Err(errno) => return Err(IoError::os("receive", errno)),
                }
            }
        })
    }

    fn accept_unless(
        &self,
        interrupt: &Interrupt,
        listener: &Arc<OwnedFd>,
    ) -> IoFuture<'static, Option<OwnedFd>> {
        let (poller, listener, interrupt) =
            (Rc::clone(&self.poller), Arc::clone(listener), interrupt.clone());
        Box::pin(async move {
            set_nonblocking(&listener).map_err(|errno| IoError::os("accept", errno))?;
            loop {
                match rustix::net::accept_with(&listener, SocketFlags::CLOEXEC) {
                    Ok(connection) => return Ok(Some(connection)),
                    Err(Errno::INTR) => {}
                    Err(Errno::AGAIN) if interrupt.is_raised() => return Ok(None),
                    Err(Errno::AGAIN) => ready_or_interrupted(&poller, &listener, &interrupt).await?,
                    Err(errno) => return Err(IoError::os("accept", errno)),
                }
            }
        })
    }

    fn send(&self, socket: &Arc<OwnedFd>, pieces: Vec<Buffer>) -> IoFuture<'static, ()> {
        if pieces.len() > SEND_PIECES_MAX {
            return Box::pin(std::future::ready(Err(IoError::os("send", Errno::MSGSIZE))));
        }
        let mut sent = 0;
        self.on_socket("send", socket, Direction::Out, move |socket| {
            loop {
                let rest = unsent(&pieces, sent);
                if rest.is_empty() {
                    return Ok(());
                }
                sent += send_now(socket, &rest)?;
            }
        })
    }

    fn run_blocking(&self, work: Box<dyn FnOnce() + Send>) -> IoFuture<'static, ()> {
        self.helpers.run(work)
    }
}

/// Waits until the socket is readable, or until it is polled after the interrupt was raised.
async fn ready_or_interrupted(
    poller: &Rc<RefCell<Poller>>,
    socket: &Arc<OwnedFd>,
    interrupt: &Interrupt,
) -> Result<(), IoError> {
    let mut ready = Ready::new(poller, socket, Direction::In);
    poll_fn(
        |context| {
            if interrupt.is_raised() { Poll::Ready(Ok(())) } else { Pin::new(&mut ready).poll(context) }
        },
    )
    .await
}

fn set_nonblocking(socket: &OwnedFd) -> Result<(), Errno> {
    let flags = rustix::fs::fcntl_getfl(socket)?;
    if flags.contains(OFlags::NONBLOCK) {
        Ok(())
    } else {
        rustix::fs::fcntl_setfl(socket, flags | OFlags::NONBLOCK)
    }
}
