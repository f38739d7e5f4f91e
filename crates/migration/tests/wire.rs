//! Tests the messages between hosts: decoded as they were sent, bounded, and without panics.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use chronicle::Generation;
use migration::journal::{Forwarding, ImageFormat, Origin};
use migration::message::ToSource;
use migration::restoration::{Knowledge, Whereabouts};
use migration::vm::cold::Form;
use migration::wire::{
    ASKED_MAX, Acceptance, AcceptedVolume, Allocation, Beside, DETAIL_BYTES_MAX, FormerContent, Held,
    LeftBehind, MESSAGE_BYTES_MAX, Message, NAME_BYTES_MAX, Offer, OfferedStrategy, OfferedVm, OfferedVolume,
    PROBES_MAX, ProbeSeen, REMARKS_MAX, Refusal, RefusalCode, Sharing, Survey, Surveyed, SurveyedPlace,
    VERSION, VOLUMES_MAX, WireError, decode, encode,
};
use migration::{Attempt, MigrationId, VolumeId};
use proptest::prelude::*;

const MIGRATION: MigrationId = MigrationId(9);

#[test]
fn an_opening_and_its_answers_are_read_as_they_were_sent() {
    for origin in [Origin::Unknown, Origin::Made, Origin::Given] {
        for strategy in [OfferedStrategy::Mirror, OfferedStrategy::Tracking, OfferedStrategy::PostCopy] {
            let Message::Open { migration, offer } = offer_of("disk", origin) else { unreachable!() };
            check(&Message::Open { migration, offer: Offer { strategy, ..offer } });
        }
    }
    check(&accepted(2));
    let refusal = Refusal { code: RefusalCode::NoSpace, detail: "make room".to_owned() };
    check(&Message::Refused { migration: MIGRATION, refusal });
}

#[test]
fn the_version_of_a_program_is_read_as_it_was_sent_and_no_longer_than_a_name() {
    check(&Message::Program { version: "0.1.0".to_owned() });
    let long = Message::Program { version: "1".repeat(NAME_BYTES_MAX + 1) };
    assert_eq!(encode(&long), Err(WireError::TooMany { what: "bytes of a name" }));
}

#[test]
fn a_look_ahead_and_its_answer_are_read_as_they_were_sent() {
    let Message::Open { offer, .. } = offer_of("disk", Origin::Unknown) else { unreachable!() };
    let survey = |held_bytes| Survey { offer: offer.clone(), held_bytes, vm: vec![1, 2, 3] };
    check(&Message::Survey { question: 7, survey: survey(vec![4096; offer.volumes.len()]) });
    let short = Message::Survey { question: 7, survey: survey(Vec::new()) };
    assert_eq!(encode(&short), Err(WireError::Malformed));
    let place = SurveyedPlace {
        volume: VolumeId([3; 16]),
        store: "fast".to_owned(),
        place: "/srv/disk.img".to_owned(),
        format: ImageFormat::Qcow2,
        free_bytes: Some(1 << 40),
        has_replica: true,
    };
    let refusal = Refusal { code: RefusalCode::NameTaken, detail: "choose another".to_owned() };
    let surveyed = |count| Surveyed {
        refusals: vec![refusal.clone(); count],
        warnings: vec!["slow".to_owned(); count],
        places: vec![place.clone()],
        has_hooks: true,
    };
    check(&Message::Surveyed { question: 7, surveyed: surveyed(2) });
    // A message beyond a limit is refused.
    let probe =
        |count| Message::Probe { question: 7, store: "fast".to_owned(), secrets: vec![[7; 32]; count] };
    check(&probe(PROBES_MAX));
    assert!(matches!(encode(&probe(PROBES_MAX + 1)), Err(WireError::TooMany { .. })));
    let known = [
        Whereabouts::Here,
        Whereabouts::HereUnconfirmed,
        Whereabouts::Waits,
        Whereabouts::WithYou,
        Whereabouts::Elsewhere,
        Whereabouts::AtAThird,
    ]
    .map(|whereabouts| (VolumeId([6; 16]), Knowledge { generation: Generation(3), whereabouts }));
    check(&Message::Known { question: 7, known: known.to_vec(), knows_all: true });
    let whose = |count| Message::Whose { question: 7, volumes: vec![VolumeId([6; 16]); count] };
    check(&whose(ASKED_MAX));
    assert_eq!(encode(&whose(ASKED_MAX + 1)), Err(WireError::TooMany { what: "volumes" }));
    check(&Message::Probed {
        question: 7,
        seen: vec![ProbeSeen::Nothing, ProbeSeen::Unlocked, ProbeSeen::Locked],
    });
    let bytes = encode(&Message::Surveyed { question: 7, surveyed: surveyed(REMARKS_MAX + 1) }).unwrap();
    let expected = Message::Surveyed { question: 7, surveyed: surveyed(REMARKS_MAX) };
    assert_eq!(decode(&bytes), Ok(expected));
}

