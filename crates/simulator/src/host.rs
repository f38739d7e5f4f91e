//! One host: its stores and images, and the daemon that comes and goes on it.
//!
//! ```text
//!   boot: read the journal ──► wait for the images' locks ──► recover, step by step ──► serve ──► migrate …
//!     ▲                                                                                             │
//!     └── killed or power cut, at any event: tasks are dropped; disks, journal and guests stay ◄────┘
//! ```
//! Everything that the daemon does is a task of the executor and dies with it. What stays is the world's.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::{Rc, Weak};
use std::time::Duration;

use block::filter::Align;
use block::{BlockDevice, BufferPool, Handle};
use chronicle::Generation;
use lane::{Baton, Conductor, Plan, PlannedVolume, Volume};
use migration::journal::{ImageLocation, MigratingVolume, Record, State, VolumeRecord};
use migration::planted::{Bug, broken};
use migration::recovery::{self, Step};
use migration::{MigrationId, Phase, VolumeId, VolumeIndex};

use crate::checker::journal::{PhaseWatch, unrecovered};
use crate::checker::owner::{Permission, permission, wrong_generation};
use crate::checker::progress::ProgressWatch;
use crate::control::SimControl;
use crate::disk::{DiskSettings, Role, SimDisk};
use crate::faults::{Fault, Planned};
use crate::guest::{Connection, Guest};
use crate::journal::SimJournal;
use crate::probe::Probe;
use crate::random::Random;
use crate::scenario::{MigrationPlan, Scenario};
use crate::world::{Stop, World};

/// Names of the stores.
const STORES: [&str; 3] = ["a", "b", "c"];
/// How long after a journal that closed itself, or a recovery that failed, the daemon is restarted at most.
const RESTART_AFTER: Duration = Duration::from_secs(3);

/// The host.
pub(crate) struct Host {
    me: Weak<Self>,
    pub(crate) world: Rc<World>,
    random: RefCell<Random>,
    scenario: Scenario,
    handle: Handle,
    buffers: BufferPool,
    pub(crate) journal: Rc<SimJournal>,
    guests: Vec<Rc<Guest>>,
    /// By path.
    images: RefCell<BTreeMap<String, Rc<SimDisk>>>,
    /// Images that somebody was told of that they are left, or that were kept on purpose.
    excused: RefCell<BTreeSet<String>>,
    images_made: Cell<u32>,
    disks_made: Cell<u32>,
    /// What is true now, for finding out what changes.
    state: RefCell<State>,
    /// What lives in the daemon; `None` while it is down or has not begun to serve.
    serving: RefCell<Option<Serving>>,
    /// Grows with each daemon, so that what was meant for a dead one is passed over.
    incarnation: Cell<u64>,
    /// Set from a power cut until the guests' contents have been checked.
    power_was_cut: Cell<bool>,
    migrations_begun: Cell<usize>,
    ending: Cell<Ending>,
}

/// What a daemon that serves has in memory.
struct Serving {
    volumes: Vec<Rc<Volume>>,
    migration: Option<Running>,
}

/// A migration under way.
struct Running {
    baton: Baton,
    targets: Vec<Rc<SimDisk>>,
    phases: PhaseWatch,
    progress: ProgressWatch,
}

/// How far the end of the simulation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    /// Guests and migrations are at work.
    Working,
    /// Guests bring their requests to an end.
    Settling,
    /// A last restart is under way, to look at what is durable.
    LastRestart,
}

