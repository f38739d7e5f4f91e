//! What guests write to a group of volumes, for the standby of the group.
//!
//! ```text
//!   lane of volume 0 ─┐ a write asks ─────► Group: one lock ─► Replication, the machine ─► passes, or waits
//!   lane of volume 1 ─┘ a write has ended ─►   └ keeps its payload in memory, under its epoch
//!                                              └► Task: messages, reads, flushes, records ─► the control plane carries them out
//! ```
//! The lock is the barrier of a cut: a write asks before it is submitted and reports before its guest is answered. So a cut under
//! the lock ends the epoch of all volumes at once, and no guest waits for it (design §6 "Standby").

mod kept;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use block::{Change, IoError};
use chronicle::{BlockCount, BlockRange, BlockSize, Epoch, LayeredBitmap};
use futures_channel::{mpsc, oneshot};
use standby::owner::{Action, Event, Outcome, ReadId, Replication, State, WriteId, WriteKind};
use standby::record::OwnerRecord;
use standby::wire::{Content, StreamId, ToStandby};
use standby::{Place, VolumeIndex};

use self::kept::Kept;

/// Returns the time since an origin that all lanes of the group and the control plane share.
pub type Clock = Arc<dyn Fn() -> Duration + Send + Sync>;

/// How long a cut is put off while writes that began before the machine are in flight.
const EARLY_WRITES_POLL: Duration = Duration::from_millis(20);

/// A task of a group for the control plane.
#[derive(Debug)]
pub enum Task {
    /// Send a message, with its payload.
    Send(StreamId, ToStandby, Vec<u8>),
    /// Read blocks, send them as an extent, then report [`Event::ReadEnded`].
    SendFromDisk {
        /// The stream.
        stream: StreamId,
        /// The number of the read.
        read: ReadId,
        /// The volume.
        volume: VolumeIndex,
        /// The blocks.
        blocks: BlockRange,
    },
    /// Flush all stores, and report the result.
    FlushStores,
    /// Make a record durable, and report [`Event::Durable`].
    MakeDurable(u64, OwnerRecord),
    /// The chronicles may forget what [`Group::unforgotten`] does not have.
    Forget,
    /// The state has changed.
    Tell(State),
    /// A write waits: [`Group::next_timeout`] may be earlier.
    Wake,
    /// A volume has left this host: nothing is captured any more.
    Left,
}

/// The writes of a group of volumes, shared by their lanes and the control plane.
pub struct Group {
    state: Mutex<GroupState>,
    clock: Clock,
    tasks: mpsc::UnboundedSender<Task>,
}

/// The place of a volume in a group.
#[derive(Clone)]
pub struct Member {
    group: Arc<Group>,
    volume: VolumeIndex,
}

struct GroupState {
    stage: Stage,
    last_write: u64,
    /// Writes that are in flight and were passed before the machine began.
    early: BTreeSet<WriteId>,
    /// Writes that wait for the machine.
    waiting: BTreeMap<WriteId, Waiting>,
    kept: Kept,
    /// The write that asks now.
    asking: Option<Asking>,
    /// Blocks of which writes are noted.
    watched: Option<Watched>,
}

/// Blocks of a volume, and the writes to them since they are watched.
struct Watched {
    volume: VolumeIndex,
    blocks: BlockRange,
    written: Vec<BlockRange>,
}

/// A write that waits for the machine.
struct Waiting {
    volume: VolumeIndex,
    blocks: BlockRange,
    passes: oneshot::Sender<()>,
}

/// A write that asks, and whether it was passed at once.
struct Asking {
    write: WriteId,
    volume: VolumeIndex,
    blocks: BlockRange,
    is_passed: bool,
}

enum Stage {
    /// Lanes join. What passes is only noted.
    Joining(Vec<LayeredBitmap>),
    Running(Box<Replication>),
    /// Nothing is captured.
    Ended,
}

