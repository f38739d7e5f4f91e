//! A host's records of residencies: durable once answered; after a crash, any part of the rest is there.
//!
//! ```text
//!   mark ─────► in flight ──► durable, answered        marks in any order, the rest one after the other
//!   keep, forget ──┘  └ killed, power cut: done or not, each mark by itself
//! ```
//! Only the files are simulated. The product decides which of them to trust, their order, and which marks an open file
//! is known to hold.

use std::cell::{Cell, RefCell};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::rc::{Rc, Weak};
use std::time::Duration;

use chronicle::{BlockRange, Epoch, Kept, ReplicaOf};
use futures_channel::oneshot;
use lane::{Keeper, LaneFuture, NotDurable};
use migration::StayKey;
use migration::filling::{self, LogEntry, LogFault, PresenceFile, PresenceWrite, UnitMap};
use migration::stay::life::SLOT_BYTES;
use migration::stay::opening::{self, Found, OpeningStep};
use migration::stay::{ImageRecord, Lives, Look, OpenMarks, vouches};

use crate::random::Random;
use crate::world::{Stop, World};

const LATENCY_MIN: Duration = Duration::from_micros(20);
/// The longest time of a write: one of these for each host.
const LATENCIES_MAX: [Duration; 3] =
    [Duration::from_millis(1), Duration::from_millis(20), Duration::from_millis(80)];
/// The percentage of writes to a presence file that fail.
const PRESENCE_FAULTS: u64 = 3;

pub(crate) struct SimChronicles {
    me: Weak<Self>,
    world: Rc<World>,
    random: RefCell<Random>,
    latency_max: Duration,
    files: RefCell<BTreeMap<StayKey, Files>>,
    /// The daemon's open files of marks, which end with it.
    open: RefCell<OpenMarks<BTreeSet<u64>>>,
    /// The daemon's presence files, which end with it.
    presence: RefCell<BTreeMap<StayKey, PresenceFile>>,
    boot: Cell<u8>,
    /// No image changes while its daemon is down, and each sign is durable.
    lives: RefCell<Lives>,
    under_way: RefCell<BTreeMap<u64, Work>>,
    next: Cell<u64>,
    /// When the last of the ordered writes will be done.
    busy_until: Cell<Duration>,
    /// The folder is full until then.
    full_until: Cell<Duration>,
    /// The residencies that were refused a mark since it became full.
    refused: RefCell<BTreeSet<StayKey>>,
    wait_max: Duration,
    copy_forgotten: Box<dyn Fn()>,
}

#[derive(Default)]
struct Files {
    kept: Option<Vec<u8>>,
    copies: BTreeSet<ReplicaOf>,
    marks: BTreeMap<Epoch, BTreeSet<u64>>,
    image: Option<Vec<u8>>,
    /// The missing units, in the product's format.
    presence: Option<Vec<u8>>,
    /// How much of it would survive a power cut.
    presence_synced: usize,
}

enum Work {
    /// An entry to append, or, with a size, one that replaces the file.
    Presence(StayKey, Option<u64>, Box<LogEntry>),
    ForgetPresence(StayKey),
    Mark(StayKey, Epoch, Vec<BlockRange>),
    Keep(StayKey, Box<Kept>),
    Forget(StayKey, Epoch),
    Doubt(StayKey),
}

impl SimChronicles {
    pub(super) fn new(
        world: &Rc<World>,
        mut random: Random,
        wait_max: Duration,
        copy_forgotten: impl Fn() + 'static,
    ) -> Rc<Self> {
        let latency_max = random.pick(&LATENCIES_MAX);
        Rc::new_cyclic(|me| Self {
            latency_max,
            me: Weak::clone(me),
            world: Rc::clone(world),
            random: RefCell::new(random),
            files: RefCell::default(),
            open: RefCell::default(),
            presence: RefCell::default(),
            boot: Cell::default(),
            lives: RefCell::new(Lives::begin(&[], 0)),
            under_way: RefCell::default(),
            next: Cell::default(),
            busy_until: Cell::default(),
            full_until: Cell::default(),
            refused: RefCell::default(),
            wait_max,
            copy_forgotten: Box::new(copy_forgotten),
        })
    }

