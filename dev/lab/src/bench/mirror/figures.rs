//! The figures of `bench mirror`. The names of fields are a contract with readers of the JSON.

use serde::Serialize;

use super::Contender;
use crate::bench::Environment;
use crate::bench::guest::Moment;
use crate::bench::statistics::Summary;

/// All figures of `bench mirror`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MirrorReport {
    /// The machine and the programs that were measured.
    pub environment: Environment,
    /// Size of the image in bytes.
    pub size_bytes: u64,
    /// Number of rounds, each of which measured everything.
    pub rounds: u32,
    /// Copies of an unused image; `None` if not requested.
    pub idle: Option<IdleReport>,
    /// Migrations under a guest; `None` if not requested.
    pub load: Option<LoadReport>,
}

/// Copies of an unused image. Each was compared with its source, and is equal.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct IdleReport {
    /// Bytes of the image outside of holes.
    pub data_bytes: u64,
    /// The contenders' figures, Sterna first.
    pub contenders: Vec<IdleFigures>,
    /// Seconds of Sterna ÷ seconds of the quicker off-line copy of the same round.
    pub sterna_to_best_copy: Summary,
    /// Seconds of Sterna ÷ seconds of QEMU's quicker mirror of the same round.
    pub sterna_to_best_mirror: Summary,
}

/// How one contender copied.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct IdleFigures {
    /// The contender's name, for tables and JSON.
    pub name: &'static str,
    /// Time from the order until the copy is on the disk.
    pub seconds: Summary,
    /// Bytes of data ÷ seconds.
    pub bytes_per_second: Summary,
    /// CPU time of the server in seconds; `None` for programs that end by themselves.
    pub server_cpu_seconds: Option<Summary>,
    /// Bytes that the copy takes on the disk: holes are preserved if this is at most the data.
    pub allocated_bytes: Summary,
}

/// Migrations under a guest. Each target was compared with its source, except for what was written after the switch.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LoadReport {
    /// Limit of the guest's requests per second; `None`: no limit.
    pub guest_iops: Option<u32>,
    /// The contenders' figures, Sterna first.
    pub contenders: Vec<LoadFigures>,
    /// Seconds of Sterna ÷ seconds of QEMU's quicker mode in the same round.
    pub seconds_to_best_mirror: Summary,
    /// Time × loss of Sterna, less that of QEMU's better mode in the same round, in seconds.
    pub seconds_times_lost_less_best_mirror: Summary,
    /// Worst latency of Sterna ÷ that of QEMU's better mode in the same round.
    pub worst_latency_to_best_mirror: Summary,
}

/// One contender's migrations, and their cost for the guest.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LoadFigures {
    /// The contender's name, for tables and JSON.
    pub name: &'static str,
    /// Duration of the migration, in seconds.
    pub seconds: Summary,
    /// The guest's requests per second before the migration.
    pub iops_before: Summary,
    /// The guest's requests per second during the migration.
    pub iops_during: Summary,
    /// The guest's requests per second after the migration.
    pub iops_after: Summary,
    /// Share of requests that the guest lost during the migration: 1 − during ÷ before.
    pub iops_lost: Summary,
    /// Seconds × share lost: how long a complete stop of the guest would have cost as much.
    pub seconds_times_lost: Summary,
    /// Longest time of a request that was in flight during the migration, in milliseconds.
    pub worst_latency_ms: Summary,
    /// Time within which 99 % of these requests completed, in milliseconds.
    pub p99_latency_ms: Summary,
    /// Longest time of a request before the migration, in milliseconds.
    pub worst_latency_before_ms: Summary,
    /// CPU time of the server during the migration, in seconds.
    pub server_cpu_seconds: Summary,
    /// Bytes in which source and target were compared and equal.
    pub compared_bytes: Summary,
    /// The guest's moments, round by round.
    pub moments: Vec<Vec<Moment>>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct IdleSample {
    pub(super) seconds: f64,
    pub(super) server_cpu_seconds: Option<f64>,
    pub(super) allocated_bytes: u64,
}

#[derive(Clone, Debug)]
pub(super) struct LoadSample {
    pub(super) seconds: f64,
    pub(super) iops_before: f64,
    pub(super) iops_during: f64,
    pub(super) iops_after: f64,
    pub(super) iops_lost: f64,
    pub(super) seconds_times_lost: f64,
    pub(super) worst_latency_ms: f64,
    pub(super) p99_latency_ms: f64,
    pub(super) worst_latency_before_ms: f64,
    pub(super) server_cpu_seconds: f64,
    pub(super) compared_bytes: u64,
    pub(super) moments: Vec<Moment>,
}

impl IdleReport {
    /// Sums up the samples of [`Contender::IDLE`]; `None` without samples.
    pub(super) fn of(data_bytes: u64, samples: &[Vec<IdleSample>; 5]) -> Option<Self> {
        let figures = Contender::IDLE.into_iter().zip(samples);
        let figures = figures.map(|(contender, samples)| IdleFigures::of(contender, data_bytes, samples));
        let contenders = figures.collect::<Option<Vec<_>>>()?;
        let [sterna, copy, convert, background, blocking] = &contenders[..] else { return None };
        let best = |first: &IdleFigures, second: &IdleFigures| {
            Summary::of_pairs(&first.seconds, &second.seconds, f64::min)
        };
        Some(Self {
            data_bytes,
            sterna_to_best_copy: Summary::of_ratios(&sterna.seconds, &best(copy, convert)?)?,
            sterna_to_best_mirror: Summary::of_ratios(&sterna.seconds, &best(background, blocking)?)?,
            contenders,
        })
    }
}