#[test]
fn what_is_beyond_a_limit_is_neither_sent_nor_read() {
    assert_eq!(
        encode(&offer(&"x".repeat(NAME_BYTES_MAX + 1))),
        Err(WireError::TooMany { what: "bytes of a name" })
    );
    check(&accepted(VOLUMES_MAX));
    assert_eq!(encode(&accepted(VOLUMES_MAX + 1)), Err(WireError::TooMany { what: "volumes" }));
    assert_eq!(
        decode(&vec![0; MESSAGE_BYTES_MAX + 1]),
        Err(WireError::TooLong { bytes: MESSAGE_BYTES_MAX + 1 })
    );
    assert_eq!(decode(&[VERSION + 1, 0]), Err(WireError::Version { found: VERSION + 1 }));
    // A list that claims to have more entries than there are bytes for.
    assert_eq!(decode(&[VERSION, 1, 1, 0xFF, 0xFF, 0xFF, 0xFF, 0x0F]), Err(WireError::Malformed));
}

#[test]
fn that_somebody_there_cancelled_it_is_a_word_of_its_own() {
    check(&Message::ToSource { migration: MIGRATION, message: ToSource::Cancelled });
}

#[test]
fn words_of_another_host_are_one_visible_line() {
    let said = "no\nforged\u{1b}[2J\u{202e}".to_owned();
    let clean = "no\\nforged\\u{1b}[2J\\u{202e}";
    let read = |message: &Message| decode(&encode(message).unwrap()).unwrap();
    let migration = MigrationId(3);
    let refusal = Refusal { code: RefusalCode::Busy, detail: said.clone() };
    let Message::Refused { refusal, .. } = read(&Message::Refused { migration, refusal }) else { panic!() };
    assert_eq!(refusal.detail, clean);
    let message = ToSource::Discarded { left_over: said.clone() };
    let Message::ToSource { message: ToSource::Discarded { left_over }, .. } =
        read(&Message::ToSource { migration, message })
    else {
        panic!()
    };
    assert_eq!(left_over, clean);
    let surveyed = Surveyed { warnings: vec![said], ..Surveyed::default() };
    let Message::Surveyed { surveyed, .. } = read(&Message::Surveyed { question: 1, surveyed }) else {
        panic!()
    };
    assert_eq!(surveyed.warnings, [clean]);
}

#[test]
fn an_explanation_is_cut_rather_than_not_sent() {
    let detail = "ü".repeat(DETAIL_BYTES_MAX);
    let message = ToSource::HandedBack { attempt: Attempt(1), generations: Vec::new(), detail };
    let bytes = encode(&Message::ToSource { migration: MIGRATION, message }).unwrap();
    let read = decode(&bytes).unwrap();
    assert!(matches!(read, Message::ToSource { message: ToSource::HandedBack { detail, .. }, .. }
        if detail.len() <= DETAIL_BYTES_MAX && detail.len() > DETAIL_BYTES_MAX - 4));
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = decode(&bytes);
        if let Some(version) = bytes.first_mut() {
            *version = VERSION;
        }
        if let Ok(message) = decode(&bytes) {
            // Every decoded message can be encoded.
            prop_assert!(encode(&message).is_ok());
        }
    }

    #[test]
    fn a_message_that_is_cut_or_changed_is_refused_or_another(cut in 0usize..60, at in 0usize..60, to in any::<u8>()) {
        let mut bytes = encode(&offer("disk")).unwrap();
        let changed = at % bytes.len();
        prop_assert!(decode(&bytes[..cut % bytes.len()]).is_err());
        bytes[changed] = to;
        let _ = decode(&bytes);
    }
}

fn check(message: &Message) {
    let bytes = encode(message).unwrap();
    assert!(bytes.len() <= MESSAGE_BYTES_MAX);
    assert_eq!(decode(&bytes).as_ref(), Ok(message));
}

fn offer(name: &str) -> Message {
    offer_of(name, Origin::Given)
}

fn offer_of(name: &str, origin: Origin) -> Message {
    let volume = OfferedVolume {
        volume: VolumeId([3; 16]),
        name: name.to_owned(),
        size_bytes: 1 << 40,
        block_size_bytes: 65536,
        generation: Generation(2),
        format: ImageFormat::Qcow2,
        left_behind: LeftBehind::Replica,
        origin,
    };
    let offer = Offer {
        volumes: vec![volume],
        store: "fast".to_owned(),
        format: Some(ImageFormat::Qcow2),
        allocation: Allocation::Thick,
        forwarding: Forwarding::Always,
        vm: Some(OfferedVm { name: name.to_owned(), form: Form::Cold }),
        sharing: Sharing::Wanted,
        strategy: OfferedStrategy::default(),
    };
    Message::Open { migration: MIGRATION, offer }
}

fn accepted(count: usize) -> Message {
    let copy = Held::Copy { departure: MigrationId(5), generation: Generation(1) };
    let beside = Some(Beside { file: "v.img".to_owned(), token: [9; 32] });
    let volume = |held| AcceptedVolume {
        volume: VolumeId([3; 16]),
        held,
        elsewhere: FormerContent::Zero,
        beside: beside.clone(),
    };
    let held = [Held::Nothing, copy].into_iter().cycle().take(count);
    let volumes = held.map(volume).collect();
    Message::Accepted { migration: MIGRATION, acceptance: Acceptance { volumes, incarnation: 12 } }
}
