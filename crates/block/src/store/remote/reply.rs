//! Decodes the heads of replies, without I/O: the request, and the kind and length of the following bytes.
//!
//! Every length is checked here against the protocol; the caller checks whether it fits the request.

use nbd_protocol::{
    CHUNK_HEADER_LENGTH, PAYLOAD_LENGTH_MAX, SIMPLE_REPLY_LENGTH, SIMPLE_REPLY_MAGIC, STRING_LENGTH_MAX,
    STRUCTURED_REPLY_MAGIC, chunk,
};

use super::handshake::Fields;

/// Bytes of the longest head: a chunk of zeroes.
pub(super) const HEAD_LENGTH_MAX: usize = CHUNK_HEADER_LENGTH + 12;

/// Longest accepted list of extents, in bytes; a million of them is more than any server sends.
const EXTENTS_LENGTH_MAX: u32 = 8 << 20;
const ERROR_REST_MAX: u32 = STRING_LENGTH_MAX as u32 + 8;

pub(super) type Violation = &'static str;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) cookie: u64,
    pub(super) body: Body,
    pub(super) is_last: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Body {
    /// A simple reply: an error, or 0, with the data of a read behind it.
    Simple {
        error: u32,
    },
    None,
    Data {
        offset: u64,
        length: u32,
    },
    Hole {
        offset: u64,
        length: u32,
    },
    Extents {
        context: u32,
        length: u32,
    },
    Error {
        error: u32,
        rest: u32,
    },
}

/// Decodes the head at the start of `bytes`, and returns it with its length; `None` if it is incomplete.
pub(super) fn decode_head(bytes: &[u8]) -> Result<Option<(Head, usize)>, Violation> {
    let mut fields = Fields(bytes);
    match fields.u32() {
        None => Ok(None),
        Some(SIMPLE_REPLY_MAGIC) => {
            let (Some(error), Some(cookie)) = (fields.u32(), fields.u64()) else { return Ok(None) };
            Ok(Some((Head { cookie, body: Body::Simple { error }, is_last: true }, SIMPLE_REPLY_LENGTH)))
        }
        Some(STRUCTURED_REPLY_MAGIC) => decode_chunk(fields, bytes.len()),
        Some(_) => Err("a reply begins with an unknown number"),
    }
}

fn decode_chunk(mut fields: Fields<'_>, arrived: usize) -> Result<Option<(Head, usize)>, Violation> {
    let (Some(flags), Some(kind), Some(cookie), Some(length)) =
        (fields.u16(), fields.u16(), fields.u64(), fields.u32())
    else {
        return Ok(None);
    };
    let is_error = kind & chunk::ERROR_BIT != 0;
    // The part of the payload that belongs to the head.
    let fixed = match kind {
        chunk::NONE if length == 0 => 0,
        chunk::OFFSET_DATA if (9..=PAYLOAD_LENGTH_MAX + 8).contains(&length) => 8,
        chunk::OFFSET_HOLE if length == 12 => 12,
        chunk::BLOCK_STATUS if length >= 12 && length % 8 == 4 && length <= EXTENTS_LENGTH_MAX + 4 => 4,
        _ if is_error && (6..=ERROR_REST_MAX + 6).contains(&length) => 6,
        chunk::NONE | chunk::OFFSET_DATA | chunk::OFFSET_HOLE | chunk::BLOCK_STATUS => {
            return Err("a chunk has a length that its kind does not allow");
        }
        _ if is_error => return Err("an error has a length that errors do not have"),
        _ => return Err("a chunk is of a kind that was not requested"),
    };
    let head_length = CHUNK_HEADER_LENGTH + fixed as usize;
    if arrived < head_length {
        return Ok(None);
    }
    // All bytes of the head are there.
    let mut number = || fields.u32().unwrap_or(0);
    let body = match kind {
        chunk::NONE => Body::None,
        chunk::OFFSET_DATA => Body::Data { offset: join(number(), number()), length: length - fixed },
        chunk::OFFSET_HOLE => Body::Hole { offset: join(number(), number()), length: number() },
        chunk::BLOCK_STATUS => Body::Extents { context: number(), length: length - fixed },
        _ => Body::Error { error: number(), rest: length - fixed },
    };
    Ok(Some((Head { cookie, body, is_last: flags & chunk::DONE != 0 }, head_length)))
}

