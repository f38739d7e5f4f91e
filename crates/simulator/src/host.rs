//! One host: its stores and images, and the daemon that comes and goes on it.
//!
//! ```text
//!   boot: read the journal ──► wait for the images' locks ──► recover, step by step ──► serve ──► migrate …
//!     ▲                                                                                             │
//!     └── killed or power cut, at any event: tasks are dropped; disks, journal and guests stay ◄────┘
//! ```
//! Everything that the daemon does is a task of the executor and dies with it. What stays is the world's.

mod daemon;
mod ending;
mod faults;
mod images;
mod local;
mod migrations;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::{Rc, Weak};
use std::time::Duration;

use block::{BufferPool, Handle};
use chronicle::Generation;
use futures_channel::mpsc;
use lane::{SourceHandle, Volume};
use migration::journal::{ExportSettings, ImageLocation, Record, State, VolumeRecord};
use migration::session::Event;
use migration::{Phase, VolumeId};

use crate::checker::journal::PhaseWatch;
use crate::checker::progress::ProgressWatch;
use crate::disk::{Medium, Role, SimDisk};
use crate::faults::Fault;
use crate::guest::Guest;
use crate::journal::SimJournal;
use crate::random::Random;
use crate::scenario::{Scenario, VolumePlan};
use crate::world::{Stop, World};

/// How long after a journal that closed itself, or a recovery that failed, the daemon is restarted at most.
const RESTART_AFTER: Duration = Duration::from_secs(3);
/// In how many of a hundred cases what holds only zeroes is allocated all the same, so that they must be found.
const ALLOCATED_ZEROES_PERCENT: u64 = 40;
/// In how many of a hundred cases a daemon that recovers may be hit again.
const RECOVERY_CRASH_PERCENT: u64 = 25;

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
    /// Places that are taken for images that are not made yet: empty files, which a start does not look for.
    rooms: RefCell<BTreeSet<String>>,
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
    recoveries_hit: Cell<u64>,
    ending: Cell<Ending>,
}

/// What a daemon that serves has in memory.
struct Serving {
    volumes: Vec<Rc<Volume>>,
    migration: Option<Running>,
    /// Where wishes about a migration go.
    session: Option<mpsc::UnboundedSender<Event>>,
}

/// A migration under way.
struct Running {
    driver: SourceHandle,
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
            let (path, volume) = (format!("/a/{index}.0"), volume_id(index));
            let volume = PlannedVolume::make(world, random, (index, volume, plan), &path, buffers.clone());
            guests.push(volume.guest);
            records.push(volume.record);
            images.insert(path, volume.disk);
        }
        for fault in &scenario.faults {
            world.faults.plan(*fault);
        }
        let made = images.len() as u32;
        let clock = Rc::clone(&world.clock);
        let wall = move || u64::try_from(clock.now().as_millis()).unwrap_or(0);
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
                journal: SimJournal::new(world, random.fork(), records, wall, changed),
                guests,
                images: RefCell::new(images),
                excused: RefCell::default(),
                rooms: RefCell::default(),
                images_made: Cell::new(made),
                disks_made: Cell::new(made),
                state: RefCell::default(),
                serving: RefCell::default(),
                incarnation: Cell::default(),
                power_was_cut: Cell::default(),
                migrations_begun: Cell::default(),
                recoveries_hit: Cell::default(),
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
        self.rooms.take();
        self.journal.crash();
        for disk in self.images.borrow().values() {
            // Whether anybody was told of it is not followed here: it had not been lost.
            disk.with_medium(Medium::keep_lost);
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
        self.later(down, |host| {
            host.boot();
            host.perhaps_crash_while_recovering();
        });
    }

    /// A recovery may be hit as well: every step of it can be repeated.
    fn perhaps_crash_while_recovering(&self) {
        let mut random = self.random.borrow_mut();
        if !random.percent(RECOVERY_CRASH_PERCENT) {
            return;
        }
        let how = random.pick(&[Stop::Kill, Stop::PowerCut]);
        let delay = random.duration(Duration::from_nanos(100), Duration::from_millis(20));
        drop(random);
        let incarnation = self.incarnation.get();
        self.later(delay, move |host| {
            if host.is_alive(incarnation) && host.serving.borrow().is_none() {
                host.recoveries_hit.set(host.recoveries_hit.get() + 1);
                host.world.stop(how);
            }
        });
    }

    /// How often a daemon was killed, or lost power, before it served anything.
    pub(crate) fn recoveries_hit(&self) -> u64 {
        self.recoveries_hit.get()
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

/// The identity of the volume number `index`.
fn volume_id(index: usize) -> VolumeId {
    VolumeId([index as u8; 16])
}

/// A volume as it is before anything happens: in an image of store `a`, with a guest.
pub(crate) struct PlannedVolume {
    pub(crate) disk: Rc<SimDisk>,
    pub(crate) guest: Rc<Guest>,
    /// What the journal begins with.
    pub(crate) record: Record,
}

impl PlannedVolume {
    /// Makes the volume of this number and identity, as planned.
    pub(crate) fn make(
        world: &Rc<World>,
        random: &mut Random,
        (index, volume, plan): (usize, VolumeId, &VolumePlan),
        path: &str,
        buffers: BufferPool,
    ) -> Self {
        let disk = SimDisk::new(world, index as u32, plan.disk.clone(), random.fork());
        prefill(&disk, plan.filled_percent, random);
        let initial = disk.with_medium(|medium| medium.current().to_vec());
        let guest = Guest::new(world, index, plan.guest.clone(), random.fork(), &initial, buffers);
        let record = Record::VolumeAdded(VolumeRecord {
            volume,
            name: format!("v{index}"),
            size_bytes: plan.disk.size_bytes,
            block_size_bytes: plan.block_size.into(),
            image: ImageLocation::raw_file("a", path),
            generation: Generation(1),
            export: ExportSettings::default(),
        });
        Self { disk, guest, record }
    }
}

fn prefill(disk: &SimDisk, filled_percent: u64, random: &mut Random) {
    disk.with_medium(|medium| {
        // Of grains of 4 KiB, or of stretches long enough to be found empty when they are copied.
        let stretch = random.pick(&[8, 8, 128, 256]);
        let sectors = medium.current().len();
        for start in (0..sectors).step_by(stretch) {
            let end = (start + stretch).min(sectors);
            if random.percent(filled_percent) {
                (start..end).for_each(|sector| medium.prefill(sector, sector as u64 | 1 << 63));
            } else if random.percent(ALLOCATED_ZEROES_PERCENT) {
                (start..end).for_each(|sector| medium.prefill(sector, 0));
            }
        }
    });
}
