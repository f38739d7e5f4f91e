//! One host: its images and its journal, which stay, and its daemon, which comes and goes.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::{Rc, Weak};
use std::time::Duration;

use block::{BlockDevice, BufferPool, Geometry, Handle};
use chronicle::{BlockSize, MarkPolicy};
use lane::TimeLimits;
use lane::resuming::Rhythm;
use migration::journal::{ImageLocation, MigrationState, Promotion, Record, Side, Stage, State};
use migration::planted::{Bug, broken};
use migration::recovery::{self, Step};
use migration::strategy::Strategy;
use migration::{Attempt, MigrationId, PacingSettings, Phase, VolumeId};

use super::Fleet;
use super::branch::TRUNK;
use super::chronicles::SimChronicles;
use super::clock::HostClock;
use super::hooks::SimHooks;
use super::incoming::Accepted;
use super::kept::KeptImages;
use super::link::{Link, Subject};
use super::local::{LocalControl, LocalImages};
use super::neighbours;
use super::place::Place;
use super::planned_volume::PlannedVolume;
use super::serving::Serving;
use super::vm::SimVm;
use super::vm_note::VmNote;
use crate::checker::owner::{Permission, counts_upon, permission, wrong_generation};
use crate::disk::{DiskSettings, Role, SimDisk};
use crate::guest::Guest;
use crate::journal::SimJournal;
use crate::random::Random;
use crate::scenario::{MigrationPlan, Scenario, draw_hot};
use crate::world::{Stop, World};

/// How long the gates may be closed: several round trips of the longest link.
const SWITCH_OVER_MAX: Duration = Duration::from_secs(1);
/// The longest pause before a daemon restarts whose journal has closed itself.
const RESTART_AFTER: Duration = Duration::from_secs(2);

#[derive(Clone, Debug)]
pub(crate) struct Manner {
    pub(crate) pacing: PacingSettings,
    pub(crate) limits: TimeLimits,
    pub(crate) strategy: Strategy,
    /// The strategy of volumes that return to the host of their missing blocks.
    pub(crate) strategy_back: Strategy,
    /// The longest wait for missing blocks from another host; `None`: no limit.
    pub(crate) wait_max: Option<Duration>,
    pub(crate) target_disk: DiskSettings,
    /// The block size of each volume where it is made …
    pub(crate) block_sizes: Vec<BlockSize>,
    /// … and of all volumes elsewhere: each host has its own.
    pub(crate) block_size_away: Option<BlockSize>,
    pub(crate) geometries: Vec<Geometry>,
    pub(crate) regions: MarkPolicy,
    pub(crate) rhythm: Rhythm,
    /// The percentage of migrations whose source keeps its images.
    pub(crate) keep_percent: u64,
    pub(crate) plans: Vec<MigrationPlan>,
}

pub(super) type Owned = (usize, VolumeId);

pub(crate) struct SimHost {
    pub(super) me: Weak<Self>,
    pub(super) place: Place,
    pub(crate) world: Rc<World>,
    pub(super) random: RefCell<Random>,
    pub(super) handle: Handle,
    pub(super) clock: Rc<HostClock>,
    pub(super) buffers: BufferPool,
    pub(super) manner: Rc<Manner>,
    journal: Rc<SimJournal>,
    pub(super) chronicles: Rc<SimChronicles>,
    pub(super) images: RefCell<BTreeMap<String, Rc<SimDisk>>>,
    pub(super) kept: KeptImages,
    pub(super) local: LocalImages,
    /// The state before the latest change of the journal.
    known: RefCell<State>,
    pub(super) links: Vec<Rc<Link>>,
    fleet: RefCell<Weak<Fleet>>,
    /// The branch of history that arrives here, or did last.
    pub(super) branch: Cell<usize>,
    pub(super) forced: RefCell<BTreeMap<MigrationId, usize>>,
    /// The content of volumes when they were promised, by migration, and the attempt.
    pub(super) promised: RefCell<BTreeMap<MigrationId, (Attempt, Vec<Vec<u64>>)>>,
    pub(super) answers: RefCell<BTreeMap<Subject, Vec<Accepted>>>,
    pub(super) hooks: SimHooks,
    /// The record about the VM, and the one in flight.
    pub(super) vm_note: Cell<VmNote>,
    pub(super) vm_note_under_way: Cell<Option<VmNote>>,
    pub(super) vm_expected: Cell<Option<Subject>>,
    /// Migrations whose cancellation was confirmed, and the daemon that did.
    pub(super) cancelled: RefCell<BTreeMap<MigrationId, u64>>,
    /// The daemon of another host that has agreed to run the VM.
    pub(super) vm_examined_by: Cell<Option<(Place, u64)>>,
    phase: Cell<Option<Phase>>,
    /// Since when an order pauses its migration.
    pub(super) paused_since: Cell<Option<Duration>>,
    incarnation: Cell<u64>,
    is_up: Cell<bool>,
    pub(super) is_stopping: Cell<bool>,
    pub(super) serving: RefCell<Option<Serving>>,
    disks_made: Cell<u32>,
    /// The number of an attachment that has ended, or that only lets this host read.
    pub(super) former_number: Cell<Option<MigrationId>>,
    lives: Cell<u64>,
}

