//! XDR (RFC 4506), as far as the used calls and answers of libvirt need it.

use super::error::LibvirtError;

/// Longest string that is read: libvirt's own limit (`REMOTE_STRING_MAX`, 4 MiB).
const STRING_BYTES_MAX: usize = 4 << 20;
const UNIT: usize = 4;

#[derive(Debug, Default)]
pub(super) struct Encoder {
    bytes: Vec<u8>,
}

impl Encoder {
    pub(super) fn unsigned(mut self, number: u32) -> Self {
        self.bytes.extend(number.to_be_bytes());
        self
    }

    pub(super) fn int(self, number: i32) -> Self {
        self.unsigned(u32::from_be_bytes(number.to_be_bytes()))
    }

    pub(super) fn fixed(mut self, bytes: &[u8]) -> Self {
        self.bytes.extend(bytes);
        self.bytes.resize(self.bytes.len().next_multiple_of(UNIT), 0);
        self
    }

    pub(super) fn string(self, text: &str) -> Self {
        let length = u32::try_from(text.len()).unwrap_or(u32::MAX);
        self.unsigned(length).fixed(text.as_bytes())
    }

    /// Adds a string that might have been absent.
    pub(super) fn present_string(self, text: &str) -> Self {
        self.unsigned(1).string(text)
    }

    pub(super) fn finish(self) -> Vec<u8> {
        self.bytes
    }
}

/// Reads fields. Checks every length against the remaining bytes before it allocates.
#[derive(Debug)]
pub(super) struct Decoder<'a> {
    rest: &'a [u8],
}

impl<'a> Decoder<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub(super) fn fixed<const BYTES: usize>(&mut self) -> Result<[u8; BYTES], LibvirtError> {
        let (bytes, rest) = self.rest.split_first_chunk::<BYTES>().ok_or_else(short)?;
        self.rest = rest;
        Ok(*bytes)
    }

    pub(super) fn unsigned(&mut self) -> Result<u32, LibvirtError> {
        self.fixed().map(u32::from_be_bytes)
    }

    pub(super) fn int(&mut self) -> Result<i32, LibvirtError> {
        self.fixed().map(i32::from_be_bytes)
    }

    pub(super) fn hyper(&mut self) -> Result<u64, LibvirtError> {
        self.fixed().map(u64::from_be_bytes)
    }

    pub(super) fn string(&mut self) -> Result<String, LibvirtError> {
        let length = self.unsigned()? as usize;
        if length > STRING_BYTES_MAX {
            return Err(LibvirtError::Malformed("a string that is longer than libvirt sends"));
        }
        let (text, _) = self.rest.split_at_checked(length).ok_or_else(short)?;
        let padded = length.next_multiple_of(UNIT).min(self.rest.len());
        self.rest = self.rest.get(padded..).ok_or_else(short)?;
        Ok(String::from_utf8_lossy(text).into_owned())
    }

    pub(super) fn optional_string(&mut self) -> Result<Option<String>, LibvirtError> {
        if self.unsigned()? == 0 { Ok(None) } else { self.string().map(Some) }
    }
}

fn short() -> LibvirtError {
    LibvirtError::Malformed("an answer that ends too soon")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_written_is_padded_and_read_back() {
        let bytes = Encoder::default().int(-1).present_string("abcde").fixed(&[7; 16]).unsigned(9).finish();
        assert_eq!(bytes.len(), 4 + 4 + 4 + 8 + 16 + 4);
        let mut decoder = Decoder::new(&bytes);
        assert_eq!(decoder.int().unwrap(), -1);
        assert_eq!(decoder.optional_string().unwrap().as_deref(), Some("abcde"));
        assert_eq!(decoder.fixed::<16>().unwrap(), [7; 16]);
        assert_eq!(decoder.unsigned().unwrap(), 9);
        assert!(decoder.unsigned().is_err());
    }

    proptest! {
        #[test]
        fn whatever_comes_is_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let mut decoder = Decoder::new(&bytes);
            while decoder.optional_string().is_ok() && !decoder.rest.is_empty() {}
            let long = Encoder::default().unsigned(u32::MAX).fixed(&bytes).finish();
            prop_assert!(Decoder::new(&long).string().is_err());
        }
    }
}
