//! Tests that a ticket permits the takeover of exactly the migration that its source has released.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use chronicle::{BranchId, Generation};
use migration::journal::{
    Entry, ExportSettings, Forwarding, ImageLocation, MigratingVolume, Outcome, Promotion, Record, Side,
    Stage, State, VolumeRecord,
};
use migration::promotion::{NotPromotable, Waits, promotable, waiting_named};
use migration::recovery::{Step, recover};
use migration::ticket::{Ticket, TicketError};
use migration::{Attempt, HostId, MigrationId, VolumeId};

const A: HostId = HostId([1; 32]);
const B: HostId = HostId([2; 32]);
const THERE: MigrationId = MigrationId(3);
const HERE: MigrationId = MigrationId(8);
const VOLUME: VolumeId = VolumeId([5; 16]);

#[test]
fn a_ticket_fits_one_try_of_one_migration_between_two_hosts() {
    let (mut source, mut target) = (source(), target());
    assert_eq!(Ticket::print(&source, A, THERE), Err(TicketError::NotReleased { migration: THERE }));
    apply(&mut target, Record::TargetPrepared { migration: HERE, attempt: Attempt(2) });
    apply(&mut source, released(Attempt(2)));
    let ticket = Ticket::print(&source, A, THERE).unwrap();
    let ticket = Ticket::parse(&ticket.to_string()).unwrap();
    assert_eq!(ticket.redeem(&target, B).unwrap().0, HERE);

    assert_eq!(ticket.redeem(&target, A), Err(TicketError::OtherTarget { target: B }));
    let waiting = Attempt(3);
    let mut later = target.clone();
    apply(&mut later, Record::TargetPrepared { migration: HERE, attempt: waiting });
    assert_eq!(ticket.redeem(&later, B), Err(TicketError::OtherAttempt { ticket: Attempt(2), waiting }));
    let other = Ticket { migration: MigrationId(4), ..ticket.clone() };
    assert!(matches!(other.redeem(&target, B), Err(TicketError::NothingWaits { .. })));
    let other = Ticket { generations: vec![(VOLUME, Generation(9))], ..ticket.clone() };
    assert_eq!(other.redeem(&target, B), Err(TicketError::OtherVolumes));

    let promotion = Promotion::Ticket;
    let generations = ticket.generations.clone();
    let promoted = Record::Promoted { migration: HERE, attempt: Attempt(2), generations, promotion };
    apply(&mut target, promoted);
    assert_eq!(target.migrations[&HERE].stage, Stage::Owned(Attempt(2)));
    assert_eq!(target.volumes[&VOLUME].record.generation, Generation(2));
    assert!(target.branches.is_empty());
    assert!(matches!(ticket.redeem(&target, B), Err(TicketError::NothingWaits { .. })));
}

#[test]
fn a_forced_promotion_opens_a_branch_once_and_only_of_what_was_promised() {
    let mut target = target();
    let branches = vec![(VOLUME, BranchId([9; 16]))];
    let promoted = Record::Promoted {
        migration: HERE,
        attempt: Attempt(1),
        generations: vec![(VOLUME, Generation(2))],
        promotion: Promotion::Force { branches },
    };
    let entry = Entry { at_unix_ms: 0, records: vec![promoted.clone()] };
    assert!(target.clone().apply(&entry).is_err(), "half a copy is promoted");
    apply(&mut target, Record::TargetPrepared { migration: HERE, attempt: Attempt(1) });
    apply(&mut target, promoted.clone());
    // A commit with an unknown result is made again.
    apply(&mut target, promoted);
    let branches = &target.branches[&VOLUME];
    assert_eq!(branches.len(), 1);
    assert_eq!((branches[0].id, branches[0].from), (BranchId([9; 16]), Generation(1)));
}

#[test]
fn a_host_remembers_where_a_volume_went_until_it_is_told_to_forget() {
    let mut source = source();
    apply(&mut source, released(Attempt(1)));
    assert!(source.volumes.is_empty());
    let (_, moved) = source.moved_named("v").unwrap();
    assert_eq!((moved.host, moved.generation, moved.forwarding), (B, Generation(2), Forwarding::Always));
    // While the target may hand the volume back, no other trace of it exists.
    let forget = Entry { at_unix_ms: 0, records: vec![Record::MovedForgotten { volume: VOLUME }] };
    assert!(source.clone().apply(&forget).is_err());
    let mut back = source.clone();
    apply(&mut back, Record::HandedBack { migration: THERE, generations: vec![(VOLUME, Generation(3))] });
    assert_eq!(back.volumes[&VOLUME].record.generation, Generation(3));
    assert!(back.moved.is_empty());
    let outcome = Outcome::Moved { left_over: String::new() };
    let summary = migration::journal::Summary::default();
    apply(&mut source, Record::MigrationEnded { migration: THERE, outcome, summary });
    source.apply(&forget).unwrap();
    assert!(source.moved.is_empty());
}

