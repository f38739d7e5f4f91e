//! A journal that was put back: what it says of its volumes, who is asked, and what people may order.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use chronicle::{BranchId, Generation, StayId};
use migration::journal::{
    Doubt, Entry, ExportSettings, Forwarding, ImageFormat, ImageLocation, MigratingVolume, Outcome, Place,
    Record, Side, Stage, State, VolumeRecord,
};
use migration::message::{ToSource, ToTarget};
use migration::restoration::{
    ASK_AGAIN, Action, Answer, Event, Knowledge, Look, Order, Refused, Restoration, Standing, Whereabouts,
    Word, forget, knowledge, order, restore,
};
use migration::{Attempt, HostId, MigrationId, VolumeId, recovery};

const VOLUME: VolumeId = VolumeId([1; 16]);
const ONE: HostId = HostId([1; 32]);
const TWO: HostId = HostId([2; 32]);
const THREE: HostId = HostId([3; 32]);
const BRANCH: BranchId = BranchId([9; 16]);

fn file(path: &str) -> ImageLocation {
    ImageLocation::raw_file("a", path)
}

fn record(image: ImageLocation, generation: u64) -> VolumeRecord {
    VolumeRecord {
        volume: VOLUME,
        name: "v".to_owned(),
        size_bytes: 1 << 20,
        block_size_bytes: 4096,
        image,
        generation: Generation(generation),
        export: ExportSettings::default(),
    }
}

fn folded(records: Vec<Record>) -> State {
    let mut state = State::default();
    state.apply(&Entry { at_unix_ms: 5, records }).unwrap();
    state
}

fn leaves(generation: u64) -> Vec<Record> {
    let migration = MigrationId(0);
    let side = Side::Outgoing {
        peer: TWO,
        peer_name: "two".to_owned(),
        store: String::new(),
        forwarding: Forwarding::WhileConnected,
    };
    let volumes =
        vec![MigratingVolume { volume: VOLUME, source: file("/a/v.img"), target: file("/there/v.img") }];
    vec![
        Record::VolumeAdded(record(file("/a/v.img"), generation)),
        Record::MigrationStarted { migration, volumes, keep_source: false, side },
        Record::Released {
            migration,
            attempt: Attempt(1),
            generations: vec![(VOLUME, Generation(generation + 1))],
        },
    ]
}

/// Records of the target of that, whose source is `peer`.
fn comes(peer: HostId, generation: u64) -> Vec<Record> {
    let (migration, attempt) = (MigrationId(0), Attempt(1));
    let volumes = vec![record(file("/b/v.img"), generation)];
    let side = Side::Incoming { peer, peer_name: "one".to_owned(), remote: MigrationId(0), volumes };
    let moving = vec![MigratingVolume { volume: VOLUME, source: file("/a/v.img"), target: file("/b/v.img") }];
    vec![
        Record::MigrationStarted { migration, volumes: moving, keep_source: false, side },
        Record::TargetPrepared { migration, attempt },
        Record::Owned { migration, attempt, generations: vec![(VOLUME, Generation(generation + 1))] },
    ]
}

#[test]
fn nothing_of_a_backup_is_this_hosts_and_no_number_is_given_again() {
    let backup = folded(leaves(0).into_iter().take(2).collect());
    let state = restore(&backup, 5, 2_000_000_000_000);
    assert!(state.volumes.is_empty() && state.unfinished().next().is_none());
    assert!(matches!(state.migrations[&MigrationId(0)].stage, Stage::Ended(Outcome::Failed { .. })));
    assert_eq!(state.next_migration, 2_000_000_000);
    // Behind a clock that stands before its time as well.
    assert!(restore(&backup, 5, 0).next_migration > 1_000_000);
    assert_eq!(state.restored_named("v").unwrap().0, VOLUME);
    // Its journal says the same after the next start.
    let again = folded(state.snapshot());
    assert_eq!(again, state);
}

#[test]
fn what_may_have_been_released_since_is_not_discarded_by_a_word_of_before() {
    let query = ToSource::Query(Attempt(1));
    let answer =
        |state: &State, migration| recovery::answer_as_source(state, TWO, MigrationId(migration), &query);
    let backup = folded(leaves(0).into_iter().take(2).collect());
    assert_eq!(answer(&backup, 7), Some(ToTarget::Discard));
    let state = restore(&backup, 5, 2_000_000_000_000);
    assert_eq!((answer(&state, 0), answer(&state, 7)), (None, None));
    assert_eq!(answer(&state, 2_000_000_001), Some(ToTarget::Discard));
    // What it had released then, it has.
    let released = restore(&folded(leaves(0)), 5, 2_000_000_000_000);
    let commit = ToTarget::Commit { attempt: Attempt(1), generations: vec![(VOLUME, Generation(1))] };
    assert_eq!(answer(&released, 0), Some(commit));
}

