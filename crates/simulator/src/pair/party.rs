//! One of two hosts: its images and its journal, which stay, and the daemon that comes and goes.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::{Rc, Weak};
use std::time::Duration;

use block::{BlockDevice, BufferPool, Geometry, Handle};
use chronicle::{BlockSize, MarkPolicy};
use futures_channel::oneshot;
use lane::TimeLimits;
use lane::resuming::Rhythm;
use migration::journal::{Record, Stage, State};
use migration::planted::{Bug, broken};
use migration::recovery::{self, Step};
use migration::source::Moves;
use migration::strategy::Acknowledgement;
use migration::{HostId, MigrationId, PacingSettings, VolumeId};

use super::Pair;
use super::chronicles::SimChronicles;
use super::line::Line;
use super::machine::SimMachine;
use super::serving::Serving;
use crate::checker::owner::{Permission, permission};
use crate::disk::{DiskSettings, Role, SimDisk};
use crate::guest::Guest;
use crate::host::PlannedVolume;
use crate::journal::SimJournal;
use crate::random::Random;
use crate::scenario::Scenario;
use crate::world::{Stop, World};

/// How long the gates may be closed: several round trips of the longest link.
const SWITCH_OVER_MAX: Duration = Duration::from_secs(1);
/// How long after a journal that closed itself the daemon is restarted at most.
const RESTART_AFTER: Duration = Duration::from_secs(2);

/// Which host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Where the volumes are at first, and the guests always.
    A,
    /// Where the volumes are to go.
    B,
}

/// How migrations of a simulation are made.
#[derive(Clone, Debug)]
pub(crate) struct Manner {
    pub(crate) pacing: PacingSettings,
    pub(crate) limits: TimeLimits,
    pub(crate) acknowledgement: Acknowledgement,
    pub(crate) target_disk: DiskSettings,
    pub(crate) block_sizes: Vec<BlockSize>,
    pub(crate) geometries: Vec<Geometry>,
    /// What is marked at once in the chronicles.
    pub(crate) regions: MarkPolicy,
    /// How often it is remembered how far a copying is.
    pub(crate) rhythm: Rhythm,
}

/// A host.
pub(crate) struct Party {
    pub(super) me: Weak<Self>,
    pub(super) place: Place,
    pub(crate) world: Rc<World>,
    pub(super) random: RefCell<Random>,
    pub(super) handle: Handle,
    pub(super) buffers: BufferPool,
    pub(super) manner: Rc<Manner>,
    journal: Rc<SimJournal>,
    pub(super) chronicles: Rc<SimChronicles>,
    /// By path.
    pub(super) images: RefCell<BTreeMap<String, Rc<SimDisk>>>,
    pub(super) lines: [Rc<Line>; 2],
    /// The guests, at the host where they are.
    pub(super) guests: Vec<Rc<Guest>>,
    pair: RefCell<Weak<Pair>>,
    incarnation: Cell<u64>,
    is_up: Cell<bool>,
    pub(super) serving: RefCell<Option<Serving>>,
    disks_made: Cell<u32>,
}

/// Makes both hosts; the volumes are at A.
pub(super) fn make(
    world: &Rc<World>,
    random: &mut Random,
    scenario: &Scenario,
    handles: [Handle; 2],
    lines: &[Rc<Line>; 2],
) -> ([Rc<Party>; 2], Vec<Rc<Guest>>) {
    let (mut records, mut guests, mut images) = (Vec::new(), Vec::new(), BTreeMap::new());
    let mut geometries = Vec::new();
    for (index, plan) in scenario.volumes.iter().enumerate() {
        let (path, volume) = (format!("/a/{index}"), volume_id(index));
        let volume = PlannedVolume::make(world, random, (index, volume, plan), &path, BufferPool::new());
        guests.push(volume.guest);
        geometries.push(volume.disk.geometry());
        records.push(volume.record);
        images.insert(path, volume.disk);
    }
    let plan = &scenario.migrations[0];
    let acknowledgement = Acknowledgement::Source {
        buffer_bytes_max: random.pick(&[4 << 10, 32 << 10, 128 << 10, 1 << 20]),
        drain_max: random.duration(Duration::from_millis(100), Duration::from_millis(400)),
    };
    let manner = Rc::new(Manner {
        pacing: plan.pacing.clone(),
        limits: TimeLimits { switch_over_max: SWITCH_OVER_MAX, ..scenario.limits },
        acknowledgement,
        target_disk: DiskSettings { latency: plan.target_latency, ..scenario.volumes[0].disk.clone() },
        block_sizes: scenario.volumes.iter().map(|volume| volume.block_size).collect(),
        geometries,
        regions: MarkPolicy::Regions { blocks_per_region: random.pick(&[1, 2, 8]) },
        // Simulated volumes are small, and copied within a second.
        rhythm: Rhythm {
            interval_min: random.pick(&[4, 40, 150].map(Duration::from_millis)),
            interval_max: Duration::from_millis(300),
        },
    });
    let [first, second] = handles;
    let mut party = |place, handle, records, images, guests| {
        let random = random.fork();
        Party::new(world, random, place, handle, &manner, records, images, lines.clone(), guests)
    };
    let a = party(Place::A, first, records, images, guests.clone());
    let b = party(Place::B, second, Vec::new(), BTreeMap::new(), Vec::new());
    ([a, b], guests)
}

