//! Charts of benchmarks, as SVG: bars with every sample, and a guest's life over time.
//!
//! Colours come from classes of the page's style, so that the charts follow its light and dark.

use std::fmt::Write as _;

use report::escape;

use super::guest::Moment;
use super::statistics::Summary;

/// The page scales charts from this width.
const WIDTH: f64 = 720.0;
const LEFT: f64 = 210.0;
const RIGHT: f64 = 620.0;
const ROW: f64 = 30.0;
const COURSE_HEIGHT: f64 = 190.0;

#[derive(Debug)]
pub(super) struct Bar<'a> {
    pub(super) name: &'a str,
    pub(super) summary: &'a Summary,
}

/// Draws bars to the medians, a line from the least to the most, and a dot for each sample. Names choose the colours.
pub(super) fn bars(title: &str, bars: &[Bar<'_>], show: impl Fn(f64) -> String) -> String {
    let most = bars.iter().map(|bar| bar.summary.max).fold(0.0, f64::max);
    let least = bars.iter().map(|bar| bar.summary.min).fold(0.0, f64::min);
    let width = if most > least { most - least } else { 1.0 };
    let x = |value: f64| LEFT + (value - least) / width * (RIGHT - LEFT);
    let height = ROW * bars.len() as f64;
    let mut svg = begin(title, height);
    for (index, Bar { name, summary }) in bars.iter().enumerate() {
        let class = class_of(name);
        let middle = ROW * (index as f64 + 0.5);
        let (from, to) = (x(summary.median.min(0.0)), x(summary.median.max(0.0)));
        let name = escape(name);
        let value = escape(&show(summary.median));
        let (least, most) = (x(summary.min), x(summary.max));
        let _ = write!(
            svg,
            "<g class=\"{class}\"><text class=\"name\" x=\"{:.1}\" y=\"{:.1}\">{name}</text>\
             <rect x=\"{from:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"16\"/>\
             <line x1=\"{least:.1}\" x2=\"{most:.1}\" y1=\"{middle:.1}\" y2=\"{middle:.1}\"/>",
            LEFT - 8.0,
            middle + 4.5,
            middle - 8.0,
            (to - from).max(1.0),
        );
        for (round, sample) in summary.samples.iter().enumerate() {
            let shown = escape(&show(*sample));
            let _ = write!(
                svg,
                "<circle cx=\"{:.1}\" cy=\"{middle:.1}\" r=\"3\"><title>round {}: {shown}</title></circle>",
                x(*sample),
                round + 1
            );
        }
        let _ = write!(
            svg,
            "<text class=\"value\" x=\"{:.1}\" y=\"{:.1}\">{value}</text></g>",
            RIGHT + 12.0,
            middle + 4.5
        );
    }
    svg + "</svg>\n"
}

/// The axes that several courses share, so that they can be compared.
#[derive(Clone, Copy, Debug)]
pub(super) struct CourseScale {
    from: f64,
    to: f64,
    iops: f64,
}

impl CourseScale {
    pub(super) fn of<'a>(courses: impl Iterator<Item = &'a [Moment]> + Clone) -> Self {
        let moments = courses.flatten();
        let seconds = moments.clone().map(|moment| moment.seconds);
        let iops = moments.map(|moment| moment.iops).fold(1.0, f64::max);
        Self { from: seconds.clone().fold(0.0, f64::min), to: seconds.fold(0.1, f64::max), iops }
    }
}

/// Draws the requests per second of a guest over time; the migration, from 0 to `ended` seconds, is shaded.
pub(super) fn course(title: &str, name: &str, moments: &[Moment], ended: f64, scale: CourseScale) -> String {
    const TOP: f64 = 10.0;
    const BOTTOM: f64 = COURSE_HEIGHT - 26.0;
    const EDGES: (f64, f64) = (60.0, WIDTH - 10.0);
    let x = |seconds: f64| {
        EDGES.0 + (seconds - scale.from) / (scale.to - scale.from).max(0.1) * (EDGES.1 - EDGES.0)
    };
    let y = |iops: f64| BOTTOM - iops / scale.iops * (BOTTOM - TOP);
    let mut svg = begin(title, COURSE_HEIGHT);
    let (begun, over) = (x(0.0), x(ended.min(scale.to)));
    let _ = write!(
        svg,
        "<rect class=\"migration\" x=\"{begun:.1}\" y=\"{TOP}\" width=\"{:.1}\" height=\"{:.1}\">\
         <title>the migration: {ended:.2} s</title></rect>",
        (over - begun).max(1.0),
        BOTTOM - TOP
    );
    for part in [0.0, 0.5, 1.0] {
        let height = y(scale.iops * part);
        let _ = write!(
            svg,
            "<line class=\"grid\" x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{height:.1}\" y2=\"{height:.1}\"/>\
             <text class=\"name tick\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            EDGES.0,
            EDGES.1,
            EDGES.0 - 6.0,
            height + 4.0,
            super::show::thousands(scale.iops * part)
        );
    }
    for seconds in ticks(scale.from, scale.to) {
        let _ = write!(
            svg,
            "<text class=\"middle tick\" x=\"{:.1}\" y=\"{:.1}\">{seconds} s</text>",
            x(seconds),
            BOTTOM + 18.0
        );
    }
    let points: Vec<String> =
        moments.iter().map(|moment| format!("{:.1},{:.1}", x(moment.seconds), y(moment.iops))).collect();
    let _ = write!(svg, "<polyline class=\"{}\" points=\"{}\"/></svg>", class_of(name), points.join(" "));
    svg + "\n"
}

