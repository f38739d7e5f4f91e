//! The figures of `bench nbd`. The names of fields are a contract with readers of the JSON.

use serde::Serialize;

use super::{Contender, Sample, StageFigures, Workload};
use crate::bench::Environment;
use crate::bench::statistics::Summary;

/// All figures of `bench nbd`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NbdReport {
    /// The machine and the programs that were measured.
    pub environment: Environment,
    /// Size of the image in bytes.
    pub size_bytes: u64,
    /// Number of rounds, each of which measured everything.
    pub rounds: u32,
    /// Duration of each measurement, in seconds.
    pub seconds: u32,
    /// The figures, workload by workload.
    pub workloads: Vec<WorkloadFigures>,
}

/// The figures of one workload.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WorkloadFigures {
    /// The workload's name on the command line.
    pub name: &'static str,
    /// The workload's title, for tables and pages.
    pub title: &'static str,
    /// Size of a request in bytes.
    pub block_bytes: u32,
    /// Number of requests in flight.
    pub depth: u32,
    /// The contenders' figures: the limit, Sterna, and the peer.
    pub contenders: Vec<ContenderFigures>,
    /// IOPS of Sterna ÷ IOPS of the peer.
    pub iops_sterna_to_peer: Summary,
    /// CPU time per request of Sterna ÷ that of the peer; `None` if a measurement was too short for the clock.
    pub cpu_sterna_to_peer: Option<Summary>,
    /// Time that Sterna adds to a request ÷ that of the peer; `None` if either was as fast as the raw file.
    pub added_sterna_to_peer: Option<Summary>,
}

/// The figures of one contender.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ContenderFigures {
    /// The contender's name, for tables and JSON.
    pub name: &'static str,
    /// Completed requests per second.
    pub iops: Summary,
    /// Bytes moved per second.
    pub bytes_per_second: Summary,
    /// Mean time of a request in microseconds.
    pub mean_latency_us: Summary,
    /// Time within which 99 % of the requests completed, in microseconds.
    pub p99_latency_us: Summary,
    /// Longest time of a request, in microseconds.
    pub max_latency_us: Summary,
    /// CPU time of fio per request, in microseconds.
    pub client_cpu_us_per_request: Summary,
    /// CPU time of the server per request, in microseconds; `None` for the raw file.
    pub server_cpu_us_per_request: Option<Summary>,
    /// IOPS ÷ IOPS of the raw file; `None` for the raw file.
    pub iops_to_raw: Option<Summary>,
    /// Depth ÷ IOPS, less the same of the raw file, in microseconds; `None` for the raw file.
    pub added_us_per_request: Option<Summary>,
    /// Mean latency less that of the raw file, in microseconds; `None` for the raw file.
    pub added_mean_latency_us: Option<Summary>,
    /// Time in the server by stage; empty without tracing, and for contenders other than Sterna.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub trace: Vec<StageFigures>,
}

impl WorkloadFigures {
    pub(super) fn of(workload: Workload, samples: &[Vec<Sample>; 3]) -> Option<Self> {
        let job = workload.job();
        let mut contenders: Vec<ContenderFigures> = Vec::new();
        for (contender, samples) in Contender::ALL.into_iter().zip(samples) {
            let raw = contenders.first();
            let figures = ContenderFigures::of(contender, samples, f64::from(job.depth), raw)?;
            contenders.push(figures);
        }
        let [_, sterna, peer] = &contenders[..] else { return None };
        let ratios = |figure: fn(&ContenderFigures) -> Option<&Summary>| {
            Summary::of_ratios(figure(sterna)?, figure(peer)?)
        };
        // Where nothing is added, a ratio says nothing.
        let added = |figures: &ContenderFigures| {
            figures.added_us_per_request.as_ref().is_some_and(|added| added.min > 0.0)
        };
        let added_ratios = || ratios(|figures| figures.added_us_per_request.as_ref());
        Some(Self {
            name: workload.name(),
            title: workload.title(),
            block_bytes: job.block_bytes,
            depth: job.depth,
            iops_sterna_to_peer: ratios(|figures| Some(&figures.iops))?,
            cpu_sterna_to_peer: ratios(|figures| figures.server_cpu_us_per_request.as_ref()),
            added_sterna_to_peer: if added(sterna) && added(peer) { added_ratios() } else { None },
            contenders,
        })
    }

    /// Returns whether bytes per second say more than requests per second.
    pub fn is_sequential(&self) -> bool {
        self.block_bytes >= 1 << 20
    }
}

