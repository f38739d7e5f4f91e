//! The server's answers to what clients send in the negotiation.

use proptest::prelude::*;

use super::*;
use crate::nbd::protocol::negotiation::{self, OptionReplyHeader};
use crate::nbd::protocol::{OPTION_MAGIC, OPTION_REPLY_HEADER_LENGTH, transmission_flag};
use crate::nbd::test_device::{TestDevice, export};

const FIXED: u32 = 1;
const NO_ZEROES: u32 = 2;

/// A client's side of a negotiation, message by message.
struct Client {
    bytes: Vec<u8>,
}

impl Client {
    fn new(flags: u32) -> Self {
        Self { bytes: flags.to_be_bytes().to_vec() }
    }

    fn option(mut self, option: u32, data: &[u8]) -> Self {
        self.bytes.extend(negotiation::encode_option(option, data));
        self
    }

    fn talk(self) -> Outcome {
        negotiate(&self.bytes, self.bytes.len().max(1))
    }

    fn talk_where(self, tls: TlsMode) -> Outcome {
        negotiate_where(tls, &self.bytes, self.bytes.len())
    }
}

struct Outcome {
    replies: Vec<u8>,
    end: Result<Option<Agreement>, Violation>,
    kept_max: usize,
}

impl Outcome {
    fn replies(&self) -> Vec<(u32, u32, Vec<u8>)> {
        let mut rest = &self.replies[..];
        let mut replies = Vec::new();
        while !rest.is_empty() {
            let (header, behind) = rest.split_first_chunk::<OPTION_REPLY_HEADER_LENGTH>().unwrap();
            let header = OptionReplyHeader::decode(header).unwrap();
            let (data, behind) = behind.split_at(header.length as usize);
            replies.push((header.option, header.kind, data.to_vec()));
            rest = behind;
        }
        replies
    }

    fn kinds(&self) -> Vec<u32> {
        self.replies().into_iter().map(|(_, kind, _)| kind).collect()
    }

    fn agreement(self) -> Agreement {
        self.end.unwrap().expect("an agreement")
    }
}

fn exports() -> Exports {
    Exports::new([export("first", &TestDevice::new(1 << 20)), export("second", &TestDevice::new(2 << 20))])
}

/// Feeds `bytes`, at most `step` at a time, as a connection would.
fn negotiate(bytes: &[u8], step: usize) -> Outcome {
    negotiate_where(TlsMode::Off, bytes, step)
}

/// Feeds them with this mode of TLS; bytes after its beginning count as encrypted.
fn negotiate_where(tls: TlsMode, bytes: &[u8], step: usize) -> Outcome {
    let exports = exports();
    let mut machine = Negotiation::with_tls(tls);
    let mut outcome = Outcome { replies: Vec::new(), end: Ok(None), kept_max: 0 };
    let mut input = Vec::new();
    let mut arriving = bytes.chunks(step);
    loop {
        match machine.advance(&input, &exports, &mut outcome.replies) {
            Err(violation) => {
                outcome.end = Err(violation);
                return outcome;
            }
            Ok((used, step)) => {
                input.drain(..used);
                match step {
                    Step::Continue => {}
                    Step::NeedBytes => {
                        outcome.kept_max = outcome.kept_max.max(input.len());
                        let Some(bytes) = arriving.next() else { return outcome };
                        input.extend_from_slice(bytes);
                    }
                    Step::Agreed(agreement) => {
                        outcome.end = Ok(Some(agreement));
                        return outcome;
                    }
                    Step::StartTls => machine.begin_tls(),
                    Step::Aborted => return outcome,
                }
            }
        }
    }
}

fn info_data(name: &str, facts: &[u16]) -> Vec<u8> {
    InfoRequest::encode(name, facts)
}

fn context_data(name: &str, queries: &[&str]) -> Vec<u8> {
    MetaContextRequest { export: name, queries: queries.to_vec() }.encode()
}

#[test]
fn go_tells_everything_that_was_asked_for_and_agrees() {
    let outcome = Client::new(FIXED | NO_ZEROES)
        .option(number::STRUCTURED_REPLY, &[])
        .option(number::GO, &info_data("second", &[info::NAME, info::DESCRIPTION, info::BLOCK_SIZE]))
        .talk();
    let replies = outcome.replies();
    assert_eq!(outcome.kinds(), [1, 3, 3, 3, 3, 1]);
    assert_eq!(replies[1].2[..10], [0, 0, 0, 0, 0, 0, 0, 0x20, 0, 0]);
    assert_eq!(replies[2].2, b"\0\x01second");
    assert_eq!(replies[3].2, b"\0\x02the disk second");
    assert_eq!(replies[4].2, [0, 3, 0, 0, 0, 1, 0, 0, 0x10, 0, 2, 0, 0, 0]);
    let agreement = outcome.agreement();
    assert_eq!(agreement.export.name, "second");
    assert_eq!(agreement.offer.replies, ReplyStyle::Structured);
    assert!(agreement.offer.has(transmission_flag::SEND_DF | transmission_flag::CAN_MULTI_CONN));
    assert_eq!(agreement.allocation, AllocationContext::NotChosen);
}

