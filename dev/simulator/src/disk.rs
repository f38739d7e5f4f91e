//! A disk that reorders, fails, hangs, loses unflushed data, and lets a dead daemon's writes land late.
//!
//! ```text
//!   request ──► in flight ──(its latency; or a fault)──► medium: applied, volatile ──flush──► durable
//!                  │ the daemon is killed: it lands later, or never; the disk stays locked until then
//!                  │ power is cut: it lands by sectors, or not
//! ```
//! One [`SimDisk`] is one image in a store. Concurrent requests are applied in the order of their ends, as the
//! contract of [`BlockDevice`] allows.

mod medium;
mod operation;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::hash::{Hash as _, Hasher as _};
use std::rc::{Rc, Weak};
use std::task::{Poll, Waker};
use std::time::Duration;

use block::device::{check_range, check_write};
use block::{
    BlockDevice, Buffer, ByteRange, Change, Durability, Extent, Geometry, IoError, IoFuture, ZeroMode,
};
use lane::Volume;
use lane::stack::GateMode;
use migration::Phase;
use migration::stay::Look;
use rustix::io::Errno;

use crate::checker::owner::Permission;
use crate::faults::Fault;
use crate::random::Random;
use crate::world::World;

use operation::{Answer, Fate, Operation, Slot, What, answer, apply};

pub(crate) use medium::{Medium, SECTOR_BYTES};

/// Base error number of a failing owner's disk; its image's number is added.
const OWNER_ERRNO: i32 = 1000;
/// Base error number of a disk that fails requests other than its owner's.
pub(crate) const FOREIGN_ERRNO: i32 = 2000;
/// Owners' requests that take longer than this excuse a guest's wait.
const EXCUSED_AFTER: Duration = Duration::from_millis(10);
/// How late a killed daemon's write may land; 4.5 s were observed (hard case 12).
const GHOST_DELAY_MAX: Duration = Duration::from_secs(5);
/// Slower requests are not slowed down further.
const SLOWED_MAX: Duration = Duration::from_millis(50);
/// The longest time that a request hangs, unless it hangs for ever.
const HANG_MAX: Duration = Duration::from_secs(8);

const DISK_FAULTS: [Fault; 7] = [
    Fault::SourceSlow,
    Fault::SourceError,
    Fault::TargetSlow,
    Fault::TargetHang,
    Fault::TargetError,
    Fault::TargetFull,
    Fault::HandBack,
];

#[derive(Clone, Debug)]
pub(crate) struct DiskSettings {
    pub(crate) size_bytes: u64,
    pub(crate) sector_bytes: u32,
    pub(crate) latency: Duration,
    /// The percentage of requests that take up to thirty times as long.
    pub(crate) tail_percent: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Bystander,
    Source,
    Target,
}

pub(crate) struct SimDisk {
    me: Weak<Self>,
    world: Rc<World>,
    number: u32,
    settings: DiskSettings,
    random: RefCell<Random>,
    medium: RefCell<Medium>,
    in_flight: RefCell<BTreeMap<u64, Operation>>,
    next_operation: Cell<u64>,
    /// Tasks that wait for the lock, held as long as requests of a dead daemon are in flight.
    idle_waiters: RefCell<Vec<Waker>>,
    role: Cell<Role>,
    volume: RefCell<Weak<Volume>>,
    /// The daemon's permission by the journal; set by the host.
    permission: Cell<Permission>,
    lost_at: Cell<Option<Duration>>,
    /// The owner's next flush fails if it comes before this.
    next_flush_fails: Cell<Option<Duration>>,
}

