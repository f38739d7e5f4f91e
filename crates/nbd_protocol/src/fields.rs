//! Big-endian numbers and texts, one after the other; `None` where there are no more.

use crate::STRING_LENGTH_MAX;

/// The part of a message that has not been decoded.
#[derive(Clone, Copy)]
pub(crate) struct Fields<'a>(pub(crate) &'a [u8]);

impl<'a> Fields<'a> {
    #[inline]
    fn array<const LENGTH: usize>(&mut self) -> Option<[u8; LENGTH]> {
        let (field, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*field)
    }

    #[inline]
    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    #[inline]
    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    #[inline]
    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    pub(crate) fn bytes(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    /// A string after its length.
    pub(crate) fn text(&mut self) -> Option<&'a str> {
        let length = self.u32()? as usize;
        as_text(self.bytes(length)?)
    }

    pub(crate) fn rest_as_text(&mut self) -> Option<&'a str> {
        as_text(std::mem::take(&mut self.0))
    }
}

/// Strings of the protocol are UTF-8 without NUL, and bounded.
fn as_text(bytes: &[u8]) -> Option<&str> {
    if bytes.len() > STRING_LENGTH_MAX || bytes.contains(&0) {
        return None;
    }
    str::from_utf8(bytes).ok()
}