#[test]
fn export_name_agrees_with_and_without_padding() {
    for (flags, length) in [(0, 134), (FIXED, 134), (FIXED | NO_ZEROES, 10)] {
        let outcome = Client::new(flags).option(number::EXPORT_NAME, b"").talk();
        assert_eq!(outcome.replies.len(), length);
        let agreement = outcome.agreement();
        assert_eq!(agreement.export.name, "first", "the empty name is the default export");
        assert!(!agreement.offer.has(transmission_flag::SEND_DF), "no structured replies, no DF");
    }
}

#[test]
fn an_unknown_export_is_an_error_where_errors_can_be_told_and_the_end_where_not() {
    let outcome = Client::new(FIXED).option(number::GO, &info_data("third", &[])).talk();
    assert_eq!(outcome.kinds(), [option_reply::ERR_UNKNOWN]);
    assert!(outcome.end.unwrap().is_none());
    let outcome = Client::new(FIXED).option(number::EXPORT_NAME, b"third").talk();
    assert_eq!(outcome.end.err(), Some(Violation::UnknownExport));
}

#[test]
fn list_names_every_export() {
    let outcome = Client::new(FIXED).option(number::LIST, &[]).option(number::ABORT, b"bye").talk();
    assert_eq!(outcome.kinds(), [2, 2, 1, 1]);
    assert_eq!(outcome.replies()[1].2, b"\0\0\0\x06secondthe disk second");
}

#[test]
fn what_is_not_offered_or_malformed_is_refused_and_negotiation_goes_on() {
    let long = vec![0; OPTION_LENGTH_MAX as usize + 1];
    let outcome = Client::new(FIXED)
        .option(number::STARTTLS, &[])
        .option(77, b"whatever")
        .option(77, &long)
        .option(number::GO, &long)
        .option(number::LIST, b"no data allowed")
        .option(number::GO, b"\0\0\0\xffshort")
        .option(number::SET_META_CONTEXT, &context_data("first", &["base:allocation"]))
        .option(number::INFO, &info_data("first", &[]))
        .talk();
    use option_reply::{ACK, ERR_INVALID, ERR_POLICY, ERR_TOO_BIG, ERR_UNSUP, INFO};
    let expected = [
        ERR_POLICY,
        ERR_UNSUP,
        ERR_UNSUP,
        ERR_TOO_BIG,
        ERR_INVALID,
        ERR_INVALID,
        ERR_INVALID, // no structured replies yet
        INFO,
        ACK,
    ];
    assert_eq!(outcome.kinds(), expected);
    assert!(outcome.end.unwrap().is_none());
}

#[test]
fn where_tls_is_required_everything_else_waits_for_it() {
    use option_reply::{ACK, ERR_TLS_REQD, INFO};
    let long = vec![0; OPTION_LENGTH_MAX as usize + 1];
    let outcome = Client::new(FIXED)
        .option(number::LIST, &[])
        .option(number::INFO, &info_data("first", &[]))
        .option(number::GO, &info_data("no such export", &[]))
        .option(number::STRUCTURED_REPLY, &[])
        .option(number::EXTENDED_HEADERS, &[])
        .option(77, b"whatever")
        .option(77, &long)
        .option(number::GO, b"garbage")
        .option(number::STARTTLS, &[])
        .option(number::GO, &info_data("first", &[]))
        .talk_where(TlsMode::Required);
    assert_eq!(outcome.kinds(), [&[ERR_TLS_REQD; 8][..], &[ACK, INFO, ACK]].concat());
    assert_eq!(outcome.agreement().offer.replies, ReplyStyle::Simple);
    let outcome = Client::new(FIXED).option(number::EXPORT_NAME, b"first").talk_where(TlsMode::Required);
    assert_eq!(outcome.end.err(), Some(Violation::ExportNameBeforeTls));
    let outcome = Client::new(FIXED).option(number::ABORT, &[]).talk_where(TlsMode::Required);
    assert_eq!(outcome.kinds(), [ACK]);
    let outcome = Client::new(0).option(number::STARTTLS, &[]).talk_where(TlsMode::Required);
    assert_eq!(outcome.end.err(), Some(Violation::NotFixed { option: number::STARTTLS }));
}