    pub(super) fn open_stay(&self, key: StayKey, look: Look) -> Option<Kept> {
        let (kept, record) = {
            let mut files = self.files.borrow_mut();
            files.retain(|of, _| of.volume != key.volume || of.stay == key.stay);
            let files = files.entry(key).or_default();
            (self.kept(key, files), files.image.as_ref().and_then(|bytes| ImageRecord::decode(bytes, key)))
        };
        if kept.is_none() {
            self.forget_all(key);
        }
        let opening =
            opening::open(Found { kept, record, look: Some(look), lives: self.lives.borrow().clone() });
        for step in opening.steps {
            match step {
                OpeningStep::Forget => self.forget_all(key),
                OpeningStep::Record(record) => self.record_image(key, &record),
            }
        }
        opening.believed
    }

    fn kept(&self, key: StayKey, files: &Files) -> Option<Kept> {
        match Kept::decode(files.kept.as_ref()?, key.volume.0, key.stay) {
            Ok(kept) => {
                let runs = |blocks: &BTreeSet<u64>| {
                    blocks.iter().map(|block| BlockRange::new(*block, block + 1)).collect()
                };
                Some(kept.with_marks(files.marks.iter().map(|(epoch, blocks)| (*epoch, runs(blocks)))))
            }
            Err(error) => {
                self.world.violated("chronicle", || error.to_string());
                None
            }
        }
    }

    pub(super) fn note_image(&self, key: StayKey, look: Look) {
        let known = self.files.borrow().get(&key).and_then(|files| files.image.clone());
        let known = known.and_then(|bytes| ImageRecord::decode(&bytes, key));
        self.record_image(key, &opening::also_in_use(known, Some(look), self.lives.borrow().run()));
    }

    /// Records the appearance of an image that was closed in order; if that fails, deletes the record.
    pub(super) fn close_image(&self, key: StayKey, look: Look) {
        let mut files = self.files.borrow_mut();
        let image = &mut files.entry(key).or_default().image;
        let known = image.as_ref().and_then(|bytes| ImageRecord::decode(bytes, key));
        let Some(record) = opening::closed(known, Some(look)) else { return };
        *image = (!self.is_full()).then(|| record.encode(key));
    }

    /// Returns whether the image that a volume leaves equals the volume.
    pub(super) fn vouches(&self, key: StayKey) -> bool {
        let files = self.files.borrow();
        let image = files.get(&key).and_then(|files| files.image.as_ref());
        vouches(image.and_then(|bytes| ImageRecord::decode(bytes, key)).as_ref())
    }

    fn record_image(&self, key: StayKey, record: &ImageRecord) {
        if !self.is_full() {
            self.files.borrow_mut().entry(key).or_default().image = Some(record.encode(key));
        }
    }

    pub(super) fn fill_for(&self, window: Duration) {
        self.refused.borrow_mut().clear();
        self.full_until.set(self.world.now() + window);
    }

    pub(super) fn is_full(&self) -> bool {
        self.world.now() < self.full_until.get()
    }

    fn boot(&self) -> [u8; 16] {
        [self.boot.get(); 16]
    }

    pub(super) fn crash(&self, how: Stop) {
        let mut in_order_goes_on = true;
        for work in self.under_way.take().into_values() {
            let is_done = self.random.borrow_mut().percent(50);
            if matches!(work, Work::Mark(..)) {
                if is_done {
                    // The result has no receiver.
                    let _ = self.apply(work);
                }
            } else {
                // N.B. the work after the one that was cut off had not begun.
                let was_cut_off = !in_order_goes_on;
                in_order_goes_on &= is_done;
                if in_order_goes_on {
                    let _ = self.apply(work);
                } else if let Work::Presence(key, None, entry) = work
                    && !was_cut_off
                {
                    self.tear_presence(key, &entry);
                }
            }
        }
        if how == Stop::PowerCut {
            self.boot.set(self.boot.get().wrapping_add(1));
            self.files.borrow_mut().values_mut().for_each(|files| self.lose_what_was_noted(files));
        }
        let next = self.next_life();
        self.lives.replace(next);
        self.open.take();
        self.presence.take();
        self.busy_until.set(Duration::ZERO);
    }

