//! Faults, and orders of administrators.

use std::time::Duration;

use chronicle::{BlockIndex, BlockRange};
use standby::VolumeIndex;
use standby::owner::Event as OwnerEvent;
use standby::receiver::{Event, PromoteOrder, Refusal};

use super::met::Fault;
use super::owner::Knows;
use super::world::{EVERY, Task, World};

const AWAY: Duration = Duration::from_secs(2);
/// Longer than an owner may be away without asking.
const LONG_AWAY: Duration = Duration::from_secs(8);
pub(super) const ANY_AGE: Duration = Duration::from_secs(1 << 40);

impl World {
    /// One fault, or one order.
    pub(super) fn trouble(&mut self) {
        let host = self.current;
        let is_up = self.owners[host].is_up();
        let receives = self.standby.machine.is_some();
        match self.random.below(30) {
            0 | 1 if is_up => {
                self.meet(Fault::OwnerKilled);
                self.stop_owner(host);
                let away = self.random.pick(&[AWAY, LONG_AWAY]);
                self.in_about(away, Task::StartOwner(host));
            }
            2 | 3 if is_up => {
                self.meet(Fault::OwnerPowerCut);
                self.cut_owners_power(host);
                self.in_about(AWAY, Task::StartOwner(host));
            }
            4 if is_up && self.random.percent(50) => self.restore_owner(host),
            5 if is_up => {
                self.fail_owners_flush(host);
                self.owner_event(host, OwnerEvent::GuestFlushFailed);
            }
            6 | 7 if receives => {
                self.meet(Fault::StandbyKilled);
                self.stop_standby();
                self.in_about(AWAY, Task::StartStandby);
            }
            8..=10 if receives => {
                self.meet(Fault::StandbyPowerCut);
                self.cut_standbys_power();
                self.in_about(AWAY, Task::StartStandby);
            }
            11 if receives && self.random.percent(50) => {
                self.meet(Fault::StandbyRestored);
                self.stop_standby();
                self.restore_standby();
                self.in_about(AWAY, Task::StartStandby);
            }
            12..=14 if receives => {
                self.meet(Fault::LinkBroken);
                self.disconnect(host);
            }
            15 if self.standby.owned.is_none()
                && self.standby.order.is_none()
                && !self.is_consumed
                && self.random.percent(40) =>
            {
                self.touch_image();
            }
            16 => {
                self.standby.can_grow = !self.standby.can_grow;
                if !self.standby.can_grow {
                    self.meet(Fault::NoGrowth);
                }
            }
            17 if self.standby.owned.is_none() => self.hand_over(),
            18 if is_up => {
                self.meet(Fault::Paused);
                self.owner_event(host, OwnerEvent::Paused);
            }
            19 | 20 if is_up => self.owner_event(host, OwnerEvent::Resumed),
            21..=23 if receives => self.test(),
            24 | 25 if receives => self.order_promotion(),
            26 if receives && self.standby.owned.is_none() && self.random.percent(25) => self.consume(),
            27 if is_up && !self.owners[host].is_serving => self.serve_unasked(host),
            29 if is_up => self.doubt(host),
            28 if self.standby.is_restored && self.standby.owned.is_none() && !self.is_consumed => {
                self.agree();
            }
            _ => {}
        }
        self.end_former_owners();
    }

    /// A comparison has found that blocks differ.
    fn doubt(&mut self, host: usize) {
        self.meet(Fault::Doubted);
        let volume = self.random.index(self.owners[host].volumes.len());
        let size = self.owners[host].volumes[volume].len();
        let start = self.random.below(size);
        let blocks = BlockRange::new(start, self.random.between(start + 1, size + 1));
        // Blocks that were sent before the cut are sent once more.
        let owner = &mut self.owners[host];
        owner.carried.retain(|(of, block)| *of != volume || !blocks.contains(BlockIndex(*block)));
        let volume = VolumeIndex(volume as u16);
        self.owner_event(host, OwnerEvent::Doubted { volume, blocks });
    }

    /// Former owners end some time after the handover.
    pub(super) fn end_former_owners(&mut self) {
        for former in 0..self.owners.len() {
            if former != self.current && (self.is_calm || self.random.percent(30)) {
                self.stop_owner(former);
            }
        }
    }

