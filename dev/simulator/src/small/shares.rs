//! A host to which others bring volumes: some correctly, others in bursts, silently, or as many as they can.
//!
//! Checked: the host's own orders begin as if there were no other hosts; no host exceeds its share; a silent migration ends; and
//! a share is free again when all its migrations are over.

use std::time::Duration;

use migration::journal::{ImageLocation, MigratingVolume};
use migration::message::ToTarget;
use migration::queue::{Need, Party, Present, Queue, QueueLimits, Turn, UnderWay, Wish};
use migration::shares::{Amount, Part, ShareLimits, Shares};
use migration::target::{SourcePatience, TargetAction, TargetEvent};
use migration::{Attempt, HostId, MigrationId, Target, VolumeId};

use super::Shown;
use crate::random::Random;
use crate::restored::Telling;

const STEPS: u32 = 300;
const STEP_MAX: Duration = Duration::from_secs(40);
const PEERS: usize = 3;
const QUEUE: QueueLimits = QueueLimits { per_host: 2, per_store: 2 };
const LIMITS: ShareLimits = ShareLimits {
    migrations: 4,
    volumes: 9,
    bytes: Some(100),
    offers: 20,
    offer_interval: Duration::from_secs(5),
};
const PATIENCE: SourcePatience =
    SourcePatience { silent_max: Duration::from_secs(120), away_max: Duration::from_secs(600) };

pub(super) struct World {
    random: Random,
    now: Duration,
    queue: Queue<Order>,
    shares: Shares,
    own: Vec<VolumeId>,
    arrivals: Vec<Arrival>,
    is_connected: [bool; PEERS],
    next: u64,
    violation: Option<String>,
    telling: Telling,
}

struct Arrival {
    peer: usize,
    volume: VolumeId,
    amount: Amount,
    part: Part,
    target: Target,
    is_silent: bool,
    heard_at: Duration,
    is_over: bool,
    is_abandoned: bool,
}

#[derive(Clone, Debug)]
struct Order {
    volumes: [VolumeId; 1],
    need: Need,
}

impl Wish for Order {
    fn volumes(&self) -> &[VolumeId] {
        &self.volumes
    }

    fn need(&self) -> &Need {
        &self.need
    }

    fn is_copied_to(&self) -> Option<HostId> {
        None
    }

    fn not_before_unix_ms(&self) -> Option<u64> {
        None
    }
}

impl World {
    pub(super) fn run(seed: u64, telling: Telling, shown: &mut Shown) -> Option<String> {
        let mut world = Self {
            random: Random::new(seed ^ 0x54A2),
            now: Duration::ZERO,
            queue: Queue::new(QUEUE, 10),
            shares: Shares::new(LIMITS),
            own: Vec::new(),
            arrivals: Vec::new(),
            is_connected: [true; PEERS],
            next: 0,
            violation: None,
            telling,
        };
        for _ in 0..STEPS {
            world.step(shown);
            if world.violation.is_some() {
                break;
            }
        }
        world.violation
    }

    fn step(&mut self, shown: &mut Shown) {
        self.now += self.random.duration(Duration::from_millis(1), STEP_MAX);
        match self.random.below(100) {
            0..=29 => self.offer(shown),
            30..=44 => self.order(),
            45..=54 => drop(self.own.pop()),
            55..=59 => self.remove_host(),
            60..=69 => self.change_link(),
            _ => {}
        }
        self.let_sources_speak();
        self.let_targets_decide(shown);
        self.check();
    }

    fn offer(&mut self, shown: &mut Shown) {
        let peer = self.random.index(PEERS);
        let offers = if self.random.percent(30) { 12 } else { 1 };
        for _ in 0..offers {
            let amount =
                Amount { volumes: self.random.between(1, 4) as u32, bytes: self.random.between(1, 40) };
            match self.shares.take(self.now, host(peer), amount, 0) {
                Ok(part) => {
                    shown.arrivals += 1;
                    let volume = self.volume();
                    let target = Target::between_hosts(MigrationId(self.next), 1).with_patience(PATIENCE);
                    let is_silent = self.random.percent(40);
                    self.say(|| format!("host {peer} brings {volume}, silent: {is_silent}"));
                    self.arrivals.push(Arrival {
                        peer,
                        volume,
                        amount,
                        part,
                        target,
                        is_silent,
                        heard_at: self.now,
                        is_over: false,
                        is_abandoned: false,
                    });
                }
                Err(_) => shown.refused += 1,
            }
        }
    }

    fn order(&mut self) {
        let volume = self.volume();
        let image = || ImageLocation::raw_file("s", "/s");
        let need = Need::of(&[MigratingVolume { volume, source: image(), target: image() }]);
        let under_way = self.under_way(&need);
        let has_room = self.own.len() < QUEUE.per_host as usize;
        let present = Present { under_way, now_unix_ms: 0 };
        match self.queue.ask(&Order { volumes: [volume], need }, &present) {
            Turn::Now(admission) if has_room => {
                self.queue.give_back(admission);
                self.own.push(volume);
            }
            Turn::Now(_) => self.violated("an order begins beyond the host's own limit".to_owned()),
            _ if has_room => self.violated(format!(
                "an order of this host waits, of which {} are under way, beside {} of others",
                self.own.len(),
                self.arrivals.len()
            )),
            _ => {}
        }
    }

