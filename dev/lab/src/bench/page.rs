//! The report as a page: one printable file that loads nothing and follows the reader's light or dark theme.

use report::escape;

use super::chart::{Axes, draw};
use super::metric::{Metric, Unit};
use super::report::{Curve, Line, Report, Section};
use super::table::{Table, names};

const STYLE: &str = include_str!("page.css");

impl Report {
    pub(super) fn page(&self) -> String {
        let [machine, programs] = self.environment.lines();
        let [title, lead, machine, programs] = [self.title, &self.lead, &machine, &programs].map(escape);
        let sections: String = self.parts.iter().map(|section| self.section(section)).collect();
        // The page loads nothing and executes nothing.
        let policy = "default-src 'none'; style-src 'unsafe-inline'";
        format!(
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta http-equiv=\"Content-Security-Policy\" content=\"{policy}\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <meta name=\"color-scheme\" content=\"light dark\">\n<title>{title}</title>\n\
             <style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n<header>\n<h1>{title}</h1>\n\
             <p>{lead}</p>\n<p class=\"quiet\">{machine}<br>{programs}</p>\n</header>\n\
             {sections}\
             <footer class=\"quiet\">Figures are medians; behind the first are the least and the most. What was compared was \
             measured in turns; ratios are those of the same round. Migrations are shaded.</footer>\n\
             </main>\n</body>\n</html>\n"
        )
    }

    fn section(&self, section: &Section) -> String {
        let heading = escape(&format!("{}: {}", section.name, section.title));
        let tables: String = self.tables(section).iter().map(table).collect();
        let sentences =
            self.sentences(section).into_iter().map(|words| format!("<p>{}</p>\n", escape(&words)));
        let charts = section.columns.iter().map(|metric| self.chart(section, *metric));
        let (sentences, charts): (String, String) = (sentences.collect(), charts.collect());
        format!(
            "<section>\n<h2>{heading}</h2>\n{tables}{sentences}{charts}{}</section>\n",
            self.curves(section)
        )
    }

    /// Returns a chart of a metric that varies along the part's axis: a line of medians for each variant.
    fn chart(&self, section: &Section, metric: Metric) -> String {
        let along: Vec<_> =
            self.found(section, metric).filter_map(|found| Some((found.at?, found))).collect();
        if along.is_empty() || metric.unit == Unit::Happened {
            return String::new();
        }
        let of = |variant: &str| {
            let found = along.iter().filter(|(_, found)| found.variant == variant);
            let points = found.map(|(at, found)| (at.x, found.summary.median)).collect();
            Line { name: variant.to_owned(), points }
        };
        let lines: Vec<Line> = names(along.iter().map(|(_, found)| *found)).into_iter().map(of).collect();
        let labelled = along.iter().filter(|(at, _)| at.label.is_some());
        let labels: Vec<_> = labelled.map(|(at, _)| (at.x, at.words())).collect();
        let axes = Axes::of(section.axis, lines.iter(), false);
        figure(metric.head, &draw(metric.head, &axes, &lines, &[], &labels))
    }

    /// Returns a chart for each variant, all with the same axes, of its curve in a typical round.
    fn curves(&self, section: &Section) -> String {
        let typical = |curve: &Curve| {
            let mut first = section.columns.iter().flat_map(|metric| self.found(section, *metric));
            first
                .find(|found| found.variant == curve.variant)
                .map_or(0, |found| found.summary.typical_round())
        };
        let of_section = self.curves.iter().filter(|curve| curve.part == section.name);
        let curves: Vec<_> = of_section.filter(|curve| curve.round == typical(curve)).collect();
        let Some(first) = curves.first() else { return String::new() };
        let axes = Axes::of(first.x, curves.iter().flat_map(|curve| &curve.lines), first.is_logarithmic);
        let charts = curves.iter().map(|Curve { variant, y, lines, migrations, .. }| {
            let caption = format!("{variant}: {y}");
            figure(&caption, &draw(&caption, &axes, lines, migrations, &[]))
        });
        charts.collect()
    }
}

fn table(Table { header, rows }: &Table) -> String {
    let row = |tag: &str, cells: &[String]| {
        let cells: String = cells.iter().map(|text| format!("<{tag}>{}</{tag}>", escape(text))).collect();
        format!("<tr>{cells}</tr>\n")
    };
    let rows: String = rows.iter().map(|cells| row("td", cells)).collect();
    format!("<div class=\"wide\"><table>\n{}{rows}</table></div>\n", row("th", header))
}

fn figure(caption: &str, svg: &str) -> String {
    format!("<figure><figcaption>{}</figcaption>\n{svg}</figure>\n", escape(caption))
}

#[cfg(test)]
mod tests {
    use crate::bench::table::tests::report;

    #[test]
    fn nothing_that_is_shown_becomes_markup() {
        let page = report().page();
        for text in [
            "&lt;b&gt;",
            "fio &quot;3&quot;",
            "under &lt;a guest&gt;",
            "cp &amp; mv",
            "1 &lt; 2",
            "it&#39;s",
            "&lt;i&gt;",
        ] {
            assert!(page.contains(text), "{text}: {page}");
        }
        assert!(!page.contains("<a guest") && !page.contains("<i>"));
        assert!(!page.contains("http://") && !page.contains("https://"), "it asks somebody for something");
    }

    #[test]
    fn a_part_has_lines_along_its_axis_and_curves() {
        let page = report().page();
        // A line of the latency by phase, and the curve of the one variant that has one.
        assert_eq!(page.matches("<svg ").count(), 2, "{page}");
        assert_eq!(page.matches("class=\"migration\"").count(), 1, "{page}");
    }
}
