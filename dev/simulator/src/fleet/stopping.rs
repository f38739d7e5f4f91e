//! Daemons that are stopped in order, images that are changed meanwhile, and data folders that are full for a while.
//!
//! ```text
//!   gates closed, nothing below ──► stores flushed ──► residencies closed ──► the images' appearance recorded ──► gone
//!                                                                        one of them is changed ──► started
//! ```
//! Changes hit only images of daemons that were stopped in order: a killed daemon's late writes look the same as foreign ones.

use std::rc::Rc;
use std::time::Duration;

use futures_util::future::join_all;
use lane::{Home, Volume};
use migration::StayKey;

use super::Fleet;
use super::host::{SimHost, volume_id};
use super::lanes::SimLane;
use super::link::Break;
use super::place::Place;
use super::tally::Event;
use crate::disk::SimDisk;
use crate::random::Random;
use crate::world::Stop;

const LATEST: Duration = Duration::from_secs(5);
/// The longest time that a data folder is full: longer than a guest's write may be held.
const FULL_MAX: Duration = Duration::from_secs(3);
/// How long a stopped daemon waits for requests in flight, and again for a flush.
const STOP_MAX: Duration = Duration::from_millis(300);
/// The percentage of arrivals after which the daemon is soon stopped.
const STOPPED_AFTER_ARRIVAL_PERCENT: u64 = 15;
/// The percentage of ended migrations, of any outcome, after which the source's daemon is soon killed …
const KILLED_AFTER_END_PERCENT: u64 = 30;
/// … at the latest by one of these.
const KILLED_WITHIN: [Duration; 3] =
    [Duration::from_millis(1), Duration::from_millis(20), Duration::from_millis(200)];
/// The percentage of first questions whether a stopped VM is kept during which the source's daemon is killed.
const KILLED_AT_QUESTION_PERCENT: u64 = 10;
/// How many daemons are killed soon after they have durably forgotten a copy …
const KILLS_AFTER_FORGETTING: [u32; 3] = [0, 1, 6];
/// … at this percentage of such times.
const KILLED_AFTER_FORGETTING_PERCENT: u64 = 60;
/// The percentage of these in which the daemon is cut off from other hosts even before that.
const CUT_OFF_PERCENT: u64 = 60;
const AWAY_MAX: Duration = Duration::from_secs(1);
/// The percentage in which it is killed instead.
const KILLED_PERCENT: u64 = 50;
const CHANGED_PERCENT: u64 = 70;

impl Fleet {
    pub(super) fn draw_stops(self: &Rc<Self>, random: &mut Random) {
        for _ in 0..random.pick(&[0, 1, 2, 4, 8]) {
            let at = random.duration(Duration::from_millis(1), LATEST);
            let me = Rc::downgrade(self);
            self.world.clock.at(at, move || {
                if let Some(fleet) = me.upgrade() {
                    fleet.stop_an_owner();
                }
            });
        }
        self.kills_after_forgetting.set(random.pick(&KILLS_AFTER_FORGETTING));
        for _ in 0..random.pick(&[0, 0, 0, 1, 3]) {
            let at = random.duration(Duration::from_millis(1), LATEST);
            let window = random.duration(Duration::from_millis(1), FULL_MAX);
            let place = random.pick(&self.hosts.iter().map(|host| host.place).collect::<Vec<_>>());
            let me = Rc::downgrade(self);
            self.world.clock.at(at, move || {
                if let Some(fleet) = me.upgrade() {
                    fleet.tally(Event::FolderFull);
                    fleet.host(place).chronicles.fill_for(window);
                }
            });
        }
    }

    pub(super) fn draw_stop_after_arrival(self: &Rc<Self>) {
        let mut random = self.random.borrow_mut();
        if !random.percent(STOPPED_AFTER_ARRIVAL_PERCENT) {
            return;
        }
        let soon =
            random.pick(&[Duration::from_millis(1), Duration::from_millis(10), Duration::from_millis(60)]);
        let delay = random.duration(Duration::from_micros(10), soon);
        let me = Rc::downgrade(self);
        self.world.clock.after(delay, move || {
            if let Some(fleet) = me.upgrade() {
                fleet.stop_an_owner();
            }
        });
    }

    pub(super) fn draw_kill_after_end(self: &Rc<Self>, place: Place) {
        if self.random.borrow_mut().percent(KILLED_AFTER_END_PERCENT) {
            self.kill_soon(place, Event::KillAfterEnd);
        }
    }

    /// Draws whether a daemon is killed soon after it begins to ask another host to keep a stopped VM: its next process continues
    /// with the copying, and asks again only before the handover.
    pub(super) fn draw_kill_at_question(self: &Rc<Self>, place: Place) {
        if self.random.borrow_mut().percent(KILLED_AT_QUESTION_PERCENT) {
            self.kill_soon(place, Event::KillAtQuestion);
        }
    }

    /// Draws whether a daemon is killed soon after it has durably forgotten a copy: later writes must be marked
    /// for the remaining ones.
    pub(super) fn draw_kill_after_forgetting(self: &Rc<Self>, place: Place) {
        let left = self.kills_after_forgetting.get();
        if left > 0 && self.random.borrow_mut().percent(KILLED_AFTER_FORGETTING_PERCENT) {
            self.kills_after_forgetting.set(left - 1);
            self.perhaps_cut_off(place);
            self.kill_soon(place, Event::KillAfterForgetting);
        }
    }

