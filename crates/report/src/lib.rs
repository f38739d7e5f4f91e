//! Renders the report of a migration as one HTML page, from the API's answer.
//!
//! ```text
//!   api::MigrationHistory ──► page() ──┬─ story      what happened, in words and figures
//!                                      ├─ course     plots over time, phases shaded
//!                                      ├─ machine    how long a VM that moved as well was paused
//!                                      ├─ hold       the parts of the switch-over
//!                                      └─ account    before, while, after; what was decided; bytes
//! ```
//!
//! The page loads nothing, follows the reader's light or dark colours, and can be printed. Texts of users (names, paths,
//! messages) are escaped. This crate only converts a history to a text; it has no I/O.

mod account;
mod chart;
mod course;
mod figures;
mod hold;
mod machine;
mod markup;
mod scale;
mod story;

use api::MigrationHistory;

pub use crate::markup::escape;
use crate::markup::in_script;

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// Returns the HTML page of a migration.
pub fn page(history: &MigrationHistory) -> String {
    let migration = &history.migration;
    let title = escape(&format!("{}: {}", migration.id, story::headline(migration)));
    let mut body = story::header(migration, history.recording.as_ref());
    match &history.recording {
        Some(recording) => {
            body += &course::section(migration, recording);
            body += &machine::section(migration);
            body += &hold::section(migration);
            body += &account::guest(recording);
            body += &account::decisions(migration, recording);
            body += &account::volume(migration, Some(recording));
        }
        None => {
            body += "<section><h2>Over time</h2><p class=\"quiet\">The course of this migration was not recorded, or its record is \
                     gone: the daemon keeps those of the latest migrations in its data folder.</p></section>";
            body += &machine::section(migration);
            body += &hold::section(migration);
            body += &account::volume(migration, None);
        }
    }
    body += &story::facts(migration);
    let samples = in_script(&course::hover_data(history.recording.as_ref()));
    // The page may load nothing, whatever its texts contain.
    let policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'";
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{policy}\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>{title}</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n{body}{footer}</main>\n\
         <script type=\"application/json\" id=\"samples\">{samples}</script>\n<script>\n{SCRIPT}</script>\n</body>\n</html>\n",
        footer = story::footer(),
    )
}

#[cfg(test)]
mod tests;
