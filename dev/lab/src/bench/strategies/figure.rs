//! A figure: each column's result at each x, with the paper's figures; and its table.

use serde::Serialize;

use crate::bench::guest::Moment;
use crate::bench::show::Table;
use crate::bench::statistics::Summary;

/// One figure or table of the paper, measured on this machine.
#[derive(Clone, Debug, Serialize)]
pub struct Figure {
    /// The figure's name in the paper, for example `figure-4`.
    pub name: &'static str,
    /// What the figure shows, in words.
    pub title: String,
    /// The label of the x-axis.
    pub x: &'static str,
    /// The label of the y-axis, with its unit.
    pub y: &'static str,
    /// The lines of the figure.
    pub series: Vec<Series>,
    /// The paper's figures: series, x, and y.
    pub paper: Vec<(&'static str, f64, f64)>,
    /// What the paper says besides, in our words, and a warning for the reading of ours.
    pub note: &'static str,
    #[serde(skip)]
    pub(in crate::bench) form: Form,
}

/// The forms of a figure, and whether it has a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::bench) enum Form {
    /// Few values of x: a table, and lines with dots.
    Table,
    /// Time on x: lines, without a table of means.
    Course,
    /// Both axes by powers of ten, without a table.
    Logarithmic,
}

/// A line of a figure.
#[derive(Clone, Debug, Serialize)]
pub struct Series {
    /// The line's name in the legend.
    pub name: String,
    /// The line's points, by x.
    pub points: Vec<Point>,
}

/// A point of a line.
#[derive(Clone, Debug, Serialize)]
pub struct Point {
    /// The place on the x-axis.
    pub x: f64,
    /// The label of x, if x is not a number.
    pub label: Option<&'static str>,
    /// The rounds' figures; `None`: the migrations were given up, or have no such figure.
    pub y: Option<Summary>,
}

impl Point {
    pub(in crate::bench) fn of(x: f64, samples: Vec<f64>) -> Self {
        Self { x, label: None, y: Summary::of(samples) }
    }

    /// Returns a guest's `y` over time, of its requests a second in halves of a second. Tenths vary too much on a slow device.
    pub(in crate::bench) fn over_time(moments: &[Moment], y: impl Fn(f64) -> f64) -> Vec<Self> {
        let halves = moments.chunks(5).filter(|half| half.len() == 5);
        let mean = |half: &[Moment]| half.iter().map(|moment| moment.iops).sum::<f64>() / 5.0;
        halves.map(|half| Self::of(half[0].seconds, vec![y(mean(half))])).collect()
    }

    pub(super) fn called(self, label: &'static str) -> Self {
        Self { label: Some(label), ..self }
    }
}

impl Figure {
    /// Returns a row for each x, and a column for each series; the paper's figures are in parentheses.
    pub fn table(&self) -> Option<Table> {
        if self.form != Form::Table {
            return None;
        }
        let mut xs: Vec<(f64, Option<&'static str>)> = Vec::new();
        for point in self.series.iter().flat_map(|series| &series.points) {
            if !xs.iter().any(|(x, _)| *x == point.x) {
                xs.push((point.x, point.label));
            }
        }
        xs.sort_by(|(one, _), (other, _)| one.total_cmp(other));
        let rows = self.series.iter().map(|series| {
            let cells = xs.iter().map(|(x, _)| {
                let point = series.points.iter().find(|point| point.x == *x);
                let ours = match point.map(|point| point.y.as_ref()) {
                    None => "-".to_owned(),
                    Some(None) => "none".to_owned(),
                    Some(Some(summary)) => number(summary.median),
                };
                let theirs = self.paper.iter().find(|(name, at, _)| series.name == *name && at == x);
                theirs.map_or(ours.clone(), |(_, _, value)| format!("{ours} ({})", number(*value)))
            });
            std::iter::once(series.name.clone()).chain(cells).collect()
        });
        let head = xs.iter().map(|(x, label)| label.map_or_else(|| place(*x), str::to_owned));
        let head: Vec<String> = std::iter::once(format!("{} by {}", self.y, self.x)).chain(head).collect();
        let conclusion = if self.paper.is_empty() {
            self.note.to_owned()
        } else {
            format!("In parentheses: the paper's. {}", self.note)
        };
        Some(Table { header: head, rows: rows.collect(), conclusion })
    }
}

/// Formats a figure with three significant digits.
pub(super) fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 || size == 0.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// Formats a place on an axis: whole numbers without decimals.
pub(super) fn place(value: f64) -> String {
    if value == value.trunc() { format!("{value:.0}") } else { number(value) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_the_paper_beside_ours_and_says_where_there_is_nothing() {
        let point = |x, samples: &[f64]| Point::of(x, samples.to_vec());
        let series = |name: &str, points| Series { name: name.to_owned(), points };
        let figure = Figure {
            name: "figure-0",
            title: "a title".to_owned(),
            x: "x",
            y: "y",
            series: vec![
                series("mirror", vec![point(2.0, &[1.0, 3.0, 1.5]), point(32.0, &[123.4])]),
                series("tracking", vec![point(2.0, &[])]),
            ],
            paper: vec![("mirror", 2.0, 1.058)],
            note: "A note.",
            form: Form::Table,
        };
        let table = figure.table().unwrap();
        assert_eq!(table.header, ["y by x", "2", "32"]);
        assert_eq!(table.rows, [["mirror", "1.50 (1.06)", "123"], ["tracking", "none", "-"]]);
        assert_eq!(table.conclusion, "In parentheses: the paper's. A note.");
        assert!(Figure { form: Form::Course, ..figure }.table().is_none());
    }
}
