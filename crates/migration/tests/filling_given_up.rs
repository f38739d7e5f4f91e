//! A volume whose former host is lost: what is missing of it is refused, and not waited for.

use std::time::Duration;

use chronicle::{BlockRange, ByteRange, LayeredBitmap};
use migration::PacingSettings;
use migration::filling::{
    Filling, FillingAction, FillingEvent, FillingSettings, Manifest, RequestId, UNIT_BYTES, UnitMap, units_of,
};

const UNITS: u64 = 8;
const NOW: Duration = Duration::from_secs(1);

fn units(start: u64, end: u64) -> ByteRange {
    ByteRange::new(start * UNIT_BYTES, (end - start) * UNIT_BYTES)
}

/// A volume that lacks all but its first unit.
fn filling() -> Filling {
    let size_bytes = UNITS * UNIT_BYTES;
    let empty = || LayeredBitmap::new(units_of(size_bytes));
    let mut missing = empty();
    missing.insert(BlockRange::new(1, UNITS));
    let manifest = Manifest::of(&missing);
    let settings = FillingSettings { size_bytes, pacing: PacingSettings::default() };
    let known = UnitMap { missing, late: empty(), volatile: empty(), manifest };
    Filling::new(settings, known)
}

/// Carries out what is asked for, fetches aside: the former host never answers. Returns the rest.
fn carry_out(filling: &mut Filling) -> Vec<FillingAction> {
    let mut rest = Vec::new();
    while let Some(action) = filling.poll_action() {
        let event = match action {
            FillingAction::Note { note, .. } => FillingEvent::Noted { note, result: Ok(()) },
            FillingAction::FlushStore { recording, .. } => {
                FillingEvent::StoreFlushed { recording, result: Ok(()) }
            }
            FillingAction::Record { recording, .. } => FillingEvent::Recorded { recording, result: Ok(()) },
            FillingAction::Fetch { .. } => continue,
            other => {
                rest.push(other);
                continue;
            }
        };
        filling.handle_event(NOW, event);
    }
    rest
}

fn read(filling: &mut Filling, request: u64, range: ByteRange) -> Vec<FillingAction> {
    let request = RequestId(request);
    filling.handle_event(NOW, FillingEvent::ReadArrived { request, range });
    carry_out(filling)
}

#[test]
fn who_waits_for_what_was_given_up_is_refused_and_who_overwrites_it_is_not() {
    let mut filling = filling();
    filling.handle_timeout(NOW);
    assert!(read(&mut filling, 1, units(3, 4)).is_empty(), "it waits");
    filling.give_up_missing(NOW);
    assert_eq!(carry_out(&mut filling), [FillingAction::Refuse { request: RequestId(1) }]);
    assert_eq!(read(&mut filling, 2, units(0, 2)), [FillingAction::Refuse { request: RequestId(2) }]);
    assert_eq!(read(&mut filling, 3, units(0, 1)), [FillingAction::Admit { request: RequestId(3) }]);
    assert_eq!(filling.first_missing(9), [units(1, UNITS)]);
    assert!(filling.progress().is_given_up && filling.progress().waits_for.is_none());

    for start in 1..UNITS {
        let (request, range) = (RequestId(10 + start), units(start, start + 1));
        filling.handle_event(NOW, FillingEvent::WriteArrived { request, range });
        assert_eq!(carry_out(&mut filling), [FillingAction::Admit { request }]);
        filling.handle_event(NOW, FillingEvent::WriteEnded { request, result: Ok(()) });
        let done = carry_out(&mut filling);
        assert!(done.contains(&FillingAction::Written { request }), "{done:?}");
    }
    // Later than anything that is put off.
    let mut said = Vec::new();
    for second in 2..60 {
        filling.handle_timeout(Duration::from_secs(second));
        said.extend(carry_out(&mut filling));
    }
    assert_eq!(said, [FillingAction::Whole], "nothing is missing, although the former host never answered");
}
