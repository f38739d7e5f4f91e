//! The figures of a report as tables and sentences, for text and for pages.

use std::fmt::Write as _;

use super::metric::Unit;
use super::report::{Found, Place, Report, Section};
use super::statistics::Summary;

/// A table of medians: a row for each variant, and a column for each metric, or for each place on an axis.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Table {
    pub(super) header: Vec<String>,
    pub(super) rows: Vec<Vec<String>>,
}

const NOTHING: &str = "-";

impl Report {
    pub(super) fn text(&self) -> String {
        let [machine, programs] = self.environment.lines();
        let mut text = format!("{machine}\n{programs}\n{}\n", self.lead);
        for section in &self.parts {
            let _ = writeln!(text, "\n{}: {}", section.name, section.title);
            for Table { header, rows } in self.tables(section) {
                let figures: Vec<usize> = (1..header.len()).collect();
                let mut table =
                    console::table(&header.iter().map(String::as_str).collect::<Vec<_>>(), &figures);
                for row in &rows {
                    table.add_row(row);
                }
                text += &console::lines(&table);
            }
            for sentence in self.sentences(section) {
                let _ = writeln!(text, "{sentence}");
            }
        }
        text
    }

    /// Returns a table of the metrics that do not vary along the part's axis, and one for each metric that does.
    pub(super) fn tables(&self, section: &Section) -> Vec<Table> {
        let plain = self.table_of_metrics(section);
        let varying = section.columns.iter().filter_map(|metric| {
            let found: Vec<_> =
                self.found(section, *metric).filter_map(|found| Some((found.at?, found))).collect();
            if found.is_empty() { None } else { Some(along_axis(metric.head, section.axis, &found)) }
        });
        plain.into_iter().chain(varying).collect()
    }

    fn table_of_metrics(&self, section: &Section) -> Option<Table> {
        let of = |metric| self.found(section, metric).filter(|found| found.at.is_none());
        let columns: Vec<_> = section.columns.iter().filter(|metric| of(**metric).next().is_some()).collect();
        let variants = names(columns.iter().flat_map(|metric| of(**metric)));
        let mut header = vec![String::new()];
        let mut rows: Vec<Vec<String>> = variants.iter().map(|name| vec![(*name).to_owned()]).collect();
        for (index, metric) in columns.iter().enumerate() {
            header.push(metric.head.to_owned());
            header.extend((index == 0).then(String::new));
            for (row, variant) in rows.iter_mut().zip(&variants) {
                let found = of(**metric).find(|found| found.variant == *variant);
                row.push(found.map_or(NOTHING.to_owned(), |found| shown(metric.unit, &found.summary)));
                if index == 0 {
                    row.push(found.map_or(NOTHING.to_owned(), |found| spread(metric.unit, &found.summary)));
                }
            }
        }
        if rows.is_empty() { None } else { Some(Table { header, rows }) }
    }

    /// Returns a sentence for each variant about the comparisons that are not in the table, and the part's note.
    pub(super) fn sentences(&self, section: &Section) -> Vec<String> {
        let said = || {
            section
                .comparisons
                .iter()
                .map(|comparison| comparison.gives)
                .filter(|gives| !section.columns.contains(gives))
        };
        let found =
            || said().flat_map(|metric| self.found(section, metric).filter(|found| found.at.is_none()));
        let of_variant = |variant: &str| {
            let parts = found().filter(|found| found.variant == variant).map(|found| {
                let unit = found.metric.unit;
                format!(
                    "{} {} ({})",
                    found.metric.head,
                    shown(unit, &found.summary),
                    spread(unit, &found.summary)
                )
            });
            format!("{variant}: {}", parts.collect::<Vec<_>>().join(", "))
        };
        let mut sentences: Vec<String> = names(found()).into_iter().map(of_variant).collect();
        sentences.extend((!section.note.is_empty()).then(|| section.note.clone()));
        sentences
    }
}

fn along_axis(head: &str, axis: &str, found: &[(Place, &Found)]) -> Table {
    let mut places: Vec<Place> = Vec::new();
    for (at, _) in found {
        if !places.contains(at) {
            places.push(*at);
        }
    }
    places.sort_by(|one, other| one.x.total_cmp(&other.x));
    let rows = names(found.iter().map(|(_, found)| *found)).into_iter().map(|variant| {
        let cells = places.iter().map(|place| {
            let found = found.iter().find(|(at, found)| at == place && found.variant == variant);
            found.map_or(NOTHING.to_owned(), |(_, found)| shown(found.metric.unit, &found.summary))
        });
        std::iter::once(variant.to_owned()).chain(cells).collect()
    });
    let rows = rows.collect();
    let header =
        std::iter::once(format!("{head} by {axis}")).chain(places.iter().map(Place::words)).collect();
    Table { header, rows }
}

