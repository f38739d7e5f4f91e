//! Encodes request headers and decodes reply headers of the NBD protocol.
//!
//! Decoders get the bytes that have arrived so far, and return `None` if they need more.

/// First bytes of a request.
const REQUEST_MAGIC: u32 = 0x2560_9513;
/// First bytes of a simple reply.
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// First bytes of a chunk of a structured reply.
const CHUNK_MAGIC: u32 = 0x668e_33ef;

/// Bytes of a simple reply's header.
const SIMPLE_REPLY_BYTES: usize = 16;
/// Bytes of a chunk's header.
const CHUNK_BYTES: usize = 20;

/// Largest read or write of this client, which every server must accept by the protocol.
pub(super) const PAYLOAD_BYTES_MAX: u32 = 32 << 20;
/// Largest accepted error chunk: a code, a message of at most 4096 bytes, an offset.
const ERROR_CHUNK_BYTES_MAX: u32 = 4096 + 14;

pub(super) const COMMAND_FLAG_FUA: u16 = 1;

/// The commands of the protocol, with their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum Command {
    Read = 0,
    Write = 1,
    Disconnect = 2,
    Flush = 3,
    Trim = 4,
    WriteZeroes = 6,
}

/// Appends a request's header.
pub(super) fn encode_request(
    out: &mut Vec<u8>,
    command: Command,
    flags: u16,
    cookie: u64,
    offset: u64,
    length: u32,
) {
    out.extend_from_slice(&REQUEST_MAGIC.to_be_bytes());
    out.extend_from_slice(&flags.to_be_bytes());
    out.extend_from_slice(&(command as u16).to_be_bytes());
    out.extend_from_slice(&cookie.to_be_bytes());
    out.extend_from_slice(&offset.to_be_bytes());
    out.extend_from_slice(&length.to_be_bytes());
}

/// The head of a reply, up to where data begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reply {
    /// Cookie of the answered request.
    pub(super) cookie: u64,
    pub(super) body: Body,
    /// Whether this is the last reply to the request.
    pub(super) end: End,
}

/// The content of a reply or of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Body {
    /// A simple reply: an error code or 0. The data of a successful read follows, with the requested length.
    Simple {
        error: u32,
    },
    None,
    /// `length` bytes of data follow; they belong at `offset` of the export.
    Data {
        offset: u64,
        length: u32,
    },
    /// `length` bytes at `offset` of the export are zero.
    Hole {
        offset: u64,
        length: u32,
    },
    Error {
        error: u32,
    },
}

/// Whether more chunks follow for the same request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Last,
    MoreFollows,
}

/// Decodes the next reply's head, and returns it with its length (without data).
///
/// Returns `None` if it needs more bytes, which never exceed [`REPLY_HEAD_BYTES_MAX`].
pub(super) fn decode_reply(bytes: &[u8]) -> Result<Option<(Reply, usize)>, &'static str> {
    let Some(magic) = u32_at(bytes, 0) else { return Ok(None) };
    match magic {
        SIMPLE_REPLY_MAGIC => {
            let (Some(error), Some(cookie)) = (u32_at(bytes, 4), u64_at(bytes, 8)) else { return Ok(None) };
            let reply = Reply { cookie, body: Body::Simple { error }, end: End::Last };
            Ok(Some((reply, SIMPLE_REPLY_BYTES)))
        }
        CHUNK_MAGIC => decode_chunk(bytes),
        _ => Err("a reply starts with a wrong magic number"),
    }
}

/// Largest number of bytes that [`decode_reply`] needs.
pub(super) const REPLY_HEAD_BYTES_MAX: usize = CHUNK_BYTES + ERROR_CHUNK_BYTES_MAX as usize;

