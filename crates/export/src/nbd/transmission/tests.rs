//! How requests are decoded and checked.

use proptest::prelude::*;

use super::*;
use crate::nbd::export::Access;
use crate::nbd::protocol::{PAYLOAD_LENGTH_MAX, REQUEST_LENGTH, REQUEST_MAGIC};

fn terms(access: Access, alignment: u32, replies: ReplyStyle) -> Terms {
    let geometry = Geometry { size: 1 << 20, alignment, read_only: false, discards: true };
    Terms { offer: Offer::new(&geometry, access, replies), allocation: AllocationContext::Chosen }
}

fn writable() -> Terms {
    terms(Access::ReadWrite, 512, ReplyStyle::Structured)
}

fn header(command: u16, flags: u16, offset: u64, length: u32) -> RequestHeader {
    let payload_length = if command == command::WRITE { length } else { 0 };
    RequestHeader { flags, command, cookie: 7, offset, length: u64::from(length), payload_length }
}

fn extended(command: u16, flags: u16, offset: u64, length: u64) -> RequestHeader {
    let brings_payload = command == command::WRITE || flags & command_flag::PAYLOAD_LEN != 0;
    let payload_length = if brings_payload { length as u32 } else { 0 };
    RequestHeader { flags, command, cookie: 7, offset, length, payload_length }
}

fn encode(header: &RequestHeader) -> [u8; HEADER_LENGTH_MAX] {
    let mut bytes = [0; HEADER_LENGTH_MAX];
    bytes[..REQUEST_LENGTH].copy_from_slice(&header.encode());
    bytes
}

#[track_caller]
fn check_refused(terms: &Terms, header: RequestHeader, code: ErrorCode) {
    assert_eq!(judge(&header, terms).map_err(|refusal| refusal.code), Err(code), "{header:?}");
}

