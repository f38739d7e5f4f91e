//! The control plane of a lane.
//!
//! While a volume moves to another store of its host, work on images and messages between the halves have the faults of
//! [`LocalControl`].

use std::cell::RefCell;
use std::rc::{Rc, Weak};
use std::time::Duration;

use futures_channel::oneshot;
use lane::{Control, ControlFault, HooksFault, Keeper, LaneFuture, Report, VmFault};
use migration::journal::{ImageLocation, Record, Side};
use migration::recovery::{self, Retirement};
use migration::{CommitFault, MigrationId, Phase};

use super::host::SimHost;
use super::local::LocalControl;
use super::tally::Event;
use super::vm::SimVm;
use crate::checker::progress::ProgressWatch;

const FILE_WORK: Duration = Duration::from_micros(300);
/// How often a look at a target image takes long, and how long: the attempt that it was for may be over then.
const LONG_LOOK_PERCENT: u64 = 6;
const LONG_LOOK_MAX: Duration = Duration::from_millis(900);

pub(super) struct LaneControl {
    host: Weak<SimHost>,
    incarnation: u64,
    /// While the volume moves within its host.
    within: RefCell<Option<Rc<LocalControl>>>,
    progress: RefCell<ProgressWatch>,
}

impl LaneControl {
    pub(super) fn new(host: &Rc<SimHost>) -> Rc<Self> {
        let (host, incarnation) = (Rc::downgrade(host), host.incarnation());
        Rc::new(Self { host, incarnation, within: RefCell::default(), progress: RefCell::default() })
    }

    /// Notes that the lane begins to drive a migration, with these faults if it stays on this host.
    pub(super) fn begins(&self, within: Option<Rc<LocalControl>>) {
        self.within.replace(within);
        self.progress.take();
    }

    fn within(&self) -> Option<Rc<LocalControl>> {
        self.within.borrow().clone()
    }

    fn vm(&self) -> Option<Rc<SimVm>> {
        self.host.upgrade()?.vm()
    }

    fn file_work(
        &self,
        image: ImageLocation,
        work: impl FnOnce(&SimHost, &str) + 'static,
    ) -> LaneFuture<Result<(), ControlFault>> {
        self.file_work_of(FILE_WORK, image, work)
    }

    fn file_work_of(
        &self,
        takes: Duration,
        image: ImageLocation,
        work: impl FnOnce(&SimHost, &str) + 'static,
    ) -> LaneFuture<Result<(), ControlFault>> {
        let (done, dealt_with) = oneshot::channel();
        if let Some(host) = self.host.upgrade() {
            let (me, incarnation) = (Weak::clone(&self.host), self.incarnation);
            host.world.clock.after(takes, move || {
                if let Some(host) = me.upgrade().filter(|host| host.incarnation() == incarnation) {
                    work(&host, image.place.name());
                    let _ = done.send(());
                }
            });
        }
        Box::pin(async move {
            match dealt_with.await {
                Ok(()) => Ok(()),
                // The daemon is gone, and with it the waiting task.
                Err(_) => std::future::pending().await,
            }
        })
    }
}

impl Control for LaneControl {
    fn keeper(&self) -> Option<Rc<dyn Keeper>> {
        let host = self.host.upgrade()?;
        Some(Rc::clone(&host.chronicles) as Rc<dyn Keeper>)
    }

    fn commit(&self, records: Vec<Record>) -> LaneFuture<Result<(), CommitFault>> {
        match self.host.upgrade() {
            Some(host) => {
                host.perhaps_cancel_first(&records);
                let asked = host.journal().look(|state, _| recovery::asked_by_itself(state, &records));
                let committed = host.journal().commit(records);
                let (me, incarnation) = (Weak::clone(&self.host), self.incarnation);
                Box::pin(async move {
                    committed.await?;
                    if let Some(host) = me.upgrade().filter(|host| host.incarnation() == incarnation) {
                        host.answer_unasked(asked);
                    }
                    Ok(())
                })
            }
            None => Box::pin(std::future::ready(Err(CommitFault::Unknown))),
        }
    }

    fn retire(&self, image: ImageLocation, retirement: Retirement) -> LaneFuture<Result<(), ControlFault>> {
        if let Some(within) = self.within() {
            return within.retire(image, retirement);
        }
        self.file_work(image, move |host, path| match retirement {
            Retirement::Delete => host.delete_image(path),
            Retirement::Keep => host.keep_image(path),
        })
    }

