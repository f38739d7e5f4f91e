//! The ring itself: operations in a slab, keyed by the user data of their completions.
//!
//! ```text
//!   start ──► queued ──► in flight ──┬──► finished ──► taken by the future
//!               │            │       │
//!               │ abandoned  │       └──► (abandoned) dropped here, with file and buffers
//!               └► dropped   └► abandoned: stays until its completion; cancelled if it waits for a peer
//! ```

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};
use std::task::Waker;
use std::time::{Duration, Instant};

use io_uring::types::{CancelBuilder, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};
use rustix::io::Errno;
use slab::Slab;

use super::files::FileTable;
use super::request::{FileReference, Outcome, Request, Step};
use super::timing::{Stage, Timing};
use super::waiting::Wait;
use crate::buffer::BufferPool;
use crate::engine::clock;
use crate::error::IoError;

/// Marks the completions of cancellations, which no task waits for.
const NOBODY: u64 = u64::MAX;

/// How long a closed ring waits for file operations in flight. If a store hangs longer, their memory and files are leaked,
/// because the kernel may still write to them.
const CLOSE_WAIT: Duration = Duration::from_secs(10);

/// From this number of file operations in flight, a new one is submitted at once. Operations submitted together reach the disk
/// together, when the last of them has been prepared: the first of sixteen would wait for all of them. A single one is submitted
/// when the thread enters the ring, with the receive of the next request.
const SUBMITTED_AT_ONCE_FROM: usize = 2;

pub(super) struct Queue {
    ring: IoUring,
    operations: Slab<Operation>,
    /// The upper half of an entry's user data, so that a late cancellation never hits the next operation in the same slot.
    sequence: u32,
    /// Operations that did not fit into the submission queue, in order.
    backlog: VecDeque<Waiting>,
    files: FileTable,
    /// Files to be released when the last of their operations has ended.
    releasing: Vec<Weak<OwnedFd>>,
    buffers: BufferPool,
    completions: Vec<(u64, i32)>,
    /// File operations that the kernel has, or gets with the next submission.
    file_operations: usize,
    /// File operations that have ended since the last query.
    ended: usize,
    /// When the operations in flight began, or when one last ended, if that is later.
    busy_since: Duration,
    closed: bool,
    complained: Option<i32>,
    timing: Option<Box<Timing>>,
}

struct Operation {
    request: Option<Request>,
    phase: Phase,
    /// Whether it is a file operation, which ends by itself.
    is_file: bool,
    /// Whether its future takes only what has arrived.
    is_cancelled: bool,
    sequence: u32,
}

impl Operation {
    fn names(&self, file: &Arc<OwnedFd>) -> bool {
        self.request.as_ref().is_some_and(|request| Arc::ptr_eq(request.file(), file))
    }
}

enum Phase {
    /// The kernel has it, or will. Holds the waker of its future, if that has been polled.
    InFlight(Waker),
    Abandoned,
    Finished(Result<Outcome, IoError>),
}

enum Waiting {
    Operation(usize),
    Cancellation(u64),
}

impl Queue {
    pub(super) fn new(ring: IoUring, buffers: BufferPool) -> Self {
        let files = FileTable::new(&ring.submitter());
        Self {
            ring,
            operations: Slab::new(),
            sequence: 0,
            backlog: VecDeque::new(),
            files,
            releasing: Vec::new(),
            buffers,
            completions: Vec::new(),
            file_operations: 0,
            ended: 0,
            busy_since: Duration::ZERO,
            closed: false,
            complained: None,
            timing: Timing::if_wanted(),
        }
    }

    pub(super) fn start(&mut self, request: Request, waker: Waker) -> Result<usize, IoError> {
        if self.closed {
            return Err(IoError::Closed);
        }
        self.sequence = self.sequence.wrapping_add(1);
        let (phase, is_file) = (Phase::InFlight(waker), !request.waits_for_peer());
        let key = self.operations.insert(Operation {
            request: Some(request),
            phase,
            is_file,
            is_cancelled: false,
            sequence: self.sequence,
        });
        if is_file && self.file_operations == 0 {
            self.busy_since = clock::now();
        }
        self.file_operations += usize::from(is_file);
        self.enqueue(key).inspect_err(|_| self.remove(key))?;
        Ok(key)
    }

