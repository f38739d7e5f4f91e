//! Faults between hosts: drawn by phase or by time, and their effects.
//!
//! *Source*, *target* and *link* are the present migration's; between migrations, those of a possible next one.

use std::rc::Rc;
use std::time::Duration;

use migration::Phase;

use super::Fleet;
use super::link::Break;
use super::place::Place;
use super::tally::Event;
use crate::coverage::{Table, impossible};
use crate::faults::{Fault, Planned};
use crate::random::Random;
use crate::world::Stop;

const FAULTS_END: Duration = Duration::from_secs(6);
/// How long a link is away; longer than a guest's write may be held.
const AWAY_MAX: Duration = Duration::from_secs(4);
/// How long a lost link is away: longer than any wait, so for ever to the hosts.
const GONE: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(150));

/// Additional kills of the source with two hosts: fewer faults are possible there, and unwritten state shows only if the daemon
/// is killed at the very moment.
const KILLS_OF_TWO: usize = 20;
/// The percentage of simulations with forced promotions in which a copy is handed back, and its source lost soon after.
const HANDED_BACK_PERCENT: u64 = 25;
/// The faults after that: in such short phases others would seldom strike.
const LOSSES: [Fault; 10] = [
    Fault::Kill,
    Fault::Kill,
    Fault::LinkGone,
    Fault::LinkGone,
    Fault::LinkCut,
    Fault::LinkSilent,
    Fault::KillTarget,
    Fault::PowerCut,
    Fault::PowerCutTarget,
    Fault::ClockJump,
];
const WEIGHTS: [(Fault, usize); 23] = [
    (Fault::Kill, 4),
    (Fault::KillTarget, 4),
    (Fault::KillOther, 1),
    (Fault::PowerCut, 2),
    (Fault::PowerCutTarget, 2),
    (Fault::PowerCutOther, 1),
    (Fault::LinkCut, 4),
    (Fault::LinkSilent, 3),
    (Fault::LinkGone, 2),
    (Fault::OtherLinkCut, 1),
    (Fault::SourceError, 3),
    (Fault::SourceSlow, 2),
    (Fault::TargetError, 2),
    (Fault::TargetFull, 2),
    (Fault::TargetHang, 2),
    (Fault::TargetSlow, 3),
    (Fault::HandBack, 3),
    (Fault::JournalError, 2),
    (Fault::JournalSlow, 2),
    (Fault::Cancel, 4),
    (Fault::CancelThere, 1),
    (Fault::ImageTouched, 3),
    (Fault::ClockJump, 1),
];

const SELDOM_STREAM: u64 = 0x7365_6c64_6f6d_0000;
const SELDOM_PERCENT: u64 = 35;
/// Phases that few migrations enter, or that are very short.
const SELDOM: [Phase; 9] = [
    Phase::TakingBack,
    Phase::TakingBack,
    Phase::Discarding,
    Phase::Memory,
    Phase::Memory,
    Phase::Closing,
    Phase::Filling,
    Phase::Filling,
    Phase::Retiring,
];
/// The latest strike after the beginning of such a phase.
const SOON: Duration = Duration::from_millis(1);
/// The percentage in which a kept image is touched, in any phase, because there must be one.
const TOUCHED_PERCENT: u64 = 50;

/// The percentage of full targets while a VM is stopped, when there are few writes.
const FULL_PERCENT: u64 = 4;
const TOUCHED_ENTRIES: u32 = 4;

/// The percentage of fillings, with the guests at the target, in which its daemon is killed and its host then loses power.
const FILLING_PERCENT: u64 = 40;
/// The times in microseconds: from the beginning of the phase to the kill, and from there to the power cut.
const KILLED_AFTER: (u64, u64) = (100, 20_000);
const CUT_AFTER: (u64, u64) = (1000, 60_000);

/// The percentage of the other such fillings in which a flush fails, and the host then loses power.
const LOST_FLUSH_PERCENT: u64 = 40;
const LOST_FLUSH_STREAM: u64 = 0x6c6f_7374_0000_0000;
/// The times in microseconds: from the beginning of the phase to the failed flush, and from there to the power cut.
const FLUSH_FAILS_AFTER: (u64, u64) = (10, 60_000);
const CUT_AFTER_FLUSH: (u64, u64) = (5000, 400_000);
/// How long a flush may come after that.
const FLUSH_SOON: Duration = Duration::from_millis(100);

/// The percentage of recovering daemons that may be hit again …
const RECOVERY_CRASH_PERCENT: u64 = 25;
/// … and by when.
const RECOVERY_MAX: Duration = Duration::from_millis(20);

