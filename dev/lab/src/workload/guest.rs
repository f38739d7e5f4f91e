//! A guest that works on an NBD export: random reads and writes, some flushes, trims and zeroes.
//!
//! It runs on a thread of its own, keeps a fixed number of requests in flight, and checks every read completely.

use std::error::Error as _;
use std::num::{NonZeroU32, NonZeroU64};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::{Context as _, anyhow};
use testbed::nbd_client::{Client, ClientError, Completion, Errno, Operation, StopFlag, WriteDurability};

use super::content::{Content, Finding, Findings};
use super::random::Random;
use super::record::{Mark, Recorder, Step, Summary};

/// The options of a guest.
#[derive(Clone, Copy, Debug)]
pub struct GuestOptions {
    /// Number of requests in flight.
    pub in_flight: NonZeroU32,
    /// The kinds of requests.
    pub mix: Mix,
    /// The guest uses only this many bytes from the disk's beginning; `None`: all of it.
    pub working_set_bytes: Option<NonZeroU64>,
    /// The seed of the sequence of requests.
    pub seed: u64,
    /// Number of requests after which the guest ends by itself; `None`: never.
    pub requests_max: Option<NonZeroU64>,
}

impl Default for GuestOptions {
    fn default() -> Self {
        const IN_FLIGHT: NonZeroU32 = NonZeroU32::new(16).unwrap();
        Self {
            in_flight: IN_FLIGHT,
            mix: Mix::default(),
            working_set_bytes: None,
            seed: 1,
            requests_max: None,
        }
    }
}

/// The kinds of requests, as parts of [`Mix::WHOLE`]; the rest are reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mix {
    /// Writes of one block.
    pub writes: u32,
    /// Writes of one block that must be durable when answered.
    pub durable_writes: u32,
    /// Flushes of the whole disk.
    pub flushes: u32,
    /// Trims of up to [`RANGE_BLOCKS_MAX`] blocks.
    pub trims: u32,
    /// Write-zeroes of up to [`RANGE_BLOCKS_MAX`] blocks.
    pub zeroes: u32,
}

impl Mix {
    /// The sum of all parts of a mix.
    pub const WHOLE: u32 = 100_000;
}

impl Default for Mix {
    /// Returns 70 % reads and 30 % writes, with so few others that they do not affect rates.
    fn default() -> Self {
        Self { writes: 30_000, durable_writes: 20, flushes: 50, trims: 20, zeroes: 20 }
    }
}

/// The largest trim or write-zeroes, in blocks.
pub const RANGE_BLOCKS_MAX: u64 = 16;

/// A working guest. Dropping it tells the guest to stop, without waiting.
#[derive(Debug)]
pub struct Guest {
    /// `None` once it is being joined.
    thread: Option<JoinHandle<Result<Worker, ClientError>>>,
    stop: StopFlag,
    recorder: Arc<Mutex<Recorder>>,
    failure: Arc<Mutex<Option<String>>>,
}

/// A guest that has stopped.
#[derive(Debug)]
pub struct StoppedGuest {
    /// The connection, with nothing in flight.
    pub client: Client,
    /// The expected content of the disk.
    pub content: Content,
    /// Errors found while the guest worked.
    pub findings: Findings,
    /// The record of all completions.
    pub recorder: Recorder,
}

impl Guest {
    /// Starts a guest on a disk whose content is known.
    pub fn start(client: Client, content: Content, options: GuestOptions) -> anyhow::Result<Self> {
        let stop = StopFlag::default();
        let recorder = Arc::new(Mutex::new(Recorder::new(Instant::now())));
        let worker = Worker::new(client, content, options, Arc::clone(&recorder));
        let failure = Arc::new(Mutex::new(None));
        let thread = std::thread::Builder::new()
            .name("guest".to_owned())
            .spawn({
                let (stop, failure) = (stop.clone(), Arc::clone(&failure));
                move || {
                    let result = worker.run(&stop);
                    if let Err(error) = &result {
                        *lock(&failure) = Some(in_words(error));
                    }
                    result
                }
            })
            .context("start the guest's thread")?;
        Ok(Self { thread: Some(thread), stop, recorder, failure })
    }

