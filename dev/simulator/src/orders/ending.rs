//! The end: without further faults everything gets on, or waits for an order that a message names. Afterwards nothing waits.

use std::time::Duration;

use migration::journal::Side;
use migration::promotion;

use super::given::{Answer, Order};
use super::host::{Host, VOLUME};
use super::world::World;

/// The percentage of simulations in which a host is lost for good.
const LOST: u64 = 40;
/// How long everything is given, in steps of [`STEP`]: longer than each wait that ends by itself.
const REST: u32 = 400;
const STEP: Duration = Duration::from_millis(100);
const ROUNDS: u32 = 6;

impl World {
    pub(super) fn end(&mut self) {
        self.has_faults = false;
        self.is_linked = true;
        if self.random.percent(70) {
            self.is_paired = [true; 2];
        }
        if self.random.percent(LOST) {
            let lost = self.random.index(2);
            self.say(|| format!("host {lost}: lost for good"));
            let commits = std::mem::take(&mut self.hosts[lost].commits);
            drop(commits);
            self.hosts[lost].forget_its_memory();
            self.hosts[lost].is_lost = true;
        }
        for _ in 0..ROUNDS {
            self.rest();
            if self.violation.is_some() || self.nothing_waits() {
                break;
            }
            if !self.give_what_is_named() {
                let waiting: Vec<_> = (0..2).map(|at| self.describe(at)).collect();
                return self.violated(|| format!("a dead end: no order is named: {}", waiting.join("; ")));
            }
        }
        if self.violation.is_none() && !self.nothing_waits() {
            let waiting: Vec<_> = (0..2).map(|at| self.describe(at)).collect();
            return self
                .violated(|| format!("a dead end: it waits after all orders: {}", waiting.join("; ")));
        }
        self.check_served();
    }

    fn rest(&mut self) {
        for _ in 0..REST {
            self.now += STEP;
            for _ in 0..4 {
                self.work();
            }
            if self.violation.is_some() || self.nothing_waits() {
                return;
            }
        }
    }

    fn nothing_waits(&self) -> bool {
        self.hosts.iter().filter(|host| !host.is_lost).all(|host| {
            let is_served = !host.owns() || host.serves();
            host.is_up && is_served && host.under_way().is_none() && !host.lacks_blocks()
        })
    }

    fn describe(&self, at: usize) -> String {
        let host = &self.hosts[at];
        let under_way: Vec<_> =
            host.state.unfinished().map(|(id, known)| format!("{id} {:?}", known.stage)).collect();
        let lacks = if host.lacks_blocks() { ", lacks blocks" } else { "" };
        let lost = if host.is_lost { ", lost" } else { "" };
        format!("host {at}: owns: {}, {}{lacks}{lost}", host.owns(), under_way.join(", "))
    }

    /// Gives one order that the product names for what waits; returns whether there is one.
    fn give_what_is_named(&mut self) -> bool {
        for at in (0..2).filter(|at| !self.hosts[*at].is_lost).collect::<Vec<_>>() {
            for order in self.named(at) {
                if self.give(at, order) == Answer::Done {
                    self.shown.needed += 1;
                    return true;
                }
            }
        }
        false
    }

    fn named(&self, at: usize) -> Vec<Order> {
        let host = &self.hosts[at];
        let is_away = self.hosts[1 - at].is_lost || !self.hears_each_other();
        let mut named = Vec::new();
        if promotion::departures(&host.state).next().is_some() {
            named.push(Order::TakeBack);
        }
        if is_away && promotion::waiting(&host.state).next().is_some() {
            named.push(Order::Force);
        }
        if host.cannot_serve() {
            named.push(Order::Remove);
        }
        if host.lacks_blocks() {
            named.push(Order::GiveUp);
        }
        for (_, known) in host.state.unfinished().filter(|(_, known)| known.may_be_cancelled()) {
            let comes = matches!(known.side, Side::Incoming { .. });
            named.push(if comes { Order::CancelThere } else { Order::Cancel });
        }
        // The last resort; with a host that is not paired there is nothing to remove.
        named.push(Order::RemoveHost);
        named
    }

    /// Checks that the volume is served by one host, unless an order has removed it or its host is lost.
    fn check_served(&mut self) {
        if self.violation.is_some() || self.hosts.iter().any(|host| host.owns() && !host.is_lost) {
            return;
        }
        let is_with = |host: &Host| host.owns() || host.state.unfinished().next().is_some();
        let is_with_the_lost = self.hosts.iter().any(|host| host.is_lost && is_with(host));
        let is_left = self.hosts.iter().any(|host| !host.is_lost && host.state.moved.contains_key(&VOLUME));
        if self.removed.is_empty() && !is_with_the_lost {
            self.violated(|| format!("no host has the volume in the end; one says where it went: {is_left}"));
        }
    }
}
