//! Tables and lists of properties as text.

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

/// Returns a table without lines; the columns `right` are aligned to the right.
pub fn table(header: &[&str], right: &[usize]) -> Table {
    let mut table = Table::new();
    // Lines are not wrapped, so that `cut` and `less -S` can process them.
    table
        .load_preset(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled)
        .set_header(header);
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        if right.contains(&index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// Returns a line for each name and value, the values in a column.
pub fn properties(rows: &[(&str, String)]) -> String {
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    rows.iter().map(|(name, value)| format!("{name:width$}  {value}\n")).collect()
}

/// Returns the table as text, without blanks at the ends of lines.
pub fn lines(table: &Table) -> String {
    let text = table.to_string();
    text.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}
