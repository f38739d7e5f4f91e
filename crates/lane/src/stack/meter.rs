//! Counts guests' requests and their latencies, at the top of a connection's path into a volume, and logs store failures.
//!
//! The client session below it is part of the same future, so a request takes one allocation for both.
//!
//! Times are those of the executor's turns: the clock is not read for each request, and the duration of a turn is not counted.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use block::{BlockDevice, Buffer, ByteRange, Change, Extent, Geometry, Handle, IoError, IoFuture, ZeroMode};
use pacer::RequestClass;

use crate::fault_log::FaultLog;
use crate::stack::{ClientSession, Measures, Volume};

/// Counts of guests' requests since the lane began.
#[derive(Debug, Default)]
pub struct Counters {
    /// Reads that have ended.
    pub reads: Cell<u64>,
    /// Writes, discards and zeroing that have ended.
    pub writes: Cell<u64>,
    /// Flushes that have ended.
    pub flushes: Cell<u64>,
    /// Bytes of reads that succeeded.
    pub bytes_read: Cell<u64>,
    /// Bytes of writes that succeeded.
    pub bytes_written: Cell<u64>,
    /// Requests that failed with an error.
    pub errors: Cell<u64>,
    /// The error of the latest failure.
    pub last_error: RefCell<Option<IoError>>,
    /// Requests that have not ended.
    pub in_flight: Cell<usize>,
    /// What guests have written lately.
    pub writing: RefCell<forecast::Writing>,
}

pub(crate) struct Meter {
    below: ClientSession,
    volume: Rc<Volume>,
    measures: Measures,
    faults: Rc<FaultLog>,
    handle: Handle,
}

impl Meter {
    pub(crate) fn new(
        below: ClientSession,
        volume: Rc<Volume>,
        measures: Measures,
        faults: Rc<FaultLog>,
        handle: Handle,
    ) -> Self {
        Self { below, volume, measures, faults, handle }
    }

    async fn counted<T>(
        &self,
        (kind, class): (&Cell<u64>, RequestClass),
        bytes: Option<(&Cell<u64>, u64)>,
        (request, range): (impl Future<Output = Result<T, IoError>>, ByteRange),
    ) -> Result<T, IoError> {
        let Measures { counters, pulse, gauge } = &self.measures;
        counters.in_flight.set(counters.in_flight.get() + 1);
        let arrived = self.handle.now();
        // What another host serves says nothing about the disks of this one.
        let ticket = self.volume.is_here().then(|| gauge.arrived(arrived));
        let result = request.await;
        if let Some(ticket) = ticket {
            ticket.ended(self.handle.now(), class);
        }
        counters.in_flight.set(counters.in_flight.get() - 1);
        // Before it is counted, so that a window which is over does not include it.
        pulse.note(arrived, self.handle.now());
        kind.set(kind.get() + 1);
        match (&result, bytes) {
            (Ok(_), Some((sum, bytes))) => sum.set(sum.get() + bytes),
            (Ok(_), None) => {}
            (Err(error), _) => {
                counters.errors.set(counters.errors.get() + 1);
                *counters.last_error.borrow_mut() = Some(*error);
                self.faults.note(self.handle.now(), range, *error);
            }
        }
        result
    }
}

impl BlockDevice for Meter {
    fn geometry(&self) -> Geometry {
        self.below.geometry()
    }

    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
        let range = ByteRange::new(offset, buffer.len() as u64);
        let counters = &self.measures.counters;
        let bytes = Some((&counters.bytes_read, range.length));
        let kind = (&counters.reads, RequestClass::read(range.length));
        let request = self.below.reading(offset, buffer);
        Box::pin(self.counted(kind, bytes, (request, range)))
    }

    fn change(&self, change: Change) -> IoFuture<'_, ()> {
        let range = change.range();
        let counters = &self.measures.counters;
        let bytes = matches!(change, Change::Write(..)).then_some((&counters.bytes_written, range.length));
        let kind = (&counters.writes, RequestClass::write(range.length));
        counters.writing.borrow_mut().note(self.handle.now(), range.offset, range.length);
        let request = self.below.changing(change);
        Box::pin(self.counted(kind, bytes, (request, range)))
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        let whole = ByteRange::new(0, self.below.geometry().size);
        let kind = (&self.measures.counters.flushes, RequestClass::FLUSH);
        Box::pin(self.counted(kind, None, (self.below.flushing(), whole)))
    }

    fn zeroes_fast(&self, mode: ZeroMode) -> bool {
        self.below.zeroes_fast(mode)
    }

    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        self.below.allocation(range)
    }
}
