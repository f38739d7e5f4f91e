//! Journals that were written by earlier versions are read to the last record.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use chronicle::{Generation, StayId};
use migration::journal::{
    Ending, ExportSettings, FailureCode, Frames, ImageFormat, ImageLocation, Outcome, Place, Side, Stage,
    State, VERSION, encode,
};
use migration::{Attempt, MigrationId, VolumeId};

/// A journal as version 1 wrote it: a snapshot with a volume and an ended migration, then every other kind of record.
const VERSION_1: &str = "\
    535445524e414a0181000000edb7dc760000000000000000060100011111111111111111111111111111111111111111111111111111\
    111111111111017680808080048080040161082f612f762e696d67034d05010401111111111111111111111111111111110161082f61\
    2f762e696d670162082f622f762e696d670101760105020204736c6f77020501050908000002000000000000052a0000001b4e3a8201\
    000000000000000701012222222222222222222222222222222201778080808004808004000a2f7372762f772e726177032c0000005c\
    4baedd02000000000000000701040501111111111111111111111111111111110161082f612f762e696d670162082f622f762e696d67\
    00050000007b05c20c030000000000000007010505011700000024863879040000000000000007010705010111111111111111111111\
    11111111111104170000004278fb4a05000000000000000701080501011111111111111111111111111111111104160000008fc7d5c5\
    06000000000000000701090501111111111111111111111111111111110513000000d3d18e4d070000000000000007010a0503026e6f\
    00000000000000000000002c0000007d84636e08000000000000000701040601111111111111111111111111111111110161082f612f\
    762e696d670162082f622f762e696d670013000000569cd621090000000000000007010222222222222222222222222222222222";

/// A journal as version 2 wrote it: a snapshot as above, then every other kind of record, with places of every kind.
const VERSION_2: &str = "\
    535445524e414a02a5000000aa59f5250000000000000000010100011111111111111111111111111111111111111111111111111111\
    11111111111101768080808004808004016401062f6465762f780003010103683a3101b0030103613a62010400050001040111111111\
    111111111111111111111111016401062f6465762f7800016e02096e62643a2f2f682f64000101760105020204736c6f770205010509\
    00000002000000000000050102096e62643a2f2f682f640176040286000000ed6fefff01000000000000000203012222222222222222\
    2222222222222222017780808080048080040000082f772e71636f77320103010103683a3101b0030103613a62010401333333333333\
    3333333333333333333301788080808004808004016e02096e62643a2f2f682f640003010103683a3101b0030103613a620104032222\
    22222222222222222222222222224d2d000000d0faafb802000000000000000301040501222222222222222222222222222222220000\
    082f772e71636f773201016401062f6465762f780000050000008fb5f1440300000000000000040105050117000000b62fa3eb040000\
    000000000005010705010122222222222222222222222222222222041700000098c11446050000000000000006010805010122222222\
    22222222222222222222222204160000006d8ee9bc060000000000000007010905012222222222222222222222222222222205130000\
    0078669db7070000000000000008010a0503026e6f00000000000000000000002e0000003cdce5ff080000000000000009020b222222\
    2222222222222222222222222280808080080c11111111111111111111111111111111808080800c2200000036fce4f4090000000000\
    00000a030d02096e62643a2f2f682f640233333333333333333333333333333333060600";