pub(super) struct Beginnings {
    pub(super) hosts: Vec<Rc<SimHost>>,
    pub(super) guests: Vec<Rc<Guest>>,
    pub(super) links: Vec<Rc<Link>>,
}

pub(super) fn make(
    world: &Rc<World>,
    random: &mut Random,
    scenario: &Scenario,
    around: Vec<(Handle, Rc<HostClock>)>,
) -> Beginnings {
    let (mut records, mut guests, mut images) = (Vec::new(), Vec::new(), BTreeMap::new());
    let mut geometries = Vec::new();
    for (index, plan) in scenario.volumes.iter().enumerate() {
        let (path, volume) = (format!("/a/{index}"), volume_id(index));
        let plan = &neighbours::leave_room(plan);
        let volume = PlannedVolume::make(world, random, (index, volume, plan), &path, BufferPool::new());
        guests.push(volume.guest);
        geometries.push(volume.disk.geometry());
        records.push(volume.record);
        images.insert(path, volume.disk);
    }
    let mut manner = Manner::draw(random, scenario, geometries);
    if around.len() == 1 {
        manner.limits = scenario.limits;
    }
    let manner = Rc::new(manner);
    let places: Vec<_> = Place::all(around.len()).collect();
    let mut links = Vec::new();
    for (index, one) in places.iter().enumerate() {
        let others = &places[index + 1..];
        links.extend(others.iter().map(|other| Link::new(world, random.fork(), [*one, *other])));
    }
    let mut hosts = Vec::new();
    for (place, (handle, clock)) in places.into_iter().zip(around) {
        let links = links.iter().filter(|link| link.touches(place)).cloned().collect();
        let (records, images) = (std::mem::take(&mut records), std::mem::take(&mut images));
        let environment = Environment { handle, clock, manner: Rc::clone(&manner), links };
        hosts.push(SimHost::new(world, random.fork(), place, environment, records, images));
    }
    Beginnings { hosts, guests, links }
}

struct Environment {
    handle: Handle,
    clock: Rc<HostClock>,
    manner: Rc<Manner>,
    links: Vec<Rc<Link>>,
}

impl Manner {
    pub(crate) fn leaves_blocks(&self) -> bool {
        matches!(self.strategy, Strategy::PostCopy { .. })
    }

    fn draw(random: &mut Random, scenario: &Scenario, geometries: Vec<Geometry>) -> Self {
        let plan = &scenario.migrations[0];
        let strategy = Strategy::AsynchronousMirror {
            buffer_bytes_max: random.pick(&[4 << 10, 32 << 10, 128 << 10, 1 << 20]),
            drain_max: random.duration(Duration::from_millis(100), Duration::from_millis(400)),
            hot: draw_hot(random),
        };
        Self {
            pacing: plan.pacing.clone(),
            limits: TimeLimits { switch_over_max: SWITCH_OVER_MAX, ..scenario.limits },
            strategy: scenario.rounds_away.unwrap_or(strategy),
            strategy_back: strategy,
            wait_max: scenario.wait_max,
            target_disk: DiskSettings { latency: plan.target_latency, ..scenario.volumes[0].disk.clone() },
            block_sizes: scenario.volumes.iter().map(|volume| volume.block_size).collect(),
            geometries,
            regions: MarkPolicy::Regions { blocks_per_region: random.pick(&[1, 2, 8]) },
            // Simulated volumes are small, and copied within a second.
            rhythm: Rhythm {
                interval_min: random.pick(&[4, 40, 150].map(Duration::from_millis)),
                interval_max: Duration::from_millis(300),
            },
            keep_percent: random.pick(&[0, 50, 90, 100]),
            plans: scenario.migrations.clone(),
            block_size_away: random.pick(&[
                None,
                BlockSize::new(4 << 10).ok(),
                BlockSize::new(64 << 10).ok(),
            ]),
        }
    }

