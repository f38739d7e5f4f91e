//! Streams of requests, cut at every place.

use block::{ByteRange, Durability, Geometry};
use proptest::prelude::*;

use super::*;
use crate::nbd::error_code::ErrorCode;
use crate::nbd::export::{Access, Offer, ReplyStyle};
use crate::nbd::negotiation::AllocationContext;
use crate::nbd::protocol::{EXTENDED_REQUEST_MAGIC, PAYLOAD_LENGTH_MAX, command};

fn terms_of(style: ReplyStyle) -> Terms {
    let geometry = Geometry { size: 1 << 20, alignment: 1, read_only: false, discards: true };
    let offer = Offer::new(&geometry, Access::ReadWrite, style);
    let offer = if style == ReplyStyle::Extended { offer.with_status_payload() } else { offer };
    Terms { offer, allocation: AllocationContext::Chosen }
}

fn terms() -> Terms {
    terms_of(ReplyStyle::Structured)
}

fn request(command: u16, cookie: u64, offset: u64, length: u32) -> Vec<u8> {
    let header =
        RequestHeader { flags: 0, command, cookie, offset, length: length.into(), payload_length: 0 };
    let mut bytes = header.encode().to_vec();
    if command == command::WRITE {
        bytes.extend((0..length).map(|index| (u64::from(index) + cookie) as u8));
    }
    bytes
}

/// Cookie and command or error, with the length of the buffer and its content.
#[derive(Debug, PartialEq)]
enum Found {
    Request(u64, Command, Vec<u8>),
    Refused(u64, ErrorCode),
}

/// Feeds `bytes` in pieces of `step`; missing payload of at least `direct_min` is received directly.
fn read_all(bytes: &[u8], step: usize, direct_min: usize) -> (Vec<Found>, Result<(), Violation>, usize) {
    read_all_as(ReplyStyle::Structured, bytes, step, direct_min)
}

fn read_all_as(
    style: ReplyStyle,
    bytes: &[u8],
    step: usize,
    direct_min: usize,
) -> (Vec<Found>, Result<(), Violation>, usize) {
    let (terms, pool) = (terms_of(style), BufferPool::new());
    let mut intake = Intake::default();
    let mut found = Vec::new();
    let mut reserved_max = 0;
    let mut rest = bytes;
    loop {
        if let Some(mut lent) = intake.lend_payload(direct_min) {
            let count = lent.len().min(step).min(rest.len());
            assert!(lent.is_unique(), "it can be received into");
            lent.as_mut_slice().unwrap()[..count].copy_from_slice(&rest[..count]);
            rest = &rest[count..];
            intake.return_payload(lent, count);
            if count == 0 {
                return (found, Ok(()), reserved_max);
            }
        }
        let (mut input, after) = rest.split_at(step.min(rest.len()));
        if intake.stage_needs_direct(direct_min) {
            input = &[];
        } else {
            rest = after;
        }
        loop {
            let admit = |length| {
                reserved_max = reserved_max.max(length);
                Admission::Granted
            };
            match intake.take(&mut input, &terms, &pool, admit) {
                Err(violation) => return (found, Err(violation), reserved_max),
                Ok(Taken::NeedBytes) => break,
                Ok(Taken::NoRoom) => panic!("nothing was refused"),
                Ok(Taken::Request { cookie, command, buffer }) => {
                    let write = matches!(command, Command::Write(..));
                    let content = buffer.filter(|_| write).map(|buffer| buffer.as_slice().to_vec());
                    found.push(Found::Request(cookie, command, content.unwrap_or_default()));
                }
                Ok(Taken::Refused { cookie, refusal, .. }) => {
                    found.push(Found::Refused(cookie, refusal.code));
                }
            }
        }
        assert!(input.is_empty(), "all bytes are used before more are asked for");
        if rest.is_empty() && !intake.stage_needs_direct(direct_min) {
            return (found, Ok(()), reserved_max);
        }
    }
}

impl Intake {
    fn stage_needs_direct(&self, minimum: usize) -> bool {
        matches!(&self.stage, Stage::Payload { payload, filled, .. } if payload.len() - filled >= minimum)
    }
}

#[test]
fn a_refused_write_is_skipped_and_the_next_request_is_found() {
    let mut bytes = request(command::WRITE, 1, (1 << 20) - 10, 100);
    bytes.extend(request(command::READ, 2, 0, 10));
    let expected = [
        Found::Refused(1, ErrorCode::NoSpace),
        Found::Request(
            2,
            Command::Read(ByteRange::new(0, 10), crate::nbd::transmission::Framing::Chunks),
            vec![],
        ),
    ];
    for step in 1..bytes.len() {
        assert_eq!(read_all(&bytes, step, usize::MAX).0, expected);
    }
}