impl Host {
    /// A host whose volumes are in store `a`; nothing runs yet.
    pub(crate) fn new(
        world: &Rc<World>,
        random: &mut Random,
        scenario: Scenario,
        handle: Handle,
    ) -> Rc<Self> {
        let buffers = BufferPool::new();
        let mut images = BTreeMap::new();
        let (mut records, mut guests) = (Vec::new(), Vec::new());
        for (index, plan) in scenario.volumes.iter().enumerate() {
            let path = format!("/a/{index}.0");
            let disk = SimDisk::new(world, index as u32, plan.disk.clone(), random.fork());
            prefill(&disk, plan.filled_percent, random);
            let initial = disk.with_medium(|medium| medium.current().to_vec());
            guests.push(Guest::new(
                world,
                index,
                plan.guest.clone(),
                random.fork(),
                &initial,
                buffers.clone(),
            ));
            records.push(Record::VolumeAdded(VolumeRecord {
                volume: volume_id(index),
                name: format!("v{index}"),
                size_bytes: plan.disk.size_bytes,
                block_size_bytes: plan.block_size.into(),
                image: ImageLocation { store: "a".to_owned(), path: path.clone() },
                generation: Generation(1),
            }));
            images.insert(path, disk);
        }
        for fault in &scenario.faults {
            world.faults.plan(*fault);
        }
        let made = images.len() as u32;
        Rc::new_cyclic(|me: &Weak<Self>| {
            let host = Weak::clone(me);
            let changed = move |journal: &SimJournal| {
                if let Some(host) = host.upgrade() {
                    host.journal_changed(journal);
                }
            };
            Self {
                me: Weak::clone(me),
                world: Rc::clone(world),
                random: RefCell::new(random.fork()),
                scenario,
                handle,
                buffers,
                journal: SimJournal::new(world, random.fork(), records, changed),
                guests,
                images: RefCell::new(images),
                excused: RefCell::default(),
                images_made: Cell::new(made),
                disks_made: Cell::new(made),
                state: RefCell::default(),
                serving: RefCell::default(),
                incarnation: Cell::default(),
                power_was_cut: Cell::default(),
                migrations_begun: Cell::default(),
                ending: Cell::new(Ending::Working),
            }
        })
    }

    /// Starts the daemon.
    pub(crate) fn boot(&self) {
        self.world.note("boot", self.incarnation.get(), 0);
        if let Some(host) = self.me.upgrade() {
            self.handle.spawn(async move { host.run_daemon().await });
        }
    }

    /// The daemon was killed, or power was cut; its tasks are gone already. It is started again later.
    pub(crate) fn crashed(&self, how: Stop, phase: Option<Phase>) {
        self.world.note("crash", how as u64, phase.map_or(99, |phase| phase as u64));
        let fault = if how == Stop::PowerCut { Fault::PowerCut } else { Fault::Kill };
        self.world.struck_in(fault, phase);
        self.world.set_phase(None);
        self.incarnation.set(self.incarnation.get() + 1);
        *self.serving.borrow_mut() = None;
        self.journal.crash();
        for disk in self.images.borrow().values() {
            match how {
                Stop::PowerCut => disk.power_cut(),
                _ => disk.daemon_killed(),
            }
            disk.set_role(Role::Bystander);
        }
        for guest in &self.guests {
            match how {
                Stop::PowerCut => guest.power_cut(),
                _ => guest.disconnect(),
            }
        }
        if how == Stop::PowerCut {
            self.power_was_cut.set(true);
        }
        let down = self.random.borrow_mut().duration(Duration::from_micros(10), Duration::from_secs(1));
        let me = Weak::clone(&self.me);
        self.world.clock.after(down, move || {
            if let Some(host) = me.upgrade() {
                host.boot();
            }
        });
    }

    /// What is not finished, for people.
    pub(crate) fn unfinished(&self) -> String {
        let waiting: Vec<_> =
            self.guests.iter().filter(|guest| !guest.is_idle()).map(|guest| guest.waits_for()).collect();
        let phase = self.world.phase().map_or("none".to_owned(), |phase| phase.to_string());
        let begun = self.migrations_begun.get();
        format!(
            "migration {begun} of {} in phase {phase}, {:?}; {}",
            self.scenario.migrations.len(),
            self.ending.get(),
            waiting.join("; ")
        )
    }

    /// Requests that guests have been answered.
    pub(crate) fn operations(&self) -> u64 {
        self.guests.iter().map(|guest| u64::from(guest.answered())).sum()
    }

    fn later(&self, delay: Duration, what: impl FnOnce(&Self) + 'static) {
        let me = Weak::clone(&self.me);
        self.world.clock.after(delay, move || {
            if let Some(host) = me.upgrade() {
                what(&host);
            }
        });
    }

    /// Ends the daemon by itself, some time from now: it cannot go on.
    fn give_up_soon(&self) {
        let incarnation = self.incarnation.get();
        let delay = self.random.borrow_mut().duration(Duration::from_millis(1), RESTART_AFTER);
        let now = self.world.now();
        // Nobody can be served meanwhile.
        self.world.excuses.borrow_mut().add(now, now + delay);
        self.later(delay, move |host| {
            if host.incarnation.get() == incarnation {
                host.world.stop(Stop::Kill);
            }
        });
    }
}

