//! The course of a migration over time, as in \[ESX\] Figure 11: guests' requests and latencies, and copied bytes, in plots with
//! the same time axis. Phases are shaded, and the switch-over is marked.

use api::{HistorySample, Migration, Phase, Recording};
use serde_json::{Value, json};

use crate::chart::{Above, Band, Below, Chart, Form, Mark, Series};
use crate::figures::{bytes, grouped, latency, seconds};
use crate::markup::escape;
use crate::scale::Scale;

/// Least time that is shown before and after a migration, in milliseconds; more if it took longer itself.
const MARGIN_MS: f64 = 1500.0;
/// Smallest width of a band, as a part of the whole, so that it is visible.
const BAND_PART_MIN: f64 = 0.002;

pub(crate) fn section(migration: &Migration, recording: &Recording) -> String {
    let Some(time) = shown_time(recording) else {
        return "<section><h2>Over time</h2><p class=\"quiet\">It was too short, or the daemon ended too early, for any \
                sample.</p></section>"
            .to_owned();
    };
    let course = Course {
        time,
        samples: shown_samples(recording, time),
        ended: recording.ended_ms.unwrap_or(f64::INFINITY),
        bands: bands(migration, recording, time),
        marks: marks(migration, recording),
    };
    let plots = [course.requests(), course.latency(), course.copying()].concat();
    format!(
        "<section><h2>Over time</h2><div class=\"plots\" id=\"plots\">{plots}<div id=\"hover\" hidden></div></div>{}</section>",
        legend(&course.marks)
    )
}

/// The common data of the plots.
struct Course<'a> {
    /// The visible time, in milliseconds.
    time: (f64, f64),
    samples: Vec<&'a HistorySample>,
    /// When the migration ended.
    ended: f64,
    bands: Vec<Band>,
    marks: Vec<Mark>,
}

impl Course<'_> {
    fn requests(&self) -> String {
        let iops = |sample: &HistorySample| rate(sample, requests(sample) as f64);
        let scale = Scale::from_zero(self.highest(iops));
        let series = vec![self.series("iops", Form::Area, |sample| Some((0.0, iops(sample))))];
        let chart =
            Chart { above: Above::Names, ..self.chart("Guest requests a second", scale, grouped, series) };
        plot(&chart, &[("iops", "reads, writes and flushes")])
    }

    fn latency(&self) -> String {
        let lowest = self.samples.iter().filter_map(|sample| sample.median_us).min().unwrap_or(10);
        let highest = self.samples.iter().filter_map(|sample| sample.worst_us).max().unwrap_or(1000);
        let scale = Scale::decades(lowest as f64, highest as f64);
        let line = |class, micros: fn(&HistorySample) -> Option<u64>| {
            self.series(class, Form::Line, |sample| micros(sample).map(|micros| (0.0, micros as f64)))
        };
        let series = vec![
            line("worst", |sample| sample.worst_us),
            line("p99", |sample| sample.p99_us),
            line("median", |sample| sample.median_us),
        ];
        let chart = self.chart("Guest latency", scale, decade, series);
        plot(&chart, &[("median", "median"), ("p99", "99 of 100"), ("worst", "longest")])
    }

    fn copying(&self) -> String {
        // MiB give round values at the axis.
        let copied = |sample: &HistorySample| rate(sample, sample.bytes_copied as f64 / MIB);
        let both = |sample: &HistorySample| copied(sample) + rate(sample, sample.bytes_mirrored as f64 / MIB);
        let runs = |sample: &HistorySample| sample.at_ms >= 0.0 && sample.at_ms < self.ended;
        let area = |class, values: &dyn Fn(&HistorySample) -> (f64, f64)| {
            self.series(class, Form::Area, |sample| runs(sample).then(|| values(sample)))
        };
        let series = vec![
            area("copied", &|sample| (0.0, copied(sample))),
            area("mirrored", &|sample| (copied(sample), both(sample))),
        ];
        let scale = Scale::from_zero(self.highest(both));
        let chart = Chart {
            height: 110.0,
            below: Below::Time,
            ..self.chart("Written to the target", scale, byte_rate, series)
        };
        plot(&chart, &[("copied", "copied"), ("mirrored", "guest writes, mirrored")])
    }

    fn chart<'a>(
        &'a self,
        title: &'a str,
        scale: Scale,
        format: fn(f64) -> String,
        series: Vec<Series>,
    ) -> Chart<'a> {
        Chart {
            title,
            time: self.time,
            scale,
            format,
            height: 160.0,
            above: Above::Nothing,
            below: Below::Nothing,
            bands: &self.bands,
            marks: &self.marks,
            series,
        }
    }

    fn highest(&self, value: impl Fn(&HistorySample) -> f64) -> f64 {
        self.samples.iter().map(|sample| value(sample)).fold(0.0, f64::max)
    }

    fn series(
        &self,
        class: &'static str,
        form: Form,
        values: impl Fn(&HistorySample) -> Option<(f64, f64)>,
    ) -> Series {
        let points = self.samples.iter().map(|sample| {
            let (lower, upper) = values(sample)?;
            Some((sample.at_ms + sample.length_ms / 2.0, lower, upper))
        });
        Series { class, form, points: points.collect() }
    }
}

