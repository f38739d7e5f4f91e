//! A group of volumes, its owners one after the other, and the host of its standby, in virtual time. The machines, records and messages
//! are the product's; the stores, spools and links are models.
//!
//! ```text
//!   guests ─► owner: Replication ─► store with a cache      ═ link that breaks ═      Standby ─► spools, image, points: caches
//!                │ cut: what all volumes hold                                            │ promoted, or kept as a point
//!                └──────────────────────────► the model ◄────────────────────────────────┘ compared
//!   after a promotion the direction is turned round (`turned`)
//!   the end: no more faults ─► current within some intervals ─► idle ─► perhaps promoted
//! ```

mod disk;
mod met;
mod owner;
mod receiver;
mod scattered;
mod trouble;
mod truth;
mod turned;
mod world;

use std::time::Duration;

use standby::asking::Permission;
use standby::owner::State;
use standby::record::Standing;

use crate::random::Random;
use crate::restored::Telling;
pub(crate) use met::Met;
use owner::LOCKED_MAX;
use world::{EVERY, World};

const STREAM: u64 = 0x57AB_D201;
/// Intervals within which the standby is current after all faults have ended. The first of them are for answers and orders.
const HEALED_IN: u32 = 40;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Shown {
    pub(crate) seeds: u64,
    pub(crate) cuts: u64,
    pub(crate) points: u64,
    pub(crate) promotions: u64,
    pub(crate) current: u64,
    /// Standbys that have caught up although guests wrote everywhere, also to what was sent before the cut.
    pub(crate) caught_up: u64,
    /// Promotions whose direction was turned round, and those of them for which only the difference was sent.
    pub(crate) turned: u64,
    pub(crate) turned_by_difference: u64,
    pub(crate) met: Met,
    pub(crate) violations: Vec<(u64, String)>,
}

pub(crate) fn campaign(first: u64, count: u64, until_found: bool) -> Shown {
    let mut shown = Shown::default();
    for seed in first..first.saturating_add(count) {
        let world = run(seed, Telling::Silent);
        shown.seeds += 1;
        shown.cuts += world.shown.cuts;
        shown.points += world.shown.points;
        shown.promotions += world.shown.promotions;
        shown.current += world.shown.current;
        shown.caught_up += world.shown.caught_up;
        shown.turned += world.shown.turned;
        shown.turned_by_difference += world.shown.turned_by_difference;
        shown.met.add_seed(&world.met);
        if let Some(violation) = world.violation {
            shown.violations.push((seed, violation));
            if until_found {
                break;
            }
        }
    }
    shown
}

pub(crate) fn replay(seed: u64, telling: Telling) -> Option<String> {
    run(seed, telling).violation
}

fn run(seed: u64, telling: Telling) -> World {
    let mut world = World::new(Random::new(seed ^ STREAM), telling);
    let lasts = Duration::from_secs(world.random.pick(&[4, 8, 15, 30]));
    world.run_until(lasts);
    if world.violation.is_none() {
        world.end();
    }
    if world.violation.is_none() {
        world.turn();
    }
    world
}

impl World {
    /// Ends all faults, and checks what follows.
    fn end(&mut self) {
        if self.random.percent(30) && !self.is_over() {
            // The worst moment: no heal.
            self.is_calm = true;
            self.end_promoted();
            return;
        }
        self.heal();
        if self.is_over() {
            return self.end_owned_elsewhere();
        }
        self.run_until(self.now + EVERY * HEALED_IN);
        if self.violation.is_some() {
            return;
        }
        if self.is_over() {
            return self.end_owned_elsewhere();
        }
        let host = self.current;
        let state = self.owners[host].state;
        if state != Some(State::Current) {
            return self.violate(format!("the standby does not become current: {state:?}"));
        }
        self.expect_young();
        if self.random.percent(30) && self.violation.is_none() {
            self.expect_caught_up();
        }
        self.expect_idle();
        self.shown.current += 1;
        if self.random.percent(50) && self.violation.is_none() {
            self.end_promoted();
        }
    }

    /// Returns whether another host owns the group, or will.
    fn is_over(&self) -> bool {
        self.standby.owned.is_some() || self.is_consumed
    }

    /// The standby is not older than two intervals, and no write is lost on the way.
    fn expect_young(&mut self) {
        let host = self.current;
        for _ in 0..20 {
            self.run_until(self.now + EVERY / 4);
            let at = self.standby.record().and_then(|record| record.watermark);
            let cut = at.and_then(|at| self.truth.cut(at)).map(|cut| cut.at);
            let is_told = self.owners[host].state == Some(State::Current);
            // An idle interval has no cut: then what was written since tells.
            let is_idle = self.owners[host].machine.as_ref().is_some_and(|machine| {
                machine.written_since_confirmed().iter().all(chronicle::LayeredBitmap::is_empty)
            });
            // Without room for what is overwritten, epochs are merged.
            let keeps_up = self.shape.ring_blocks + self.shape.spool_blocks > 64;
            if !keeps_up {
                continue;
            }
            if !is_told || !is_idle && cut.is_none_or(|cut| self.now - cut > EVERY * 2) {
                return self.violate("the standby is older than two intervals, although the link keeps up");
            }
        }
    }

