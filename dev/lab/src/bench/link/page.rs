//! The page of `bench link`: tables, bars, and the guest's moments.

use super::{CopyReport, GuestFigures, GuestReport, LinkReport};
use crate::bench::page::{bar_chart, course_charts, page, section};
use crate::bench::show::{mebibytes, milliseconds};
use crate::bench::statistics::Summary;
use crate::demo::Bytes;

impl LinkReport {
    /// Returns the report as an HTML page.
    pub fn page(&self) -> String {
        let Self { environment, congestion_control, size_bytes, rounds, copies, guest } = self;
        let lead = format!(
            "What is made of the link when an image of {} goes to another host: {rounds} rounds. Hosts are network \
             namespaces, TCP is the kernel's ({congestion_control}), links are emulated. Every copy was compared with \
             its source.",
            Bytes(*size_bytes)
        );
        let copies: String = copies.iter().map(copy_section).collect();
        let guest = guest.as_ref().map(guest_section).unwrap_or_default();
        page(
            "Migrations over links, beside plain TCP and QEMU's mirror",
            &lead,
            environment,
            &(copies + &guest),
        )
    }
}

fn copy_section(report: &CopyReport) -> String {
    let speeds =
        report.contenders.iter().map(|contender| (contender.name, Some(&contender.bytes_per_second)));
    let title = format!("Nobody uses the image: {}", report.heading());
    section(&title, &report.table(), &bar_chart("MiB of the image a second", speeds, mebibytes))
}

fn guest_section(report: &GuestReport) -> String {
    let chart = |caption: &str, summary: fn(&GuestFigures) -> &Summary, show: fn(f64) -> String| {
        let measured = report.contenders.iter().map(|contender| (contender.name, Some(summary(contender))));
        bar_chart(caption, measured, show)
    };
    let first = report.contenders.iter().filter_map(|contender| {
        Some((contender.name, contender.moments.first()?.as_slice(), *contender.seconds.samples.first()?))
    });
    let charts = chart(
        "MiB a second that the guest wrote meanwhile",
        |figures| &figures.written_bytes_per_second,
        mebibytes,
    ) + &chart(
        "Worst latency of a write, in milliseconds",
        |figures| &figures.worst_latency_ms,
        milliseconds,
    ) + &course_charts(
        &first.collect::<Vec<_>>(),
        "the guest's writes per second over time, in the first round",
    );
    section(&format!("Under {}", report.title), &report.table(), &charts)
}
