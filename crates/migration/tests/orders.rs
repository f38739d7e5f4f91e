//! Tests that an order for a migration is durable before it is answered, and that a restart obeys it.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use chronicle::Generation;
use migration::journal::{
    Entry, ExportSettings, Forwarding, Frames, HEADER, ImageLocation, Inconsistent, MigratingVolume, Outcome,
    Record, Side, State, Summary, VolumeRecord, encode,
};
use migration::orders::{self, TooLate};
use migration::{Attempt, HostId, MigrationId, VolumeId};

const VOLUME: VolumeId = VolumeId([1; 16]);
const ID: MigrationId = MigrationId(3);
const ATTEMPT: Attempt = Attempt(1);
const PEER: HostId = HostId([9; 32]);

fn image(store: &str) -> ImageLocation {
    ImageLocation::raw_file(store, format!("/{store}/v"))
}

fn volume() -> VolumeRecord {
    VolumeRecord {
        volume: VOLUME,
        name: "v".to_owned(),
        size_bytes: 1 << 20,
        block_size_bytes: 4096,
        image: image("a"),
        generation: Generation(0),
        export: ExportSettings::default(),
    }
}

fn outgoing() -> Side {
    let (peer_name, store, forwarding) = ("beta".to_owned(), String::new(), Forwarding::Always);
    Side::Outgoing { peer: PEER, peer_name, store, forwarding }
}

fn incoming() -> Side {
    Side::Incoming {
        peer: PEER,
        peer_name: "beta".to_owned(),
        remote: MigrationId(5),
        volumes: vec![volume()],
    }
}

fn apply(state: &mut State, records: Vec<Record>) -> Result<(), Inconsistent> {
    state.apply(&Entry { at_unix_ms: 0, records })
}

fn begun(side: Side) -> State {
    let mut state = State::default();
    if !matches!(side, Side::Incoming { .. }) {
        apply(&mut state, vec![Record::VolumeAdded(volume())]).unwrap();
    }
    let moving = MigratingVolume { volume: VOLUME, source: image("a"), target: image("b") };
    let started = Record::MigrationStarted { migration: ID, volumes: vec![moving], keep_source: false, side };
    apply(&mut state, vec![started]).unwrap();
    state
}

fn restarted(state: &State) -> State {
    let mut file = HEADER.to_vec();
    encode(0, &Entry { at_unix_ms: 0, records: state.snapshot() }, &mut file).unwrap();
    let mut read = State::default();
    Frames::new(&file).unwrap().for_each(|entry| read.apply(&entry).unwrap());
    read
}

fn cancel(state: &mut State) {
    let records = orders::cancel(state, ID).unwrap();
    apply(state, records).unwrap();
}

fn prepared() -> Record {
    Record::TargetPrepared { migration: ID, attempt: ATTEMPT }
}

fn released() -> Record {
    Record::Released { migration: ID, attempt: ATTEMPT, generations: vec![(VOLUME, Generation(1))] }
}

#[test]
fn what_is_cancelled_is_not_handed_over_also_by_the_next_daemon() {
    for (side, handed_over) in [
        (outgoing(), vec![released()]),
        (incoming(), vec![prepared()]),
        (Side::OneHost, vec![prepared(), released()]),
    ] {
        let mut state = begun(side);
        assert!(orders::goes_on(&state.migrations[&ID]));
        cancel(&mut state);
        for mut state in [state.clone(), restarted(&state)] {
            assert!(!orders::goes_on(&state.migrations[&ID]));
            assert_eq!(orders::cancel(&state, ID), Ok(Vec::new()), "it is durable");
            assert_eq!(apply(&mut state, handed_over.clone()), Err(Inconsistent::Overtaken(ID)));
            let (outcome, summary) = (Outcome::Cancelled, Summary::default());
            apply(&mut state, vec![Record::MigrationEnded { migration: ID, outcome, summary }]).unwrap();
        }
    }
}

#[test]
fn what_is_handed_over_or_may_be_is_not_cancelled() {
    for (side, handed_over) in [(outgoing(), released()), (incoming(), prepared())] {
        let mut state = begun(side);
        // A client looked before the handover was durable.
        let late = orders::cancel(&state, ID).unwrap();
        apply(&mut state, vec![handed_over]).unwrap();
        assert_eq!(orders::cancel(&state, ID), Err(TooLate(ID)));
        assert_eq!(apply(&mut state, late), Err(Inconsistent::Overtaken(ID)));
        assert!(orders::goes_on(&state.migrations[&ID]));
    }
    let mut state = begun(Side::OneHost);
    apply(&mut state, vec![prepared()]).unwrap();
    cancel(&mut state);
    assert_eq!(orders::cancel(&State::default(), ID), Err(TooLate(ID)), "there is none");
}

#[test]
fn a_host_that_leads_clients_on_offers_the_size_that_the_owner_has_also_after_a_restart() {
    let mut state = begun(outgoing());
    let grew = |size_bytes| vec![Record::GrewElsewhere { volume: VOLUME, size_bytes }];
    let offered = |state: &State| state.moved[&VOLUME].volume.record.size_bytes;
    apply(&mut state, vec![released()]).unwrap();
    apply(&mut state, grew(3 << 20)).unwrap();
    assert_eq!(offered(&state), 1 << 20, "it may be handed back, and its image here is as it was");
    let (outcome, summary) = (Outcome::Moved { left_over: String::new() }, Summary::default());
    apply(&mut state, vec![Record::MigrationEnded { migration: ID, outcome, summary }]).unwrap();
    apply(&mut state, grew(3 << 20)).unwrap();
    apply(&mut state, grew(2 << 20)).unwrap();
    assert_eq!((offered(&state), offered(&restarted(&state))), (3 << 20, 3 << 20));
    // The record does not affect a volume that is here, or is unknown.
    apply(&mut State::default(), grew(1)).unwrap();
}