    /// Marks this moment in the guest's record.
    pub fn mark(&self) -> Mark {
        lock(&self.recorder).mark(Instant::now())
    }

    /// Returns the guest's figures between two marks.
    pub fn between(&self, first: &Mark, last: &Mark) -> Summary {
        lock(&self.recorder).between(first, last)
    }

    /// Returns the steps of the guest's record between two marks.
    pub fn timeline(&self, first: &Mark, last: &Mark) -> Vec<Step> {
        lock(&self.recorder).steps_between(first, last).to_vec()
    }

    /// Returns why the guest lost its disk for good; `None` while it works.
    pub fn failure(&self) -> Option<String> {
        lock(&self.failure).clone()
    }

    /// Lets the guest complete the requests in flight, then flush, and stops it. Fails if its connection was lost for good.
    pub fn stop(self) -> anyhow::Result<StoppedGuest> {
        self.stop.raise();
        self.wait()
    }

    /// Waits until the guest has done all its requests ([`GuestOptions::requests_max`]), then stops it as [`Guest::stop`] does.
    pub fn wait(mut self) -> anyhow::Result<StoppedGuest> {
        let thread = self.thread.take().context("the guest is already waited for")?;
        let worker = thread.join().map_err(|_| anyhow!("the guest's thread panicked"))?;
        let Worker { client, content, findings, .. } = worker.context("the guest lost its disk")?;
        let recorder = lock(&self.recorder).clone();
        Ok(StoppedGuest { client, content, findings, recorder })
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.stop.raise();
    }
}

#[derive(Debug)]
struct Worker {
    client: Client,
    content: Content,
    options: GuestOptions,
    blocks: u64,
    random: Random,
    findings: Findings,
    recorder: Arc<Mutex<Recorder>>,
    buffers: Vec<Vec<u8>>,
}

impl Worker {
    fn new(client: Client, content: Content, options: GuestOptions, recorder: Arc<Mutex<Recorder>>) -> Self {
        let random = Random::new(options.seed);
        let (findings, buffers) = (Findings::default(), Vec::new());
        let of_working_set = |bytes: NonZeroU64| (bytes.get() / u64::from(content.block_bytes())).max(1);
        let blocks = options.working_set_bytes.map_or(u64::MAX, of_working_set).min(content.blocks());
        Self { client, content, options, blocks, random, findings, recorder, buffers }
    }

    fn run(mut self, stop: &StopFlag) -> Result<Self, ClientError> {
        let mut completions = Vec::new();
        lock(&self.recorder).resume(Instant::now());
        let mut requests_left = self.options.requests_max.map_or(u64::MAX, NonZeroU64::get);
        while !stop.is_raised() && requests_left > 0 {
            while self.client.in_flight() < self.options.in_flight.get() as usize && requests_left > 0 {
                let operation = self.choose();
                self.client.submit(operation, 0)?;
                requests_left -= 1;
            }
            self.take_completions(&mut completions)?;
        }
        while self.client.in_flight() > 0 {
            self.take_completions(&mut completions)?;
        }
        lock(&self.recorder).pause();
        if self.client.export().flush {
            self.client.perform(Operation::Flush)?;
        }
        Ok(self)
    }

    fn take_completions(&mut self, completions: &mut Vec<Completion>) -> Result<(), ClientError> {
        self.client.complete(completions)?;
        {
            let mut recorder = lock(&self.recorder);
            for completion in &*completions {
                recorder.record(completion.submitted, completion.completed);
            }
        }
        for completion in completions.drain(..) {
            self.take(completion);
        }
        Ok(())
    }