impl Group {
    /// Makes a group of volumes of these sizes, whose lanes can join. Returns the tasks that it gives.
    pub fn new(sizes: &[BlockCount], clock: Clock) -> (Arc<Self>, mpsc::UnboundedReceiver<Task>) {
        let (tasks, received) = mpsc::unbounded();
        let seen = sizes.iter().map(|size| LayeredBitmap::new(*size)).collect();
        let state = GroupState {
            stage: Stage::Joining(seen),
            last_write: 0,
            early: BTreeSet::new(),
            waiting: BTreeMap::new(),
            kept: Kept::default(),
            asking: None,
            watched: None,
        };
        (Arc::new(Self { state: Mutex::new(state), clock, tasks }), received)
    }

    /// Returns the place of a volume, for its lane.
    pub fn member(self: &Arc<Self>, volume: VolumeIndex) -> Member {
        Member { group: Arc::clone(self), volume }
    }

    /// Begins to capture. `machine` gets the blocks of each volume that were written while lanes joined.
    ///
    /// Returns whether it has begun: a volume may have left meanwhile.
    pub fn begin(&self, machine: impl FnOnce(Vec<LayeredBitmap>) -> Replication) -> bool {
        let mut state = self.lock();
        let Stage::Joining(seen) = &mut state.stage else { return false };
        let seen = std::mem::take(seen);
        state.stage = Stage::Running(Box::new(machine(seen)));
        self.carry_out(&mut state, None);
        true
    }

    /// Ends the capture. Writes that wait pass.
    pub fn end(&self) {
        let mut state = self.lock();
        state.stage = Stage::Ended;
        state.kept = Kept::default();
        for waits in std::mem::take(&mut state.waiting).into_values() {
            // A write whose client has gone does not wait.
            let _ = waits.passes.send(());
        }
    }

    /// Hands an event to the machine.
    pub fn handle(&self, event: Event) {
        let mut state = self.lock();
        let now = (self.clock)();
        match &mut state.stage {
            Stage::Running(machine) => machine.handle_event(now, event),
            Stage::Joining(seen) => {
                if let Event::Grown { volume, size } = event
                    && let Some(seen) = seen.get_mut(volume.index())
                {
                    seen.grow(size);
                }
            }
            Stage::Ended => {}
        }
        self.carry_out(&mut state, None);
    }

    /// Hands the present time to the machine.
    pub fn handle_timeout(&self) {
        let mut state = self.lock();
        let now = (self.clock)();
        // What an early write leaves on the disk is not known before it has ended.
        if !state.early.is_empty() {
            return;
        }
        if let Stage::Running(machine) = &mut state.stage {
            machine.handle_timeout(now);
            self.carry_out(&mut state, None);
        }
    }

    /// Returns when [`Group::handle_timeout`] is due.
    pub fn next_timeout(&self) -> Duration {
        let state = self.lock();
        let now = (self.clock)();
        match &state.stage {
            Stage::Running(machine) if state.early.is_empty() => machine.poll_timeout().0,
            Stage::Running(_) | Stage::Joining(_) | Stage::Ended => now + EARLY_WRITES_POLL,
        }
    }

    /// Looks at the machine; `None`: it does not run.
    pub fn look<T>(&self, look: impl FnOnce(&Replication, Duration) -> T) -> Option<T> {
        let state = self.lock();
        match &state.stage {
            Stage::Running(machine) => Some(look(machine, (self.clock)())),
            Stage::Joining(_) | Stage::Ended => None,
        }
    }

    /// Returns the blocks of a volume that its chronicle must not forget at this instant: the standby lacks them, or a power cut
    /// may take them from the volume's store. `None`: the machine does not run.
    pub fn unforgotten(&self, volume: VolumeIndex) -> Option<LayeredBitmap> {
        self.look(|machine, _| machine.unforgotten().into_iter().nth(volume.index())).flatten()
    }

