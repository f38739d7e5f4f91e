//! Requests without an answer.
//!
//! A request keeps its slot until it is answered. The lower half of its cookie is the slot, the upper half the sequence number,
//! by which requests are sent again in their order.

use std::time::{Duration, Instant};

use nbd_protocol::{RequestHeader, command, command_flag, error};

use super::{Completion, Errno, Operation, WriteDurability};

#[derive(Debug, Default)]
pub(super) struct InFlight {
    slots: Vec<Option<Waiting>>,
    free: Vec<u32>,
    sequence: u32,
}

#[derive(Debug)]
pub(super) struct Waiting {
    operation: Operation,
    token: u64,
    cookie: u64,
    submitted: Instant,
    /// Bytes of the read that have arrived, on this connection.
    bytes_received: usize,
    /// The first error that a chunk reported, on this connection.
    error: Option<Errno>,
}

impl InFlight {
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Adds a request and appends its bytes to `outgoing`.
    pub(super) fn add(&mut self, operation: Operation, token: u64, outgoing: &mut Vec<u8>) {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
        });
        self.sequence = self.sequence.wrapping_add(1);
        let cookie = u64::from(self.sequence) << 32 | u64::from(slot);
        let submitted = Instant::now();
        let waiting = Waiting { operation, token, cookie, submitted, bytes_received: 0, error: None };
        waiting.encode(outgoing);
        self.slots[slot as usize] = Some(waiting);
    }

    pub(super) fn get_mut(&mut self, cookie: u64) -> Option<&mut Waiting> {
        let slot = usize::try_from(cookie & u64::from(u32::MAX)).ok()?;
        self.slots.get_mut(slot)?.as_mut().filter(|waiting| waiting.cookie == cookie)
    }

    /// Removes an answered request and returns its completion.
    pub(super) fn finish(&mut self, cookie: u64, completed: Instant) -> Result<Completion, &'static str> {
        self.get_mut(cookie).ok_or("a reply to a request that is not in flight")?;
        let slot = (cookie & u64::from(u32::MAX)) as u32;
        let waiting = self.slots[slot as usize].take().ok_or("a reply to a request that is not in flight")?;
        self.free.push(slot);
        waiting.complete(completed)
    }

    /// Returns how long the oldest request has waited.
    pub(super) fn oldest_wait(&self) -> Duration {
        let oldest = self.slots.iter().flatten().map(|waiting| waiting.submitted).min();
        oldest.map_or(Duration::ZERO, |submitted| submitted.elapsed())
    }

    /// Appends every request to `outgoing` again, in the order of submission, for a new connection.
    pub(super) fn send_again(&mut self, outgoing: &mut Vec<u8>) {
        let newest = self.sequence;
        let mut waiting: Vec<&mut Waiting> = self.slots.iter_mut().flatten().collect();
        // Sorting by age is correct also when the sequence number wraps.
        waiting.sort_by_key(|waiting| {
            std::cmp::Reverse(newest.wrapping_sub(u32::try_from(waiting.cookie >> 32).unwrap_or(0)))
        });
        for waiting in waiting {
            waiting.bytes_received = 0;
            waiting.error = None;
            waiting.encode(outgoing);
        }
    }
}

impl Waiting {
    /// Returns the part of the read's buffer for `length` bytes at `offset` of the export.
    pub(super) fn peek(&mut self, offset: u64, length: usize) -> Result<&mut [u8], &'static str> {
        let Operation::Read { offset: start, buffer } = &mut self.operation else {
            return Err("data in the answer to a request that is no read");
        };
        let begin = offset.checked_sub(*start).and_then(|begin| usize::try_from(begin).ok());
        begin
            .and_then(|begin| buffer.get_mut(begin..begin.checked_add(length)?))
            .ok_or("data outside the range that was asked for")
    }

    /// Returns the part as [`Waiting::peek`], and counts its bytes as received.
    pub(super) fn receive(&mut self, offset: u64, length: usize) -> Result<&mut [u8], &'static str> {
        self.bytes_received += length;
        self.peek(offset, length)
    }

    /// Returns the range of a simple reply's data; `None` unless the request is a read.
    pub(super) fn read_range(&self) -> Option<(u64, usize)> {
        match &self.operation {
            Operation::Read { offset, buffer } => Some((*offset, buffer.len())),
            _ => None,
        }
    }

    /// Notes an error; the first one counts.
    pub(super) fn fail(&mut self, code: u32) {
        // Zero would mean success, but an error without a code is an error as well.
        self.error.get_or_insert(Errno(if code == 0 { error::EIO } else { code }));
    }

    fn complete(self, completed: Instant) -> Result<Completion, &'static str> {
        let Self { operation, token, submitted, bytes_received, error, .. } = self;
        if let (Operation::Read { buffer, .. }, None) = (&operation, error)
            && bytes_received != buffer.len()
        {
            return Err("a read was answered with more or less than was asked for");
        }
        Ok(Completion { token, operation, result: error.map_or(Ok(()), Err), submitted, completed })
    }

    fn encode(&self, outgoing: &mut Vec<u8>) {
        let mut header = |command, flags, offset, length: usize| {
            // Lengths were checked against limits below 4 GiB when the request was submitted.
            let (cookie, length) = (self.cookie, length as u64);
            let header = RequestHeader { flags, command, cookie, offset, length, payload_length: 0 };
            outgoing.extend_from_slice(&header.encode());
        };
        match &self.operation {
            Operation::Read { offset, buffer } => header(command::READ, 0, *offset, buffer.len()),
            Operation::Write { offset, data, durability } => {
                let flags = match durability {
                    WriteDurability::Volatile => 0,
                    WriteDurability::Durable => command_flag::FUA,
                };
                header(command::WRITE, flags, *offset, data.len());
                outgoing.extend_from_slice(data);
            }
            Operation::Flush => header(command::FLUSH, 0, 0, 0),
            Operation::Trim { offset, length } => header(command::TRIM, 0, *offset, *length as usize),
            Operation::WriteZeroes { offset, length } => {
                header(command::WRITE_ZEROES, 0, *offset, *length as usize);
            }
        }
    }
}