#[test]
fn where_tls_is_offered_what_was_agreed_on_before_it_is_forgotten() {
    use option_reply::{ACK, ERR_INVALID, INFO, META_CONTEXT, SERVER};
    let chosen = context_data("first", &["base:allocation"]);
    let outcome = Client::new(FIXED)
        .option(number::LIST, &[])
        .option(number::STRUCTURED_REPLY, &[])
        .option(number::SET_META_CONTEXT, &chosen)
        .option(number::STARTTLS, b"no data allowed")
        .option(number::STARTTLS, &[])
        .option(number::STARTTLS, &[])
        .option(number::SET_META_CONTEXT, &chosen)
        .option(number::GO, &info_data("first", &[]))
        .talk_where(TlsMode::Offered);
    let before = [SERVER, SERVER, ACK, ACK, META_CONTEXT, ACK, ERR_INVALID, ACK];
    let after = [ERR_INVALID, ERR_INVALID, INFO, ACK];
    assert_eq!(outcome.kinds(), [&before[..], &after].concat());
    let agreement = outcome.agreement();
    assert_eq!(agreement.offer.replies, ReplyStyle::Simple);
    assert_eq!(agreement.allocation, AllocationContext::NotChosen);
    // A client that does not want it continues without.
    let outcome = Client::new(FIXED).option(number::EXPORT_NAME, b"second").talk_where(TlsMode::Offered);
    assert_eq!(outcome.agreement().export.name, "second");
}

#[test]
fn extended_headers_are_agreed_on_for_good() {
    let chosen = context_data("first", &["base:allocation"]);
    let outcome = Client::new(FIXED)
        .option(number::EXTENDED_HEADERS, b"no data allowed")
        .option(number::EXTENDED_HEADERS, &[])
        .option(number::STRUCTURED_REPLY, &[])
        .option(number::SET_META_CONTEXT, &chosen)
        .option(number::GO, &info_data("first", &[]))
        .talk();
    use option_reply::{ACK, ERR_EXT_HEADER_REQD, ERR_INVALID, INFO, META_CONTEXT};
    assert_eq!(outcome.kinds(), [ERR_INVALID, ACK, ERR_EXT_HEADER_REQD, META_CONTEXT, ACK, INFO, ACK]);
    let agreement = outcome.agreement();
    assert_eq!(agreement.offer.replies, ReplyStyle::Extended);
    assert!(agreement.offer.has(transmission_flag::SEND_DF | transmission_flag::BLOCK_STATUS_PAYLOAD));
    let outcome =
        Client::new(FIXED).option(number::EXTENDED_HEADERS, &[]).option(number::EXPORT_NAME, b"first").talk();
    assert_eq!(outcome.end.err(), Some(Violation::ExportNameAfterExtendedHeaders));
}

#[test]
fn naming_contexts_is_offered_to_whom_has_chosen_some_or_looks_around() {
    let offered = |client: Client| {
        let outcome = client.talk();
        let (_, _, fact) = outcome.replies().into_iter().rfind(|(_, kind, _)| *kind == 3).unwrap();
        u16::from_be_bytes([fact[10], fact[11]]) & transmission_flag::BLOCK_STATUS_PAYLOAD != 0
    };
    let extended = || Client::new(FIXED).option(number::EXTENDED_HEADERS, &[]);
    let chosen = context_data("first", &["base:allocation"]);
    assert!(offered(extended().option(number::INFO, &info_data("first", &[]))));
    assert!(!offered(extended().option(number::GO, &info_data("first", &[]))));
    let chooses = extended().option(number::SET_META_CONTEXT, &chosen);
    assert!(!offered(chooses.option(number::GO, &info_data("second", &[]))));
    let structured = Client::new(FIXED).option(number::STRUCTURED_REPLY, &[]);
    assert!(!offered(structured.option(number::INFO, &info_data("first", &[]))));
}

#[test]
fn the_allocation_context_holds_for_the_export_it_was_chosen_for() {
    let check = |chosen_for: &str, queries: &[&str], used: &str, expected| {
        let outcome = Client::new(FIXED)
            .option(number::STRUCTURED_REPLY, &[])
            .option(number::SET_META_CONTEXT, &context_data(chosen_for, queries))
            .option(number::GO, &info_data(used, &[]))
            .talk();
        assert_eq!(outcome.agreement().allocation, expected);
    };
    use AllocationContext::{Chosen, NotChosen};
    check("first", &["qemu:x", "base:allocation"], "first", Chosen);
    check("", &["base:allocation"], "first", Chosen);
    check("second", &["base:allocation"], "first", NotChosen);
    check("first", &["base:"], "first", NotChosen);
    check("first", &[], "first", NotChosen);
    check("third", &["base:allocation"], "first", NotChosen);
}

