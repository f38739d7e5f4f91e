//! fio: one job, and its figures.
//!
//! Every contender gets the same job; only the engine and its target differ. A fixed seed makes all contenders serve the same
//! blocks in the same order.

use std::path::Path;
use std::process::Stdio;

use anyhow::{Context as _, bail, ensure};
use serde::Deserialize;
use tokio::process::Command;

use super::tools::FIO;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Job {
    /// The kind of requests, and their order.
    pub(super) pattern: Pattern,
    /// Size of a request in bytes.
    pub(super) block_bytes: u32,
    /// Number of requests in flight.
    pub(super) depth: u32,
}

/// The kinds of requests that a job makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pattern {
    /// Reads and writes of random blocks.
    RandomMixed {
        /// Share of reads, in per cent.
        reads_percent: u32,
    },
    /// Reads and writes of random blocks, some of them much more often than others.
    ZipfMixed {
        /// Share of reads, in per cent.
        reads_percent: u32,
        /// The exponent of the distribution, in hundredths.
        theta_percent: u32,
    },
    RandomReads,
    RandomWrites,
    /// Reads from the beginning to the end, and again.
    SequentialReads,
    /// Writes from the beginning to the end, and again.
    SequentialWrites,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Disk<'a> {
    File(&'a Path),
    Nbd {
        /// `nbd+unix:///NAME?socket=PATH`.
        uri: &'a str,
    },
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Measured {
    pub(super) requests: u64,
    pub(super) seconds: f64,
    /// Completed requests per second.
    pub(super) iops: f64,
    pub(super) bytes_per_second: f64,
    /// Mean time of a request, from its submission to its completion, in microseconds.
    pub(super) mean_latency_us: f64,
    /// Time within which 99 % of the requests completed, in microseconds.
    pub(super) p99_latency_us: f64,
    /// The longest time of a request, in microseconds.
    pub(super) max_latency_us: f64,
    /// CPU time of fio itself, in microseconds per request.
    pub(super) client_cpu_us_per_request: f64,
}

impl Job {
    /// Returns the command that does this job for `seconds` to the first `size_bytes` of a disk. fio works in `folder`.
    pub(super) fn command(self, disk: Disk<'_>, size_bytes: u64, seconds: u32, folder: &Path) -> Command {
        let mut command = FIO.command();
        // A thread rather than a process: killing fio then kills the job.
        command.current_dir(folder).args(["--name=bench", "--thread"]);
        match disk {
            Disk::File(path) => {
                // A colon would begin another file's name.
                let path = path.to_string_lossy().replace('\\', "\\\\").replace(':', "\\:");
                command.args(["--ioengine=io_uring", "--direct=1", &format!("--filename={path}")])
            }
            Disk::Nbd { uri } => command.args(["--ioengine=nbd", &format!("--uri={uri}")]),
        };
        match self.pattern {
            Pattern::RandomMixed { reads_percent } => {
                command.args(["--rw=randrw", &format!("--rwmixread={reads_percent}")])
            }
            Pattern::ZipfMixed { reads_percent, theta_percent } => command.args([
                "--rw=randrw",
                &format!("--rwmixread={reads_percent}"),
                &format!("--random_distribution=zipf:{}", f64::from(theta_percent) / 100.0),
            ]),
            Pattern::RandomReads => command.arg("--rw=randread"),
            Pattern::RandomWrites => command.arg("--rw=randwrite"),
            Pattern::SequentialReads => command.arg("--rw=read"),
            Pattern::SequentialWrites => command.arg("--rw=write"),
        };
        let Self { block_bytes, depth, .. } = self;
        command
            .arg(format!("--size={size_bytes}"))
            .arg(format!("--bs={block_bytes}"))
            .arg(format!("--iodepth={depth}"))
            // The map of visited blocks costs the client time, and only verifying jobs need it.
            .args(["--norandommap", "--randrepeat=1"])
            .args(["--time_based", &format!("--runtime={seconds}")])
            // Servers treat reads and writes alike, so they are reported as one kind.
            .args(["--unified_rw_reporting=1", "--output-format=json", "--eta=never"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    pub(super) async fn run(
        self,
        disk: Disk<'_>,
        size_bytes: u64,
        seconds: u32,
        folder: &Path,
    ) -> anyhow::Result<Measured> {
        let output = self.command(disk, size_bytes, seconds, folder).output().await;
        let output = output.map_err(|error| FIO.explain(error))?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "fio ended with {}: {}", output.status, said.trim());
        Measured::parse(&String::from_utf8_lossy(&output.stdout))
    }
}

impl Measured {
    /// Reads what fio prints with `--output-format=json` and `--unified_rw_reporting=1` about one job. Fails for another shape,
    /// for an error, and for a job without requests.
    pub(super) fn parse(output: &str) -> anyhow::Result<Self> {
        let job = only_job(output)?;
        let Requests { total_ios, io_bytes, runtime, lat_ns, clat_ns } = &job.mixed;
        ensure!(*total_ios > 0 && *runtime > 0, "fio completed no request");
        let seconds = *runtime as f64 / 1e3;
        let requests = *total_ios as f64;
        // An option of fio could leave them out; zeroes would say nothing.
        let p99_ns = clat_ns.percentile.get("99.000000").context("fio printed no percentiles")?;
        Ok(Self {
            requests: *total_ios,
            seconds,
            iops: requests / seconds,
            bytes_per_second: *io_bytes as f64 / seconds,
            mean_latency_us: lat_ns.mean / 1e3,
            p99_latency_us: p99_ns / 1e3,
            max_latency_us: lat_ns.max / 1e3,
            client_cpu_us_per_request: (job.usr_cpu + job.sys_cpu) / 100.0 * seconds * 1e6 / requests,
        })
    }
}

/// Checks in fio's output that no request has failed, and that there was one.
pub(super) fn check_output(output: &str) -> anyhow::Result<()> {
    let job = only_job(output)?;
    ensure!(job.mixed.total_ios > 0, "fio completed no request");
    Ok(())
}

fn only_job(output: &str) -> anyhow::Result<OutputJob> {
    // Warnings come before the JSON, on the same stream.
    let begin = output.find('{').context("fio printed no figures")?;
    let output: Output = serde_json::from_str(&output[begin..]).context("read the figures of fio")?;
    let jobs = output.jobs.len();
    let Ok([job]) = <[OutputJob; 1]>::try_from(output.jobs) else {
        bail!("fio tells of {jobs} jobs, not of one")
    };
    ensure!(job.error == 0, "a request of fio failed: {}", std::io::Error::from_raw_os_error(job.error));
    Ok(job)
}

#[derive(Debug, Deserialize)]
struct Output {
    jobs: Vec<OutputJob>,
}

#[derive(Debug, Deserialize)]
struct OutputJob {
    error: i32,
    /// User time, in per cent of the job's time.
    usr_cpu: f64,
    /// System time, in per cent of the job's time.
    sys_cpu: f64,
    mixed: Requests,
}

#[derive(Debug, Deserialize)]
struct Requests {
    total_ios: u64,
    io_bytes: u64,
    runtime: u64,
    lat_ns: Latency,
    /// From the end of the submission to completion; only this time has percentiles.
    clat_ns: Latency,
}

#[derive(Debug, Deserialize)]
struct Latency {
    mean: f64,
    max: f64,
    #[serde(default)]
    percentile: std::collections::BTreeMap<String, f64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The output of fio 3.33, with one in ten of its fields.
    const OUTPUT: &str = r#"fio: some warning
{"fio version": "fio-3.33", "jobs": [{"jobname": "bench", "error": 0, "elapsed": 3,
  "mixed": {"io_bytes": 409600000, "bw_bytes": 204800000, "iops": 25000.0, "runtime": 2000, "total_ios": 50000,
    "slat_ns": {"min": 811, "max": 5000, "mean": 900.5, "stddev": 1.0, "N": 50000},
    "clat_ns": {"min": 80, "max": 15986589, "mean": 406535.9, "stddev": 1.0, "N": 50000,
      "percentile": {"50.000000": 238592, "99.000000": 5603328}},
    "lat_ns": {"min": 1342, "max": 15991487, "mean": 416235.4, "stddev": 1.0, "N": 50000}},
  "job_runtime": 2000, "usr_cpu": 10.0, "sys_cpu": 40.0, "ctx": 9069}], "disk_util": []}
"#;

    #[test]
    fn figures_are_read_from_the_output() {
        let measured = Measured::parse(OUTPUT).unwrap();
        let expected = Measured {
            requests: 50_000,
            seconds: 2.0,
            iops: 25_000.0,
            bytes_per_second: 204_800_000.0,
            mean_latency_us: 416.2354,
            p99_latency_us: 5603.328,
            max_latency_us: 15_991.487,
            client_cpu_us_per_request: 20.0,
        };
        assert_eq!(measured, expected);
    }

    #[test]
    fn what_tells_of_a_failure_or_of_nothing_is_refused() {
        let check = |from: &str, to: &str, words: &str| {
            let error = format!("{:#}", Measured::parse(&OUTPUT.replace(from, to)).unwrap_err());
            assert!(error.contains(words), "{error}");
        };
        check(r#""error": 0"#, r#""error": 5"#, "Input/output error");
        check(r#""total_ios": 50000"#, r#""total_ios": 0"#, "no request");
        check(r#""runtime": 2000,"#, r#""runtime": 0,"#, "no request");
        check(r#""mixed""#, r#""read""#, "missing field `mixed`");
        let failed = check_output(&OUTPUT.replace(r#""error": 0"#, r#""error": 5"#)).unwrap_err().to_string();
        assert!(failed.contains("Input/output error") && check_output(OUTPUT).is_ok(), "{failed}");
        check("99.000000", "98.000000", "percentiles");
        assert!(Measured::parse("fio: failed").is_err());
        assert!(Measured::parse(r#"{"jobs": []}"#).unwrap_err().to_string().contains("0 jobs"));
    }

    #[test]
    fn contenders_get_the_same_job_but_for_the_engine() {
        let job = Job { pattern: Pattern::RandomMixed { reads_percent: 70 }, block_bytes: 8192, depth: 16 };
        let arguments = |disk| {
            let command = job.command(disk, 1 << 20, 3, Path::new("/"));
            let arguments =
                command.as_std().get_args().map(|argument| argument.to_string_lossy().into_owned());
            arguments.collect::<Vec<_>>()
        };
        let raw = arguments(Disk::File(Path::new("/odd:name")));
        assert_eq!(raw[2..5], ["--ioengine=io_uring", "--direct=1", "--filename=/odd\\:name"]);
        let served = arguments(Disk::Nbd { uri: "nbd+unix:///e?socket=/s" });
        assert_eq!(served[2..4], ["--ioengine=nbd", "--uri=nbd+unix:///e?socket=/s"]);
        assert_eq!(raw[5..], served[4..]);
        assert!(raw.contains(&"--rwmixread=70".to_owned()) && raw.contains(&"--iodepth=16".to_owned()));
    }
}
