//! `bench nbd`: what Sterna costs a client, between it and the disk.

mod trace;

use std::path::PathBuf;
use std::time::Duration;

use serde_json::json;

use self::trace::StageSample;
use super::fio::{Disk, Job, Measured, Pattern};
use super::image::{Holes, drop_caches, fill};
use super::metric::{Metric, Unit};
use super::report::{Comparison, Sample, Section};
use super::runner::{About, Ground, Part, Scenario, Turn};
use super::server::{Sterna, StorageDaemon};
use super::tools::{FIO, STORAGE_DAEMON};
use super::{Common, chosen, one_of};
use crate::demo::Progress;

/// Measures the performance of NBD clients, beside the raw file and qemu-storage-daemon.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct NbdOptions {
    #[command(flatten)]
    common: Common,
    /// Duration of each measurement.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=3600))]
    seconds: u32,
    /// Measure this alone; may be given several times.
    #[arg(long, value_name = "WORKLOAD", value_parser = one_of(WORKLOADS.iter().map(|load| (load.name, load.title))))]
    only: Vec<String>,
    /// Also measure the parts of a request's time inside the daemon, which slows it a little.
    #[arg(long)]
    trace: bool,
}

const HELP: &str = "\
Examples:
  sterna bench nbd
  sterna bench nbd --only mixed-16 --rounds 3 --folder /srv/fast
  sterna bench nbd --only mixed-1 --only mixed-16 --trace
  sterna bench nbd --html nbd.html --json > nbd.json

One image is measured raw, through a temporary daemon, and through qemu-storage-daemon, in turns, by \
fio: an image of 2 GiB in 5 rounds, unless you say otherwise. It needs no root and leaves nothing behind; it needs fio and \
qemu-storage-daemon (Debian: fio, qemu-system-common). Let the machine be idle meanwhile.";

#[derive(Clone, Copy, Debug)]
pub(super) struct Workload {
    name: &'static str,
    title: &'static str,
    job: Job,
}

const fn workload(
    name: &'static str,
    title: &'static str,
    pattern: Pattern,
    block_bytes: u32,
    depth: u32,
) -> Workload {
    Workload { name, title, job: Job { pattern, block_bytes, depth } }
}

const MIXED: Pattern = Pattern::RandomMixed { reads_percent: 70 };
/// The time of a single request, a busy database, the most requests a second, a backup, and a restore.
const WORKLOADS: [Workload; 5] = [
    workload("mixed-1", "8 KiB random, 70 % reads, depth 1", MIXED, 8 << 10, 1),
    workload("mixed-16", "8 KiB random, 70 % reads, depth 16", MIXED, 8 << 10, 16),
    workload("reads-16", "4 KiB random reads, depth 16", Pattern::RandomReads, 4 << 10, 16),
    // Eight requests keep a disk busy with 1 MiB each, as those of `qemu-img` do.
    workload("sequential-reads", "1 MiB sequential reads, depth 8", Pattern::SequentialReads, 1 << 20, 8),
    workload("sequential-writes", "1 MiB sequential writes, depth 8", Pattern::SequentialWrites, 1 << 20, 8),
];

