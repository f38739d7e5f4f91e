//! The figures of `bench link`. The names of fields are a contract with readers of the JSON.

use std::time::Duration;

use serde::Serialize;

use super::{Contender, Part};
use crate::bench::Environment;
use crate::bench::guest::Moment;
use crate::bench::statistics::Summary;

/// All figures of `bench link`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LinkReport {
    /// The machine and the programs that were measured.
    pub environment: Environment,
    /// TCP's congestion control, the same for all contenders.
    pub congestion_control: String,
    /// Size of the image in bytes; all of it is data.
    pub size_bytes: u64,
    /// Number of rounds, each of which measured everything.
    pub rounds: u32,
    /// Copies of an unused image, a report for each link or pair of links.
    pub copies: Vec<CopyReport>,
    /// Migrations of a guest that writes faster than the link carries; `None` if not requested.
    pub guest: Option<GuestReport>,
}

/// Copies over one link, or over several at once. Each copy of a disk was compared with its source, and is equal.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CopyReport {
    /// The part's name on the command line.
    pub name: &'static str,
    /// A description of the links, for tables.
    pub title: &'static str,
    /// Capacity of all links together, in bytes of IP packets a second.
    pub link_bytes_per_second: f64,
    /// Median round-trip time of a byte on the idle link, in milliseconds.
    pub round_trip_ms: f64,
    /// The contenders' figures, TCP first.
    pub contenders: Vec<CopyFigures>,
}

/// How one contender copied.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CopyFigures {
    /// The contender's name, for tables and JSON.
    pub name: &'static str,
    /// Time from the order until the copy is on the disk; for TCP, until everything was received.
    pub seconds: Summary,
    /// Bytes of the image ÷ seconds.
    pub bytes_per_second: Summary,
    /// Throughput ÷ that of TCP in the same round; `None` for TCP.
    pub to_tcp: Option<Summary>,
    /// Bytes a second during the second half: without the beginning, in which TCP measures the link, and without the work after
    /// the copying. `None` for contenders that do not report progress.
    pub second_half_bytes_per_second: Option<Summary>,
    /// The second half's throughput ÷ that of TCP in the same round; `None` for TCP.
    pub second_half_to_tcp: Option<Summary>,
}

/// Migrations of a guest that writes as fast as it can, up to twice what the link carries.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GuestReport {
    /// A description of the link, for tables.
    pub title: &'static str,
    /// Capacity of the link, in bytes of IP packets a second.
    pub link_bytes_per_second: f64,
    /// The contenders' figures, Sterna first.
    pub contenders: Vec<GuestFigures>,
}

/// One contender's migrations, and their effect on the guest.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GuestFigures {
    /// The contender's name, for tables and JSON.
    pub name: &'static str,
    /// Number of migrations that ended by themselves.
    pub ended: u32,
    /// Time until the migrations ended or were given up.
    pub seconds: Summary,
    /// The guest's writes before the migration, in bytes a second.
    pub written_bytes_per_second_before: Summary,
    /// The guest's writes during the migration, in bytes a second.
    pub written_bytes_per_second: Summary,
    /// The guest's writes during the migration ÷ the link's capacity.
    pub written_to_link: Summary,
    /// Longest time of a write that was in flight during the migration, in milliseconds.
    pub worst_latency_ms: Summary,
    /// Time within which 99 % of these writes completed, in milliseconds.
    pub p99_latency_ms: Summary,
    /// The guest's moments, round by round.
    pub moments: Vec<Vec<Moment>>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct CopySample {
    pub(super) seconds: f64,
    pub(super) second_half: Option<f64>,
}

#[derive(Clone, Debug)]
pub(super) struct GuestSample {
    pub(super) has_ended: bool,
    pub(super) seconds: f64,
    pub(super) written_bytes_per_second_before: f64,
    pub(super) written_bytes_per_second: f64,
    pub(super) worst_latency_ms: f64,
    pub(super) p99_latency_ms: f64,
    pub(super) moments: Vec<Moment>,
}

impl CopyReport {
    /// Sums up the samples of `contenders`; `None` without samples.
    pub(super) fn of(
        part: Part,
        round_trip: Duration,
        size_bytes: u64,
        contenders: &[Contender],
        samples: &[Vec<CopySample>],
    ) -> Option<Self> {
        let seconds =
            |samples: &[CopySample]| Summary::of(samples.iter().map(|sample| sample.seconds).collect());
        let second_half = |samples: &[CopySample]| {
            let known = samples.iter().map(|sample| sample.second_half).collect::<Option<Vec<_>>>();
            known.and_then(Summary::of)
        };
        let measured = contenders.iter().zip(samples);
        let measured =
            measured.map(|(contender, samples)| Some((*contender, seconds(samples)?, second_half(samples))));
        let measured = measured.collect::<Option<Vec<_>>>()?;
        let tcp = measured.iter().find(|(contender, ..)| *contender == Contender::Tcp);
        let figures = measured.iter().map(|(contender, seconds, second_half)| {
            let speeds = seconds.samples.iter().map(|seconds| size_bytes as f64 / seconds);
            let tcp = tcp.filter(|_| *contender != Contender::Tcp);
            Some(CopyFigures {
                name: contender.name(),
                bytes_per_second: Summary::of(speeds.collect())?,
                // The bytes are the same, so the quotient of throughputs is the inverse quotient of times.
                to_tcp: tcp.and_then(|(_, tcp, _)| Summary::of_ratios(tcp, seconds)),
                seconds: seconds.clone(),
                second_half_bytes_per_second: second_half.clone(),
                second_half_to_tcp: tcp
                    .and_then(|(.., tcp)| Summary::of_ratios(second_half.as_ref()?, tcp.as_ref()?)),
            })
        });
        Some(Self {
            name: part.name(),
            title: part.title(),
            link_bytes_per_second: part.rates().iter().map(|rate| rate.bytes_per_second()).sum(),
            round_trip_ms: round_trip.as_secs_f64() * 1e3,
            contenders: figures.collect::<Option<Vec<_>>>()?,
        })
    }
}