impl Party {
    #[expect(clippy::too_many_arguments, reason = "two calls, side by side")]
    fn new(
        world: &Rc<World>,
        mut random: Random,
        place: Place,
        handle: Handle,
        manner: &Rc<Manner>,
        records: Vec<Record>,
        images: BTreeMap<String, Rc<SimDisk>>,
        lines: [Rc<Line>; 2],
        guests: Vec<Rc<Guest>>,
    ) -> Rc<Self> {
        Rc::new_cyclic(|me: &Weak<Self>| {
            let party = Weak::clone(me);
            let changed = move |journal: &SimJournal| {
                if let Some(party) = party.upgrade() {
                    party.journal_changed(journal);
                }
            };
            Self {
                me: Weak::clone(me),
                place,
                world: Rc::clone(world),
                journal: SimJournal::new(world, random.fork(), records, changed),
                chronicles: SimChronicles::new(world, random.fork()),
                random: RefCell::new(random),
                handle,
                buffers: BufferPool::new(),
                manner: Rc::clone(manner),
                disks_made: Cell::new(100 * (1 + place as u32)),
                images: RefCell::new(images),
                lines,
                guests,
                pair: RefCell::default(),
                incarnation: Cell::default(),
                is_up: Cell::default(),
                serving: RefCell::default(),
            }
        })
    }

    pub(super) fn join(&self, pair: &Rc<Pair>) {
        *self.pair.borrow_mut() = Rc::downgrade(pair);
    }

    pub(super) fn pair(&self) -> Option<Rc<Pair>> {
        self.pair.borrow().upgrade()
    }

    /// The machine that goes along with the volumes, if one does.
    pub(super) fn machine(&self) -> Option<Rc<SimMachine>> {
        self.pair()?.machine.clone()
    }

    /// What moves.
    pub(super) fn moves(&self) -> Moves {
        if self.machine().is_some() { Moves::Machine } else { Moves::Volumes }
    }

    pub(super) fn journal(&self) -> &SimJournal {
        &self.journal
    }

    pub(super) fn incarnation(&self) -> u64 {
        self.incarnation.get()
    }

    pub(super) fn is_up(&self) -> bool {
        self.is_up.get()
    }

    /// The identity of this host, and of the other.
    pub(super) fn host(place: Place) -> HostId {
        HostId([place as u8 + 1; 32])
    }

    pub(super) fn other(&self) -> Place {
        if self.place == Place::A { Place::B } else { Place::A }
    }

    /// Starts the daemon.
    pub(super) fn boot(&self) {
        self.is_up.set(true);
        self.world.note("boot", self.place as u64, self.incarnation.get());
        if let Some(party) = self.me.upgrade() {
            self.handle.spawn(async move { party.run_daemon().await });
        }
    }

