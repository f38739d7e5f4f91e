//! A channel between two hosts over several connections: each message arrives once while both processes live, in any order, and
//! waits while the link is broken.
//!
//! ```text
//!   send ──► a connection's delay, with a tail ──► link up? ──yes──► there, if both processes are still the same
//!                                                     └──no──► held until it is mended
//! ```
//! It keeps the promise of the product's transport to a lane (`lane::peer`); the transport itself is not simulated here.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use bytes::Bytes;
use futures_channel::mpsc;
use lane::fencing::FencingToken;
use lane::peer::head::{Answered, Fault, Head};
use lane::peer::{ChannelEvent, RequestPriority};

use super::link::Link;
use super::place::Place;

/// A process's part of a line: the sending end, and the arrivals.
pub(super) type Ends = (Box<dyn lane::peer::Channel>, mpsc::UnboundedReceiver<ChannelEvent>);

/// Judges arrivals at an end of a line, by head and payload.
pub(super) type Guard = Box<dyn Fn(&[u8], &[u8]) -> Judged>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Judged {
    Heard,
    LeftOut,
    /// The listener does not receive it, and the call of this number is answered with a failure.
    Refused(u64),
}

/// Calls of this number and above bypass the channel.
pub(super) const BESIDES: u64 = 1 << 63;

pub(crate) struct Line {
    me: Weak<Self>,
    link: Weak<Link>,
    number: u64,
    ends: [End; 2],
    held: RefCell<Vec<Frame>>,
}

#[derive(Default)]
struct End {
    incarnation: Cell<u64>,
    /// The process at the other end that this one knows.
    knows: Cell<u64>,
    /// It has learned that the line is broken.
    is_lost: Cell<bool>,
    arrivals: RefCell<Option<mpsc::UnboundedSender<ChannelEvent>>>,
    guard: RefCell<Option<Guard>>,
    /// The fence in the answer to a call outside of the channel.
    told: Cell<Option<FencingToken>>,
}

struct Frame {
    to: usize,
    from_incarnation: u64,
    to_incarnation: u64,
    head: Bytes,
    payload: Bytes,
}

struct Sender {
    line: Weak<Line>,
    from: usize,
    incarnation: u64,
}

impl Line {
    pub(super) fn new(link: Weak<Link>, number: u64) -> Rc<Self> {
        let make = |me: &Weak<Self>| Self {
            me: Weak::clone(me),
            link,
            number,
            ends: Default::default(),
            held: RefCell::default(),
        };
        Rc::new_cyclic(make)
    }

    pub(super) fn open(&self, place: Place, guard: Guard) -> Option<Ends> {
        let link = self.link.upgrade()?;
        let number = link.end_of(place);
        let own = &self.ends[number];
        own.incarnation.set(own.incarnation.get() + 1);
        let (sender, arrivals) = mpsc::unbounded();
        *own.arrivals.borrow_mut() = Some(sender);
        *own.guard.borrow_mut() = Some(guard);
        own.told.set(None);
        own.knows.set(self.ends[1 - number].incarnation.get());
        own.is_lost.set(false);
        if !link.is_up() {
            self.lose(number);
        }
        // The other end learns of it before this process's first message.
        let (me, incarnation) = (Weak::clone(&self.me), own.incarnation.get());
        link.world.clock.after(link.introduction(), move || {
            if let Some(line) = me.upgrade().filter(|line| line.is_up()) {
                line.introduce(number, incarnation);
            }
        });
        let line = Sender { line: Weak::clone(&self.me), from: number, incarnation };
        Some((Box::new(line), arrivals))
    }

    /// Replaces the listener of the process at `place`: the former one receives nothing more. The other end learns nothing.
    pub(super) fn listen_anew(&self, place: Place) -> Option<Ends> {
        let number = self.link.upgrade()?.end_of(place);
        let own = &self.ends[number];
        let (sender, arrivals) = mpsc::unbounded();
        own.arrivals.borrow_mut().replace(sender);
        let line = Sender { line: Weak::clone(&self.me), from: number, incarnation: own.incarnation.get() };
        Some((Box::new(line), arrivals))
    }

    /// Marks the line as known to an earlier process at `place`: its peer learns of the next one.
    pub(crate) fn is_known_to(&self, place: Place) {
        if let Some(link) = self.link.upgrade() {
            let end = &self.ends[link.end_of(place)];
            end.incarnation.set(end.incarnation.get().max(1));
        }
    }

