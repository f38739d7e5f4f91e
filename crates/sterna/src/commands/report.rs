//! `sterna migration report`: writes a migration as an HTML page.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use api::{Client, MigrationHistory};

use crate::args::ReportArguments;
use crate::commands::CommandError;
use crate::commands::named::identity;
use crate::exit::Exit;
use crate::output::{self, Format};

/// The file name that means standard output.
const STANDARD_OUTPUT: &str = "-";

pub(super) async fn run(
    client: &Client,
    arguments: &ReportArguments,
    format: Format,
) -> Result<Exit, CommandError> {
    let history = client.migration_history(&identity(client, &arguments.id).await?).await?;
    // The file's name uses the daemon's identity of the migration, not the typed text.
    let usual = || PathBuf::from(format!("{}.html", history.migration.id));
    let path = arguments.output.clone().unwrap_or_else(usual);
    if path == Path::new(STANDARD_OUTPUT) {
        std::io::stdout().lock().write_all(report::page(&history).as_bytes())?;
        return Ok(Exit::Success);
    }
    write(&path, &history)?;
    let written = serde_json::json!({ "migration": history.migration.id, "report": path });
    output::print(format, &written, |_| {
        format!("the report of {} is in {}\n", history.migration.id, path.display())
    })?;
    Ok(Exit::Success)
}

/// Writes the page of a migration to a file, and replaces an existing one.
fn write(path: &Path, history: &MigrationHistory) -> Result<(), CommandError> {
    let written = std::fs::write(path, report::page(history));
    written.map_err(|source| CommandError::Report { path: path.to_owned(), source })
}
