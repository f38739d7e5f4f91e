//! A guest in a closed loop with its disk, a link with a rate and a round trip, and an asynchronous mirror, in virtual time.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::time::Duration;

use chronicle::{BlockSize, ByteRange};
use migration::PacingSettings;
use migration::strategy::{
    ChunkId, Copied, Copying, CopyingSettings, FlushId, HotBlocks, Route, Strategy, VolumeAction,
    VolumeEvent, WriteId,
};

const TOO_LONG: Duration = Duration::from_secs(600);

/// The seconds over which a guest's rate is measured.
const SECONDS: usize = 3;

#[derive(Clone, Debug)]
pub(crate) struct Setting {
    pub(crate) link_bytes_per_second: u64,
    pub(crate) round_trip: Duration,
    pub(crate) volume_bytes: u64,
    pub(crate) write_bytes: u32,
    /// The guest's outstanding writes at all times.
    pub(crate) depth: usize,
    /// The time that the source's disk takes for a write.
    pub(crate) disk_latency: Duration,
    pub(crate) pattern: Pattern,
    pub(crate) bandwidth: Option<u64>,
    pub(crate) hot: HotBlocks,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Pattern {
    Random,
    Sequential,
    /// Random writes within the first bytes of the volume.
    Hot {
        bytes: u64,
    },
    /// Zipf-distributed over the whole volume, and scattered.
    Zipf,
}

#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) took: Duration,
    /// The time from the closing of the gate until the replica is equal.
    pub(crate) drained_in: Duration,
    /// The lowest rate over [`SECONDS`], without the last, unfinished second.
    pub(crate) guest_bytes_per_second: f64,
    pub(crate) held_longest: Duration,
    pub(crate) throttles: u64,
    pub(crate) carried: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Happening {
    Guest,
    SourceWritten(u64),
    LinkFree,
    Answer(Frame),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Frame {
    Value(u64, u64),
    Chunk(u64, u64),
    Flush(u64),
}

pub(crate) struct Bench<'a> {
    setting: &'a Setting,
    mirror: Copying,
    now: Duration,
    events: BinaryHeap<Reverse<(Duration, u64, Happening)>>,
    sequence: u64,
    /// Values go before chunks.
    values: VecDeque<Frame>,
    bulk: VecDeque<Frame>,
    link_is_busy: bool,
    writes: BTreeMap<u64, Open>,
    next_write: u64,
    random: u64,
    gate_closed_at: Option<Duration>,
    converged: bool,
    synchronised_at: Option<Duration>,
    /// The bytes that the guest wrote in each second.
    seconds: Vec<u64>,
    held_longest: Duration,
    carried: u64,
}

struct Open {
    arrived: Duration,
    parts: usize,
}

impl<'a> Bench<'a> {
    /// Runs until the replica is equal behind a closed gate.
    pub(crate) fn run(setting: &'a Setting) -> Seen {
        let mut mirror = Copying::new(
            CopyingSettings {
                block_size: BlockSize::DEFAULT,
                size_bytes: setting.volume_bytes,
                pacing: PacingSettings { bytes_per_second: setting.bandwidth, ..PacingSettings::default() },
                wait_max: Duration::from_secs(1),
                no_progress_max: Duration::from_secs(300),
            },
            Strategy::AsynchronousMirror {
                buffer_bytes_max: 16 << 20,
                drain_max: Duration::from_millis(250),
                hot: setting.hot,
            },
        );
        let all = ByteRange::new(0, setting.volume_bytes);
        mirror.handle_event(Duration::ZERO, VolumeEvent::Allocated(all));
        mirror.handle_event(Duration::ZERO, VolumeEvent::AllocationKnown);
        let mut bench = Bench {
            setting,
            mirror,
            now: Duration::ZERO,
            events: BinaryHeap::new(),
            sequence: 0,
            values: VecDeque::new(),
            bulk: VecDeque::new(),
            link_is_busy: false,
            writes: BTreeMap::new(),
            next_write: 0,
            random: 1,
            gate_closed_at: None,
            converged: false,
            synchronised_at: None,
            seconds: Vec::new(),
            held_longest: Duration::ZERO,
            carried: 0,
        };
        for slot in 0..setting.depth {
            bench.after(Duration::from_micros(slot as u64), Happening::Guest);
        }
        bench.drain();
        while bench.synchronised_at.is_none() {
            bench.step();
        }
        bench.seen()
    }

    fn step(&mut self) {
        let next = self.events.peek().map_or(Duration::MAX, |Reverse((at, ..))| *at);
        let timeout = self.mirror.poll_timeout().map(|(at, _)| at).filter(|at| *at < next);
        if let Some(at) = timeout {
            self.now = self.now.max(at);
            self.mirror.handle_timeout(self.now);
        } else if let Some(Reverse((at, _, happening))) = self.events.pop() {
            self.now = at;
            self.happen(happening);
        }
        assert!(self.now < TOO_LONG, "it does not end: {} blocks remain", self.mirror.blocks_remaining());
        self.drain();
        if self.converged && self.gate_closed_at.is_none() {
            self.gate_closed_at = Some(self.now);
            self.mirror.handle_event(self.now, VolumeEvent::GateCloses);
            self.drain();
        }
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Guest if self.gate_closed_at.is_none() => self.guest_writes(),
            Happening::Guest => {}
            Happening::SourceWritten(id) => {
                let write = WriteId(id);
                self.mirror.handle_event(self.now, VolumeEvent::SourceWritten { write, result: Ok(()) });
                self.count();
                self.after(Duration::ZERO, Happening::Guest);
            }
            Happening::LinkFree => {
                self.link_is_busy = false;
                self.carry();
            }
            Happening::Answer(frame) => self.answered(frame),
        }
    }

