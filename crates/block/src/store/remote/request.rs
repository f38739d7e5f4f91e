//! Requests to a server, and their encoding.

use nbd_protocol::{RequestHeader, command, command_flag, error, transmission_flag};
use rustix::io::Errno;

use super::terms::Terms;
use crate::buffer::Buffer;
use crate::change::Change;
use crate::device::{ByteRange, Durability, ZeroMode};
use crate::error::IoError;

/// The limit of zeroes sent at a time to a server that cannot zero, in bytes.
pub(super) const ZERO_PAYLOAD_MAX: u32 = 256 << 10;
/// Longest range to zero at a time, in bytes: even a server that writes the zeroes answers well before any deadline.
const ZERO_LENGTH_MAX: u32 = 64 << 20;
/// Longest range that a server is asked to describe at a time, in bytes. Larger ones are split.
pub(super) const DESCRIBE_LENGTH_MAX: u32 = 1 << 30;

#[derive(Clone, Debug)]
pub(super) enum Request {
    /// Reads a range; at most [`Terms::payload_max`] bytes.
    Read(ByteRange),
    /// Describes the allocation of a range; at most [`DESCRIBE_LENGTH_MAX`] bytes.
    Describe(ByteRange),
    Flush,
    /// Changes the content: bytes of at most [`Terms::payload_max`], or at most [`zero_length_max`] zeroes. It can be repeated.
    Change(Change),
}

pub(super) fn zero_length_max(terms: &Terms) -> u64 {
    let by_payload = ZERO_PAYLOAD_MAX.min(terms.payload_max);
    u64::from(if terms.has(transmission_flag::SEND_WRITE_ZEROES) { ZERO_LENGTH_MAX } else { by_payload })
}

pub(super) fn weight(change: &Change) -> usize {
    match change {
        Change::Write(_, data, _) => data.memory_length(),
        Change::Discard(_) | Change::Zero(..) => 0,
    }
}

impl Request {
    pub(super) fn operation(&self) -> &'static str {
        match self {
            Self::Read(_) => "read",
            Self::Describe(_) => "describe",
            Self::Flush => "flush",
            Self::Change(Change::Write(..)) => "write",
            Self::Change(Change::Discard(_) | Change::Zero(..)) => "zero",
        }
    }

    /// The command, but for its cookie, and what follows it; `zeroes` are at least [`ZERO_PAYLOAD_MAX`] zero bytes.
    pub(super) fn encode(&self, terms: &Terms, zeroes: &Buffer) -> (RequestHeader, Option<Buffer>) {
        let has_fua = terms.has(transmission_flag::SEND_FUA);
        let has_zeroes = terms.has(transmission_flag::SEND_WRITE_ZEROES);
        let (command, mut flags, range, payload) = match self {
            Self::Read(range) => (command::READ, 0, *range, None),
            Self::Describe(range) => (command::BLOCK_STATUS, 0, *range, None),
            Self::Flush => (command::FLUSH, 0, ByteRange::new(0, 0), None),
            Self::Change(change) => {
                let range = change.range();
                match change {
                    Change::Write(_, data, _) => (command::WRITE, 0, range, Some(data.clone())),
                    Change::Zero(_, ZeroMode::KeepAllocated, _) if has_zeroes => {
                        (command::WRITE_ZEROES, command_flag::NO_HOLE, range, None)
                    }
                    Change::Discard(_) | Change::Zero(..) if has_zeroes => {
                        (command::WRITE_ZEROES, 0, range, None)
                    }
                    Change::Discard(_) | Change::Zero(..) => {
                        (command::WRITE, 0, range, Some(zeroes.slice(0, range.length as usize)))
                    }
                }
            }
        };
        let is_durable = matches!(self, Self::Change(change) if change.durability() == Durability::Durable);
        if is_durable && has_fua {
            flags |= command_flag::FUA;
        }
        // Every request was cut to less than 4 GiB.
        let ByteRange { offset, length } = range;
        let payload_length = payload.as_ref().map_or(0, |payload| payload.len() as u32);
        (RequestHeader { flags, command, cookie: 0, offset, length, payload_length }, payload)
    }

    pub(super) fn failure(&self, code: u32) -> IoError {
        let errno = match code {
            error::EPERM => Errno::PERM,
            error::ENOMEM => Errno::NOMEM,
            error::EINVAL => Errno::INVAL,
            error::ENOSPC => Errno::NOSPC,
            error::EOVERFLOW => Errno::OVERFLOW,
            error::ENOTSUP => Errno::OPNOTSUPP,
            error::ESHUTDOWN => Errno::SHUTDOWN,
            _ => Errno::IO,
        };
        IoError::os(self.operation(), errno)
    }
}

pub(super) const DISCONNECT: RequestHeader =
    RequestHeader { flags: 0, command: command::DISC, cookie: 0, offset: 0, length: 0, payload_length: 0 };
