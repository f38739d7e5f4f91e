//! Headers of requests: the part before a payload.

use crate::{
    EXTENDED_REQUEST_LENGTH, EXTENDED_REQUEST_MAGIC, PAYLOAD_LENGTH_MAX, REQUEST_LENGTH, REQUEST_MAGIC,
    command, command_flag,
};

/// The layouts of requests and replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyStyle {
    /// A fixed header, followed by the data of a read.
    Simple,
    /// Typed chunks for everything that has a payload.
    Structured,
    /// The same chunks, with 64-bit lengths in their headers and in those of requests.
    Extended,
}

impl ReplyStyle {
    /// Returns the length of a request's header in bytes.
    pub const fn request_length(self) -> usize {
        match self {
            Self::Simple | Self::Structured => REQUEST_LENGTH,
            Self::Extended => EXTENDED_REQUEST_LENGTH,
        }
    }
}

/// A request as it is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// Flags of the command.
    pub flags: u16,
    /// Number of the command.
    pub command: u16,
    /// The number that the reply repeats.
    pub cookie: u64,
    /// Offset of the first byte.
    pub offset: u64,
    /// Number of affected bytes, or of those that follow. Without extended headers it fits into 32 bits.
    pub length: u64,
    /// Number of bytes after the header, at most [`PAYLOAD_LENGTH_MAX`].
    pub payload_length: u32,
}

/// A breach of the protocol that ends the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestViolation {
    /// The header does not begin with the magic number of requests.
    #[error("a request opens with {magic:#x}")]
    RequestMagic {
        /// The number that was found instead.
        magic: u32,
    },
    /// The payload is longer than the limit.
    #[error("a request has a payload of {length} bytes, more than {PAYLOAD_LENGTH_MAX}")]
    PayloadTooLong {
        /// Length of the payload in bytes.
        length: u64,
    },
}

impl RequestHeader {
    /// Decodes a header: the first [`ReplyStyle::request_length`] bytes.
    ///
    /// # Errors
    /// [`RequestViolation`], for example if the announced payload is larger than [`PAYLOAD_LENGTH_MAX`].
    #[inline]
    pub fn decode(
        bytes: &[u8; EXTENDED_REQUEST_LENGTH],
        style: ReplyStyle,
    ) -> Result<Self, RequestViolation> {
        let [m0, m1, m2, m3, f0, f1, t0, t1, rest @ ..] = bytes;
        let [c0, c1, c2, c3, c4, c5, c6, c7, rest @ ..] = rest;
        let [o0, o1, o2, o3, o4, o5, o6, o7, l0, l1, l2, l3, l4, l5, l6, l7] = rest;
        let magic = u32::from_be_bytes([*m0, *m1, *m2, *m3]);
        let flags = u16::from_be_bytes([*f0, *f1]);
        let command = u16::from_be_bytes([*t0, *t1]);
        let (expected, length, has_payload) = match style {
            ReplyStyle::Simple | ReplyStyle::Structured => {
                let length = u32::from_be_bytes([*l0, *l1, *l2, *l3]);
                (REQUEST_MAGIC, u64::from(length), command == command::WRITE)
            }
            ReplyStyle::Extended => {
                let length = u64::from_be_bytes([*l0, *l1, *l2, *l3, *l4, *l5, *l6, *l7]);
                // QEMU omits the flag in its writes, which have a payload all the same.
                let has_payload = command == command::WRITE || flags & command_flag::PAYLOAD_LEN != 0;
                (EXTENDED_REQUEST_MAGIC, length, has_payload)
            }
        };
        if magic != expected {
            return Err(RequestViolation::RequestMagic { magic });
        }
        let payload_length = match u32::try_from(length) {
            _ if !has_payload => 0,
            Ok(length) if length <= PAYLOAD_LENGTH_MAX => length,
            _ => return Err(RequestViolation::PayloadTooLong { length }),
        };
        Ok(Self {
            flags,
            command,
            cookie: u64::from_be_bytes([*c0, *c1, *c2, *c3, *c4, *c5, *c6, *c7]),
            offset: u64::from_be_bytes([*o0, *o1, *o2, *o3, *o4, *o5, *o6, *o7]),
            length,
            payload_length,
        })
    }

    /// Encodes the header for clients without extended headers. Only 32 bits of the length are sent.
    #[inline]
    pub fn encode(&self) -> [u8; REQUEST_LENGTH] {
        let mut bytes = [0; REQUEST_LENGTH];
        self.encode_start(REQUEST_MAGIC, &mut bytes);
        bytes[24..].copy_from_slice(&(self.length as u32).to_be_bytes());
        bytes
    }

    /// Encodes the header for clients with extended headers.
    pub fn encode_extended(&self) -> [u8; EXTENDED_REQUEST_LENGTH] {
        let mut bytes = [0; EXTENDED_REQUEST_LENGTH];
        self.encode_start(EXTENDED_REQUEST_MAGIC, &mut bytes);
        bytes[24..].copy_from_slice(&self.length.to_be_bytes());
        bytes
    }

    #[inline]
    fn encode_start(&self, magic: u32, bytes: &mut [u8]) {
        bytes[..4].copy_from_slice(&magic.to_be_bytes());
        bytes[4..6].copy_from_slice(&self.flags.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.command.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_request_is_encoded_as_the_protocol_says() {
        let header = RequestHeader {
            flags: command_flag::FUA,
            command: command::WRITE,
            cookie: 7,
            offset: 0x1000,
            length: 0x200,
            payload_length: 0x200,
        };
        let middle = [0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0x10, 0];
        assert_eq!(header.encode()[..], [&[0x25, 0x60, 0x95, 0x13][..], &middle, &[0, 0, 2, 0]].concat());
        let extended = [&[0x21, 0xe4, 0x1c, 0x71][..], &middle, &[0, 0, 0, 0, 0, 0, 2, 0]].concat();
        assert_eq!(header.encode_extended()[..], extended);
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(
            flags in 0_u16..32, command in 0_u16..9, cookie: u64, offset: u64, length: u32, extended: bool,
        ) {
            let payload_length = if command == command::WRITE { length } else { 0 };
            let header = RequestHeader { flags, command, cookie, offset, length: length.into(), payload_length };
            let mut bytes = [0; EXTENDED_REQUEST_LENGTH];
            let style = if extended {
                bytes = header.encode_extended();
                ReplyStyle::Extended
            } else {
                bytes[..REQUEST_LENGTH].copy_from_slice(&header.encode());
                ReplyStyle::Structured
            };
            let decoded = RequestHeader::decode(&bytes, style);
            if payload_length > PAYLOAD_LENGTH_MAX {
                prop_assert_eq!(decoded, Err(RequestViolation::PayloadTooLong { length: length.into() }));
            } else {
                prop_assert_eq!(decoded, Ok(header));
            }
        }
    }
}
