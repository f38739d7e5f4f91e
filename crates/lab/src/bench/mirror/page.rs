//! The page of `bench mirror`: tables, bars, and the guest's life over time.

use super::{IdleReport, LoadFigures, LoadReport, MirrorReport};
use crate::bench::chart::{Bar, CourseScale, bars, course};
use crate::bench::page::{figure, page, section};
use crate::bench::show::{milliseconds, seconds};
use crate::bench::statistics::Summary;
use crate::demo::Bytes;

impl MirrorReport {
    /// The report as a page of HTML.
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
    let times: Vec<Bar<'_>> = report
        .contenders
        .iter()
        .map(|contender| Bar { name: contender.name, summary: &contender.seconds })
        .collect();
    let caption = "Seconds until the copy is on the disk";
    section(&heading, &report.table(), &figure(caption, &bars(caption, &times, seconds)))
}

fn load_section(report: &LoadReport) -> String {
    let chart = |caption: &str, summary: fn(&LoadFigures) -> &Summary, show: fn(f64) -> String| {
        let measured = report.contenders.iter();
        let measured: Vec<Bar<'_>> =
            measured.map(|contender| Bar { name: contender.name, summary: summary(contender) }).collect();
        figure(caption, &bars(caption, &measured, show))
    };
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
        + &courses(report);
    section(&format!("Under a guest: {}", report.guest()), &report.table(), &charts)
}

/// The round whose migration took the median of the times, of each contender.
fn courses(report: &LoadReport) -> String {
    let typical = report.contenders.iter().filter_map(|contender| {
        let round = median_round(&contender.seconds);
        Some((
            contender.name,
            contender.moments.get(round)?.as_slice(),
            *contender.seconds.samples.get(round)?,
        ))
    });
    let typical: Vec<_> = typical.collect();
    let scale = CourseScale::of(typical.iter().map(|(_, moments, _)| *moments));
    let drawn = typical.iter().map(|(name, moments, ended)| {
        let caption = format!("{name}: the guest's requests per second over time; shaded: the migration");
        figure(&caption, &course(&caption, name, moments, *ended, scale))
    });
    drawn.collect()
}

/// The round whose sample is closest to the median.
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
