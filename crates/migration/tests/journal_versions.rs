//! Tests that journals of earlier versions are read up to the last record.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use chronicle::StayId;
use migration::journal::{
    Ending, ExportAccess, FailureCode, Forwarding, Frames, ImageFormat, Outcome, Place, Promotion,
    ReservedContent, Stage, State, VERSION, encode,
};
use migration::{Attempt, MigrationId, VolumeId};

/// A journal as version 3 wrote it: a snapshot with a volume, a volume that left, and one that left and has just returned. Then
/// the last one is handed back.
const VERSION_3: &str = "\
    535445524e414a03ae0200002342f26c0000000000000000020100021111111111111111111111111111111111111111111111111111\
    11111111111101768080808004808004016100082f612f762e696d67000400000000004d010033333333333333333333333333333333\
    3333333333333333333333333333333301788080808004808004016100082f612f782e696d6700030000000000000100030501222222\
    22222222222222222222222222016100082f612f772e696d6700016200082f622f772e696d6700010177010500000001010100000000\
    000000000000000109090909090909090909090909090909090909090909090909090909090909090162016201000006013333333333\
    3333333333333333333333016100082f612f782e696d6700016200082f622f782e696d67000101780105000000010101000000000000\
    000000000001090909090909090909090909090909090909090909090909090909090909090901620162010000070133333333333333\
    333333333333333333016200082f622f782e696d6700016100092f612f78322e696d6700010178000301000100000000000000000000\
    000002090909090909090909090909090909090909090909090909090909090909090901620301333333333333333333333333333333\
    3301788080808004808004016100082f612f782e696d6700020000000000000133333333333333333333333333333333017880808080\
    04808004016100082f612f782e696d67000100000000004f010006090909090909090909090909090909090909090909090909090909\
    090909090901620201010800012222222222222222222222222222222222222222222222222222222222222222017780808080048080\
    04016100082f612f772e696d67000100000000004e010005090909090909090909090909090909090909090909090909090909090909\
    090901620201010028000000313ad7180100000000000000030203111111111111111111111111111111116309070133333333333333\
    3333333333333333330429000000230a7a50020000000000000004020f222222222222222222222222222222220c1111111111111111\
    1111111111111111808080800813000000906ff6a6030000000000000005010a0703026e6f0000000000000000000000";

#[test]
fn journal_of_version_3_says_what_it_said() {
    let bytes = bytes(VERSION_3);
    let [kept, left, home] = [0x11, 0x22, 0x33].map(|byte| VolumeId([byte; 16]));
    let mut frames = Frames::new(&bytes).unwrap();
    assert_eq!(frames.version(), 3);
    let mut state = State::default();
    for entry in frames.by_ref() {
        state.apply(&entry).unwrap();
        if entry.at_unix_ms == 2 {
            assert_eq!(state.volumes[&home].stay, StayId::Made, "its files bear no stay");
            assert_eq!((state.moved.len(), state.migrations[&MigrationId(7)].returning.len()), (1, 1));
            assert_eq!(state.moved[&left].host_name, "b");
        }
    }
    assert_eq!(frames.ending(), Ending::Torn);
    assert_eq!(state.volumes.keys().copied().collect::<Vec<_>>(), [kept]);
    assert_eq!((state.volumes[&kept].stay, state.volumes[&kept].record.size_bytes), (StayId::Made, 2 << 30));
    assert_eq!(state.moved.keys().copied().collect::<Vec<_>>(), [home]);
    let handed_back = Outcome::HandedBack { detail: "no".to_owned() };
    assert_eq!(state.migrations[&MigrationId(7)].stage, Stage::Ended(handed_back));
    assert_eq!(state.next_migration, 8);
}

#[test]
fn journal_of_another_version_is_not_gone_on_with() {
    // An entry of this version means something else, or nothing, in an earlier version's journal.
    let mut bytes = bytes(VERSION_3);
    let whole = Frames::new(&bytes).unwrap().count() as u64;
    let record = migration::journal::Record::ReservationLifted { place: Place::Device("/dev/x".to_owned()) };
    let entry = migration::journal::Entry { at_unix_ms: 8, records: vec![record] };
    encode(whole, &entry, &mut bytes).unwrap();
    let mut frames = Frames::new(&bytes).unwrap();
    assert_ne!(frames.version(), VERSION);
    assert_eq!(frames.by_ref().count() as u64, whole);
    assert_eq!(frames.ending(), Ending::Foreign);
    bytes[7] = VERSION + 1;
    assert!(Frames::new(&bytes).is_err());
}

fn bytes(hex: &str) -> Vec<u8> {
    let digits = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    hex.as_bytes().chunks(2).map(digits).collect()
}

/// Stored numbers are trusted for ever: inserting or removing a variant would turn an export into a device.
#[test]
fn what_was_written_once_is_never_renumbered() {
    fn number(value: &impl serde::Serialize) -> u8 {
        postcard::to_stdvec(value).unwrap()[0]
    }
    let numbered = |of: &str, numbers: &[u8]| {
        assert_eq!(numbers, (0..numbers.len() as u8).collect::<Vec<_>>(), "{of} of journals that there are");
    };
    let text = String::new;
    numbered(
        "places",
        &[Place::File(text()), Place::Device(text()), Place::Nbd(text())].map(|at| number(&at)),
    );
    numbered("formats", &[ImageFormat::Raw, ImageFormat::Qcow2].map(|format| number(&format)));
    numbered(
        "reservations",
        &[ReservedContent::Left, ReservedContent::Kept, ReservedContent::HalfMade].map(|what| number(&what)),
    );
    numbered("accesses", &[ExportAccess::ReadWrite, ExportAccess::ReadOnly].map(|access| number(&access)));
    numbered(
        "forwardings",
        &[Forwarding::WhileConnected, Forwarding::Always].map(|forwarding| number(&forwarding)),
    );
    numbered(
        "promotions",
        &[Promotion::Ticket, Promotion::Force { branches: Vec::new() }].map(|promotion| number(&promotion)),
    );
    let failed = Outcome::Failed { code: FailureCode::TargetFull, detail: text() };
    let outcomes = [
        Outcome::Moved { left_over: text() },
        Outcome::Cancelled,
        failed,
        Outcome::HandedBack { detail: text() },
        Outcome::CancelledThere,
        Outcome::TakenBack,
    ];
    numbered("outcomes", &outcomes.map(|outcome| number(&outcome)));
    let attempt = Attempt(1);
    let stages = [
        Stage::Copying,
        Stage::Prepared(attempt),
        Stage::Released(attempt),
        Stage::Owned(attempt),
        Stage::HandedBack,
        Stage::Ended(Outcome::Cancelled),
        Stage::Discarding(Outcome::Cancelled),
    ];
    numbered("stages", &stages.map(|stage| number(&stage)));
    let failures = [
        FailureCode::TargetFull,
        FailureCode::TargetFaulty,
        FailureCode::TargetHung,
        FailureCode::SourceUnreadable,
        FailureCode::HandoverRefused,
        FailureCode::DaemonStopped,
        FailureCode::Internal,
        FailureCode::HostRefused,
        FailureCode::PromotedElsewhere,
        FailureCode::GivenUp,
        FailureCode::VmStayed,
        FailureCode::NotBegun,
        FailureCode::HookFailed,
        FailureCode::NotConverging,
    ];
    numbered("failures", &failures.map(|failure| number(&failure)));
}