fn extended_request(command: u16, flags: u16, cookie: u64, offset: u64, length: u64, data: &[u8]) -> Vec<u8> {
    let mut bytes = EXTENDED_REQUEST_MAGIC.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(command.to_be_bytes());
    bytes.extend([cookie, offset, length].map(u64::to_be_bytes).concat());
    bytes.extend(data);
    bytes
}

#[test]
fn extended_requests_and_their_payloads_are_found_however_they_arrive() {
    use crate::nbd::protocol::command_flag::PAYLOAD_LEN;
    let status = |id: u32| [&4096_u64.to_be_bytes()[..], &id.to_be_bytes()].concat();
    let bytes = [
        extended_request(command::WRITE, PAYLOAD_LEN, 1, 512, 5, b"hello"),
        extended_request(command::WRITE, 0, 2, 512, 5, b"world"),
        extended_request(command::BLOCK_STATUS, PAYLOAD_LEN, 3, 8192, 12, &status(1)),
        extended_request(command::BLOCK_STATUS, PAYLOAD_LEN, 4, 8192, 12, &status(2)),
        extended_request(command::BLOCK_STATUS, PAYLOAD_LEN, 5, 8192, 8, &[0; 8]),
        extended_request(command::TRIM, PAYLOAD_LEN, 6, 0, 700, &[1; 700]),
        extended_request(command::TRIM, 0, 7, 0, 1 << 20, b""),
    ]
    .concat();
    use crate::nbd::transmission::ExtentCount;
    let expected = [
        Found::Request(1, Command::Write(ByteRange::new(512, 5), Durability::Volatile), b"hello".into()),
        Found::Request(2, Command::Write(ByteRange::new(512, 5), Durability::Volatile), b"world".into()),
        Found::Request(3, Command::Describe(ByteRange::new(8192, 4096), ExtentCount::Many), vec![]),
        Found::Refused(4, ErrorCode::Invalid),
        Found::Refused(5, ErrorCode::Invalid),
        Found::Refused(6, ErrorCode::Invalid),
        Found::Request(7, Command::Discard(ByteRange::new(0, 1 << 20), Durability::Volatile), vec![]),
    ];
    for step in 1..bytes.len() {
        let (found, end, _) = read_all_as(ReplyStyle::Extended, &bytes, step, usize::MAX);
        assert_eq!((&found[..], end), (&expected[..], Ok(())), "{step}");
    }
}

#[test]
fn a_request_without_room_waits_and_nothing_is_allocated_for_it() {
    let (terms, pool) = (terms(), BufferPool::new());
    let mut intake = Intake::default();
    let bytes = request(command::WRITE, 9, 0, 1000);
    let mut input = &bytes[..];
    for _ in 0..3 {
        let taken = intake.take(&mut input, &terms, &pool, |length| {
            assert_eq!(length, 1000);
            Admission::Refused
        });
        assert!(matches!(taken, Ok(Taken::NoRoom)));
        assert_eq!(input.len(), 1000);
    }
    let taken = intake.take(&mut input, &terms, &pool, |_| Admission::Granted);
    let Ok(Taken::Request { cookie: 9, command, buffer: Some(buffer) }) = taken else { panic!("a request") };
    assert_eq!(command, Command::Write(ByteRange::new(0, 1000), Durability::Volatile));
    assert_eq!(buffer.as_slice(), &bytes[28..]);
    assert!(buffer.is_unique());
}

fn requests() -> impl Strategy<Value = Vec<u8>> {
    let one = (0_u16..9, any::<u64>(), 0_u64..(3 << 19), 0_u32..3000);
    let one = one.prop_map(|(command, cookie, offset, length)| {
        // A disconnect would end the stream.
        request(if command == command::DISC { 99 } else { command }, cookie, offset, length)
    });
    prop::collection::vec(one, 0..12).prop_map(|requests| requests.concat())
}

proptest! {
    #[test]
    fn it_makes_no_difference_how_the_bytes_arrive(
        bytes in requests(), step in 1_usize..500, direct_min in 1_usize..3000,
    ) {
        let (whole, end, _) = read_all(&bytes, bytes.len().max(1), usize::MAX);
        prop_assert_eq!(end, Ok(()));
        let (pieces, end, _) = read_all(&bytes, step, direct_min);
        prop_assert_eq!(end, Ok(()));
        prop_assert_eq!(whole, pieces);
    }

    #[test]
    fn no_bytes_make_it_panic_or_reserve_more_than_a_payload(
        head in requests(), bytes in prop::collection::vec(any::<u8>(), 0..200), step in 1_usize..100,
    ) {
        let bytes = [head, bytes].concat();
        for style in [ReplyStyle::Structured, ReplyStyle::Extended] {
            let (_, _, reserved_max) = read_all_as(style, &bytes, step, 64);
            prop_assert!(reserved_max <= PAYLOAD_LENGTH_MAX as usize);
        }
    }
}
