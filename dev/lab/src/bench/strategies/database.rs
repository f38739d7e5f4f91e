//! Tables 1 and 2 of \[ESX\]: a database with a fixed rate of requests, at one and two times its intensity, and the latency of
//! its writes.

use super::figure::Form;
use super::outstanding::series;
use super::run::Case;
use super::{Column, Experiment, Figure, Point, Sample, Series, Spent, Stage};
use crate::bench::guest::Load;
use crate::demo::Progress;

/// The guest's rate at one time its intensity, in hundredths of the device's.
const PERCENT_OF_DEVICE: u64 = 25;

pub(super) async fn measure(stage: &mut Stage<'_>, progress: &mut Progress) -> anyhow::Result<Vec<Figure>> {
    let device = stage.options.device;
    let size_bytes = stage.options.bench.size_bytes;
    let once = u32::try_from(device.operations_per_second * PERCENT_OF_DEVICE / 100).unwrap_or(u32::MAX);
    let case = |times: u32| Case {
        size_bytes,
        load: Load::zipf(Some(once * times)),
        target: device,
        x: f64::from(times),
    };
    let samples =
        stage.measure(Experiment::Database.name(), &Column::all(), &[case(1), case(2)], progress).await?;
    let figure = |name, title: &str, x, y, series, note| Figure {
        name,
        title: title.to_owned(),
        x,
        y,
        series,
        paper: Vec::new(),
        note,
        form: Form::Table,
    };
    let once: Vec<&Sample> = samples.iter().filter(|sample| sample.x == 1.0).collect();
    let phases = |of: fn(&Spent) -> f64| phases(&once, of);
    Ok(vec![
        figure(
            "table-1-time",
            "migration time of a database",
            "intensity",
            "time / off-line",
            series(&samples, |sample| Some(sample.to_offline())),
            "The paper, beside mirroring: tracking 1.53 times as long, incremental 1.37 times; at twice the intensity both fail, \
             and mirroring takes 0.95 times as long as before.",
        ),
        figure(
            "table-1-downtime",
            "downtime of a database",
            "intensity",
            "ms",
            series(&samples, |sample| sample.downtime_ms),
            "The paper: 13.3 s, incremental 7.6 s, mirroring 0.22 s; at twice the intensity mirroring 0.19 s.",
        ),
        figure(
            "table-2-latency",
            "write latency of a database",
            "phase",
            "ms",
            phases(|spent| spent.mean_ms),
            "The paper: 0.78 ms without a migration; while copying 3.62 ms, incremental 3.57 ms, mirroring 3.34 ms; in later rounds \
             5.92 ms and 5.17 ms.",
        ),
        figure(
            "table-2-variance",
            "variance of the write latency of a database",
            "phase",
            "ms^2",
            phases(|spent| spent.variance_ms2),
            "The paper: 0.11 without a migration; while copying 0.36, incremental 0.54, mirroring 0.36; in later rounds 1.55 and \
             1.47.",
        ),
    ])
}

/// Returns a line for each column: before, while everything is copied, and in the later rounds.
fn phases(samples: &[&Sample], of: fn(&Spent) -> f64) -> Vec<Series> {
    let column = |column: Column| {
        let mine = || samples.iter().filter(move |sample| sample.column == column.name);
        let iterative = mine().filter_map(|sample| Some(of(&sample.iterative_phase?[1])));
        let points = vec![
            Point::of(0.0, mine().map(|sample| of(&sample.before[1])).collect()).called("before"),
            Point::of(1.0, mine().map(|sample| of(&sample.copy_phase[1])).collect()).called("copy"),
            Point::of(2.0, iterative.collect()).called("rounds"),
        ];
        Series { name: column.name.to_owned(), points }
    };
    Column::all().into_iter().map(column).collect()
}