impl Fleet {
    pub(super) fn draw_faults(self: &Rc<Self>) {
        let mut random = self.random.borrow_mut();
        let mut faults: Vec<_> =
            WEIGHTS.iter().flat_map(|(fault, weight)| std::iter::repeat_n(*fault, *weight)).collect();
        if self.hosts.len() == 2 {
            faults.extend(std::iter::repeat_n(Fault::Kill, KILLS_OF_TWO));
        }
        for _ in 0..random.pick(&[0, 1, 2, 3, 4, 6, 9]) {
            let fault = random.pick(&faults);
            self.draw_one(&mut random, fault);
        }
        self.draw_stops(&mut random);
        if self.operators.may_force() {
            // For a forced promotion, a host must be out of reach since a promise.
            for _ in 0..2 {
                let fault = random.pick(&[Fault::Kill, Fault::LinkGone, Fault::LinkCut, Fault::LinkSilent]);
                let skip = random.below(3) as u32;
                let delay = random.duration(Duration::from_micros(50), Duration::from_millis(60));
                let window = random.duration(Duration::from_secs(1), Duration::from_secs(8));
                self.world.faults.plan(Planned { skip, delay, window, ..planned(fault, Phase::Preparing) });
            }
            self.draw_loss_after_hand_back(&mut random);
        }
    }

    /// Draws faults in rare phases, with the faults that lead there. The separate stream keeps all other draws as they are.
    pub(super) fn draw_seldom_faults(&self, seed: u64) {
        let mut random = Random::new(seed ^ SELDOM_STREAM);
        if self.is_alone() || !random.percent(SELDOM_PERCENT) {
            return;
        }
        let table = Table::of_hosts(self.hosts.len());
        let (fault, phase) = if self.hosts.len() > 2 && random.percent(TOUCHED_PERCENT) {
            let (some, back) = (random.pick(&Phase::ALL), Phase::TakingBack);
            (Fault::ImageTouched, random.pick(&[some, some, Phase::Memory, back, back, back]))
        } else {
            (random.pick(table.faults()), random.pick(&SELDOM))
        };
        let (fault, phase) =
            if random.percent(FULL_PERCENT) { (Fault::TargetFull, Phase::Memory) } else { (fault, phase) };
        if impossible(table, fault, phase).is_some() {
            return;
        }
        // An image that can be touched is left by some migrations only.
        let entries = if fault == Fault::ImageTouched { TOUCHED_ENTRIES } else { 1 };
        let lasting = |fault, phase, strikes_max| Planned {
            window: AWAY_MAX,
            percent: 100,
            strikes_max,
            ..planned(fault, phase)
        };
        if phase == Phase::TakingBack || fault == Fault::HandBack {
            let strikes_max = random.pick(&[1, 3]);
            let trial = lasting(Fault::HandBack, Phase::Committing, strikes_max);
            (0..entries).for_each(|skip| self.world.faults.plan(Planned { skip, ..trial }));
        }
        if fault == Fault::HandBack {
            // Other volumes' trials must be in progress when the first one fails.
            self.world.faults.plan(lasting(Fault::TargetSlow, Phase::Committing, 3));
        }
        let plan = Planned {
            delay: if random.percent(50) { Duration::ZERO } else { random.duration(Duration::ZERO, SOON) },
            window: random.duration(Duration::from_millis(1), AWAY_MAX),
            strikes_max: 5,
            percent: 100,
            ..planned(fault, phase)
        };
        (0..entries).for_each(|skip| self.world.faults.plan(Planned { skip, ..plan }));
    }

    /// Draws that a target's daemon is killed while blocks are missing there, and that its host loses power soon after. What guests
    /// wrote before the kill, and flushed after it, must be there.
    fn draw_kill_and_power_cut(self: &Rc<Self>) {
        let target = self.concerned().map(|(_, target)| target);
        if !target.is_some_and(|target| self.may_lose_power(target)) || self.world.now() > FAULTS_END {
            return;
        }
        let mut random = self.orders.borrow_mut();
        if !random.percent(FILLING_PERCENT) {
            drop(random);
            target.into_iter().for_each(|target| self.draw_lost_flush(target));
            return;
        }
        let killed = Duration::from_micros(random.between(KILLED_AFTER.0, KILLED_AFTER.1));
        let cut = killed + Duration::from_micros(random.between(CUT_AFTER.0, CUT_AFTER.1));
        for (fault, delay) in [(Fault::KillTarget, killed), (Fault::PowerCutTarget, cut)] {
            let me = Rc::downgrade(self);
            self.world.clock.after(delay, move || {
                if let Some(fleet) = me.upgrade() {
                    fleet.strike(&planned(fault, Phase::Filling));
                }
            });
        }
    }

