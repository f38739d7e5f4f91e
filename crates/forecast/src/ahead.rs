//! Runs the product's copying ahead in memory: the machine is the real one, the guest, the disks and the link are modelled.
//!
//! Everything is made smaller by the same factor: the volume, the rates, and what the guest writes. Times stay what they are, so
//! that a volume of a tebibyte is run ahead as fast as one of a gibibyte.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::time::Duration;

use chronicle::{BlockSize, ByteRange};
use migration::PacingSettings;
use migration::strategy::{
    Choice, ChunkId, Copied, Copying, CopyingSettings, FlushId, Route, TellingId, VolumeAction, VolumeEvent,
    WriteId,
};

use crate::load::Load;
use crate::random::Random;
use crate::writing::Written;

/// The largest volume that is run ahead, and the smallest that a larger one is made to.
const MODEL_BYTES: f64 = (32 << 20) as f64;
const MODEL_BYTES_MIN: f64 = (4 << 20) as f64;
/// So many writes of the guest are expected in a run, at most: each costs as much as a chunk.
const MODEL_WRITES: f64 = 1000.0;
/// The least bytes of a chunk in the model.
const CHUNK_BYTES_MIN: u64 = 32 << 10;
/// The most writes of the guest that wait at a time: what waits longer is not written yet.
const WRITES_MAX: usize = 32;
/// A run that takes more steps than this does not end.
const STEPS_MAX: u32 = 60_000;
/// The time that a source's disk takes for a write.
const DISK_LATENCY: Duration = Duration::from_micros(200);
/// The guest writes that are in flight to another host, at most.
const BUFFER_BYTES: f64 = (16 << 20) as f64;
/// The records of a handover, and its flushes.
const HANDOVER: Duration = Duration::from_millis(15);
/// Memory is sent more than once, because the VM works meanwhile.
const MEMORY_AGAIN: f64 = 1.2;

/// A migration that is to be forecast.
#[derive(Clone, Debug)]
pub struct Question {
    /// The bytes that must be copied: what is allocated, or what the target's old image lacks.
    pub held_bytes: u64,
    /// What guests wrote lately.
    pub written: Written,
    /// The strategy.
    pub choice: Choice,
    /// The round trip to the other host; `None`: to another store of this host.
    pub round_trip: Option<Duration>,
    /// How long guests may be held.
    pub downtime_max: Duration,
    /// The memory of a VM that moves along; 0: there is none.
    pub memory_bytes: u64,
}

/// The course of one migration.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Course {
    /// Its duration in seconds.
    pub seconds: f64,
    /// The bytes that it sends.
    pub bytes: f64,
    /// How long guests are held, in seconds.
    pub downtime: f64,
    /// Whether it ends.
    pub ends: bool,
    /// The steps that running it ahead took.
    pub(crate) steps: u32,
}

