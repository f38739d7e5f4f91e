//! Continues, after a restart, a migration to another store of the same host; and an orderly stop of the daemon.
//!
//! ```text
//!   stopped: gates held, nothing below ──► copying ends ──► missing sets kept ──► appearances recorded ──► gone
//!                 the daemon may be killed between any two                a copy may be touched ──► started
//! ```

use std::rc::Rc;
use std::time::Duration;

use block::BlockDevice as _;
use migration::journal::{FailureCode, MigratingVolume, MigrationState, Side};
use migration::session::{MigrationSession, Role};
use migration::stay::{ImageRecord, copy};
use migration::{Failure, MigrationId, Phase};

use super::LocalMigration;
use crate::disk::SECTOR_BYTES;
use crate::fleet::Fleet;
use crate::fleet::host::SimHost;
use crate::fleet::session::PATIENCE;
use crate::fleet::tally::Event as Tallied;
use crate::random::Random;
use crate::world::Stop;

/// The percentage of migrations whose daemon is stopped in order while they copy …
const STOPPED_PERCENT: u64 = 25;
/// … at the latest by one of these.
const STOPPED_WITHIN: [Duration; 4] = [
    Duration::from_millis(1),
    Duration::from_millis(10),
    Duration::from_millis(60),
    Duration::from_millis(400),
];
/// The percentage of these in which a copy is touched before the next start …
const TOUCHED_PERCENT: u64 = 25;
/// … and in which the daemon is killed before its end.
const KILLED_PERCENT: u64 = 25;
const KILLED_WITHIN: Duration = Duration::from_millis(3);
const NOTE: (Duration, Duration) = (Duration::from_micros(5), Duration::from_micros(500));

impl SimHost {
    pub(super) fn draw_stop_within(self: &Rc<Self>) {
        let mut random = self.random.borrow_mut();
        if !random.percent(STOPPED_PERCENT) {
            return;
        }
        let within = random.pick(&STOPPED_WITHIN);
        let delay = random.duration(Duration::ZERO, within);
        drop(random);
        let (me, incarnation) = (self.weak(), self.incarnation());
        self.world.clock.after(delay, move || {
            let Some(host) = me.upgrade().filter(|host| host.incarnation() == incarnation) else { return };
            if let Some(fleet) = host.fleet().filter(|_| host.may_stop_within()) {
                fleet.stop_within(&host);
            }
        });
    }

    fn may_stop_within(&self) -> bool {
        let is_copying = self.with_local(|halves| halves.driver.phase() == Phase::Copying);
        is_copying == Some(true) && self.is_up() && !self.is_stopping.get()
    }

    pub(in crate::fleet) fn resume_local(self: &Rc<Self>, id: MigrationId, recorded: &MigrationState) {
        let number = self.local.begun.get().saturating_sub(1);
        let plans = &self.manner.plans;
        let Some(plan) = plans.get(number % plans.len().max(1)).cloned() else { return };
        let moving = recorded.volumes.clone();
        let work = LocalMigration { host: Rc::clone(self), plan, id, moving, is_resumed: true, ends: None };
        self.perhaps_disturb_soon();
        self.draw_stop_within();
        let session = MigrationSession::resume(Role::Local, false, PATIENCE).with_orders(recorded);
        self.run_session(session, work);
    }