    /// Draws that a flush of the target's disks fails while blocks are missing there, and that its host loses power soon after. What
    /// the flush has lost must not be older than the handover then. The separate stream keeps all other draws as they are.
    fn draw_lost_flush(self: &Rc<Self>, target: Place) {
        let now = u64::try_from(self.world.now().as_nanos()).unwrap_or_default();
        let mut random = Random::new(now ^ LOST_FLUSH_STREAM);
        if !random.percent(LOST_FLUSH_PERCENT) {
            return;
        }
        let fails = Duration::from_micros(random.between(FLUSH_FAILS_AFTER.0, FLUSH_FAILS_AFTER.1));
        let cut = fails + Duration::from_micros(random.between(CUT_AFTER_FLUSH.0, CUT_AFTER_FLUSH.1));
        let me = Rc::downgrade(self);
        self.world.clock.after(fails, move || {
            if let Some(fleet) = me.upgrade() {
                let images = fleet.host(target).images.borrow();
                images.values().for_each(|disk| disk.fail_next_flush(FLUSH_SOON));
            }
        });
        let me = Rc::downgrade(self);
        self.world.clock.after(cut, move || {
            if let Some(fleet) = me.upgrade() {
                fleet.strike(&planned(Fault::PowerCutTarget, Phase::Filling));
            }
        });
    }

    /// Draws that the message to discard a handed-back copy is lost.
    fn draw_loss_after_hand_back(&self, random: &mut Random) {
        if !random.percent(HANDED_BACK_PERCENT) {
            return;
        }
        let trial = Planned { window: AWAY_MAX, percent: 100, ..planned(Fault::HandBack, Phase::Committing) };
        self.world.faults.plan(trial);
        let fault = random.pick(&LOSSES);
        let phase = random.pick(&[Phase::TakingBack, Phase::Discarding]);
        let delay = random.duration(Duration::ZERO, Duration::from_millis(2));
        let window = random.duration(Duration::from_secs(1), Duration::from_secs(8));
        self.world.faults.plan(Planned { delay, window, ..planned(fault, phase) });
    }

    fn draw_one(self: &Rc<Self>, random: &mut Random, fault: Fault) {
        let latest = random.pick(&[
            Duration::from_millis(5),
            Duration::from_millis(20),
            Duration::from_millis(80),
            Duration::from_millis(400),
            FAULTS_END,
        ]);
        let at = random.duration(Duration::from_micros(10), latest);
        let phase = self.draw_phase(random, fault);
        let plan = Planned {
            skip: random.pick(&[0, 0, 0, 0, 1, 2]),
            // Most failures happen in the short time of a handover.
            delay: if random.percent(30) { Duration::ZERO } else { at / 200 },
            window: random.duration(Duration::from_micros(100), AWAY_MAX),
            strikes_max: random.pick(&[1, 2, 5, 20]),
            ..planned(fault, phase)
        };
        if random.percent(60) {
            self.world.faults.plan(plan);
        } else {
            let me = Rc::downgrade(self);
            self.world.clock.at(at, move || {
                if let Some(fleet) = me.upgrade() {
                    fleet.strike(&plan);
                }
            });
        }
    }

    fn draw_phase(&self, random: &mut Random, fault: Fault) -> Phase {
        loop {
            let phase = random.pick(&Phase::ALL);
            let is_there = phase != Phase::Memory || self.vm.is_some();
            if is_there && impossible(Table::Hosts, fault, phase).is_none() {
                return phase;
            }
        }
    }

    pub(super) fn phase_entered(self: &Rc<Self>, phase: Phase) {
        if phase == Phase::Filling {
            self.draw_kill_and_power_cut();
        }
        self.perhaps_order(phase);
        for plan in self.world.faults.due(phase) {
            if self.is_alone() && plan.delay.is_zero() {
                self.strike_alone(&plan);
                continue;
            }
            let me = Rc::downgrade(self);
            self.world.clock.after(plan.delay, move || {
                if let Some(fleet) = me.upgrade() {
                    fleet.strike(&plan);
                }
            });
        }
    }

