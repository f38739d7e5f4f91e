//! The guest of a measured migration: fio, with a log of every request.
//!
//! ```text
//!   fio's log: completion (ms since 1970), latency (ns), direction, bytes, offset
//!        │
//!        ├─ window(before), window(during), window(after) ──► IOPS, latencies
//!        ├─ life()                                         ──► curves
//!        └─ written_since(switch)                          ──► blocks in which source and target may differ
//! ```
//!
//! A log of every request, rather than averages: the worst latency is then a request's and not a window's. It also shows which
//! blocks the guest wrote after the switch.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::Child;
use tokio::time::{Instant, sleep, timeout};

use super::fio::{Disk, Job, Pattern, check_output};
use super::folder::BenchFolder;
use super::image::Blocks;
use super::process::bytes_moved;
use super::tools::FIO;

/// fio ends by itself after this time, if it is not stopped before.
const SECONDS_MAX: u32 = 3600;
const START_DEADLINE: Duration = Duration::from_secs(30);
const START_PAUSE: Duration = Duration::from_millis(20);
/// Bytes that a server has moved once its guest works: more than it reads to open an image.
const START_BYTES: u64 = 256 << 10;
const STOP_DEADLINE: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) job: Job,
    /// `None`: the guest makes as many requests as it can.
    pub(super) limit: Option<Limit>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Limit {
    Requests(u32),
    Bytes(u64),
}

impl Load {
    pub(super) fn database(iops: Option<u32>) -> Self {
        Self { limit: iops.map(Limit::Requests), ..Self::database_in_flight(16) }
    }

    /// Returns the same load with `depth` requests in flight.
    pub(super) fn database_in_flight(depth: u32) -> Self {
        let pattern = Pattern::RandomMixed { reads_percent: 70 };
        Self { job: Job { pattern, block_bytes: 8 << 10, depth }, limit: None }
    }

    /// Returns the load of a database that uses some blocks much more often than others.
    pub(super) const fn zipf(iops: Option<u32>) -> Self {
        let pattern = Pattern::ZipfMixed { reads_percent: 70, theta_percent: 110 };
        let limit = match iops {
            Some(iops) => Some(Limit::Requests(iops)),
            None => None,
        };
        Self { job: Job { pattern, block_bytes: 8 << 10, depth: 16 }, limit }
    }

    /// Returns the same load with more writes than reads.
    pub(super) fn zipf_writes() -> Self {
        let pattern = Pattern::ZipfMixed { reads_percent: 20, theta_percent: 110 };
        Self { job: Job { pattern, block_bytes: 8 << 10, depth: 32 }, limit: None }
    }

    fn limit_argument(self) -> Option<String> {
        match (self.limit?, self.job.pattern) {
            (
                Limit::Requests(iops),
                Pattern::RandomMixed { reads_percent } | Pattern::ZipfMixed { reads_percent, .. },
            ) => {
                let reads = (u64::from(iops) * u64::from(reads_percent) / 100).max(1);
                Some(format!("--rate_iops={reads},{}", u64::from(iops).saturating_sub(reads).max(1)))
            }
            (Limit::Requests(iops), _) => Some(format!("--rate_iops={iops}")),
            (Limit::Bytes(bytes), _) => Some(format!("--rate={bytes}")),
        }
    }
}

#[derive(Debug)]
struct Guest {
    child: Child,
    log: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Request {
    completed_ms: u64,
    latency_ns: u64,
    direction: Direction,
    bytes: u64,
    offset: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Read,
    Write,
}

#[derive(Debug)]
pub(super) struct Requests(Vec<Request>);

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Felt {
    pub(super) iops: f64,
    /// The longest time of a request that was in flight, in milliseconds.
    pub(super) worst_latency_ms: f64,
    /// Time within which 99 % of these requests completed, in milliseconds.
    pub(super) p99_latency_ms: f64,
}

/// The figures of a guest's reads, or of its writes, in a span of time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Spent {
    /// Requests completed per second.
    pub(super) iops: f64,
    /// Mean latency in milliseconds; 0 without requests.
    pub(super) mean_ms: f64,
    /// Variance of the latency, in square milliseconds.
    pub(super) variance_ms2: f64,
}