/// Returns the names of variants, in the order of their first figure.
pub(super) fn names<'a>(found: impl Iterator<Item = &'a Found>) -> Vec<&'a str> {
    let mut names = Vec::new();
    for Found { variant, .. } in found {
        if !names.contains(&variant.as_str()) {
            names.push(variant);
        }
    }
    names
}

impl Place {
    pub(super) fn words(&self) -> String {
        self.label.map_or_else(|| number(self.x), str::to_owned)
    }
}

/// Formats a number with as few decimals as it needs.
pub(super) fn number(value: f64) -> String {
    match value.abs() {
        _ if value == value.trunc() => format!("{value:.0}"),
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

fn shown(unit: Unit, summary: &Summary) -> String {
    let samples = || summary.samples.iter().flatten();
    match unit {
        Unit::Happened => format!("{:.0} of {}", samples().sum::<f64>(), samples().count()),
        unit => unit.show(summary.median),
    }
}

fn spread(unit: Unit, summary: &Summary) -> String {
    format!("{}–{}", unit.show(summary.min), unit.show(summary.max))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::bench::environment::Environment;
    use crate::bench::metric::Metric;
    use crate::bench::report::{Comparison, Curve, Line, Results, Sample};

    pub(in crate::bench) const SECONDS: Metric = Metric::less("seconds", "SECONDS", Unit::Seconds);
    const ENDED: Metric = Metric::more("ended", "ENDED", Unit::Happened);
    const LATENCY: Metric = Metric::less("latency", "ms", Unit::Milliseconds);
    const RATIO: Metric = Metric::less("ratio", "time ÷ that of cp", Unit::Ratio);

    /// A report of two variants in one part, with markup where names are.
    pub(in crate::bench) fn report() -> Report {
        let section = Section {
            name: "load".to_owned(),
            title: "under <a guest>".to_owned(),
            axis: "phase",
            columns: vec![SECONDS, ENDED, LATENCY],
            comparisons: vec![Comparison {
                of: SECONDS,
                rows: &["sterna"],
                beside: &["cp & mv"],
                gives: RATIO,
            }],
            note: "1 < 2.".to_owned(),
        };
        let mut results = Results::of(2);
        for (round, seconds) in [1.5, 2.0].into_iter().enumerate() {
            let sample = Sample::of([(SECONDS, seconds), (ENDED, round as f64)]);
            let line = Line { name: "sterna".to_owned(), points: vec![(0.0, 1.0), (1.0, 5.0)] };
            let curve = Curve {
                x: "seconds",
                y: "IOPS",
                lines: vec![line],
                migrations: vec![(0.0, 0.5)],
                ..Curve::default()
            };
            results.keep("load", "sterna", None, round, sample.curve(curve));
            results.keep("load", "sterna", None, round, Sample::of([(LATENCY, 2.25)]).at(1.0, Some("copy")));
            results.keep("load", "cp & mv", None, round, Sample::of([(SECONDS, 1.0)]));
        }
        results.compare(&section);
        let (results, curves) = results.into_found();
        let environment = Environment {
            processor: "<b>".to_owned(),
            cpus: 2,
            kernel: "6".to_owned(),
            file_system: "ext4".to_owned(),
            dropped_caches: "all",
            versions: [("fio".to_owned(), "\"3\"".to_owned())].into(),
        };
        let (bench, title, lead) = ("noted", "it's", "<i>".to_owned());
        let (size_bytes, rounds, settings) = (1, 2, serde_json::json!({}));
        Report {
            bench,
            title,
            lead,
            environment,
            size_bytes,
            rounds,
            settings,
            parts: vec![section],
            results,
            curves,
        }
    }

    #[test]
    fn a_part_is_tables_and_sentences() {
        let expected = "<b>, 2 CPUs, Linux 6, ext4
fio \"3\"
<i>

load: under <a guest>
         SECONDS              ENDED
sterna      1.75  1.50–2.00  1 of 2
cp & mv     1.00  1.00–1.00       -
ms by phase  copy
sterna       2.25
sterna: time ÷ that of cp 1.75 (1.50–2.00)
1 < 2.
";
        assert_eq!(report().text(), expected);
    }

    #[test]
    fn the_json_has_every_sample_by_part_variant_and_metric() {
        let report = serde_json::to_value(report()).unwrap();
        let expected = serde_json::json!({
            "part": "load", "variant": "sterna", "metric": "latency", "unit": "ms", "better": "less", "x": 1.0, "label": "copy",
            "median": 2.25, "lower_quartile": 2.25, "upper_quartile": 2.25, "min": 2.25, "max": 2.25, "samples": [2.25, 2.25],
        });
        assert!(report["results"].as_array().unwrap().contains(&expected), "{report}");
        assert_eq!(report["curves"][1]["round"], 1);
        assert_eq!(report["parts"][0]["name"], "load");
    }

    #[test]
    fn numbers_have_as_few_decimals_as_they_need() {
        assert_eq!([2.0, 123.4, 12.34, 1.058].map(number), ["2", "123", "12.3", "1.06"]);
    }
}
