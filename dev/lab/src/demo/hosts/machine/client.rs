//! The client outside: it keeps one connection to the VM, sends requests at a steady rate, answered or not, and notes
//! the time of each answer.
//!
//! ```text
//!   sender:   a request every 2 ms ──► VM
//!   receiver: answer 0, 1, 2 … ◄────── VM      each must be the next number: the VM counts what it has answered
//! ```
//!
//! Requests do not wait for answers, so that the latency is honest: a request during the downtime is as late as
//! a user would find it.

use std::collections::VecDeque;
use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context as _;

use crate::network::Namespace;
use crate::workload::{Mark, Recorder, Step, Window};

const INTERVAL: Duration = Duration::from_millis(2);
const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: guest\r\n\r\n";
/// Limit of unanswered requests, a minute's worth: then the client waits, too.
const OUTSTANDING_MAX: usize = 30_000;
const CONNECT_MAX: Duration = Duration::from_secs(30);
/// A connection is lost if nothing arrives for this long.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// A connection and its record. Dropping it ends the connection.
#[derive(Debug)]
pub(super) struct OutsideClient {
    stream: TcpStream,
    shared: Arc<Shared>,
    /// Empty once they have been joined.
    threads: Vec<JoinHandle<()>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Outcome {
    pub(super) answers: u64,
    /// Why the connection was lost, or which answer was wrong; `None` if it survived.
    pub(super) lost: Option<String>,
}

#[derive(Debug)]
struct Shared {
    outstanding: Mutex<VecDeque<Instant>>,
    recorder: Mutex<Recorder>,
    lost: Mutex<Option<String>>,
    stop: AtomicBool,
}

impl OutsideClient {
    /// Connects from `namespace`, and begins to send requests.
    pub(super) fn connect(namespace: &Namespace, machine: SocketAddr) -> anyhow::Result<Self> {
        let stream = namespace
            .run(|| TcpStream::connect_timeout(&machine, CONNECT_MAX))?
            .with_context(|| format!("connect to the VM at {machine}"))?;
        Self::over(stream)
    }

    fn over(stream: TcpStream) -> anyhow::Result<Self> {
        stream.set_nodelay(true).context("prepare the connection to the VM")?;
        stream.set_read_timeout(Some(SILENCE_MAX)).context("prepare the connection to the VM")?;
        let shared = Arc::new(Shared {
            outstanding: Mutex::default(),
            recorder: Mutex::new(Recorder::new(Instant::now())),
            lost: Mutex::default(),
            stop: AtomicBool::new(false),
        });
        let start = |work: fn(TcpStream, &Shared) -> io::Result<()>| {
            let stream = stream.try_clone().context("share the connection to the VM")?;
            let shared = Arc::clone(&shared);
            anyhow::Ok(std::thread::spawn(move || {
                if let Err(error) = work(stream, &shared) {
                    lock(&shared.lost).get_or_insert(error.to_string());
                }
            }))
        };
        let threads = vec![start(send)?, start(receive)?];
        Ok(Self { stream, shared, threads })
    }

    pub(super) fn mark(&self) -> Mark {
        lock(&self.shared.recorder).mark(Instant::now())
    }

    pub(super) fn windows(&self, first: &Mark, last: &Mark) -> Vec<Window> {
        lock(&self.shared.recorder).steps_between(first, last).iter().map(Step::window).collect()
    }

    /// Returns the longest time without an answer that lies between two marks, at least in part.
    pub(super) fn longest_gap(&self, first: &Mark, last: &Mark) -> Duration {
        lock(&self.shared.recorder).longest_stall(first.at, last.at)
    }

    /// Sends nothing further, waits for the last answers, and closes the connection. Blocks until then.
    pub(super) fn stop(mut self) -> Outcome {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.join();
        let answers = lock(&self.shared.recorder).completions();
        Outcome { answers, lost: lock(&self.shared.lost).take() }
    }

