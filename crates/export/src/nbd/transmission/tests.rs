//! What requests are judged to be.

use proptest::prelude::*;

use super::*;
use crate::nbd::export::Access;

fn terms(access: Access, alignment: u32, replies: ReplyStyle) -> Terms {
    let geometry = Geometry { size: 1 << 20, alignment, read_only: false, discards: true };
    Terms { offer: Offer::new(&geometry, access, replies), allocation: AllocationContext::Chosen }
}

fn writable() -> Terms {
    terms(Access::ReadWrite, 512, ReplyStyle::Structured)
}

fn header(command: u16, flags: u16, offset: u64, length: u32) -> RequestHeader {
    RequestHeader { flags, command, cookie: 7, offset, length }
}

fn encode(header: &RequestHeader) -> [u8; REQUEST_LENGTH] {
    let mut bytes = [0; REQUEST_LENGTH];
    bytes[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
    bytes[4..6].copy_from_slice(&header.flags.to_be_bytes());
    bytes[6..8].copy_from_slice(&header.command.to_be_bytes());
    bytes[8..16].copy_from_slice(&header.cookie.to_be_bytes());
    bytes[16..24].copy_from_slice(&header.offset.to_be_bytes());
    bytes[24..].copy_from_slice(&header.length.to_be_bytes());
    bytes
}

#[track_caller]
fn check_refused(terms: &Terms, header: RequestHeader, code: ErrorCode) {
    assert_eq!(judge(&header, terms).map_err(|refusal| refusal.code), Err(code), "{header:?}");
}

#[test]
fn every_command_is_understood_with_its_flags() {
    use command_flag::{DF, FUA, NO_HOLE, REQ_ONE};
    let range = ByteRange::new(512, 1024);
    let check = |command, flags, expected| {
        assert_eq!(judge(&header(command, flags, 512, 1024), &writable()), Ok(expected));
    };
    check(command::READ, 0, Command::Read(range, Framing::Chunks));
    check(command::READ, FUA | DF, Command::Read(range, Framing::Whole));
    check(command::WRITE, 0, Command::Write(range, Durability::Volatile));
    check(command::WRITE, FUA, Command::Write(range, Durability::Durable));
    check(command::TRIM, FUA, Command::Discard(range, Durability::Durable));
    check(command::CACHE, 0, Command::Cache(range));
    let (unmap, keep) = (ZeroMode::MayUnmap, ZeroMode::KeepAllocated);
    check(command::WRITE_ZEROES, 0, Command::WriteZeroes(range, unmap, Durability::Volatile));
    check(command::WRITE_ZEROES, NO_HOLE | FUA, Command::WriteZeroes(range, keep, Durability::Durable));
    check(command::BLOCK_STATUS, 0, Command::Describe(range, ExtentCount::Many));
    check(command::BLOCK_STATUS, REQ_ONE, Command::Describe(range, ExtentCount::One));
    check(command::DISC, 0, Command::Disconnect);
    assert_eq!(judge(&header(command::FLUSH, FUA, 0, 0), &writable()), Ok(Command::Flush));
    let simple = terms(Access::ReadWrite, 1, ReplyStyle::Simple);
    assert_eq!(
        judge(&header(command::READ, 0, 512, 1024), &simple),
        Ok(Command::Read(range, Framing::Whole))
    );
}

#[test]
fn wrong_requests_get_the_error_that_the_protocol_names() {
    use ErrorCode::{Invalid, NoSpace, NotPermitted};
    let terms = writable();
    let end = 1 << 20;
    check_refused(&terms, header(command::READ, 0, end, 512), Invalid);
    check_refused(&terms, header(command::WRITE, 0, end, 512), NoSpace);
    check_refused(&terms, header(command::WRITE, 0, u64::MAX - 511, 1024), NoSpace);
    check_refused(&terms, header(command::WRITE_ZEROES, 0, end - 512, 1024), NoSpace);
    check_refused(&terms, header(command::TRIM, 0, end, 512), Invalid);
    check_refused(&terms, header(command::BLOCK_STATUS, 0, end, 512), Invalid);
    check_refused(&terms, header(command::BLOCK_STATUS, 0, 0, 0), Invalid);
    check_refused(&terms, header(command::READ, 0, 1, 512), Invalid);
    check_refused(&terms, header(command::WRITE, 0, 0, 511), Invalid);
    check_refused(&terms, header(command::READ, 0, 0, PAYLOAD_LENGTH_MAX + 512), Invalid);
    check_refused(&terms, header(command::FLUSH, 0, 0, 512), Invalid);
    check_refused(&terms, header(command::WRITE, command_flag::DF, 0, 512), Invalid);
    check_refused(&terms, header(command::WRITE_ZEROES, 1 << 4, 0, 512), Invalid);
    check_refused(&terms, header(command::READ, command_flag::NO_HOLE, 0, 512), Invalid);
    check_refused(&terms, header(8, 0, 0, 512), Invalid);
    check_refused(&terms, header(u16::MAX, 0, 0, 0), Invalid);
    let unchosen = Terms { allocation: AllocationContext::NotChosen, ..terms };
    check_refused(&unchosen, header(command::BLOCK_STATUS, 0, 0, 512), Invalid);
    let simple = self::terms(Access::ReadWrite, 1, ReplyStyle::Simple);
    check_refused(&simple, header(command::READ, command_flag::DF, 0, 512), Invalid);
    let read_only = self::terms(Access::ReadOnly, 1, ReplyStyle::Structured);
    for command in [command::WRITE, command::TRIM, command::WRITE_ZEROES] {
        check_refused(&read_only, header(command, 0, end, 512), NotPermitted);
    }
    assert!(judge(&header(command::FLUSH, 0, 0, 0), &read_only).is_ok());
}

#[test]
fn trim_and_zeroes_may_be_larger_than_any_payload() {
    let geometry = Geometry { size: 1 << 40, alignment: 1, read_only: false, discards: true };
    let offer = Offer::new(&geometry, Access::ReadWrite, ReplyStyle::Simple);
    let terms = Terms { offer, allocation: AllocationContext::NotChosen };
    for command in [command::TRIM, command::WRITE_ZEROES, command::CACHE] {
        let command = judge(&header(command, 0, 5, u32::MAX), &terms).unwrap();
        assert_eq!(command.payload_length(), 0);
    }
}

#[test]
fn trim_is_refused_where_it_is_not_offered() {
    let geometry = Geometry { size: 1 << 20, alignment: 1, read_only: false, discards: false };
    let offer = Offer::new(&geometry, Access::ReadWrite, ReplyStyle::Simple);
    assert!(!offer.has(transmission_flag::SEND_TRIM));
    let terms = Terms { offer, allocation: AllocationContext::NotChosen };
    check_refused(&terms, header(command::TRIM, 0, 0, 512), ErrorCode::Invalid);
}

#[test]
fn breaches_end_the_connection() {
    let mut bytes = encode(&header(command::READ, 0, 0, 512));
    bytes[0] ^= 1;
    assert_eq!(decode_request(&bytes), Err(Violation::RequestMagic { magic: REQUEST_MAGIC ^ (1 << 24) }));
    let length = PAYLOAD_LENGTH_MAX + 1;
    let bytes = encode(&header(command::WRITE, 0, 0, length));
    assert_eq!(decode_request(&bytes), Err(Violation::PayloadTooLong { length }));
}

proptest! {
    #[test]
    fn what_was_encoded_is_decoded(
        flags: u16, command in 0_u16..10, cookie: u64, offset: u64, length in 0..=PAYLOAD_LENGTH_MAX,
    ) {
        let header = RequestHeader { flags, command, cookie, offset, length };
        prop_assert_eq!(decode_request(&encode(&header)), Ok(header));
    }

    #[test]
    fn whatever_is_accepted_lies_within_the_export_and_its_limits(
        flags in 0_u16..32, command in 0_u16..10, offset in 0_u64..(1 << 21), length in 0_u32..(1 << 21),
    ) {
        let terms = writable();
        if let Ok(command) = judge(&header(command, flags, offset, length), &terms) {
            prop_assert!(command.payload_length() <= PAYLOAD_LENGTH_MAX as usize);
            let range = match command {
                Command::Read(range, _) | Command::Write(range, _) | Command::Discard(range, _)
                | Command::Cache(range) | Command::WriteZeroes(range, ..) | Command::Describe(range, _) => range,
                Command::Flush | Command::Disconnect => ByteRange::new(0, 0),
            };
            prop_assert!(range.end() <= terms.offer.size);
            prop_assert_eq!(range.offset % 512, 0);
        }
    }
}