fn join(high: u32, low: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(crate) fn chunk(flags: u16, kind: u16, cookie: u64, payload: &[u8]) -> Vec<u8> {
        let mut bytes = STRUCTURED_REPLY_MAGIC.to_be_bytes().to_vec();
        bytes.extend_from_slice(&flags.to_be_bytes());
        bytes.extend_from_slice(&kind.to_be_bytes());
        bytes.extend_from_slice(&cookie.to_be_bytes());
        bytes.extend_from_slice(&(payload.len() as u32).to_be_bytes());
        bytes.extend_from_slice(payload);
        bytes
    }

    fn check(bytes: &[u8], head_length: usize, expected: Head) {
        for length in 0..head_length {
            assert_eq!(decode_head(&bytes[..length]), Ok(None), "{length} bytes of {expected:?}");
        }
        assert_eq!(decode_head(bytes), Ok(Some((expected, head_length))));
        assert!(head_length <= HEAD_LENGTH_MAX);
    }

    fn head(body: Body, is_last: bool) -> Head {
        Head { cookie: 7, body, is_last }
    }

    #[test]
    fn every_kind_of_reply_is_decoded() {
        let mut simple = SIMPLE_REPLY_MAGIC.to_be_bytes().to_vec();
        simple.extend_from_slice(&[0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 7]);
        check(&simple, 16, head(Body::Simple { error: 5 }, true));
        check(&chunk(1, 0, 7, &[]), 20, head(Body::None, true));
        let offset = (1_u64 << 33).to_be_bytes();
        let data = [&offset[..], &[9; 100]].concat();
        check(&chunk(0, 1, 7, &data), 28, head(Body::Data { offset: 1 << 33, length: 100 }, false));
        let hole = [&offset[..], &4096_u32.to_be_bytes()].concat();
        check(&chunk(1, 2, 7, &hole), 32, head(Body::Hole { offset: 1 << 33, length: 4096 }, true));
        let extents = [&3_u32.to_be_bytes()[..], &[0; 16]].concat();
        check(&chunk(1, 5, 7, &extents), 24, head(Body::Extents { context: 3, length: 16 }, true));
        let error = [&28_u32.to_be_bytes()[..], &[0, 2], b"no"].concat();
        for kind in [1, 2, 99] {
            let bytes = chunk(0, (1 << 15) + kind, 7, &error);
            check(&bytes, 26, head(Body::Error { error: 28, rest: 2 }, false));
        }
    }

    #[test]
    fn lengths_and_kinds_that_cannot_be_are_refused_at_once() {
        let with_length = |kind, length: u32| {
            let mut bytes = chunk(1, kind, 7, &[0; 12]);
            bytes[16..20].copy_from_slice(&length.to_be_bytes());
            bytes
        };
        for (kind, length) in [
            (0, 1),
            (1, 8),
            (1, u32::MAX),
            (1, PAYLOAD_LENGTH_MAX + 9),
            (2, 11),
            (2, 13),
            (5, 4),
            (5, 13),
            (5, u32::MAX - 3),
            (1 << 15, 5),
            ((1 << 15) + 1, u32::MAX),
            (3, 0),
            (6, 12),
        ] {
            assert!(decode_head(&with_length(kind, length)).is_err(), "kind {kind}, {length} bytes");
        }
        assert!(decode_head(b"HTTP/1.1 400 Bad Request").is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_decoder_panic(
            magic in prop_oneof![Just(SIMPLE_REPLY_MAGIC), Just(STRUCTURED_REPLY_MAGIC), any::<u32>()],
            kind in prop_oneof![0_u16..8, 0x8000_u16..0x8004, any::<u16>()],
            tail in proptest::collection::vec(any::<u8>(), 0..64),
        ) {
            let mut bytes = magic.to_be_bytes().to_vec();
            bytes.extend_from_slice(&[0, 1]);
            bytes.extend_from_slice(&kind.to_be_bytes());
            bytes.extend_from_slice(&tail);
            if let Ok(Some((_, length))) = decode_head(&bytes) {
                prop_assert!(length <= bytes.len() && length <= HEAD_LENGTH_MAX);
            }
        }
    }
}