    pub(super) fn lives(&self) -> Lives {
        self.lives.borrow().clone()
    }

    fn next_life(&self) -> Lives {
        let (at, bytes) = self.lives.borrow().encode();
        let mut file = vec![0; SLOT_BYTES * 2];
        if let Some(slot) = file.get_mut(at as usize..).and_then(|rest| rest.get_mut(..bytes.len())) {
            slot.copy_from_slice(&bytes);
        }
        Lives::begin(&file, 0)
    }

    fn begin(&self, work: Work) -> LaneFuture<Result<(), NotDurable>> {
        let number = self.next.get();
        self.next.set(number + 1);
        let mut latency = self.random.borrow_mut().duration(LATENCY_MIN, self.latency_max);
        if !matches!(work, Work::Mark(..)) {
            let now = self.world.now();
            let ends = now.max(self.busy_until.get()) + latency;
            self.busy_until.set(ends);
            latency = ends - now;
        }
        self.under_way.borrow_mut().insert(number, work);
        let (done, ended) = oneshot::channel();
        let me = Weak::clone(&self.me);
        self.world.clock.after(latency, move || {
            let Some(me) = me.upgrade() else { return };
            let work = me.under_way.borrow_mut().remove(&number);
            if let Some(work) = work {
                // A mark forgets nothing, and most writes are marks.
                let before = (!matches!(work, Work::Mark(..))).then(|| me.copies());
                let _ = done.send(me.apply(work));
                if before.is_some_and(|before| !before.is_subset(&me.copies())) {
                    (me.copy_forgotten)();
                }
            }
        });
        Box::pin(async move {
            match ended.await {
                Ok(result) => result,
                // The daemon is gone, and with it the waiting task.
                Err(_) => std::future::pending().await,
            }
        })
    }

    fn apply(&self, work: Work) -> Result<(), NotDurable> {
        if let Work::Mark(key, ..) = &work {
            self.excuse_once(*key);
        }
        // The space of a presence file is reserved when it is begun.
        let is_reserved = matches!(
            work,
            Work::Forget(..) | Work::Doubt(_) | Work::ForgetPresence(_) | Work::Presence(_, None, _)
        );
        if self.is_full() && !is_reserved {
            return Err(NotDurable { detail: "no space".to_owned() });
        }
        match work {
            Work::Mark(key, epoch, blocks) => self.mark(key, epoch, &blocks),
            Work::Keep(key, kept) => {
                self.world.note("chronicle kept", kept.through.0, kept.replicas.len() as u64);
                let mut files = self.files.borrow_mut();
                let files = files.entry(key).or_default();
                files.kept = Some(kept.encode(key.volume.0, key.stay));
                files.copies = kept.replicas.keys().copied().collect();
                files.marks.retain(|epoch, _| *epoch > kept.through);
            }
            Work::Forget(key, through) => self.forget_through(key, through),
            Work::Presence(key, size_bytes, entry) => self.add_to_presence(key, size_bytes, &entry)?,
            Work::ForgetPresence(key) => {
                self.files.borrow_mut().entry(key).or_default().presence = None;
                self.presence.borrow_mut().remove(&key);
            }
            Work::Doubt(key) => {
                let mut files = self.files.borrow_mut();
                let image = &mut files.entry(key).or_default().image;
                // In a full folder the image record is deleted, which means the same.
                *image = match self.is_full() {
                    false => Some(ImageRecord::Failed.encode(key)),
                    true => image.as_ref().map(|_| Vec::new()),
                };
            }
        }
        Ok(())
    }

