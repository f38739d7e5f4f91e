//! An export on a server, connected and checked, before a lane serves it.

use std::fmt;
use std::time::Duration;

use nbd_protocol::{NbdUri, transmission_flag};

use super::dial::{Dialer, Lines};
use super::error::RemoteError;
use crate::store::image::Access;

/// The limits of a remote store.
#[derive(Clone, Copy, Debug)]
pub struct RemoteOptions {
    /// The time limit of each attempt to connect and negotiate.
    pub connect_timeout: Duration,
    /// The longest wait for an answer, reconnections included, before the request fails.
    pub answer_deadline: Duration,
    /// The limit of connections, if the server takes several.
    pub connections_max: usize,
}

impl RemoteOptions {
    /// The options of the product.
    pub const STANDARD: Self = Self {
        // A server that negotiates more slowly would not serve a guest either.
        connect_timeout: Duration::from_secs(5),
        // Linux guests give a SCSI disk 30 s: a later answer is useless.
        answer_deadline: Duration::from_secs(30),
        // Copying tools have found four to fill a 10 Gbit/s link.
        connections_max: 4,
    };
}

/// An export with open connections.
pub struct RemoteImage {
    pub(super) dialer: Box<Dialer>,
    pub(super) lines: Box<Lines>,
    size: u64,
}

impl RemoteImage {
    /// Connects to an export. Blocks: for a control thread.
    ///
    /// An export cannot be locked. Its server decides whether others may use it at the same time.
    pub fn connect(uri: &NbdUri, access: Access) -> Result<Self, RemoteError> {
        Self::connect_with(uri, access, RemoteOptions::STANDARD)
    }

    /// Connects like [`RemoteImage::connect`], with other limits.
    pub fn connect_with(uri: &NbdUri, access: Access, options: RemoteOptions) -> Result<Self, RemoteError> {
        let dialer = Box::new(Dialer { uri: uri.clone(), access, options });
        let lines = Box::new(dialer.dial()?);
        let size = lines.terms().size;
        Ok(Self { dialer, lines, size })
    }

    /// Returns the address of the export.
    pub fn uri(&self) -> &NbdUri {
        &self.dialer.uri
    }

    /// Returns its size in bytes, or what it was narrowed to.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns the use that it was opened for.
    pub fn access(&self) -> Access {
        self.dialer.access
    }

    /// Returns the abilities of the server.
    pub fn abilities(&self) -> Abilities {
        let terms = self.lines.terms();
        Abilities {
            durable_writes: terms.has(transmission_flag::SEND_FUA),
            trim: terms.has(transmission_flag::SEND_TRIM),
            write_zeroes: terms.has(transmission_flag::SEND_WRITE_ZEROES),
            structured_replies: terms.structured,
            allocation: terms.allocation.is_some(),
            minimum_block_size: terms.minimum_block_size,
            payload_max: terms.payload_max,
            connections: 1 + self.lines.further.len(),
        }
    }

    /// Checks that it can hold a volume of `needed` bytes.
    ///
    /// # Errors
    /// [`RemoteError::TooSmall`].
    pub fn check_holds(&self, needed: u64) -> Result<(), RemoteError> {
        if self.size < needed {
            return Err(RemoteError::TooSmall { uri: self.dialer.uri.to_string(), size: self.size, needed });
        }
        Ok(())
    }

    /// Uses its first `size` bytes only, for a volume on a larger export. The rest is never touched.
    ///
    /// # Errors
    /// [`RemoteError::TooSmall`], or [`RemoteError::OddSize`] if the server cannot address the end.
    pub fn narrowed_to(mut self, size: u64) -> Result<Self, RemoteError> {
        self.check_holds(size)?;
        let minimum = self.abilities().minimum_block_size;
        if !size.is_multiple_of(u64::from(minimum)) {
            return Err(RemoteError::OddSize { uri: self.dialer.uri.to_string(), size, minimum });
        }
        self.size = size;
        Ok(self)
    }
}

impl fmt::Debug for RemoteImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RemoteImage({}, {} bytes)", self.dialer.uri, self.size)
    }
}

/// The abilities of a server; the store replaces missing ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abilities {
    /// Writes that are durable when they are answered (FUA). Otherwise a flush follows.
    pub durable_writes: bool,
    /// Trim. It is not used, because it need not zero; it shows that zeroing frees space.
    pub trim: bool,
    /// Zeroing without sending zeroes. Otherwise zeroes are sent.
    pub write_zeroes: bool,
    /// Replies in several chunks.
    pub structured_replies: bool,
    /// Queries of allocation. Otherwise everything counts as allocated.
    pub allocation: bool,
    /// Smallest request in bytes.
    pub minimum_block_size: u32,
    /// Longest read or write in bytes.
    pub payload_max: u32,
    /// The number of open connections.
    pub connections: usize,
}