impl SimDisk {
    pub(crate) fn new(world: &Rc<World>, number: u32, settings: DiskSettings, random: Random) -> Rc<Self> {
        Rc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            world: Rc::clone(world),
            number,
            medium: RefCell::new(Medium::new(settings.size_bytes, settings.sector_bytes)),
            settings,
            random: RefCell::new(random),
            in_flight: RefCell::default(),
            next_operation: Cell::default(),
            idle_waiters: RefCell::default(),
            role: Cell::new(Role::Bystander),
            volume: RefCell::default(),
            permission: Cell::new(Permission::Forbidden),
            lost_at: Cell::default(),
            next_flush_fails: Cell::default(),
        })
    }

    pub(crate) fn with_medium<T>(&self, look: impl FnOnce(&mut Medium) -> T) -> T {
        look(&mut self.medium.borrow_mut())
    }

    pub(crate) fn look(&self) -> Look {
        let mut hasher = std::hash::DefaultHasher::new();
        self.medium.borrow().current().hash(&mut hasher);
        let (which, state) = (self.number.to_le_bytes().to_vec(), hasher.finish().to_le_bytes().to_vec());
        Look { which, state, changed_at: 0, touched_at: Some(0) }
    }

    pub(crate) fn lost_at(&self) -> Option<Duration> {
        self.lost_at.get().filter(|_| self.medium.borrow().has_lost())
    }

    /// Lets the owner's next flush fail, if there is one soon.
    pub(crate) fn fail_next_flush(&self, within: Duration) {
        self.next_flush_fails.set(Some(self.world.now() + within));
    }

    pub(crate) fn set_role(&self, role: Role) {
        self.role.set(role);
    }

    pub(crate) fn set_volume(&self, volume: &Rc<Volume>) {
        *self.volume.borrow_mut() = Rc::downgrade(volume);
    }

    /// Returns whether it was handed a volume and has yet to prove that it answers, or failed to.
    fn is_on_trial(&self) -> bool {
        let trials = [Phase::Committing, Phase::TakingBack, Phase::Discarding];
        self.role.get() == Role::Target
            && self.world.phase().is_some_and(|phase| trials.contains(&phase))
            && !self.serves_guests()
    }

    /// Returns whether the migration has ended for this target: guests' requests go to it only.
    pub(crate) fn serves_guests(&self) -> bool {
        let is_open = |volume: Rc<Volume>| volume.gate().mode() == GateMode::Open;
        self.permission.get() == Permission::Owner && self.volume.borrow().upgrade().is_some_and(is_open)
    }

    pub(crate) fn set_permission(&self, permission: Permission) {
        self.permission.set(permission);
    }

    /// Resolves when no request of a dead daemon is in flight, so that the lock is free.
    pub(crate) fn idle(&self) -> impl Future<Output = ()> + use<> {
        let disk = Weak::upgrade(&self.me);
        poll_fn(move |context| match &disk {
            Some(disk) if !disk.in_flight.borrow().is_empty() => {
                disk.idle_waiters.borrow_mut().push(context.waker().clone());
                Poll::Pending
            }
            _ => Poll::Ready(()),
        })
    }

    pub(crate) fn daemon_killed(&self) {
        let mut random = self.random.borrow_mut();
        let now = self.world.now();
        self.in_flight.borrow_mut().retain(|_, operation| {
            operation.slot = None;
            !random.percent(20)
        });
        let mut rescheduled = Vec::new();
        for (id, operation) in self.in_flight.borrow_mut().iter_mut() {
            if operation.ends.is_none() || random.percent(40) {
                let ends = now + random.duration(Duration::from_micros(10), GHOST_DELAY_MAX);
                operation.ends = Some(ends);
                rescheduled.push((*id, ends));
            }
        }
        drop(random);
        for (id, ends) in rescheduled {
            self.schedule(id, ends);
        }
        self.wake_if_idle();
    }

    pub(crate) fn power_cut(&self) {
        let in_flight = std::mem::take(&mut *self.in_flight.borrow_mut());
        let mut random = self.random.borrow_mut();
        let mut medium = self.medium.borrow_mut();
        for operation in in_flight.into_values() {
            apply(&mut medium, &operation, 100);
        }
        medium.power_cut(&mut random);
        drop((random, medium));
        self.wake_if_idle();
    }

    pub(crate) fn restart(&self) {
        let in_flight = std::mem::take(&mut *self.in_flight.borrow_mut());
        let (mut random, mut medium) = (self.random.borrow_mut(), self.medium.borrow_mut());
        let mut slots = Vec::new();
        for operation in in_flight.into_values() {
            apply(&mut medium, &operation, 100);
            slots.extend(operation.slot.map(|slot| (slot, operation.asked_by)));
        }
        medium.power_cut(&mut random);
        drop((random, medium));
        for (slot, asked_by) in slots {
            slot.answer(Err(IoError::os("carry out", self.errno(asked_by))));
        }
        self.wake_if_idle();
    }

    pub(crate) fn afflict(&self, fault: Fault) {
        let ids: Vec<u64> = self.in_flight.borrow().keys().copied().collect();
        for id in ids {
            let mut in_flight = self.in_flight.borrow_mut();
            let Some(operation) = in_flight.get_mut(&id) else { continue };
            // A dead daemon's request lands or not, but has no caller: it would hang for ever.
            let is_asked_for = operation.slot.is_some();
            let applies = is_asked_for && self.can_strike(fault, &operation.what, operation.asked_by);
            if !applies || operation.ends.is_none() || !self.world.strikes(fault) {
                continue;
            }
            let before = operation.ends;
            let asked = (&operation.what, operation.asked_by);
            self.strike(fault, asked, &mut operation.ends, &mut operation.fate);
            let (after, now) = (operation.ends, self.world.now());
            drop(in_flight);
            if let Some(ends) = after.filter(|_| after != before) {
                self.schedule(id, ends.max(now));
            }
        }
    }

    pub(crate) fn release_hung(&self) {
        let now = self.world.now();
        let hung: Vec<u64> = {
            let mut in_flight = self.in_flight.borrow_mut();
            let hung = in_flight.iter_mut().filter(|(_, operation)| operation.ends.is_none());
            hung.map(|(id, operation)| {
                operation.ends = Some(now);
                *id
            })
            .collect()
        };
        hung.into_iter().for_each(|id| self.schedule(id, now));
    }

    fn errno(&self, asked_by: Permission) -> Errno {
        // A target on trial owns its volume, but its faults must stay invisible: it may still give the volume back.
        let is_owners = asked_by == Permission::Owner && !self.is_on_trial();
        let kind = if is_owners { OWNER_ERRNO } else { FOREIGN_ERRNO };
        Errno::from_raw_os_error(kind + i32::try_from(self.number).unwrap_or(0))
    }
}

