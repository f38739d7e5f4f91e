//! Tests a residency: the known copies, and what must be durable for a restart to know as much.

use super::*;

const SIZE: u64 = 64 << 20;
const COPY: ReplicaOf = ReplicaOf::Host { host: [1; 32], departure: 3 };
const OTHER: ReplicaOf = ReplicaOf::Migration(8);
const GENERATION: Generation = Generation(2);

fn beginning() -> Beginning {
    let (block_size, size_bytes) = (BlockSize::DEFAULT, SIZE);
    Beginning {
        id: StayId::Arrived(4),
        block_size,
        size_bytes,
        regions: MarkPolicy::regions_for(block_size, SIZE),
    }
}

fn nothing() -> LayeredBitmap {
    LayeredBitmap::new(BlockSize::DEFAULT.blocks_of(SIZE))
}

fn referral(stay: &mut Stay, of: ReplicaOf) -> Referral {
    let premarks = stay.premarks();
    stay.take_down(&premarks, of, GENERATION, nothing()).unwrap()
}

fn refer(stay: &mut Stay, of: ReplicaOf) -> Kept {
    let referral = referral(stay, of);
    stay.refer(referral).unwrap()
}

/// Writes a block, with its mark if needed; returns the epoch and the region of the mark.
fn write(stay: &mut Stay, block: u64) -> Option<(Epoch, BlockRange)> {
    let range = ByteRange::new(block << 16, 4096);
    let Ok(Recorded::WaitForMark(epoch)) = stay.record(range) else { return None };
    let region = stay.regions_to_mark(range);
    stay.marked(stay.id(), epoch, region);
    assert!(matches!(stay.record(range), Ok(Recorded::Marked(_))));
    Some((epoch, region))
}

fn restarted(kept: &Kept, marks: &[(Epoch, BlockRange)]) -> Stay {
    let marks = marks.iter().map(|(epoch, region)| (*epoch, vec![*region]));
    Stay::resume(beginning(), Some(kept.clone().with_marks(marks)))
}

#[test]
fn a_restart_goes_on_above_every_number_that_it_finds() {
    let mut stay = Stay::begin(beginning());
    let kept = refer(&mut stay, COPY);
    let mut marks: Vec<_> = write(&mut stay, 3).into_iter().collect();
    for _ in 0..3 {
        // Killed repeatedly, with nothing kept in between.
        let mut stay = restarted(&kept, &marks);
        assert!(marks.iter().all(|(epoch, _)| *epoch < stay.chronicle().open_epoch()));
        marks.extend(write(&mut stay, 40 + marks.len() as u64 * 100));
        let lacking = stay.lacking(COPY, GENERATION).unwrap();
        assert!(lacking.contains_all(BlockRange::new(3, 4)), "{marks:?}");
    }
    let lacking = restarted(&kept, &marks).lacking(COPY, GENERATION).unwrap();
    assert!(marks.iter().all(|(_, region)| lacking.contains_all(*region)));
}

#[test]
fn forgetting_takes_no_marks_that_somebody_needs_who_is_being_referred_to() {
    let mut stay = Stay::begin(beginning());
    refer(&mut stay, OTHER);
    // COPY is being referred to, and its store flushed, when the other copy is forgotten.
    let referral = referral(&mut stay, COPY);
    let (epoch, region) = write(&mut stay, 5).unwrap();
    let Some(ToDo::Forget(forgetting)) = stay.forget(OTHER) else { panic!() };
    assert!(forgetting.through < epoch);
    stay.forgotten(forgetting);
    let (later, other_region) = write(&mut stay, 500).expect("what is written meanwhile is marked");
    let kept = stay.refer(referral).unwrap();
    let lacking =
        restarted(&kept, &[(epoch, region), (later, other_region)]).lacking(COPY, GENERATION).unwrap();
    assert!(lacking.contains_all(region) && lacking.contains_all(other_region));
}

#[test]
fn what_is_kept_after_a_forgetting_was_asked_for_is_still_marked_for() {
    let mut stay = Stay::begin(beginning());
    refer(&mut stay, OTHER);
    let Some(ToDo::Forget(forgetting)) = stay.forget(OTHER) else { panic!() };
    refer(&mut stay, COPY);
    stay.forgotten(forgetting);
    assert!(write(&mut stay, 9).is_some());
}

#[test]
fn given_up_nobody_waits_and_nobody_is_known() {
    let mut stay = Stay::begin(beginning());
    refer(&mut stay, COPY);
    let referral = referral(&mut stay, OTHER);
    let forgetting = stay.give_up("full").unwrap();
    assert!(
        matches!(stay.record(ByteRange::new(0, 1)), Ok(Recorded::WaitForMark(_))),
        "a restart may still find it"
    );
    // Another write does not wait either; the first of both actions ends the wait.
    assert_eq!(stay.give_up("full"), Some(forgetting));
    stay.forgotten(forgetting);
    assert_eq!(write(&mut stay, 0), None);
    assert_eq!((stay.replicas(), stay.given_up().map(|given_up| given_up.copies)), (Vec::new(), Some(1)));
    assert_eq!(stay.refer(referral), None, "what was being referred to is given up, too");
    // Later a copy may be known again.
    refer(&mut stay, COPY);
    assert_eq!((stay.given_up(), stay.replicas().len()), (None, 1));
}

#[test]
fn given_up_while_a_copy_is_being_referred_to_nobody_waits() {
    let mut stay = Stay::begin(beginning());
    let referral = referral(&mut stay, COPY);
    assert_eq!(stay.give_up("full"), None, "a restart finds nothing");
    assert_eq!(write(&mut stay, 0), None);
    assert_eq!(stay.refer(referral), None);
    assert_eq!(write(&mut stay, 0), None);
}

#[test]
fn a_stay_that_is_over_knows_nothing_and_remembers_nothing() {
    let mut stay = Stay::begin(beginning());
    refer(&mut stay, COPY);
    let pending = referral(&mut stay, OTHER);
    assert_eq!(stay.leave().through, Epoch(u64::MAX));
    assert_eq!((stay.refer(pending), stay.lacking(COPY, GENERATION), stay.close()), (None, None, None));
    let premarks = stay.premarks();
    assert!(stay.take_down(&premarks, COPY, GENERATION, nothing()).is_none());
}

#[test]
fn a_store_that_has_failed_a_flush_tells_of_no_copy_once_in_each_stay() {
    let mut stay = Stay::begin(beginning());
    refer(&mut stay, COPY);
    let under_way = referral(&mut stay, OTHER);
    let doubt = stay.store_failed().unwrap();
    assert_eq!((doubt.stay, doubt.forgetting.is_some()), (beginning().id, true));
    assert!(stay.lacking(COPY, GENERATION).is_none());
    assert!(stay.refer(under_way).is_none(), "nor of one that was about to be known");
    assert_eq!(stay.store_failed(), None);
    assert!(Stay::begin(beginning()).store_failed().is_some_and(|doubt| doubt.forgetting.is_none()));
}
