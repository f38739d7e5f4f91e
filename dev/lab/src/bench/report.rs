//! The report of a benchmark: results by part, variant and metric, in one form for all scenarios.
//!
//! ```text
//!   round ─► sample: metrics of a row, a curve ─► results ─► comparisons, round by round ─► JSON │ tables │ page
//! ```

use serde::Serialize;

use super::environment::Environment;
use super::metric::{Metric, Unit};
use super::statistics::Summary;

/// Everything that a benchmark has measured. The names of its fields are a contract with readers of the JSON.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) bench: &'static str,
    #[serde(skip)]
    pub(super) title: &'static str,
    #[serde(skip)]
    pub(super) lead: String,
    pub(super) environment: Environment,
    pub(super) size_bytes: u64,
    pub(super) rounds: u32,
    pub(super) settings: serde_json::Value,
    pub(super) parts: Vec<Section>,
    pub(super) results: Vec<Found>,
    pub(super) curves: Vec<Curve>,
}

/// What is shown together: a part of the benchmark, with its columns and charts.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Section {
    pub(super) name: String,
    pub(super) title: String,
    /// What varies within the part; empty: nothing.
    pub(super) axis: &'static str,
    /// The columns of the table; the first is shown with its spread.
    #[serde(skip)]
    pub(super) columns: Vec<Metric>,
    #[serde(skip)]
    pub(super) comparisons: Vec<Comparison>,
    pub(super) note: String,
}

/// A new metric of some rows: what another one is beside the best of others in the same round. A ratio if its unit is one,
/// otherwise a difference.
#[derive(Clone, Copy, Debug)]
pub(super) struct Comparison {
    pub(super) of: Metric,
    /// The rows that are compared; empty: all others.
    pub(super) rows: &'static [&'static str],
    pub(super) beside: &'static [&'static str],
    pub(super) gives: Metric,
}

/// A place on the axis of a part.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Place {
    pub(super) x: f64,
    /// The words for x, if it is not a number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) label: Option<&'static str>,
}

/// All rounds of one metric of a row.
#[derive(Debug, Serialize)]
pub(super) struct Found {
    pub(super) part: String,
    pub(super) variant: String,
    #[serde(flatten)]
    pub(super) at: Option<Place>,
    #[serde(flatten)]
    pub(super) metric: Metric,
    #[serde(flatten)]
    pub(super) summary: Summary,
}

/// Lines over time, or over another axis, that one round of a row gives.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Curve {
    pub(super) part: String,
    pub(super) variant: String,
    pub(super) round: usize,
    pub(super) x: &'static str,
    pub(super) y: &'static str,
    pub(super) lines: Vec<Line>,
    /// From where to where a migration went on.
    pub(super) migrations: Vec<(f64, f64)>,
    #[serde(skip)]
    pub(super) is_logarithmic: bool,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct Line {
    pub(super) name: String,
    pub(super) points: Vec<(f64, f64)>,
}

impl Curve {
    /// Returns a guest's life over seconds since the order, with the migrations in it.
    pub(super) fn life(y: &'static str, points: Vec<(f64, f64)>, migrations: Vec<(f64, f64)>) -> Self {
        let lines = vec![Line { name: "the guest".to_owned(), points }];
        Self { x: "seconds since the order", y, lines, migrations, ..Self::default() }
    }
}

/// What one round gives of one row: by default of the variant and the part that had the turn.
#[derive(Debug, Default)]
pub(super) struct Sample {
    values: Vec<(Metric, f64)>,
    row: Option<String>,
    part: Option<String>,
    at: Option<Place>,
    curve: Option<Curve>,
}

impl Sample {
    pub(super) fn of(values: impl IntoIterator<Item = (Metric, f64)>) -> Self {
        Self { values: values.into_iter().collect(), ..Self::default() }
    }

    pub(super) fn with(mut self, values: impl IntoIterator<Item = (Metric, f64)>) -> Self {
        self.values.extend(values);
        self
    }

    pub(super) fn value(&self, metric: Metric) -> Option<f64> {
        self.values.iter().find(|(known, _)| *known == metric).map(|(_, value)| *value)
    }