/// A journal as version 3 wrote it: a snapshot with a volume, one that left, and one that left and has just come home; then
/// the last is handed back.
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
fn journal_of_version_1_says_what_it_said() {
    let bytes = bytes(VERSION_1);
    let (volume, other) = (VolumeId([0x11; 16]), VolumeId([0x22; 16]));
    let mut frames = Frames::new(&bytes).unwrap();
    assert_eq!(frames.version(), 1);
    let mut state = State::default();
    let mut entries = 0;
    let mut stages = Vec::new();
    for entry in frames.by_ref() {
        state.apply(&entry).unwrap();
        entries += 1;
        stages.extend(state.migrations.get(&MigrationId(5)).map(|migration| migration.stage.clone()));
        if entries == 2 {
            let adopted = &state.volumes[&other].record;
            assert_eq!((adopted.name.as_str(), adopted.image.is_adopted()), ("w", true));
            assert_eq!(adopted.image.place, Place::File("/srv/w.raw".to_owned()));
        }
    }
    assert_eq!((entries, frames.ending()), (10, Ending::Torn));
    stages.dedup();
    let attempt = Attempt(1);
    let back = Outcome::HandedBack { detail: "no".to_owned() };
    assert_eq!(
        stages,
        [
            Stage::Copying,
            Stage::Prepared(attempt),
            Stage::Released(attempt),
            Stage::Owned(attempt),
            Stage::HandedBack,
            Stage::Ended(back),
        ]
    );
    let served = &state.volumes[&volume];
    assert_eq!(served.record.image, ImageLocation::raw_file("a", "/a/v.img"));
    assert_eq!(served.record.image.format, ImageFormat::Raw);
    assert_eq!(served.record.export, ExportSettings::default());
    assert_eq!((served.record.size_bytes, served.record.block_size_bytes), (1 << 30, 65536));
    assert_eq!((served.record.generation, served.stay), (Generation(5), StayId::Made));
    assert_eq!((served.added_unix_ms, served.resizing_to), (5, None));
    let ended = &state.migrations[&MigrationId(4)];
    let failed = Outcome::Failed { code: FailureCode::TargetHung, detail: "slow".to_owned() };
    assert_eq!((&ended.stage, ended.aborted, ended.keep_source), (&Stage::Ended(failed), Attempt(2), true));
    assert_eq!((ended.summary.total_us, ended.summary.attempts), (9, 2));
    assert_eq!(ended.volumes[0].target, ImageLocation::raw_file("b", "/b/v.img"));
    assert_eq!(state.migrations[&MigrationId(6)].stage, Stage::Copying);
    assert!(!state.volumes.contains_key(&other));
    assert_eq!(state.next_migration, 7);
}

#[test]
fn journal_of_version_2_says_what_it_said() {
    let bytes = bytes(VERSION_2);
    let (volume, other) = (VolumeId([0x11; 16]), VolumeId([0x22; 16]));
    let mut frames = Frames::new(&bytes).unwrap();
    assert_eq!(frames.version(), 2);
    let mut state = State::default();
    let mut stages = Vec::new();
    for entry in frames.by_ref() {
        // The last entry names a migration that is not there; what is before it in the entry counts all the same.
        let applied = state.apply(&entry);
        assert_eq!(applied.is_err(), entry.at_unix_ms == 10);
        stages.extend(state.migrations.get(&MigrationId(5)).map(|migration| migration.stage.clone()));
    }
    assert_eq!(frames.ending(), Ending::Torn);
    stages.dedup();
    let (attempt, back) = (Attempt(1), Outcome::HandedBack { detail: "no".to_owned() });
    let copied = [Stage::Copying, Stage::Prepared(attempt), Stage::Released(attempt), Stage::Owned(attempt)];
    assert_eq!(stages[..4], copied);
    assert_eq!(stages[4..], [Stage::HandedBack, Stage::Ended(back)]);
    assert!(state.migrations.values().all(|migration| migration.side == Side::OneHost));
    let served = &state.volumes[&other];
    assert_eq!(served.record.image.format, ImageFormat::Qcow2);
    assert_eq!((served.record.generation, served.stay), (Generation(5), StayId::Made));
    assert_eq!(served.record.export.listen.as_deref(), Some("h:1"));
    assert_eq!(served.resizing_to, Some(2 << 30));
    assert_eq!(state.volumes[&volume].record.size_bytes, 3 << 30);
    assert_eq!(state.volumes[&volume].record.image.place, Place::Device("/dev/x".to_owned()));
    assert_eq!((state.fences.len(), state.moved.len()), (1, 0));
    assert_eq!(state.volumes.len(), 2);
}

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
    // An entry of this version means something else, or nothing, in a journal of the one before.
    let mut bytes = bytes(VERSION_1);
    let whole = Frames::new(&bytes).unwrap().count() as u64;
    let record = migration::journal::Record::FenceLifted { place: Place::Device("/dev/x".to_owned()) };
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
