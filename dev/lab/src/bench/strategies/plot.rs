//! Plots of figures, as SVG: lines over numbers, with dots if there are few points.

use std::fmt::Write as _;

use report::escape;

use super::figure::{Figure, Form, number, place as tick_words};

/// The page scales plots from this width.
const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 260.0;
/// Left, right, top and bottom of the part with lines.
const FRAME: (f64, f64, f64, f64) = (64.0, 700.0, 10.0, 222.0);
const LEGEND_ROW: f64 = 18.0;
/// Colours that stand out on light and on dark.
const COLOURS: [&str; 6] = ["#1f77b4", "#d9711c", "#2f9e44", "#c2255c", "#8a63d2", "#8a939c"];
/// A line of more points has no dots.
const DOTS_MAX: usize = 12;

struct Axis {
    from: f64,
    to: f64,
    is_logarithmic: bool,
}

impl Axis {
    fn of(values: impl Iterator<Item = f64>, is_logarithmic: bool) -> Self {
        let (least, most) = values.fold((f64::MAX, f64::MIN), |(a, b), value| (a.min(value), b.max(value)));
        if is_logarithmic {
            return Self { from: 1.0, to: most.max(10.0), is_logarithmic };
        }
        let (from, to) = (least.min(0.0), most.max(0.0));
        Self { from, to: if to > from { to } else { from + 1.0 }, is_logarithmic }
    }

    fn part(&self, value: f64) -> f64 {
        if self.is_logarithmic {
            return value.max(1.0).log10() / self.to.log10();
        }
        (value - self.from) / (self.to - self.from)
    }

    fn ticks(&self) -> Vec<f64> {
        if self.is_logarithmic {
            return (0..=self.to.log10() as i32).map(|power| 10_f64.powi(power)).collect();
        }
        (0..=4).map(|step| self.from + (self.to - self.from) * f64::from(step) / 4.0).collect()
    }
}

pub(super) fn draw(figure: &Figure) -> String {
    let points = || figure.series.iter().flat_map(|series| &series.points);
    let measured = || points().filter_map(|point| Some((point.x, point.y.as_ref()?)));
    let paper = || figure.paper.iter().map(|(_, x, y)| (*x, *y));
    let is_logarithmic = figure.form == Form::Logarithmic;
    let x = Axis::of(points().map(|point| point.x).chain(paper().map(|(x, _)| x)), is_logarithmic);
    let y = Axis::of(measured().map(|(_, y)| y.max).chain(paper().map(|(_, y)| y)), is_logarithmic);
    let (left, right, top, bottom) = FRAME;
    let at = |value: (f64, f64)| {
        (left + x.part(value.0) * (right - left), bottom - y.part(value.1) * (bottom - top))
    };
    let title = escape(&figure.title);
    let height = HEIGHT + LEGEND_ROW * figure.series.len() as f64;
    let mut svg = format!("<svg role=\"img\" aria-label=\"{title}\" viewBox=\"0 0 {WIDTH} {height}\">");
    for tick in y.ticks() {
        let (_, place) = at((x.from, tick));
        let _ = write!(
            svg,
            "<line class=\"grid\" x1=\"{left}\" x2=\"{right}\" y1=\"{place:.1}\" y2=\"{place:.1}\"/>\
             <text class=\"name tick\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            left - 6.0,
            place + 4.0,
            tick_words(tick)
        );
    }
    let labels: Vec<(f64, &str)> = points().filter_map(|point| Some((point.x, point.label?))).collect();
    let ticks: Vec<(f64, String)> = match labels.as_slice() {
        [] => x.ticks().into_iter().map(|tick| (tick, tick_words(tick))).collect(),
        labels => labels.iter().map(|(x, label)| (*x, (*label).to_owned())).collect(),
    };
    for (tick, words) in ticks {
        let (place, _) = at((tick, y.from));
        let (below, words) = (bottom + 16.0, escape(&words));
        let _ = write!(svg, "<text class=\"middle tick\" x=\"{place:.1}\" y=\"{below:.1}\">{words}</text>");
    }
    let _ = write!(
        svg,
        "<text class=\"middle tick\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
        f64::midpoint(left, right),
        bottom + 32.0,
        escape(figure.x)
    );
    for (index, series) in figure.series.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let places: Vec<_> =
            series.points.iter().filter_map(|point| Some(at((point.x, point.y.as_ref()?.median)))).collect();
        let line: Vec<String> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ = write!(svg, "<polyline stroke=\"{colour}\" points=\"{}\"/>", line.join(" "));
        if places.len() <= DOTS_MAX {
            for point in &series.points {
                for sample in point.y.iter().flat_map(|summary| &summary.samples) {
                    let (x, y) = at((point.x, *sample));
                    let shown = number(*sample);
                    let _ = write!(
                        svg,
                        "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"><title>{shown}</title></circle>"
                    );
                }
            }
        }
        for (_, at_x, value) in figure.paper.iter().filter(|(name, _, _)| series.name == *name) {
            let (x, y) = at((*at_x, *value));
            let _ = write!(
                svg,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"6\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\">\
                 <title>the paper: {}</title></circle>",
                number(*value)
            );
        }
        let row = HEIGHT + LEGEND_ROW * index as f64 + 6.0;
        let _ = write!(
            svg,
            "<line stroke=\"{colour}\" stroke-width=\"3\" x1=\"{left}\" x2=\"{:.1}\" y1=\"{row:.1}\" y2=\"{row:.1}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            left + 20.0,
            left + 28.0,
            row + 4.0,
            escape(&series.name)
        );
    }
    svg + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::super::figure::{Point, Series};
    use super::*;

    #[test]
    fn every_sample_is_within_the_frame_and_the_paper_is_a_ring() {
        let points =
            vec![Point::of(2.0, vec![1.0, 3.0]), Point::of(32.0, Vec::new()), Point::of(16.0, vec![2.0])];
        let mut figure = Figure {
            name: "figure-0",
            title: "a < b".to_owned(),
            x: "x",
            y: "y",
            series: vec![Series { name: "one & two".to_owned(), points }],
            paper: vec![("one & two", 32.0, 4.0)],
            note: "",
            form: Form::Table,
        };
        for form in [Form::Table, Form::Logarithmic] {
            figure.form = form;
            let svg = draw(&figure);
            assert_eq!(svg.matches("<circle").count(), 4, "{svg}");
            assert_eq!(svg.matches("fill=\"none\"").count(), 1);
            assert!(svg.contains("a &lt; b") && svg.contains("one &amp; two"));
            let places = svg.split("cx=\"").skip(1).map(|rest| rest.split('"').next().unwrap());
            let places: Vec<f64> = places.map(|place| place.parse().unwrap()).collect();
            assert!(places.iter().all(|place| (FRAME.0..=FRAME.1).contains(place)), "{places:?}");
        }
        figure.series[0].points.clear();
        figure.paper.clear();
        let nothing = draw(&figure);
        assert!(!nothing.contains("NaN") && !nothing.contains("inf"), "{nothing}");
    }
}
