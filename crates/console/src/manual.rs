//! Manual pages, made of the command line itself.

use std::io;
use std::path::Path;

use clap::Command;
use clap_mangen::Man;

/// Writes a page for a command that was built, and for each of its subcommands, into `folder`.
///
/// # Errors
/// If a file cannot be written.
pub fn write_manual(command: &Command, version: &str, folder: &Path) -> io::Result<()> {
    let source = format!("sterna {version}");
    Man::new(command.clone()).source(source).manual("Sterna").generate_to(folder)?;
    let shown = command.get_subcommands().filter(|command| !command.is_hide_set());
    shown.into_iter().try_for_each(|command| write_manual(command, version, folder))
}