    /// The daemon was killed, or power was cut; its tasks are gone already.
    pub(super) fn crashed(&self, how: Stop) {
        self.is_up.set(false);
        self.incarnation.set(self.incarnation.get() + 1);
        let serving = self.serving.borrow_mut().take();
        drop(serving);
        self.lines.iter().for_each(|line| line.close(self.place));
        self.journal.crash();
        self.chronicles.crash();
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
                step => self.world.violated("journal", || format!("between hosts: {step:?}")),
            }
        }
        self.serve(&resumes);
    }

    /// Ends the daemon by itself, some time from now: it cannot go on.
    fn give_up_soon(&self) {
        let incarnation = self.incarnation.get();
        let delay = self.random.borrow_mut().duration(Duration::from_millis(1), RESTART_AFTER);
        let me = Weak::clone(&self.me);
        self.world.clock.after(delay, move || {
            let Some(party) = me.upgrade().filter(|party| party.incarnation.get() == incarnation) else {
                return;
            };
            if let Some(pair) = party.pair() {
                pair.crashes.borrow_mut().push((party.place, Stop::Kill));
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
        });
        if let Some(pair) = self.pair() {
            pair.journal_changed();
        }
        if journal.is_closed() && self.is_up() {
            self.give_up_soon();
        }
    }

    /// The volumes that are in its books: for certain, and also if what is under way is found there.
    pub(super) fn owners(&self) -> (BTreeSet<VolumeId>, BTreeSet<VolumeId>) {
        self.journal.look(|acknowledged, possible| {
            let of = |state: &State| state.volumes.keys().copied().collect::<BTreeSet<_>>();
            let certain = of(acknowledged);
            let sets = possible.iter().map(of);
            let possible = sets.fold(certain.clone(), |all, some| all.union(&some).copied().collect());
            (certain, possible)
        })
    }

    pub(super) fn may_own(&self) -> bool {
        !self.owners().1.is_empty()
    }

    /// At the commit point, until the target owns the volumes, both disks hold the same, durably.
    pub(super) fn check_released(&self, target: &Self) {
        let released: Vec<_> = {
            let state = self.journal.acknowledged();
            let unfinished = state.unfinished().filter(|(_, m)| matches!(m.stage, Stage::Released(_)));
            unfinished.map(|(id, migration)| (id, migration.clone())).collect()
        };
        for (id, migration) in released {
            let waits = target.journal.look(|acknowledged, possible| {
                let is_prepared = |state: &State| {
                    let incoming = state.incoming(Self::host(self.place), id);
                    incoming.is_some_and(|(_, m)| matches!(m.stage, Stage::Prepared(_)))
                };
                is_prepared(acknowledged) && possible.iter().all(is_prepared)
            });
            if !waits {
                continue;
            }
            for moving in &migration.volumes {
                let source = self.images.borrow().get(moving.source.place.name()).cloned();
                let copy = target.images.borrow().get(moving.target.place.name()).cloned();
                let (Some(source), Some(copy)) = (source, copy) else {
                    self.world.violated("owner", || format!("an image of {id} is gone at the commit point"));
                    continue;
                };
                source.with_medium(|source| {
                    copy.with_medium(|copy| {
                        let mut pairs = source.current().iter().zip(copy.current());
                        if let Some(sector) = pairs.position(|(source, copy)| source != copy) {
                            let (here, there) = (source.current()[sector], copy.current()[sector]);
                            self.world.violated("content", || {
                                format!(
                                    "{id} is released, and sector {sector} is {here:x} here, {there:x} there"
                                )
                            });
                        }
                        for (medium, name) in [(source, "source"), (copy, "target")] {
                            if !medium.is_durable() {
                                let detail = || format!("{id} is released and the {name} is not durable");
                                self.world.violated("content", detail);
                            }
                        }
                    });
                });
            }
        }
    }

    /// What the disk holds that a volume of this host is on.
    pub(super) fn content_of(&self, index: usize) -> Option<Vec<u64>> {
        let state = self.journal.acknowledged();
        let image = &state.volumes.get(&volume_id(index))?.record.image;
        let disk = self.images.borrow().get(image.place.name()).cloned()?;
        Some(disk.with_medium(|medium| medium.current().to_vec()))
    }

    pub(super) fn delete_image(&self, path: &str) {
        let owns = self.journal.look(|acknowledged, possible| {
            let owns = |state| permission(state, path) == Permission::Owner;
            owns(acknowledged) || possible.iter().any(owns)
        });
        if owns {
            self.world.violated("owner", || format!("{path} is deleted, and owns a volume"));
        }
        self.world.note("delete", self.place as u64, 0);
        if let Some(image) = self.images.borrow_mut().remove(path) {
            image.set_role(Role::Bystander);
        }
    }

    /// The image at `path`, made if it is not there.
    pub(super) fn make_image(&self, path: &str, index: usize) -> Rc<SimDisk> {
        if let Some(disk) = self.images.borrow().get(path) {
            return Rc::clone(disk);
        }
        let number = self.disks_made.get();
        self.disks_made.set(number + 1);
        let size_bytes = self.manner.geometries[index].size;
        let settings = DiskSettings { size_bytes, ..self.manner.target_disk.clone() };
        let random = self.random.borrow_mut().fork();
        let disk = SimDisk::new(&self.world, number, settings, random);
        disk.set_permission(self.journal.look(|state, _| permission(state, path)));
        self.images.borrow_mut().insert(path.to_owned(), Rc::clone(&disk));
        disk
    }

    /// Does something once a phase is reached, unless the daemon goes before that.
    pub(super) fn when(&self, reached: oneshot::Receiver<()>, what: impl FnOnce() + 'static) {
        self.handle.spawn(async move {
            if reached.await.is_ok() {
                what();
            }
        });
    }

    pub(super) fn describe(&self) -> String {
        let state = self.journal.acknowledged();
        let stages: Vec<_> =
            state.migrations.iter().map(|(id, migration)| format!("{id} {:?}", migration.stage)).collect();
        let phase = self.world.phase();
        format!("{:?} (up: {}, phase {phase:?}): {}", self.place, self.is_up(), stages.join(", "))
    }

    pub(super) fn clear(&self) {
        let serving = self.serving.borrow_mut().take();
        drop(serving);
        self.images.borrow_mut().clear();
    }

    /// The number that the next migration gets.
    pub(super) fn next_migration(&self) -> MigrationId {
        MigrationId(self.journal.acknowledged().next_migration)
    }
}

/// The identity of the volume number `index`.
pub(super) fn volume_id(index: usize) -> VolumeId {
    VolumeId([index as u8 + 1; 16])
}