    pub(super) fn take(&mut self, key: usize, waker: &Waker) -> Option<Result<Outcome, IoError>> {
        match self.operations.get_mut(key).map(|operation| &mut operation.phase) {
            Some(Phase::InFlight(current)) => {
                current.clone_from(waker);
                None
            }
            Some(Phase::Finished(_)) => {
                if let Some(timing) = &mut self.timing {
                    timing.taken(key, Instant::now());
                }
                match self.operations.remove(key).phase {
                    Phase::Finished(result) => Some(result),
                    Phase::InFlight(_) | Phase::Abandoned => None,
                }
            }
            Some(Phase::Abandoned) | None => Some(Err(IoError::Closed)),
        }
    }

    /// Forgets an operation whose future was dropped, as soon as the kernel has finished with it.
    pub(super) fn abandon(&mut self, key: usize) {
        if let Some(timing) = &mut self.timing {
            timing.forget(key);
        }
        let queued =
            self.backlog.iter().position(|waiting| matches!(waiting, Waiting::Operation(k) if *k == key));
        if let Some(index) = queued {
            self.backlog.remove(index);
            self.remove(key);
            return;
        }
        let Some(operation) = self.operations.get_mut(key) else { return };
        if matches!(operation.phase, Phase::Finished(_)) {
            self.operations.remove(key);
            return;
        }
        operation.phase = Phase::Abandoned;
        if operation.request.as_ref().is_some_and(Request::waits_for_peer) {
            let user_data = user_data(key, operation.sequence);
            self.enqueue_cancellation(user_data);
        }
    }

    /// Ends the wait of an operation whose future continues: that gets what has arrived, or [`Outcome::Cancelled`].
    pub(super) fn cancel(&mut self, key: usize) {
        let queued =
            self.backlog.iter().position(|waiting| matches!(waiting, Waiting::Operation(k) if *k == key));
        let Some(operation) = self.operations.get_mut(key) else { return };
        let Phase::InFlight(_) = operation.phase else { return };
        operation.is_cancelled = true;
        if let Some(index) = queued {
            self.backlog.remove(index);
            if let Some(request) = operation.request.take() {
                operation.phase = Phase::Finished(Ok(request.cancelled()));
            }
            return;
        }
        let user_data = user_data(key, operation.sequence);
        self.enqueue_cancellation(user_data);
    }