#[test]
fn every_command_is_understood_with_its_flags() {
    use command_flag::{DF, FAST_ZERO, FUA, NO_HOLE, REQ_ONE};
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
    check(command::WRITE_ZEROES, 0, Command::WriteZeroes(range, unmap, Effort::Any, Durability::Volatile));
    check(
        command::WRITE_ZEROES,
        NO_HOLE | FUA,
        Command::WriteZeroes(range, keep, Effort::Any, Durability::Durable),
    );
    let fast = Command::WriteZeroes(range, unmap, Effort::Fast, Durability::Volatile);
    check(command::WRITE_ZEROES, FAST_ZERO, fast);
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
    check_refused(&terms, header(command::WRITE_ZEROES, command_flag::REQ_ONE, 0, 512), Invalid);
    check_refused(&terms, header(command::WRITE_ZEROES, command_flag::PAYLOAD_LEN, 0, 512), Invalid);
    check_refused(&terms, header(command::WRITE, command_flag::FAST_ZERO, 0, 512), Invalid);
    let long = header(command::READ, command_flag::DF, 0, PAYLOAD_LENGTH_MAX + 512);
    check_refused(&terms, long, ErrorCode::Overflow);
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
fn what_a_request_holds_in_memory_is_reserved_for_it() {
    let terms = writable();
    let held = |command, length| judge(&header(command, 0, 0, length), &terms).unwrap().payload_length();
    assert_eq!(held(command::READ, 8192), 8192);
    assert_eq!(held(command::WRITE, 8192), 8192);
    assert_eq!(held(command::TRIM, 1 << 20), 0);
    assert!(held(command::BLOCK_STATUS, 512) >= 65_536 * size_of::<block::Extent>() + 16 * 8192);
}

#[test]
fn trim_is_refused_where_it_is_not_offered() {
    let geometry = Geometry { size: 1 << 20, alignment: 1, read_only: false, discards: false };
    let offer = Offer::new(&geometry, Access::ReadWrite, ReplyStyle::Simple);
    assert!(!offer.has(transmission_flag::SEND_TRIM));
    let terms = Terms { offer, allocation: AllocationContext::NotChosen };
    check_refused(&terms, header(command::TRIM, 0, 0, 512), ErrorCode::Invalid);
}

fn extended_terms() -> Terms {
    let geometry = Geometry { size: 1 << 50, alignment: 1, read_only: false, discards: true };
    let offer = Offer::new(&geometry, Access::ReadWrite, ReplyStyle::Extended).with_status_payload();
    Terms { offer, allocation: AllocationContext::Chosen }
}

#[test]
fn an_extended_request_has_sixty_four_bits_for_its_length() {
    let terms = extended_terms();
    let range = ByteRange::new(512, 1 << 45);
    let judged = |command, flags| judge(&extended(command, flags, range.offset, range.length), &terms);
    assert_eq!(judged(command::TRIM, 0), Ok(Command::Discard(range, Durability::Volatile)));
    assert_eq!(judged(command::CACHE, 0), Ok(Command::Cache(range)));
    assert_eq!(judged(command::BLOCK_STATUS, 0), Ok(Command::Describe(range, ExtentCount::Many)));
    let zeroes = Command::WriteZeroes(range, ZeroMode::MayUnmap, Effort::Any, Durability::Volatile);
    assert_eq!(judged(command::WRITE_ZEROES, 0), Ok(zeroes));
    check_refused(&terms, extended(command::READ, 0, 0, 1 << 33), ErrorCode::Invalid);
    check_refused(&terms, extended(command::TRIM, 0, 512, u64::MAX - 511), ErrorCode::Invalid);
}

#[test]
fn in_an_extended_request_a_flag_says_that_a_payload_follows_and_writes_bring_one_without_it() {
    use command_flag::PAYLOAD_LEN;
    let terms = extended_terms();
    let write = extended(command::WRITE, PAYLOAD_LEN, 0, 512);
    assert_eq!(judge(&write, &terms), Ok(Command::Write(ByteRange::new(0, 512), Durability::Volatile)));
    let unmarked = extended(command::WRITE, 0, 0, 512);
    assert_eq!(RequestHeader::decode(&unmarked.encode_extended(), ReplyStyle::Extended), Ok(unmarked));
    assert_eq!(unmarked.payload_length, 512);
    assert_eq!(judge(&unmarked, &terms), judge(&write, &terms));
    check_refused(&terms, extended(command::READ, PAYLOAD_LEN, 0, 512), ErrorCode::Invalid);
    let long = extended(command::READ, PAYLOAD_LEN, 0, 1 << 40);
    let expected = Violation::PayloadTooLong { length: 1 << 40 };
    assert_eq!(RequestHeader::decode(&long.encode_extended(), ReplyStyle::Extended), Err(expected));
}

#[test]
fn the_payload_of_a_status_request_says_its_range_and_names_a_chosen_context_once() {
    let terms = extended_terms();
    let header = extended(command::BLOCK_STATUS, command_flag::PAYLOAD_LEN, 4096, 12);
    assert!(brings_contexts(&header, &terms));
    let payload = |length: u64, id: u32| -> [u8; STATUS_PAYLOAD_LENGTH] {
        [&length.to_be_bytes()[..], &id.to_be_bytes()].concat().try_into().unwrap()
    };
    let narrowed = narrow(&header, payload(1 << 40, allocation::ID)).unwrap();
    let expected = Command::Describe(ByteRange::new(4096, 1 << 40), ExtentCount::Many);
    assert_eq!(judge(&narrowed, &terms), Ok(expected));
    assert_eq!(narrow(&header, payload(1, 9)).map_err(|refusal| refusal.code), Err(ErrorCode::Invalid));
    // No context, and one context twice.
    for length in [8, 16] {
        let header = extended(command::BLOCK_STATUS, command_flag::PAYLOAD_LEN, 4096, length);
        assert!(!brings_contexts(&header, &terms));
        check_refused(&terms, header, ErrorCode::Invalid);
    }
}

#[test]
fn breaches_end_the_connection() {
    let mut bytes = encode(&header(command::READ, 0, 0, 512));
    bytes[0] ^= 1;
    assert_eq!(
        RequestHeader::decode(&bytes, ReplyStyle::Simple),
        Err(Violation::RequestMagic { magic: REQUEST_MAGIC ^ (1 << 24) })
    );
    let length = PAYLOAD_LENGTH_MAX + 1;
    let bytes = encode(&header(command::WRITE, 0, 0, length));
    assert_eq!(
        RequestHeader::decode(&bytes, ReplyStyle::Simple),
        Err(Violation::PayloadTooLong { length: u64::from(length) })
    );
}

proptest! {
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
