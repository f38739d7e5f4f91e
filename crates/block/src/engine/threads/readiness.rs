//! Waiting until a socket can be read or written, with epoll.
//!
//! ```text
//!   Ready ──► first waiter: armed for its directions, once ──► event: armed directions' waiters are woken,
//!                  ▲                                           the rest is armed again
//!                  └── registered already: armed again, for all directions waited for
//! ```
//!
//! A socket is registered when it is first waited for, and stays so, disarmed, until it is closed: the kernel
//! forgets it then.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::Future;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

use crate::error::IoError;

const EVENTS_MAX: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    In,
    Out,
}

pub(super) struct Poller {
    epoll: OwnedFd,
    eventfd: Arc<OwnedFd>,
    sockets: BTreeMap<RawFd, Vec<Waiter>>,
    next: u64,
    events: Vec<epoll::Event>,
}

struct Waiter {
    number: u64,
    direction: Direction,
    waker: Waker,
    /// Keeps the descriptor open, so that its number is not reused for another socket.
    _socket: Arc<OwnedFd>,
}

impl Poller {
    pub(super) fn new(eventfd: &Arc<OwnedFd>) -> rustix::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, eventfd, token(eventfd.as_raw_fd()), epoll::EventFlags::IN)?;
        let events = Vec::with_capacity(EVENTS_MAX);
        Ok(Self { epoll, eventfd: Arc::clone(eventfd), sockets: BTreeMap::new(), next: 0, events })
    }

    /// Waits until a socket is ready, at most `limit`; appends the tasks to wake to `wakers`.
    pub(super) fn wait(&mut self, limit: Option<Duration>, wakers: &mut Vec<Waker>) {
        // A limit that is too long for the kernel is as good as none.
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        self.events.clear();
        // A signal ends the wait like a wake-up does.
        if epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut self.events), limit.as_ref()).is_err()
        {
            return;
        }
        let mut events = std::mem::take(&mut self.events);
        for event in events.drain(..) {
            let (descriptor, flags) = (event.data.u64() as RawFd, event.flags);
            if descriptor == self.eventfd.as_raw_fd() {
                // It is readable, so this does not wait; the count does not matter.
                let _ = rustix::io::read(&self.eventfd, &mut [0; 8]);
            } else {
                self.wake(descriptor, flags, wakers);
            }
        }
        self.events = events;
    }

    fn wake(&mut self, descriptor: RawFd, flags: epoll::EventFlags, wakers: &mut Vec<Waker>) {
        let Some(waiters) = self.sockets.get_mut(&descriptor) else { return };
        // Errors and hang-ups wake all waiters: their operations get the error.
        let broken = flags.intersects(epoll::EventFlags::ERR | epoll::EventFlags::HUP);
        waiters.retain(|waiter| {
            let stays = !broken && !flags.contains(waiter.direction.flags());
            if !stays {
                wakers.push(waiter.waker.clone());
            }
            stays
        });
        if waiters.is_empty() {
            self.sockets.remove(&descriptor);
        } else if self.arm(descriptor).is_err() {
            // The waiters try again, and get the error themselves.
            let waiters = self.sockets.remove(&descriptor).unwrap_or_default();
            wakers.extend(waiters.into_iter().map(|waiter| waiter.waker));
        }
    }

    fn start(&mut self, socket: &Arc<OwnedFd>, direction: Direction, waker: Waker) -> Result<u64, Errno> {
        let number = self.next;
        self.next += 1;
        let descriptor = socket.as_raw_fd();
        let waiter = Waiter { number, direction, waker, _socket: Arc::clone(socket) };
        self.sockets.entry(descriptor).or_default().push(waiter);
        self.arm(descriptor).inspect_err(|_| self.forget(descriptor, number))?;
        Ok(number)
    }

    fn arm(&self, descriptor: RawFd) -> Result<(), Errno> {
        let Some(waiters) = self.sockets.get(&descriptor) else { return Ok(()) };
        let Some(socket) = waiters.first().map(|waiter| &waiter._socket) else { return Ok(()) };
        let wanted = waiters.iter().fold(epoll::EventFlags::ONESHOT, |all, one| all | one.direction.flags());
        match epoll::modify(&self.epoll, socket, token(descriptor), wanted) {
            Err(Errno::NOENT) => epoll::add(&self.epoll, socket, token(descriptor), wanted),
            result => result,
        }
    }

    fn still_waits(&mut self, descriptor: RawFd, number: u64, waker: &Waker) -> bool {
        let waiters = self.sockets.get_mut(&descriptor).map(Vec::as_mut_slice).unwrap_or_default();
        match waiters.iter_mut().find(|waiter| waiter.number == number) {
            Some(waiter) => {
                waiter.waker.clone_from(waker);
                true
            }
            None => false,
        }
    }

    fn forget(&mut self, descriptor: RawFd, number: u64) {
        if let Some(waiters) = self.sockets.get_mut(&descriptor) {
            waiters.retain(|waiter| waiter.number != number);
            if waiters.is_empty() {
                self.sockets.remove(&descriptor);
            }
        }
    }
}

impl Direction {
    fn flags(self) -> epoll::EventFlags {
        match self {
            Self::In => epoll::EventFlags::IN,
            Self::Out => epoll::EventFlags::OUT,
        }
    }
}

pub(super) struct Ready {
    poller: Rc<RefCell<Poller>>,
    socket: Arc<OwnedFd>,
    direction: Direction,
    /// Number of the waiter; `None` before the first poll, and after the last.
    waiting: Option<u64>,
}

impl Ready {
    pub(super) fn new(poller: &Rc<RefCell<Poller>>, socket: &Arc<OwnedFd>, direction: Direction) -> Self {
        Self { poller: Rc::clone(poller), socket: Arc::clone(socket), direction, waiting: None }
    }
}

impl Future for Ready {
    type Output = Result<(), IoError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let mut poller = this.poller.borrow_mut();
        match this.waiting {
            None => match poller.start(&this.socket, this.direction, context.waker().clone()) {
                Ok(number) => {
                    this.waiting = Some(number);
                    Poll::Pending
                }
                Err(errno) => Poll::Ready(Err(IoError::os("wait for a socket", errno))),
            },
            Some(number) if poller.still_waits(this.socket.as_raw_fd(), number, context.waker()) => {
                Poll::Pending
            }
            Some(_) => {
                this.waiting = None;
                Poll::Ready(Ok(()))
            }
        }
    }
}

impl Drop for Ready {
    fn drop(&mut self) {
        if let Some(number) = self.waiting {
            self.poller.borrow_mut().forget(self.socket.as_raw_fd(), number);
        }
    }
}

/// An event is identified by its socket's descriptor, which is never negative.
fn token(descriptor: RawFd) -> epoll::EventData {
    epoll::EventData::new_u64(u64::from(descriptor.unsigned_abs()))
}