    fn strike(&self, plan: &Planned) {
        if self.is_alone() {
            return self.strike_alone(plan);
        }
        let Some((source, target)) = self.concerned() else { return };
        let other = self.hosts.iter().map(|host| host.place).find(|place| ![source, target].contains(place));
        let phase = self.host(source).phase();
        let has_struck = match plan.fault {
            Fault::Kill => self.perhaps_crash(Some(source), Stop::Kill),
            Fault::KillTarget => self.perhaps_crash(Some(target), Stop::Kill),
            Fault::KillOther => self.perhaps_crash(other, Stop::Kill),
            Fault::PowerCut => self.perhaps_crash(Some(source), Stop::PowerCut),
            Fault::PowerCutTarget => self.perhaps_crash(Some(target), Stop::PowerCut),
            Fault::PowerCutOther => self.perhaps_crash(other, Stop::PowerCut),
            Fault::LinkCut => self.break_link(source, target, Break::Cut, plan.window),
            Fault::LinkSilent => self.break_link(source, target, Break::Silent, plan.window),
            Fault::LinkGone => {
                let mut random = self.random.borrow_mut();
                let how = random.pick(&[Break::Cut, Break::Silent]);
                let away = random.duration(GONE.0, GONE.1);
                drop(random);
                self.break_link(source, target, how, away)
            }
            Fault::OtherLinkCut => match other {
                Some(other) => {
                    let end = self.random.borrow_mut().pick(&[source, target]);
                    self.break_link(end, other, Break::Cut, plan.window)
                }
                None => false,
            },
            // A cancellation while the release is on its way to the journal may succeed or not: it is not counted.
            Fault::Cancel => {
                let is_early = self.host(source).wish_to_cancel();
                is_early && phase.is_some_and(Phase::can_be_cancelled)
            }
            Fault::CancelThere => self.host(target).cancel_incoming(),
            Fault::ImageTouched => self.touch_an_image(),
            Fault::ClockJump => {
                let place = self.random.borrow_mut().pick(&[source, target]);
                self.host(place).clock.jump(&mut self.random.borrow_mut());
                true
            }
            _ => {
                self.world.faults.open(plan, self.world.now());
                false
            }
        };
        if has_struck {
            self.world.struck_in(plan.fault, phase);
        }
    }

    /// Hits a recovery as well: every step of it must be repeatable.
    pub(super) fn perhaps_crash_while_recovering(self: &Rc<Self>, place: Place) {
        let mut random = self.recoveries.borrow_mut();
        if !random.percent(RECOVERY_CRASH_PERCENT) {
            return;
        }
        let how = random.pick(&[Stop::Kill, Stop::PowerCut]);
        let delay = random.duration(Duration::from_nanos(100), RECOVERY_MAX);
        drop(random);
        let (me, incarnation) = (Rc::downgrade(self), self.host(place).incarnation());
        self.world.clock.after(delay, move || {
            let Some(fleet) = me.upgrade() else { return };
            let host = fleet.host(place);
            if host.incarnation() == incarnation && host.serving.borrow().is_none() {
                fleet.recoveries_hit.set(fleet.recoveries_hit.get() + 1);
                fleet.crash(place, how);
            }
        });
    }

    /// Returns source and target of the present migration, or of a possible next one.
    fn concerned(&self) -> Option<(Place, Place)> {
        let leaving = |place: Place| {
            let host = self.host(place);
            let id = host.journal().look(|state, _| {
                state.unfinished().find(|(_, migration)| migration.side.has_source()).map(|(id, _)| id)
            })?;
            let others = Place::all(self.hosts.len()).filter(|other| *other != place).collect::<Vec<_>>();
            // A migration within a host has no other one.
            Some((place, host.peer_of(id).unwrap_or_else(|| self.random.borrow_mut().pick(&others))))
        };
        let places = Place::all(self.hosts.len());
        if let Some(found) = places.clone().find_map(leaving) {
            return Some(found);
        }
        let owner = self.hosts.iter().find(|host| !host.owners().0.is_empty())?.place;
        let others: Vec<_> = places.filter(|place| *place != owner).collect();
        let other = (!others.is_empty()).then(|| self.random.borrow_mut().pick(&others))?;
        Some((owner, other))
    }

    pub(super) fn perhaps_crash(&self, place: Option<Place>, how: Stop) -> bool {
        let Some(place) = place.filter(|place| self.host(*place).is_up()) else { return false };
        self.crash(place, how);
        // A power cut that guests elsewhere would notice becomes a kill.
        how == Stop::Kill || self.may_lose_power(place)
    }

    fn break_link(&self, one: Place, other: Place, how: Break, away: Duration) -> bool {
        let Some(link) = self.link(one, other).filter(|link| link.is_up()) else { return false };
        link.break_for(how, away);
        true
    }

    fn touch_an_image(&self) -> bool {
        for host in &self.hosts {
            let Some(path) = host.kept.touch() else { continue };
            if let Some(disk) = host.images.borrow().get(&path) {
                disk.with_medium(|medium| {
                    (0..medium.current().len()).for_each(|sector| medium.prefill(sector, u64::MAX));
                });
            }
            self.tally(Event::ImageTouched);
            return true;
        }
        false
    }
}

fn planned(fault: Fault, phase: Phase) -> Planned {
    Planned {
        fault,
        phase,
        skip: 0,
        delay: Duration::ZERO,
        window: Duration::ZERO,
        strikes_max: 1,
        percent: 60,
    }
}