    /// Notes the writes to these blocks from now on, instead of others. Returns the blocks of the volume that the standby lacks;
    /// `None` if the machine does not run.
    pub fn watch(&self, volume: VolumeIndex, blocks: BlockRange) -> Option<LayeredBitmap> {
        let mut state = self.lock();
        let Stage::Running(machine) = &state.stage else { return None };
        let lacks = machine.unforgotten().into_iter().nth(volume.index())?;
        state.watched = Some(Watched { volume, blocks, written: Vec::new() });
        Some(lacks)
    }

    /// Ends that. Returns the blocks that were written, or that writes have asked for.
    pub fn unwatch(&self) -> Vec<BlockRange> {
        self.lock().watched.take().map(|watched| watched.written).unwrap_or_default()
    }

    /// Carries out the machine's actions: those about memory here, the rest as tasks. `payload` is that of a write that has just
    /// ended, with its first block.
    fn carry_out(&self, state: &mut GroupState, payload: Option<(&[u8], u64)>) {
        loop {
            let Stage::Running(machine) = &mut state.stage else { return };
            let Some(action) = machine.poll_action() else { return };
            match action {
                Action::OpenGates { .. } => {}
                Action::Pass(write) => {
                    let open = machine.open_epoch();
                    if let Some(asking) = state.asking.as_mut().filter(|asking| asking.write == write) {
                        asking.is_passed = true;
                        state.kept.drop_changing(open, asking.volume, asking.blocks);
                    } else if let Some(Waiting { volume, blocks, passes }) = state.waiting.remove(&write) {
                        state.kept.drop_changing(open, volume, blocks);
                        // Run to its end, a write waits for this.
                        let _ = passes.send(());
                    }
                }
                // N.B. The lock is held, so no write of any volume asks or ends meanwhile.
                Action::CloseGates => machine.handle_event((self.clock)(), Event::GatesClosed),
                Action::Keep { epoch, volume, blocks, place: _ } => {
                    if let Some((bytes, first)) = payload {
                        state.kept.keep(epoch, volume, blocks, bytes, first);
                    }
                }
                // The spool has no room, so nothing is copied before it is overwritten.
                Action::CopyBefore { read, .. } => {
                    machine.handle_event((self.clock)(), Event::ReadEnded { read, outcome: Outcome::Failed });
                }
                Action::Merge { from, into } => state.kept.merge(from, into),
                Action::Release(epoch) => state.kept.release(epoch),
                Action::Send(stream, message) => self.give(Task::Send(stream, message, Vec::new())),
                Action::SendExtent { stream, read, epoch, volume, blocks, place } => match place {
                    Place::Disk => self.give(Task::SendFromDisk { stream, read, volume, blocks }),
                    Place::Zeroes => {
                        self.give(Task::Send(stream, extent(volume, blocks, Content::Zeroes), Vec::new()));
                    }
                    Place::Ring | Place::Spool => {
                        let payload = state.kept.payload(epoch, volume, blocks);
                        self.give(Task::Send(stream, extent(volume, blocks, Content::Payload), payload));
                    }
                },
                Action::FlushStores => self.give(Task::FlushStores),
                Action::MakeDurable(number, record) => self.give(Task::MakeDurable(number, record)),
                Action::Forget { .. } => self.give(Task::Forget),
                Action::Tell(state) => self.give(Task::Tell(state)),
            }
        }
    }

    fn give(&self, task: Task) {
        // The control plane may have ended.
        let _ = self.tasks.unbounded_send(task);
    }

