//! Tests what another host may ask for, at every stage of a migration and after it.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use chronicle::Generation;
use migration::authority::{Denied, Request, Role, judge, judge_memory};
use migration::journal::{
    Entry, ExportSettings, FailureCode, Forwarding, ImageLocation, MigratingVolume, Outcome, Record, Side,
    State, Summary, VolumeRecord,
};
use migration::{Attempt, HostId, MigrationId, VolumeId, VolumeIndex};

const A: HostId = HostId([1; 32]);
const C: HostId = HostId([3; 32]);
const DISK: VolumeId = VolumeId([7; 16]);
const OTHER: VolumeId = VolumeId([8; 16]);
/// The number of the migration at A.
const THERE: MigrationId = MigrationId(40);
const FIRST: VolumeIndex = VolumeIndex(0);

/// The journal of B, to which volumes come.
#[derive(Default)]
struct Journal {
    state: State,
    generation: u64,
}

impl Journal {
    fn apply(&mut self, record: Record) {
        self.state.apply(&Entry { at_unix_ms: 0, records: vec![record] }).unwrap();
    }

    fn comes(&mut self, from: HostId, remote: MigrationId) -> MigrationId {
        let volumes = vec![record(DISK, self.generation)];
        self.start(Side::Incoming { peer: from, peer_name: String::new(), remote, volumes })
    }

    fn goes(&mut self, to: HostId) -> MigrationId {
        let (peer_name, store) = (String::new(), String::new());
        self.start(Side::Outgoing { peer: to, peer_name, store, forwarding: Forwarding::Always })
    }

    fn start(&mut self, side: Side) -> MigrationId {
        let image = |store: &str| ImageLocation::raw_file(store, format!("/{store}"));
        let volumes = vec![MigratingVolume { volume: DISK, source: image("a"), target: image("b") }];
        let migration = MigrationId(self.state.next_migration);
        self.apply(Record::MigrationStarted { migration, volumes, keep_source: false, side });
        migration
    }

    fn prepare(&mut self, migration: MigrationId) {
        self.apply(Record::TargetPrepared { migration, attempt: Attempt(1) });
    }

    fn own(&mut self, migration: MigrationId) {
        let generations = self.next();
        self.apply(Record::Owned { migration, attempt: Attempt(1), generations });
    }

    fn release(&mut self, migration: MigrationId) {
        let generations = self.next();
        self.apply(Record::Released { migration, attempt: Attempt(1), generations });
    }

    fn hand_back(&mut self, migration: MigrationId) {
        let generations = self.next();
        self.apply(Record::HandedBack { migration, generations });
    }

    fn end(&mut self, migration: MigrationId, outcome: Outcome) {
        self.apply(Record::MigrationEnded { migration, outcome, summary: Summary::default() });
    }

    fn arrives(&mut self, from: HostId, remote: MigrationId) {
        let migration = self.comes(from, remote);
        self.prepare(migration);
        self.own(migration);
        self.end(migration, moved());
    }

    fn leaves(&mut self, to: HostId) {
        let migration = self.goes(to);
        self.release(migration);
        self.end(migration, moved());
    }

    fn next(&mut self) -> Vec<(VolumeId, Generation)> {
        self.generation += 1;
        vec![(DISK, Generation(self.generation))]
    }

    /// Returns what `peer` may do as the source (use the store) and as the former owner (use the volume).
    fn judged(&self, peer: HostId, remote: MigrationId) -> [Result<(), Denied>; 2] {
        let source = Role::Source { migration: remote, volume: FIRST };
        let former = Role::FormerOwner { migration: remote };
        [
            judge(&self.state, peer, source, Request::Store(FIRST)),
            judge(&self.state, peer, former, Request::Volume(DISK)),
        ]
    }
}

fn record(volume: VolumeId, generation: u64) -> VolumeRecord {
    VolumeRecord {
        volume,
        name: volume.to_string(),
        size_bytes: 1 << 20,
        block_size_bytes: 65536,
        image: ImageLocation::raw_file("b", "/b"),
        generation: Generation(generation),
        export: ExportSettings::default(),
    }
}