    /// An idle interval costs one small message, and no record or write.
    fn expect_idle(&mut self) {
        self.guests_run = false;
        self.run_until(self.now + EVERY * 4);
        let host = self.current;
        if !self.owners[host].asked.is_empty() || !self.owners[host].in_flight.is_empty() {
            return self.violate("a write was never answered");
        }
        let (before, writes) = (self.owners[host].noise, self.standby.writes);
        self.run_until(self.now + EVERY * 3);
        let after = self.owners[host].noise;
        if after.messages - before.messages != 3
            || after.records != before.records
            || self.standby.writes != writes
        {
            return self.violate("an idle interval costs more than a message");
        }
        let owner: Vec<_> =
            (0..self.owners[host].volumes.len()).map(|volume| self.owners[host].logical(volume)).collect();
        if self.standby.content() != owner {
            self.violate("the image of an idle group is not the group");
        }
    }

    /// The owner's host is lost, and the standby promoted.
    fn end_promoted(&mut self) {
        if self.standby.machine.is_none() {
            self.start_standby();
        }
        let is_point = self.standby.record().is_some_and(|record| {
            let is_image =
                record.watermark.is_some() && record.image == standby::record::ImageState::AsOfWatermark;
            is_image || !record.points.is_empty()
        });
        let is_unsure = self.standby.is_restored || self.standby.is_touched();
        let refused = self.lose_owner_and_promote();
        self.run_until(self.now + Duration::from_secs(25));
        if self.violation.is_some() || self.is_over() {
            return self.end_owned_elsewhere();
        }
        if is_point && !is_unsure {
            self.violate(format!("a recovery point was not promoted: {refused:?}"));
        }
    }

    /// The group is owned at the standby's host. Each former owner learns it.
    fn end_owned_elsewhere(&mut self) {
        if self.violation.is_some() {
            return;
        }
        let host = self.current;
        self.is_calm = true;
        self.guests_run = true;
        self.start_owner(host);
        self.start_standby();
        self.owner_event(host, standby::owner::Event::Resumed);
        // Images that another program has locked are free by then.
        self.run_until(self.now + LOCKED_MAX + EVERY);
        let state = self.owners[host].state;
        let Some((at, promoted)) = self.standby.promoted.clone().filter(|_| self.violation.is_none()) else {
            return;
        };
        // A journal that was restored to a time before the promotion says nothing, and gives no right.
        if !self.standby.record().is_some_and(|record| matches!(record.standing, Standing::Promoted { .. })) {
            return;
        }
        let is_replaced = self.owners[host].permission() == Some(Permission::Replaced);
        if state != Some(State::Diverged) && !is_replaced {
            return self.violate(format!("the owner does not say that it was replaced: {state:?}"));
        }
        if is_replaced && self.owners[host].is_serving {
            return self.violate("an owner that was replaced serves");
        }
        self.compare_with_owner(at, &promoted);
    }

    /// What the former owner has written and the promoted image lacks is known.
    fn compare_with_owner(&mut self, at: standby::Watermark, promoted: &[Vec<u64>]) {
        let owner = &self.owners[self.current];
        let Some(machine) = &owner.machine else { return };
        let confirmed = owner
            .confirmed
            .max(machine.record().acknowledged.map(|epoch| (machine.record().life.0, epoch.0)));
        let is_known =
            at.life == machine.record().life && confirmed.is_none_or(|(_, epoch)| epoch <= at.epoch.0);
        if !is_known {
            return;
        }
        let written = machine.written_since_confirmed();
        for (volume, promoted) in promoted.iter().enumerate() {
            for (block, value) in owner.logical(volume).iter().enumerate() {
                let is_other = promoted.get(block).copied().unwrap_or_default() != *value;
                if is_other && !written[volume].contains(chronicle::BlockIndex(block as u64)) {
                    let what =
                        format!("block {block} of volume {volume} differs, and does not count as written");
                    return self.violate(what);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_hundred_seeds_break_no_rule_and_say_the_same_each_time() {
        let first = campaign(0, 200, false);
        assert_eq!(first.violations, []);
        assert_eq!(first, campaign(0, 200, false));
        assert!(first.promotions > 50 && first.current > 50 && first.points > 100, "{first:?}");
        assert!(first.caught_up > 10 && first.turned_by_difference > 20, "{first:?}");
    }
}
