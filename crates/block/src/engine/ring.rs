//! The io_uring engine: files and sockets of a lane on one ring, on the lane's own thread.
//!
//! ```text
//!   Engine methods ──► Pending (future) ──► queue ──► submission queue ─┐ one io_uring_enter a turn
//!                          ▲                                            ▼ submits and waits
//!                          └── wakers ◄── RingDriver::park ◄── completion queue
//! ```
//!
//! An idle thread sleeps in the kernel. A busy one polls a moment longer when it expects a completion soon ([`looking`]).
//!
//! Threads share only the eventfd that ends a wait. The ring has one submitting thread, which handles completions where it waits
//! (DEFER_TASKRUN). Older kernels get fewer of these flags. Files and buffers work without registration as well.
//!
//! An operation whose future is dropped stays in the queue until its completion, with its file and buffers. Accept, receive and
//! send are cancelled. **N.B.** A connection or bytes that arrive at the moment of the drop are lost.

// UNSAFETY: the kernel reads and writes memory by address, which no type can follow. There are four unsafe blocks: pushing an
// entry (`queue`), taking over an accepted descriptor and zeroing a C structure (`request`), and registering buffers (here).
#![expect(unsafe_code, reason = "io_uring works on raw addresses")]

mod entry;
mod files;
mod looking;
mod queue;
mod request;
mod timing;
mod waiting;

use std::cell::RefCell;
use std::future::Future;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_util::FutureExt;
use io_uring::IoUring;
use rustix::io::Errno;

use self::looking::Looking;
use self::queue::Queue;
use self::request::{Outcome, Request};
use self::waiting::{Wait, wait_and_look};
use super::helpers::Helpers;
use super::pieces::transmit;
use super::wakeup::Wakeup;
use super::{AllocateMode, Engine, EngineError, Interrupt, Received, SEND_PIECES_MAX, clock};
use crate::buffer::{Buffer, BufferPool};
use crate::device::{ByteRange, Durability, IoFuture};
use crate::error::IoError;
use crate::executor::{Driver, Unpark};

/// Helper threads of one lane, for calls without an asynchronous form, which are few and rare.
const HELPER_THREADS_MAX: usize = 4;

/// Sizes in bytes of the registered buffers, and how many of each: 1.9 MiB. Without privileges all lanes share the user's limit
/// of locked memory, often 8 MiB. Small ones serve guests, large ones the mover.
const REGISTERED: [(usize, usize); 4] = [(4 << 10, 32), (8 << 10, 32), (64 << 10, 16), (256 << 10, 2)];

/// The settings of a ring.
#[derive(Clone, Copy, Debug)]
pub struct RingOptions {
    /// Entries of the submission queue; the completion queue has four times as many. Further operations wait their turn.
    pub entries: u32,
    /// Whether to lock memory for registered buffers, which the kernel need not look up at each request.
    pub registration: Registration,
}

/// Whether buffers are registered with the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Registration {
    /// If the limit on locked memory allows it.
    IfAllowed,
    /// Never; requests use plain buffers.
    Off,
}

impl Default for RingOptions {
    fn default() -> Self {
        Self { entries: 256, registration: Registration::IfAllowed }
    }
}

/// Makes a ring for the calling thread: the driver of its executor, and the engine of its tasks.
///
/// # Errors
/// [`EngineError::Refused`] if the system refuses io_uring to this process, [`EngineError::TooOld`] if the kernel's
/// lacks a required operation.
pub fn open(options: RingOptions) -> Result<(RingDriver, Rc<dyn Engine>), EngineError> {
    let ring = set_up(options.entries)?;
    let buffers = registered_buffers(&ring, options.registration);
    let wakeup = Wakeup::new().map_err(EngineError::refused("make an eventfd"))?;
    let queue = Rc::new(RefCell::new(Queue::new(ring, buffers.clone())));
    wake_in_time();
    let looking = Looking::default();
    let driver =
        RingDriver { queue: Rc::clone(&queue), wakeup, wakeup_read: None, looking, woken: Vec::new() };
    let helpers = Rc::new(Helpers::new("sterna-helper", HELPER_THREADS_MAX));
    Ok((driver, Rc::new(RingEngine { queue, buffers, helpers })))
}