#[test]
fn a_host_says_what_it_knows_of_a_volume_and_the_asker_what_that_means() {
    let known = |records: Vec<Record>| knowledge(&folded(records), ONE, VOLUME);
    let at = |generation, whereabouts| Some(Knowledge { generation: Generation(generation), whereabouts });
    assert_eq!(known(Vec::new()), None);
    assert_eq!(known(comes(ONE, 4)), at(5, Whereabouts::Here));
    assert_eq!(known(comes(ONE, 4).into_iter().take(2).collect()), at(5, Whereabouts::Waits));
    assert_eq!(known(comes(ONE, 4).into_iter().take(1).collect()), at(4, Whereabouts::Elsewhere));
    assert_eq!(known(comes(THREE, 4).into_iter().take(1).collect()), at(4, Whereabouts::AtAThird));
    assert_eq!(known(leaves(4)), at(5, Whereabouts::Elsewhere));
    assert_eq!(knowledge(&folded(leaves(4)), TWO, VOLUME), at(5, Whereabouts::WithYou));
    let gone = [comes(ONE, 4), vec![Record::VolumeRemoved { volume: VOLUME }]].concat();
    assert_eq!(known(gone), at(5, Whereabouts::Elsewhere), "its migrations remember it");
    let restored = restore(&folded(comes(ONE, 4)), 0, 0);
    assert_eq!(knowledge(&restored, ONE, VOLUME), at(5, Whereabouts::HereUnconfirmed));
    let word =
        |whereabouts, backup| Knowledge { generation: Generation(5), whereabouts }.word(Generation(backup));
    for backup in [4, 5, 6] {
        assert_eq!(word(Whereabouts::Here, backup), Word::HasIt(Generation(5)));
        assert_eq!(word(Whereabouts::Waits, backup), Word::Unsure(Generation(5)));
    }
    assert_eq!(word(Whereabouts::Elsewhere, 4), Word::KnowsLater(Generation(5)));
    assert_eq!(word(Whereabouts::WithYou, 4), Word::CameBack(Generation(5)));
    assert_eq!(
        (word(Whereabouts::Elsewhere, 5), word(Whereabouts::WithYou, 5)),
        (Word::Confirms, Word::Confirms)
    );
}

/// A host whose volume waits, its machine, and the time.
struct Asking {
    state: State,
    machine: Restoration,
    now: Duration,
}

impl Asking {
    fn of(backup: &[Record]) -> Self {
        let state = restore(&folded(backup.to_vec()), 0, 0);
        let mut asking = Self { state, machine: Restoration::default(), now: Duration::ZERO };
        let waiting = Event::waiting(&asking.state);
        assert_eq!(asking.tell(Event::Hosts(BTreeSet::from([TWO, THREE]))), []);
        asking.tell(waiting);
        asking
    }

    fn tell(&mut self, event: Event) -> Vec<Action> {
        self.machine.handle_event(self.now, event);
        std::iter::from_fn(|| self.machine.poll_action()).collect()
    }

    fn answer(&mut self, host: HostId, known: Option<(u64, Whereabouts)>) -> Vec<Action> {
        let known = known
            .map(|(generation, whereabouts)| Knowledge { generation: Generation(generation), whereabouts });
        let known: BTreeMap<_, _> = known.into_iter().map(|known| (VOLUME, known)).collect();
        self.tell(Event::Answered(host, Answer { known, knows_all: true }))
    }

    fn standing(&self) -> Standing {
        self.machine.standing(VOLUME).unwrap()
    }
}

fn backup() -> Vec<Record> {
    vec![Record::VolumeAdded(record(file("/a/v.img"), 2))]
}

#[test]
fn a_volume_is_confirmed_when_all_have_answered_and_its_image_is_fit() {
    let mut asking = Asking::of(&backup());
    assert_eq!(asking.standing(), Standing::Unheard(vec![TWO, THREE]));
    assert_eq!(asking.answer(TWO, None), []);
    assert_eq!(asking.tell(Event::Looked(VOLUME, Look::Fit)), []);
    assert_eq!(asking.standing(), Standing::Unheard(vec![THREE]));
    assert_eq!(asking.answer(THREE, Some((2, Whereabouts::Elsewhere))), [Action::Confirm(VOLUME)]);
    assert_eq!(asking.answer(THREE, None), [], "once");
    // That it is so could not be made durable: with the next answers.
    assert_eq!(asking.tell(Event::NotRecorded(VOLUME)), []);
    assert_eq!(asking.answer(TWO, None), [Action::Look(VOLUME)]);
    assert_eq!(asking.tell(Event::Looked(VOLUME, Look::Fit)), [Action::Confirm(VOLUME)]);
}

