//! Figures 10 and 11 of \[ESX\]: a guest's requests over time, by each strategy, and with a target that is ten times as slow.

use super::figure::Form;
use super::run::Case;
use super::{Column, Device, Experiment, Figure, Mover, Point, Progressed, Sample, Series, Stage};
use crate::demo::Progress;

/// The guest's requests in flight (\[ESX\] Figure 10).
const DEPTH: u32 = 16;
const WRITES: f64 = 0.3;
/// How much slower the target is (\[ESX\] §3.4).
const TIMES: u64 = 10;

/// Measures Figure 10, with Equation 1 over it. A table shows how the strategies other than mirroring end.
pub(super) async fn slow_target(
    stage: &mut Stage<'_>,
    progress: &mut Progress,
) -> anyhow::Result<Vec<Figure>> {
    let source = stage.options.device;
    let case = Case {
        size_bytes: stage.options.scale.slow_size(stage.options.bench.size_bytes),
        load: super::outstanding::oltp(DEPTH),
        target: source.slower(TIMES),
        x: TIMES as f64,
    };
    let samples = stage.measure(Experiment::SlowTarget.name(), &Column::all(), &[case], progress).await?;
    let mut series = Vec::new();
    if let Some(mirrored) = samples.iter().find(|sample| sample.column == "mirror") {
        let margin = stage.options.scale.margin().as_secs_f64();
        let latencies = Latencies::of(source, case.target, stage.options.mover);
        series.push(Series {
            name: "the guest".to_owned(),
            points: Point::over_time(&mirrored.moments, |iops| iops),
        });
        series.push(Series {
            name: "Equation 1".to_owned(),
            points: equation(&mirrored.progress, mirrored.seconds, margin, latencies),
        });
    }
    let outcome = |column: Column| Series {
        name: column.name.to_owned(),
        points: vec![
            Point::of(0.0, of(&samples, column, |sample| f64::from(u8::from(sample.moved)))).called("moved"),
            Point::of(1.0, of(&samples, column, Sample::to_offline)).called("time / off-line"),
            Point::of(2.0, of(&samples, column, |sample| sample.total_penalty() * 100.0)).called("% lost"),
        ],
    };
    Ok(vec![
        Figure {
            name: "figure-10",
            title: "a guest that is mirrored to a target ten times as slow".to_owned(),
            x: "seconds since the order",
            y: "requests a second",
            series,
            paper: Vec::new(),
            note: "Equation 1 is of what the stores were set to, not of what was measured: at the source a request takes its delay, \
                   or its turn; at the target its delay, behind what the mover has queued there. The paper: 2600 reads and 1100 \
                   writes a second become 200 and 95.",
            form: Form::Course,
        },
        Figure {
            name: "slow-target",
            title: "how migrations to a target ten times as slow end".to_owned(),
            x: "what",
            y: "value",
            series: Column::all().into_iter().map(outcome).collect(),
            paper: Vec::new(),
            note: "1: moved, 0: given up. The paper: mirroring ends, tracking is given up after several rounds.",
            form: Form::Table,
        },
    ])
}

fn of(samples: &[Sample], column: Column, y: impl Fn(&Sample) -> f64) -> Vec<f64> {
    samples.iter().filter(|sample| sample.column == column.name).map(y).collect()
}

