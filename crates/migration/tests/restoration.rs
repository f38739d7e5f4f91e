//! Tests a restored journal: what it says of its volumes, which hosts are asked, and which orders are possible.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use chronicle::{BranchId, Generation, StayId};
use migration::authority::{Denied, Request, Role, judge};
use migration::filling::Manifest;
use migration::journal::{
    Doubt, Entry, ExportSettings, Forwarding, Hollow, HostList, ImageFormat, ImageLocation, MigratingVolume,
    NamedHost, Outcome, Place, Record, Side, Stage, State, Unlisted, VolumeRecord,
};
use migration::message::{ToSource, ToTarget};
use migration::restoration::{
    ASK_AGAIN, Action, Answer, Claims, Event, Hosts, InDoubt, Knowledge, Lacks, Look, Order, Refused,
    Restoration, Ruling, Standing, Surroundings, Whereabouts, Word, Words, confirm, forget, hosts_to_ask,
    knowledge, order, restore, ruling,
};
use migration::{Attempt, HostId, MigrationId, VolumeId, VolumeIndex, recovery};

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

/// Returns surroundings in which every host is known.
fn found(at_unix_ms: u64) -> Surroundings {
    Surroundings { backup_unix_ms: 5, at_unix_ms, list: HostList::Complete, ..Surroundings::default() }
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

/// Returns the records of a target whose source is `peer`.
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
    let state = restore(&backup, &found(2_000_000_000_000));
    assert!(state.volumes.is_empty() && state.unfinished().next().is_none());
    assert!(matches!(state.migrations[&MigrationId(0)].stage, Stage::Ended(Outcome::Failed { .. })));
    assert_eq!(state.next_migration, 2_000_000_000);
    // A clock that is behind changes nothing.
    assert!(restore(&backup, &found(0)).next_migration > 1_000_000);
    assert_eq!(state.questioned_named("v").unwrap().0, VOLUME);
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
    let state = restore(&backup, &found(2_000_000_000_000));
    assert_eq!((answer(&state, 0), answer(&state, 7)), (None, None));
    assert_eq!(answer(&state, 2_000_000_001), Some(ToTarget::Discard));
    // The target has what was released before the backup.
    let released = restore(&folded(leaves(0)), &found(2_000_000_000_000));
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
    let restored = restore(&folded(comes(ONE, 4)), &found(0));
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
        (word(Whereabouts::Elsewhere, 5), word(Whereabouts::WithYou, 5), word(Whereabouts::WithYou, 6)),
        (Word::Confirms, Word::Gave(Generation(5)), Word::Confirms)
    );
}

struct Asking {
    state: State,
    machine: Restoration,
    now: Duration,
}