#[test]
fn who_has_said_nothing_is_asked_again_and_who_has_is_asked_what_is_so_by_now() {
    let mut asking = Asking::of(&backup());
    asking.answer(TWO, None);
    let (again, reason) = asking.machine.poll_timeout().unwrap();
    assert!(again > asking.now && reason.contains("hosts"));
    asking.now = again.max(ASK_AGAIN);
    asking.machine.handle_timeout(asking.now);
    assert_eq!(asking.machine.poll_action(), Some(Action::Ask(TWO)));
    // It has it meanwhile: somebody has moved it there.
    asking.answer(TWO, Some((4, Whereabouts::Here)));
    assert_eq!(asking.standing(), Standing::Contradicted(vec![(TWO, Word::HasIt(Generation(4)))]));
}

#[test]
fn what_another_host_says_of_before_its_way_back_contradicts_nothing() {
    let mut asking = Asking::of(&backup());
    asking.tell(Event::Looked(VOLUME, Look::Fit));
    asking.answer(TWO, Some((3, Whereabouts::Elsewhere)));
    asking.answer(THREE, Some((4, Whereabouts::WithYou)));
    assert_eq!(asking.standing(), Standing::InDoubt { generation: Some(Generation(4)) });
    let records = order(&asking.state, VOLUME, &asking.standing(), Order::Known, BRANCH).unwrap();
    let [Record::Reinstated { generation: Generation(4), branch: None, .. }] = records[..] else {
        panic!("{records:?}")
    };
    asking.answer(TWO, Some((5, Whereabouts::Elsewhere)));
    assert_eq!(asking.standing(), Standing::Contradicted(vec![(TWO, Word::KnowsLater(Generation(5)))]));
}

#[test]
fn an_order_opens_a_branch_unless_nobody_can_have_another() {
    let mut asking = Asking::of(&backup());
    let ordered = |asking: &Asking, how| order(&asking.state, VOLUME, &asking.standing(), how, BRANCH);
    let branch = |records: Vec<Record>| match records[..] {
        [Record::Reinstated { generation, branch, .. }] => (generation.0, branch.is_some()),
        _ => panic!("{records:?}"),
    };
    assert_eq!(branch(ordered(&asking, Order::Known).unwrap()), (3, true), "who is silent may have it");
    asking.answer(TWO, Some((7, Whereabouts::Here)));
    assert_eq!(ordered(&asking, Order::Known), Err(Refused::Contradicted));
    assert_eq!(branch(ordered(&asking, Order::Force).unwrap()), (8, true));
    let device = ImageLocation {
        store: String::new(),
        place: Place::Device("/dev/x".to_owned()),
        format: ImageFormat::Raw,
    };
    let mut asking = Asking::of(&[Record::VolumeAdded(record(device, 2))]);
    assert_eq!(asking.state.restored_volume(VOLUME).unwrap().doubt, Some(Doubt::Lasting));
    asking.tell(Event::Looked(VOLUME, Look::Fit));
    for host in [TWO, THREE] {
        assert_eq!(asking.answer(host, None), []);
    }
    assert_eq!(asking.standing(), Standing::InDoubt { generation: None });
    let records = ordered(&asking, Order::Known).unwrap();
    assert_eq!(branch(records.clone()), (2, false));
    let mut state = asking.state.clone();
    state.apply(&Entry { at_unix_ms: 9, records }).unwrap();
    let stay = StayId::Arrived(asking.state.next_migration);
    assert_eq!((state.volumes[&VOLUME].stay, state.next_migration), (stay, asking.state.next_migration + 1));
    assert!(state.restored_volumes().next().is_none() && forget(&state, VOLUME).is_err());
}

#[test]
fn an_image_that_is_not_fit_is_not_served_by_itself() {
    let rival = Look::Rival("/b/v.img".to_owned());
    let expected = [
        (Look::Missing, Standing::NoImage, Err(Refused::NoImage)),
        (Look::HalfMade, Standing::HalfMade, Err(Refused::Contradicted)),
        (rival, Standing::Rival { image: "/b/v.img".to_owned() }, Err(Refused::Contradicted)),
    ];
    for (look, standing, refused) in expected {
        let mut asking = Asking::of(&backup());
        asking.tell(Event::Looked(VOLUME, look));
        asking.answer(TWO, None);
        let then = asking.answer(THREE, None);
        assert!(!then.contains(&Action::Confirm(VOLUME)), "{then:?}");
        asking.tell(Event::Looked(
            VOLUME,
            match &standing {
                Standing::NoImage => Look::Missing,
                Standing::HalfMade => Look::HalfMade,
                _ => Look::Rival("/b/v.img".to_owned()),
            },
        ));
        assert_eq!(asking.standing(), standing);
        assert_eq!(order(&asking.state, VOLUME, &standing, Order::Known, BRANCH), refused);
    }
}
