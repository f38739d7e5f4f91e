//! The page of `bench link`: tables, bars, and the guest's life over time.

use super::{CopyReport, GuestFigures, GuestReport, LinkReport};
use crate::bench::chart::{Bar, CourseScale, bars, course};
use crate::bench::page::{figure, page, section};
use crate::bench::show::{mebibytes, milliseconds};
use crate::bench::statistics::Summary;
use crate::demo::Bytes;

impl LinkReport {
    /// The report as a page of HTML.
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
    let speeds: Vec<Bar<'_>> = report
        .contenders
        .iter()
        .map(|contender| Bar { name: contender.name, summary: &contender.bytes_per_second })
        .collect();
    let caption = "MiB of the image a second";
    let title = format!("Nobody uses the image: {}", report.heading());
    section(&title, &report.table(), &figure(caption, &bars(caption, &speeds, mebibytes)))
}

fn guest_section(report: &GuestReport) -> String {
    let chart = |caption: &str, summary: fn(&GuestFigures) -> &Summary, show: fn(f64) -> String| {
        let measured = report.contenders.iter();
        let measured: Vec<Bar<'_>> =
            measured.map(|contender| Bar { name: contender.name, summary: summary(contender) }).collect();
        figure(caption, &bars(caption, &measured, show))
    };
    let charts = chart(
        "MiB a second that the guest wrote meanwhile",
        |figures| &figures.written_bytes_per_second,
        mebibytes,
    ) + &chart(
        "Worst latency of a write, in milliseconds",
        |figures| &figures.worst_latency_ms,
        milliseconds,
    ) + &courses(report);
    section(&format!("Under {}", report.title), &report.table(), &charts)
}

/// The first round of each contender.
fn courses(report: &GuestReport) -> String {
    let first = report.contenders.iter().filter_map(|contender| {
        Some((contender.name, contender.moments.first()?.as_slice(), *contender.seconds.samples.first()?))
    });
    let first: Vec<_> = first.collect();
    let scale = CourseScale::of(first.iter().map(|(_, moments, _)| *moments));
    let drawn = first.iter().map(|(name, moments, ended)| {
        let caption = format!(
            "{name}: the guest's writes per second over time, in the first round; shaded: the migration"
        );
        figure(&caption, &course(&caption, name, moments, *ended, scale))
    });
    drawn.collect()
}