#[test]
fn choosing_contexts_again_replaces_the_choice_also_when_it_fails() {
    let outcome = Client::new(FIXED)
        .option(number::STRUCTURED_REPLY, &[])
        .option(number::SET_META_CONTEXT, &context_data("first", &["base:allocation"]))
        .option(number::SET_META_CONTEXT, b"garbage")
        .option(number::GO, &info_data("first", &[]))
        .talk();
    assert_eq!(outcome.agreement().allocation, AllocationContext::NotChosen);
}

#[test]
fn contexts_are_listed_by_name_and_by_namespace() {
    for (queries, listed) in [
        (&[][..], true),
        (&["base:"], true),
        (&["base:allocation"], true),
        (&["base:other"], false),
        (&["qemu:"], false),
    ] {
        let outcome = Client::new(FIXED)
            .option(number::STRUCTURED_REPLY, &[])
            .option(number::LIST_META_CONTEXT, &context_data("first", queries))
            .talk();
        let expected: &[u32] = if listed { &[1, 4, 1] } else { &[1, 1] };
        assert_eq!(outcome.kinds(), expected, "{queries:?}");
    }
}

#[test]
fn breaches_end_the_connection() {
    assert_eq!(Client::new(4).talk().end.err(), Some(Violation::ClientFlags { flags: 4 }));
    let outcome = Client::new(0).option(number::LIST, &[]).talk();
    assert_eq!(outcome.end.err(), Some(Violation::NotFixed { option: number::LIST }));
    let mut client = Client::new(FIXED);
    client.bytes.extend([b'x'; 16]);
    assert_eq!(client.talk().end.err(), Some(Violation::OptionMagic { magic: 0x7878_7878_7878_7878 }));
    let mut client = Client::new(FIXED).option(99, &[]);
    client.bytes.truncate(16);
    client.bytes.extend((OPTION_SKIP_MAX + 1).to_be_bytes());
    let expected = Violation::OptionTooLong { option: 99, length: OPTION_SKIP_MAX + 1 };
    assert_eq!(client.talk().end.err(), Some(expected));
}

#[test]
fn options_without_end_are_cut_off() {
    let mut client = Client::new(FIXED);
    for _ in 0..=OPTIONS_MAX {
        client = client.option(77, &[]);
    }
    assert_eq!(client.talk().end.err(), Some(Violation::TooManyOptions));
}

/// Bytes that get past the first checks often.
fn hostile() -> impl Strategy<Value = Vec<u8>> {
    let option = (0_u32..12, prop::collection::vec(any::<u8>(), 0..80), any::<Option<u32>>()).prop_map(
        |(option, data, length)| {
            let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
            bytes.extend(option.to_be_bytes());
            bytes.extend(length.unwrap_or(data.len() as u32).to_be_bytes());
            bytes.extend(data);
            bytes
        },
    );
    (0_u32..4, prop::collection::vec(option, 0..8)).prop_map(|(flags, options)| {
        let mut bytes = flags.to_be_bytes().to_vec();
        bytes.extend(options.concat());
        bytes
    })
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic_or_keep_more_than_its_limit(
        bytes in prop_oneof![hostile(), prop::collection::vec(any::<u8>(), 0..200)],
        step in 1_usize..50,
    ) {
        let outcome = negotiate(&bytes, step);
        prop_assert!(outcome.kept_max <= INPUT_LENGTH_MAX);
    }

    #[test]
    fn it_makes_no_difference_how_the_bytes_arrive(bytes in hostile(), step in 1_usize..50) {
        let whole = negotiate(&bytes, bytes.len());
        let pieces = negotiate(&bytes, step);
        prop_assert_eq!(whole.replies, pieces.replies);
        prop_assert_eq!(whole.end.is_ok(), pieces.end.is_ok());
    }

    #[test]
    fn nothing_gets_an_export_where_tls_is_required_and_has_not_begun(bytes in hostile()) {
        let mut machine = Negotiation::with_tls(TlsMode::Required);
        let (exports, mut input, mut output) = (exports(), &bytes[..], Vec::new());
        while let Ok((used, step)) = machine.advance(input, &exports, &mut output) {
            input = &input[used..];
            match step {
                Step::Continue => {}
                Step::Agreed(_) => prop_assert!(false, "an agreement"),
                Step::NeedBytes | Step::Aborted | Step::StartTls => break,
            }
        }
        prop_assert!(!output.windows(8).any(|bytes| bytes == b"the disk"), "nothing is told either");
    }

    #[test]
    fn no_data_makes_the_option_decoder_panic(
        option in 0_u32..12,
        data in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let _ = decode_option(option, &data);
    }
}