impl Guest {
    fn start(uri: &str, size_bytes: u64, load: Load, folder: &BenchFolder) -> anyhow::Result<Self> {
        let mut command = load.job.command(Disk::Nbd { uri }, size_bytes, SECONDS_MAX, folder.root());
        command.arg(format!("--write_lat_log={}", folder.path("guest").display()));
        // The parts of a latency would be logs of the same length.
        command.args(["--log_offset=1", "--log_unix_epoch=1", "--disable_slat=1", "--disable_clat=1"]);
        command.args(load.limit_argument());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().map_err(|error| FIO.explain(error))?;
        Ok(Self { child, log: folder.path("guest_lat.1.log") })
    }

    /// Stops fio, and returns its requests. Fails if a request has failed, or fio has ended before.
    async fn stop(mut self) -> anyhow::Result<Requests> {
        if let Some(status) = self.child.try_wait().context("look after fio")? {
            let output = self.child.wait_with_output().await.context("wait for fio")?;
            bail!("fio ended early with {status}: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        let pid = self.child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        kill_process(pid.context("fio has ended early")?, Signal::INT).context("ask fio to end")?;
        let output = timeout(STOP_DEADLINE, self.child.wait_with_output()).await;
        let output = output.context("fio does not end")?.context("wait for fio")?;
        // The exit code shows only the signal.
        check_output(&String::from_utf8_lossy(&output.stdout))?;
        let log = self.log;
        tokio::task::spawn_blocking(move || Requests::read(&log)).await?
    }
}

impl Requests {
    fn read(log: &Path) -> anyhow::Result<Self> {
        let context = || format!("read fio's log {}", log.display());
        let text = std::fs::read_to_string(log).with_context(context)?;
        std::fs::remove_file(log).with_context(context)?;
        Self::parse(&text).with_context(context)
    }

    fn parse(text: &str) -> anyhow::Result<Self> {
        let lines = text.lines().filter(|line| !line.is_empty());
        let requests = lines.map(|line| Request::parse(line).with_context(|| format!("the line \"{line}\"")));
        let mut requests = requests.collect::<anyhow::Result<Vec<_>>>()?;
        requests.sort_by_key(|request| request.completed_ms);
        Ok(Self(requests))
    }

    /// Returns the guest's figures in a span of milliseconds since 1970. Latencies are those of all requests in flight in the
    /// span, even of those that ended later. Fails if there were none.
    pub(super) fn felt(&self, span: Range<u64>) -> anyhow::Result<Felt> {
        let completed = self.completed_in(span.clone()).len();
        let under_way = self.0.iter().filter(|request| {
            request.completed_ms >= span.start && request.submitted_ms() < span.end.max(span.start + 1)
        });
        let mut latencies: Vec<u64> = under_way.map(|request| request.latency_ns).collect();
        latencies.sort_unstable();
        let worst = latencies.last().context("the guest did nothing: measure for longer")?;
        let p99 = latencies[(latencies.len() - 1) * 99 / 100];
        let seconds = (span.end - span.start).max(1) as f64 / 1e3;
        Ok(Felt {
            iops: completed as f64 / seconds,
            worst_latency_ms: *worst as f64 / 1e6,
            p99_latency_ms: p99 as f64 / 1e6,
        })
    }

    pub(super) fn iops(&self, span: Range<u64>) -> f64 {
        let seconds = span.end.saturating_sub(span.start).max(1) as f64 / 1e3;
        self.completed_in(span).len() as f64 / seconds
    }

    /// Returns the guest's requests a second in whole steps of a span, by seconds since `zero`.
    pub(super) fn life(&self, span: Range<u64>, zero: u64, step_ms: u64) -> Vec<(f64, f64)> {
        let begins = (span.start..span.end).step_by(step_ms as usize);
        let whole = begins.filter(|begin| begin + step_ms <= span.end);
        let seconds = |ms: u64| (ms as f64 - zero as f64) / 1e3;
        whole.map(|begin| (seconds(begin), self.iops(begin..begin + step_ms))).collect()
    }

    /// Returns the figures of one kind of request that completed in a span.
    pub(super) fn spent(&self, direction: Direction, span: Range<u64>) -> Spent {
        let seconds = span.end.saturating_sub(span.start).max(1) as f64 / 1e3;
        let completed = self.completed_in(span).iter().filter(|request| request.direction == direction);
        let latencies: Vec<f64> = completed.map(|request| request.latency_ns as f64 / 1e6).collect();
        let count = latencies.len().max(1) as f64;
        let mean_ms = latencies.iter().sum::<f64>() / count;
        let squares = latencies.iter().map(|latency| (latency - mean_ms).powi(2));
        Spent { iops: latencies.len() as f64 / seconds, mean_ms, variance_ms2: squares.sum::<f64>() / count }
    }

    pub(super) fn offsets_written(&self, span: Range<u64>) -> impl Iterator<Item = u64> {
        let completed = self.completed_in(span).iter();
        completed.filter(|request| request.direction == Direction::Write).map(|request| request.offset)
    }

    /// Returns the blocks written by requests that ended at `since_ms` or later.
    pub(super) fn written_since(&self, since_ms: u64) -> Blocks {
        let mut blocks = Blocks::default();
        for request in self.completed_in(since_ms..u64::MAX) {
            if request.direction == Direction::Write {
                blocks.add(request.offset, request.bytes);
            }
        }
        blocks
    }

    pub(super) fn writes(&self) -> u64 {
        self.0.iter().filter(|request| request.direction == Direction::Write).count() as u64
    }

    /// Returns when the last write to a byte ended; `None`: no write touched it.
    pub(super) fn written_last(&self, byte: u64) -> Option<u64> {
        let touches = |request: &&Request| {
            request.direction == Direction::Write
                && (request.offset..request.offset + request.bytes).contains(&byte)
        };
        self.0.iter().rev().find(touches).map(|request| request.completed_ms)
    }

    fn completed_in(&self, span: Range<u64>) -> &[Request] {
        let place = |ms| self.0.partition_point(|request| request.completed_ms < ms);
        &self.0[place(span.start)..place(span.end).max(place(span.start))]
    }
}

impl Request {
    /// Parses a line: `completed, latency, direction, bytes, offset, priority`.
    fn parse(line: &str) -> anyhow::Result<Self> {
        let mut fields = line.split(',').map(str::trim);
        let mut number = || -> anyhow::Result<u64> { Ok(fields.next().context("it is too short")?.parse()?) };
        let (completed_ms, latency_ns) = (number()?, number()?);
        let direction = match number()? {
            0 => Direction::Read,
            1 => Direction::Write,
            other => bail!("{other} is no direction"),
        };
        Ok(Self { completed_ms, latency_ns, direction, bytes: number()?, offset: number()? })
    }

    fn submitted_ms(&self) -> u64 {
        self.completed_ms.saturating_sub(self.latency_ns / 1_000_000)
    }
}

/// What a guest does, and for how long before and after a migration.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work<'a> {
    /// Its disk, and the process that serves that.
    pub(super) uri: &'a str,
    pub(super) server: u32,
    pub(super) size_bytes: u64,
    pub(super) load: Load,
    pub(super) before: Duration,
    pub(super) after: Duration,
}

/// Carries out a migration while a guest works; returns the guest's requests, and what the migration gives.
pub(super) async fn under_guest<T>(
    folder: &BenchFolder,
    work: Work<'_>,
    migration: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<(Requests, T)> {
    let guest = Guest::start(work.uri, work.size_bytes, work.load, folder)?;
    wait_for_guest(work.server).await?;
    sleep(work.before).await;
    let migrated = migration.await?;
    sleep(work.after).await;
    Ok((guest.stop().await?, migrated))
}

/// Waits until the server reads or writes for its guest; fio prints nothing before its end. Fails if no request comes,
/// or the server has ended.
async fn wait_for_guest(server: u32) -> anyhow::Result<()> {
    let idle = bytes_moved(server)?;
    let give_up_at = Instant::now() + START_DEADLINE;
    while bytes_moved(server)?.saturating_sub(idle) < START_BYTES {
        ensure!(Instant::now() < give_up_at, "fio has not begun within {} s", START_DEADLINE.as_secs());
        sleep(START_PAUSE).await;
    }
    Ok(())
}

pub(super) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A log of fio 3.33.
    const LOG: &str = "\
1000, 2000000, 0, 8192, 4046848, 0
1050, 1000000, 1, 8192, 8192, 0
1100, 500000, 0, 8192, 0, 0
1900, 750000000, 1, 8192, 16384, 0
1999, 100000, 0, 8192, 0, 0
";

    #[test]
    fn a_window_counts_what_completes_and_feels_what_is_under_way() {
        let requests = Requests::parse(LOG).unwrap();
        let felt = requests.felt(1000..1200).unwrap();
        // Three requests completed in 0.2 s; that of 750 ms was submitted within.
        assert_eq!((felt.iops, felt.worst_latency_ms, felt.p99_latency_ms), (15.0, 750.0, 2.0));
        assert_eq!(requests.felt(1950..2000).unwrap().worst_latency_ms, 0.1);
        assert!(requests.felt(3000..4000).is_err());
    }

    #[test]
    fn reads_and_writes_are_told_apart() {
        let requests = Requests::parse(LOG).unwrap();
        // Reads of 2, 0.5 and 0.1 ms, writes of 1 and 750 ms.
        let reads = requests.spent(Direction::Read, 1000..2000);
        assert_eq!((reads.iops, (reads.mean_ms * 1e6).round()), (3.0, 866_667.0));
        let writes = requests.spent(Direction::Write, 1000..2000);
        assert_eq!((writes.iops, writes.mean_ms, writes.variance_ms2), (2.0, 375.5, 374.5 * 374.5));
        assert_eq!(requests.offsets_written(1000..2000).collect::<Vec<_>>(), [8192, 16384]);
        assert_eq!(requests.spent(Direction::Read, 5000..6000), Spent::default());
    }

    #[test]
    fn a_life_is_of_whole_steps_around_the_beginning() {
        let requests = Requests::parse(LOG).unwrap();
        assert_eq!(requests.life(1000..1250, 1100, 100), [(-0.1, 20.0), (0.0, 10.0)]);
    }

    #[tokio::test]
    async fn what_was_written_late_is_excepted() {
        let folder = tempfile::tempdir().unwrap();
        let paths = ["first", "second"].map(|name| folder.path().join(name));
        let mut bytes = vec![0; 32768];
        std::fs::write(&paths[0], &bytes).unwrap();
        bytes[20000] = 1;
        std::fs::write(&paths[1], &bytes).unwrap();
        let requests = Requests::parse(LOG).unwrap();
        let compared = async |since| {
            crate::bench::image::compare(&paths[0], &paths[1], requests.written_since(since)).await.unwrap()
        };
        let late = compared(1900).await;
        assert_eq!((late.bytes, late.first_difference), (32768 - 8192, None));
        assert_eq!(compared(1901).await.first_difference, Some(16384));
        assert_eq!(compared(1000).await.bytes, 32768 - 16384);
    }

    #[test]
    fn lines_of_another_shape_are_refused() {
        for line in ["1000, 5", "1000, 5, 2, 8192, 0, 0", "a, 5, 0, 8192, 0"] {
            assert!(Requests::parse(line).is_err(), "{line}");
        }
        assert!(Requests::parse("").unwrap().0.is_empty());
    }
}
