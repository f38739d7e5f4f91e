//! An export on a server, reached and judged, before a lane serves it.

use std::fmt;
use std::time::Duration;

use nbd_protocol::{NbdUri, transmission_flag};

use super::dial::{Dialer, Lines};
use super::error::RemoteError;
use crate::store::image::Access;

/// How a remote store behaves.
#[derive(Clone, Copy, Debug)]
pub struct RemoteOptions {
    /// How long connecting and negotiating may take, each time that it is tried.
    pub connect_timeout: Duration,
    /// How long a request may wait for its answer, reconnections included, before it fails.
    pub answer_deadline: Duration,
    /// Connections, where the server takes several. At least one is made.
    pub connections_max: usize,
}

impl RemoteOptions {
    /// What the product uses.
    pub const STANDARD: Self = Self {
        // A server that takes longer to say what it has will not serve a guest either.
        connect_timeout: Duration::from_secs(5),
        // Linux guests give a SCSI disk 30 s: an answer that comes later finds nobody.
        answer_deadline: Duration::from_secs(30),
        // Copying tools have found four to fill a 10 Gbit/s link.
        connections_max: 4,
    };
}

/// An export that is connected to.
pub struct RemoteImage {
    pub(super) dialer: Box<Dialer>,
    pub(super) lines: Box<Lines>,
    size: u64,
}

impl RemoteImage {
    /// Connects to an export. Blocks: for a control thread.
    ///
    /// Nobody can lock an export. Whether others may use it at the same time is up to its server.
    ///
    /// # Errors
    /// [`RemoteError`].
    pub fn connect(uri: &NbdUri, access: Access) -> Result<Self, RemoteError> {
        Self::connect_with(uri, access, RemoteOptions::STANDARD)
    }

    /// As [`RemoteImage::connect`], with other limits.
    ///
    /// # Errors
    /// [`RemoteError`].
    pub fn connect_with(uri: &NbdUri, access: Access, options: RemoteOptions) -> Result<Self, RemoteError> {
        let dialer = Box::new(Dialer { uri: uri.clone(), access, options });
        let lines = Box::new(dialer.dial()?);
        let size = lines.terms().size;
        Ok(Self { dialer, lines, size })
    }

    /// Where it is.
    pub fn uri(&self) -> &NbdUri {
        &self.dialer.uri
    }

    /// Its size in bytes, or what it was narrowed to.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// What may be done with it.
    pub fn access(&self) -> Access {
        self.dialer.access
    }

    /// What the server can do.
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

    /// Uses its first `size` bytes only: the volume on an export that is larger. What lies behind is never touched.
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

/// What a server can do; what it cannot is done in other ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abilities {
    /// Writes that are durable when they are answered (FUA). Otherwise a flush follows.
    pub durable_writes: bool,
    /// Trim. It is not used, because it need not zero; it tells that zeroing gives space back.
    pub trim: bool,
    /// Zeroing without sending zeroes. Otherwise zeroes are sent.
    pub write_zeroes: bool,
    /// Replies in chunks.
    pub structured_replies: bool,
    /// Telling what is allocated. Otherwise everything is.
    pub allocation: bool,
    /// Smallest request in bytes.
    pub minimum_block_size: u32,
    /// Longest read or write in bytes.
    pub payload_max: u32,
    /// Connections that are open.
    pub connections: usize,
}
