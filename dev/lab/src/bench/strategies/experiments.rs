//! The experiments: their parts, what varies in them, and what the paper says.

use super::equation::DEPTH;
use super::{BETWEEN_HOSTS, Device, Named, OF_ROUNDS, Scale, StrategiesOptions, Variant, between_stores};
use crate::bench::fio::{Job, Pattern};
use crate::bench::guest::{Limit, Load};
use crate::bench::metric::{Metric, Unit};
use crate::bench::report::{Place, Section};
use crate::bench::runner::Part;
use crate::network::BitRate;

/// What is measured together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Experiment {
    Outstanding,
    Size,
    Database,
    Rewrites,
    Rounds,
    SlowTarget,
    OverTime,
    Hosts,
    /// The sizes of `Hosts`.
    HostsSize,
}

/// The experiments that can be chosen.
pub(super) const EXPERIMENTS: [(&str, Experiment, &str); 8] = [
    (
        "outstanding",
        Experiment::Outstanding,
        "Migration time, downtime and penalty against requests in flight",
    ),
    ("size", Experiment::Size, "Migration time and downtime against disk size"),
    ("database", Experiment::Database, "A database at one and two times its intensity"),
    ("rewrites", Experiment::Rewrites, "How often the same blocks are written"),
    ("rounds", Experiment::Rounds, "Blocks copied in each round"),
    ("slow-target", Experiment::SlowTarget, "A target that is ten times as slow"),
    ("over-time", Experiment::OverTime, "A guest's requests over time"),
    (
        "hosts",
        Experiment::Hosts,
        "All strategies between two hosts, under a guest that writes faster than the link carries",
    ),
];

#[derive(Clone, Copy, Debug)]
pub(in crate::bench) struct Case {
    pub(super) experiment: Experiment,
    pub(super) size_bytes: u64,
    pub(super) load: Load,
    pub(super) target: Device,
}

pub(super) const MOVED: Metric = Metric::more("moved", "MOVED", Unit::Happened);
pub(super) const SECONDS: Metric = Metric::less("seconds", "SECONDS", Unit::Seconds);
pub(super) const TO_OFFLINE: Metric = Metric::less("seconds_to_offline", "TIME / OFF-LINE", Unit::Ratio);
pub(super) const DOWNTIME: Metric = Metric::less("downtime_ms", "DOWNTIME ms", Unit::Milliseconds);
pub(super) const LOST_READS: Metric = Metric::less("reads_lost", "READS LOST", Unit::Part);
pub(super) const LOST_WRITES: Metric = Metric::less("writes_lost", "WRITES LOST", Unit::Part);
pub(super) const LOST: Metric = Metric::less("requests_lost", "LOST", Unit::Part);
/// For how long the guest might as well have stood still, in off-line copies.
pub(super) const TIME_X_LOSS: Metric = Metric::less("time_times_lost", "TIME / OFF-LINE x LOSS", Unit::Ratio);
pub(super) const HANDED_OVER: Metric = Metric::less("handed_over_seconds", "HANDED OVER s", Unit::Seconds);
pub(super) const HANDOVER_TO_OFFLINE: Metric =
    Metric::less("handed_over_to_offline", "HANDOVER / OFF-LINE", Unit::Ratio);
pub(super) const FOLLOWED: Metric = Metric::less("bytes_followed", "FOLLOWED", Unit::Bytes);
pub(super) const PULLED: Metric = Metric::less("bytes_pulled", "PULLED", Unit::Bytes);
pub(super) const COPIED: Metric = Metric::less("bytes_copied", "COPIED", Unit::Bytes);
pub(super) const MIRRORED: Metric = Metric::less("bytes_mirrored", "MIRRORED", Unit::Bytes);
pub(super) const COMPARED: Metric = Metric::more("compared_bytes", "COMPARED", Unit::Bytes);
pub(super) const LATENCY: Metric = Metric::less("write_latency_ms", "WRITE LATENCY ms", Unit::Milliseconds);
pub(super) const VARIANCE: Metric =
    Metric::less("write_variance_ms2", "VARIANCE ms^2", Unit::SquareMilliseconds);