    /// Submits what is queued, waits as requested, and collects completions; appends the tasks to wake to `wakers`.
    pub(super) fn enter(&mut self, wait: Wait, wakers: &mut Vec<Waker>) {
        self.submit_backlog(wakers);
        self.release_later();
        self.files.sweep(&self.ring.submitter());
        let wait = if self.ring.completion().is_empty() && self.backlog.is_empty() { wait } else { Wait::No };
        let began = self.timing.is_some().then(Instant::now);
        let result = match wait {
            Wait::No => self.submit_without_waiting(),
            Wait::Forever => self.ring.submit_and_wait(1).map(drop),
            Wait::AtMost(limit) => {
                let limit = Timespec::from(limit);
                self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&limit)).map(drop)
            }
        };
        self.judge(result);
        if let (Some(timing), Some(began)) = (&mut self.timing, began) {
            // N.B. an enter that waits submits first: that counts as part of the wait.
            timing.submitted(began);
            if wait != Wait::No {
                timing.note(Stage::Asleep, began.elapsed());
            }
        }
        self.collect(wakers);
    }

    /// Returns, without entering the kernel, whether there are completions or the kernel could make some.
    pub(super) fn has_completions(&mut self) -> bool {
        self.ring.submission().taskrun() || !self.ring.completion().is_empty()
    }

    pub(super) fn note_look(&mut self, time: Duration) {
        if let Some(timing) = &mut self.timing {
            timing.note(Stage::Looking, time);
        }
    }

    pub(super) fn file_operations(&self) -> usize {
        self.file_operations
    }

    pub(super) fn busy_since(&self) -> Duration {
        self.busy_since
    }

    pub(super) fn take_ended(&mut self) -> usize {
        std::mem::take(&mut self.ended)
    }

    pub(super) fn release(&mut self, file: &Arc<OwnedFd>) {
        if self.closed || !self.files.contains(file) {
            return;
        }
        // N.B. a kernel thread may carry out an operation such as a flush or a hole, and looks up the slot's file then. If the
        // slot were reused before, the operation would be done to the wrong file.
        if self.operations.iter().any(|(_, operation)| operation.names(file)) {
            self.releasing.push(Arc::downgrade(file));
        } else {
            // An operation that ended in a kernel thread holds the file until the kernel is entered once more.
            self.submit_now();
            self.files.release(file, &self.ring.submitter());
        }
    }

    fn release_later(&mut self) {
        for file in std::mem::take(&mut self.releasing) {
            // The sweep frees the slots of files without handles.
            if let Some(file) = file.upgrade() {
                self.release(&file);
            }
        }
    }

    /// Ends all operations: cancels those that wait for peers, waits for files; appends the tasks to wake to `wakers`.
    pub(super) fn close(&mut self, wakers: &mut Vec<Waker>) {
        self.closed = true;
        for waiting in std::mem::take(&mut self.backlog) {
            if let Waiting::Operation(key) = waiting {
                self.finish(key, Err(IoError::Closed), wakers);
            }
        }
        let all = opcode::AsyncCancel2::new(CancelBuilder::any().all()).build().user_data(NOBODY);
        self.submit_now();
        self.push(&all);
        let deadline = Instant::now() + CLOSE_WAIT;
        while self.operations.iter().any(|(_, operation)| operation.request.is_some()) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            self.enter(Wait::AtMost(left), wakers);
        }
        let mut leaked = 0;
        for (_, operation) in &mut self.operations {
            if let Some(request) = operation.request.take() {
                std::mem::forget(request);
                leaked += 1;
                if let Phase::InFlight(waker) =
                    std::mem::replace(&mut operation.phase, Phase::Finished(Err(IoError::Closed)))
                {
                    wakers.push(waker);
                }
            }
        }
        if leaked > 0 {
            tracing::warn!(
                operations = leaked,
                "closed with operations in flight: their memory is not reused"
            );
        }
        self.files.unregister(&self.ring.submitter());
        if let Some(timing) = &self.timing {
            timing.log();
        }
    }

    fn enqueue(&mut self, key: usize) -> Result<(), IoError> {
        // Made even if it has to wait, so that an impossible request is refused at once.
        let entry = self.entry(key)?;
        let is_file = self.operations.get(key).is_some_and(|operation| operation.is_file);
        if let Some(timing) = &mut self.timing
            && is_file
        {
            timing.asked(key, Instant::now());
        }
        if self.backlog.is_empty() && self.push(&entry) {
            if is_file && self.file_operations >= SUBMITTED_AT_ONCE_FROM {
                self.submit_now();
            }
            return Ok(());
        }
        self.backlog.push_back(Waiting::Operation(key));
        Ok(())
    }

    fn enqueue_cancellation(&mut self, target: u64) {
        if !self.backlog.is_empty() || !self.push(&cancellation(target)) {
            self.backlog.push_back(Waiting::Cancellation(target));
        }
    }

    fn submit_backlog(&mut self, wakers: &mut Vec<Waker>) {
        while let Some(first) = self.backlog.front() {
            let entry = match first {
                Waiting::Cancellation(target) => cancellation(*target),
                Waiting::Operation(key) => {
                    let key = *key;
                    match self.entry(key) {
                        Ok(entry) => entry,
                        // N.B. The failed operation is removed: while the backlog has entries, no task waits for completions.
                        Err(error) => {
                            self.backlog.pop_front();
                            self.finish(key, Err(error), wakers);
                            continue;
                        }
                    }
                }
            };
            if !self.push(&entry) {
                return;
            }
            self.backlog.pop_front();
        }
    }

    fn entry(&mut self, key: usize) -> Result<squeue::Entry, IoError> {
        let operation = self.operations.get_mut(key).ok_or(IoError::Closed)?;
        let request = operation.request.as_mut().ok_or(IoError::Closed)?;
        // N.B. A request that may wait for ever gets no slot: before Linux 6.13 it would keep every file open, and locked, that
        // is taken out of the table after it has begun.
        let reference = match request.waits_for_peer() {
            true => FileReference::Descriptor,
            false => self.files.reference(request.file(), &self.ring.submitter()),
        };
        let entry = request.entry(reference, &self.buffers)?;
        Ok(entry.user_data(user_data(key, operation.sequence)))
    }

    /// Pushes an entry, submitting first if the queue is full; `false` if the kernel takes nothing.
    fn push(&mut self, entry: &squeue::Entry) -> bool {
        if self.ring.submission().is_full() {
            self.submit_now();
        }
        // SAFETY: an entry points to the buffer or message of its operation. The operation stays in the slab until the
        // completion, even if its future is dropped or the queue is closed. Cancellations point to nothing.
        unsafe { self.ring.submission().push(entry) }.is_ok()
    }

    fn submit_now(&mut self) {
        let result = self.ring.submit().map(drop);
        self.judge(result);
        if let Some(timing) = &mut self.timing {
            timing.submitted(Instant::now());
        }
    }

    /// Submits what is queued. If nothing is, enters the kernel only if it holds completions back.
    fn submit_without_waiting(&mut self) -> std::io::Result<()> {
        let submission = self.ring.submission();
        let pending = !submission.is_empty() || submission.taskrun() || submission.cq_overflow();
        drop(submission);
        if pending { self.ring.submit().map(drop) } else { Ok(()) }
    }

    /// Separates the normal ends of a wait, and a busy kernel, from real failures.
    fn judge(&mut self, result: std::io::Result<()>) {
        let Err(error) = result else { return };
        let harmless = [Errno::TIME, Errno::INTR, Errno::AGAIN, Errno::BUSY].map(Errno::raw_os_error);
        match error.raw_os_error() {
            Some(code) if harmless.contains(&code) => {}
            code if code == self.complained => {}
            code => {
                self.complained = code;
                tracing::error!(%error, "io_uring takes no submissions");
            }
        }
    }

    fn collect(&mut self, wakers: &mut Vec<Waker>) {
        let mut completions = std::mem::take(&mut self.completions);
        completions.extend(self.ring.completion().map(|entry| (entry.user_data(), entry.result())));
        for (user_data, result) in completions.drain(..) {
            if user_data != NOBODY {
                self.complete(user_data, result, wakers);
            }
        }
        self.completions = completions;
        if self.ended > 0 {
            self.busy_since = clock::now();
        }
    }

    fn complete(&mut self, user_data: u64, result: i32, wakers: &mut Vec<Waker>) {
        let key = (user_data & u64::from(u32::MAX)) as usize;
        let Some(operation) = self.operations.get_mut(key) else { return };
        debug_assert_eq!(
            u64::from(operation.sequence),
            user_data >> 32,
            "a slot is kept until its completion"
        );
        let Some(request) = &mut operation.request else { return };
        if let Some(timing) = &mut self.timing {
            timing.completed(key, Instant::now());
        }
        let step = request.advance(result);
        let is_wanted = matches!(operation.phase, Phase::InFlight(_)) && !self.closed;
        match step {
            // The cancellation has ended the step before this one, and would not be repeated.
            Step::Again if is_wanted && operation.is_cancelled => {
                if let Some(request) = operation.request.take() {
                    self.finish(key, Ok(request.cancelled()), wakers);
                }
            }
            Step::Again if is_wanted => {
                if let Err(error) = self.enqueue(key) {
                    self.finish(key, Err(error), wakers);
                }
            }
            Step::Again => self.finish(key, Err(IoError::Closed), wakers),
            Step::Finished(result) => self.finish(key, result, wakers),
        }
    }

    fn finish(&mut self, key: usize, result: Result<Outcome, IoError>, wakers: &mut Vec<Waker>) {
        let Some(operation) = self.operations.get_mut(key) else { return };
        if operation.request.take().is_some() && operation.is_file {
            self.file_operations -= 1;
            self.ended += 1;
        }
        match std::mem::replace(&mut operation.phase, Phase::Finished(result)) {
            Phase::InFlight(waker) => wakers.push(waker),
            Phase::Abandoned | Phase::Finished(_) => drop(self.operations.remove(key)),
        }
    }

    fn remove(&mut self, key: usize) {
        let removed = self.operations.try_remove(key);
        if removed.is_some_and(|operation| operation.request.is_some() && operation.is_file) {
            self.file_operations -= 1;
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // The driver closes it. This is for a leaked driver: no memory is freed under the kernel.
        if !self.closed {
            self.close(&mut Vec::new());
        }
    }
}

fn user_data(key: usize, sequence: u32) -> u64 {
    // Keys stay far below 2^32: each stands for at least a hundred bytes of memory.
    u64::from(sequence) << 32 | key as u64
}

fn cancellation(target: u64) -> squeue::Entry {
    opcode::AsyncCancel::new(target).build().user_data(NOBODY)
}
