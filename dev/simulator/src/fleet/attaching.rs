//! Volumes that are attached at a host which never had them, beside their migrations; and hosts that ask on when that has ended, or
//! write to what they may only read.
//!
//! ```text
//!   owner: given, durably ──► another host: attached, durably ──► lanes that forward ──► clients of any host
//!                                        │ detached ──► owner: ended ──► the host asks on: refused
//!   owner: given for reading ─────────────────────────────────────────► the host writes:   refused
//! ```
//! An attached volume moves on, arrives at the host itself, and its hosts crash, as all others.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use migration::MigrationId;
use migration::journal::{
    AttachedVolume, ExportAccess, ExportSettings, GivenAttachment, ImageFormat, ImageLocation,
    Place as ImagePlace, Record, VolumeRecord,
};

use super::Fleet;
use super::branch::TRUNK;
use super::host::{SimHost, volume_id};
use super::place::Place;
use super::tally::Event;
use crate::random::Random;

/// The random stream of attachments; separate, so that other simulations stay as they are.
const STREAM: u64 = 0xA77A_C4ED;
/// The percentage of simulations with attachments.
const SIMULATIONS_PERCENT: u64 = 40;
/// The percentage of looks at which an attachment begins or ends, if that is possible.
const CHANGES_PERCENT: u64 = 10;
const READS_ONLY_PERCENT: u64 = 25;
/// The longest time between two steps at two hosts.
const STEP_MAX: Duration = Duration::from_millis(5);

pub(super) struct Attachments {
    random: RefCell<Random>,
    left: Cell<u32>,
    /// Whether the steps of one are under way. No migration begins meanwhile.
    are_changing: Rc<Cell<bool>>,
}

/// Ends the steps of a change, also if a host crashes meanwhile.
struct Changing(Rc<Cell<bool>>);

impl Drop for Changing {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

impl Attachments {
    pub(super) fn draw(seed: u64, hosts: usize) -> Self {
        let mut random = Random::new(seed ^ STREAM);
        let has_some = hosts > 2 && random.percent(SIMULATIONS_PERCENT);
        let left = if has_some { random.pick(&[1, 2, 4]) } else { 0 };
        Self { random: RefCell::new(random), left: Cell::new(left), are_changing: Rc::default() }
    }

    pub(super) fn are_changing(&self) -> bool {
        self.are_changing.get()
    }

    fn begin(&self) -> Changing {
        self.are_changing.set(true);
        Changing(Rc::clone(&self.are_changing))
    }

    fn step(&self) -> Duration {
        self.random.borrow_mut().duration(Duration::ZERO, STEP_MAX)
    }
}

impl Fleet {
    /// Attaches the volumes at a host that has never had them, or ends an attachment that no client needs.
    pub(super) fn perhaps_attach(self: &Rc<Self>) {
        let attachments = &self.attachments;
        if attachments.left.get() == 0
            || attachments.are_changing()
            || self.operators.may_force()
            || self.vm.is_some()
            || !attachments.random.borrow_mut().percent(CHANGES_PERCENT)
        {
            return;
        }
        let Some(owner) = self.hosts.iter().find(|host| host.owns(TRUNK)) else { return };
        if !owner.is_up() || !owner.has_nothing_to_do() {
            return;
        }
        let others = || self.hosts.iter().filter(|host| host.place != owner.place && host.is_up());
        let strangers: Vec<_> = others().filter(|host| host.knows_nothing()).collect();
        let attached: Vec<_> = others()
            .filter(|host| host.is_attached_by(owner.place) && !self.has_clients_at(host.place))
            .collect();
        if !strangers.is_empty() {
            let stranger = attachments.random.borrow_mut().pick(&strangers);
            attachments.left.set(attachments.left.get() - 1);
            self.attach(owner, stranger);
        } else if !attached.is_empty() {
            let ending = attachments.random.borrow_mut().pick(&attached);
            self.detach(owner, ending);
        }
    }

    fn has_clients_at(&self, place: Place) -> bool {
        let mut branches = self.branches.all().into_iter();
        branches.any(|branch| branch.home() == place || branch.goes.get() == Some(place))
            || self.neighbours.has_any_at(place)
    }

    fn attach(self: &Rc<Self>, owner: &Rc<SimHost>, stranger: &Rc<SimHost>) {
        let reads_only = self.attachments.random.borrow_mut().percent(READS_ONLY_PERCENT);
        let access = if reads_only { ExportAccess::ReadOnly } else { ExportAccess::ReadWrite };
        let (changing, pause) = (self.attachments.begin(), self.attachments.step());
        let (owner, stranger, fleet) = (Rc::clone(owner), Rc::clone(stranger), Rc::downgrade(self));
        let asked = Rc::clone(&owner);
        asked.handle.clone().spawn(async move {
            if owner.journal().commit(owner.given_to(stranger.place, access)).await.is_err() {
                return;
            }
            owner.handle.sleep(pause).await;
            let Some(fleet) = fleet.upgrade().filter(|_| stranger.is_up() && stranger.knows_nothing()) else {
                return;
            };
            if reads_only {
                // No client of the simulation reads only. The host itself tries to write.
                stranger.former_number.set(Some(stranger.next_migration()));
                fleet.tally(Event::AttachedToRead);
                return;
            }
            fleet.tally(Event::Attached);
            let handle = stranger.handle.clone();
            handle.spawn(stranger.offer_attached(owner.place, changing));
        });
    }

