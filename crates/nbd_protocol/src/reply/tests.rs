//! Heads of replies, by the letter of the specification, and there and back.

use proptest::prelude::*;

use super::*;

const STYLES: [ReplyStyle; 2] = [ReplyStyle::Structured, ReplyStyle::Extended];

fn chunk_of(flags: u16, kind: u16, cookie: u64, payload: &[u8]) -> Vec<u8> {
    let mut bytes = STRUCTURED_REPLY_MAGIC.to_be_bytes().to_vec();
    bytes.extend_from_slice(&flags.to_be_bytes());
    bytes.extend_from_slice(&kind.to_be_bytes());
    bytes.extend_from_slice(&cookie.to_be_bytes());
    bytes.extend_from_slice(&(payload.len() as u32).to_be_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

/// Checks that every shorter start asks for more, and that the whole gives `expected`, which is encoded alike.
fn check(bytes: &[u8], head_length: usize, expected: ReplyHead) {
    for length in 0..head_length {
        let decoded = ReplyHead::decode(&bytes[..length], ReplyStyle::Structured);
        assert_eq!(decoded, Ok(None), "{length} bytes of {expected:?}");
    }
    assert_eq!(ReplyHead::decode(bytes, ReplyStyle::Structured), Ok(Some((expected, head_length))));
    assert_eq!(expected.encode(ReplyStyle::Structured, 0).as_slice(), &bytes[..head_length], "{expected:?}");
    assert!(head_length <= HEAD_LENGTH_MAX);
}

fn head(body: ReplyBody, is_last: bool) -> ReplyHead {
    ReplyHead { cookie: 7, body, is_last }
}

#[test]
fn every_kind_of_reply_is_decoded_and_encoded() {
    let simple = [&[0x67, 0x44, 0x66, 0x98][..], &[0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 7]].concat();
    check(&simple, 16, head(ReplyBody::Simple { error: 5 }, true));
    check(&chunk_of(1, 0, 7, &[]), 20, head(ReplyBody::None, true));
    let offset = (1_u64 << 33).to_be_bytes();
    let data = [&offset[..], &[9; 100]].concat();
    check(&chunk_of(0, 1, 7, &data), 28, head(ReplyBody::Data { offset: 1 << 33, length: 100 }, false));
    let hole = [&offset[..], &4096_u32.to_be_bytes()].concat();
    check(&chunk_of(1, 2, 7, &hole), 32, head(ReplyBody::Hole { offset: 1 << 33, length: 4096 }, true));
    let extents = [&3_u32.to_be_bytes()[..], &[0; 16]].concat();
    check(&chunk_of(1, 5, 7, &extents), 24, head(ReplyBody::Extents { context: 3, length: 16 }, true));
    let error = [&28_u32.to_be_bytes()[..], &[0, 2], b"no"].concat();
    let expected = head(ReplyBody::Error { error: 28, rest: 2 }, false);
    check(&chunk_of(0, (1 << 15) + 1, 7, &error), 26, expected);
    for kind in [2, 99] {
        let decoded = ReplyHead::decode(&chunk_of(0, (1 << 15) + kind, 7, &error), ReplyStyle::Structured);
        assert_eq!(decoded, Ok(Some((expected, 26))));
    }
}

#[test]
fn an_extended_chunk_bears_the_offset_of_its_request_and_64_bits_of_length() {
    let hole = head(ReplyBody::Hole { offset: 1, length: 2 }, true);
    let expected = [
        &[0x6e, 0x8a, 0x27, 0x8c, 0, 1, 0, 2, 0, 0, 0, 0, 0, 0, 0, 7][..],
        &[0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 12],
        &[0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2],
    ];
    assert_eq!(hole.encode(ReplyStyle::Extended, 9).as_slice(), expected.concat());
}

#[test]
fn a_chunk_of_another_style_than_was_agreed_on_is_refused() {
    let body = ReplyBody::Data { offset: 1, length: 2 };
    for (style, other) in [(STYLES[0], STYLES[1]), (STYLES[1], STYLES[0])] {
        assert!(ReplyHead::decode(head(body, true).encode(style, 0).as_slice(), other).is_err());
    }
    let simple = head(ReplyBody::Simple { error: 0 }, true).encode(ReplyStyle::Simple, 0);
    assert!(ReplyHead::decode(simple.as_slice(), ReplyStyle::Extended).is_err());
}

#[test]
fn lengths_and_kinds_that_cannot_be_are_refused_at_once() {
    let with_length = |kind, length: u32| {
        let mut bytes = chunk_of(1, kind, 7, &[0; 12]);
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
        let decoded = ReplyHead::decode(&with_length(kind, length), ReplyStyle::Structured);
        assert!(decoded.is_err(), "kind {kind}, {length} bytes");
    }
    assert!(ReplyHead::decode(b"HTTP/1.1 400 Bad Request", ReplyStyle::Structured).is_err());
    let mut miscounted =
        head(ReplyBody::Extents { context: 1, length: 32 }, true).encode(ReplyStyle::Extended, 0);
    miscounted.bytes[39] = 1;
    assert!(ReplyHead::decode(miscounted.as_slice(), ReplyStyle::Extended).is_err());
}

#[test]
fn an_empty_extent_and_an_empty_list_are_refused() {
    for style in STYLES {
        let extents = [Extent { length: 4096, state: 3 }, Extent { length: 512, state: 0 }];
        assert_eq!(decode_extents(&encode_extents(&extents, style), style), Ok(extents.to_vec()));
        assert!(decode_extents(&[], style).is_err());
        assert!(decode_extents(&encode_extents(&[Extent { length: 0, state: 0 }], style), style).is_err());
    }
}

proptest! {
    #[test]
    fn no_bytes_make_the_decoder_panic_and_what_it_decodes_is_encoded_alike(
        magic in prop_oneof![Just(SIMPLE_REPLY_MAGIC), Just(STRUCTURED_REPLY_MAGIC), Just(EXTENDED_REPLY_MAGIC), any::<u32>()],
        kind in prop_oneof![0_u16..8, 0x8000_u16..0x8004, any::<u16>()],
        tail in proptest::collection::vec(any::<u8>(), 0..64),
        extended: bool,
    ) {
        let style = STYLES[usize::from(extended)];
        let mut bytes = magic.to_be_bytes().to_vec();
        bytes.extend_from_slice(&[0, 1]);
        bytes.extend_from_slice(&kind.to_be_bytes());
        bytes.extend_from_slice(&tail);
        if let Ok(Some((head, length))) = ReplyHead::decode(&bytes, style) {
            prop_assert!(length <= bytes.len() && length <= HEAD_LENGTH_MAX);
            let again = ReplyHead::decode(head.encode(style, 0).as_slice(), style);
            prop_assert_eq!(again, Ok(Some((head, length))));
        }
    }
}