// The daemon's life.
impl Host {
    async fn run_daemon(self: Rc<Self>) {
        let state = self.journal.open();
        if !broken(Bug::GhostWrites) {
            self.wait_for_locks(&state).await;
        }
        let control = self.control();
        for step in recovery::recover(&state) {
            let done = match step {
                Step::Commit(records) => self.journal.commit(records).await.is_ok(),
                Step::Discard(image) => lane::Control::discard(&*control, image).await.is_ok(),
                Step::Retire(image, retirement) => {
                    lane::Control::retire(&*control, image, retirement).await.is_ok()
                }
            };
            if !done {
                self.give_up_soon();
                return;
            }
        }
        let state = self.journal.acknowledged();
        let images = self.images.borrow().keys().cloned().collect();
        if let Some(wrong) = unrecovered(&state, &images, &self.excused.borrow()) {
            self.world.violated("journal", || wrong);
            return;
        }
        self.check_contents(&state);
        self.serve(&state);
        if self.ending.get() == Ending::LastRestart {
            self.world.stop(Stop::Finished);
        }
    }

    /// A store whose lock is held still has requests of the dead daemon in flight (hard case 12).
    async fn wait_for_locks(&self, state: &State) {
        let owners = state.volumes.values().map(|volume| &volume.record.image.path);
        let moving = state.unfinished().flat_map(|(_, migration)| &migration.volumes);
        let paths: BTreeSet<&String> =
            owners.chain(moving.flat_map(|moving| [&moving.source.path, &moving.target.path])).collect();
        for path in paths {
            let disk = self.images.borrow().get(path).cloned();
            if let Some(disk) = disk {
                disk.idle().await;
            }
        }
    }

    fn check_contents(&self, state: &State) {
        for (index, guest) in self.guests.iter().enumerate() {
            let Some(disk) = self.owner_of(state, index) else { continue };
            let found = disk.with_medium(|medium| medium.current().to_vec());
            if self.power_was_cut.get() {
                guest.check_after_power_cut(&found);
            } else {
                guest.check(&found);
            }
        }
        self.power_was_cut.set(false);
    }

    fn owner_of(&self, state: &State, index: usize) -> Option<Rc<SimDisk>> {
        let image = &state.volumes.get(&volume_id(index))?.record.image;
        self.images.borrow().get(&image.path).cloned()
    }

    fn serve(&self, state: &State) {
        let mut volumes = Vec::new();
        for (index, guest) in self.guests.iter().enumerate() {
            let Some(disk) = self.owner_of(state, index) else { continue };
            let Some(known) = state.volumes.get(&volume_id(index)) else { continue };
            let (block_size, generation) = (self.scenario.volumes[index].block_size, known.record.generation);
            let volume = Volume::new(volume_id(index), block_size, generation, disk);
            let probe = Rc::new(Probe::new(volume.device(), &self.world, self.scenario.limits));
            let align = Align::new(probe, self.buffers.clone(), self.handle.clone());
            volumes.push(volume);
            guest.connect(Connection { device: Rc::new(align), handle: self.handle.clone() });
        }
        *self.serving.borrow_mut() = Some(Serving { volumes, migration: None });
        self.world.note("serves", self.incarnation.get(), 0);
        self.next_migration();
    }

    pub(crate) fn control(&self) -> Rc<SimControl> {
        let random = self.random.borrow_mut().fork();
        Rc::new(SimControl::new(Weak::clone(&self.me), &self.world, random, self.incarnation.get()))
    }

    /// Tells whether the daemon of this number still lives.
    pub(crate) fn is_alive(&self, incarnation: u64) -> bool {
        self.incarnation.get() == incarnation
    }
}

// Migrations.
impl Host {
    /// Plans the next migration, or the end.
    fn next_migration(&self) {
        let Some(plan) = self.scenario.migrations.get(self.migrations_begun.get()) else {
            self.end_when_done();
            return;
        };
        let incarnation = self.incarnation.get();
        self.later(plan.pause, move |host| {
            if host.is_alive(incarnation)
                && let Some(host) = host.me.upgrade()
            {
                let handle = host.handle.clone();
                handle.spawn(async move { host.migrate().await });
            }
        });
    }

