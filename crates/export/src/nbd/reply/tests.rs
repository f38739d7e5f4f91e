//! Encoded replies are decoded again.

use proptest::prelude::*;

use super::*;
use crate::nbd::protocol::chunk;

/// Encodes one reply and returns its bytes as they are sent.
fn wire(reply: Reply, style: ReplyStyle) -> Vec<u8> {
    let mut memory = vec![0; HEADERS_LENGTH_MAX];
    let mut segments = Vec::new();
    let mut headers = Headers::new(&mut memory);
    assert!(headers.has_room());
    encode_reply(reply, style, &mut headers, &mut segments);
    assert!(segments.len() <= CHUNKS_MAX);
    let mut bytes = Vec::new();
    let mut start = 0;
    for segment in segments {
        bytes.extend_from_slice(&memory[start..segment.headers_end]);
        bytes.extend_from_slice(segment.data.as_ref().map_or(&[], Buffer::as_slice));
        start = segment.headers_end;
    }
    bytes
}

fn read_reply(data: Buffer, framing: Framing) -> Reply {
    Reply { cookie: 0x0102, offset: 0x0304, reserved: 0, body: Body::Data { offset: 4096, data, framing } }
}

/// Reassembles the chunks of a read. Returns how many there were and how many bytes were sent as data.
fn reassemble(mut bytes: &[u8], length: usize) -> (Vec<u8>, usize, usize) {
    let mut content = vec![0xee; length];
    let (mut chunks, mut data_bytes) = (0, 0);
    loop {
        let (head, head_length) = ReplyHead::decode(bytes, ReplyStyle::Structured).unwrap().unwrap();
        assert_eq!(head.cookie, 0x0102);
        bytes = &bytes[head_length..];
        chunks += 1;
        match head.body {
            ReplyBody::Data { offset, length } => {
                let (start, data) = (offset as usize - 4096, bytes.split_off(..length as usize).unwrap());
                content[start..start + data.len()].copy_from_slice(data);
                data_bytes += data.len();
            }
            ReplyBody::Hole { offset, length } => {
                let start = offset as usize - 4096;
                content[start..start + length as usize].fill(0);
            }
            ReplyBody::None => {}
            other => panic!("{other:?}"),
        }
        if head.is_last {
            assert!(bytes.is_empty());
            return (content, chunks, data_bytes);
        }
    }
}

#[test]
fn simple_replies_have_error_and_cookie() {
    let done = Reply { cookie: 0x0a0b, offset: 0x0304, reserved: 0, body: Body::Done };
    assert_eq!(wire(done, ReplyStyle::Structured), b"\x67\x44\x66\x98\0\0\0\0\0\0\0\0\0\0\x0a\x0b");
    let failed = Body::Failed { code: ErrorCode::NoSpace, message: "full" };
    let failed = Reply { cookie: 1, offset: 0x0304, reserved: 0, body: failed };
    assert_eq!(wire(failed, ReplyStyle::Simple), b"\x67\x44\x66\x98\0\0\0\x1c\0\0\0\0\0\0\0\x01");
}

#[test]
fn a_structured_error_brings_its_message() {
    let failed = Body::Failed { code: ErrorCode::Io, message: "oh" };
    let bytes = wire(Reply { cookie: 1, offset: 0x0304, reserved: 0, body: failed }, ReplyStyle::Structured);
    assert_eq!(bytes[4..8], [0, 1, 0x80, 1]);
    assert_eq!(bytes[16..], *b"\0\0\0\x08\0\0\0\x05\0\x02oh");
}

#[test]
fn zeroes_travel_as_a_length_unless_the_client_wants_one_piece() {
    let (content, chunks, data_bytes) =
        reassemble(&wire(read_reply(Buffer::zeroed(8192), Framing::Chunks), ReplyStyle::Structured), 8192);
    assert_eq!((content, chunks, data_bytes), (vec![0; 8192], 1, 0));
    let bytes = wire(read_reply(Buffer::zeroed(8192), Framing::Whole), ReplyStyle::Structured);
    assert_eq!(reassemble(&bytes, 8192).2, 8192);
    let bytes = wire(read_reply(Buffer::zeroed(8192), Framing::Whole), ReplyStyle::Simple);
    assert_eq!(bytes.len(), 16 + 8192);
}

