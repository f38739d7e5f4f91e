//! Tests of cuts of one volume and of several.

use std::collections::BTreeSet;

use super::DuplicationAction::{CloseGates, Complete, Cut, Detach, GiveUp, OpenGates};
use super::DuplicationEvent::{Behind, Cancelled, Failed, GateClosed, Synchronised};
use super::*;

const HELD_MAX: Duration = Duration::from_millis(500);

struct Scene {
    machine: Duplication,
    now: Duration,
}

impl Scene {
    fn of(members: usize) -> Self {
        Self { machine: Duplication::new(members, HELD_MAX), now: Duration::from_secs(7) }
    }

    fn tell(&mut self, event: DuplicationEvent) -> Vec<DuplicationAction> {
        self.machine.handle_event(self.now, event);
        std::iter::from_fn(|| self.machine.poll_action()).collect()
    }

    /// Waits for the machine's deadline.
    fn wait(&mut self) -> Vec<DuplicationAction> {
        let (at, _) = self.machine.poll_timeout().unwrap();
        self.now = self.now.max(at);
        self.machine.handle_timeout(self.now);
        std::iter::from_fn(|| self.machine.poll_action()).collect()
    }
}

#[test]
fn the_copy_is_cut_off_before_the_gate_opens_and_only_while_it_is_equal() {
    let mut scene = Scene::of(1);
    assert_eq!(scene.tell(Synchronised(0)), [CloseGates(1)]);
    // A write that was below the gate has only reached the source.
    assert_eq!(scene.tell(Behind(0)), []);
    assert_eq!(scene.tell(GateClosed(0, 1)), []);
    assert_eq!(scene.tell(Synchronised(0)), [Cut]);
    assert_eq!(scene.tell(DuplicationEvent::Cut(0)), [OpenGates, Complete]);
    assert!(scene.machine.is_over());
    for late in [Behind(0), Synchronised(0), GateClosed(0, 1), Failed, Cancelled] {
        assert_eq!(scene.tell(late), []);
    }
}

#[test]
fn no_gate_opens_before_every_copy_is_cut_and_none_is_cut_before_every_gate_is_closed() {
    let mut scene = Scene::of(3);
    assert_eq!(scene.tell(Synchronised(2)), []);
    assert_eq!(scene.tell(Synchronised(0)), []);
    assert_eq!(scene.tell(Synchronised(1)), [CloseGates(1)]);
    // An early report counts for nothing.
    assert_eq!(scene.tell(DuplicationEvent::Cut(0)), []);
    for index in [1, 0] {
        assert_eq!(scene.tell(GateClosed(index, 1)), []);
    }
    // A volume that is not of the order.
    assert_eq!(scene.tell(GateClosed(3, 1)), []);
    assert_eq!(scene.tell(GateClosed(2, 1)), [Cut]);
    assert_eq!(scene.tell(DuplicationEvent::Cut(0)), []);
    assert_eq!(scene.tell(DuplicationEvent::Cut(2)), []);
    assert_eq!(scene.tell(DuplicationEvent::Cut(1)), [OpenGates, Complete]);
}

#[test]
fn guests_are_not_held_for_longer_than_agreed_and_not_for_ever() {
    let mut scene = Scene::of(1);
    assert_eq!(scene.tell(Synchronised(0)), [CloseGates(1)]);
    let begun = scene.now;
    assert_eq!(scene.wait(), [OpenGates]);
    assert_eq!(scene.now - begun, HELD_MAX);
    // A late report is of the former try.
    assert_eq!(scene.tell(GateClosed(0, 1)), []);
    for number in 2..=TRIES_MAX {
        assert_eq!(scene.wait(), [CloseGates(number)]);
        assert_eq!(scene.tell(GateClosed(0, number - 1)), []);
        if number < TRIES_MAX {
            assert_eq!(scene.wait(), [OpenGates]);
        }
    }
    assert_eq!(scene.wait(), [Detach, OpenGates, GiveUp(WhyGivenUp::NeverStill)]);
    assert!(scene.machine.is_over());
}

#[test]
fn a_copy_that_is_not_cut_in_time_ends_all() {
    let mut scene = Scene::of(2);
    scene.tell(Synchronised(0));
    scene.tell(Synchronised(1));
    scene.tell(GateClosed(0, 1));
    assert_eq!(scene.tell(GateClosed(1, 1)), [Cut]);
    assert_eq!(scene.tell(DuplicationEvent::Cut(0)), []);
    assert_eq!(scene.wait(), [Detach, OpenGates, GiveUp(WhyGivenUp::NeverStill)]);
    assert_eq!(scene.tell(DuplicationEvent::Cut(1)), []);
}

