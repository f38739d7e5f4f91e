//! Feeds the journal's reader with any file, and with any records in whole frames.

use std::path::Path;

use migration::journal::{Entry, Frames, HEADER, State, encode};

/// Bytes of a frame before its payload: length, checksum, sequence number.
const FRAME_HEADER_BYTES: usize = 16;

/// Feeds a file, or the payloads of whole frames, each after its length in two bytes. The first byte decides.
pub(crate) fn feed(bytes: &[u8]) {
    let Some((kind, rest)) = bytes.split_first() else { return };
    let file = if kind % 2 == 0 { rest.to_vec() } else { framed(rest, kind / 2) };
    if let Ok(state) = daemon::read_journal(Path::new("journal"), &file) {
        check_compaction(&state);
    }
    check_frames(&file);
    check_examination(&file);
}

/// Returns a journal with whole frames of any payload, of a version `age` before the present one.
fn framed(mut bytes: &[u8], age: u8) -> Vec<u8> {
    let mut file = HEADER.to_vec();
    if let Some(version) = file.last_mut() {
        *version = version.saturating_sub(age % 2);
    }
    let mut sequence = 0_u64;
    while let Some((length, rest)) = bytes.split_first_chunk::<2>() {
        let (payload, rest) = rest.split_at(rest.len().min(usize::from(u16::from_le_bytes(*length))));
        let checksum = crc32c::crc32c_append(crc32c::crc32c(&sequence.to_le_bytes()), payload);
        file.extend_from_slice(&u32::try_from(payload.len()).unwrap_or(0).to_le_bytes());
        file.extend_from_slice(&checksum.to_le_bytes());
        file.extend_from_slice(&sequence.to_le_bytes());
        file.extend_from_slice(payload);
        (bytes, sequence) = (rest, sequence + 1);
    }
    file
}

/// Checks that a state can be written as one snapshot, and is the same when it is read.
fn check_compaction(state: &State) {
    let mut file = HEADER.to_vec();
    let entry = Entry { at_unix_ms: 0, records: state.snapshot() };
    if encode(0, &entry, &mut file).is_err() {
        return;
    }
    let again = daemon::read_journal(Path::new("journal"), &file);
    assert!(again.as_ref().is_ok_and(|again| again == state), "{state:#?} became {again:#?}");
    let _ = migration::recovery::recover(state);
}

/// Checks that an examination agrees with the daemon's reading, and can be exported.
fn check_examination(file: &[u8]) {
    let examination = daemon::JournalExamination::of_content(Path::new("journal"), file);
    assert_eq!(examination.intact, daemon::read_journal(Path::new("journal"), file).is_ok());
    assert!(examination.end_bytes <= file.len() as u64);
    assert!(!examination.export().to_string().is_empty());
}

/// Checks that frames do not exceed the file.
fn check_frames(file: &[u8]) {
    let Ok(mut frames) = Frames::new(file) else { return };
    let mut last = frames.position();
    while frames.next().is_some() {
        assert!(frames.position() >= last + FRAME_HEADER_BYTES && frames.position() <= file.len());
        last = frames.position();
    }
    let _ = frames.ending();
}