    /// Excuses the first refused mark of a residency in a full folder: then the copies are given up, and no other write waits.
    fn excuse_once(&self, key: StayKey) {
        if self.is_full() && self.refused.borrow_mut().insert(key) {
            let now = self.world.now();
            self.world.excuses.borrow_mut().add(now, now + self.wait_max);
        }
    }

    fn forget_all(&self, key: StayKey) {
        self.forget_through(key, Epoch(u64::MAX));
    }

    fn forget_through(&self, key: StayKey, through: Epoch) {
        let mut files = self.files.borrow_mut();
        let files = files.entry(key).or_default();
        files.kept = None;
        files.copies.clear();
        files.marks.retain(|epoch, _| *epoch > through);
    }

    fn add_to_presence(
        &self,
        key: StayKey,
        size_bytes: Option<u64>,
        entry: &LogEntry,
    ) -> Result<(), NotDurable> {
        let write = self.presence_write(key, size_bytes, entry)?;
        let fails = size_bytes.is_none() && self.random.borrow_mut().percent(PRESENCE_FAULTS);
        let mut files = self.files.borrow_mut();
        let files = files.entry(key).or_default();
        if fails {
            self.presence.borrow_mut().get_mut(&key).into_iter().for_each(PresenceFile::failed);
            // N.B. the page cache keeps what was noted: a kill right after a failed sync that drops it is outside the failure model.
            return Err(NotDurable { detail: "a disk's fault".to_owned() });
        }
        let bytes = files.presence.get_or_insert_default();
        let is_synced = matches!(write, PresenceWrite::Anew(_)) || !matches!(entry, LogEntry::Noted { .. });
        match write {
            PresenceWrite::Anew(content) => *bytes = content,
            PresenceWrite::Append { at, bytes: added } => {
                bytes.truncate(at as usize);
                bytes.extend(added);
            }
        }
        let limit = self.presence.borrow().get(&key).map_or(0, PresenceFile::limit);
        if bytes.len() as u64 > limit {
            self.world.violated("presence", || format!("{} bytes, and {limit} are reserved", bytes.len()));
        }
        if is_synced {
            files.presence_synced = bytes.len();
        }
        Ok(())
    }

    fn presence_write(
        &self,
        key: StayKey,
        size_bytes: Option<u64>,
        entry: &LogEntry,
    ) -> Result<PresenceWrite, NotDurable> {
        let mut open = self.presence.borrow_mut();
        let small = |file: PresenceFile| file.limited_to(0);
        if let Some(size_bytes) = size_bytes {
            open.insert(key, small(PresenceFile::begin(size_bytes, key.bytes(), self.boot())));
        }
        if let Entry::Vacant(unread) = open.entry(key) {
            let files = self.files.borrow();
            let bytes = files.get(&key).and_then(|files| files.presence.as_ref());
            let bytes = bytes.ok_or_else(|| NotDurable { detail: "nothing was begun".to_owned() })?;
            let found = PresenceFile::found(bytes, size_of(bytes), key.bytes(), self.boot());
            unread.insert(small(found.map_err(|error| NotDurable { detail: error.to_string() })?));
        }
        let file = open.get_mut(&key).ok_or_else(|| NotDurable { detail: "no file".to_owned() })?;
        file.add(entry.clone()).map_err(|error| NotDurable { detail: error.to_string() })
    }

    /// Loses unsynced data, in part.
    fn lose_what_was_noted(&self, files: &mut Files) {
        if let Some(bytes) = files.presence.as_mut().filter(|bytes| bytes.len() > files.presence_synced) {
            let lost = self.random.borrow_mut().below((bytes.len() - files.presence_synced) as u64 + 1);
            bytes.truncate(bytes.len() - lost as usize);
        }
    }