    fn confirm(&self, image: &ImageLocation) -> Option<LaneFuture<Result<(), ControlFault>>> {
        let host = self.host.upgrade().filter(|_| self.within().is_none())?;
        let mut random = host.random.borrow_mut();
        let takes = match random.percent(LONG_LOOK_PERCENT) {
            true => random.duration(FILE_WORK, LONG_LOOK_MAX),
            false => FILE_WORK,
        };
        Some(self.file_work_of(takes, image.clone(), |_, _| {}))
    }

    fn discard(&self, image: ImageLocation) -> LaneFuture<Result<(), ControlFault>> {
        match self.within() {
            Some(within) => within.discard(image),
            None => self.file_work(image, SimHost::discard_image),
        }
    }

    fn stop_vm(
        &self,
        migration: MigrationId,
        paused: oneshot::Sender<()>,
    ) -> LaneFuture<Result<(), VmFault>> {
        let host = self.host.upgrade();
        let peer = host.and_then(|host| Some((host.place, host.peer_of(migration)?)));
        match (self.vm(), peer) {
            (Some(vm), Some((source, target))) => {
                let daemon = Weak::clone(&self.host);
                Box::pin(async move {
                    let host = daemon.upgrade().ok_or_else(|| VmFault::new("the daemon is gone"))?;
                    let other = host.fleet().map(|fleet| Rc::clone(fleet.host(target)));
                    let other = other.ok_or_else(|| VmFault::new("the simulation is over"))?;
                    let given_up = vm.given_up();
                    host.memory_leaves(&other).await.map_err(VmFault::new)?;
                    drop(host);
                    if vm.given_up() != given_up {
                        return Err(VmFault::new("it was given up"));
                    }
                    vm.stop(&daemon, (source, target), paused).await
                })
            }
            _ => Box::pin(std::future::ready(Err(VmFault::new("there is none")))),
        }
    }

    fn run_hooks(&self, migration: MigrationId) -> LaneFuture<Result<(), HooksFault>> {
        match self.host.upgrade() {
            Some(host) => host.run_hooks(migration),
            None => Box::pin(std::future::ready(Err(HooksFault::new("the daemon is gone")))),
        }
    }

    fn run_vm(&self, _: MigrationId) -> LaneFuture<Result<(), VmFault>> {
        match self.vm() {
            Some(vm) => vm.run_there(&self.host),
            None => Box::pin(std::future::ready(Err(VmFault::new("there is none")))),
        }
    }

    fn report(&self, report: Report) {
        let Some(host) = self.host.upgrade() else { return };
        match report {
            Report::Progress { progress, .. } if self.within().is_some() => {
                host.progressed_locally(&progress);
            }
            Report::Progress { progress, .. } => {
                let wrong = self.progress.borrow_mut().report(host.handle.now(), &progress);
                if let Some(wrong) = wrong {
                    host.world.violated("progress", || wrong);
                }
            }
            Report::Ended { migration, outcome, .. } => {
                match host
                    .journal()
                    .look(|state, _| state.migrations.get(&migration).map(|it| it.side.clone()))
                {
                    Some(Side::OneHost) => host.local_driver_ended(),
                    Some(Side::Outgoing { .. }) => host.departure_ended(migration, Some(&outcome)),
                    Some(Side::Incoming { .. }) => host.arrival_ended(migration, &outcome),
                    None => {}
                }
                host.driver_ended(migration, outcome);
            }
            Report::Recorded { .. } | Report::RecordingEnded { .. } | Report::DataPath { .. } => {}
        }
    }

    fn carry(&self) -> Option<Vec<LaneFuture<()>>> {
        self.within()?.carry()
    }

    fn entered(&self, migration: MigrationId, phase: Phase) {
        if let (Some(host), Some(_)) = (self.host.upgrade(), self.within()) {
            host.entered_locally(migration, phase);
            return;
        }
        if let (Phase::Closing, Some(host)) = (phase, self.host.upgrade()) {
            host.check_goes_on(migration);
            host.check_not_paused();
            if host.hooks.are_missing(migration) {
                let detail = || format!("the gates close for {migration}, and its hooks have not been run");
                host.world.violated("hooks", detail);
            }
        }
        if let Some(host) = self.host.upgrade().filter(|host| host.sends(migration)) {
            if let (Phase::Discarding, Some(vm)) = (phase, self.vm()) {
                vm.go_on(host.place);
            }
            host.world.note("phase", phase as u64, 0);
            host.world.say(|| format!("{}: phase {phase}", host.place));
            host.world.set_phase(Some(phase));
            host.set_phase(Some(phase));
            if let Some(fleet) = host.fleet() {
                if phase == Phase::TakingBack {
                    fleet.tally(Event::HandBack);
                }
                fleet.phase_entered(phase);
            }
        }
    }
}