    pub(crate) fn block_size(&self, place: Place, index: usize) -> BlockSize {
        self.block_size_away.filter(|_| place != Place::A).unwrap_or(self.block_sizes[index])
    }
}

impl SimHost {
    fn new(
        world: &Rc<World>,
        mut random: Random,
        place: Place,
        environment: Environment,
        records: Vec<Record>,
        images: BTreeMap<String, Rc<SimDisk>>,
    ) -> Rc<Self> {
        let Environment { handle, clock, manner, links } = environment;
        Rc::new_cyclic(|me: &Weak<Self>| {
            let host = Weak::clone(me);
            let changed = move |journal: &SimJournal| {
                if let Some(host) = host.upgrade() {
                    host.journal_changed(journal);
                }
            };
            let host = Weak::clone(me);
            let copy_forgotten = move || {
                if let Some((fleet, host)) = host.upgrade().and_then(|host| Some((host.fleet()?, host))) {
                    fleet.draw_kill_after_forgetting(host.place);
                }
            };
            let wall = Rc::clone(&clock);
            let wait_max = manner.limits.mirror_wait_max;
            let journal = SimJournal::new(world, random.fork(), records, move || wall.unix_ms(), changed);
            Self {
                me: Weak::clone(me),
                place,
                world: Rc::clone(world),
                journal,
                chronicles: SimChronicles::new(world, random.fork(), wait_max, copy_forgotten),
                random: RefCell::new(random),
                handle,
                clock,
                buffers: BufferPool::new(),
                manner,
                disks_made: Cell::new(100 * (1 + place.index() as u32)),
                former_number: Cell::default(),
                lives: Cell::default(),
                images: RefCell::new(images),
                kept: KeptImages::default(),
                local: LocalImages::default(),
                known: RefCell::default(),
                links,
                fleet: RefCell::default(),
                branch: Cell::new(TRUNK),
                forced: RefCell::default(),
                promised: RefCell::default(),
                answers: RefCell::default(),
                hooks: SimHooks::default(),
                vm_note: Cell::default(),
                vm_note_under_way: Cell::default(),
                vm_expected: Cell::default(),
                cancelled: RefCell::default(),
                vm_examined_by: Cell::default(),
                phase: Cell::default(),
                paused_since: Cell::default(),
                incarnation: Cell::default(),
                is_up: Cell::default(),
                is_stopping: Cell::default(),
                serving: RefCell::default(),
            }
        })
    }

    pub(super) fn join(&self, fleet: &Rc<Fleet>) {
        *self.fleet.borrow_mut() = Rc::downgrade(fleet);
    }

    pub(super) fn fleet(&self) -> Option<Rc<Fleet>> {
        self.fleet.borrow().upgrade()
    }

    pub(super) fn tally(&self, event: super::tally::Event) {
        if let Some(fleet) = self.fleet() {
            fleet.tally(event);
        }
    }

    pub(super) fn vm(&self) -> Option<Rc<SimVm>> {
        self.fleet()?.vm.clone()
    }

    pub(super) fn link_to(&self, place: Place) -> Option<&Rc<Link>> {
        self.links.iter().find(|link| link.connects(self.place, place))
    }

    pub(super) fn peer_of(&self, migration: MigrationId) -> Option<Place> {
        self.journal.look(|state, _| Some(Place::of(state.migrations.get(&migration)?.side.peer()?.0)))
    }

    pub(super) fn phase(&self) -> Option<Phase> {
        self.phase.get()
    }

    pub(super) fn set_phase(&self, phase: Option<Phase>) {
        self.phase.set(phase);
        if phase.is_none() {
            self.paused_since.set(None);
        }
    }

    pub(super) fn journal(&self) -> &SimJournal {
        &self.journal
    }

    pub(super) fn incarnation(&self) -> u64 {
        self.incarnation.get()
    }

    pub(super) fn new_life(&self) -> u64 {
        self.lives.set(self.lives.get() + 1);
        self.lives.get() << 8 | self.place.index() as u64
    }

    pub(super) fn is_up(&self) -> bool {
        self.is_up.get()
    }