    fn detach(self: &Rc<Self>, owner: &Rc<SimHost>, ending: &Rc<SimHost>) {
        let (changing, pause) = (self.attachments.begin(), self.attachments.step());
        let (owner, ending, fleet) = (Rc::clone(owner), Rc::clone(ending), Rc::downgrade(self));
        let asked = Rc::clone(&ending);
        asked.handle.clone().spawn(async move {
            let volumes = (0..ending.manner.block_sizes.len()).map(volume_id);
            let number =
                ending.journal().look(|state, _| state.moved.get(&volume_id(0)).map(|moved| moved.migration));
            ending.with_serving(|serving| serving.lanes.iter_mut().for_each(|lane| drop(lane.take())));
            let detached = volumes.map(|volume| Record::Detached { volume }).collect();
            if ending.journal().commit(detached).await.is_err() {
                return;
            }
            ending.handle.sleep(pause).await;
            let Some(fleet) = fleet.upgrade().filter(|_| owner.is_up() && owner.owns(TRUNK)) else { return };
            let host = ending.place.host();
            let volumes = (0..owner.manner.block_sizes.len()).map(volume_id);
            let ended = volumes.map(|volume| Record::AttachmentEnded { volume, host }).collect();
            let (asked, ending, handle) = (Rc::clone(&owner), Rc::clone(&ending), owner.handle.clone());
            handle.spawn(async move {
                // Until here: another attachment would be a new right of the host that asks on.
                let _changing = changing;
                if asked.journal().commit(ended).await.is_ok() {
                    ending.former_number.set(number);
                    fleet.tally(Event::Detached);
                }
            });
        });
    }
}

impl SimHost {
    /// Returns whether this host has never had the volumes, and expects none.
    fn knows_nothing(&self) -> bool {
        self.former_number.get().is_none()
            && self.journal().look(|state, possible| {
                possible.is_empty()
                    && state.volumes.is_empty()
                    && state.moved.is_empty()
                    && state.migrations.is_empty()
            })
    }

    fn is_attached_by(&self, owner: Place) -> bool {
        self.journal().look(|state, possible| {
            let is_there = |index| {
                let attached = state.attachment_of(volume_id(index));
                attached.is_some_and(|attached| attached.host == owner.host())
            };
            possible.is_empty()
                && state.unfinished().next().is_none()
                && (0..self.manner.block_sizes.len()).all(is_there)
        })
    }

    fn given_to(&self, place: Place, access: ExportAccess) -> Vec<Record> {
        let given = |index| {
            let given = GivenAttachment {
                host: place.host(),
                host_name: place.to_string(),
                access,
                is_confirmed: true,
                has_gone_there: false,
            };
            Record::AttachmentGiven { volume: volume_id(index), given: Box::new(given) }
        };
        (0..self.manner.block_sizes.len()).map(given).collect()
    }

    /// Makes durable that the volumes are attached here, and begins their lanes.
    fn offer_attached(self: &Rc<Self>, owner: Place, changing: Changing) -> impl Future<Output = ()> + use<> {
        let me = Rc::clone(self);
        async move {
            let _changing = changing;
            let first = me.next_migration().0;
            let count = me.manner.block_sizes.len();
            let attached = |index: usize| {
                let number = MigrationId(first + index as u64);
                Record::Attached(Box::new(AttachedVolume {
                    record: me.record_of_attached(index),
                    number,
                    host: owner.host(),
                    host_name: owner.to_string(),
                    has_left: false,
                }))
            };
            if me.journal().commit((0..count).map(attached).collect()).await.is_err() {
                return;
            }
            let state = me.journal().acknowledged();
            let lanes: Vec<_> = (0..count).map(|index| me.lane_of_state(&state, index)).collect();
            me.with_serving(|serving| serving.lanes = lanes);
            (0..count).for_each(|index| me.offer_to_clients(index));
        }
    }

    fn record_of_attached(&self, index: usize) -> VolumeRecord {
        let name = format!("v{index}");
        let place = ImagePlace::Nbd(format!("sterna://owner/{name}"));
        VolumeRecord {
            volume: volume_id(index),
            name,
            size_bytes: self.manner.geometries[index].size,
            block_size_bytes: self.manner.block_size(self.place, index).into(),
            image: ImageLocation { store: String::new(), place, format: ImageFormat::Raw },
            generation: chronicle::Generation(1),
            export: ExportSettings::default(),
        }
    }
}