    async fn migrate(self: Rc<Self>) {
        let number = self.migrations_begun.get();
        self.migrations_begun.set(number + 1);
        let plan = self.scenario.migrations[number].clone();
        let state = self.journal.acknowledged();
        let id = MigrationId(state.next_migration);
        let moving = self.choose_targets(&state);
        let (volumes, keep_source) = (moving.clone(), plan.keep_source);
        let started = Record::MigrationStarted { migration: id, volumes, keep_source };
        if self.journal.commit(vec![started]).await.is_err() {
            self.give_up_soon();
            return;
        }
        // Images exist only once the journal knows of them: a restart finds them all.
        self.make_targets(&moving, &plan);
        let conductor = {
            let mut serving = self.serving.borrow_mut();
            let Some(serving) = serving.as_mut() else { return };
            let (running, conductor) = self.conduct(id, &plan, &moving, serving);
            serving.migration = Some(running);
            conductor
        };
        self.world.note("migration", id.0, moving.len() as u64);
        self.entered(id, Phase::Copying);
        let outcome = conductor.run().await;
        self.world.say(|| format!("migration {id} ended: {outcome:?}"));
        self.world.note("migration ended", id.0, 0);
        self.migration_ended();
    }

    fn choose_targets(&self, state: &State) -> Vec<MigratingVolume> {
        let here = state.volumes.values().next().map_or("a", |volume| volume.record.image.store.as_str());
        let others: Vec<_> = STORES.into_iter().filter(|store| *store != here).collect();
        let store = self.random.borrow_mut().pick(&others);
        let volumes = state.volumes.values().enumerate();
        volumes
            .map(|(index, volume)| {
                let number = self.images_made.get();
                self.images_made.set(number + 1);
                let path = format!("/{store}/{index}.{number}");
                let target = ImageLocation { store: store.to_owned(), path };
                MigratingVolume { volume: volume.record.volume, source: volume.record.image.clone(), target }
            })
            .collect()
    }

    fn make_targets(&self, moving: &[MigratingVolume], plan: &MigrationPlan) {
        let mut random = self.random.borrow_mut();
        for (volume, moving) in self.scenario.volumes.iter().zip(moving) {
            let settings = DiskSettings {
                size_bytes: volume.disk.size_bytes,
                sector_bytes: random.pick(&[512, 4096]),
                latency: plan.target_latency,
                tail_percent: random.pick(&[0, 2, 10, 30]),
            };
            let number = self.disks_made.get();
            self.disks_made.set(number + 1);
            let disk = SimDisk::new(&self.world, number, settings, random.fork());
            disk.set_permission(self.journal.look(|state, _| permission(state, &moving.target.path)));
            self.images.borrow_mut().insert(moving.target.path.clone(), disk);
        }
    }

    fn conduct(
        &self,
        id: MigrationId,
        plan: &MigrationPlan,
        moving: &[MigratingVolume],
        serving: &Serving,
    ) -> (Running, Conductor) {
        let images = self.images.borrow();
        let mut targets = Vec::new();
        let planned = serving.volumes.iter().zip(moving).filter_map(|(volume, moving)| {
            let (source, target) = (images.get(&moving.source.path)?, images.get(&moving.target.path)?);
            source.set_role(Role::Source);
            target.set_role(Role::Target);
            target.set_volume(volume);
            targets.push(Rc::clone(target));
            Some(PlannedVolume {
                volume: Rc::clone(volume),
                target: Rc::clone(target) as Rc<dyn BlockDevice>,
                source_image: moving.source.clone(),
                target_image: moving.target.clone(),
            })
        });
        let plan_of_lane = Plan {
            migration: id,
            volumes: planned.collect(),
            keep_source: plan.keep_source,
            pacing: plan.pacing.clone(),
            limits: self.scenario.limits,
        };
        let control = self.control();
        let (conductor, baton) =
            Conductor::new(self.handle.clone(), control, self.buffers.clone(), plan_of_lane);
        if let Some((delay, rate)) = plan.bandwidth_change {
            let changed = baton.clone();
            self.world.clock.after(delay, move || changed.set_bandwidth(rate));
        }
        let (phases, progress) = (PhaseWatch::default(), ProgressWatch::default());
        (Running { baton, targets, phases, progress }, conductor)
    }