impl Asking {
    fn of(backup: &[Record]) -> Self {
        let state = restore(&folded(backup.to_vec()), &found(0));
        let mut asking = Self { state, machine: Restoration::default(), now: Duration::ZERO };
        let waiting = Event::waiting(&asking.state);
        assert_eq!(asking.tell(Event::Hosts(Hosts::all(BTreeSet::from([TWO, THREE])))), []);
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

    fn words(&self) -> Words {
        self.standing().words
    }

    fn ruling(&self) -> Ruling {
        ruling(&self.standing(), None)
    }
}

fn backup() -> Vec<Record> {
    vec![Record::VolumeAdded(record(file("/a/v.img"), 2))]
}

#[test]
fn a_volume_is_confirmed_when_all_have_answered_and_its_image_is_fit() {
    let mut asking = Asking::of(&backup());
    assert_eq!(asking.words(), Words::Unheard(vec![TWO, THREE]));
    assert_eq!(asking.answer(TWO, None), []);
    assert_eq!(asking.tell(Event::Looked(VOLUME, Look::Fit)), []);
    assert_eq!(asking.words(), Words::Unheard(vec![THREE]));
    assert_eq!(asking.answer(THREE, Some((2, Whereabouts::Elsewhere))), [Action::Confirm(VOLUME)]);
    assert_eq!(asking.answer(THREE, None), [], "once");
    // The record could not be made durable: it is tried again with the next answers.
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
    // The other host has the volume meanwhile, after a move there.
    asking.answer(TWO, Some((4, Whereabouts::Here)));
    assert_eq!(asking.words(), Words::Contradicted(vec![(TWO, Word::HasIt(Generation(4)))]));
}

#[test]
fn what_another_host_says_of_before_its_way_back_contradicts_nothing() {
    let mut asking = Asking::of(&backup());
    asking.answer(TWO, Some((3, Whereabouts::Elsewhere)));
    asking.answer(THREE, Some((4, Whereabouts::WithYou)));
    // A device of this host may have it.
    asking.tell(Event::Looked(VOLUME, Look::NotAlone("/dev/x".to_owned())));
    let standing = asking.standing();
    assert_eq!((&standing.words, standing.doubt), (&Words::Agreed, InDoubt::Yes));
    assert_eq!(asking.ruling(), Ruling::Waits(Refused::InDoubt));
    let records = order(&asking.state, VOLUME, &standing, Order::Known, BRANCH).unwrap();
    let [Record::Reinstated { generation: Generation(4), branch: None, .. }] = records[..] else {
        panic!("{records:?}")
    };
    // No other place can have it: the host that gave it back is trusted.
    assert_eq!(asking.tell(Event::Looked(VOLUME, Look::Fit)), [Action::Confirm(VOLUME)]);
    assert_eq!(confirm(&asking.state, VOLUME, &asking.standing()), Ok(records));
    asking.answer(TWO, Some((5, Whereabouts::Elsewhere)));
    assert_eq!(asking.words(), Words::Contradicted(vec![(TWO, Word::KnowsLater(Generation(5)))]));
}

#[test]
fn hosts_that_cannot_be_asked_are_no_hosts_that_have_nothing() {
    let named = |id| NamedHost { id, name: "named".to_owned() };
    let backup = folded(backup());
    let ask = |list, hosts: &[HostId], paired| {
        let hosts = hosts.iter().copied().map(named).collect();
        let state = restore(&backup, &Surroundings { list, hosts, ..found(0) });
        // The state after the next start.
        hosts_to_ask(&folded(state.snapshot()), paired)
    };
    let paired = || Ok(BTreeSet::from([TWO]));
    assert_eq!(ask(HostList::Complete, &[TWO], paired()), Hosts::all(BTreeSet::from([TWO])));
    assert_eq!(
        ask(HostList::Complete, &[TWO, THREE], paired()).lacks,
        Lacks::These(vec![THREE]),
        "removed since"
    );
    assert_eq!(
        ask(HostList::Complete, &[TWO], Ok(BTreeSet::new())).lacks,
        Lacks::These(vec![TWO]),
        "lost since"
    );
    for why in [Unlisted::Missing, Unlisted::Unreadable, Unlisted::OfAnotherTime] {
        assert_eq!(ask(HostList::Unknown(why), &[], paired()).lacks, Lacks::Unknown(why));
        assert_eq!(ask(HostList::Complete, &[], Err(why)).lacks, Lacks::Unknown(why));
    }
    // Before the first report the hosts are unknown.
    let mut asking = Asking::of(&self::backup());
    asking.machine = Restoration::default();
    asking.tell(Event::waiting(&asking.state));
    asking.tell(Event::Looked(VOLUME, Look::Fit));
    assert!(matches!(asking.words(), Words::Unlisted(Lacks::Unknown(_))));
    assert_eq!(asking.ruling(), Ruling::Waits(Refused::Unheard));
    let standing = asking.standing();
    let records = order(&asking.state, VOLUME, &standing, Order::Known, BRANCH).unwrap();
    assert!(matches!(records[..], [Record::Reinstated { branch: Some(_), .. }]), "{records:?}");
}

#[test]
fn peers_of_what_was_under_way_are_asked_and_of_an_unknown_list_all_that_are_known_are_named() {
    let names = |records: Vec<Record>, list| {
        let state = restore(&folded(records), &Surroundings { list, ..found(0) });
        state.restored.unwrap().more.hosts.iter().map(|host| host.id).collect::<Vec<_>>()
    };
    let unknown = HostList::Unknown(Unlisted::Missing);
    let under_way: Vec<Record> = comes(TWO, 0).into_iter().take(1).collect();
    assert_eq!(names(under_way, HostList::Complete), [TWO]);
    let ended = || {
        let (migration, outcome) = (MigrationId(0), Outcome::Moved { left_over: String::new() });
        let ended = Record::MigrationEnded { migration, outcome, summary: Default::default() };
        [comes(TWO, 0), vec![ended]].concat()
    };
    assert_eq!((names(ended(), HostList::Complete), names(ended(), unknown)), (vec![], vec![TWO]));
}

#[test]
fn a_copy_that_waited_is_the_volume_if_its_source_has_released_it() {
    let prepared: Vec<Record> = comes(TWO, 4).into_iter().take(2).collect();
    let mut asking = Asking::of(&prepared);
    asking.tell(Event::Looked(VOLUME, Look::Fit));
    asking.answer(THREE, None);
    asking.answer(TWO, None);
    assert_eq!(asking.ruling(), Ruling::Waits(Refused::InDoubt), "the source says nothing of it");
    assert_eq!(asking.answer(TWO, Some((5, Whereabouts::WithYou))), [Action::Confirm(VOLUME)]);
    let records = confirm(&asking.state, VOLUME, &asking.standing()).unwrap();
    assert!(matches!(records[..], [Record::Reinstated { generation: Generation(5), branch: None, .. }]));
    let mut state = asking.state.clone();
    state.apply(&Entry { at_unix_ms: 9, records }).unwrap();
    // Its source, which waits for that, is answered.
    let commit = ToTarget::Commit { attempt: Attempt(1), generations: vec![(VOLUME, Generation(5))] };
    assert_eq!(recovery::answer_as_target(&asking.state, TWO, MigrationId(0), &commit), None);
    let answer = recovery::answer_as_target(&state, TWO, MigrationId(0), &commit);
    assert!(matches!(answer, Some(ToSource::Active { attempt: Attempt(1), .. })), "{answer:?}");
}

#[test]
fn a_host_that_was_put_back_once_says_that_nothing_is_missing_of_what_came_later() {
    let question = ToTarget::IsWhole(Attempt(1));
    let ended = |migration| {
        let outcome = Outcome::Moved { left_over: String::new() };
        Record::MigrationEnded { migration: MigrationId(migration), outcome, summary: Default::default() }
    };
    let before = folded([comes(TWO, 4), vec![ended(0)]].concat());
    let mut state = restore(&before, &found(2_000_000_000_000));
    let answer =
        |state: &State, remote| recovery::answer_as_target(state, TWO, MigrationId(remote), &question);
    assert_eq!((answer(&state, 0), answer(&state, 7)), (None, None), "nobody knows");
    let (migration, other) = (MigrationId(state.next_migration), VolumeId([2; 16]));
    let volumes = vec![VolumeRecord { volume: other, name: "w".to_owned(), ..record(file("/b/w.img"), 0) }];
    let side = Side::Incoming { peer: TWO, peer_name: "two".to_owned(), remote: MigrationId(9), volumes };
    let moving = vec![MigratingVolume { volume: other, source: file("/a/w.img"), target: file("/b/w.img") }];
    let attempt = Attempt(1);
    let records = vec![
        Record::MigrationStarted { migration, volumes: moving, keep_source: false, side },
        Record::TargetPrepared { migration, attempt },
        Record::Owned { migration, attempt, generations: vec![(other, Generation(1))] },
        ended(migration.0),
    ];
    state.apply(&Entry { at_unix_ms: 9, records }).unwrap();
    assert_eq!(answer(&state, 9), Some(ToSource::Whole(Attempt(1))));
}

#[test]
fn a_departure_of_a_backup_is_believed_when_the_host_that_has_it_says_so() {
    let mut asking = Asking::of(&leaves(2));
    assert_eq!(asking.state.questioned(VOLUME).unwrap().record.name, "v");
    asking.tell(Event::Looked(VOLUME, Look::Fit));
    let left = Words::Contradicted(vec![(TWO, Word::KnowsLater(Generation(3)))]);
    assert_eq!(asking.words(), left, "the backup says so, and nobody else does");
    assert_eq!(
        order(&asking.state, VOLUME, &asking.standing(), Order::Known, BRANCH),
        Err(Refused::Contradicted)
    );
    asking.answer(THREE, None);
    assert_eq!(asking.answer(TWO, Some((3, Whereabouts::Here))), [Action::Confirm(VOLUME)]);
    let records = confirm(&asking.state, VOLUME, &asking.standing()).unwrap();
    assert_eq!(records, [Record::DepartureConfirmed { volume: VOLUME }]);
    let mut state = asking.state.clone();
    state.apply(&Entry { at_unix_ms: 9, records }).unwrap();
    assert!(state.in_question().next().is_none() && state.moved.contains_key(&VOLUME));
    // The volume has returned since.
    let mut asking = Asking::of(&leaves(2));
    asking.tell(Event::Looked(VOLUME, Look::Fit));
    asking.answer(THREE, None);
    assert_eq!(asking.answer(TWO, Some((4, Whereabouts::WithYou))), [Action::Confirm(VOLUME)]);
    let records = confirm(&asking.state, VOLUME, &asking.standing()).unwrap();
    let mut state = asking.state.clone();
    state.apply(&Entry { at_unix_ms: 9, records }).unwrap();
    assert_eq!(state.volumes[&VOLUME].record.generation, Generation(4));
    assert!(state.moved.is_empty() && state.in_question().next().is_none());
    // The volume's place is unknown: an order forgets it, or takes the copy here.
    let records = forget(&asking.state, VOLUME).unwrap();
    let mut state = asking.state.clone();
    state.apply(&Entry { at_unix_ms: 9, records }).unwrap();
    assert!(state.moved.is_empty() && state.in_question().next().is_none());
    let restored_twice = restore(&asking.state, &found(9));
    assert!(restored_twice.is_departure_in_question(VOLUME));
}

/// Answers of hosts × state of the image × remaining doubt × order.
#[test]
fn each_combination_of_words_look_doubt_and_order_is_decided_by_one_table() {
    let word = |word| Words::Contradicted(vec![(TWO, word)]);
    let unlisted = |lacks| Words::Unlisted(lacks);
    let words = [
        ("away", Words::Away(TWO, Generation(7))),
        ("against", word(Word::HasIt(Generation(7)))),
        ("against", word(Word::KnowsLater(Generation(7)))),
        ("against", word(Word::Unsure(Generation(7)))),
        ("unknown", unlisted(Lacks::These(vec![TWO]))),
        ("unknown", unlisted(Lacks::Unknown(Unlisted::Missing))),
        ("unknown", Words::Unheard(vec![TWO])),
        ("unknown", Words::Unreliable(vec![TWO])),
        ("agreed", Words::Agreed),
    ];
    let looks = [
        ("none", None),
        ("none", Some(Look::Missing)),
        ("bad", Some(Look::HalfMade)),
        ("bad", Some(Look::Rival("/b/v.img".to_owned()))),
        ("fit", Some(Look::Fit)),
        ("fit", Some(Look::NotAlone("/dev/x".to_owned()))),
    ];
    // For no order, `Known` and `Force`: o is served, b is a branch, a stays away.
    let expected = |words, look, doubt| match (words, look, doubt) {
        (_, _, InDoubt::Hollow) => "---",
        ("away", "none", _) => "a--",
        ("away", _, _) => "a-b",
        (_, "none", _) => "---",
        (_, "bad", _) | ("against", ..) => "--b",
        ("unknown", ..) => "-bb",
        (_, _, InDoubt::Yes) => "-oo",
        (_, _, InDoubt::No) => "ooo",
    };
    for (said, words) in &words {
        for (seen, look) in &looks {
            for doubt in [InDoubt::No, InDoubt::Yes, InDoubt::Hollow] {
                let standing = Standing { words: words.clone(), look: look.clone(), doubt, came_back: None };
                let rules =
                    [None, Some(Order::Known), Some(Order::Force)].map(|order| ruling(&standing, order));
                let letters = rules.map(|ruling| match ruling {
                    Ruling::Serve(Claims::Sole) => 'o',
                    Ruling::Serve(Claims::Branch) => 'b',
                    Ruling::StaysAway => 'a',
                    Ruling::Waits(_) => '-',
                });
                assert_eq!(letters.iter().collect::<String>(), expected(*said, *seen, doubt), "{standing:?}");
            }
        }
    }
}

#[test]
fn an_order_opens_a_branch_unless_nobody_can_have_another() {
    let mut asking = Asking::of(&backup());
    asking.tell(Event::Looked(VOLUME, Look::Fit));
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
    assert_eq!(asking.ruling(), Ruling::Waits(Refused::InDoubt));
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
        (Look::Missing, Refused::NoImage),
        (Look::HalfMade, Refused::Contradicted),
        (rival, Refused::Contradicted),
    ];
    for (look, refused) in expected {
        let mut asking = Asking::of(&backup());
        asking.tell(Event::Looked(VOLUME, look.clone()));
        let known = |asking: &Asking| order(&asking.state, VOLUME, &asking.standing(), Order::Known, BRANCH);
        assert_eq!(known(&asking), Err(refused), "also while hosts are silent");
        let then = [asking.answer(TWO, None), asking.answer(THREE, None)].concat();
        assert!(then.contains(&Action::Look(VOLUME)) && !then.contains(&Action::Confirm(VOLUME)), "{then:?}");
        assert_eq!(known(&asking), Err(Refused::NotLooked));
        asking.tell(Event::Looked(VOLUME, look));
        assert_eq!((asking.words(), known(&asking)), (Words::Agreed, Err(refused)));
    }
}