#[test]
fn whatever_ends_it_early_leaves_no_mirror_and_no_closed_gate() {
    for (event, why) in [(Failed, WhyGivenUp::Failed), (Cancelled, WhyGivenUp::Cancelled)] {
        let mut scene = Scene::of(1);
        assert_eq!(scene.tell(event), [Detach, GiveUp(why)]);
        let mut scene = Scene::of(1);
        assert_eq!(scene.tell(Synchronised(0)), [CloseGates(1)]);
        assert_eq!(scene.tell(event), [Detach, OpenGates, GiveUp(why)]);
        assert!(scene.machine.is_over());
    }
}

/// How the lanes of a run behave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lanes {
    /// As ordered.
    Obedient,
    /// Each cuts its copy and opens its gate once that is closed, without waiting for the other gates.
    CutAlone,
}

/// The lane of one volume, and its copy: the numbers of the writes that each has.
#[derive(Default)]
struct Lane {
    orders: VecDeque<DuplicationAction>,
    has: BTreeSet<u64>,
    copy: BTreeSet<u64>,
    is_closed: bool,
    is_cut: bool,
}

/// A client that makes write after write, each to one of three volumes and after the one before was acknowledged, while copies are
/// made. Returns the writes in the copies.
fn run(seed: u64, lanes_are: Lanes) -> Option<BTreeSet<u64>> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut random = move |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    let mut machine = Duplication::new(3, HELD_MAX);
    let mut lanes: [Lane; 3] = std::array::from_fn(|_| Lane::default());
    let mut reports: VecDeque<DuplicationEvent> = (0..3).map(Synchronised).collect();
    let (mut now, mut number, mut to) = (Duration::ZERO, 0, 0);
    for _ in 0..4_000 {
        now += Duration::from_millis(random(20));
        match random(4) {
            0 if !lanes[to].is_closed => {
                lanes[to].has.insert(number);
                if !lanes[to].is_cut {
                    lanes[to].copy.insert(number);
                }
                (number, to) = (number + 1, random(3) as usize);
            }
            0 => {}
            1 => machine.handle_timeout(now),
            2 => {
                if let Some(event) = reports.pop_front() {
                    machine.handle_event(now, event);
                }
            }
            _ => {
                let index = random(3) as usize;
                let lane = &mut lanes[index];
                match lane.orders.pop_front() {
                    Some(CloseGates(number)) => {
                        lane.is_closed = lanes_are == Lanes::Obedient;
                        lane.is_cut = lanes_are == Lanes::CutAlone;
                        reports.push_back(GateClosed(index, number));
                    }
                    Some(Cut) => {
                        lane.is_cut = true;
                        reports.push_back(DuplicationEvent::Cut(index));
                    }
                    Some(OpenGates) => lane.is_closed = false,
                    Some(Complete) => {
                        if lanes.iter().all(|lane| lane.is_cut) {
                            return Some(lanes.iter().flat_map(|lane| lane.copy.clone()).collect());
                        }
                    }
                    Some(GiveUp(_)) => return None,
                    Some(Detach) | None => {}
                }
            }
        }
        while let Some(action) = machine.poll_action() {
            lanes.iter_mut().for_each(|lane| lane.orders.push_back(action));
        }
    }
    None
}

/// Returns whether the writes are all up to one, and none behind it.
fn is_prefix(writes: &BTreeSet<u64>) -> bool {
    writes.iter().copied().eq(0..writes.len() as u64)
}

#[test]
fn copies_of_three_volumes_have_no_write_without_those_before_it() {
    let cuts: Vec<_> = (0..2_000).filter_map(|seed| Some((seed, run(seed, Lanes::Obedient)?))).collect();
    assert!(cuts.len() > 500, "{} orders succeeded", cuts.len());
    for (seed, writes) in cuts {
        assert!(is_prefix(&writes), "seed {seed}: {writes:?}");
    }
}

#[test]
fn a_copy_that_is_cut_before_every_gate_is_closed_is_found() {
    let found = (0..2_000).filter_map(|seed| run(seed, Lanes::CutAlone)).any(|writes| !is_prefix(&writes));
    assert!(found, "no order of events shows it");
}
