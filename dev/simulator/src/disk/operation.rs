//! One request of a disk: its kind, its end, and its effect on the medium.

use std::cell::Cell;
use std::rc::Rc;
use std::task::Waker;
use std::time::Duration;

use block::{Buffer, ByteRange, Durability, Extent, IoError, ZeroMode};
use rustix::io::Errno;

use super::medium::{Medium, sectors};
use crate::checker::owner::{Access, Permission};
use crate::faults::Fault;
use crate::world::Era;

pub(super) struct Operation {
    pub(super) what: What,
    pub(super) began: Duration,
    pub(super) era: Era,
    /// When it ends; `None`: when it is released.
    pub(super) ends: Option<Duration>,
    pub(super) fate: Fate,
    pub(super) asked_by: Permission,
    /// The result's place; `None` once it has no caller.
    pub(super) slot: Option<Rc<Slot>>,
}

pub(super) enum What {
    Read(u64, Buffer),
    Write {
        first_sector: usize,
        tokens: Vec<u64>,
        durability: Durability,
    },
    Zero {
        range: ByteRange,
        unmap: ZeroMode,
        durability: Durability,
    },
    /// The number of log entries when it came.
    Flush {
        entries: u64,
    },
    Allocation(ByteRange),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Succeeds,
    /// It fails after this percentage was applied.
    Fails {
        errno: Errno,
        applied_percent: u64,
        struck_by: Fault,
    },
}

#[derive(Default)]
pub(super) struct Slot {
    pub(super) result: Cell<Option<Result<Answer, IoError>>>,
    pub(super) waker: Cell<Option<Waker>>,
}

pub(super) enum Answer {
    Nothing,
    Buffer(Buffer),
    Extents(Vec<Extent>),
}

impl Operation {
    /// Returns whether the result is awaited: the daemon lives and the future was not dropped.
    pub(super) fn is_awaited(&self) -> bool {
        self.slot.as_ref().is_some_and(|slot| Rc::strong_count(slot) > 1)
    }
}

pub(super) fn apply(medium: &mut Medium, operation: &Operation, applied_percent: u64) {
    let part = |sectors: usize| sectors * applied_percent as usize / 100;
    match &operation.what {
        What::Write { first_sector, tokens, durability } => {
            medium.write(*first_sector, &tokens[..part(tokens.len())], *durability);
        }
        What::Zero { range, unmap, durability } => {
            let (first, count) = sectors(*range);
            medium.zero(first, part(count), *unmap, *durability);
        }
        What::Flush { entries } if operation.fate == Fate::Succeeds => medium.flush(*entries),
        // A target that cannot flush has dropped the data, and reports that once.
        What::Flush { entries } if operation.asked_by == Permission::Target => medium.drop_volatile(*entries),
        // So has an owner's disk: its data cannot be copied again, and may vanish at any time.
        What::Flush { entries } if operation.asked_by == Permission::Owner => medium.lose(*entries),
        What::Flush { .. } | What::Read(..) | What::Allocation(_) => {}
    }
}

pub(super) fn answer(medium: &mut Medium, what: &mut What) -> Answer {
    match what {
        What::Read(offset, buffer) => {
            let mut buffer = std::mem::replace(buffer, Buffer::zeroed(0));
            medium.read(*offset, &mut buffer);
            Answer::Buffer(buffer)
        }
        What::Allocation(range) => Answer::Extents(medium.allocation(*range)),
        _ => Answer::Nothing,
    }
}

impl What {
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Read(..) => "read",
            Self::Write { .. } => "write",
            Self::Zero { .. } => "zero",
            Self::Flush { .. } => "flush",
            Self::Allocation(_) => "allocation",
        }
    }

    pub(super) fn access(&self) -> Access {
        match self {
            Self::Read(..) | Self::Allocation(_) => Access::Read,
            Self::Write { .. } | Self::Zero { .. } => Access::Write,
            Self::Flush { .. } => Access::Flush,
        }
    }
}

impl Slot {
    pub(super) fn answer(&self, result: Result<Answer, IoError>) {
        self.result.set(Some(result));
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}