/// Returns at most about ten round numbers of seconds between two.
fn ticks(from: f64, to: f64) -> Vec<f64> {
    let span = (to - from).max(0.1);
    let step = [0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0].into_iter().find(|step| span / step <= 10.0);
    let step = step.unwrap_or(span / 10.0);
    let first = (from / step).ceil() as i64;
    let last = (to / step).floor() as i64;
    (first..=last).map(|index| index as f64 * step).collect()
}

fn begin(title: &str, height: f64) -> String {
    let title = escape(title);
    format!("<svg role=\"img\" aria-label=\"{title}\" viewBox=\"0 0 {WIDTH} {height}\">")
}

fn class_of(name: &str) -> &'static str {
    match name {
        name if name.starts_with("sterna") => "sterna",
        "raw" | "tcp" | "cp" | "qemu-img convert" => "limit",
        name if name.ends_with("write-blocking") => "peer second",
        _ => "peer",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sample_is_a_dot_within_the_chart() {
        let summaries = [vec![10.0, 40.0, 20.0], vec![-5.0, 1.0, 2.0]].map(|s| Summary::of(s).unwrap());
        let bar = |name, index: usize| Bar { name, summary: &summaries[index] };
        let svg = bars("a < b", &[bar("sterna", 0), bar("x & y", 1)], |value| format!("{value:.0} us"));
        assert_eq!(svg.matches("<circle").count(), 6);
        assert!(
            svg.contains("a &lt; b") && svg.contains("x &amp; y") && svg.contains(">20 us</text>"),
            "{svg}"
        );
        let places = svg.split("cx=\"").skip(1).map(|rest| rest.split('"').next().unwrap());
        let places: Vec<f64> = places.map(|place| place.parse().unwrap()).collect();
        assert!(places.iter().all(|place| (LEFT..=RIGHT).contains(place)), "{places:?}");
        assert!((places[1] - RIGHT).abs() < 0.1 && (places[3] - LEFT).abs() < 0.1, "{places:?}");
    }

    #[test]
    fn zeroes_are_drawn_too() {
        let zero = Summary::of(vec![0.0]).unwrap();
        let svg = bars("zero", &[Bar { name: "raw", summary: &zero }], |value| value.to_string());
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    #[test]
    fn the_migration_is_shaded_where_it_was() {
        let moment = |seconds, iops| Moment { seconds, iops, worst_latency_ms: 1.0 };
        let moments = [moment(-1.0, 100.0), moment(0.0, 50.0), moment(1.0, 50.0), moment(3.0, 100.0)];
        let scale = CourseScale::of([&moments[..]].into_iter());
        let svg = course("life", "sterna", &moments, 2.0, scale);
        // A quarter of the axis is before the migration, half of it during.
        assert!(svg.contains("<rect class=\"migration\" x=\"222.5\" y=\"10\" width=\"325.0\""), "{svg}");
        assert_eq!(svg.split("points=\"").nth(1).unwrap().split(' ').count(), 4);
        let nothing = course("life", "sterna", &[], 0.0, CourseScale::of(std::iter::empty::<&[Moment]>()));
        assert!(!nothing.contains("NaN"), "{nothing}");
    }

    #[test]
    fn ticks_are_round_and_few() {
        assert_eq!(ticks(-1.0, 1.5), [-1.0, -0.5, 0.0, 0.5, 1.0, 1.5]);
        for to in [0.1, 7.0, 33.0, 500.0, 1e6] {
            assert!(ticks(-3.0, to).len() <= 11, "{to}");
        }
    }
}