    pub(super) fn boot(&self) {
        self.is_up.set(true);
        self.world.note("boot", self.place.index() as u64, self.incarnation.get());
        self.world.say(|| format!("{}: boot", self.place));
        if let Some(host) = self.me.upgrade() {
            self.handle.spawn(async move { host.run_daemon().await });
        }
    }

    pub(super) fn crashed(&self, how: Stop) {
        self.is_up.set(false);
        self.is_stopping.set(false);
        self.incarnation.set(self.incarnation.get() + 1);
        let serving = self.serving.borrow_mut().take();
        drop(serving);
        self.set_phase(None);
        self.hooks.forget();
        self.vm_note_torn();
        self.vm_examined_by.set(None);
        self.vm_expected.set(None);
        self.answers.borrow_mut().clear();
        self.local.crash();
        for link in &self.links {
            link.subjects().into_iter().for_each(|subject| link.line(subject).close(self.place));
        }
        self.journal.crash();
        self.chronicles.crash(how);
        for disk in self.images.borrow().values() {
            match how {
                Stop::PowerCut => disk.power_cut(),
                _ => disk.daemon_killed(),
            }
        }
    }

    async fn run_daemon(self: Rc<Self>) {
        let state = self.journal.open();
        let disks: Vec<_> = self.images.borrow().values().cloned().collect();
        for disk in disks {
            if !broken(Bug::GhostWrites) {
                disk.idle().await;
            }
        }
        let mut resumes = Vec::new();
        for step in recovery::recover(&state) {
            match step {
                Step::Commit(records) => {
                    if self.journal.commit(records).await.is_err() {
                        self.give_up_soon();
                        return;
                    }
                }
                Step::Resume(migration) => resumes.push(migration),
                Step::Discard(image) if !is_local(&state, &image) => self.delete_image(image.place.name()),
                Step::Discard(image) => {
                    if LocalControl::new(&self).discard(image).await.is_err() {
                        self.give_up_soon();
                        return;
                    }
                }
                Step::Retire(image, retirement) => {
                    if LocalControl::new(&self).retire(image, retirement).await.is_err() {
                        self.give_up_soon();
                        return;
                    }
                }
            }
        }
        // Its session handles a migration that a start continues.
        if !resumes.iter().any(|id| state.migrations.get(id).is_some_and(|m| m.side == Side::OneHost)) {
            self.check_left_over();
        }
        match self.promote_before_serving(resumes).await {
            Some(resumes) => self.serve(&resumes),
            None => self.give_up_soon(),
        }
    }

    /// Ends the daemon by itself some time later: it cannot continue.
    fn give_up_soon(&self) {
        let incarnation = self.incarnation.get();
        let delay = self.random.borrow_mut().duration(Duration::from_millis(1), RESTART_AFTER);
        let me = Weak::clone(&self.me);
        self.world.clock.after(delay, move || {
            let Some(host) = me.upgrade().filter(|host| host.incarnation.get() == incarnation) else {
                return;
            };
            if let Some(fleet) = host.fleet() {
                fleet.crash(host.place, Stop::Kill);
            }
        });
    }

    fn journal_changed(&self, journal: &SimJournal) {
        journal.look(|acknowledged, possible| {
            for (path, disk) in self.images.borrow().iter() {
                let certain = permission(acknowledged, path);
                let allowed =
                    possible.iter().map(|state| permission(state, path)).fold(certain, Permission::min);
                disk.set_permission(allowed);
            }
            if let Some(wrong) = wrong_generation(&self.known.borrow(), acknowledged) {
                self.world.violated("owner", || wrong);
            }
            self.known.borrow_mut().clone_from(acknowledged);
        });
        self.note_promises(journal);
        if let Some(fleet) = self.fleet() {
            fleet.journal_changed(self);
        }
        if journal.is_closed() && self.is_up() {
            self.give_up_soon();
        }
    }

    /// Returns the volumes in the journal, with their branch: certain ones, and those with commits in flight.
    pub(super) fn owners(&self) -> (BTreeSet<Owned>, BTreeSet<Owned>) {
        self.journal.look(|acknowledged, possible| {
            let of = |state: &State| {
                let branch = self.branch_in(state);
                state.volumes.keys().map(|volume| (branch, *volume)).collect::<BTreeSet<_>>()
            };
            let certain = of(acknowledged);
            let sets = possible.iter().map(of);
            let possible = sets.fold(certain.clone(), |all, some| all.union(&some).copied().collect());
            (certain, possible)
        })
    }