fn moved() -> Outcome {
    Outcome::Moved { left_over: String::new() }
}

fn failed() -> Outcome {
    Outcome::Failed { code: FailureCode::Internal, detail: String::new() }
}

#[test]
fn a_source_uses_the_store_until_the_volume_is_ours_and_the_volume_from_then_on() {
    let mut journal = Journal::default();
    assert_eq!(journal.judged(A, THERE), [Err(Denied::Unknown); 2]);
    let migration = journal.comes(A, THERE);
    assert_eq!(journal.judged(A, THERE), [Ok(()), Err(Denied::NotYet)]);
    journal.prepare(migration);
    assert_eq!(journal.judged(A, THERE), [Ok(()), Err(Denied::NotYet)]);
    journal.own(migration);
    assert_eq!(journal.judged(A, THERE), [Err(Denied::Over), Ok(())]);
    journal.end(migration, moved());
    assert_eq!(journal.judged(A, THERE), [Err(Denied::Over), Ok(())]);
    // Another host, or another number.
    assert_eq!(journal.judged(C, THERE), [Err(Denied::Unknown); 2]);
    assert_eq!(journal.judged(A, MigrationId(41)), [Err(Denied::Unknown); 2]);
}

#[test]
fn a_source_tells_of_copies_as_long_as_the_stay_lasts_that_it_has_begun() {
    let mut journal = Journal::default();
    let tells = |journal: &Journal, peer| {
        let source = Role::Source { migration: THERE, volume: FIRST };
        judge(&journal.state, peer, source, Request::Copies(FIRST))
    };
    assert_eq!(tells(&journal, A), Err(Denied::Unknown));
    let migration = journal.comes(A, THERE);
    assert_eq!(tells(&journal, A), Ok(()));
    journal.prepare(migration);
    journal.own(migration);
    journal.end(migration, moved());
    assert_eq!([tells(&journal, A), tells(&journal, C)], [Ok(()), Err(Denied::Unknown)]);
    journal.leaves(C);
    assert_eq!(tells(&journal, A), Err(Denied::Over));
    // The volume is here once more, in another residency.
    journal.arrives(C, MigrationId(31));
    assert_eq!(tells(&journal, A), Err(Denied::Over));
}

#[test]
fn what_was_not_given_is_refused_in_every_role() {
    let mut journal = Journal::default();
    journal.apply(Record::VolumeAdded(record(OTHER, 1)));
    journal.arrives(A, THERE);
    let migration = THERE;
    let roles = [
        Role::Source { migration, volume: FIRST },
        Role::Target { migration },
        Role::FormerOwner { migration },
        Role::NewOwner { migration },
    ];
    let requests = [
        Request::Store(VolumeIndex(1)),
        Request::Copies(VolumeIndex(1)),
        Request::Volume(OTHER),
        Request::ToTarget(MigrationId(1)),
        Request::ToSource(migration),
    ];
    for role in roles {
        for request in requests {
            assert!(judge(&journal.state, A, role, request).is_err(), "{role:?} {request:?}");
        }
    }
    let former = Role::FormerOwner { migration };
    assert_eq!(judge(&journal.state, A, former, Request::Volume(OTHER)), Err(Denied::NotGiven));
    // Its number at the source is not a number here.
    let target = Role::Target { migration: MigrationId(0) };
    assert_eq!(judge(&journal.state, A, target, Request::ToSource(MigrationId(0))), Err(Denied::Unknown));
}

#[test]
fn a_migration_that_came_to_nothing_gives_nothing() {
    let mut journal = Journal::default();
    let migration = journal.comes(A, THERE);
    journal.end(migration, failed());
    assert_eq!(journal.judged(A, THERE), [Err(Denied::Over); 2]);
    let mut journal = Journal::default();
    let migration = journal.comes(A, THERE);
    journal.prepare(migration);
    journal.own(migration);
    journal.hand_back(migration);
    assert_eq!(journal.judged(A, THERE), [Err(Denied::Over); 2]);
}

