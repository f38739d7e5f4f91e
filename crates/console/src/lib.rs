//! How programs print: text for terminals, JSON for programs. Used by `sterna` and `sterna-lab`.
//!
//! What comes from other programs passes [`words::printable`] here, so that it cannot command a terminal.

mod manual;
mod print;
mod table;
pub mod units;

pub use comfy_table::Table;
pub use manual::write_manual;
pub use print::{
    Format, print, print_error, print_line, print_text, print_text_line, report_usage, report_value, say,
    say_in_place, with_causes,
};
pub use table::{lines, properties, table};