impl SimDisk {
    fn submit(&self, what: What) -> Rc<Slot> {
        let permission = self.permission.get();
        if !permission.allows(what.access()) {
            let (number, role) = (self.number, self.role.get());
            self.world.violated("owner", || {
                format!(
                    "a {} of image {number} ({role:?}), which the journal makes {permission:?}",
                    what.name()
                )
            });
        }
        let slot = Rc::<Slot>::default();
        let now = self.world.now();
        let mut ends = Some(now + self.draw_latency(&what));
        let mut fate = Fate::Succeeds;
        for fault in DISK_FAULTS {
            if self.can_strike(fault, &what, permission) && self.world.strikes(fault) {
                self.strike(fault, (&what, permission), &mut ends, &mut fate);
            }
        }
        let is_owners_flush = matches!(what, What::Flush { .. }) && permission == Permission::Owner;
        if is_owners_flush && self.next_flush_fails.take().is_some_and(|until| now <= until) {
            let errno = self.errno(permission);
            fate = Fate::Fails { errno, applied_percent: 0, struck_by: Fault::TargetError };
        }
        let (era, slot_of_it) = (self.world.era(), Some(Rc::clone(&slot)));
        let operation =
            Operation { what, began: now, era, ends, fate, asked_by: permission, slot: slot_of_it };
        let id = self.next_operation.get();
        self.next_operation.set(id + 1);
        self.in_flight.borrow_mut().insert(id, operation);
        if let Some(ends) = ends {
            self.schedule(id, ends);
        }
        slot
    }