/// Returns a departure in which the target lacks blocks.
fn leaves_hollow(generation: u64) -> Vec<Record> {
    let mut records = leaves(generation);
    let manifests = vec![(VOLUME, Manifest { units: 4, checksum: 1 })];
    let hollow = Hollow { attempt: Attempt(1), manifests };
    records.insert(2, Record::Hollow { migration: MigrationId(0), hollow });
    records
}

#[test]
fn an_image_of_which_another_host_lacks_parts_is_read_again_once_that_host_has_confirmed() {
    let role = Role::Filler { migration: MigrationId(0), volume: VolumeIndex(0) };
    let reads = |state: &State| judge(state, TWO, role, Request::Reservoir(VolumeIndex(0)));
    // The generation that the other host has, and what follows: the departure continues, or has ended without a deletion.
    for (generation, expected) in [(3, Ok(())), (5, Err(Denied::Over))] {
        let mut asking = Asking::of(&leaves_hollow(2));
        assert!(
            !asking.state.migrations[&MigrationId(0)].has_ended() && asking.state.is_reservoir("/a/v.img")
        );
        assert_eq!(
            reads(&asking.state),
            Err(Denied::NotYet),
            "nobody has said of which departure the image is"
        );
        assert!(migration::promotion::departed_named(&asking.state, "v").is_none(), "another order decides");
        asking.tell(Event::Looked(VOLUME, Look::Fit));
        asking.answer(THREE, None);
        assert_eq!(asking.answer(TWO, Some((generation, Whereabouts::Here))), [Action::Confirm(VOLUME)]);
        let records = confirm(&asking.state, VOLUME, &asking.standing()).unwrap();
        let mut state = asking.state.clone();
        state.apply(&Entry { at_unix_ms: 9, records }).unwrap();
        assert_eq!(reads(&state), expected);
        assert_eq!(state.migrations[&MigrationId(0)].has_ended(), expected.is_err());
    }
    // The volume has returned, or is to be forgotten: the departure has ended.
    let mut asking = Asking::of(&leaves_hollow(2));
    asking.tell(Event::Looked(VOLUME, Look::Fit));
    asking.answer(THREE, None);
    asking.answer(TWO, Some((4, Whereabouts::WithYou)));
    let returned = confirm(&asking.state, VOLUME, &asking.standing()).unwrap();
    for records in [returned, forget(&asking.state, VOLUME).unwrap()] {
        let mut state = asking.state.clone();
        state.apply(&Entry { at_unix_ms: 9, records }).unwrap();
        assert!(state.migrations[&MigrationId(0)].has_ended() && state.in_question().next().is_none());
        assert!(state.moved.is_empty());
    }
}

#[test]
fn clients_at_the_source_of_a_reinstated_copy_are_forwarded() {
    let mut asking = Asking::of(&comes(ONE, 2)[..2]);
    let uses = |state: &State| {
        judge(state, ONE, Role::FormerOwner { migration: MigrationId(0) }, Request::Volume(VOLUME))
    };
    assert_eq!(uses(&asking.state), Err(Denied::Over), "nobody knows whose it is");
    asking.tell(Event::Looked(VOLUME, Look::Fit));
    let records = order(&asking.state, VOLUME, &asking.standing(), Order::Force, BRANCH).unwrap();
    let mut state = asking.state.clone();
    state.apply(&Entry { at_unix_ms: 9, records }).unwrap();
    assert_eq!(uses(&state), Ok(()));
}
