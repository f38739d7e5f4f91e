//! A request that changes a volume, as one thing: what is asked of a store, of an owner on another host, or again.

use block::{BlockDevice, Buffer, ByteRange, Durability, IoFuture, ZeroMode};

use crate::fence::Fence;

/// What is to be changed.
#[derive(Clone)]
pub(crate) enum Change {
    /// Bytes are written, from an offset on.
    Write(u64, Buffer, Durability),
    /// A range reads as zeroes, and its space is given back.
    Discard(ByteRange),
    /// A range reads as zeroes.
    Zero(ByteRange, ZeroMode, Durability),
}

/// What became of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Changed {
    /// It is made.
    Done,
    /// It is not, and will not be: it bears another fence than this one, which is the present one.
    Refused(Fence),
}

impl Change {
    /// What it changes.
    pub(crate) fn range(&self) -> ByteRange {
        match self {
            Self::Write(offset, data, _) => ByteRange::new(*offset, data.len() as u64),
            Self::Discard(range) | Self::Zero(range, ..) => *range,
        }
    }

    /// How many parts it has of so many bytes: of one for which no memory is held, for the others are short.
    pub(crate) fn steps(&self, bytes: u64) -> u64 {
        match self {
            Self::Write(..) => 1,
            Self::Discard(range) | Self::Zero(range, ..) => range.length.div_ceil(bytes).max(1),
        }
    }

    /// One of those parts.
    pub(crate) fn step(&self, bytes: u64, number: u64) -> Self {
        let part = |range: &ByteRange| {
            let start = number * bytes;
            ByteRange::new(range.offset + start, bytes.min(range.length.saturating_sub(start)))
        };
        match self {
            Self::Write(offset, data, durability) => Self::Write(*offset, data.clone(), *durability),
            Self::Discard(range) => Self::Discard(part(range)),
            Self::Zero(range, mode, durability) => Self::Zero(part(range), *mode, *durability),
        }
    }

    /// Has a device make the change.
    pub(crate) fn apply(self, device: &dyn BlockDevice) -> IoFuture<'_, ()> {
        match self {
            Self::Write(offset, data, durability) => device.write(offset, data, durability),
            Self::Discard(range) => device.discard(range),
            Self::Zero(range, mode, durability) => device.write_zeroes(range, mode, durability),
        }
    }
}