    pub(crate) fn close(&self, place: Place) {
        if let Some(link) = self.link.upgrade() {
            self.ends[link.end_of(place)].arrivals.borrow_mut().take();
        }
    }

    pub(super) fn lost(&self) {
        (0..2).for_each(|end| self.lose(end));
    }

    /// Reports to ends that knew of the break, and delivers held messages in any order.
    pub(super) fn mended(&self) {
        for end in 0..2 {
            self.introduce(end, self.ends[end].incarnation.get());
        }
        for end in 0..2 {
            if self.ends[end].is_lost.replace(false) {
                self.tell(end, ChannelEvent::Restored);
            }
        }
        for frame in self.held.take() {
            self.carry(frame);
        }
    }

    pub(super) fn clear(&self) {
        self.held.borrow_mut().clear();
        for end in &self.ends {
            drop(end.arrivals.borrow_mut().take());
            drop(end.guard.borrow_mut().take());
        }
    }

    fn is_up(&self) -> bool {
        self.link.upgrade().is_some_and(|link| link.is_up())
    }

    fn lose(&self, end: usize) {
        if !self.ends[end].is_lost.replace(true) {
            self.tell(end, ChannelEvent::Lost("the link is broken".to_owned()));
        }
    }

    fn introduce(&self, from: usize, incarnation: u64) {
        let other = &self.ends[1 - from];
        if other.knows.get() < incarnation {
            let is_first = other.knows.replace(incarnation) == 0;
            if !is_first {
                self.tell(1 - from, ChannelEvent::PeerRestarted);
            }
        }
    }

    fn tell(&self, end: usize, arrival: ChannelEvent) {
        if let Some(arrivals) = &*self.ends[end].arrivals.borrow() {
            let _ = arrivals.unbounded_send(arrival);
        }
    }

    fn carry(&self, frame: Frame) {
        let Some(link) = self.link.upgrade() else { return };
        let me = Weak::clone(&self.me);
        link.world.clock.after(link.delay(), move || {
            if let Some(line) = me.upgrade() {
                line.arrive(frame);
            }
        });
    }

    fn arrive(&self, frame: Frame) {
        let Some(link) = self.link.upgrade() else { return };
        if !link.is_up() {
            self.held.borrow_mut().push(frame);
            return;
        }
        let (to, from) = (&self.ends[frame.to], &self.ends[1 - frame.to]);
        // Messages for an ended process, or from one that is known to have ended, are never delivered.
        if to.incarnation.get() != frame.to_incarnation || from.incarnation.get() < frame.from_incarnation {
            return;
        }
        self.introduce(1 - frame.to, frame.from_incarnation);
        if to.knows.get() > frame.from_incarnation {
            return;
        }
        link.world.note("frame", self.number << 1 | frame.to as u64, frame.payload.len() as u64);
        if self.is_besides(&frame) {
            return;
        }
        let judge = |guard: &Guard| guard(&frame.head, &frame.payload);
        match to.guard.borrow().as_ref().map_or(Judged::Heard, judge) {
            Judged::Heard => {
                let credit: Box<dyn Any + Send> = Box::new(());
                self.tell(
                    frame.to,
                    ChannelEvent::Message { head: frame.head, payload: frame.payload, credit },
                );
            }
            Judged::LeftOut => {}
            Judged::Refused(call) => {
                let head = Head::Answer { call, result: Err(Fault::Gone) };
                self.send_from(frame.to, &head, Bytes::new());
            }
        }
    }

    /// Takes the answer to a call outside of the channel.
    fn is_besides(&self, frame: &Frame) -> bool {
        match Head::decode(&frame.head) {
            Ok(Head::Answer { call, result }) if call >= BESIDES => {
                if let Ok(Answered::Fenced(fence)) = result {
                    self.ends[frame.to].told.set(Some(fence));
                }
                true
            }
            _ => false,
        }
    }

    fn send_from(&self, from: usize, head: &Head, payload: Bytes) {
        let End { incarnation, knows, .. } = &self.ends[from];
        let (from_incarnation, to_incarnation) = (incarnation.get(), knows.get());
        self.carry(Frame { to: 1 - from, from_incarnation, to_incarnation, head: head.encode(), payload });
    }
}

impl Line {
    pub(super) fn ask_besides(&self, place: Place, head: &Head, payload: Bytes) {
        if let Some(link) = self.link.upgrade() {
            self.send_from(link.end_of(place), head, payload);
        }
    }

    pub(super) fn told_besides(&self, place: Place) -> Option<FencingToken> {
        self.ends[self.link.upgrade()?.end_of(place)].told.get()
    }
}

