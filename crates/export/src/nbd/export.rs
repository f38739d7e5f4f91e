//! Exports: devices under names that clients connect to.

use std::rc::Rc;

use block::{BlockDevice, Geometry};

use crate::nbd::caller::Caller;
use crate::nbd::protocol::negotiation::{BlockSizes, ExportInfo};
use crate::nbd::protocol::{
    MINIMUM_BLOCK_SIZE_MAX, PAYLOAD_LENGTH_MAX, STRING_LENGTH_MAX, transmission_flag,
};

pub use crate::nbd::protocol::ReplyStyle;

/// A device that clients can connect to.
pub struct Export {
    /// Name that clients ask for; at most 4,096 bytes.
    pub name: String,
    /// Human-readable text; may be empty.
    pub description: String,
    /// The device for requests: a flush covers the writes of all connections.
    pub device: Rc<dyn BlockDevice>,
    /// Makes the device for one connection; `None`: all use `device`.
    pub connect: Option<Connect>,
    /// What clients may do.
    pub access: Access,
}

/// Makes the device for one connection, given its client.
pub type Connect = Box<dyn Fn(Caller) -> Rc<dyn BlockDevice>>;

/// What the clients of an export may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Clients may only read, whatever the device supports.
    ReadOnly,
    /// Clients may read, and write if the device can.
    ReadWrite,
}

impl Export {
    pub(crate) fn device_for(&self, caller: Caller) -> Rc<dyn BlockDevice> {
        self.connect.as_ref().map_or_else(|| Rc::clone(&self.device), |connect| connect(caller))
    }

    /// Describes the export to a client that wants this reply style.
    pub fn offer(&self, replies: ReplyStyle) -> Offer {
        let geometry = self.device.geometry();
        Offer::new(&geometry, self.access, replies)
    }
}

/// Description of an export for a client, by which its requests are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Size in bytes, when the export was described; requests are checked against the size at that time.
    pub size: u64,
    /// Transmission flags of the export.
    pub flags: u16,
    /// Requests are multiples of this many bytes.
    pub block_size_minimum: u32,
    /// Requests that are multiples of this many bytes need no read-modify-write.
    pub block_size_preferred: u32,
    /// The largest read or write, in bytes.
    pub block_size_maximum: u32,
    /// How requests and replies are laid out.
    pub replies: ReplyStyle,
}

/// Block size that every store serves without read-modify-write.
const PREFERRED_BLOCK_SIZE: u32 = 4096;

impl Offer {
    /// Makes the offer for a device. Nothing is advertised that would then be refused.
    pub fn new(geometry: &Geometry, access: Access, replies: ReplyStyle) -> Self {
        use transmission_flag::*;
        let mut flags = HAS_FLAGS | SEND_FLUSH | SEND_FUA | CAN_MULTI_CONN | SEND_CACHE;
        if access == Access::ReadOnly || geometry.read_only {
            flags |= READ_ONLY;
        } else {
            // The device decides at each request whether zeroing is fast: a volume may move to another store.
            flags |= SEND_WRITE_ZEROES | SEND_FAST_ZERO;
            if geometry.discards {
                flags |= SEND_TRIM;
            }
        }
        if replies != ReplyStyle::Simple {
            flags |= SEND_DF;
        }
        let minimum = geometry.alignment.min(MINIMUM_BLOCK_SIZE_MAX);
        Self {
            size: geometry.size,
            flags,
            block_size_minimum: minimum,
            block_size_preferred: PREFERRED_BLOCK_SIZE.max(minimum),
            block_size_maximum: PAYLOAD_LENGTH_MAX,
            replies,
        }
    }

    /// Returns the offer for a client that may name contexts in the payload of `BLOCK_STATUS`.
    #[must_use]
    pub fn with_status_payload(self) -> Self {
        Self { flags: self.flags | transmission_flag::BLOCK_STATUS_PAYLOAD, ..self }
    }

    /// Size and transmission flags.
    pub(crate) fn export_info(&self) -> ExportInfo {
        ExportInfo { size: self.size, flags: self.flags }
    }

    /// Which lengths are taken.
    pub(crate) fn block_sizes(&self) -> BlockSizes {
        BlockSizes {
            minimum: self.block_size_minimum,
            preferred: self.block_size_preferred,
            maximum: self.block_size_maximum,
        }
    }

    /// Returns whether all of `flags` are offered.
    pub fn has(&self, flags: u16) -> bool {
        self.flags & flags == flags
    }
}

/// The exports of one server.
#[derive(Default)]
pub struct Exports {
    /// The first is also found by the empty name.
    list: Vec<Rc<Export>>,
}

impl Exports {
    /// Makes a set of exports. The first is the default, which the empty name selects.
    ///
    /// Names and descriptions longer than the protocol allows are cut at a character boundary.
    pub fn new(exports: impl IntoIterator<Item = Export>) -> Self {
        let list = exports
            .into_iter()
            .map(|mut export| {
                shorten(&mut export.name);
                shorten(&mut export.description);
                Rc::new(export)
            })
            .collect();
        Self { list }
    }

    /// Finds an export by its name.
    pub fn find(&self, name: &str) -> Option<&Rc<Export>> {
        let named = self.list.iter().find(|export| export.name == name);
        named.or_else(|| if name.is_empty() { self.list.first() } else { None })
    }

    /// Returns all exports, the default first.
    pub fn iter(&self) -> impl Iterator<Item = &Rc<Export>> {
        self.list.iter()
    }
}

fn shorten(text: &mut String) {
    let mut end = text.len().min(STRING_LENGTH_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
}