    pub(super) fn and(mut self, metric: Metric, value: Option<f64>) -> Self {
        self.values.extend(value.map(|value| (metric, value)));
        self
    }

    pub(super) fn row(self, name: impl Into<String>) -> Self {
        Self { row: Some(name.into()), ..self }
    }

    pub(super) fn part(self, name: impl Into<String>) -> Self {
        Self { part: Some(name.into()), ..self }
    }

    pub(super) fn at(self, x: f64, label: Option<&'static str>) -> Self {
        Self { at: Some(Place { x, label }), ..self }
    }

    pub(super) fn curve(self, curve: Curve) -> Self {
        Self { curve: Some(curve), ..self }
    }
}

/// The samples of all rounds so far.
#[derive(Debug, Default)]
pub(super) struct Results {
    rounds: usize,
    rows: Vec<(Key, Vec<Option<f64>>)>,
    curves: Vec<Curve>,
}

#[derive(Clone, Debug, PartialEq)]
struct Key {
    part: String,
    variant: String,
    at: Option<Place>,
    metric: Metric,
}

impl Results {
    pub(super) fn of(rounds: u32) -> Self {
        Self { rounds: rounds as usize, ..Self::default() }
    }

    /// Keeps a sample of a turn. What is no number counts as no sample.
    pub(super) fn keep(
        &mut self,
        part: &str,
        variant: &str,
        at: Option<Place>,
        round: usize,
        sample: Sample,
    ) {
        let part = sample.part.unwrap_or_else(|| part.to_owned());
        let variant = sample.row.unwrap_or_else(|| variant.to_owned());
        let at = sample.at.or(at);
        for (metric, value) in sample.values {
            let key = Key { part: part.clone(), variant: variant.clone(), at, metric };
            self.samples(key)[round] = Some(value).filter(|value| value.is_finite());
        }
        self.curves.extend(sample.curve.map(|curve| Curve { part, variant, round, ..curve }));
    }

    fn samples(&mut self, key: Key) -> &mut [Option<f64>] {
        let place = self.rows.iter().position(|(known, _)| *known == key).unwrap_or(self.rows.len());
        if place == self.rows.len() {
            self.rows.push((key, vec![None; self.rounds]));
        }
        &mut self.rows[place].1
    }

    /// Adds the comparisons of a part. Each may be of a metric that an earlier one has given.
    pub(super) fn compare(&mut self, section: &Section) {
        for Comparison { of, rows, beside, gives } in &section.comparisons {
            let measured: Vec<_> = self
                .rows
                .iter()
                .filter(|(key, _)| key.part == section.name && key.metric == *of)
                .cloned()
                .collect();
            let is_compared = |name: &str| match rows {
                [] => !beside.contains(&name),
                rows => rows.contains(&name),
            };
            for (key, own) in measured.iter().filter(|(key, _)| is_compared(&key.variant)) {
                let others: Vec<_> = measured
                    .iter()
                    .filter(|(other, _)| other.at == key.at && beside.contains(&other.variant.as_str()))
                    .collect();
                let compared = own.iter().enumerate().map(|(round, own)| {
                    let best =
                        others.iter().filter_map(|(_, samples)| samples[round]).reduce(|a, b| of.best(a, b));
                    beside_other(*own, best, gives.unit)
                });
                let compared = compared.collect();
                self.rows.push((Key { metric: *gives, ..key.clone() }, compared));
            }
        }
    }

    pub(super) fn into_found(self) -> (Vec<Found>, Vec<Curve>) {
        let found = self.rows.into_iter().filter_map(|(key, samples)| {
            let Key { part, variant, at, metric } = key;
            Some(Found { part, variant, at, metric, summary: Summary::of(samples)? })
        });
        (found.collect(), self.curves)
    }
}

/// Compares two figures of the same round: a slow round affects both, but not their ratio. A ratio of what is not positive says
/// nothing.
fn beside_other(own: Option<f64>, other: Option<f64>, unit: Unit) -> Option<f64> {
    let (own, other) = (own?, other?);
    match unit {
        Unit::Ratio => (own > 0.0 && other > 0.0).then(|| own / other),
        _ => Some(own - other),
    }
}