    fn lock(&self) -> MutexGuard<'_, GroupState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the message that describes an extent.
pub fn extent(volume: VolumeIndex, blocks: BlockRange, content: Content) -> ToStandby {
    ToStandby::Extent { volume, blocks, content }
}

impl Member {
    /// Asks for a change of whole blocks; resolves when it may be submitted. Returns its number, for [`Member::ended`]; `None`: it is
    /// not captured.
    pub(crate) async fn ask(&self, change: &Change, block_size: BlockSize) -> Option<WriteId> {
        let blocks = covering(block_size, change);
        let kind = match change {
            Change::Write(..) => WriteKind::Write,
            Change::Discard(_) | Change::Zero(..) => WriteKind::Zero,
        };
        let waits = {
            let mut state = self.group.lock();
            let state = &mut *state;
            state.last_write += 1;
            let write = WriteId(state.last_write);
            if let Some(watched) = &mut state.watched
                && watched.volume == self.volume
                && watched.blocks.overlaps(&blocks)
            {
                watched.written.push(blocks.intersect(&watched.blocks));
            }
            match &mut state.stage {
                Stage::Ended => return None,
                Stage::Joining(seen) => {
                    seen.get_mut(self.volume.index())?.insert(blocks);
                    state.early.insert(write);
                    return Some(write);
                }
                Stage::Running(machine) => {
                    let asked = Event::WriteAsked { write, volume: self.volume, blocks, kind };
                    machine.handle_event((self.group.clock)(), asked);
                }
            }
            let volume = self.volume;
            state.asking = Some(Asking { write, volume, blocks, is_passed: false });
            self.group.carry_out(state, None);
            if state.asking.take().is_some_and(|asking| asking.is_passed) {
                return Some(write);
            }
            let (passes, passed) = oneshot::channel();
            state.waiting.insert(write, Waiting { volume, blocks, passes });
            self.group.give(Task::Wake);
            (write, passed)
        };
        let (write, passed) = waits;
        // The group never drops a waiting write without passing it.
        let _ = passed.await;
        Some(write)
    }

    /// Reports the end of a change, before its client is answered.
    pub(crate) fn ended(
        &self,
        write: WriteId,
        change: &Change,
        block_size: BlockSize,
        result: Result<(), IoError>,
    ) {
        let mut state = self.group.lock();
        if state.early.remove(&write) {
            return;
        }
        let outcome = if result.is_ok() { Outcome::Done } else { Outcome::Failed };
        let Stage::Running(machine) = &mut state.stage else { return };
        machine.handle_event((self.group.clock)(), Event::WriteEnded { write, outcome });
        let payload = match change {
            Change::Write(offset, data, _) => Some((data.as_slice(), offset / block_size.bytes())),
            Change::Discard(_) | Change::Zero(..) => None,
        };
        self.group.carry_out(&mut state, payload);
    }

    /// Reports that a guest's flush of the volume's store has failed.
    pub(crate) fn flush_failed(&self) {
        self.group.handle(Event::GuestFlushFailed);
    }

    /// Reports that the volume has grown, before a client can write to the new part.
    pub(crate) fn grown(&self, size: BlockCount) {
        self.group.handle(Event::Grown { volume: self.volume, size });
    }

    /// Reports that the volume leaves this host.
    pub(crate) fn left(&self) {
        self.group.end();
        self.group.give(Task::Left);
    }

    /// Returns what the volume's chronicle must not forget ([`Group::unforgotten`]).
    pub(crate) fn unforgotten(&self) -> Option<LayeredBitmap> {
        self.group.unforgotten(self.volume)
    }
}

impl std::fmt::Debug for Member {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Member").field("volume", &self.volume).finish_non_exhaustive()
    }
}

fn covering(block_size: BlockSize, change: &Change) -> BlockRange {
    let range = change.range();
    block_size.covering(range.offset, range.length)
}

/// The number of bytes in a block of every volume that has a standby.
pub const BLOCK_BYTES: u64 = 4096;

/// Returns the number of the epoch that a task is about, for logs.
pub fn epoch_of(message: &ToStandby) -> Option<Epoch> {
    match message {
        ToStandby::Begin { epoch, .. } | ToStandby::Seal { epoch, .. } => Some(*epoch),
        ToStandby::Offer { .. } | ToStandby::Extent { .. } | ToStandby::StillCurrent => None,
    }
}