pub(super) const BLOCKS: Metric = Metric::less("blocks_of_image", "BLOCKS / IMAGE", Unit::Part);
pub(super) const REWRITTEN: Metric = Metric::less("writes_rewritten", "REWRITES", Unit::Part);
pub(super) const PHASE: Metric = Metric::less("phase_seconds", "SECONDS", Unit::Seconds);

pub(super) const DATABASE_PHASES: &str = "database-phases";
pub(super) const HOSTS_SIZE: &str = "hosts-size";

/// The link between two hosts.
pub(super) const RATE: BitRate = BitRate::megabits(400);
/// The guest writes all over three quarters of its disk, with requests as large as those of file systems.
const HOSTS_JOB: Job = Job { pattern: Pattern::RandomWrites, block_bytes: 64 << 10, depth: 8 };
/// The guest's rate of writes, in hundredths of the link's.
const PERCENT_OF_LINK: [u64; 2] = [50, 200];
/// The database's rate at one time its intensity, in hundredths of the device's.
const PERCENT_OF_DEVICE: u64 = 25;
/// How much slower a slow target is (\[ESX\] §3.4).
const TIMES: u64 = 10;

fn at(x: f64) -> Option<Place> {
    Some(Place { x, label: None })
}

pub(super) fn mebibytes(bytes: u64) -> f64 {
    (bytes >> 20) as f64
}

fn part(
    name: &str,
    title: &str,
    axis: &'static str,
    columns: Vec<Metric>,
    note: &str,
    points: Vec<(Option<Place>, Case)>,
    columns_measured: &[Named],
) -> Part<Case, Variant> {
    let (name, title, note) = (name.to_owned(), title.to_owned(), note.to_owned());
    let section = Section { name, title, axis, columns, note, ..Section::default() };
    let variants = columns_measured.iter().map(|(name, column)| (*name, Variant::Moves(*column))).collect();
    Part { section, points, variants }
}

impl StrategiesOptions {
    pub(super) fn parts(&self, experiment: Experiment, size_bytes: u64) -> Vec<Part<Case, Variant>> {
        let (scale, target) = (self.scale(), self.device());
        let usual = Case { experiment, size_bytes, load: Load::database_in_flight(DEPTH), target };
        let stores = between_stores();
        match experiment {
            Experiment::Outstanding => {
                let case = |depth: &u32| {
                    (at((*depth).into()), Case { load: Load::database_in_flight(*depth), ..usual })
                };
                let points = scale.depths().iter().map(case).collect();
                let columns = vec![TO_OFFLINE, DOWNTIME, LOST_READS, LOST_WRITES, TIME_X_LOSS, MOVED];
                let title = "migration time, downtime and penalty (Figures 4, 6, 8, 9)";
                vec![part("outstanding", title, "requests in flight", columns, OUTSTANDING, points, &stores)]
            }
            Experiment::Size => {
                let sizes = scale.quarters().iter().map(|quarters| size_bytes / 4 * quarters);
                let points = sizes
                    .map(|size_bytes| (at(mebibytes(size_bytes)), Case { size_bytes, ..usual }))
                    .collect();
                let columns = vec![TO_OFFLINE, DOWNTIME, MOVED];
                vec![part(
                    "size",
                    "migration time and downtime (Figures 5, 7)",
                    "MiB",
                    columns,
                    SIZE,
                    points,
                    &stores,
                )]
            }
            Experiment::Database => database(usual, &stores),
            Experiment::Rewrites => vec![rewrites(usual)],
            Experiment::Rounds => {
                let loads = [
                    ("rounds-uniform", "any block", usual.load),
                    ("rounds-zipf", "some blocks much more often than others", Load::zipf(None)),
                    ("rounds-zipf-writes", "the same, mostly writes", Load::zipf_writes()),
                ];
                let of_load = |(name, words, load): (&str, &str, Load)| {
                    let title = format!(
                        "blocks copied in each round after the first (Figure 3); the guest uses {words}"
                    );
                    let columns = vec![SECONDS, MOVED, COPIED, BLOCKS];
                    part(
                        name,
                        &title,
                        "round",
                        columns,
                        ROUNDS,
                        vec![(None, Case { load, ..usual })],
                        &OF_ROUNDS,
                    )
                };
                loads.map(of_load).into()
            }
            Experiment::SlowTarget => {
                let size_bytes = scale.slow_size(size_bytes);
                let case = Case { size_bytes, target: target.slower(TIMES), ..usual };
                let columns = vec![TO_OFFLINE, MOVED, LOST];
                let title = "a target that is ten times as slow (Figure 10)";
                vec![part("slow-target", title, "", columns, SLOW_TARGET, vec![(None, case)], &stores)]
            }
            Experiment::OverTime => {
                let title = "a guest's requests over time, and how long each phase took (Figure 11)";
                vec![part(
                    "over-time",
                    title,
                    "phase",
                    vec![SECONDS, PHASE],
                    OVER_TIME,
                    vec![(None, usual)],
                    &stores,
                )]
            }
            Experiment::Hosts | Experiment::HostsSize => hosts(scale, usual),
        }
    }
}