    /// Chooses the next request and claims its blocks.
    fn choose(&mut self) -> Operation {
        let Mix { writes, durable_writes, flushes, trims, zeroes } = self.options.mix;
        let mut dice = self.random.below(u64::from(Mix::WHOLE)) as u32;
        let mut hits = |share: u32| {
            let hit = dice < share;
            dice = dice.wrapping_sub(share);
            hit
        };
        let export = *self.client.export();
        if hits(writes) {
            return self.choose_write(WriteDurability::Volatile);
        }
        if hits(durable_writes) && export.fua {
            return self.choose_write(WriteDurability::Durable);
        }
        if hits(flushes) && export.flush {
            return Operation::Flush;
        }
        if hits(trims) && export.trim {
            let (offset, length) = self.claim_range();
            return Operation::Trim { offset, length };
        }
        if hits(zeroes) && export.write_zeroes {
            let (offset, length) = self.claim_range();
            return Operation::WriteZeroes { offset, length };
        }
        let block = self.claim_blocks(1).start;
        let buffer = self.take_buffer();
        Operation::Read { offset: block * u64::from(self.content.block_bytes()), buffer }
    }

    fn choose_write(&mut self, durability: WriteDurability) -> Operation {
        let block = self.claim_blocks(1).start;
        let mut data = self.take_buffer();
        self.content.next_stamp(block).fill(&mut data);
        Operation::Write { offset: block * u64::from(self.content.block_bytes()), data, durability }
    }

    fn claim_range(&mut self) -> (u64, u32) {
        let count = 1 + self.random.below(RANGE_BLOCKS_MAX.min(self.blocks));
        let blocks = self.claim_blocks(count);
        let block_bytes = self.content.block_bytes();
        let length = u32::try_from(blocks.end - blocks.start).unwrap_or(1) * block_bytes;
        (blocks.start * u64::from(block_bytes), length)
    }

    /// Claims up to `count` blocks that no request in flight uses.
    fn claim_blocks(&mut self, count: u64) -> Range<u64> {
        loop {
            let start = self.random.below(self.blocks);
            let blocks = start..(start + count).min(self.blocks);
            if self.content.claim(blocks.clone()) {
                return blocks;
            }
        }
    }

    fn take(&mut self, completion: Completion) {
        let Completion { operation, result, .. } = completion;
        let (blocks, name) = self.blocks_of(&operation);
        self.content.release(blocks.clone());
        if let Err(Errno(errno)) = result {
            let offset = blocks.start * u64::from(self.content.block_bytes());
            self.findings.add(Finding::Failed { operation: name, offset, errno });
        }
        match operation {
            Operation::Read { offset, buffer } => {
                if result.is_ok() {
                    self.content.check(offset, &buffer, &mut self.findings);
                }
                self.buffers.push(buffer);
            }
            Operation::Write { data, .. } => {
                match result {
                    Ok(()) => self.content.note_written(blocks),
                    Err(_) => self.content.note_failed(blocks),
                }
                self.buffers.push(data);
            }
            Operation::Trim { .. } | Operation::WriteZeroes { .. } => match result {
                Ok(()) => self.content.note_zeroed(blocks),
                Err(_) => self.content.note_failed(blocks),
            },
            Operation::Flush => {}
        }
    }

    fn blocks_of(&self, operation: &Operation) -> (Range<u64>, &'static str) {
        match operation {
            Operation::Read { offset, buffer } => {
                (self.content.blocks_of(*offset, buffer.len() as u64), "read")
            }
            Operation::Write { offset, data, .. } => {
                (self.content.blocks_of(*offset, data.len() as u64), "write")
            }
            Operation::Trim { offset, length } => {
                (self.content.blocks_of(*offset, u64::from(*length)), "trim")
            }
            Operation::WriteZeroes { offset, length } => {
                (self.content.blocks_of(*offset, u64::from(*length)), "write-zeroes")
            }
            Operation::Flush => (0..0, "flush"),
        }
    }

    fn take_buffer(&mut self) -> Vec<u8> {
        self.buffers.pop().unwrap_or_else(|| vec![0; self.content.block_bytes() as usize])
    }
}

/// Returns an error with its causes.
fn in_words(error: &ClientError) -> String {
    let causes = std::iter::successors(error.source(), |cause: &&dyn std::error::Error| (*cause).source());
    causes.fold(error.to_string(), |words, cause| format!("{words}: {cause}"))
}

/// Locks; a panic of another thread leaves no invalid value here.
fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}