fn decode_chunk(bytes: &[u8]) -> Result<Option<(Reply, usize)>, &'static str> {
    const FLAG_DONE: u16 = 1;
    const KIND_NONE: u16 = 0;
    const KIND_OFFSET_DATA: u16 = 1;
    const KIND_OFFSET_HOLE: u16 = 2;
    const KIND_ERROR_BIT: u16 = 1 << 15;

    let (Some(flags), Some(kind)) = (u16_at(bytes, 4), u16_at(bytes, 6)) else { return Ok(None) };
    let (Some(cookie), Some(length)) = (u64_at(bytes, 8), u32_at(bytes, 16)) else { return Ok(None) };
    let end = if flags & FLAG_DONE != 0 { End::Last } else { End::MoreFollows };
    let (body, head_bytes) = match kind {
        KIND_NONE if length == 0 => (Body::None, CHUNK_BYTES),
        KIND_OFFSET_DATA if (9..=PAYLOAD_BYTES_MAX + 8).contains(&length) => {
            let Some(offset) = u64_at(bytes, CHUNK_BYTES) else { return Ok(None) };
            (Body::Data { offset, length: length - 8 }, CHUNK_BYTES + 8)
        }
        KIND_OFFSET_HOLE if length == 12 => {
            let (Some(offset), Some(length)) = (u64_at(bytes, CHUNK_BYTES), u32_at(bytes, CHUNK_BYTES + 8))
            else {
                return Ok(None);
            };
            (Body::Hole { offset, length }, CHUNK_BYTES + 12)
        }
        _ if kind & KIND_ERROR_BIT != 0 && (6..=ERROR_CHUNK_BYTES_MAX).contains(&length) => {
            let total = CHUNK_BYTES + length as usize;
            let Some(error) = u32_at(bytes, CHUNK_BYTES) else { return Ok(None) };
            if bytes.len() < total {
                return Ok(None);
            }
            (Body::Error { error }, total)
        }
        _ => return Err("a reply chunk has an unknown kind or a wrong length"),
    };
    Ok(Some((Reply { cookie, body, end }, head_bytes)))
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|chunk| u16::from_be_bytes(*chunk))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|chunk| u32::from_be_bytes(*chunk))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().map(|chunk| u64::from_be_bytes(*chunk))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn chunk(flags: u16, kind: u16, cookie: u64, payload: &[u8]) -> Vec<u8> {
        let mut bytes = CHUNK_MAGIC.to_be_bytes().to_vec();
        bytes.extend_from_slice(&flags.to_be_bytes());
        bytes.extend_from_slice(&kind.to_be_bytes());
        bytes.extend_from_slice(&cookie.to_be_bytes());
        bytes.extend_from_slice(&u32::try_from(payload.len()).unwrap().to_be_bytes());
        bytes.extend_from_slice(payload);
        bytes
    }

    /// Checks that every proper prefix of the head needs more bytes, and that the whole head decodes to `expected`.
    fn check(bytes: &[u8], head_bytes: usize, expected: Reply) {
        for length in 0..head_bytes {
            assert_eq!(decode_reply(&bytes[..length]), Ok(None), "prefix of {length} bytes");
        }
        assert_eq!(decode_reply(bytes), Ok(Some((expected, head_bytes))));
    }

    #[test]
    fn a_request_is_encoded_as_the_protocol_says() {
        let mut out = Vec::new();
        encode_request(&mut out, Command::Write, COMMAND_FLAG_FUA, 7, 0x1000, 0x200);
        assert_eq!(
            out,
            [
                0x25, 0x60, 0x95, 0x13, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0,
                2, 0
            ]
        );
    }

    #[test]
    fn a_simple_reply_is_decoded() {
        let mut bytes = SIMPLE_REPLY_MAGIC.to_be_bytes().to_vec();
        bytes.extend_from_slice(&5_u32.to_be_bytes());
        bytes.extend_from_slice(&9_u64.to_be_bytes());
        check(&bytes, 16, Reply { cookie: 9, body: Body::Simple { error: 5 }, end: End::Last });
    }

    #[test]
    fn a_data_chunk_is_decoded_up_to_its_data() {
        let mut payload = 4096_u64.to_be_bytes().to_vec();
        payload.extend_from_slice(&[1; 512]);
        let body = Body::Data { offset: 4096, length: 512 };
        check(&chunk(0, 1, 3, &payload), 28, Reply { cookie: 3, body, end: End::MoreFollows });
    }

    #[test]
    fn a_hole_chunk_is_decoded() {
        let mut payload = 8192_u64.to_be_bytes().to_vec();
        payload.extend_from_slice(&4096_u32.to_be_bytes());
        let body = Body::Hole { offset: 8192, length: 4096 };
        check(&chunk(1, 2, 3, &payload), 32, Reply { cookie: 3, body, end: End::Last });
    }

    #[test]
    fn an_error_chunk_is_decoded_with_its_message_skipped() {
        let mut payload = 28_u32.to_be_bytes().to_vec();
        payload.extend_from_slice(&[0, 2, b'n', b'o']);
        let expected = Reply { cookie: 3, body: Body::Error { error: 28 }, end: End::Last };
        check(&chunk(1, 0x8001, 3, &payload), 28, expected);
    }

    #[test]
    fn lengths_out_of_bounds_are_refused_before_anything_is_awaited() {
        let mut endless = chunk(1, 1, 3, &[0; 8]);
        endless[16..20].copy_from_slice(&u32::MAX.to_be_bytes());
        assert!(decode_reply(&endless).is_err());
        assert!(decode_reply(&chunk(1, 1, 3, &[0; 8])).is_err(), "a data chunk without data");
        assert!(decode_reply(&chunk(1, 0, 3, &[0; 1])).is_err(), "an empty chunk with a payload");
        assert!(decode_reply(&chunk(1, 0x8001, 3, &[0; 5])).is_err(), "an error chunk without a code");
        assert!(decode_reply(&[0; 4]).is_err(), "a wrong magic number");
    }

    proptest! {
        #[test]
        fn decoding_never_panics_and_stays_within_its_bound(tail in proptest::collection::vec(any::<u8>(), 0..64)) {
            for magic in [SIMPLE_REPLY_MAGIC, CHUNK_MAGIC] {
                let mut bytes = magic.to_be_bytes().to_vec();
                bytes.extend_from_slice(&tail);
                if let Ok(Some((_, head_bytes))) = decode_reply(&bytes) {
                    prop_assert!(head_bytes <= bytes.len() && head_bytes <= REPLY_HEAD_BYTES_MAX);
                }
            }
        }
    }
}
