//! Pages of benchmarks: each is one printable file that loads nothing and follows the reader's light or dark theme.

use report::escape;

use super::chart::{Bar, CourseScale, bars, course};
use super::environment::Environment;
use super::guest::Moment;
use super::show::Table;
use super::statistics::Summary;

const STYLE: &str = include_str!("page.css");

pub(super) fn page(title: &str, lead: &str, environment: &Environment, sections: &str) -> String {
    let [machine, programs] = environment.lines();
    let [title, lead, machine, programs] = [title, lead, &machine, &programs].map(escape);
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
         <footer class=\"quiet\">Bars are medians, lines go from the least to the most, each dot is a round. What was \
         compared was measured in turns; ratios are those of the same round.</footer>\n\
         </main>\n</body>\n</html>\n"
    )
}

pub(super) fn section(heading: &str, table: &Table, charts: &str) -> String {
    let heading = escape(heading);
    let cell = |tag: &str, text: &str| format!("<{tag}>{}</{tag}>", escape(text));
    let row = |tag: &str, cells: &mut dyn Iterator<Item = &str>| {
        format!("<tr>{}</tr>\n", cells.map(|text| cell(tag, text)).collect::<String>())
    };
    let header = row("th", &mut table.header.iter().map(String::as_str));
    let rows: String =
        table.rows.iter().map(|cells| row("td", &mut cells.iter().map(String::as_str))).collect();
    let conclusion = escape(&table.conclusion);
    format!(
        "<section>\n<h2>{heading}</h2>\n<div class=\"wide\"><table>\n{header}{rows}</table></div>\n\
         <p>{conclusion}</p>\n{charts}</section>\n"
    )
}

/// Returns a titled chart: a bar for each contender that has a summary.
pub(super) fn bar_chart<'a>(
    caption: &str,
    measured: impl Iterator<Item = (&'a str, Option<&'a Summary>)>,
    show: impl Fn(f64) -> String,
) -> String {
    let measured = measured.filter_map(|(name, summary)| Some(Bar { name, summary: summary? }));
    figure(caption, &bars(caption, &measured.collect::<Vec<_>>(), show))
}

/// One round of a contender: its name, the guest's moments, and when the migration ended, in seconds.
pub(super) type Round<'a> = (&'a str, &'a [Moment], f64);

/// Returns a chart for each round, all with one scale: the guest's requests over time. `what` selects them.
pub(super) fn course_charts(rounds: &[Round<'_>], what: &str) -> String {
    let scale = CourseScale::of(rounds.iter().map(|(_, moments, _)| *moments));
    let drawn = rounds.iter().map(|(name, moments, ended)| {
        let caption = format!("{name}: {what}; shaded: the migration");
        figure(&caption, &course(&caption, name, moments, *ended, scale))
    });
    drawn.collect()
}

fn figure(caption: &str, svg: &str) -> String {
    format!("<figure><figcaption>{}</figcaption>\n{svg}</figure>\n", escape(caption))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_is_shown_becomes_markup() {
        let environment = Environment {
            processor: "<b>".to_owned(),
            cpus: 2,
            kernel: "6".to_owned(),
            file_system: "ext4".to_owned(),
            dropped_caches: "all",
            versions: [("fio".to_owned(), "\"3\"".to_owned())].into(),
        };
        let table = Table {
            header: ["", "A & B"].map(str::to_owned).to_vec(),
            rows: vec![vec!["<script>".to_owned(), "1".to_owned()]],
            conclusion: "1 < 2".to_owned(),
        };
        let page =
            page("it's", "<i>", &environment, &section("a > b", &table, &figure("c < d", "<svg></svg>")));
        for text in [
            "&lt;b&gt;",
            "fio &quot;3&quot;",
            "A &amp; B",
            "&lt;script&gt;",
            "1 &lt; 2",
            "it&#39;s",
            "c &lt; d",
        ] {
            assert!(page.contains(text), "{text}: {page}");
        }
        assert!(!page.contains("<script") && !page.contains("<i>") && page.contains("<svg></svg>"));
        assert!(!page.contains("http://") && !page.contains("https://"), "it asks somebody for something");
    }
}
