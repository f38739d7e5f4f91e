//! `sterna volume divergence`: what only this host has of volumes that it has given up.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use api::{Client, Divergence, DivergenceExtent, DivergenceState};
use console::units::bytes;
use serde::Serialize;

use crate::args::DivergenceCommand;
use crate::commands::CommandError;
use crate::output::replicas::age;
use crate::output::{self, Format, dash, lines, table};

/// What was exported.
#[derive(Debug, Serialize)]
struct Exported {
    file: PathBuf,
    /// The size of the volume, and of the file.
    size_bytes: u64,
    bytes: u64,
    ranges: Vec<Range>,
}

#[derive(Debug, Serialize)]
struct Range {
    offset: u64,
    length: u64,
}

pub(super) async fn run(
    client: &Client,
    command: DivergenceCommand,
    format: Format,
) -> Result<(), CommandError> {
    match command {
        DivergenceCommand::List => output::print(format, &client.divergences().await?, list)?,
        DivergenceCommand::Export { name, file } => {
            let exported = export(client, &name, &file).await?;
            output::print(format, &exported, |exported| {
                let (count, ranges) = (bytes(exported.bytes), exported.ranges.len());
                format!("wrote {count} in {ranges} ranges to {}\n", exported.file.display())
            })?;
        }
        DivergenceCommand::Drop { name } => {
            let dropped = client.drop_divergence(&name).await?;
            output::print(format, &dropped, |dropped| match (&dropped.image, dropped.state) {
                (Some(image), DivergenceState::InImage) => {
                    format!("released {}; if {image} is still there, it is yours to delete\n", dropped.name)
                }
                _ => format!("released {}\n", dropped.name),
            })?;
        }
    }
    Ok(())
}

/// Writes a divergence to a new file.
async fn export(client: &Client, name: &str, path: &Path) -> Result<Exported, CommandError> {
    let failed = |source: io::Error| CommandError::Divergence { path: path.to_owned(), source };
    // N.B. Nothing is made for a name that is wrong.
    let mut piece = client.divergence_piece(name, 0).await?;
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(failed)?;
    file.set_len(piece.size_bytes).map_err(failed)?;
    let mut exported =
        Exported { file: path.to_owned(), size_bytes: piece.size_bytes, bytes: 0, ranges: Vec::new() };
    loop {
        if let Some(extent) = &piece.extent {
            write(&file, extent).map_err(failed)?;
            exported.bytes += extent.length;
            match exported.ranges.last_mut() {
                Some(last) if last.offset + last.length == extent.offset => last.length += extent.length,
                _ => exported.ranges.push(Range { offset: extent.offset, length: extent.length }),
            }
        }
        match piece.next {
            Some(next) => piece = client.divergence_piece(name, next).await?,
            None => break,
        }
    }
    file.sync_all().map_err(failed)?;
    Ok(exported)
}

fn write(file: &File, extent: &DivergenceExtent) -> io::Result<()> {
    let Some(content) = &extent.content else { return Ok(()) };
    let digit =
        |index: usize| content.get(index..index + 2).and_then(|pair| u8::from_str_radix(pair, 16).ok());
    let content: Option<Vec<u8>> = (0..content.len() / 2).map(|byte| digit(2 * byte)).collect();
    let content = content.filter(|content| content.len() as u64 == extent.length);
    let content =
        content.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the daemon sent no content"))?;
    file.write_all_at(&content, extent.offset)
}

fn list(divergences: &Vec<Divergence>) -> String {
    if divergences.is_empty() {
        return "there are none: nothing is kept here of volumes that were given up\n".to_owned();
    }
    let mut table = table(&["DIVERGENCE", "PROMOTED AT", "GIVEN UP", "BYTES", "WHERE"], &[3]);
    for divergence in divergences {
        table.add_row([
            divergence.name.clone(),
            divergence.host.clone(),
            format!("{} ago", age(divergence.given_up_unix_ms)),
            divergence.bytes.map_or_else(dash, bytes),
            divergence.image.clone().unwrap_or_else(|| "kept beside its image".to_owned()),
        ]);
    }
    let reasons = divergences
        .iter()
        .filter_map(|divergence| Some(format!("{}: {}\n", divergence.name, divergence.reason.as_ref()?)));
    lines(&table) + &reasons.collect::<String>()
}