fn released(attempt: Attempt) -> Record {
    Record::Released { migration: THERE, attempt, generations: vec![(VOLUME, Generation(2))] }
}

fn source() -> State {
    let mut state = State::default();
    apply(&mut state, Record::VolumeAdded(volume("a")));
    let side = Side::Outgoing {
        peer: B,
        peer_name: "b".to_owned(),
        store: "fast".to_owned(),
        forwarding: Forwarding::Always,
    };
    apply(&mut state, started(THERE, side));
    state
}

fn target() -> State {
    let mut state = State::default();
    let volumes = vec![volume("b")];
    let side = Side::Incoming { peer: A, peer_name: "a".to_owned(), remote: THERE, volumes };
    apply(&mut state, started(HERE, side));
    state
}

fn started(migration: MigrationId, side: Side) -> Record {
    let (source, target) = (ImageLocation::raw_file("a", "/a"), ImageLocation::raw_file("b", "/b"));
    let volumes = vec![MigratingVolume { volume: VOLUME, source, target }];
    Record::MigrationStarted { migration, volumes, keep_source: false, side }
}

fn volume(store: &str) -> VolumeRecord {
    VolumeRecord {
        volume: VOLUME,
        name: "v".to_owned(),
        size_bytes: 1 << 20,
        block_size_bytes: 65536,
        image: ImageLocation::raw_file(store, format!("/{store}")),
        generation: Generation(1),
        export: ExportSettings::default(),
    }
}

#[test]
fn what_is_complete_may_be_promoted_and_nothing_else() {
    let mut target = target();
    let look = |target: &State| promotable(HERE, &target.migrations[&HERE]).map(|found| found.waits);
    assert_eq!(look(&target), Err(NotPromotable::Incomplete));
    apply(&mut target, Record::TargetPrepared { migration: HERE, attempt: Attempt(1) });
    assert_eq!(look(&target), Ok(Waits::ForRelease));
    let (migration, attempt, generations) = (HERE, Attempt(1), vec![(VOLUME, Generation(2))]);
    apply(&mut target, Record::Owned { migration, attempt, generations });
    assert_eq!(look(&target), Err(NotPromotable::Owned));
    assert!(target.migrations[&HERE].has_arrived());
    apply(&mut target, Record::HandedBack { migration, generations: vec![(VOLUME, Generation(3))] });
    assert_eq!(look(&target), Ok(Waits::ForDiscard));
    assert!(!target.migrations[&HERE].has_arrived());

    // Once it is worthless the journal itself refuses a promotion, whatever has been deleted.
    let (waiting, _) = waiting_named(&target, "v").unwrap();
    let mut worthless = target.clone();
    let outcome = Outcome::HandedBack { detail: "it did not start".to_owned() };
    apply(&mut worthless, Record::Discarding { migration, outcome: outcome.clone() });
    assert_eq!(look(&worthless), Err(NotPromotable::Over));
    let (attempt, promotion) = (waiting.attempt, Promotion::Force { branches: Vec::new() });
    let promoted = Record::Promoted { migration, attempt, generations: Vec::new(), promotion };
    assert!(worthless.apply(&Entry { at_unix_ms: 1, records: vec![promoted] }).is_err());
    let image = ImageLocation::raw_file("b", "/b");
    let [Step::Discard(deleted), Step::Commit(ended)] = &recover(&worthless)[..] else { panic!() };
    assert_eq!(deleted, &image, "a restart deletes the rest, whoever is heard");
    ended.iter().for_each(|record| apply(&mut worthless, record.clone()));
    assert_eq!(worthless.migrations[&HERE].stage, Stage::Ended(outcome));

    let branches = vec![(VOLUME, BranchId([9; 16]))];
    waiting.records(Promotion::Force { branches }).into_iter().for_each(|record| apply(&mut target, record));
    // Its source has generation 3 of it.
    assert_eq!(target.volumes[&VOLUME].record.generation, Generation(4));
    assert_eq!(target.branches[&VOLUME].len(), 1);
    assert_eq!(look(&target), Err(NotPromotable::Owned));
    assert!(waiting_named(&target, "v").is_none());
}

fn apply(state: &mut State, record: Record) {
    state.apply(&Entry { at_unix_ms: 0, records: vec![record] }).unwrap();
}