fn database(usual: Case, stores: &[Named]) -> Vec<Part<Case, Variant>> {
    let once = usual.target.operations_per_second * PERCENT_OF_DEVICE / 100;
    let case = |times: u32| {
        let load = Load::zipf(Some(u32::try_from(once).unwrap_or(u32::MAX).saturating_mul(times)));
        (at(times.into()), Case { load, ..usual })
    };
    let columns = vec![TO_OFFLINE, DOWNTIME, MOVED];
    let title = "migration time and downtime of a database (Table 1)";
    let phases = "write latency of the database at one time its intensity (Table 2)";
    vec![
        part("database", title, "intensity", columns, DATABASE, vec![case(1), case(2)], stores),
        part(DATABASE_PHASES, phases, "phase", vec![LATENCY, VARIANCE], PHASES, Vec::new(), &[]),
    ]
}

fn rewrites(usual: Case) -> Part<Case, Variant> {
    let variants = [("uniform", usual.load), ("zipf", Load::zipf(None))];
    let title = "how often each block was written, the most written first (Figure 2)";
    let part = part("rewrites", title, "", vec![REWRITTEN], REWRITES, vec![(None, usual)], &[]);
    Part { variants: variants.map(|(name, load)| (name, Variant::Works(load))).into(), ..part }
}

/// Returns every strategy between two hosts at two loads, and at several sizes with the first load.
fn hosts(scale: Scale, usual: Case) -> Vec<Part<Case, Variant>> {
    let load = |percent: u64| Load {
        job: HOSTS_JOB,
        limit: Some(Limit::Bytes(RATE.bytes_per_second() as u64 * percent / 100)),
    };
    let case = |percent: &u64| (at(*percent as f64 / 100.0), Case { load: load(*percent), ..usual });
    let columns = vec![HANDOVER_TO_OFFLINE, TO_OFFLINE, DOWNTIME, LOST_WRITES, FOLLOWED, PULLED, MOVED];
    let of_loads = |percents: &[u64]| {
        let points = percents.iter().map(case).collect();
        part(
            "hosts",
            "all strategies between two hosts",
            "guest's writes / link",
            columns.clone(),
            HOSTS,
            points,
            &BETWEEN_HOSTS,
        )
    };
    if scale == Scale::Tiny {
        // A guest that writes faster than the link takes too long for this scale.
        return vec![of_loads(&PERCENT_OF_LINK[..1])];
    }
    // The usual size is measured with the loads.
    let sizes = scale.quarters().iter().map(|quarters| usual.size_bytes / 4 * quarters);
    let sizes = sizes.filter(|size| *size != usual.size_bytes);
    let experiment = Experiment::HostsSize;
    let case = |size_bytes| {
        (at(mebibytes(size_bytes)), Case { experiment, size_bytes, load: load(PERCENT_OF_LINK[0]), ..usual })
    };
    let title = "time until the volume is the other host's, and downtime";
    let by_size = part(
        HOSTS_SIZE,
        title,
        "MiB",
        vec![HANDED_OVER, DOWNTIME],
        BY_SIZE,
        sizes.map(case).collect(),
        &BETWEEN_HOSTS,
    );
    vec![of_loads(&PERCENT_OF_LINK), by_size]
}