/// The driver of an executor: one `io_uring_enter` a turn.
///
/// Dropping it cancels operations that wait for peers, and waits at most ten seconds for file operations. Those still in flight
/// keep their memory and files for ever. Later requests fail with [`IoError::Closed`].
pub struct RingDriver {
    queue: Rc<RefCell<Queue>>,
    wakeup: Arc<Wakeup>,
    wakeup_read: Option<usize>,
    looking: Looking,
    /// Scratch space: the tasks to wake once the queue is not borrowed.
    woken: Vec<Waker>,
}

impl Driver for RingDriver {
    fn now(&self) -> Duration {
        clock::now()
    }

    fn park(&mut self, deadline: Option<Duration>) {
        let wait = match deadline.map(|deadline| deadline.saturating_sub(clock::now())) {
            None => Wait::Forever,
            Some(Duration::ZERO) => Wait::No,
            Some(left) => Wait::AtMost(left),
        };
        let wait = if wait == Wait::No || !self.wakeup.prepare_wait() { Wait::No } else { wait };
        {
            let mut queue = self.queue.borrow_mut();
            if wait != Wait::No {
                arm(&mut queue, &self.wakeup, &mut self.wakeup_read);
            }
            wait_and_look(&mut queue, &mut self.looking, wait, &mut self.woken);
        }
        self.wakeup.resume();
        self.woken.drain(..).for_each(Waker::wake);
        self.wakeup.resume();
    }

    fn unparker(&self) -> Arc<dyn Unpark> {
        Arc::clone(&self.wakeup) as Arc<dyn Unpark>
    }
}

impl Drop for RingDriver {
    fn drop(&mut self) {
        self.queue.borrow_mut().close(&mut self.woken);
        self.woken.drain(..).for_each(Waker::wake);
    }
}

/// Lets waits of the calling thread end on time: by default the kernel may take 50 us more.
fn wake_in_time() {
    if let Err(error) = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1)) {
        tracing::debug!(%error, "waits may end late");
    }
}

fn arm(queue: &mut Queue, wakeup: &Arc<Wakeup>, read: &mut Option<usize>) {
    let is_over = read.is_none_or(|key| queue.take(key, Waker::noop()).is_some());
    if is_over {
        // Without it only wake-ups by other threads would be late, and an open ring always takes it.
        *read = queue.start(Request::wakeup(Arc::clone(wakeup.eventfd())), Waker::noop().clone()).ok();
    }
}

struct RingEngine {
    queue: Rc<RefCell<Queue>>,
    buffers: BufferPool,
    helpers: Rc<Helpers>,
}

impl RingEngine {
    fn run(&self, request: Request) -> Pending {
        Pending { queue: Rc::clone(&self.queue), state: Submission::Unsubmitted(request) }
    }

    fn run_unless(&self, interrupt: &Interrupt, request: Request) -> Interruptible {
        Interruptible { pending: self.run(request), interrupt: interrupt.clone(), state: Waits::Untouched }
    }
}