    fn tear_presence(&self, key: StayKey, entry: &LogEntry) {
        let Ok(PresenceWrite::Append { at, mut bytes }) = self.presence_write(key, None, entry) else {
            return;
        };
        let mut files = self.files.borrow_mut();
        let Some(file) = &mut files.entry(key).or_default().presence else { return };
        bytes.truncate(self.random.borrow_mut().below(bytes.len() as u64) as usize);
        file.truncate(at as usize);
        file.extend(bytes);
    }

    /// Returns the missing blocks as a start finds them; `None`: unknown.
    pub(super) fn missing(&self, key: StayKey) -> Option<UnitMap> {
        let files = self.files.borrow();
        let bytes = files.get(&key)?.presence.as_ref()?;
        match replay(bytes, key, self.boot()) {
            Ok((missing, ..)) => Some(missing),
            Err(error) => {
                self.world.violated("presence", || error.to_string());
                None
            }
        }
    }

    fn copies(&self) -> BTreeSet<(StayKey, ReplicaOf)> {
        let files = self.files.borrow();
        files.iter().flat_map(|(key, files)| files.copies.iter().map(|of| (*key, *of))).collect()
    }

    /// Adds a mark, unless an open file is known to hold it.
    fn mark(&self, key: StayKey, epoch: Epoch, blocks: &[BlockRange]) {
        let mut files = self.files.borrow_mut();
        let file = files.entry(key).or_default().marks.entry(epoch).or_default();
        let mut open = self.open.borrow_mut();
        let Ok(known) = open.of(key, epoch, || Ok::<_, Infallible>(file.clone()));
        for block in
            blocks.iter().flat_map(BlockRange::iter).filter(|block| known.insert(block.0)).collect::<Vec<_>>()
        {
            file.insert(block.0);
        }
    }
}

impl Keeper for SimChronicles {
    fn mark(
        &self,
        key: StayKey,
        epoch: Epoch,
        blocks: Vec<BlockRange>,
    ) -> LaneFuture<Result<(), NotDurable>> {
        self.begin(Work::Mark(key, epoch, blocks))
    }

    fn keep(&self, key: StayKey, kept: Kept) -> LaneFuture<Result<(), NotDurable>> {
        self.begin(Work::Keep(key, Box::new(kept)))
    }

    fn forget(&self, key: StayKey, through: Epoch) -> LaneFuture<Result<(), NotDurable>> {
        self.begin(Work::Forget(key, through))
    }

    fn doubt(&self, key: StayKey) -> LaneFuture<Result<(), NotDurable>> {
        self.begin(Work::Doubt(key))
    }

    fn begin_presence(
        &self,
        key: StayKey,
        size_bytes: u64,
        entry: LogEntry,
    ) -> LaneFuture<Result<(), NotDurable>> {
        self.begin(Work::Presence(key, Some(size_bytes), Box::new(entry)))
    }

    fn add_presence(&self, key: StayKey, _: u64, entry: LogEntry) -> LaneFuture<Result<(), NotDurable>> {
        self.begin(Work::Presence(key, None, Box::new(entry)))
    }

    fn note_presence(
        &self,
        key: StayKey,
        _: u64,
        runs: Vec<BlockRange>,
    ) -> LaneFuture<Result<(), NotDurable>> {
        let entry = LogEntry::Noted { boot: self.boot(), runs };
        self.begin(Work::Presence(key, None, Box::new(entry)))
    }

    fn forget_presence(&self, key: StayKey) -> LaneFuture<Result<(), NotDurable>> {
        self.begin(Work::ForgetPresence(key))
    }
}

fn size_of(presence: &[u8]) -> u64 {
    presence.get(8..16).and_then(|size| Some(u64::from_le_bytes(size.try_into().ok()?))).unwrap_or(0)
}

fn replay(bytes: &[u8], key: StayKey, boot: [u8; 16]) -> Result<(UnitMap, usize, u64), LogFault> {
    filling::replay(bytes, size_of(bytes), key.bytes(), boot)
}
