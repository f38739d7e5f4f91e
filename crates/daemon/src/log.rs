//! Writes the log of a daemon without waiting for its reader.
//!
//! ```text
//!   lanes, tasks ── one line each ──► queue, QUEUE_BYTES_MAX ──► a thread of its own ──► standard error
//!                                        │ full: counted             │ closed pipe, full disk: counted
//!                                        └──────────► lost ◄─────────┘ … reported once lines can be written again
//! ```
//! If the log cannot be written, lines are lost, but no request fails and the daemon runs on. [`words::Limiter`] decides which
//! lines are suppressed; this module counts them.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The bytes of queued lines. If the reader stops, this much memory is used, and then lines are lost.
const QUEUE_BYTES_MAX: usize = 1 << 20;
/// The pause after a write that failed because the other end accepts nothing.
const RETRY: Duration = Duration::from_millis(50);
/// How long an ending program waits for its last lines.
const FLUSH_MAX: Duration = Duration::from_secs(1);

/// Lines that were not written, because writing failed or the queue was full.
static LOST: AtomicU64 = AtomicU64::new(0);
/// Lines that were suppressed, because too many of one kind came in a short time.
static SUPPRESSED: AtomicU64 = AtomicU64::new(0);

/// Returns how many lines of this process's log could not be written.
pub fn lost() -> u64 {
    LOST.load(Ordering::Relaxed)
}

/// Returns how many lines of this process's log were suppressed.
pub fn suppressed() -> u64 {
    SUPPRESSED.load(Ordering::Relaxed)
}

/// Counts a suppressed line in [`suppressed`].
pub fn count_suppressed() {
    SUPPRESSED.fetch_add(1, Ordering::Relaxed);
}

/// The log of this process; clones share it.
#[derive(Clone)]
pub struct Log {
    shared: Arc<Shared>,
}

struct Shared {
    queue: Mutex<Queue>,
    /// Notified when a line has been queued or written.
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    lines: VecDeque<Vec<u8>>,
    bytes: usize,
    /// Whether the thread is writing lines that it has taken.
    is_writing: bool,
}

/// Collects one line, which is queued when this is dropped.
pub struct Line {
    log: Log,
    bytes: Vec<u8>,
}

impl Log {
    /// Starts a log that writes to `sink`, on a thread of its own.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn start(sink: impl Write + Send + 'static) -> io::Result<Self> {
        let shared = Arc::new(Shared { queue: Mutex::default(), changed: Condvar::new() });
        let log = Self { shared: Arc::clone(&shared) };
        std::thread::Builder::new().name("log".to_owned()).spawn(move || write_all(&shared, sink))?;
        Ok(log)
    }

    /// Begins a new line of the log.
    pub fn line(&self) -> Line {
        Line { log: self.clone(), bytes: Vec::new() }
    }

    /// Waits for a limited time until all queued lines are written.
    pub fn flush(&self) {
        let until = Instant::now() + FLUSH_MAX;
        let mut queue = self.shared.lock();
        while queue.is_writing || !queue.lines.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            queue = self.shared.changed.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn push(&self, line: Vec<u8>) {
        let mut queue = self.shared.lock();
        if queue.bytes + line.len() > QUEUE_BYTES_MAX {
            LOST.fetch_add(1, Ordering::Relaxed);
            return;
        }
        queue.bytes += line.len();
        queue.lines.push_back(line);
        self.shared.changed.notify_all();
    }
}

impl Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if !self.bytes.is_empty() {
            self.log.push(std::mem::take(&mut self.bytes));
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes queued lines without end. **N.B.** nothing here may panic or log, because this thread would have to write it.
fn write_all(shared: &Shared, mut sink: impl Write) {
    let mut failing: Option<(u64, io::Error)> = None;
    loop {
        let mut queue = shared.lock();
        queue.is_writing = false;
        shared.changed.notify_all();
        while queue.lines.is_empty() {
            queue = shared.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        let lines = std::mem::take(&mut queue.lines);
        (queue.bytes, queue.is_writing) = (0, true);
        drop(queue);
        for line in lines {
            let written = match &failing {
                None => write(&mut sink, &line),
                Some((before, error)) => {
                    // The last line may be torn, so this one begins on a new line.
                    let lost = lost().saturating_sub(*before);
                    let said = format!("\n{lost} lines of the log could not be written: {error}\n");
                    write(&mut sink, said.as_bytes()).and_then(|()| write(&mut sink, &line))
                }
            };
            match written {
                Ok(()) => failing = None,
                Err(error) => {
                    let before = failing.map_or_else(lost, |(before, _)| before);
                    LOST.fetch_add(1, Ordering::Relaxed);
                    failing = Some((before, error));
                }
            }
        }
    }
}

/// Writes a line, waiting for a reader that is only slow.
fn write(sink: &mut impl Write, mut line: &[u8]) -> io::Result<()> {
    while !line.is_empty() {
        match sink.write(line) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => line = line.get(written..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // Another process has made the descriptor non-blocking. This thread has nothing else to do.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::sleep(RETRY),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Accepts lines as long as its flag is set.
    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<(bool, Vec<u8>)>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let mut inner = self.0.lock().unwrap();
            if inner.0 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            inner.1.extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_that_cannot_be_written_are_counted_and_told_of_later() {
        let sink = Sink::default();
        let log = Log::start(sink.clone()).unwrap();
        let say = |text: &str| {
            log.line().write_all(text.as_bytes()).unwrap();
            log.flush();
        };
        say("one\n");
        sink.0.lock().unwrap().0 = true;
        let before = lost();
        say("two\n");
        say("three\n");
        assert!(lost() >= before + 2);
        sink.0.lock().unwrap().0 = false;
        say("four\n");
        let written = String::from_utf8(sink.0.lock().unwrap().1.clone()).unwrap();
        assert!(written.starts_with("one\n\n"), "{written}");
        assert!(written.contains(" lines of the log could not be written: "), "{written}");
        assert!(written.ends_with("\nfour\n"), "{written}");
    }

    #[test]
    fn a_reader_that_stands_still_holds_nobody_up() {
        let (reader, writer) = io::pipe().unwrap();
        let log = Log::start(writer).unwrap();
        let before = lost();
        for _ in 0..4 * QUEUE_BYTES_MAX / 1000 {
            log.line().write_all(&[b'x'; 1000]).unwrap();
        }
        assert!(lost() > before);
        assert!(log.shared.lock().bytes <= QUEUE_BYTES_MAX);
        drop(reader);
        log.flush();
    }
}