impl Question {
    /// Runs the migration ahead at this rate, in bytes a second.
    pub(crate) fn run(&self, bytes_per_second: f64, random: &mut Random) -> Course {
        let load = Load::of(&self.written, random);
        let memory = self.memory_bytes as f64 * MEMORY_AGAIN;
        let disks = Ahead::new(self, load, bytes_per_second.max(1.0), random).run();
        let last_round =
            if self.memory_bytes > 0 { self.downtime_max.as_secs_f64() * random.part() } else { 0.0 };
        Course {
            seconds: disks.seconds + memory / bytes_per_second.max(1.0),
            bytes: disks.bytes + memory,
            downtime: disks.downtime + last_round,
            ..disks
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Happening {
    GuestWrites,
    SourceWritten(u64),
    LinkFree,
    Answer(Frame),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Frame {
    Value(u64, u64),
    Chunk(u64, u64),
    Flush(u64),
    Telling(u64),
}

impl Frame {
    fn bytes(self) -> u64 {
        match self {
            Self::Value(_, bytes) | Self::Chunk(_, bytes) => bytes,
            Self::Flush(_) | Self::Telling(_) => 0,
        }
    }
}

struct Ahead<'a> {
    copying: Copying,
    leaves_blocks: bool,
    random: &'a mut Random,
    /// The factor by which everything is smaller.
    factor: f64,
    slots: u64,
    hot_slots: u64,
    hot_part: f64,
    write_bytes: u64,
    /// The mean time between two writes; `None`: nobody writes.
    pause: Option<Duration>,
    bytes_per_second: f64,
    round_trip: Duration,
    now: Duration,
    events: BinaryHeap<Reverse<(Duration, u64, Happening)>>,
    next: u64,
    /// Values go before chunks.
    values: VecDeque<Frame>,
    bulk: VecDeque<Frame>,
    link_is_busy: bool,
    /// Writes under way, and the parts of each that the target has still to take.
    writes: BTreeMap<u64, usize>,
    carried: u64,
    gate_closed: Option<Duration>,
    end: Option<End>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Synchronised,
    Failed,
}

impl<'a> Ahead<'a> {
    fn new(question: &Question, load: Load, bytes_per_second: f64, random: &'a mut Random) -> Self {
        let held = question.held_bytes as f64;
        let writes = load.bytes_per_second * (held / bytes_per_second) / load.write_bytes.max(1) as f64;
        let smaller = (writes / MODEL_WRITES).min(held / MODEL_BYTES_MIN);
        let factor = (held / MODEL_BYTES).max(smaller).max(1.0);
        let block = u64::from(BlockSize::MIN_BYTES);
        // Whole blocks, at least one.
        let whole = |bytes: f64| ((bytes / block as f64).ceil() as u64).max(1) * block;
        let size_bytes = whole(held / factor);
        let usual = PacingSettings::default();
        let chunk_bytes = whole(usual.chunk_bytes as f64 / factor).max(CHUNK_BYTES_MIN);
        let round_trip = question.round_trip.unwrap_or_default();
        let strategy = match question.round_trip {
            None => question.choice.here(question.downtime_max / 2),
            Some(round_trip) => {
                let buffer = whole(BUFFER_BYTES / factor);
                question.choice.away(buffer, question.downtime_max / 2, round_trip, question.downtime_max)
            }
        };
        let settings = CopyingSettings {
            block_size: BlockSize::DEFAULT,
            size_bytes,
            pacing: PacingSettings { chunk_bytes, ..usual },
            wait_max: Duration::from_secs(1),
            no_progress_max: Duration::from_secs(300),
        };
        let mut copying = Copying::new(settings, strategy);
        copying.handle_event(Duration::ZERO, VolumeEvent::Allocated(ByteRange::new(0, size_bytes)));
        copying.handle_event(Duration::ZERO, VolumeEvent::AllocationKnown);
        let write_bytes = whole(load.write_bytes as f64).min(size_bytes);
        let slots = (size_bytes / write_bytes).max(1);
        let hot_slots = ((load.hot_bytes as f64 / factor / write_bytes as f64) as u64).clamp(1, slots);
        let writes = load.bytes_per_second / factor / write_bytes as f64;
        Self {
            copying,
            leaves_blocks: question.choice.leaves_blocks() && question.round_trip.is_some(),
            random,
            factor,
            slots,
            hot_slots,
            hot_part: load.hot_part,
            write_bytes,
            pause: Duration::try_from_secs_f64(1.0 / writes).ok(),
            bytes_per_second: bytes_per_second / factor,
            round_trip,
            now: Duration::ZERO,
            events: BinaryHeap::new(),
            next: 0,
            values: VecDeque::new(),
            bulk: VecDeque::new(),
            link_is_busy: false,
            writes: BTreeMap::new(),
            carried: 0,
            gate_closed: None,
            end: None,
        }
    }

    fn run(mut self) -> Course {
        self.write_later();
        self.drain();
        let mut steps = 0;
        while self.end.is_none() && steps < STEPS_MAX && self.step() {
            steps += 1;
        }
        let left = self.copying.blocks_remaining() * u64::from(BlockSize::MIN_BYTES);
        let follows = if self.leaves_blocks { left as f64 } else { 0.0 };
        let handover = HANDOVER + self.round_trip * 3 / 2;
        let held = self.gate_closed.map_or(Duration::ZERO, |closed| self.now - closed) + handover;
        Course {
            seconds: (self.now + handover).as_secs_f64() + follows / self.bytes_per_second,
            bytes: (self.carried as f64 + follows) * self.factor,
            downtime: held.as_secs_f64(),
            ends: self.end == Some(End::Synchronised),
            steps,
        }
    }

    /// Lets one thing happen; false if nothing will.
    fn step(&mut self) -> bool {
        let next = self.events.peek().map(|Reverse((at, ..))| *at);
        let timeout = self.copying.poll_timeout().map(|(at, _)| at);
        match (timeout, next) {
            (Some(at), next) if next.is_none_or(|next| at < next) => {
                self.now = self.now.max(at);
                self.copying.handle_timeout(self.now);
            }
            (_, Some(_)) => {
                let Some(Reverse((at, _, happening))) = self.events.pop() else { return false };
                self.now = at;
                self.happen(happening);
            }
            (_, None) => return false,
        }
        self.drain();
        true
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::GuestWrites => {
                if self.gate_closed.is_none() {
                    self.write();
                    self.write_later();
                }
            }
            Happening::SourceWritten(id) => {
                let write = WriteId(id);
                self.copying.handle_event(self.now, VolumeEvent::SourceWritten { write, result: Ok(()) });
            }
            Happening::LinkFree => {
                self.link_is_busy = false;
                self.carry();
            }
            Happening::Answer(frame) => self.answered(frame),
        }
    }

    fn write_later(&mut self) {
        let Some(mean) = self.pause else { return };
        // Exponential: writes come independently of each other.
        let pause = mean.mul_f64(-(1.0 - self.random.part()).ln());
        self.after(pause, Happening::GuestWrites);
    }

    fn write(&mut self) {
        if self.writes.len() >= WRITES_MAX {
            return;
        }
        let hot = self.random.part() < self.hot_part;
        let slot = self.random.below(if hot { self.hot_slots } else { self.slots });
        // Neighbours among the hot ones are not neighbours on the volume.
        let place = slot.wrapping_mul(7919) % self.slots;
        let id = self.number();
        self.writes.insert(id, 0);
        let range = ByteRange::new(place * self.write_bytes, self.write_bytes);
        self.copying.handle_event(self.now, VolumeEvent::WriteArrived { write: WriteId(id), range });
    }

    fn drain(&mut self) {
        while let Some(action) = self.copying.poll_action() {
            match action {
                VolumeAction::Admit { write: WriteId(id), route } => self.admitted(id, &route),
                VolumeAction::Copy { chunk: ChunkId(id), range } => {
                    self.bulk.push_back(Frame::Chunk(id, range.length));
                }
                VolumeAction::FlushTarget { flush: FlushId(id) } => self.bulk.push_back(Frame::Flush(id)),
                VolumeAction::TellMissing { telling: TellingId(id) } => {
                    self.bulk.push_back(Frame::Telling(id));
                }
                VolumeAction::Converged | VolumeAction::Synchronised if self.gate_closed.is_none() => {
                    let is_equal = action == VolumeAction::Synchronised;
                    self.gate_closed = Some(self.now);
                    self.end = is_equal.then_some(End::Synchronised);
                    self.copying.handle_event(self.now, VolumeEvent::GateCloses);
                }
                VolumeAction::Synchronised => self.end = Some(End::Synchronised),
                VolumeAction::Failed { .. } => self.end = Some(End::Failed),
                VolumeAction::Converged
                | VolumeAction::Behind
                | VolumeAction::Complete { .. }
                | VolumeAction::Told { .. }
                | VolumeAction::Suspended { .. }
                | VolumeAction::Resumed => {}
            }
        }
        self.carry();
    }

    fn admitted(&mut self, id: u64, route: &Route) {
        let parts: Vec<u64> = match route {
            Route::SourceOnly => Vec::new(),
            Route::Both => vec![self.write_bytes],
            Route::BothInPart(parts) => parts.iter().map(|part| part.length).collect(),
        };
        if parts.is_empty() {
            self.writes.remove(&id);
        } else {
            self.writes.insert(id, parts.len());
        }
        self.values.extend(parts.into_iter().map(|bytes| Frame::Value(id, bytes)));
        self.after(DISK_LATENCY, Happening::SourceWritten(id));
    }

    /// Sends the next frame, values first. Its answer arrives a round trip after its last byte.
    fn carry(&mut self) {
        if self.link_is_busy {
            return;
        }
        let Some(frame) = self.values.pop_front().or_else(|| self.bulk.pop_front()) else { return };
        let takes = Duration::from_secs_f64(frame.bytes() as f64 / self.bytes_per_second);
        self.carried += frame.bytes();
        self.link_is_busy = true;
        self.after(takes, Happening::LinkFree);
        self.after(takes + self.round_trip, Happening::Answer(frame));
    }

    fn answered(&mut self, frame: Frame) {
        let event = match frame {
            Frame::Value(id, _) => {
                let Some(parts) = self.writes.get_mut(&id) else { return };
                *parts -= 1;
                if *parts > 0 {
                    return;
                }
                self.writes.remove(&id);
                VolumeEvent::TargetWritten { write: WriteId(id), result: Ok(()) }
            }
            Frame::Chunk(id, bytes) => {
                let result = Ok(Copied { bytes_written: bytes, ..Copied::default() });
                VolumeEvent::ChunkCopied { chunk: ChunkId(id), result }
            }
            Frame::Flush(id) => VolumeEvent::TargetFlushed { flush: FlushId(id), result: Ok(()) },
            Frame::Telling(id) => VolumeEvent::MissingTold { telling: TellingId(id), result: Ok(()) },
        };
        self.copying.handle_event(self.now, event);
    }

    fn after(&mut self, delay: Duration, happening: Happening) {
        let number = self.number();
        self.events.push(Reverse((self.now + delay, number, happening)));
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

#[cfg(test)]
mod tests {
    use migration::strategy::{Diverging, HotBlocks, Recording};

    use super::*;
    use crate::writing::Window;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    fn question(choice: Choice, round_trip: Option<u64>) -> Question {
        Question {
            held_bytes: 16 * GIB,
            written: Written::default(),
            choice,
            round_trip: round_trip.map(Duration::from_millis),
            downtime_max: Duration::from_millis(500),
            memory_bytes: 0,
        }
    }

    fn mirror() -> Choice {
        Choice::Mirror(HotBlocks::PutOff)
    }

    /// A guest that writes this many mebibytes a second, all over the volume or to a few again and again.
    fn writing(mib: u64, distinct_mib: [u64; 4]) -> Written {
        let seconds = [1, 10, 60, 600];
        let window = |index: usize| Window {
            seconds: seconds[index] as f64,
            distinct_bytes: distinct_mib[index] * MIB,
            bytes: mib * MIB * seconds[index],
            writes: mib * seconds[index] * 64,
        };
        Written { windows: [window(0), window(1), window(2), window(3)] }
    }

    fn run(question: &Question, mib: u64) -> Course {
        question.run((mib * MIB) as f64, &mut Random::new(1))
    }

    #[test]
    fn an_idle_volume_takes_its_bytes_at_the_rate() {
        for (choice, round_trip) in [
            (mirror(), None),
            (mirror(), Some(1)),
            (Choice::Tracking(Recording::Incremental, HotBlocks::PutOff, Diverging::Fails), Some(1)),
            (Choice::PostCopy { rounds_max: 0 }, Some(1)),
            (Choice::PostCopy { rounds_max: 4 }, Some(1)),
        ] {
            let course = run(&question(choice, round_trip), 100);
            assert!(course.ends, "{choice:?}: {course:?}");
            assert!((163.8 * 0.98..163.8 * 1.05).contains(&course.seconds), "{choice:?}: {course:?}");
            assert!((course.bytes / (16 * GIB) as f64 - 1.0).abs() < 0.03, "{choice:?}: {course:?}");
        }
    }

    #[test]
    fn a_guest_that_writes_costs_a_mirror_what_goes_to_both_sides() {
        let busy = Question { written: writing(30, [30, 300, 1800, 18_000]), ..question(mirror(), Some(1)) };
        let course = run(&busy, 100);
        // Half of the writes meet blocks that are there already, on the mean.
        assert!(course.ends && course.seconds > 175.0 && course.seconds < 240.0, "{course:?}");
        let hot = Question { written: writing(30, [20, 40, 40, 40]), ..busy };
        assert!(run(&hot, 100).seconds < course.seconds, "{:?}", run(&hot, 100));
    }

    #[test]
    fn tracking_does_not_converge_where_the_guest_writes_faster_than_it_copies() {
        let tracking = Choice::Tracking(Recording::Incremental, HotBlocks::PutOff, Diverging::Fails);
        let busy = |mib| Question {
            written: writing(mib, [mib, 10 * mib, 60 * mib, 600 * mib]),
            ..question(tracking, Some(1))
        };
        assert!(!run(&busy(150), 100).ends);
        assert!(run(&busy(10), 100).ends);
    }

    #[test]
    fn memory_comes_on_top() {
        let vm = Question { memory_bytes: 4 * GIB, ..question(mirror(), Some(1)) };
        assert!(run(&vm, 100).seconds > run(&question(mirror(), Some(1)), 100).seconds + 40.0);
    }

    #[test]
    fn a_volume_of_nothing_is_moved_at_once() {
        let course = run(&Question { held_bytes: 0, ..question(mirror(), None) }, 100);
        assert!(course.ends && course.seconds < 1.0, "{course:?}");
    }
}