    fn join(&mut self) {
        for thread in self.threads.drain(..) {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
    }
}

impl Drop for OutsideClient {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        // The connection may already be closed.
        let _ = self.stream.shutdown(Shutdown::Both);
        self.join();
    }
}

/// Sends requests at their times; times that were missed because this thread did not run are skipped.
fn send(mut stream: TcpStream, shared: &Shared) -> io::Result<()> {
    let mut due = Instant::now();
    while !shared.stop.load(Ordering::Relaxed) && lock(&shared.lost).is_none() {
        let now = Instant::now();
        if now < due {
            std::thread::sleep(due - now);
            continue;
        }
        due = (due + INTERVAL).max(now);
        if lock(&shared.outstanding).len() >= OUTSTANDING_MAX {
            continue;
        }
        lock(&shared.outstanding).push_back(Instant::now());
        stream.write_all(REQUEST)?;
    }
    stream.shutdown(Shutdown::Write)
}

/// Receives answers until the VM closes the connection, after the last one.
fn receive(mut stream: TcpStream, shared: &Shared) -> io::Result<()> {
    let mut found = Vec::new();
    for number in 0.. {
        let expected = answer(number);
        found.resize(expected.len(), 0);
        let length = fill(&mut stream, &mut found)?;
        let is_outstanding = |shared: &Shared| !lock(&shared.outstanding).is_empty();
        if length == 0 && shared.stop.load(Ordering::Relaxed) && !is_outstanding(shared) {
            break;
        }
        if found[..length] != *expected {
            let found = String::from_utf8_lossy(&found[..length]);
            return Err(io::Error::other(format!("instead of answer {number} came {found:?}")));
        }
        let sent = lock(&shared.outstanding).pop_front();
        let sent = sent.ok_or_else(|| io::Error::other("an answer came that nobody asked for"))?;
        lock(&shared.recorder).record(sent, Instant::now());
    }
    Ok(())
}

fn answer(number: u64) -> Vec<u8> {
    format!("HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n{number:010}\n").into_bytes()
}

/// Reads until `room` is full or the connection is closed; returns the number of bytes.
fn fill(stream: &mut TcpStream, room: &mut [u8]) -> io::Result<usize> {
    let mut length = 0;
    while length < room.len() {
        match stream.read(&mut room[length..]) {
            Ok(0) => break,
            Ok(more) => length += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(length)
}

/// Locks; a panic of another thread leaves no invalid value here.
fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// Returns the client of a VM that gives `answers` answers, made by `word`, then closes the connection.
    fn client_of(answers: u64, word: fn(u64) -> Vec<u8>) -> OutsideClient {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = vec![0; REQUEST.len()];
            for number in 0..answers {
                if fill(&mut stream, &mut request).unwrap() < REQUEST.len() {
                    return;
                }
                stream.write_all(&word(number)).unwrap();
            }
        });
        OutsideClient::over(TcpStream::connect(address).unwrap()).unwrap()
    }

    fn wait_for_answers(client: &OutsideClient, answers: u64) {
        while lock(&client.shared.recorder).completions() < answers {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_connection_survives_if_every_request_has_its_answer() {
        let client = client_of(u64::MAX, answer);
        let first = client.mark();
        wait_for_answers(&client, 60);
        let last = client.mark();
        assert!(client.longest_gap(&first, &last) > Duration::ZERO);
        let outcome = client.stop();
        assert!(outcome.answers >= 60 && outcome.lost.is_none(), "{outcome:?}");
    }

    #[test]
    fn a_connection_that_the_machine_closes_is_lost() {
        let client = client_of(5, answer);
        while lock(&client.shared.lost).is_none() {
            std::thread::yield_now();
        }
        let outcome = client.stop();
        assert!(outcome.answers <= 5 && outcome.lost.is_some(), "{outcome:?}");
    }

    #[test]
    fn another_machine_that_answers_is_noticed() {
        let client = client_of(u64::MAX, |number| answer(if number < 3 { number } else { 0 }));
        while lock(&client.shared.lost).is_none() {
            std::thread::yield_now();
        }
        let outcome = client.stop();
        assert_eq!(outcome.answers, 3);
        assert!(outcome.lost.unwrap().contains("instead of answer 3"));
    }
}