    pub(super) fn branch_in(&self, state: &State) -> usize {
        let incoming = state.migrations.iter().rev().find(|(_, m)| matches!(m.side, Side::Incoming { .. }));
        match incoming {
            Some((id, MigrationState { promotion: Some(Promotion::Force { .. }), .. })) => {
                // The branch is not known elsewhere yet: a number that no other host can have.
                self.forced.borrow().get(id).copied().unwrap_or(usize::MAX - self.place.index())
            }
            _ => self.branch.get(),
        }
    }

    pub(super) fn may_own(&self, branch: usize) -> bool {
        self.owners().1.iter().any(|(of, _)| *of == branch)
    }

    pub(super) fn owns(&self, branch: usize) -> bool {
        let (certain, possible) = self.owners();
        certain == possible
            && certain.iter().filter(|(of, _)| *of == branch).count() == self.manner.block_sizes.len()
    }

    /// Returns whether volumes may be released while their target does not own them yet.
    pub(super) fn may_have_released(&self) -> bool {
        let is_released =
            |state: &State| state.unfinished().any(|(_, m)| matches!(m.stage, Stage::Released(_)));
        self.journal
            .look(|acknowledged, possible| is_released(acknowledged) || possible.iter().any(is_released))
    }

    /// Checks that an image which owns a volume, or is needed after a restart, is not deleted.
    pub(super) fn check_deletion(&self, path: &str) {
        let owns = self.journal.look(|acknowledged, possible| {
            let owns = |state| permission(state, path) == Permission::Owner;
            owns(acknowledged) || possible.iter().any(owns)
        });
        if owns {
            self.world.violated("owner", || format!("{path} is deleted, and owns a volume"));
        }
        if self.journal.look(|acknowledged, _| permission(acknowledged, path)) == Permission::Refilled {
            self.world.violated("owner", || format!("{path} is deleted, and another host reads it"));
        }
        if let Some(stage) = self.journal.look(|acknowledged, _| counts_upon(acknowledged, path)) {
            self.world.violated("owner", || format!("{path} is deleted, and the journal says {stage:?}"));
        }
    }

    pub(super) fn discard_image(&self, path: &str) {
        if !self.journal.look(|state, _| state.is_reservoir(path)) {
            self.delete_image(path);
        }
    }

    pub(super) fn delete_image(&self, path: &str) {
        self.check_deletion(path);
        self.world.note("delete", self.place.index() as u64, 0);
        if let Some(image) = self.images.borrow_mut().remove(path) {
            image.set_role(Role::Bystander);
        }
    }

    pub(super) fn make_image(&self, path: &str, index: usize) -> Rc<SimDisk> {
        if let Some(disk) = self.images.borrow().get(path) {
            return Rc::clone(disk);
        }
        let size_bytes = self.manner.geometries[index].size;
        self.new_image(path, DiskSettings { size_bytes, ..self.manner.target_disk.clone() })
    }

    pub(super) fn new_image(&self, path: &str, settings: DiskSettings) -> Rc<SimDisk> {
        let number = self.disks_made.replace(self.disks_made.get() + 1);
        let random = self.random.borrow_mut().fork();
        let disk = SimDisk::new(&self.world, number, settings, random);
        disk.set_permission(self.journal.look(|state, _| permission(state, path)));
        self.images.borrow_mut().insert(path.to_owned(), Rc::clone(&disk));
        disk
    }

    pub(super) fn describe(&self) -> String {
        let state = self.journal.acknowledged();
        let stages: Vec<_> =
            state.migrations.iter().map(|(id, migration)| format!("{id} {:?}", migration.stage)).collect();
        let (phase, volumes) = (self.phase(), state.volumes.len());
        let up = self.is_up();
        format!("{} (up: {up}, phase {phase:?}, {volumes} volumes): {}", self.place, stages.join(", "))
    }

    pub(super) fn clear(&self) {
        let serving = self.serving.borrow_mut().take();
        drop(serving);
        self.images.borrow_mut().clear();
    }

    pub(super) fn next_migration(&self) -> MigrationId {
        MigrationId(self.journal.acknowledged().next_migration)
    }
}

pub(super) fn volume_id(index: usize) -> VolumeId {
    VolumeId([index as u8 + 1; 16])
}

fn is_local(state: &State, image: &ImageLocation) -> bool {
    let local = state.migrations.values().filter(|migration| migration.side == Side::OneHost);
    local.flat_map(|migration| &migration.volumes).any(|moving| moving.target == *image)
}