    fn schedule(&self, id: u64, ends: Duration) {
        let me = Weak::clone(&self.me);
        self.world.clock.at(ends, move || {
            if let Some(disk) = me.upgrade() {
                disk.finish(id);
            }
        });
    }

    fn draw_latency(&self, what: &What) -> Duration {
        let mut random = self.random.borrow_mut();
        let base = self.settings.latency;
        let mut latency = base + Duration::from_nanos(random.below(base.as_nanos() as u64));
        if matches!(what, What::Flush { .. }) {
            latency *= 4;
        }
        if random.percent(self.settings.tail_percent) {
            latency *= 1 + random.below(30) as u32;
        }
        latency
    }

    fn can_strike(&self, fault: Fault, what: &What, asked_by: Permission) -> bool {
        let is_target = self.role.get() == Role::Target;
        match fault {
            // A guest sees an unreadable block that only the reservoir has: that is not simulated.
            Fault::SourceError if asked_by == Permission::Reservoir => false,
            Fault::TargetError if is_pulled(what, asked_by) => false,
            Fault::SourceError | Fault::SourceSlow => self.role.get() == Role::Source,
            Fault::TargetError | Fault::TargetHang | Fault::TargetSlow => is_target,
            Fault::TargetFull => {
                is_target && asked_by == Permission::Target && matches!(what, What::Write { .. })
            }
            Fault::HandBack => self.is_on_trial() && matches!(what, What::Read(..)),
            _ => false,
        }
    }

    /// Lets a fault strike a request, which ends later (`None`: never), or badly.
    fn strike(
        &self,
        fault: Fault,
        (what, asked_by): (&What, Permission),
        ends: &mut Option<Duration>,
        fate: &mut Fate,
    ) {
        let mut random = self.random.borrow_mut();
        let now = self.world.now();
        match fault {
            Fault::SourceSlow | Fault::TargetSlow => {
                self.world.struck(fault);
                // A hanging request is slow enough.
                if let Some(ends) = ends.as_mut().filter(|ends| **ends - now < SLOWED_MAX) {
                    *ends = now + (*ends - now) * (20 + random.below(180) as u32);
                }
            }
            Fault::TargetHang => {
                self.world.struck(fault);
                // An owner that hangs for ever is only to blame itself; likewise reads of its guests at another host.
                let is_owners = asked_by == Permission::Owner || is_pulled(what, asked_by);
                let for_ever = !is_owners && random.percent(30);
                let hang = random.duration(Duration::from_millis(100), HANG_MAX);
                *ends = (!for_ever).then_some(now + hang);
            }
            // Counted when it fails.
            _ => {
                let errno = if fault == Fault::TargetFull { Errno::NOSPC } else { self.errno(asked_by) };
                *fate = Fate::Fails { errno, applied_percent: random.below(101), struck_by: fault };
            }
        }
    }

