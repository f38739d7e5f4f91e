//! Guests' requests to a volume that is being filled: announces them to the core, and carries them out on its decision.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::rc::Rc;
use std::task::{Poll, Waker};

use block::device::push_extent;
use block::{
    BlockDevice, Buffer, ByteRange, Change, Durability, Extent, ExtentKind, Geometry, Growth, IoError,
    IoFuture, ZeroMode,
};
use chronicle::BlockSize;
use migration::filling::{FillingEvent, Refusal, RequestId, StoreFault};
use rustix::io::Errno;

use super::{FillingState, FillingStore};

#[derive(Default)]
pub(super) struct TicketState {
    pub(super) answer: Cell<Option<Word>>,
    pub(super) waiter: Cell<Option<Waker>>,
    /// The parts of a read that have passed by the store, with their offsets.
    pub(super) passed: RefCell<Vec<(u64, Buffer)>>,
}

#[derive(Clone, Copy)]
pub(super) enum Word {
    Admitted,
    Written,
    Refused(Refusal),
    /// This host does not own the volume.
    Left,
    Flushed(Result<(), StoreFault>),
}

struct Ticket<'a> {
    filling: &'a FillingStore,
    id: RequestId,
    state: Rc<TicketState>,
}

impl FillingStore {
    /// Announces a request; `None` if there is no machine, before the handover or after the end.
    fn announce(&self, event: impl FnOnce(RequestId) -> FillingEvent) -> Option<Ticket<'_>> {
        if !matches!(&*self.state.borrow(), FillingState::Filling(_)) {
            return None;
        }
        let id = RequestId(self.next_request.get());
        self.next_request.set(id.0 + 1);
        let state = Rc::<TicketState>::default();
        self.tickets.borrow_mut().insert(id, Rc::clone(&state));
        let ticket = Ticket { filling: self, id, state };
        self.event(event(id));
        Some(ticket)
    }

    fn is_waiting(&self) -> bool {
        matches!(&*self.state.borrow(), FillingState::Waiting(_))
    }

    /// Fails if the volume has gone back: its missing blocks are not available here, and the gate asks the present owner.
    fn check_still_here(&self) -> Result<(), IoError> {
        match &*self.state.borrow() {
            FillingState::Left => Err(IoError::Closed),
            FillingState::Waiting(_) | FillingState::Filling(_) => Ok(()),
        }
    }

    async fn read_here(&self, offset: u64, buffer: Buffer) -> Result<Buffer, IoError> {
        let range = ByteRange::new(offset, buffer.len() as u64);
        if self.is_waiting() {
            // A waiting VM reads its disks when it starts, while the source still owns the volume (design §5.10).
            return self.reservoir.urgent.read(offset, buffer).await;
        }
        self.check_still_here()?;
        let mut passed = Vec::new();
        if range.length > 0
            && let Some(ticket) = self.announce(|request| FillingEvent::ReadArrived { request, range })
        {
            match ticket.word().await {
                Word::Left => return Err(IoError::Closed),
                Word::Refused(why) => {
                    let errno = match why {
                        Refusal::Unreadable => Errno::IO,
                        Refusal::Late => Errno::TIMEDOUT,
                    };
                    return Err(IoError::os("read what only the former host has", errno));
                }
                Word::Admitted | Word::Written | Word::Flushed(_) => passed = ticket.state.passed.take(),
            }
        }
        let mut read = self.store.read(offset, buffer).await?;
        for (start, part) in passed {
            put(&mut read, offset, start, &part);
        }
        Ok(read)
    }

    async fn change_here(&self, change: Change) -> Result<(), IoError> {
        let (range, durability) = (change.range(), change.durability());
        if self.is_waiting() {
            return Err(IoError::ReadOnly);
        }
        self.check_still_here()?;
        let Some(ticket) = self.announce_change(range) else { return self.store.change(change).await };
        if let Word::Left = ticket.word().await {
            return Err(IoError::Closed);
        }
        let result = self.store.change(change).await;
        let ended = result.map_err(|_| StoreFault);
        self.event(FillingEvent::WriteEnded { request: ticket.id, result: ended });
        // N.B. Answered only once a restart would know of the write.
        if let Word::Left = ticket.word().await {
            return Err(IoError::Closed);
        }
        result?;
        let unrecorded = match &*self.state.borrow() {
            FillingState::Filling(machine) => machine.is_unrecorded(range),
            _ => false,
        };
        if durability == Durability::Durable && unrecorded {
            // N.B. the data is durable, but its presence is not.
            return self.flush_here().await;
        }
        Ok(())
    }

    fn announce_change(&self, range: ByteRange) -> Option<Ticket<'_>> {
        if range.length == 0 {
            return None;
        }
        self.announce(|request| FillingEvent::WriteArrived { request, range })
    }

    async fn flush_here(&self) -> Result<(), IoError> {
        self.check_still_here()?;
        match self.announce(|request| FillingEvent::FlushArrived { request }) {
            None => self.store.flush().await,
            Some(ticket) => match ticket.word().await {
                Word::Flushed(Err(StoreFault)) => {
                    Err(IoError::os("flush a volume that is being filled", Errno::IO))
                }
                Word::Left => Err(IoError::Closed),
                _ => Ok(()),
            },
        }
    }

    async fn describe(&self, range: ByteRange) -> Result<Vec<Extent>, IoError> {
        if self.is_waiting() {
            return self.reservoir.background.allocation(range).await;
        }
        self.check_still_here()?;
        // N.B. Missing blocks are read before the store is queried: blocks that arrive in between count as data either way.
        let missing = match &*self.state.borrow() {
            FillingState::Filling(machine) => machine.missing_in(range),
            _ => Vec::new(),
        };
        let here = self.store.allocation(range).await?;
        Ok(with_data(&here, &missing))
    }
}