impl lane::peer::Channel for Sender {
    fn send(&self, _: RequestPriority, head: Bytes, payload: Bytes) {
        let Some(line) = self.line.upgrade() else { return };
        let to = 1 - self.from;
        let to_incarnation = line.ends[self.from].knows.get();
        line.carry(Frame { to, from_incarnation: self.incarnation, to_incarnation, head, payload });
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use block::executor::Executor;
    use block::{BufferPool, MemoryStore};
    use lane::peer::head::{Address, Operation};
    use lane::peer::{CallsOnly, RpcChannel, Service};
    use lane::stack::{Gate, GateMode};
    use migration::MigrationId;

    use super::*;
    use crate::clock::Clock;
    use crate::fleet::clock::{HostClock, HostDriver};
    use crate::fleet::link::Subject;
    use crate::random::Random;
    use crate::trace::{Audience, Trace};
    use crate::world::World;

    struct Sent(Rc<RefCell<Vec<Bytes>>>);

    impl lane::peer::Channel for Sent {
        fn send(&self, _: RequestPriority, head: Bytes, _: Bytes) {
            self.0.borrow_mut().push(head);
        }
    }

    #[test]
    fn calls_of_a_former_process_end_before_those_of_its_successor_and_are_not_answered() {
        let clock = Clock::new(Random::new(1));
        let mut executor = Executor::new(HostDriver::new(&HostClock::draw(&clock, &mut Random::new(1))));
        let (handle, buffers) = (executor.handle(), BufferPool::new());
        let mut rest = || (0..100).for_each(|_| executor.turn());
        let slow = Rc::new(Gate::new(Rc::new(MemoryStore::new(1 << 20))));
        slow.set_mode(GateMode::Hold);
        let (service, sent) = (Service::new(handle.clone(), buffers), Rc::new(RefCell::new(Vec::new())));
        let channel = RpcChannel::new(Box::new(Sent(Rc::clone(&sent))));
        let (line, arrivals) = mpsc::unbounded();
        handle.spawn(channel.run(arrivals, Rc::clone(&service), Rc::new(CallsOnly)));
        let operation = Operation::Write { offset: 0, durable: false };
        // Each process numbers its calls anew.
        let head = Head::Call { call: 0, address: Address::Replica(0), operation }.encode();
        let call = || ChannelEvent::Message {
            head: head.clone(),
            payload: Bytes::from(vec![1; 4096]),
            credit: Box::new(()),
        };
        service.offer(Address::Replica(0), slow.clone());
        line.unbounded_send(call()).unwrap();
        rest();
        line.unbounded_send(ChannelEvent::PeerRestarted).unwrap();
        service.offer(Address::Replica(0), Rc::new(MemoryStore::new(1 << 20)));
        line.unbounded_send(call()).unwrap();
        rest();
        assert_eq!(sent.borrow().len(), 0, "it overtakes a write of the process before");
        slow.set_mode(GateMode::Open);
        rest();
        assert_eq!(sent.borrow().len(), 1, "one call is answered: the living process's");
    }

    #[test]
    fn who_listens_anew_hears_what_is_said_and_the_other_end_hears_of_no_restart() {
        let world = World::new(&mut Random::new(1), Trace::new(Audience::Nobody));
        let [a, b] = [0, 1].map(|number| Place::all(2).nth(number).unwrap());
        let link = Link::new(&world, Random::new(1), [a, b]);
        let line = link.line(Subject::Migration(b, MigrationId(1)));
        let open = |place| line.open(place, Box::new(|_, _| Judged::Heard)).unwrap();
        let (_, before) = open(a);
        let (source, mut at_source) = open(b);
        let pass = || (0..100).for_each(|_| world.clock.step(Some(world.now() + Duration::from_millis(10))));
        // Its lane receives no more of the source, like an ended service.
        drop(before);
        let (target, mut anew) = line.listen_anew(a).unwrap();
        source.send(RequestPriority::Control, Head::Message.encode(), Bytes::from_static(b"COMMIT"));
        pass();
        let Ok(ChannelEvent::Message { payload, .. }) = anew.try_recv() else { panic!("nobody hears it") };
        assert_eq!(&payload[..], b"COMMIT");
        target.send(RequestPriority::Control, Head::Message.encode(), Bytes::from_static(b"ACTIVE"));
        pass();
        let Ok(ChannelEvent::Message { payload, .. }) = at_source.try_recv() else { panic!("not first") };
        assert_eq!(&payload[..], b"ACTIVE");
    }
}