impl ContenderFigures {
    fn of(contender: Contender, samples: &[Sample], depth: f64, raw: Option<&Self>) -> Option<Self> {
        let summary = |figure: fn(&Sample) -> f64| Summary::of(samples.iter().map(figure).collect());
        let server_cpu = samples
            .iter()
            .map(|sample| Some(sample.server_cpu?.as_secs_f64() * 1e6 / sample.measured.requests as f64));
        let iops = summary(|sample| sample.measured.iops)?;
        let mean_latency_us = summary(|sample| sample.measured.mean_latency_us)?;
        // One request of `depth` completes every 1 ÷ IOPS, so each is under way for depth ÷ IOPS, the client included.
        let added = |own: f64, raw: f64| (depth / own - depth / raw) * 1e6;
        Some(Self {
            name: contender.name(),
            bytes_per_second: summary(|sample| sample.measured.bytes_per_second)?,
            p99_latency_us: summary(|sample| sample.measured.p99_latency_us)?,
            max_latency_us: summary(|sample| sample.measured.max_latency_us)?,
            client_cpu_us_per_request: summary(|sample| sample.measured.client_cpu_us_per_request)?,
            server_cpu_us_per_request: server_cpu.collect::<Option<Vec<f64>>>().and_then(Summary::of),
            iops_to_raw: raw.and_then(|raw| Summary::of_ratios(&iops, &raw.iops)),
            added_us_per_request: raw.and_then(|raw| Summary::of_pairs(&iops, &raw.iops, added)),
            added_mean_latency_us: raw.and_then(|raw| {
                Summary::of_pairs(&mean_latency_us, &raw.mean_latency_us, |own, raw| own - raw)
            }),
            iops,
            mean_latency_us,
            trace: StageFigures::of(&samples.iter().map(|sample| &sample.trace[..]).collect::<Vec<_>>()),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::bench::Measured;

    fn sample(iops: f64, cpu_us_per_request: Option<f64>) -> Sample {
        let measured = Measured {
            requests: iops as u64,
            seconds: 1.0,
            iops,
            bytes_per_second: iops * 8192.0,
            mean_latency_us: 16e6 / iops,
            p99_latency_us: 900.0,
            max_latency_us: 1900.0,
            client_cpu_us_per_request: 3.0,
        };
        let server_cpu = cpu_us_per_request.map(|us| Duration::from_secs_f64(us * iops / 1e6));
        Sample { measured, server_cpu, trace: Vec::new() }
    }

    #[test]
    fn figures_are_taken_beside_the_neighbours_of_the_same_round() {
        let samples = [
            vec![sample(64_000.0, None), sample(32_000.0, None)],
            vec![sample(50_000.0, Some(6.0)), sample(25_000.0, Some(8.0))],
            vec![sample(40_000.0, Some(12.0)), sample(20_000.0, Some(16.0))],
        ];
        let figures = WorkloadFigures::of(Workload::Mixed16, &samples).unwrap();
        assert_eq!(figures.iops_sterna_to_peer.samples, [1.25, 1.25]);
        let cpu = figures.cpu_sterna_to_peer.unwrap();
        assert!((cpu.median - 0.5).abs() < 1e-9, "{cpu:?}");
        let [raw, sterna, peer] = &figures.contenders[..] else { panic!("{:?}", figures.contenders) };
        assert_eq!((raw.iops_to_raw.clone(), raw.server_cpu_us_per_request.clone()), (None, None));
        assert_eq!(sterna.iops_to_raw.as_ref().unwrap().samples, [0.78125, 0.78125]);
        // 16 ÷ 50,000 s less 16 ÷ 64,000 s.
        let added = &sterna.added_us_per_request.as_ref().unwrap().samples;
        assert!((added[0] - 70.0).abs() < 1e-6 && (added[1] - 140.0).abs() < 1e-6, "{added:?}");
        let added = &peer.added_mean_latency_us.as_ref().unwrap().samples;
        assert!((added[0] - 150.0).abs() < 1e-6, "{added:?}");
        assert!((figures.added_sterna_to_peer.unwrap().median - 70.0 / 150.0).abs() < 1e-9);
    }

    #[test]
    fn a_peer_as_fast_as_the_raw_file_gives_no_ratio() {
        let samples = [
            vec![sample(50_000.0, None)],
            vec![sample(40_000.0, Some(1.0))],
            vec![sample(50_000.0, Some(0.0))],
        ];
        let figures = WorkloadFigures::of(Workload::Mixed16, &samples).unwrap();
        assert_eq!((figures.added_sterna_to_peer, figures.cpu_sterna_to_peer), (None, None));
    }

    #[test]
    fn nothing_measured_is_no_report() {
        assert!(WorkloadFigures::of(Workload::Mixed1, &Default::default()).is_none());
    }
}