/// Returns whether a case is measured for the sizes of hosts as well as for the loads.
pub(super) fn is_usual_size(scale: Scale, case: Case) -> bool {
    let slowest = RATE.bytes_per_second() as u64 * PERCENT_OF_LINK[0] / 100;
    let is_slowest = matches!(case.load.limit, Some(Limit::Bytes(bytes)) if bytes == slowest);
    scale != Scale::Tiny && case.experiment == Experiment::Hosts && is_slowest
}

const OUTSTANDING: &str = "The paper: from 2 to 32 in flight mirroring takes 11.8 % longer (1.058 and 1.157 of off-line), tracking 2.74 \
    times and 3.96 times. Downtime: mirroring 0.1 ms longer from 2 to 32; tracking 2 to 3 s below 8, above 28 s at 32, where up to 5 s \
    were accepted. Loss: about 39 % for tracking below 32, the same for reads and writes; mirroring begins above that, and falls below \
    it. Time × loss: mirroring falls as requests in flight grow, tracking rises at 32.";
const SIZE: &str = "Off-line: of the same size. The paper: with size, mirroring takes at most 3.4 % longer than expected, tracking 13 %, \
    incremental 2.4 %. Downtime: mirroring below 0.5 s at any size, tracking below 5 s.";
const DATABASE: &str = "The paper, beside mirroring: tracking 1.53 times as long, incremental 1.37 times; at twice the intensity both \
    fail, and mirroring takes 0.95 times as long as before. Downtime: 13.3 s, incremental 7.6 s, mirroring 0.22 s; at twice the \
    intensity mirroring 0.19 s.";
const PHASES: &str = "The paper: 0.78 ms without a migration; while copying 3.62 ms, incremental 3.57 ms, mirroring 3.34 ms; in later \
    rounds 5.92 ms and 5.17 ms. Variance: 0.11 without a migration; while copying 0.36, incremental 0.54, mirroring 0.36; in later \
    rounds 1.55 and 1.47.";
const REWRITES: &str = "The paper: of three disks of a mail server all follow a Zipf-like distribution. [TPM], of whole runs: 11 % \
    building a kernel, 25.2 % a banking server, 35.6 % a disk benchmark. Here: of the few seconds that were measured, so the shares \
    grow with them.";
const ROUNDS: &str = "The first round copies everything and is left out, as in the paper: there, incremental tracking halves the next \
    one, and with hot blocks left to the last but one rounds 5 to 10 are not needed (tracking here; the paper's taller bars are \
    neither). The last is copied while guests are held.";
const SLOW_TARGET: &str = "The paper: mirroring ends, tracking is given up after several rounds; 2600 reads and 1100 writes a second \
    become 200 and 95. Equation 1 is of what the stores were set to, not of what was measured: at the source a request takes its \
    delay, or its turn; at the target its delay, behind what the mover has queued there.";
const OVER_TIME: &str = "The paper: the first copy takes the same time by each strategy; mirroring has no phase after it. Seconds are \
    not to be compared with other runs.";
const HOSTS: &str = "A guest that is to be away soon has to be handed over before its disk has arrived. After the handover what the \
    guest asks for crosses the link, too: it stays at the first host. The paper: 62 blocks of 4 KiB of 40 GB followed in 349 ms, after \
    four rounds at most (a web server). A guest that only writes whole blocks waits for nothing.";
const BY_SIZE: &str = "By post-copy the handover does not grow with the disk. What is missing is told ahead of the switch, so the \
    downtime does not grow with the disk.";