impl Engine for RingEngine {
    fn name(&self) -> &'static str {
        "io_uring"
    }

    fn buffers(&self) -> &BufferPool {
        &self.buffers
    }

    fn read_at(&self, file: &Arc<OwnedFd>, offset: u64, buffer: Buffer) -> IoFuture<'static, Buffer> {
        if buffer.is_empty() {
            return Box::pin(std::future::ready(Ok(buffer)));
        }
        Box::pin(self.run(Request::read(Arc::clone(file), offset, buffer)).map(|outcome| filled(outcome?)))
    }

    fn write_at(
        &self,
        file: &Arc<OwnedFd>,
        offset: u64,
        data: Buffer,
        durability: Durability,
    ) -> IoFuture<'static, ()> {
        if data.is_empty() {
            return Box::pin(std::future::ready(Ok(())));
        }
        Box::pin(self.run(Request::write(Arc::clone(file), offset, data, durability)).map(done))
    }

    fn sync(&self, file: &Arc<OwnedFd>) -> IoFuture<'static, ()> {
        Box::pin(self.run(Request::sync(Arc::clone(file))).map(done))
    }

    fn allocate(&self, file: &Arc<OwnedFd>, mode: AllocateMode, range: ByteRange) -> IoFuture<'static, ()> {
        Box::pin(self.run(Request::allocate(Arc::clone(file), mode, range)).map(done))
    }

    fn accept(&self, listener: &Arc<OwnedFd>) -> IoFuture<'static, OwnedFd> {
        Box::pin(self.run(Request::accept(Arc::clone(listener))).map(|outcome| match outcome? {
            Outcome::Connection(connection) => Ok(connection),
            Outcome::Cancelled(_) => Err(IoError::os("accept", Errno::CANCELED)),
            Outcome::Done | Outcome::Filled(..) => Err(IoError::Unsupported),
        }))
    }

    fn receive(&self, socket: &Arc<OwnedFd>, buffer: Buffer) -> IoFuture<'static, (Buffer, usize)> {
        Box::pin(self.run(Request::receive(Arc::clone(socket), buffer)).map(|outcome| match outcome? {
            Outcome::Filled(buffer, length) => Ok((buffer, length)),
            Outcome::Cancelled(_) => Err(IoError::os("receive", Errno::CANCELED)),
            Outcome::Done | Outcome::Connection(_) => Err(IoError::Unsupported),
        }))
    }

    fn receive_unless(
        &self,
        interrupt: &Interrupt,
        socket: &Arc<OwnedFd>,
        buffer: Buffer,
    ) -> IoFuture<'static, Received> {
        let receiving = self.run_unless(interrupt, Request::receive(Arc::clone(socket), buffer));
        Box::pin(receiving.map(|outcome| match outcome? {
            Outcome::Filled(buffer, length) => Ok(Received::Bytes(buffer, length)),
            Outcome::Cancelled(Some(buffer)) => Ok(Received::Interrupted(buffer)),
            Outcome::Done | Outcome::Connection(_) | Outcome::Cancelled(None) => Err(IoError::Unsupported),
        }))
    }

    fn accept_unless(
        &self,
        interrupt: &Interrupt,
        listener: &Arc<OwnedFd>,
    ) -> IoFuture<'static, Option<OwnedFd>> {
        let accepting = self.run_unless(interrupt, Request::accept(Arc::clone(listener)));
        Box::pin(accepting.map(|outcome| match outcome? {
            Outcome::Connection(connection) => Ok(Some(connection)),
            Outcome::Cancelled(_) => Ok(None),
            Outcome::Done | Outcome::Filled(..) => Err(IoError::Unsupported),
        }))
    }

    fn send(&self, socket: &Arc<OwnedFd>, pieces: Vec<Buffer>) -> IoFuture<'static, ()> {
        if pieces.len() > SEND_PIECES_MAX {
            return Box::pin(std::future::ready(Err(IoError::os("send", Errno::MSGSIZE))));
        }
        if pieces.iter().all(Buffer::is_empty) {
            return Box::pin(std::future::ready(Ok(())));
        }
        let (queue, socket) = (Rc::clone(&self.queue), Arc::clone(socket));
        Box::pin(async move {
            // A socket usually takes a reply at once. Then a plain call is fastest: the peer is awake before this thread does
            // anything else, and there is no completion to handle.
            let sent = transmit(&socket, &pieces).map_err(|errno| IoError::os("send", errno))?;
            if sent == pieces.iter().map(Buffer::len).sum() {
                return Ok(());
            }
            let request = Request::send_rest(socket, pieces, sent);
            done(Pending { queue, state: Submission::Unsubmitted(request) }.await)
        })
    }

    fn run_blocking(&self, work: Box<dyn FnOnce() + Send>) -> IoFuture<'static, ()> {
        self.helpers.run(work)
    }

    fn release(&self, file: &Arc<OwnedFd>) {
        self.queue.borrow_mut().release(file);
    }
}

struct Pending {
    queue: Rc<RefCell<Queue>>,
    state: Submission,
}

enum Submission {
    Unsubmitted(Request),
    Submitted(usize),
    Over,
}