    fn under_way(&self, need: &Need) -> Vec<UnderWay> {
        let one = |of, volume| UnderWay::Migration { of, volumes: vec![volume], need: need.clone() };
        let own = self.own.iter().map(|volume| one(Party::Own, *volume));
        own.chain(self.arrivals.iter().map(|arrival| one(Party::Peer(host(arrival.peer)), arrival.volume)))
            .collect()
    }

    fn remove_host(&mut self) {
        let peer = self.random.index(PEERS);
        self.say(|| format!("host {peer} is removed"));
        for arrival in self.arrivals.iter_mut().filter(|arrival| arrival.peer == peer) {
            arrival.target.handle_event(self.now, TargetEvent::Cancel);
        }
    }

    fn change_link(&mut self) {
        let peer = self.random.index(PEERS);
        self.is_connected[peer] = !self.is_connected[peer];
        let connected = self.is_connected[peer];
        for arrival in self.arrivals.iter_mut().filter(|arrival| arrival.peer == peer) {
            let event = if connected { TargetEvent::LinkBack } else { TargetEvent::LinkLost };
            arrival.target.handle_event(self.now, event);
            arrival.heard_at = self.now;
        }
    }

    fn let_sources_speak(&mut self) {
        for arrival in self.arrivals.iter_mut().filter(|arrival| !arrival.is_silent) {
            if self.is_connected[arrival.peer] {
                arrival.target.handle_event(self.now, TargetEvent::Received(ToTarget::Abort(Attempt::NONE)));
                arrival.heard_at = self.now;
            }
        }
    }

    fn let_targets_decide(&mut self, shown: &mut Shown) {
        for arrival in &mut self.arrivals {
            arrival.target.handle_timeout(self.now);
            while let Some(action) = arrival.target.poll_action() {
                match action {
                    TargetAction::Commit { commit, .. } => {
                        arrival
                            .target
                            .handle_event(self.now, TargetEvent::Committed { commit, result: Ok(()) });
                    }
                    TargetAction::Discard => {
                        let left_over = String::new();
                        arrival.target.handle_event(self.now, TargetEvent::Discarded { left_over });
                    }
                    TargetAction::End { outcome } => {
                        arrival.is_over = true;
                        arrival.is_abandoned = matches!(outcome, migration::journal::Outcome::Failed { .. });
                    }
                    _ => {}
                }
            }
        }
        let (over, left): (Vec<Arrival>, Vec<Arrival>) =
            std::mem::take(&mut self.arrivals).into_iter().partition(|arrival| arrival.is_over);
        self.arrivals = left;
        for arrival in over {
            shown.abandoned += u64::from(arrival.is_abandoned);
            self.shares.give_back(arrival.part);
        }
    }

    fn check(&mut self) {
        for peer in 0..PEERS {
            let of_it = || self.arrivals.iter().filter(|arrival| arrival.peer == peer);
            let count = of_it().count() as u32;
            let volumes: u32 = of_it().map(|arrival| arrival.amount.volumes).sum();
            let bytes: u64 = of_it().map(|arrival| arrival.amount.bytes).sum();
            if count > LIMITS.migrations
                || volumes > LIMITS.volumes
                || LIMITS.bytes.is_some_and(|most| bytes > most)
            {
                return self.violated(format!(
                    "host {peer} has {count} migrations, {volumes} volumes, {bytes} bytes"
                ));
            }
            if self.shares.used_by(host(peer)) != (count, Amount { volumes, bytes }) {
                let used = self.shares.used_by(host(peer));
                return self.violated(format!(
                    "of the share of host {peer} {used:?} is taken, by {count} migrations"
                ));
            }
            let wait = if self.is_connected[peer] { PATIENCE.silent_max } else { PATIENCE.away_max };
            let late = of_it().find(|arrival| self.now > arrival.heard_at + wait + STEP_MAX);
            if let Some(volume) = late.map(|arrival| arrival.volume) {
                return self.violated(format!("{volume} still waits for host {peer}, which says nothing"));
            }
        }
    }

    fn volume(&mut self) -> VolumeId {
        self.next += 1;
        VolumeId(u128::from(self.next).to_be_bytes())
    }

    fn violated(&mut self, what: String) {
        self.say(|| format!("violation: {what}"));
        self.violation.get_or_insert(what);
    }

    fn say(&self, what: impl FnOnce() -> String) {
        if self.telling == Telling::Printed {
            println!("{:>9.3} shares: {}", self.now.as_secs_f64(), what());
        }
    }
}

fn host(peer: usize) -> HostId {
    HostId([peer as u8 + 1; 32])
}
