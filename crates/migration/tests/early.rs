//! Tests an early attempt at the handover, while a VM's devices are still sent. It releases nothing before the VM is loaded at
//! the target, and a request that waits at its gates ends it.

use std::time::Duration;

use chronicle::Generation;
use migration::journal::Record;
use migration::message::{ToSource, ToTarget};
use migration::source::{Moves, Peer, SourceAction, SourceEvent, SourceSettings};
use migration::target::FlushResult;
use migration::{Attempt, MigrationId, Phase, Source, VolumeId, VolumeIndex};

const DISK: VolumeIndex = VolumeIndex(0);
const SWITCH_OVER_MAX: Duration = Duration::from_secs(1);

struct Scene {
    source: Source,
    now: Duration,
}

impl Scene {
    /// Returns a source whose VM's memory is being copied.
    fn in_memory() -> Self {
        let settings = SourceSettings {
            migration: MigrationId(1),
            volumes: vec![(VolumeId([1; 16]), Generation(0))],
            switch_over_max: SWITCH_OVER_MAX,
            peer: Peer::OtherHost,
            moves: Moves::Vm,
        };
        let mut scene = Self { source: Source::new(Duration::ZERO, settings), now: Duration::ZERO };
        scene.tell(SourceEvent::Synchronised(DISK));
        scene.pass(Duration::from_millis(50));
        scene.tell(SourceEvent::Settled { volume: DISK, settling: 1, result: FlushResult::Durable });
        assert!(scene.actions().contains(&SourceAction::StopVm));
        assert_eq!(scene.source.phase(), Phase::Memory);
        scene
    }

    /// Like `in_memory`, in an early attempt that the target has promised.
    fn promised_early() -> Self {
        let mut scene = Self::in_memory();
        scene.tell(SourceEvent::VmPaused);
        scene.closed();
        scene.flushed();
        let attempt = scene.source.attempt();
        assert!(scene.actions().contains(&SourceAction::Send(ToTarget::Prepare(attempt))));
        scene.tell(SourceEvent::Received(ToSource::Prepared(attempt)));
        scene
    }

    fn tell(&mut self, event: SourceEvent) {
        self.now += Duration::from_millis(1);
        self.source.handle_event(self.now, event);
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.source.handle_timeout(self.now);
    }

    fn closed(&mut self) {
        self.tell(SourceEvent::GateClosed { volume: DISK, attempt: self.source.attempt() });
    }

    fn flushed(&mut self) {
        let (attempt, result) = (self.source.attempt(), FlushResult::Durable);
        self.tell(SourceEvent::Flushed { volume: DISK, attempt, result });
    }

    fn actions(&mut self) -> Vec<SourceAction> {
        std::iter::from_fn(|| self.source.poll_action()).collect()
    }
}

fn records(actions: &[SourceAction]) -> Vec<&Record> {
    let commits = actions.iter().filter_map(|action| match action {
        SourceAction::Commit { records, .. } => Some(records),
        _ => None,
    });
    commits.flatten().collect()
}

fn releases(actions: &[SourceAction]) -> bool {
    records(actions).iter().any(|record| matches!(record, Record::Released { .. }))
}

#[test]
fn nothing_is_released_before_the_machine_is_loaded_however_ready_its_disks_are() {
    let mut scene = Scene::promised_early();
    assert!(!releases(&scene.actions()));
    // The memory may take longer than the limit of the disks.
    scene.pass(10 * SWITCH_OVER_MAX);
    assert_eq!(scene.actions(), vec![], "it waits for the VM, and for nothing else");
    assert_eq!(scene.source.phase(), Phase::Memory);
    assert_eq!(scene.source.poll_timeout(), None);
    assert_eq!(scene.source.waits_for(), Some("the VM to be loaded at the target"));

    scene.tell(SourceEvent::VmStopped(Ok(())));
    let actions = scene.actions();
    assert!(releases(&actions), "{actions:?}");
    let phases: Vec<_> = actions
        .iter()
        .filter_map(|action| match action {
            SourceAction::Enter(phase) => Some(*phase),
            _ => None,
        })
        .collect();
    assert_eq!(phases, [Phase::Closing, Phase::Preparing, Phase::Releasing]);
}

#[test]
fn what_the_hypervisor_still_wants_of_a_disk_ends_the_early_try() {
    let mut scene = Scene::promised_early();
    let early = scene.source.attempt();
    scene.actions();
    scene.tell(SourceEvent::RequestHeld { volume: DISK, attempt: early });
    let actions = scene.actions();
    assert!(actions.contains(&SourceAction::OpenGate(DISK)), "{actions:?}");
    let aborted = Record::AttemptAborted { migration: MigrationId(1), attempt: early };
    assert_eq!(records(&actions), [&aborted]);
    assert_eq!(scene.source.phase(), Phase::Memory);

    // There is no second early attempt, and late answers of the first change nothing.
    scene.tell(SourceEvent::Received(ToSource::Prepared(early)));
    scene.tell(SourceEvent::Synchronised(DISK));
    assert_eq!(scene.actions(), vec![]);
    scene.tell(SourceEvent::VmStopped(Ok(())));
    let attempt = scene.source.attempt();
    assert!(attempt > early, "the promise of the early try is not one for this");
    assert!(scene.actions().contains(&SourceAction::CloseGate { volume: DISK, attempt }));
}

#[test]
fn a_request_held_by_an_earlier_try_ends_nothing() {
    let mut scene = Scene::promised_early();
    scene.actions();
    let earlier = Attempt(scene.source.attempt().0 - 1);
    scene.tell(SourceEvent::RequestHeld { volume: DISK, attempt: earlier });
    assert_eq!(scene.actions(), vec![]);
}

#[test]
fn a_target_that_loses_what_it_promised_costs_the_early_try_and_not_the_migration() {
    let mut scene = Scene::promised_early();
    scene.actions();
    scene.tell(SourceEvent::Behind(DISK));
    assert_eq!(scene.source.phase(), Phase::Memory);
    assert!(scene.actions().contains(&SourceAction::OpenGate(DISK)));
    scene.tell(SourceEvent::VmStopped(Ok(())));
    assert_eq!(scene.source.phase(), Phase::Closing);
}

#[test]
fn a_machine_that_is_not_moved_after_all_goes_on_with_open_gates_and_nothing_begins_again() {
    let mut scene = Scene::promised_early();
    scene.actions();
    scene.tell(SourceEvent::VmStopped(Err("it is not loaded".to_owned())));
    assert_eq!(scene.source.phase(), Phase::Discarding);
    let actions = scene.actions();
    assert!(actions.contains(&SourceAction::OpenGate(DISK)) && !releases(&actions), "{actions:?}");
    let attempt = scene.source.attempt();
    for late in [
        SourceEvent::RequestHeld { volume: DISK, attempt },
        SourceEvent::VmPaused,
        SourceEvent::VmStopped(Ok(())),
        SourceEvent::Received(ToSource::Prepared(attempt)),
    ] {
        scene.tell(late);
        assert_eq!(scene.source.phase(), Phase::Discarding);
        assert_eq!(scene.actions(), vec![]);
    }
}

#[test]
fn a_replica_that_is_behind_when_the_machine_pauses_is_waited_for_with_open_gates() {
    let mut scene = Scene::in_memory();
    scene.tell(SourceEvent::Behind(DISK));
    scene.tell(SourceEvent::VmPaused);
    assert_eq!(scene.actions(), vec![]);
    scene.tell(SourceEvent::Converged(DISK));
    let attempt = scene.source.attempt();
    assert_eq!(scene.actions(), vec![SourceAction::CloseGate { volume: DISK, attempt }]);
}