    fn migration_ended(&self) {
        if let Some(serving) = self.serving.borrow_mut().as_mut() {
            serving.migration = None;
        }
        self.world.set_phase(None);
        for disk in self.images.borrow().values() {
            disk.set_role(Role::Bystander);
            disk.release_hung();
        }
        let state = self.journal.acknowledged();
        if self.journal.is_closed() {
            return;
        }
        let images = self.images.borrow().keys().cloned().collect();
        if let Some(wrong) = unrecovered(&state, &images, &self.excused.borrow()) {
            self.world.violated("journal", || wrong);
        }
        self.next_migration();
    }

    /// A migration has entered a phase: the faults planned for that begin.
    pub(crate) fn entered(&self, id: MigrationId, phase: Phase) {
        self.world.note("phase", id.0, phase as u64);
        self.world.say(|| format!("migration {id}: {phase}"));
        self.world.set_phase(Some(phase));
        if let Some(running) =
            self.serving.borrow_mut().as_mut().and_then(|serving| serving.migration.as_mut())
            && let Some(wrong) = running.phases.enter(phase)
        {
            self.world.violated("journal", || wrong);
        }
        let incarnation = self.incarnation.get();
        for planned in self.world.faults.due(phase) {
            if planned.delay.is_zero() {
                self.begin_fault(&planned);
            } else {
                self.later(planned.delay, move |host| {
                    if host.is_alive(incarnation) {
                        host.begin_fault(&planned);
                    }
                });
            }
        }
    }

    /// Takes a report of progress.
    pub(crate) fn progressed(&self, progress: &migration::Progress) {
        let mut serving = self.serving.borrow_mut();
        let Some(running) = serving.as_mut().and_then(|serving| serving.migration.as_mut()) else { return };
        if let Some(wrong) = running.progress.report(self.world.now(), progress) {
            self.world.violated("progress", || wrong);
        }
    }

    fn begin_fault(&self, planned: &Planned) {
        match planned.fault {
            Fault::Kill => self.world.stop(Stop::Kill),
            Fault::PowerCut => self.world.stop(Stop::PowerCut),
            Fault::Cancel => {
                let baton = self.running(|running| running.baton.clone());
                if let Some(baton) = baton {
                    self.world.struck(Fault::Cancel);
                    baton.cancel();
                }
            }
            Fault::TargetRestart => self.restart_target(),
            fault => {
                self.world.faults.open(planned, self.world.now());
                // What is in flight may be struck as well as what comes later.
                let disks: Vec<_> = self.images.borrow().values().cloned().collect();
                disks.iter().for_each(|disk| disk.afflict(fault));
            }
        }
    }

    fn restart_target(&self) {
        let Some((baton, targets)) = self.running(|running| (running.baton.clone(), running.targets.clone()))
        else {
            return;
        };
        let index = self.random.borrow_mut().index(targets.len());
        let Some(disk) = targets.get(index) else { return };
        // Once guests write to it, it is no target any more, and what they did not flush may be lost.
        if self.world.phase().is_some_and(|phase| phase >= Phase::Retiring && phase != Phase::Discarding) {
            return;
        }
        self.world.struck(Fault::TargetRestart);
        baton.target_restarted(VolumeIndex(index as u32));
        disk.restart();
    }

    fn running<T>(&self, look: impl FnOnce(&Running) -> T) -> Option<T> {
        self.serving.borrow().as_ref().and_then(|serving| serving.migration.as_ref()).map(look)
    }
}

// Journal and images.
impl Host {
    /// What is true, or may be, has changed: so has what may be done with the images.
    fn journal_changed(&self, journal: &SimJournal) {
        let wrong = journal.look(|acknowledged, possible| {
            for (path, disk) in self.images.borrow().iter() {
                let certain = permission(acknowledged, path);
                let allowed =
                    possible.iter().map(|state| permission(state, path)).fold(certain, Permission::min);
                disk.set_permission(allowed);
            }
            let wrong = wrong_generation(&self.state.borrow(), acknowledged);
            *self.state.borrow_mut() = acknowledged.clone();
            wrong
        });
        if let Some(wrong) = wrong {
            self.world.violated("owner", || wrong);
        }
        self.check_released();
        if journal.is_closed() {
            self.give_up_soon();
        }
    }