impl IdleFigures {
    fn of(contender: Contender, data_bytes: u64, samples: &[IdleSample]) -> Option<Self> {
        let summary = |figure: &dyn Fn(&IdleSample) -> f64| Summary::of(samples.iter().map(figure).collect());
        let cpu = samples.iter().map(|sample| sample.server_cpu_seconds);
        Some(Self {
            name: contender.name(),
            seconds: summary(&|sample| sample.seconds)?,
            bytes_per_second: summary(&|sample| data_bytes as f64 / sample.seconds)?,
            server_cpu_seconds: cpu.collect::<Option<Vec<f64>>>().and_then(Summary::of),
            allocated_bytes: summary(&|sample| sample.allocated_bytes as f64)?,
        })
    }
}

impl LoadReport {
    /// Sums up the samples of [`Contender::LOAD`]; `None` without samples.
    pub(super) fn of(guest_iops: Option<u32>, samples: &[Vec<LoadSample>; 3]) -> Option<Self> {
        let figures = Contender::LOAD.into_iter().zip(samples);
        let contenders = figures.map(|(contender, samples)| LoadFigures::of(contender, samples));
        let contenders = contenders.collect::<Option<Vec<_>>>()?;
        let [sterna, background, blocking] = &contenders[..] else { return None };
        // For each of these figures, less is better.
        let beside = |figure: fn(&LoadFigures) -> &Summary, combine: fn(f64, f64) -> f64| {
            let best = Summary::of_pairs(figure(background), figure(blocking), f64::min)?;
            Summary::of_pairs(figure(sterna), &best, combine)
        };
        let ratio = |own: f64, best: f64| own / best;
        Some(Self {
            guest_iops,
            seconds_to_best_mirror: beside(|figures| &figures.seconds, ratio)?,
            // A difference: for a guest that loses nothing, a ratio says nothing.
            seconds_times_lost_less_best_mirror: beside(
                |figures| &figures.seconds_times_lost,
                |own, best| own - best,
            )?,
            worst_latency_to_best_mirror: beside(|figures| &figures.worst_latency_ms, ratio)?,
            contenders,
        })
    }
}

impl LoadFigures {
    fn of(contender: Contender, samples: &[LoadSample]) -> Option<Self> {
        let summary = |figure: fn(&LoadSample) -> f64| Summary::of(samples.iter().map(figure).collect());
        Some(Self {
            name: contender.name(),
            seconds: summary(|sample| sample.seconds)?,
            iops_before: summary(|sample| sample.iops_before)?,
            iops_during: summary(|sample| sample.iops_during)?,
            iops_after: summary(|sample| sample.iops_after)?,
            iops_lost: summary(|sample| sample.iops_lost)?,
            seconds_times_lost: summary(|sample| sample.seconds_times_lost)?,
            worst_latency_ms: summary(|sample| sample.worst_latency_ms)?,
            p99_latency_ms: summary(|sample| sample.p99_latency_ms)?,
            worst_latency_before_ms: summary(|sample| sample.worst_latency_before_ms)?,
            server_cpu_seconds: summary(|sample| sample.server_cpu_seconds)?,
            compared_bytes: summary(|sample| sample.compared_bytes as f64)?,
            moments: samples.iter().map(|sample| sample.moments.clone()).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sterna_is_compared_with_the_best_of_the_same_round() {
        let samples = |seconds: [f64; 2]| {
            seconds
                .map(|seconds| IdleSample { seconds, server_cpu_seconds: None, allocated_bytes: 1 })
                .to_vec()
        };
        // cp is the quicker copy in the first round, qemu-img in the second.
        let all = [
            samples([3.0, 3.0]),
            samples([2.0, 4.0]),
            samples([4.0, 3.0]),
            samples([6.0, 6.0]),
            samples([12.0, 1.5]),
        ];
        let report = IdleReport::of(600, &all).unwrap();
        assert_eq!(report.sterna_to_best_copy.samples, [1.5, 1.0]);
        assert_eq!(report.sterna_to_best_mirror.samples, [0.5, 2.0]);
        assert_eq!(report.contenders[1].bytes_per_second.samples, [300.0, 150.0]);
        assert_eq!(report.contenders[0].server_cpu_seconds, None);
        assert!(IdleReport::of(600, &Default::default()).is_none());
    }

    #[test]
    fn less_time_and_less_loss_are_better() {
        let sample = |seconds: f64, lost: f64| {
            vec![LoadSample {
                seconds,
                iops_before: 100.0,
                iops_during: 100.0 * (1.0 - lost),
                iops_after: 100.0,
                iops_lost: lost,
                seconds_times_lost: seconds * lost,
                worst_latency_ms: seconds * 10.0,
                p99_latency_ms: 1.0,
                worst_latency_before_ms: 1.0,
                server_cpu_seconds: 1.0,
                compared_bytes: 1,
                moments: Vec::new(),
            }]
        };
        let report = LoadReport::of(None, &[sample(2.0, 0.5), sample(8.0, 0.25), sample(4.0, 0.75)]).unwrap();
        assert_eq!(report.seconds_to_best_mirror.median, 0.5);
        assert_eq!(report.seconds_times_lost_less_best_mirror.median, -1.0);
        assert_eq!(report.worst_latency_to_best_mirror.median, 0.5);
    }
}
