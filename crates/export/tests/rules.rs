//! The rules of the protocol for requests, one by one: the server's answer to a request that keeps or breaks each, and
//! whether the connection continues.
//!
//! The rules of negotiation are tested without sockets, in `negotiation/tests.rs`.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use Answer::{Closed, Error, Success};
use Style::{Extended, Simple, Structured};
use block::engine::EngineChoice;
use export::nbd::Limits;
use export::nbd::protocol::command_flag::{DF, FAST_ZERO, FUA, NO_HOLE, PAYLOAD_LEN, REQ_ONE};
use export::nbd::protocol::{PAYLOAD_LENGTH_MAX, allocation, chunk, command};
use support::raw_client::{RawClient, RawReply, Style};
use support::{Running, SIZE};

const EPERM: u32 = 1;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const EOVERFLOW: u32 = 75;
const ENOTSUP: u32 = 95;

/// The styles that have compact headers, and all of them.
const COMPACT: &[Style] = &[Simple, Structured];
const EVERY: &[Style] = &[Simple, Structured, Extended];

const UNKNOWN_FLAG: u16 = 1 << 9;
/// A length beyond every limit on a payload, and within the disk.
const LONG: u64 = PAYLOAD_LENGTH_MAX as u64 + 512;

#[derive(Clone, Copy)]
enum Answer {
    Success,
    Error(u32),
    Closed,
}

struct Rule {
    says: &'static str,
    styles: &'static [Style],
    export: &'static str,
    command: u16,
    flags: u16,
    offset: u64,
    length: u64,
    answer: Answer,
}

/// Makes a rule about a request to the writable export `disk`.
const fn rule(
    says: &'static str,
    styles: &'static [Style],
    command: u16,
    flags: u16,
    (offset, length): (u64, u64),
    answer: Answer,
) -> Rule {
    Rule { says, styles, export: "disk", command, flags, offset, length, answer }
}

/// Makes a rule about a request to the read-only export `frozen`.
const fn frozen(says: &'static str, command: u16, flags: u16, answer: Answer) -> Rule {
    Rule { says, styles: EVERY, export: "frozen", command, flags, offset: 0, length: 512, answer }
}

const READ: u16 = command::READ;
const WRITE: u16 = command::WRITE;
const FLUSH: u16 = command::FLUSH;
const TRIM: u16 = command::TRIM;
const CACHE: u16 = command::CACHE;
const ZEROES: u16 = command::WRITE_ZEROES;
const STATUS: u16 = command::BLOCK_STATUS;