    fn finish(&self, id: u64) {
        let now = self.world.now();
        let due = self.in_flight.borrow().get(&id).is_some_and(|operation| operation.ends == Some(now));
        if !due {
            return;
        }
        let Some(mut operation) = self.in_flight.borrow_mut().remove(&id) else { return };
        let result = match operation.fate {
            Fate::Succeeds => {
                let mut medium = self.medium.borrow_mut();
                apply(&mut medium, &operation, 100);
                Ok(answer(&mut medium, &mut operation.what))
            }
            Fate::Fails { errno, applied_percent, struck_by } => {
                if operation.is_awaited() {
                    self.world.struck_late(struck_by, operation.era);
                } else {
                    // A read whose request has already failed by another part: no phase meets that.
                    self.world.struck_in(struck_by, None);
                }
                let is_owners_flush =
                    matches!(operation.what, What::Flush { .. }) && operation.asked_by == Permission::Owner;
                // A kernel tells a failed flush to its caller only. No later daemon can know what it has lost (decision 0049),
                // so no loss of that kind is simulated.
                if !(is_owners_flush && operation.slot.is_none()) {
                    apply(&mut self.medium.borrow_mut(), &operation, applied_percent);
                }
                if is_owners_flush && operation.slot.is_some() {
                    self.lost_at.set(Some(now));
                }
                // A failed flush that outlasts a handover means that the owner's changes may be lost, too.
                let outlasts = matches!(operation.what, What::Flush { .. })
                    && self.permission.get() == Permission::Owner
                    && errno != Errno::NOSPC;
                let errno = if outlasts { self.errno(Permission::Owner) } else { errno };
                Err(IoError::os(operation.what.name(), errno))
            }
        };
        let took = now - operation.began;
        if operation.asked_by == Permission::Owner && took > EXCUSED_AFTER {
            self.world.excuses.borrow_mut().add(operation.began, now);
        }
        self.world.note(operation.what.name(), u64::from(self.number), u64::from(result.is_ok()));
        if let Some(slot) = operation.slot {
            slot.answer(result);
        }
        self.wake_if_idle();
    }

    fn wake_if_idle(&self) {
        if self.in_flight.borrow().is_empty() {
            let waiters = std::mem::take(&mut *self.idle_waiters.borrow_mut());
            waiters.into_iter().for_each(Waker::wake);
        }
    }

    async fn carry_out(&self, what: What) -> Result<Answer, IoError> {
        let slot = self.submit(what);
        poll_fn(move |context| match slot.result.take() {
            Some(result) => Poll::Ready(result),
            None => {
                slot.waker.set(Some(context.waker().clone()));
                Poll::Pending
            }
        })
        .await
    }
}

impl BlockDevice for SimDisk {
    fn geometry(&self) -> Geometry {
        let DiskSettings { size_bytes, sector_bytes, .. } = self.settings;
        Geometry { size: size_bytes, alignment: sector_bytes, read_only: false, discards: true }
    }

    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async move {
            check_range(&self.geometry(), ByteRange::new(offset, buffer.len() as u64))?;
            match self.carry_out(What::Read(offset, buffer)).await? {
                Answer::Buffer(buffer) => Ok(buffer),
                _ => Err(IoError::Unsupported),
            }
        })
    }

    fn change(&self, change: Change) -> IoFuture<'_, ()> {
        Box::pin(async move {
            check_write(&self.geometry(), change.range())?;
            let what = match change {
                Change::Write(offset, data, durability) => What::Write {
                    first_sector: (offset / SECTOR_BYTES) as usize,
                    tokens: medium::tokens(data.as_slice()),
                    durability,
                },
                Change::Discard(range) => {
                    What::Zero { range, unmap: ZeroMode::MayUnmap, durability: Durability::Volatile }
                }
                Change::Zero(range, mode, durability) => What::Zero { range, unmap: mode, durability },
            };
            self.carry_out(what).await.map(drop)
        })
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(async move {
            let entries = self.medium.borrow().entries();
            self.carry_out(What::Flush { entries }).await.map(drop)
        })
    }

    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        Box::pin(async move {
            check_range(&self.geometry(), range)?;
            match self.carry_out(What::Allocation(range)).await? {
                Answer::Extents(extents) => Ok(extents),
                _ => Err(IoError::Unsupported),
            }
        })
    }
}
/// Returns whether the host that lacks these blocks reads the target; returning data is only written.
fn is_pulled(what: &What, asked_by: Permission) -> bool {
    matches!(asked_by, Permission::Refilled | Permission::Reservoir) && matches!(what, What::Read(..))
}