impl BlockDevice for FillingStore {
    /// As the store's, but in whole units: missing parts of a unit are not assembled here.
    fn geometry(&self) -> Geometry {
        let geometry = self.store.geometry();
        Geometry { alignment: geometry.alignment.max(BlockSize::MIN_BYTES), ..geometry }
    }

    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(self.read_here(offset, buffer))
    }

    fn change(&self, change: Change) -> IoFuture<'_, ()> {
        Box::pin(self.change_here(change))
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(self.flush_here())
    }

    fn zeroes_fast(&self, mode: ZeroMode) -> bool {
        self.store.zeroes_fast(mode)
    }

    /// Reports missing blocks as data: a backup or a copy must not take them for holes.
    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        Box::pin(self.describe(range))
    }

    /// `None` while blocks are missing: new blocks could not be told from missing ones.
    fn growth(&self) -> Option<&dyn Growth> {
        if self.is_whole() { self.store.growth() } else { None }
    }
}

impl Ticket<'_> {
    fn word(&self) -> impl Future<Output = Word> + '_ {
        poll_fn(|context| match self.state.answer.take() {
            Some(word) => Poll::Ready(word),
            None => {
                self.state.waiter.set(Some(context.waker().clone()));
                Poll::Pending
            }
        })
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        if self.filling.tickets.borrow_mut().remove(&self.id).is_some() {
            // No effect if the guest has gone, or the request was admitted.
            self.filling.event(FillingEvent::Withdrawn { request: self.id });
        }
    }
}

/// Puts the bytes at `start` of the volume into a buffer that begins at `offset` of it. The part may be larger.
fn put(buffer: &mut Buffer, offset: u64, start: u64, part: &Buffer) {
    let (from, to) = (start.saturating_sub(offset), offset.saturating_sub(start));
    let (from, to) = (usize::try_from(from).unwrap_or(usize::MAX), usize::try_from(to).unwrap_or(usize::MAX));
    let part = part.as_slice().get(to..).unwrap_or_default();
    if !buffer.is_unique() {
        *buffer = Buffer::copy_of(buffer.as_slice());
    }
    let target = buffer.as_mut_slice().and_then(|bytes| bytes.get_mut(from..)).unwrap_or_default();
    let length = target.len().min(part.len());
    target[..length].copy_from_slice(&part[..length]);
}

fn with_data(extents: &[Extent], missing: &[ByteRange]) -> Vec<Extent> {
    let mut described = Vec::new();
    for extent in extents {
        let mut offset = extent.range.offset;
        for part in missing.iter().filter(|part| part.overlaps(&extent.range)) {
            let (start, end) = (part.offset.max(offset), part.end().min(extent.range.end()));
            push_extent(&mut described, ByteRange::new(offset, start - offset), extent.kind);
            push_extent(&mut described, ByteRange::new(start, end - start), ExtentKind::Data);
            offset = end;
        }
        push_extent(&mut described, ByteRange::new(offset, extent.range.end() - offset), extent.kind);
    }
    described
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_described_as_data() {
        let range = ByteRange::new;
        let extents = [
            Extent { range: range(0, 10), kind: ExtentKind::Hole },
            Extent { range: range(10, 10), kind: ExtentKind::Data },
        ];
        let described = with_data(&extents, &[range(2, 2), range(6, 8)]);
        let described: Vec<_> =
            described.iter().map(|extent| (extent.range.offset, extent.range.length, extent.kind)).collect();
        let (hole, data) = (ExtentKind::Hole, ExtentKind::Data);
        assert_eq!(described, [(0, 2, hole), (2, 2, data), (4, 2, hole), (6, 14, data)]);
    }
}