const RULES: &[Rule] = &[
    rule("an unknown command is refused", EVERY, 99, 0, (0, 512), Error(EINVAL)),
    rule("the command RESIZE is not known", EVERY, 8, 0, (0, 512), Error(EINVAL)),
    rule("FUA is allowed with a write", EVERY, WRITE, FUA, (0, 512), Success),
    rule("FUA is allowed with zeroing", EVERY, ZEROES, FUA, (0, 512), Success),
    rule("FUA is allowed with a trim", EVERY, TRIM, FUA, (0, 512), Success),
    rule("FUA is allowed with a flush", EVERY, FLUSH, FUA, (0, 0), Success),
    rule("FUA is allowed with a cache request", EVERY, CACHE, FUA, (0, 512), Success),
    rule("a read has no unknown flag", EVERY, READ, UNKNOWN_FLAG, (0, 512), Error(EINVAL)),
    rule("a write has no unknown flag", EVERY, WRITE, UNKNOWN_FLAG, (0, 512), Error(EINVAL)),
    rule("a flush has no unknown flag", EVERY, FLUSH, UNKNOWN_FLAG, (0, 0), Error(EINVAL)),
    rule("a trim has no unknown flag", EVERY, TRIM, UNKNOWN_FLAG, (0, 512), Error(EINVAL)),
    rule("a cache request has no unknown flag", EVERY, CACHE, UNKNOWN_FLAG, (0, 512), Error(EINVAL)),
    rule("zeroing has no unknown flag", EVERY, ZEROES, UNKNOWN_FLAG, (0, 512), Error(EINVAL)),
    rule("block status has no unknown flag", EVERY, STATUS, UNKNOWN_FLAG, (0, 512), Error(EINVAL)),
    rule("DF takes chunks", &[Simple], READ, DF, (0, 512), Error(EINVAL)),
    rule("DF is for reads", EVERY, WRITE, DF, (0, 512), Error(EINVAL)),
    rule("NO_HOLE is for zeroing", EVERY, TRIM, NO_HOLE, (0, 512), Error(EINVAL)),
    rule("FAST_ZERO is for zeroing", EVERY, TRIM, FAST_ZERO, (0, 512), Error(EINVAL)),
    rule("REQ_ONE is for block status", EVERY, READ, REQ_ONE, (0, 512), Error(EINVAL)),
    rule("PAYLOAD_LEN takes extended headers", COMPACT, WRITE, PAYLOAD_LEN, (0, 512), Error(EINVAL)),
    rule("a read ends within the export", EVERY, READ, 0, (SIZE, 1), Error(EINVAL)),
    rule("a read does not wrap around", EVERY, READ, 0, (u64::MAX - 100, 512), Error(EINVAL)),
    rule("a read is no longer than the maximum", EVERY, READ, 0, (0, LONG), Error(EINVAL)),
    rule("a whole read is no longer than the maximum", &[Structured], READ, DF, (0, LONG), Error(EOVERFLOW)),
    rule("a write may be of nothing", COMPACT, WRITE, 0, (0, 0), Success),
    rule("a write ends within the export", EVERY, WRITE, 0, (SIZE - 100, 512), Error(ENOSPC)),
    rule("a write does not wrap around", EVERY, WRITE, 0, (u64::MAX - 100, 512), Error(ENOSPC)),
    rule("a payload is no longer than the maximum", EVERY, WRITE, 0, (0, LONG), Closed),
    frozen("a read-only export is not written", WRITE, 0, Error(EPERM)),
    frozen("a read-only export is not written durably", WRITE, FUA, Error(EPERM)),
    // Zeroes, trims, announcements.
    rule("zeroing ends within the export", EVERY, ZEROES, 0, (SIZE - 100, 512), Error(ENOSPC)),
    rule("zeroing may be longer than a payload", EVERY, ZEROES, 0, (0, LONG), Success),
    rule("zeroing may be of nothing", EVERY, ZEROES, 0, (0, 0), Success),
    rule("zeroes may be asked to stay allocated", EVERY, ZEROES, NO_HOLE | FUA, (0, 512), Success),
    rule("zeroing may be asked to be fast", EVERY, ZEROES, FAST_ZERO | NO_HOLE, (0, 512), Success),
    frozen("a read-only export is not zeroed", ZEROES, 0, Error(EPERM)),
    frozen("a read-only export is not zeroed fast", ZEROES, FAST_ZERO, Error(EPERM)),
    rule("a trim ends within the export", EVERY, TRIM, 0, (SIZE - 100, 512), Error(EINVAL)),
    rule("a trim may be longer than a payload", EVERY, TRIM, 0, (0, LONG), Success),
    frozen("a read-only export is not trimmed", TRIM, 0, Error(EPERM)),
    rule("a cache request ends within the export", EVERY, CACHE, 0, (SIZE - 100, 512), Error(EINVAL)),
    rule("a cache request may be longer than a payload", EVERY, CACHE, 0, (0, LONG), Success),
    frozen("a read-only export may be cached", CACHE, 0, Success),
    rule("a flush has no length", EVERY, FLUSH, 0, (0, 512), Error(EINVAL)),
    rule("a flush has no offset", EVERY, FLUSH, 0, (512, 0), Error(EINVAL)),
    rule("block status takes a chosen context", &[Simple], STATUS, 0, (0, 512), Error(EINVAL)),
    rule("block status is about something", EVERY, STATUS, 0, (0, 0), Error(EINVAL)),
    rule("block status ends within the export", EVERY, STATUS, 0, (SIZE - 100, 512), Error(EINVAL)),
    rule("contexts are named in twelve bytes", &[Extended], STATUS, PAYLOAD_LEN, (0, 16), Error(EINVAL)),
    rule("a context is named", &[Extended], STATUS, PAYLOAD_LEN, (0, 8), Error(EINVAL)),
    rule("a named context was chosen", &[Extended], STATUS, PAYLOAD_LEN, (0, 12), Error(EINVAL)),
    rule("only what has one brings a payload", &[Extended], READ, PAYLOAD_LEN, (0, 512), Error(EINVAL)),
    rule("a write says that it brings a payload", &[Extended], WRITE, PAYLOAD_LEN, (0, 512), Success),
    rule("a write is one also if it does not say so", &[Extended], WRITE, 0, (0, 512), Success),
    rule("a flush brings no payload", &[Extended], FLUSH, PAYLOAD_LEN, (0, 512), Error(EINVAL)),
    rule("an unexpected payload is bounded", &[Extended], TRIM, PAYLOAD_LEN, (0, LONG), Closed),
    rule("lengths have 64 bits", &[Extended], TRIM, 0, (512, u64::MAX - 511), Error(EINVAL)),
    // Goodbye.
    rule("a goodbye has no reply", EVERY, command::DISC, 0, (0, 0), Closed),
    rule("a goodbye with a range is one", EVERY, command::DISC, 0, (512, 512), Closed),
];

#[test]
fn every_rule_gets_the_answer_that_the_protocol_names_and_the_connection_lives_on() {
    let server = Running::start(EngineChoice::Threads, Limits::STANDARD);
    for rule in RULES {
        for style in rule.styles {
            check(&server, rule, *style);
        }
    }
}