    /// Perhaps cuts off a host that is about to go down, as its network often fails first: writes there reach no other host.
    fn perhaps_cut_off(&self, place: Place) {
        if !self.random.borrow_mut().percent(CUT_OFF_PERCENT) {
            return;
        }
        for link in self.links.iter().filter(|link| link.touches(place)) {
            let away = self.random.borrow_mut().duration(Duration::from_millis(1), AWAY_MAX);
            link.break_for(Break::Silent, away);
        }
    }

    fn kill_soon(self: &Rc<Self>, place: Place, why: Event) {
        let mut random = self.random.borrow_mut();
        let within = random.pick(&KILLED_WITHIN);
        let delay = random.duration(Duration::from_micros(10), within);
        let me = Rc::downgrade(self);
        self.world.clock.after(delay, move || {
            if let Some(fleet) = me.upgrade().filter(|fleet| fleet.host(place).is_up()) {
                fleet.tally(why);
                fleet.crash(place, Stop::Kill);
            }
        });
    }

    fn stop_an_owner(self: &Rc<Self>) {
        let rests = |host: &&Rc<SimHost>| {
            host.is_up() && host.has_nothing_to_do() && !host.owners().0.is_empty() && self.vm.is_none()
        };
        let Some(host) = self.hosts.iter().find(rests) else { return };
        if self.random.borrow_mut().percent(KILLED_PERCENT) {
            self.tally(Event::KillAtRest);
            self.crash(host.place, Stop::Kill);
            return;
        }
        let (fleet, host) = (Rc::clone(self), Rc::clone(host));
        host.handle.clone().spawn(async move {
            if host.close_in_order().await {
                fleet.tally(Event::StopInOrder);
                if fleet.random.borrow_mut().percent(CHANGED_PERCENT) {
                    fleet.change_an_image(&host);
                }
            }
            fleet.crash(host.place, Stop::Kill);
        });
    }

    fn change_an_image(&self, host: &SimHost) {
        let branches = self.branches.all();
        // A missing block would overwrite the change.
        if host.journal().look(|state, _| !state.fillings.is_empty()) {
            return;
        }
        // The image's branch is not known here if there are two.
        let [branch] = &branches[..] else { return };
        // The same holds after the end of another branch, whose image this may be.
        if !host.owns(branch.number) {
            return;
        }
        for (index, guest) in branch.guests.iter().enumerate() {
            let Some(disk) = host.disk_of(index) else { continue };
            let (sector, token) = guest.finds_written(&mut self.random.borrow_mut());
            disk.with_medium(|medium| medium.prefill(sector, token));
        }
        self.tally(Event::OwnImageTouched);
    }
}

impl SimHost {
    /// Ends all lanes as a stopped daemon does; returns whether all volumes here were closed. Nothing is served afterwards.
    pub(super) async fn close_in_order(&self) -> bool {
        let closing = self.lanes_here();
        self.is_stopping.set(true);
        let began = self.handle.now();
        let closed = join_all(closing.iter().map(|(_, lane)| lane.lane.close(STOP_MAX))).await;
        let in_time = self.handle.now() < began + STOP_MAX;
        if in_time && closing.iter().any(|(_, lane)| lane.volume().gate().in_flight() > 0) {
            self.world
                .violated("stopping", || "a lane has ended in order, and requests are under way".to_owned());
        }
        self.note_left_copies().await;
        let mut all_closed = true;
        for ((index, lane), closed) in closing.iter().zip(closed) {
            // One that has left meanwhile is its new owner's.
            if let Some((disk, _)) = self.own_disk(*index) {
                all_closed &= closed.is_some();
                if closed.is_some() {
                    self.chronicles.close_image(key_of(lane.volume()), disk.look());
                }
            }
        }
        all_closed
    }

    fn lanes_here(&self) -> Vec<(usize, SimLane)> {
        let lanes = self.lanes().into_iter().enumerate();
        let here = lanes.filter_map(|(index, lane)| Some((index, lane?)));
        here.filter(|(_, lane)| matches!(lane.volume().home(), Home::Here(_))).collect()
    }

    /// Returns the image of a volume of this host, and whether it would be trusted if the volume left it.
    pub(super) fn own_disk(&self, index: usize) -> Option<(Rc<SimDisk>, bool)> {
        let volume = volume_id(index);
        let stay = self.journal().look(|state, _| Some(state.volumes.get(&volume)?.stay))?;
        Some((self.disk_of(index)?, self.chronicles.vouches(StayKey { volume, stay })))
    }

    fn disk_of(&self, index: usize) -> Option<Rc<SimDisk>> {
        let path = self.journal().look(|state, _| {
            Some(state.volumes.get(&volume_id(index))?.record.image.place.name().to_owned())
        })?;
        self.images.borrow().get(&path).cloned()
    }
}

impl SimHost {
    pub(super) fn key_of_volume(&self, index: usize) -> Option<StayKey> {
        self.volume(index).map(|volume| key_of(&volume))
    }
}

fn key_of(volume: &Volume) -> StayKey {
    StayKey { volume: volume.id(), stay: volume.chronicler().stay() }
}
