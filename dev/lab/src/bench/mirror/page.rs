//! The page of `bench mirror`: tables, bars, and the guest's moments.

use super::{IdleReport, LoadFigures, LoadReport, MirrorReport};
use crate::bench::page::{bar_chart, course_charts, page, section};
use crate::bench::show::{milliseconds, seconds};
use crate::bench::statistics::Summary;
use crate::demo::Bytes;

impl MirrorReport {
    /// Returns the report as an HTML page.
    pub fn page(&self) -> String {
        let Self { environment, size_bytes, rounds, idle, load } = self;
        let lead = format!(
            "What it costs to move an image of {} between two folders of one disk: {rounds} rounds. Every copy was \
             compared with its source.",
            Bytes(*size_bytes)
        );
        let idle = idle.as_ref().map(idle_section).unwrap_or_default();
        let load = load.as_ref().map(load_section).unwrap_or_default();
        page("Migrations beside copies and QEMU's mirror", &lead, environment, &(idle + &load))
    }
}

fn idle_section(report: &IdleReport) -> String {
    let heading =
        format!("Nobody uses the image; {} of it are data, the rest holes", Bytes(report.data_bytes));
    let times = report.contenders.iter().map(|contender| (contender.name, Some(&contender.seconds)));
    let caption = "Seconds until the copy is on the disk";
    section(&heading, &report.table(), &bar_chart(caption, times, seconds))
}

fn load_section(report: &LoadReport) -> String {
    let chart = |caption: &str, summary: fn(&LoadFigures) -> &Summary, show: fn(f64) -> String| {
        let measured = report.contenders.iter().map(|contender| (contender.name, Some(summary(contender))));
        bar_chart(caption, measured, show)
    };
    let typical = report.contenders.iter().filter_map(|contender| {
        let round = median_round(&contender.seconds);
        let moments = contender.moments.get(round)?.as_slice();
        Some((contender.name, moments, *contender.seconds.samples.get(round)?))
    });
    let charts = chart("Seconds that the migration took", |figures| &figures.seconds, seconds)
        + &chart(
            "Time × loss: seconds for which the guest might as well have stood still",
            |figures| &figures.seconds_times_lost,
            seconds,
        )
        + &chart(
            "Worst latency of a request, in milliseconds",
            |figures| &figures.worst_latency_ms,
            milliseconds,
        )
        + &course_charts(&typical.collect::<Vec<_>>(), "the guest's requests per second over time");
    section(&format!("Under a guest: {}", report.guest()), &report.table(), &charts)
}

/// Returns the round whose sample is closest to the median.
fn median_round(summary: &Summary) -> usize {
    let distance = |sample: &f64| (sample - summary.median).abs();
    let rounds = summary.samples.iter().enumerate();
    rounds.min_by(|(_, a), (_, b)| distance(a).total_cmp(&distance(b))).map_or(0, |(round, _)| round)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_typical_round_is_the_one_in_the_middle() {
        let summary = |samples: &[f64]| Summary::of(samples.to_vec()).unwrap();
        assert_eq!(median_round(&summary(&[9.0, 1.0, 3.0])), 2);
        assert_eq!(median_round(&summary(&[5.0])), 0);
        assert_eq!(median_round(&summary(&[1.0, 2.0])), 0);
    }
}