fn check(server: &Running, rule: &Rule, style: Style) {
    let scene = format!("{} ({style:?}, {} on {})", rule.says, rule.command, rule.export);
    let mut client = RawClient::connect(server, rule.export, style);
    send(&mut client, rule, style);
    match rule.answer {
        Closed => return assert!(client.is_closed(), "{scene}"),
        Error(code) => assert_eq!(client.error_of(7), code, "{scene}"),
        Success => assert_eq!(client.error_of(7), 0, "{scene}"),
    }
    flush(&mut client, style, &scene);
}

fn send(client: &mut RawClient, rule: &Rule, style: Style) {
    let Rule { command, flags, offset, length, .. } = *rule;
    let brings_payload = command == WRITE || flags & PAYLOAD_LEN != 0 && style == Extended;
    // A payload that is too long is only announced: the server has closed before all of it could be sent.
    let payload = vec![0x55; if brings_payload && length < LONG { length as usize } else { 0 }];
    if style == Extended {
        client.extended_request(command, flags, 7, offset, length, &payload);
    } else {
        client.request(command, flags, 7, offset, u32::try_from(length).unwrap(), &payload);
    }
}

/// Checks that the stream is still in step.
fn flush(client: &mut RawClient, style: Style, scene: &str) {
    match style {
        Extended => client.extended_request(FLUSH, 0, 8, 0, 0, &[]),
        Simple | Structured => client.request(FLUSH, 0, 8, 0, 0, &[]),
    }
    assert_eq!(client.error_of(8), 0, "{scene}: the connection lives on");
}

#[test]
fn a_request_opens_with_the_magic_of_its_style() {
    let server = Running::start(EngineChoice::Threads, Limits::STANDARD);
    for style in COMPACT {
        let mut client = RawClient::connect(&server, "disk", *style);
        client.extended_request(FLUSH, 0, 1, 0, 0, &[]);
        assert!(client.is_closed(), "{style:?}");
    }
    let mut client = RawClient::connect(&server, "disk", Extended);
    client.request(FLUSH, 0, 1, 0, 0, &[0; 4]);
    assert!(client.is_closed());
}

#[test]
fn zeroing_that_would_be_slow_fails_at_once_and_changes_nothing_only_if_it_was_asked_to_be_fast() {
    let server = Running::start(EngineChoice::Threads, Limits::STANDARD);
    let mut client = RawClient::connect(&server, "disk", Structured);
    client.request(WRITE, 0, 1, 0, 512, &[1; 512]);
    assert_eq!(client.error_of(1), 0);
    server.probe.zero_slowly();
    for flags in [FAST_ZERO, FAST_ZERO | NO_HOLE, FAST_ZERO | FUA] {
        client.request(ZEROES, flags, 2, 0, 512, &[]);
        assert_eq!(client.error_of(2), ENOTSUP);
    }
    client.request(READ, DF, 3, 0, 512, &[]);
    let data = [&0_u64.to_be_bytes()[..], &[1; 512]].concat();
    assert_eq!(client.reply(), RawReply::Chunk(chunk::DONE, chunk::OFFSET_DATA, 3, data));
    client.request(ZEROES, 0, 4, 0, 512, &[]);
    assert_eq!(client.error_of(4), 0, "who does not ask for speed is not refused");
}

#[test]
fn extended_replies_repeat_the_offset_and_describe_more_than_four_gibibytes_can_hold() {
    let server = Running::start(EngineChoice::Threads, Limits::STANDARD);
    let mut client = RawClient::connect(&server, "disk", Extended);
    client.extended_request(WRITE, PAYLOAD_LEN, 1, 8192, 4096, &[3; 4096]);
    assert_eq!(client.reply(), RawReply::ExtendedChunk(chunk::DONE, chunk::NONE, 1, 8192, vec![]));
    client.extended_request(READ, 0, 2, 8192, 4096, &[]);
    let data = [&8192_u64.to_be_bytes()[..], &[3; 4096]].concat();
    assert_eq!(client.reply(), RawReply::ExtendedChunk(chunk::DONE, chunk::OFFSET_DATA, 2, 8192, data));

    let hole = u64::from(allocation::HOLE | allocation::ZERO);
    let mut expected = [allocation::ID, 3].map(u32::to_be_bytes).concat();
    let extents = [4096, hole, 4096, 0, SIZE - 4096 - 8192, hole];
    expected.extend(extents.map(u64::to_be_bytes).concat());
    let status =
        |offset, payload| RawReply::ExtendedChunk(chunk::DONE, chunk::BLOCK_STATUS_EXT, 3, offset, payload);
    client.extended_request(STATUS, 0, 3, 4096, SIZE - 4096, &[]);
    assert_eq!(client.reply(), status(4096, expected.clone()));
    // The same request, which names the context.
    let named = [&(SIZE - 4096).to_be_bytes()[..], &allocation::ID.to_be_bytes()].concat();
    client.extended_request(STATUS, PAYLOAD_LEN, 3, 4096, 12, &named);
    assert_eq!(client.reply(), status(4096, expected));
}