impl Report {
    /// Returns what was found in a part of metrics that vary along its axis, or of those that do not.
    pub(super) fn found<'a>(
        &'a self,
        section: &'a Section,
        metric: Metric,
    ) -> impl Iterator<Item = &'a Found> + Clone {
        self.results.iter().filter(move |found| found.part == section.name && found.metric == metric)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECONDS: Metric = Metric::less("seconds", "SECONDS", Unit::Seconds);
    const RATIO: Metric = Metric::less("to_best", "TO BEST", Unit::Ratio);
    const ADDED: Metric = Metric::less("added", "ADDED", Unit::Seconds);
    const ADDED_RATIO: Metric = Metric::less("added_to_mirror", "", Unit::Ratio);

    /// The results of a part in which each row has a time in each round.
    fn results(rows: &[(&str, &[f64])], comparisons: Vec<Comparison>) -> Vec<Found> {
        let mut results = Results::of(rows[0].1.len() as u32);
        for (name, seconds) in rows {
            for (round, value) in seconds.iter().enumerate() {
                results.keep("part", name, None, round, Sample::of([(SECONDS, *value)]));
            }
        }
        results.compare(&Section { name: "part".to_owned(), comparisons, ..Section::default() });
        results.into_found().0
    }

    fn of<'a>(found: &'a [Found], variant: &str, metric: Metric) -> Option<&'a [Option<f64>]> {
        let found = found.iter().find(|found| found.variant == variant && found.metric == metric);
        found.map(|found| &found.summary.samples[..])
    }

    #[test]
    fn rows_are_compared_with_the_best_of_the_same_round() {
        // cp is the quicker copy in the first round, qemu-img in the second.
        let rows: [(&str, &[f64]); 3] =
            [("sterna", &[3.0, 3.0]), ("cp", &[2.0, 4.0]), ("qemu-img", &[4.0, 3.0])];
        let best = Comparison { of: SECONDS, rows: &["sterna"], beside: &["cp", "qemu-img"], gives: RATIO };
        let found = results(&rows, vec![best]);
        assert_eq!(of(&found, "sterna", RATIO), Some(&[Some(1.5), Some(1.0)][..]));
        assert_eq!(of(&found, "cp", RATIO), None);
    }

    #[test]
    fn a_comparison_may_be_of_what_another_one_gives() {
        let rows: [(&str, &[f64]); 3] =
            [("cp", &[2.0, 2.0]), ("sterna", &[3.0, 1.0]), ("mirror", &[4.0, 4.0])];
        let added = Comparison { of: SECONDS, rows: &[], beside: &["cp"], gives: ADDED };
        let ratio = Comparison { of: ADDED, rows: &["sterna"], beside: &["mirror"], gives: ADDED_RATIO };
        let found = results(&rows, vec![added, ratio]);
        assert_eq!(of(&found, "cp", ADDED), None, "nothing is compared with itself");
        assert_eq!(of(&found, "mirror", ADDED), Some(&[Some(2.0), Some(2.0)][..]));
        // In the second round sterna added nothing, and a ratio would say nothing.
        assert_eq!(of(&found, "sterna", ADDED_RATIO), Some(&[Some(0.5), None][..]));
    }

    #[test]
    fn a_round_without_a_sample_is_not_compared() {
        let mut results = Results::of(2);
        results.keep("part", "cp", None, 0, Sample::of([(SECONDS, 2.0)]));
        results.keep("part", "cp", None, 1, Sample::of([(SECONDS, f64::NAN)]));
        results.keep("part", "sterna", None, 1, Sample::of([(SECONDS, 1.0)]));
        let comparisons = vec![Comparison { of: SECONDS, rows: &[], beside: &["cp"], gives: RATIO }];
        results.compare(&Section { name: "part".to_owned(), comparisons, ..Section::default() });
        let (found, _) = results.into_found();
        assert_eq!(of(&found, "cp", SECONDS), Some(&[Some(2.0), None][..]));
        assert_eq!(of(&found, "sterna", RATIO), None, "no round has both");
    }
}
