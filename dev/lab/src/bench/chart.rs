//! Charts of benchmarks, as SVG: lines over an axis.

use std::fmt::Write as _;

use report::escape;

use super::report::Line;
use super::table::number;

/// The page scales charts from this width.
const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 246.0;
/// Left, right, top and bottom of the part with lines.
const FRAME: (f64, f64, f64, f64) = (64.0, 700.0, 10.0, 208.0);
const LEGEND_ROW: f64 = 18.0;
/// Colours that stand out on light and on dark.
const COLOURS: [&str; 6] = ["#1f77b4", "#d9711c", "#2f9e44", "#c2255c", "#8a63d2", "#8a939c"];
/// A line of more points has no dots.
const DOTS_MAX: usize = 12;

/// The axes of one chart, or of several that can be compared.
#[derive(Clone, Debug)]
pub(super) struct Axes {
    x: Axis,
    y: Axis,
    /// What x is.
    words: &'static str,
}

#[derive(Clone, Debug)]
struct Axis {
    from: f64,
    to: f64,
    is_logarithmic: bool,
}

impl Axis {
    fn of(values: impl Iterator<Item = f64>, is_logarithmic: bool) -> Self {
        let (least, most) = values.fold((0.0, 0.0), |(a, b): (f64, f64), value| (a.min(value), b.max(value)));
        match is_logarithmic {
            true => Self { from: 1.0, to: most.max(10.0), is_logarithmic },
            false => Self { from: least, to: if most > least { most } else { least + 1.0 }, is_logarithmic },
        }
    }

    fn part(&self, value: f64) -> f64 {
        match self.is_logarithmic {
            true => value.max(1.0).log10() / self.to.log10(),
            false => (value - self.from) / (self.to - self.from),
        }
    }

    fn ticks(&self) -> Vec<f64> {
        match self.is_logarithmic {
            true => (0..=self.to.log10() as i32).map(|power| 10_f64.powi(power)).collect(),
            false => (0..=4).map(|step| self.from + (self.to - self.from) * f64::from(step) / 4.0).collect(),
        }
    }
}

impl Axes {
    pub(super) fn of<'a>(
        words: &'static str,
        lines: impl Iterator<Item = &'a Line> + Clone,
        is_logarithmic: bool,
    ) -> Self {
        let points = lines.flat_map(|line| &line.points);
        let x = Axis::of(points.clone().map(|(x, _)| *x), is_logarithmic);
        Self { x, y: Axis::of(points.map(|(_, y)| *y), is_logarithmic), words }
    }

    fn at(&self, (x, y): (f64, f64)) -> (f64, f64) {
        let (left, right, top, bottom) = FRAME;
        (left + self.x.part(x) * (right - left), bottom - self.y.part(y) * (bottom - top))
    }

    /// Draws the grid, and numbers or `labels` below it.
    fn draw(&self, svg: &mut String, labels: &[(f64, String)]) {
        let (left, right, _, bottom) = FRAME;
        for tick in self.y.ticks() {
            let (_, place) = self.at((self.x.from, tick));
            let _ = write!(
                svg,
                "<line class=\"grid\" x1=\"{left}\" x2=\"{right}\" y1=\"{place:.1}\" y2=\"{place:.1}\"/>\
                 <text class=\"name tick\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                left - 6.0,
                place + 4.0,
                number(tick)
            );
        }
        let numbers: Vec<_> = self.x.ticks().into_iter().map(|tick| (tick, number(tick))).collect();
        for (tick, words) in if labels.is_empty() { &numbers } else { labels } {
            let ((place, _), below) = (self.at((*tick, self.y.from)), bottom + 16.0);
            let words = escape(words);
            let _ =
                write!(svg, "<text class=\"middle tick\" x=\"{place:.1}\" y=\"{below:.1}\">{words}</text>");
        }
        let (middle, below, words) = (f64::midpoint(left, right), bottom + 32.0, escape(self.words));
        let _ = write!(svg, "<text class=\"middle tick\" x=\"{middle:.1}\" y=\"{below:.1}\">{words}</text>");
    }
}

/// Draws lines, with dots if they have few points, and a legend. The spans of x in `shaded` are those of migrations.
pub(super) fn draw(
    title: &str,
    axes: &Axes,
    lines: &[Line],
    shaded: &[(f64, f64)],
    labels: &[(f64, String)],
) -> String {
    let (left, _, top, bottom) = FRAME;
    let mut svg = begin(title, HEIGHT + LEGEND_ROW * lines.len() as f64);
    for (from, to) in shaded {
        let ((x, _), (end, _)) = (axes.at((*from, 0.0)), axes.at((to.min(axes.x.to), 0.0)));
        let (width, height) = ((end - x).max(1.0), bottom - top);
        let _ = write!(
            svg,
            "<rect class=\"migration\" x=\"{x:.1}\" y=\"{top}\" width=\"{width:.1}\" height=\"{height:.1}\">\
             <title>a migration: {:.2} s</title></rect>",
            to - from
        );
    }
    axes.draw(&mut svg, labels);
    for (index, Line { name, points }) in lines.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let places: Vec<String> =
            points.iter().map(|point| axes.at(*point)).map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ = write!(svg, "<polyline stroke=\"{colour}\" points=\"{}\"/>", places.join(" "));
        for (point, (x, y)) in
            points.iter().map(|point| (point, axes.at(*point))).take_while(|_| points.len() <= DOTS_MAX)
        {
            let shown = number(point.1);
            let _ = write!(
                svg,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"><title>{shown}</title></circle>"
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
            escape(name)
        );
    }
    svg + "</svg>\n"
}

fn begin(title: &str, height: f64) -> String {
    let title = escape(title);
    format!("<svg role=\"img\" aria-label=\"{title}\" viewBox=\"0 0 {WIDTH} {height}\">")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the places of all dots on the x-axis.
    fn places(svg: &str) -> Vec<f64> {
        let places = svg.split("cx=\"").skip(1).map(|rest| rest.split('"').next().unwrap());
        places.map(|place| place.parse().unwrap()).collect()
    }

    #[test]
    fn lines_stay_within_the_frame_whatever_the_axes() {
        let line = Line { name: "one & two".to_owned(), points: vec![(2.0, 1.0), (16.0, 3.0), (32.0, 2.0)] };
        for is_logarithmic in [false, true] {
            let axes = Axes::of("x", [&line].into_iter(), is_logarithmic);
            let svg = draw("a < b", &axes, std::slice::from_ref(&line), &[], &[]);
            assert!(svg.contains("a &lt; b") && svg.contains("one &amp; two"));
            let places = places(&svg);
            assert_eq!(places.len(), 3, "{svg}");
            assert!(places.iter().all(|place| (FRAME.0..=FRAME.1).contains(place)), "{places:?}");
        }
        let nothing = Axes::of("x", std::iter::empty(), false);
        let nothing = draw("nothing", &nothing, &[], &[], &[]);
        assert!(!nothing.contains("NaN") && !nothing.contains("inf"), "{nothing}");
    }

    #[test]
    fn the_migration_is_shaded_where_it_was() {
        let points = vec![(-1.0, 100.0), (0.0, 50.0), (1.0, 50.0), (3.0, 100.0)];
        let line = Line { name: "sterna".to_owned(), points };
        let axes = Axes::of("seconds", [&line].into_iter(), false);
        let svg = draw("life", &axes, &[line], &[(0.0, 2.0)], &[]);
        // A quarter of the axis is before the migration, half of it during.
        assert!(svg.contains("<rect class=\"migration\" x=\"223.0\" y=\"10\" width=\"318.0\""), "{svg}");
    }
}