impl Workload {
    /// Returns the metric of throughput: bytes a second say more of large requests.
    fn throughput(self) -> Metric {
        if self.job.block_bytes >= 1 << 20 { BYTES } else { IOPS }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Server {
    /// The image without a server: the limit.
    Raw,
    Sterna,
    StorageDaemon,
}

const RAW: &str = "raw";
const PEER: &str = "qemu-storage-daemon";
const SERVERS: [(&str, Server); 3] =
    [(RAW, Server::Raw), ("sterna", Server::Sterna), (PEER, Server::StorageDaemon)];

const IOPS: Metric = Metric::more("iops", "IOPS", Unit::PerSecond);
const BYTES: Metric = Metric::more("bytes_per_second", "MiB/s", Unit::BytesPerSecond);
/// One request of `depth` completes every 1 ÷ IOPS, so each is under way for depth ÷ IOPS, the client included.
const TIME: Metric = Metric::less("us_per_request", "us", Unit::Microseconds);
const MEAN: Metric = Metric::less("mean_latency_us", "LATENCY us", Unit::Microseconds);
const P99: Metric = Metric::less("p99_latency_us", "99 % us", Unit::Microseconds);
const MAX: Metric = Metric::less("max_latency_us", "MAX us", Unit::Microseconds);
/// Without a server, the client itself uses the disk.
const CPU: Metric = Metric::less("cpu_us_per_request", "CPU us", Unit::Microseconds);
const CLIENT_CPU: Metric = Metric::less("client_cpu_us_per_request", "FIO us", Unit::Microseconds);
const TO_RAW: Metric = Metric::more("iops_to_raw", "OF RAW", Unit::Ratio);
const ADDED: Metric = Metric::less("added_us_per_request", "ADDED us", Unit::Microseconds);
const TO_PEER: Metric = Metric::more("iops_to_peer", "throughput ÷ that of qemu-storage-daemon", Unit::Ratio);
const ADDED_TO_PEER: Metric = Metric::less("added_to_peer", "added time ÷ its added time", Unit::Ratio);
const CPU_TO_PEER: Metric = Metric::less("cpu_to_peer", "CPU time ÷ its CPU time", Unit::Ratio);

const COMPARISONS: [Comparison; 5] = [
    Comparison { of: IOPS, rows: &[], beside: &[RAW], gives: TO_RAW },
    Comparison { of: TIME, rows: &[], beside: &[RAW], gives: ADDED },
    Comparison { of: IOPS, rows: &["sterna"], beside: &[PEER], gives: TO_PEER },
    Comparison { of: ADDED, rows: &["sterna"], beside: &[PEER], gives: ADDED_TO_PEER },
    Comparison { of: CPU, rows: &["sterna"], beside: &[PEER], gives: CPU_TO_PEER },
];

impl Scenario for NbdOptions {
    type Case = Workload;
    type Stage = PathBuf;
    type Variant = Server;

    fn about(&self) -> anyhow::Result<About> {
        Ok(About {
            name: "nbd",
            title: "Sterna beside the raw disk and QEMU's storage daemon",
            words: format!("What clients get over NBD from the image, for {} s each.", self.seconds),
            tools: &[FIO, STORAGE_DAEMON],
            images: 1,
            usual: (5, 2 << 30),
            settings: json!({ "seconds": self.seconds, "trace": self.trace }),
        })
    }

    fn common(&self) -> &Common {
        &self.common
    }

    fn stages(&self, _: &Ground<'_>) -> Vec<Vec<Part<Workload, Server>>> {
        let parts = chosen(&WORKLOADS, |load| load.name, &self.only).flat_map(|load| {
            let throughput = load.throughput();
            let section = Section {
                name: load.name.to_owned(),
                title: load.title.to_owned(),
                columns: vec![throughput, TO_RAW, ADDED, MEAN, P99, CPU],
                comparisons: COMPARISONS.to_vec(),
                ..Section::default()
            };
            let traced = self.trace.then(|| trace::section(load.name));
            let part = Part { section, points: vec![(None, load)], variants: SERVERS.to_vec() };
            let rows_of_others = |section| Part { section, points: Vec::new(), variants: Vec::new() };
            std::iter::once(part).chain(traced.map(rows_of_others))
        });
        vec![parts.collect()]
    }

    async fn set(
        &self,
        ground: &Ground<'_>,
        _: Workload,
        progress: &mut Progress,
    ) -> anyhow::Result<PathBuf> {
        let image = ground.folder.path("disk.img");
        progress.begin("filling the image");
        fill(&image, ground.size_bytes, Holes::None, progress).await?;
        Ok(image)
    }

    async fn play(
        &self,
        ground: &Ground<'_>,
        image: &mut PathBuf,
        turn: Turn<'_, Workload, Server>,
    ) -> anyhow::Result<Vec<Sample>> {
        let job = turn.case.job;
        let folder = ground.folder.root();
        let run = async |disk: Disk<'_>| job.run(disk, ground.size_bytes, self.seconds, folder).await;
        drop_caches(&[image]).await?;
        match turn.variant {
            Server::Raw => Ok(vec![sample(job, run(Disk::File(image)).await?, None)]),
            Server::Sterna => {
                let variables = if self.trace { &trace::LOG[..] } else { &[] };
                let server = Sterna::start(ground, image, variables).await?;
                let before = server.cpu_time()?;
                let measured = run(Disk::Nbd { uri: &server.volume.uri }).await?;
                let cpu = server.cpu_time()?.saturating_sub(before);
                let read = |log: &std::path::Path| if self.trace { trace::read(log) } else { Ok(Vec::new()) };
                let traced = server.stop_and(read).await?;
                let traced = StageSample::samples(&traced, turn.part);
                Ok(std::iter::once(sample(job, measured, Some(cpu))).chain(traced).collect())
            }
            Server::StorageDaemon => {
                let server = StorageDaemon::start(&ground.folder, &[("disk", image)]).await?;
                let before = server.cpu_time()?;
                let measured = run(Disk::Nbd { uri: server.uri() }).await?;
                let cpu = server.cpu_time()?.saturating_sub(before);
                server.stop().await?;
                Ok(vec![sample(job, measured, Some(cpu))])
            }
        }
    }
}

fn sample(job: Job, measured: Measured, server_cpu: Option<Duration>) -> Sample {
    let server_cpu = server_cpu.map(|cpu| cpu.as_secs_f64() * 1e6 / measured.requests as f64);
    Sample::of([
        (IOPS, measured.iops),
        (BYTES, measured.bytes_per_second),
        (TIME, f64::from(job.depth) / measured.iops * 1e6),
        (MEAN, measured.mean_latency_us),
        (P99, measured.p99_latency_us),
        (MAX, measured.max_latency_us),
        (CPU, server_cpu.unwrap_or(measured.client_cpu_us_per_request)),
        (CLIENT_CPU, measured.client_cpu_us_per_request),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::report::Results;

    fn measured(iops: f64) -> Measured {
        Measured {
            requests: iops as u64,
            seconds: 1.0,
            iops,
            bytes_per_second: iops * 8192.0,
            mean_latency_us: 16e6 / iops,
            p99_latency_us: 900.0,
            max_latency_us: 1900.0,
            client_cpu_us_per_request: 3.0,
        }
    }

    #[test]
    fn sterna_is_compared_with_the_raw_file_and_with_its_peer() {
        let job = WORKLOADS[1].job;
        let mut results = Results::of(1);
        for (name, iops, cpu_us) in
            [(RAW, 64_000.0, None), ("sterna", 50_000.0, Some(6.0)), (PEER, 40_000.0, Some(12.0))]
        {
            let cpu = cpu_us.map(|us| Duration::from_secs_f64(us * iops / 1e6));
            results.keep("mixed-16", name, None, 0, sample(job, measured(iops), cpu));
        }
        let section =
            Section { name: "mixed-16".to_owned(), comparisons: COMPARISONS.to_vec(), ..Section::default() };
        results.compare(&section);
        let (found, _) = results.into_found();
        let of = |variant: &str, metric| {
            let found = found.iter().find(|found| found.variant == variant && found.metric == metric);
            found.map(|found| (found.summary.median * 1e6).round() / 1e6)
        };
        assert_eq!([of("sterna", TO_PEER), of("sterna", CPU_TO_PEER)], [Some(1.25), Some(0.5)]);
        assert_eq!([of("sterna", TO_RAW), of(RAW, TO_RAW)], [Some(0.78125), None]);
        // 16 ÷ 50,000 s less 16 ÷ 64,000 s.
        assert_eq!([of("sterna", ADDED), of(PEER, ADDED)], [Some(70.0), Some(150.0)]);
        assert_eq!(of("sterna", ADDED_TO_PEER), Some(0.466_667));
        assert_eq!(of(RAW, CPU), Some(3.0));
    }
}