/// Returns for each visible sample: begin, end, requests a second, latencies, bytes copied and mirrored a second.
pub(crate) fn hover_data(recording: Option<&Recording>) -> Value {
    let shown = recording.and_then(|recording| Some(shown_samples(recording, shown_time(recording)?)));
    let rows = shown.unwrap_or_default().into_iter().map(|sample| {
        json!([
            sample.at_ms,
            sample.at_ms + sample.length_ms,
            rate(sample, requests(sample) as f64).round(),
            sample.median_us,
            sample.p99_us,
            sample.worst_us,
            rate(sample, sample.bytes_copied as f64).round(),
            rate(sample, sample.bytes_mirrored as f64).round(),
        ])
    });
    Value::Array(rows.collect())
}

pub(crate) fn requests(sample: &HistorySample) -> u64 {
    sample.reads + sample.writes + sample.flushes
}

const MIB: f64 = 1_048_576.0;

fn rate(sample: &HistorySample, count: f64) -> f64 {
    if sample.length_ms > 0.0 { count / sample.length_ms * 1000.0 } else { 0.0 }
}

/// Formats MiB a second for an axis.
fn byte_rate(value: f64) -> String {
    if value == 0.0 { "0".to_owned() } else { format!("{}/s", bytes(value * MIB)) }
}

/// Formats microseconds for an axis of powers of ten.
fn decade(micros: f64) -> String {
    match micros {
        below if below < 1000.0 => format!("{below:.0} µs"),
        below if below < 1_000_000.0 => format!("{:.0} ms", below / 1000.0),
        more => format!("{:.0} s", more / 1_000_000.0),
    }
}

/// Returns the time to plot; `None` if there are no samples.
fn shown_time(recording: &Recording) -> Option<(f64, f64)> {
    let (first, last) = (recording.samples.first()?, recording.samples.last()?);
    let recorded = (first.at_ms, last.at_ms + last.length_ms);
    let ended = recording.ended_ms.unwrap_or(recorded.1);
    let margin = MARGIN_MS.max(ended);
    let time = (recorded.0.max(-margin), recorded.1.min(ended + margin));
    (time.1 > time.0).then_some(time)
}

fn shown_samples(recording: &Recording, time: (f64, f64)) -> Vec<&HistorySample> {
    let is_shown = |sample: &&HistorySample| {
        sample.length_ms > 0.0 && sample.at_ms + sample.length_ms > time.0 && sample.at_ms < time.1
    };
    recording.samples.iter().filter(is_shown).collect()
}