    fn answered(&mut self, frame: Frame) {
        let event = match frame {
            Frame::Value(id, _) => {
                let open = self.writes.get_mut(&id).unwrap();
                open.parts -= 1;
                if open.parts > 0 {
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
        };
        self.mirror.handle_event(self.now, event);
    }

    fn guest_writes(&mut self) {
        let bytes = u64::from(self.setting.write_bytes);
        let places = |bytes_all: u64| bytes_all / bytes;
        let place = match self.setting.pattern {
            Pattern::Random => self.random(places(self.setting.volume_bytes)),
            Pattern::Sequential => self.next_write % places(self.setting.volume_bytes),
            Pattern::Hot { bytes: hot } => self.random(places(hot)),
            Pattern::Zipf => {
                let all = places(self.setting.volume_bytes);
                // Inverts the integral of 1/rank. Neighbours in rank are not neighbours on the volume.
                let uniform = self.random(1 << 32) as f64 / f64::from(u32::MAX);
                let rank = (all as f64).powf(uniform) as u64;
                (rank * 7919) % all
            }
        };
        let id = self.next_write;
        self.next_write += 1;
        self.writes.insert(id, Open { arrived: self.now, parts: 0 });
        let range = ByteRange::new(place * bytes, bytes);
        self.mirror.handle_event(self.now, VolumeEvent::WriteArrived { write: WriteId(id), range });
    }

    fn drain(&mut self) {
        while let Some(action) = self.mirror.poll_action() {
            match action {
                VolumeAction::Admit { write: WriteId(id), route } => self.admitted(id, route),
                VolumeAction::Copy { chunk: ChunkId(id), range } => {
                    self.bulk.push_back(Frame::Chunk(id, range.length));
                }
                VolumeAction::FlushTarget { flush: FlushId(id) } => self.bulk.push_back(Frame::Flush(id)),
                VolumeAction::Converged => self.converged = true,
                VolumeAction::Behind => self.converged = false,
                VolumeAction::Synchronised => self.synchronised_at = Some(self.now),
                VolumeAction::Complete { .. } => {}
                other => panic!("{other:?}"),
            }
        }
        self.carry();
    }

    fn admitted(&mut self, id: u64, route: Route) {
        let arrived = self.writes[&id].arrived;
        self.held_longest = self.held_longest.max(self.now - arrived);
        let whole = u64::from(self.setting.write_bytes);
        let parts: Vec<u64> = match route {
            Route::SourceOnly => Vec::new(),
            Route::Both => vec![whole],
            Route::BothInPart(parts) => parts.iter().map(|part| part.length).collect(),
        };
        if parts.is_empty() {
            self.writes.remove(&id);
        } else {
            self.writes.get_mut(&id).unwrap().parts = parts.len();
        }
        self.values.extend(parts.into_iter().map(|bytes| Frame::Value(id, bytes)));
        self.after(self.setting.disk_latency, Happening::SourceWritten(id));
    }

    /// Sends the next frame, values first. Its answer arrives a round trip after its last byte.
    fn carry(&mut self) {
        if self.link_is_busy {
            return;
        }
        let Some(frame) = self.values.pop_front().or_else(|| self.bulk.pop_front()) else { return };
        let bytes = match frame {
            Frame::Value(_, bytes) | Frame::Chunk(_, bytes) => bytes,
            Frame::Flush(_) => 64,
        };
        let takes = Duration::from_secs_f64(bytes as f64 / self.setting.link_bytes_per_second as f64);
        self.carried += bytes;
        self.link_is_busy = true;
        self.after(takes, Happening::LinkFree);
        self.after(takes + self.setting.round_trip, Happening::Answer(frame));
    }

    fn after(&mut self, delay: Duration, happening: Happening) {
        self.sequence += 1;
        self.events.push(Reverse((self.now + delay, self.sequence, happening)));
    }

    fn count(&mut self) {
        let second = self.now.as_secs() as usize;
        if self.seconds.len() <= second {
            self.seconds.resize(second + 1, 0);
        }
        self.seconds[second] += u64::from(self.setting.write_bytes);
    }

    fn seen(&self) -> Seen {
        let whole = &self.seconds[..self.seconds.len().saturating_sub(1)];
        Seen {
            took: self.synchronised_at.unwrap(),
            drained_in: self.synchronised_at.unwrap() - self.gate_closed_at.unwrap(),
            guest_bytes_per_second: whole
                .windows(SECONDS.min(whole.len()).max(1))
                .map(|window| window.iter().sum::<u64>() as f64 / window.len() as f64)
                .fold(f64::INFINITY, f64::min),
            held_longest: self.held_longest,
            throttles: self.mirror.tally().throttles,
            carried: self.carried,
        }
    }

    fn random(&mut self, bound: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (mixed ^ (mixed >> 31)) % bound
    }
}