impl Future for Pending {
    type Output = Result<Outcome, IoError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let polled = match std::mem::replace(&mut this.state, Submission::Over) {
            Submission::Unsubmitted(request) => {
                match this.queue.borrow_mut().start(request, context.waker().clone()) {
                    Ok(key) => Err(key),
                    Err(error) => Ok(Err(error)),
                }
            }
            Submission::Submitted(key) => this.queue.borrow_mut().take(key, context.waker()).ok_or(key),
            Submission::Over => Ok(Err(IoError::Closed)),
        };
        match polled {
            Ok(result) => Poll::Ready(result),
            Err(key) => {
                this.state = Submission::Submitted(key);
                Poll::Pending
            }
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Submission::Submitted(key) = self.state {
            self.queue.borrow_mut().abandon(key);
        }
    }
}

/// An operation that waits for a peer and can be interrupted.
struct Interruptible {
    pending: Pending,
    interrupt: Interrupt,
    state: Waits,
}

#[derive(PartialEq, Eq)]
enum Waits {
    Untouched,
    Cancelled,
}

impl Future for Interruptible {
    type Output = Result<Outcome, IoError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if self.interrupt.is_raised()
            && std::mem::replace(&mut self.state, Waits::Cancelled) == Waits::Untouched
        {
            match &self.pending.state {
                Submission::Submitted(key) => self.pending.queue.borrow_mut().cancel(*key),
                Submission::Unsubmitted(_) => {
                    if let Submission::Unsubmitted(request) =
                        std::mem::replace(&mut self.pending.state, Submission::Over)
                    {
                        return Poll::Ready(Ok(request.cancelled()));
                    }
                }
                Submission::Over => {}
            }
        }
        Pin::new(&mut self.pending).poll(context)
    }
}

fn filled(outcome: Outcome) -> Result<Buffer, IoError> {
    match outcome {
        Outcome::Filled(buffer, _) => Ok(buffer),
        Outcome::Done | Outcome::Connection(_) | Outcome::Cancelled(_) => Err(IoError::Unsupported),
    }
}

fn done(outcome: Result<Outcome, IoError>) -> Result<(), IoError> {
    outcome.map(drop)
}

/// Makes a ring with as many of the desired flags as the kernel knows.
fn set_up(entries: u32) -> Result<IoUring, EngineError> {
    let attempts: [fn(&mut io_uring::Builder); 3] = [
        |builder| {
            builder.setup_single_issuer().setup_coop_taskrun().setup_defer_taskrun();
            builder.setup_taskrun_flag().setup_submit_all();
        },
        |builder| {
            builder.setup_coop_taskrun().setup_taskrun_flag().setup_submit_all();
        },
        |_| (),
    ];
    let mut refused = Errno::INVAL;
    for attempt in attempts {
        let mut builder = IoUring::builder();
        builder.setup_clamp().setup_cqsize(entries.saturating_mul(4)).dontfork();
        attempt(&mut builder);
        match builder.build(entries) {
            Ok(ring) => return check_features(ring),
            Err(error) => refused = Errno::from_io_error(&error).unwrap_or(Errno::IO),
        }
        // Any error but an unknown flag would occur with fewer flags as well.
        if refused != Errno::INVAL {
            break;
        }
    }
    Err(EngineError::Refused { operation: "set up an io_uring", errno: refused })
}

fn check_features(ring: IoUring) -> Result<IoUring, EngineError> {
    let parameters = ring.params();
    if !parameters.is_feature_ext_arg() {
        return Err(EngineError::TooOld { missing: "waiting with a time limit" });
    }
    if !parameters.is_feature_nodrop() {
        return Err(EngineError::TooOld { missing: "keeping completions that do not fit" });
    }
    Ok(ring)
}

fn registered_buffers(ring: &IoUring, registration: Registration) -> BufferPool {
    if registration == Registration::Off {
        return BufferPool::new();
    }
    let lengths: Vec<usize> =
        REGISTERED.iter().flat_map(|(length, count)| std::iter::repeat_n(*length, *count)).collect();
    BufferPool::with_registered(&lengths, |memory| {
        let pieces: Vec<_> = memory
            .iter()
            .map(|(address, length)| libc::iovec { iov_base: address.cast(), iov_len: *length })
            .collect();
        // SAFETY: the pool keeps this memory while it lives. The kernel pins it, and touches it only for entries that name it,
        // which are made only from live buffers of this pool.
        let result = unsafe { ring.submitter().register_buffers(&pieces) };
        if let Err(error) = &result {
            tracing::debug!(%error, "buffers are not registered");
        }
        result.is_ok()
    })
}