    /// Returns the state in the journal if the copies can be trusted; they are then in use.
    pub(super) async fn believe_copies(
        &self,
        id: MigrationId,
        moving: &[MigratingVolume],
    ) -> Result<MigrationState, Failure> {
        let lost = |code| move |detail: String| Failure { code, detail };
        let recorded = self.journal().look(|state, _| state.migrations.get(&id).cloned());
        let recorded =
            recorded.ok_or_else(|| lost(FailureCode::Internal)("no journal knows of it".to_owned()))?;
        for (index, moving) in moving.iter().enumerate() {
            let volume = self
                .volume(index)
                .ok_or_else(|| lost(FailureCode::Internal)("a volume is not served".to_owned()))?;
            let path = moving.target.place.name();
            let look = self.images.borrow().get(path).map(|disk| disk.look());
            let record = self.local.note_of(path);
            let is_known = volume.chronicler().copies(volume.generation()).contains(&id);
            let lives = self.chronicles.lives();
            let found = copy::Found { is_known, record: record.as_ref(), look: look.as_ref(), lives: &lives };
            copy::believe(found).map_err(|distrust| {
                self.world.say(|| format!("{}: {id} within: {distrust}", self.place));
                lost(FailureCode::DaemonStopped)(distrust.to_string())
            })?;
        }
        for (index, moving) in moving.iter().enumerate() {
            let path = moving.target.place.name();
            let Some(look) = self.images.borrow().get(path).map(|disk| disk.look()) else { continue };
            // After a kill the volume may be in either.
            if let Some(key) = self.key_of_volume(index) {
                self.chronicles.note_image(key, look.clone());
            }
            self.note_look().await;
            self.local.note(path, copy::in_use(look, self.chronicles.lives().run()));
        }
        self.tally(Tallied::WithinResumed);
        Ok(recorded)
    }

    pub(super) fn note_new_copy(&self, path: &str) {
        if let Some(disk) = self.images.borrow().get(path) {
            self.local.note(path, copy::in_use(disk.look(), self.chronicles.lives().run()));
        }
    }

    pub(in crate::fleet) async fn note_left_copies(&self) {
        let paths: Vec<_> = self.journal().look(|state, _| {
            let local = state.unfinished().filter(|(_, known)| known.side == Side::OneHost);
            let targets = local.flat_map(|(_, known)| &known.volumes);
            targets.map(|moving| moving.target.place.name().to_owned()).collect()
        });
        for path in paths {
            self.note_look().await;
            let look = self.images.borrow().get(&path).map(|disk| disk.look());
            if let Some(record) = copy::left(self.local.note_of(&path), look, &self.chronicles.lives()) {
                self.local.note(&path, record);
            }
        }
    }

    async fn note_look(&self) {
        let takes = self.random.borrow_mut().duration(NOTE.0, NOTE.1);
        self.handle.sleep(takes).await;
    }
}

impl Fleet {
    /// Stops the daemon of a host during a migration between its stores. It may be killed before its end.
    fn stop_within(self: &Rc<Self>, host: &Rc<SimHost>) {
        let is_killed = {
            let mut random = self.random.borrow_mut();
            random.percent(KILLED_PERCENT).then(|| random.duration(Duration::ZERO, KILLED_WITHIN))
        };
        if let Some(delay) = is_killed {
            let (me, incarnation, place) = (Rc::downgrade(self), host.incarnation(), host.place);
            self.world.clock.after(delay, move || {
                if let Some(fleet) =
                    me.upgrade().filter(|fleet| fleet.host(place).incarnation() == incarnation)
                {
                    fleet.crash(place, Stop::Kill);
                }
            });
        }
        let (fleet, host) = (Rc::clone(self), Rc::clone(host));
        host.handle.clone().spawn(async move {
            if host.close_in_order().await {
                fleet.tally(Tallied::StopWithin);
                let touches = fleet.random.borrow_mut().percent(TOUCHED_PERCENT);
                if touches && host.touch_a_copy(&mut fleet.random.borrow_mut()) {
                    fleet.tally(Tallied::CopyTouched);
                }
            }
            fleet.crash(host.place, Stop::Kill);
        });
    }
}

impl SimHost {
    fn touch_a_copy(&self, random: &mut Random) -> bool {
        let targets: Vec<_> = self
            .local
            .notes()
            .into_iter()
            .filter(|(_, record)| matches!(record, ImageRecord::Closed(_)))
            .collect();
        let images = self.images.borrow();
        let copies: Vec<_> = targets.iter().filter_map(|(path, _)| images.get(path)).collect();
        if copies.is_empty() {
            return false;
        }
        let disk = copies[random.index(copies.len())];
        let sector = random.below(disk.geometry().size / SECTOR_BYTES) as usize;
        disk.with_medium(|medium| medium.prefill(sector, TOUCHED));
        true
    }
}

/// The token in a touched copy, which no guest ever writes.
const TOUCHED: u64 = u64::MAX - 1;