impl GuestReport {
    /// Sums up the samples of `contenders`; `None` without samples.
    pub(super) fn of(
        part: Part,
        link_bytes_per_second: f64,
        contenders: &[Contender],
        samples: &[Vec<GuestSample>],
    ) -> Option<Self> {
        let figures = contenders.iter().zip(samples);
        let figures =
            figures.map(|(contender, samples)| GuestFigures::of(*contender, link_bytes_per_second, samples));
        let contenders = figures.collect::<Option<Vec<_>>>()?;
        Some(Self { title: part.title(), link_bytes_per_second, contenders })
    }
}

impl GuestFigures {
    fn of(contender: Contender, link_bytes_per_second: f64, samples: &[GuestSample]) -> Option<Self> {
        let summary =
            |figure: &dyn Fn(&GuestSample) -> f64| Summary::of(samples.iter().map(figure).collect());
        Some(Self {
            name: contender.name(),
            ended: samples.iter().map(|sample| u32::from(sample.has_ended)).sum(),
            seconds: summary(&|sample| sample.seconds)?,
            written_bytes_per_second_before: summary(&|sample| sample.written_bytes_per_second_before)?,
            written_bytes_per_second: summary(&|sample| sample.written_bytes_per_second)?,
            written_to_link: summary(&|sample| sample.written_bytes_per_second / link_bytes_per_second)?,
            worst_latency_ms: summary(&|sample| sample.worst_latency_ms)?,
            p99_latency_ms: summary(&|sample| sample.p99_latency_ms)?,
            moments: samples.iter().map(|sample| sample.moments.clone()).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copies(seconds: &[f64]) -> Vec<CopySample> {
        seconds.iter().map(|&seconds| CopySample { seconds, second_half: Some(1000.0 / seconds) }).collect()
    }

    #[test]
    fn everybody_is_compared_with_tcp_in_the_same_round() {
        let samples = [copies(&[4.0, 8.0]), copies(&[5.0, 8.0]), copies(&[8.0, 16.0])];
        let contenders = &Contender::COPY[..3];
        let report =
            CopyReport::of(Part::TwoLinks, Duration::from_micros(600), 800, contenders, &samples).unwrap();
        let [tcp, sterna, nbd] = &report.contenders[..] else { unreachable!() };
        assert_eq!((tcp.name, &tcp.to_tcp), ("tcp", &None));
        assert_eq!(tcp.bytes_per_second.samples, [200.0, 100.0]);
        assert_eq!(sterna.to_tcp.as_ref().unwrap().samples, [0.8, 1.0]);
        assert_eq!(nbd.to_tcp.as_ref().unwrap().samples, [0.5, 0.5]);
        assert_eq!(
            (&tcp.second_half_to_tcp, sterna.second_half_bytes_per_second.as_ref().unwrap().samples[0]),
            (&None, 200.0)
        );
        assert_eq!(sterna.second_half_to_tcp.as_ref().unwrap().samples, [0.8, 1.0]);
        assert_eq!((report.round_trip_ms, report.link_bytes_per_second), (0.6, 187.5e6));
        assert!(CopyReport::of(Part::Near, Duration::ZERO, 1, Contender::COPY, &[vec![]]).is_none());
    }

    #[test]
    fn migrations_that_were_given_up_are_not_counted_as_ended() {
        let sample = |has_ended| GuestSample {
            has_ended,
            seconds: 2.0,
            written_bytes_per_second_before: 200.0,
            written_bytes_per_second: 50.0,
            worst_latency_ms: 3.0,
            p99_latency_ms: 1.0,
            moments: Vec::new(),
        };
        let samples = Contender::GUEST.iter().map(|_| vec![sample(true), sample(false), sample(true)]);
        let report =
            GuestReport::of(Part::Guest, 100.0, Contender::GUEST, &samples.collect::<Vec<_>>()).unwrap();
        assert_eq!(report.contenders[0].ended, 2);
        assert_eq!(report.contenders[0].written_to_link.samples, [0.5; 3]);
    }
}