#[test]
fn every_extended_reply_is_a_chunk_that_repeats_the_offset_of_its_request() {
    let head = |kind: u16, length: u8| {
        let mut bytes = b"\x6e\x8a\x27\x8c\0\x01".to_vec();
        bytes.extend(kind.to_be_bytes());
        bytes.extend(*b"\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\x03\x04\0\0\0\0\0\0\0");
        bytes.push(length);
        bytes
    };
    let encoded = |body| wire(Reply { cookie: 1, offset: 0x0304, reserved: 0, body }, ReplyStyle::Extended);
    assert_eq!(encoded(Body::Done), head(chunk::NONE, 0));
    let failed = Body::Failed { code: ErrorCode::Io, message: "oh" };
    assert_eq!(encoded(failed), [head(chunk::ERROR, 8), b"\0\0\0\x05\0\x02oh".to_vec()].concat());
    let data = Body::Data { offset: 0x0304, data: Buffer::copy_of(b"xyz"), framing: Framing::Chunks };
    let expected = [&head(chunk::OFFSET_DATA, 11)[..], b"\0\0\0\0\0\0\x03\x04xyz"].concat();
    assert_eq!(encoded(data), expected);
    let hole = Extent { range: ByteRange::new(0, 1 << 40), kind: ExtentKind::Hole };
    let extents = encode_extents(hole.range, &[hole], ExtentCount::Many, ReplyStyle::Extended);
    let expected = b"\0\0\0\x01\0\0\0\x01\0\0\x01\0\0\0\0\0\0\0\0\0\0\0\0\x03";
    let expected = [&head(chunk::BLOCK_STATUS_EXT, 24)[..], expected].concat();
    assert_eq!(encoded(Body::Extents(Buffer::copy_of(&extents))), expected);
}

#[test]
fn a_read_of_nothing_is_answered() {
    let bytes = wire(read_reply(Buffer::zeroed(0), Framing::Chunks), ReplyStyle::Structured);
    assert_eq!(reassemble(&bytes, 0).1, 1);
}

#[test]
fn like_neighbours_become_one_extent_and_what_is_outside_is_left_out() {
    let extent = |offset, length, kind| Extent { range: ByteRange::new(offset, length), kind };
    use ExtentKind::{Data, Hole, Zero};
    let extents = [extent(0, 200, Data), extent(200, 50, Data), extent(250, 10, Hole), extent(260, 99, Zero)];
    let numbers = |count| -> Vec<u32> {
        let payload = encode_extents(ByteRange::new(100, 200), &extents, count, ReplyStyle::Structured);
        payload.chunks(4).map(|bytes| u32::from_be_bytes(bytes.try_into().unwrap())).collect()
    };
    assert_eq!(numbers(ExtentCount::Many), [150, 0, 10, 3, 40, 2]);
    assert_eq!(numbers(ExtentCount::One), [150, 0]);
    let silent = encode_extents(ByteRange::new(0, 512), &[], ExtentCount::Many, ReplyStyle::Structured);
    assert_eq!(silent, [0, 0, 2, 0, 0, 0, 0, 0]);
}

#[test]
fn the_number_of_extents_in_a_reply_is_bounded() {
    let extents: Vec<_> = (0..20_000)
        .map(|index| Extent {
            range: ByteRange::new(index * 512, 512),
            kind: if index % 2 == 0 { ExtentKind::Data } else { ExtentKind::Hole },
        })
        .collect();
    let payload =
        encode_extents(ByteRange::new(0, 20_000 * 512), &extents, ExtentCount::Many, ReplyStyle::Structured);
    assert_eq!(payload.len(), 8 * EXTENTS_MAX);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn chunks_put_together_are_what_was_read(
        steps in prop::collection::vec(any::<bool>(), 1..70), tail in 1_usize..ZERO_STEP,
    ) {
        let length = (steps.len() - 1) * ZERO_STEP + tail;
        let mut data = Buffer::zeroed(length);
        for (index, filled) in steps.iter().enumerate() {
            if *filled {
                data.as_mut_slice().unwrap()[index * ZERO_STEP] = 1;
            }
        }
        let expected = data.as_slice().to_vec();
        let bytes = wire(read_reply(data, Framing::Chunks), ReplyStyle::Structured);
        let (content, _, data_bytes) = reassemble(&bytes, length);
        prop_assert!(content == expected);
        if steps.iter().all(|filled| !filled) {
            prop_assert_eq!(data_bytes, 0);
        }
    }
}
