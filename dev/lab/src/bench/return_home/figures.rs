//! Figures 5 and 6 of \[TPM\]: guests' throughput over time, on the way there and back. The paper's Figures 1 to 4 are drawings
//! of the method.

use super::{Load, Trip};
use crate::bench::strategies::{Figure, Form, Point, Series};

const AXES: (&str, &str) = ("seconds since the order", "MiB a second");

const ROW: f64 = 0.03;

/// Returns the figures of the first journey under each load.
pub(super) fn of(lives: &[(Load, Trip)]) -> Vec<Figure> {
    let drawn = |name, title: &str, loads: &[Load], note| {
        let lives = lives.iter().filter(|(load, _)| loads.contains(load)).enumerate();
        let series: Vec<_> = lives.flat_map(|(row, (load, trip))| lines(*load, trip, row)).collect();
        let (title, (x, y)) = (title.to_owned(), AXES);
        let figure = Figure { name, title, x, y, series, paper: Vec::new(), note, form: Form::Course };
        (!figure.series.is_empty()).then_some(figure)
    };
    let figures = [
        drawn(
            "figure-5",
            "what a web server got of its disk",
            &[Load::Web],
            "The paper: no drop to be noticed for as long as its migration lasts, 796 s.",
        ),
        drawn(
            "streaming",
            "what a video server got of its disk",
            &[Load::Streaming],
            "The paper has no figure of this: its video was played without an interruption.",
        ),
        drawn(
            "figure-6",
            "what a diabolical server got of its disk",
            &[Load::Diabolical, Load::DiabolicalLimited],
            "The paper: little while the migration reads the disk as fast as it can, about half of the loss if that is limited. At the \
             other host ours is served over the link, as its client stays where it was.",
        ),
    ];
    figures.into_iter().flatten().collect()
}

/// Returns a guest's throughput and the times of its migrations: lines at the bottom, each `row` above the one before.
fn lines(load: Load, trip: &Trip, row: usize) -> [Series; 3] {
    let mebibytes = f64::from(load.guest().job.block_bytes) / f64::from(1 << 20);
    let most = trip.moments.iter().map(|moment| moment.iops * mebibytes).fold(0.0, f64::max);
    let height = most * ROW * row as f64;
    let [there, home] = &trip.ways;
    let since_order = |ms: u64| (ms as f64 - there.begun_ms as f64) / 1000.0;
    let way = |name: &str, begun_ms, ended_ms| Series {
        name: format!("{}: {name}", load.name()),
        points: [begun_ms, ended_ms].map(|ms| Point::of(since_order(ms), vec![height])).to_vec(),
    };
    [
        Series {
            name: load.name().to_owned(),
            points: Point::over_time(&trip.moments, |iops| iops * mebibytes),
        },
        way("on the way there", there.begun_ms, there.ended_ms),
        way("on the way home", home.begun_ms, home.ended_ms),
    ]
}