    fn restore_owner(&mut self, host: usize) {
        if self.owners[host].backups.is_empty() {
            return;
        }
        self.meet(Fault::OwnerRestored);
        self.stop_owner(host);
        self.owners[host].ended_at = None;
        let index = self.random.index(self.owners[host].backups.len());
        self.owners[host].record = Some(self.owners[host].backups[index].clone());
        self.owners[host].knows = Some(Knows::Nothing);
        self.in_about(AWAY, Task::StartOwner(host));
    }

    fn touch_image(&mut self) {
        if self.standby.is_promoted() {
            // It is a volume of that host.
            return;
        }
        self.meet(Fault::ImageTouched);
        let value = self.number();
        let mut random = self.random.fork();
        self.standby.touch(&mut random, value);
    }

    fn test(&mut self) {
        let points: Vec<_> = self.standby.record().map_or_else(Vec::new, |record| record.points.clone());
        if self.standby.tested.is_some() || self.standby.is_restored {
            return;
        }
        self.meet(Fault::Tested);
        // Without points, or now and then, the newest state.
        let is_newest = points.is_empty() || self.random.percent(40);
        let tested = (!is_newest).then(|| points[self.random.index(points.len())].watermark);
        let until = self.now + Duration::from_millis(self.random.between(10, 20_000));
        self.notice_touch();
        self.standby_event(Event::TestBegins(tested, until));
        if self.random.percent(30) {
            self.standby_event(Event::TestEnded);
        }
    }

    /// Orders a promotion, perhaps of a point, perhaps without what it needs.
    fn order_promotion(&mut self) {
        let points: Vec<_> = self.standby.record().map_or_else(Vec::new, |record| record.points.clone());
        let point = (!points.is_empty() && self.random.percent(60)).then(|| {
            let index = self.random.index(points.len());
            points[index].watermark
        });
        let age_max = self.random.pick(&[Duration::from_millis(300), Duration::from_secs(5), ANY_AGE]);
        let owner_is_lost = self.random.percent(80);
        if self.random.percent(40) {
            let host = self.current;
            self.disconnect(host);
            self.standby_loses_owner();
        }
        let is_known_lost = self.links.iter().all(|link| !link.is_up);
        // An administrator who forces a promotion of a restored journal knows that it was not promoted before.
        let was_promoted = self.standby.is_restored && self.standby.owned.is_some();
        if !self.is_consumed && !was_promoted && (is_known_lost || self.random.percent(50)) {
            self.promote(PromoteOrder { owner_is_lost, age_max, point });
        }
    }

    /// A migration to the standby's host uses the image.
    pub(super) fn consume(&mut self) {
        self.meet(Fault::Consumed);
        self.notice_touch();
        self.standby_event(Event::Consume);
    }

    /// Ends all faults.
    pub(super) fn heal(&mut self) {
        self.is_calm = true;
        self.tell(|_| "all faults end".to_owned());
        self.standby.can_grow = true;
        self.standby.settings.spool_blocks = 100_000;
        self.standby.settings.points_blocks = Some(100_000);
        self.shape.rate = 1000;
        self.stop_standby();
        self.start_standby();
        let host = self.current;
        self.end_former_owners();
        self.start_owner(host);
        self.owner_event(host, OwnerEvent::Resumed);
        self.connect(host);
        let soon = self.now + Duration::from_secs(4);
        self.run_until(soon);
        if self.standby.is_restored && self.standby.owned.is_none() && !self.is_consumed {
            self.tell(|_| "an administrator agrees".to_owned());
            self.agree();
        }
    }

    /// Promotes what the standby has, after the owner's host is lost.
    pub(super) fn lose_owner_and_promote(&mut self) -> Option<Refusal> {
        let host = self.current;
        match self.random.below(3) {
            0 => self.cut_owners_power(host),
            1 => self.stop_owner(host),
            _ => self.break_link(host),
        }
        self.standby_loses_owner();
        self.promote(PromoteOrder { owner_is_lost: true, age_max: ANY_AGE, point: None })
    }

    /// Breaks a link, now and then while the end of an epoch is under way: its owner has sent what nobody receives.
    fn break_link(&mut self, link: usize) {
        if self.random.percent(50) {
            let until = self.now + EVERY * 2;
            while self.links[link].is_up && self.links[link].seal_at <= self.now && self.now < until {
                self.run_until(self.now + Duration::from_millis(1));
            }
        }
        self.disconnect(link);
    }
}