pub(super) async fn over_time(stage: &mut Stage<'_>, progress: &mut Progress) -> anyhow::Result<Vec<Figure>> {
    let case = Case {
        size_bytes: stage.options.bench.size_bytes,
        load: super::outstanding::oltp(DEPTH),
        target: stage.options.device,
        x: 0.0,
    };
    let samples = stage.measure(Experiment::OverTime.name(), &Column::all(), &[case], progress).await?;
    let first = |column: Column| samples.iter().find(|sample| sample.column == column.name);
    let line = |column: Column| {
        Some(Series {
            name: column.name.to_owned(),
            points: Point::over_time(&first(column)?.moments, |iops| iops),
        })
    };
    let phases = |column: Column| {
        let sample = first(column)?;
        let copied = sample.rounds.first().map_or(sample.seconds, |round| round.seconds);
        let point = |x, label, seconds| Point::of(x, vec![seconds]).called(label);
        Some(Series {
            name: column.name.to_owned(),
            points: vec![
                point(0.0, "copy", copied),
                point(1.0, "rounds", (sample.seconds - copied).max(0.0)),
            ],
        })
    };
    Ok(vec![
        Figure {
            name: "figure-11",
            title: "a guest's requests over time, the migration from 0 on".to_owned(),
            x: "seconds since the order",
            y: "requests a second",
            series: Column::all().into_iter().filter_map(line).collect(),
            paper: Vec::new(),
            note: "The paper: the first copy takes the same time by each strategy; mirroring has no phase after it.",
            form: Form::Course,
        },
        Figure {
            name: "figure-11-phases",
            title: "how long each phase took".to_owned(),
            x: "phase",
            y: "seconds",
            series: Column::all().into_iter().filter_map(phases).collect(),
            paper: Vec::new(),
            note: "Seconds of one migration each: for the plot, not to be compared with other runs.",
            form: Form::Table,
        },
    ])
}

/// Latencies of the guest's requests, in seconds.
#[derive(Clone, Copy, Debug)]
struct Latencies {
    /// At the source: the store's delay, or the wait for its limit if that is longer.
    source: f64,
    /// Latency at the target: behind the chunks that the mover always has there.
    target: f64,
}

impl Latencies {
    fn of(source: Device, target: Device, mover: Mover) -> Self {
        let delay = |device: Device| device.latency_us as f64 / 1e6;
        let turn = f64::from(DEPTH) / source.operations_per_second as f64;
        let queued = f64::from(mover.depth) * mover.chunk_bytes as f64 / target.bytes_per_second as f64;
        Self { source: delay(source).max(turn), target: delay(target) + queued }
    }
}

/// Returns Equation 1: IOPS ≈ min(in flight / (part that goes to the target × its latency), in flight / latency of the source).
fn equation(progress: &[Progressed], seconds: f64, margin: f64, latencies: Latencies) -> Vec<Point> {
    let in_flight = f64::from(DEPTH);
    let iops = |fraction: f64| {
        let to_target = WRITES * fraction;
        let of_target =
            if to_target > 0.0 { in_flight / (to_target * latencies.target) } else { f64::INFINITY };
        of_target.min(in_flight / latencies.source)
    };
    let before = std::iter::once(Point::of(-margin, vec![iops(0.0)]));
    let during = progress.iter().map(|seen| Point::of(seen.seconds, vec![iops(seen.fraction)]));
    let end = std::iter::once(Point::of(seconds, vec![iops(1.0)]));
    before.chain(during).chain(end).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equation_1_is_the_source_s_until_the_target_saturates() {
        let seen = |fraction| Progressed { seconds: fraction, fraction, bytes_copied: 0 };
        let progress = [seen(0.0), seen(0.1), seen(0.5)];
        let points = equation(&progress, 1.0, 2.0, Latencies { source: 0.001, target: 0.01 });
        let iops: Vec<f64> = points.iter().map(|point| point.y.as_ref().unwrap().median.round()).collect();
        // 16 / 1 ms; then 16 / (0.15 × 10 ms), and 16 / (0.3 × 10 ms).
        assert_eq!(iops, [16_000.0, 16_000.0, 16_000.0, 10_667.0, 5333.0]);
    }

    #[test]
    fn latencies_are_delays_turns_and_what_the_mover_has_queued() {
        let source = Device { latency_us: 2000, bytes_per_second: 1 << 30, operations_per_second: 4000 };
        let target = Device { latency_us: 20_000, bytes_per_second: 10 << 20, operations_per_second: 400 };
        let latencies = Latencies::of(source, target, Mover { depth: 16, chunk_bytes: 64 << 10 });
        assert_eq!((latencies.source, latencies.target), (0.004, 0.02 + 0.1));
        let quick = Device { operations_per_second: 1 << 20, ..source };
        assert_eq!(Latencies::of(quick, target, Mover { depth: 16, chunk_bytes: 64 << 10 }).source, 0.002);
    }
}
