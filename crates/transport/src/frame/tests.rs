//! Frames survive encoding, and nothing else decodes.

use bytes::BytesMut;
use proptest::prelude::*;

use super::{
    Acknowledgement, Codec, Control, FRAME_BYTES_MAX, Frame, Greeting, HEADER_BYTES, Malformed, Start,
    decode, encode_control, encode_first, encode_greeting, encode_next,
};
use crate::message::Priority;

fn start(head: &[u8], part: &[u8]) -> Start {
    Start {
        number: 7,
        channel: 3,
        priority: Priority::Memory,
        codec: Codec::Plain,
        after: Some(6),
        head_bytes: head.len(),
        payload_bytes: part.len() + 10,
        wire_bytes: part.len() + 10,
    }
}

fn frames() -> Vec<Vec<u8>> {
    let mut frames = vec![BytesMut::new(), BytesMut::new(), BytesMut::new(), BytesMut::new()];
    encode_greeting(Greeting { lowest: 1, highest: 2, features: 3 }, &mut frames[0]);
    let acknowledgement = Acknowledgement { floor: 1, ranges: vec![(3, 4)], granted: [1, 2, 3, 4] };
    encode_control(&Control::Acknowledgement(acknowledgement), &mut frames[1]);
    encode_first(&start(b"head", b"part"), b"head", b"part", &mut frames[2]);
    frames[2].extend_from_slice(b"part");
    encode_next(7, b"part", &mut frames[3]);
    frames[3].extend_from_slice(b"part");
    frames.into_iter().map(|frame| frame.to_vec()).collect()
}

#[test]
fn frames_survive_encoding() {
    let frames = frames();
    let expected = [
        Frame::Greeting(Greeting { lowest: 1, highest: 2, features: 3 }),
        Frame::Control(Control::Acknowledgement(Acknowledgement {
            floor: 1,
            ranges: vec![(3, 4)],
            granted: [1, 2, 3, 4],
        })),
        Frame::First { start: start(b"head", b"part"), head: b"head", part: b"part" },
        Frame::Next { number: 7, part: b"part" },
    ];
    for (bytes, frame) in frames.iter().zip(expected) {
        assert_eq!(decode(bytes), Ok(Some((frame, bytes.len()))));
        for length in 0..bytes.len() {
            assert_eq!(decode(&bytes[..length]), Ok(None), "{length}");
        }
    }
}

#[test]
fn every_changed_bit_is_noticed() {
    for frame in frames() {
        for bit in 0..frame.len() * 8 {
            let mut changed = frame.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            // A longer length waits for bytes that never come, until the watchdog ends the connection.
            let is_noticed = !matches!(decode(&changed), Ok(Some(_)));
            assert!(is_noticed, "bit {bit} of {frame:?}");
        }
    }
}

#[test]
fn a_length_beyond_the_limit_is_refused_before_its_bytes_are_waited_for() {
    for frame in frames() {
        let mut long = frame[..HEADER_BYTES].to_vec();
        long[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(decode(&long), Err(Malformed::Length));
    }
}

proptest! {
    #[test]
    fn decoding_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200), kind in 0u8..5) {
        let mut bytes = bytes;
        if let Some(first) = bytes.first_mut() {
            *first = kind;
        }
        if let Ok(Some((_, length))) = decode(&bytes) {
            prop_assert!(length <= bytes.len() && length <= FRAME_BYTES_MAX);
        }
    }
}