#[test]
fn what_is_said_of_a_vms_memory_is_of_the_vm_that_the_migration_brought_and_of_no_other() {
    let says = |journal: &Journal, remote| judge_memory(&journal.state, A, remote);
    let mut journal = Journal::default();
    let migration = journal.comes(A, THERE);
    assert_eq!(says(&journal, THERE), Err(Denied::NotYet));
    journal.prepare(migration);
    assert!(says(&journal, THERE).is_ok());
    journal.own(migration);
    journal.end(migration, moved());
    let names = vec![journal.state.volumes[&DISK].record.name.clone()];
    assert_eq!(says(&journal, THERE), Ok(names));
    assert_eq!(judge_memory(&journal.state, C, THERE), Err(Denied::Unknown));
    // The volume leaves, and returns by another host: the first host has lost its permission.
    journal.leaves(C);
    assert_eq!(says(&journal, THERE), Err(Denied::Over));
    journal.arrives(C, MigrationId(31));
    assert_eq!(says(&journal, THERE), Err(Denied::Over));
    // A failed migration never gave a permission.
    let mut journal = Journal::default();
    let migration = journal.comes(A, THERE);
    journal.end(migration, failed());
    assert_eq!(says(&journal, THERE), Err(Denied::Over));
}

#[test]
fn the_right_to_a_volume_ends_when_it_is_removed_and_when_it_is_forgotten() {
    let mut journal = Journal::default();
    journal.arrives(A, THERE);
    journal.apply(Record::VolumeRemoved { volume: DISK });
    assert_eq!(journal.judged(A, THERE)[1], Err(Denied::Over));
    let mut journal = Journal::default();
    journal.arrives(A, THERE);
    // The volume moves on to another host: clients of the first are forwarded there.
    journal.leaves(C);
    assert_eq!(journal.judged(A, THERE)[1], Ok(()));
    journal.apply(Record::MovedForgotten { volume: DISK });
    assert_eq!(journal.judged(A, THERE)[1], Err(Denied::Over));
}

#[test]
fn the_right_to_a_volume_that_went_home_ends_when_it_comes_again_from_elsewhere() {
    let mut journal = Journal::default();
    journal.arrives(A, THERE);
    let back = journal.goes(A);
    journal.release(back);
    assert_eq!(journal.judged(A, THERE)[1], Ok(()), "it may be handed back");
    journal.end(back, moved());
    assert_eq!(journal.judged(A, THERE)[1], Ok(()), "what is on its way is led to its home");
    let mut by_another = Journal { state: journal.state.clone(), ..journal };
    journal.arrives(A, MigrationId(42));
    assert_eq!(journal.judged(A, THERE)[1], Ok(()), "the other migration gives the same right");
    assert_eq!(journal.judged(A, MigrationId(42))[1], Ok(()));
    by_another.arrives(C, MigrationId(5));
    assert_eq!(by_another.judged(A, THERE)[1], Err(Denied::Over));
    assert_eq!(by_another.judged(C, MigrationId(5))[1], Ok(()));
}

#[test]
fn what_gives_a_right_is_not_forgotten_and_what_has_ended_it_is_not_forgotten_before_it() {
    let mut journal = Journal::default();
    journal.arrives(A, THERE);
    let many = |journal: &mut Journal| {
        for number in 0..1100 {
            let migration = journal.comes(C, MigrationId(1000 + number));
            journal.end(migration, failed());
        }
    };
    many(&mut journal);
    assert_eq!(journal.judged(A, THERE)[1], Ok(()));
    assert!(journal.state.migrations.len() <= 1002);
    // The record of a departure stays while its clients are forwarded.
    journal.leaves(C);
    let by = journal.state.moved[&DISK].migration;
    many(&mut journal);
    assert!(journal.state.migrations.contains_key(&by));
    journal.arrives(C, MigrationId(9));
    journal.leaves(A);
    journal.arrives(C, MigrationId(10));
    for _ in 0..2 {
        many(&mut journal);
        assert!(journal.judged(A, THERE)[1].is_err());
    }
    assert!(journal.state.migrations.len() <= 1003);
}