    /// At the commit point both stores hold the same, durably.
    fn check_released(&self) {
        let state = self.state.borrow();
        for (id, migration) in state.unfinished() {
            if !matches!(migration.stage, migration::journal::Stage::Released(_)) {
                continue;
            }
            for moving in &migration.volumes {
                let images = self.images.borrow();
                let (Some(source), Some(target)) =
                    (images.get(&moving.source.path), images.get(&moving.target.path))
                else {
                    self.world.violated("owner", || format!("an image of {id} is gone at the commit point"));
                    continue;
                };
                source.with_medium(|source| {
                    target.with_medium(|target| {
                        let pairs = source.current().iter().zip(target.current());
                        if let Some(sector) = pairs.clone().position(|(source, target)| source != target) {
                            let (here, there) = (source.current()[sector], target.current()[sector]);
                            self.world.violated("content", || {
                                format!("{id} is released, and sector {sector} is {here:x} at the source, {there:x} at the target")
                            });
                        }
                        if !target.is_durable() {
                            self.world.violated("content", || format!("{id} is released to a target that is not durable"));
                        }
                        if !source.is_durable() {
                            self.world.violated("content", || format!("{id} is released by a source that is not durable"));
                        }
                    });
                });
            }
        }
    }

    /// Deletes an image; `false` if it is not there.
    pub(crate) fn delete_image(&self, path: &str) -> bool {
        self.check_deletion(path);
        self.world.note("delete", 0, 0);
        self.images.borrow_mut().remove(path).is_some()
    }

    /// Keeps an image under another name.
    pub(crate) fn fence_image(&self, path: &str) {
        self.check_deletion(path);
        let image = self.images.borrow_mut().remove(path);
        if let Some(image) = image {
            image.set_permission(Permission::Forbidden);
            let fenced = format!("{path}.fenced");
            self.excused.borrow_mut().insert(fenced.clone());
            self.images.borrow_mut().insert(fenced, image);
        }
    }

    /// Somebody was told that the image could not be dealt with.
    pub(crate) fn excuse_image(&self, path: &str) {
        self.excused.borrow_mut().insert(path.to_owned());
    }

    fn check_deletion(&self, path: &str) {
        let owns = self.journal.look(|acknowledged, possible| {
            std::iter::once(acknowledged)
                .chain(possible)
                .any(|state| permission(state, path) == Permission::Owner)
        });
        if owns {
            self.world.violated("owner", || format!("{path} is deleted, and owns a volume"));
        }
    }
}

// The end.
impl Host {
    /// Looks from time to time whether everything is done.
    fn end_when_done(&self) {
        let incarnation = self.incarnation.get();
        self.later(Duration::from_millis(1), move |host| {
            if !host.is_alive(incarnation) || host.ending.get() == Ending::LastRestart {
                return;
            }
            if host.ending.get() == Ending::Working
                && host.guests.iter().all(|guest| guest.has_done_its_work())
            {
                host.ending.set(Ending::Settling);
                host.guests.iter().for_each(|guest| guest.be_quiet());
            }
            if host.ending.get() == Ending::Settling && host.guests.iter().all(|guest| guest.is_idle()) {
                host.restart_for_the_last_time();
            } else {
                host.end_when_done();
            }
        });
    }

    fn restart_for_the_last_time(&self) {
        self.ending.set(Ending::LastRestart);
        self.world.faults.end();
        let power_cut = self.random.borrow_mut().percent(70);
        self.world.stop(if power_cut { Stop::PowerCut } else { Stop::Kill });
    }
}

/// The identity of the volume number `index`.
fn volume_id(index: usize) -> VolumeId {
    VolumeId([index as u8; 16])
}

fn prefill(disk: &SimDisk, filled_percent: u64, random: &mut Random) {
    disk.with_medium(|medium| {
        // Of grains of 4 KiB, or of stretches long enough to be found empty when they are copied.
        let stretch = random.pick(&[8, 8, 128, 256]);
        let sectors = medium.current().len();
        for start in (0..sectors).step_by(stretch) {
            if random.percent(filled_percent) {
                let end = (start + stretch).min(sectors);
                (start..end).for_each(|sector| medium.prefill(sector, sector as u64 | 1 << 63));
            }
        }
    });
}