fn plot(chart: &Chart<'_>, legend: &[(&str, &str)]) -> String {
    let key = |(class, name): &(&str, &str)| format!("<span class=\"key {class}\"><i></i>{name}</span>");
    let keys: String = legend.iter().map(key).collect();
    format!("<figure><figcaption><b>{}</b>{keys}</figcaption>{}</figure>", chart.title, chart.svg())
}

fn legend(marks: &[Mark]) -> String {
    let names: Vec<String> = marks
        .iter()
        .map(|mark| format!("<span class=\"key {}\"><i></i>{}</span>", mark.class, escape(&mark.name)))
        .collect();
    if names.is_empty() { String::new() } else { format!("<p class=\"legend\">{}</p>", names.concat()) }
}

/// Returns bands for the long phases. The phases of the switch-over are too short, and are a mark.
fn bands(migration: &Migration, recording: &Recording, time: (f64, f64)) -> Vec<Band> {
    let ended = recording.ended_ms.unwrap_or(time.1);
    let mut bands = Vec::new();
    let mut add = |class, name: &str, from: f64, to: f64, detail: String| {
        let to = to.min(time.1);
        if to > from {
            bands.push(Band { class, name: name.to_owned(), detail, time: (from.max(time.0), to) });
        }
    };
    add("before", "before", time.0, 0.0, "before the migration".to_owned());
    let copied_until = end_of_copying(recording).unwrap_or(ended);
    let length = |from: f64, to: f64| seconds((to - from) / 1000.0);
    add("copying", "copying", 0.0, copied_until, format!("copying: {}", length(0.0, copied_until)));
    for (index, entered) in recording.phases.iter().enumerate() {
        let until = recording.phases.get(index + 1).map_or(ended, |next| next.at_ms);
        let (class, name) = match entered.phase {
            Phase::Filling => ("filling", "filling"),
            Phase::Retiring => ("retiring", "clearing up"),
            Phase::Discarding => ("discarding", "giving up"),
            Phase::TakingBack => ("discarding", "handing back"),
            _ => continue,
        };
        add(class, name, entered.at_ms, until, format!("{name}: {}", length(entered.at_ms, until)));
    }
    if recording.ended_ms.is_some() {
        let at = if migration.state == api::MigrationState::Moved { "after" } else { "afterwards" };
        add("after", at, ended, time.1, "after the migration".to_owned());
    }
    let least = (time.1 - time.0) * BAND_PART_MIN;
    for suspension in &recording.suspensions {
        let until = suspension.ended_ms.unwrap_or(ended).max(suspension.at_ms + least);
        let detail = format!("suspended for {}: {}", length(suspension.at_ms, until), suspension.reason);
        add("suspended", "", suspension.at_ms, until, detail);
    }
    bands
}

/// Returns the begin of the last attempt at the handover, or of the failure.
fn end_of_copying(recording: &Recording) -> Option<f64> {
    let ends = |phase| matches!(phase, Phase::Closing | Phase::Discarding);
    recording.phases.iter().rev().find(|entered| ends(entered.phase)).map(|entered| entered.at_ms)
}

/// Returns a mark for each attempt at the handover. The last one is the switch-over if the volume moved.
fn marks(migration: &Migration, recording: &Recording) -> Vec<Mark> {
    let tries: Vec<f64> = recording
        .phases
        .iter()
        .filter(|entered| entered.phase == Phase::Closing)
        .map(|entered| entered.at_ms)
        .collect();
    let last = tries.len().saturating_sub(1);
    let mark = |(index, at): (usize, &f64)| match migration.switch_over {
        Some(parts) if index == last => {
            let held = latency(parts.gate_closed_ms * 1000.0);
            Mark { class: "switch", name: format!("switch-over: requests held for {held}"), at: *at }
        }
        _ => Mark { class: "try", name: "a try at the handover that was given up".to_owned(), at: *at },
    };
    tries.iter().enumerate().map(mark).collect()
}
