//! A plot over time as SVG, with bands, an axis at the left, lines and areas.
//!
//! ```text
//!   8,000 ┤      ░░░░░░░░░░░│
//!   4,000 ┤ ▂▃▂▃ ░▁▁▂▁▂▁▁▂░░│ ▃▂▃      bands: phases; the line: the switch-over
//!       0 ┼──────────────────────
//! ```

use crate::markup::escape;
use crate::scale::{Scale, steps};

/// Width of every plot, in its own units; the page stretches it.
pub(crate) const WIDTH: f64 = 1040.0;
/// Begin and end of the values, from the left.
pub(crate) const LEFT: f64 = 72.0;
pub(crate) const RIGHT: f64 = WIDTH - 8.0;

pub(crate) struct Chart<'a> {
    /// The title, also for screen readers.
    pub(crate) title: &'a str,
    /// First and last instant, in milliseconds.
    pub(crate) time: (f64, f64),
    pub(crate) scale: Scale,
    pub(crate) format: fn(f64) -> String,
    /// Height of the part that holds the values.
    pub(crate) height: f64,
    pub(crate) above: Above,
    pub(crate) below: Below,
    pub(crate) bands: &'a [Band],
    pub(crate) marks: &'a [Mark],
    /// The series, the last on top.
    pub(crate) series: Vec<Series>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Above {
    Nothing,
    Names,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Below {
    Nothing,
    Time,
}

pub(crate) struct Band {
    pub(crate) class: &'static str,
    pub(crate) name: String,
    /// The text that is shown when the pointer is over it.
    pub(crate) detail: String,
    pub(crate) time: (f64, f64),
}

pub(crate) struct Mark {
    pub(crate) class: &'static str,
    pub(crate) name: String,
    pub(crate) at: f64,
}

/// A line, or an area above the base.
pub(crate) struct Series {
    pub(crate) class: &'static str,
    pub(crate) form: Form,
    /// Time, lower and upper value; `None`: the value is unknown, and the line is interrupted.
    pub(crate) points: Vec<Option<(f64, f64, f64)>>,
}

/// How a series is drawn.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// A line along the upper values.
    Line,
    /// The same, with the space down to the lower values filled.
    Area,
}

impl Chart<'_> {
    pub(crate) fn svg(&self) -> String {
        let above = if self.above == Above::Names { 24.0 } else { 10.0 };
        let below = if self.below == Below::Time { 34.0 } else { 8.0 };
        let (top, bottom) = (above, above + self.height);
        let height = bottom + below;
        let (first, last) = self.time;
        let title = escape(self.title);
        let mut svg = format!(
            "<svg class=\"plot\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{title}\" \
             data-left=\"{LEFT}\" data-right=\"{RIGHT}\" data-first=\"{first:.3}\" data-last=\"{last:.3}\">"
        );
        svg += &self.bands(top, bottom);
        svg += &self.axis(top, bottom);
        if self.below == Below::Time {
            svg += &self.time_axis(bottom);
        }
        for series in &self.series {
            svg += &self.paths(series, top, bottom);
        }
        svg += &self.marks(top, bottom);
        svg += &format!(
            "<line class=\"cursor\" x1=\"0\" x2=\"0\" y1=\"{top}\" y2=\"{bottom}\" visibility=\"hidden\"/></svg>"
        );
        svg
    }

    fn x(&self, at: f64) -> f64 {
        let (low, high) = self.time;
        LEFT + Scale::Linear { low, high }.place(at) * (RIGHT - LEFT)
    }

    fn y(&self, value: f64, top: f64, bottom: f64) -> f64 {
        bottom - self.scale.place(value) * (bottom - top)
    }

    fn bands(&self, top: f64, bottom: f64) -> String {
        let mut svg = String::new();
        for band in self.bands {
            let (left, right) = (self.x(band.time.0), self.x(band.time.1));
            let (width, height) = (right - left, bottom - top);
            svg += &format!(
                "<rect class=\"band {}\" x=\"{left:.1}\" y=\"{top}\" width=\"{width:.1}\" height=\"{height}\">\
                 <title>{}</title></rect>",
                band.class,
                escape(&band.detail)
            );
            // A name that does not fit would cover its neighbour.
            if self.above == Above::Names && width > 7.0 * band.name.chars().count() as f64 {
                let (middle, baseline) = (f64::midpoint(left, right), top - 8.0);
                svg += &format!(
                    "<text class=\"name {}\" x=\"{middle:.1}\" y=\"{baseline}\">{}</text>",
                    band.class,
                    escape(&band.name)
                );
            }
        }
        svg
    }

    fn axis(&self, top: f64, bottom: f64) -> String {
        let mut svg = String::new();
        for tick in self.scale.ticks() {
            let y = self.y(tick, top, bottom);
            let (label, text_y) = (escape(&(self.format)(tick)), y + 4.0);
            let text_x = LEFT - 8.0;
            svg += &format!(
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
                 <text class=\"tick\" x=\"{text_x}\" y=\"{text_y:.1}\">{label}</text>"
            );
        }
        svg
    }

    fn time_axis(&self, bottom: f64) -> String {
        let (first, last) = self.time;
        let (line_end, text_y) = (bottom + 5.0, bottom + 20.0);
        let is_long = last - first > 600_000.0;
        let (unit_ms, unit) = if is_long { (60_000.0, "min") } else { (1000.0, "s") };
        let mut svg = String::new();
        for tick in steps(first / unit_ms, last / unit_ms, 10.0) {
            let x = self.x(tick * unit_ms);
            // Steps below a whole unit need digits after the point.
            let label =
                if (tick - tick.round()).abs() < 1e-6 { format!("{tick:.0}") } else { format!("{tick:.1}") };
            let label = label.replace('-', "−");
            svg += &format!(
                "<line class=\"grid\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{bottom}\" y2=\"{line_end}\"/>\
                 <text class=\"time\" x=\"{x:.1}\" y=\"{text_y}\">{label} {unit}</text>"
            );
        }
        svg
    }

    fn paths(&self, series: &Series, top: f64, bottom: f64) -> String {
        let mut svg = String::new();
        for run in series.points.split(Option::is_none) {
            let points: Vec<_> = run.iter().flatten().collect();
            let place = |at: f64, value: f64| format!("{:.1},{:.1}", self.x(at), self.y(value, top, bottom));
            let upper: Vec<String> = points.iter().map(|(at, _, value)| place(*at, *value)).collect();
            if upper.is_empty() {
                continue;
            }
            if series.form == Form::Area {
                let lower = points.iter().rev().map(|(at, value, _)| place(*at, *value));
                let outline: Vec<String> = upper.iter().cloned().chain(lower).collect();
                svg +=
                    &format!("<polygon class=\"area {}\" points=\"{}\"/>", series.class, outline.join(" "));
            }
            svg += &format!("<polyline class=\"line {}\" points=\"{}\"/>", series.class, upper.join(" "));
        }
        svg
    }

    fn marks(&self, top: f64, bottom: f64) -> String {
        let mut svg = String::new();
        for mark in self.marks {
            let x = self.x(mark.at);
            svg += &format!(
                "<line class=\"mark {}\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{top}\" y2=\"{bottom}\"><title>{}</title></line>",
                mark.class,
                escape(&mark.name)
            );
            if self.above == Above::Names {
                svg += &format!(
                    "<path class=\"tip {}\" d=\"M{x:.1},{top} l-4.5,-7 h9 z\"><title>{}</title></path>",
                    mark.class,
                    escape(&mark.name)
                );
            }
        }
        svg
    }
}
