//! `sterna generate`: writes manual pages and completions for packages.

use std::io;
use std::path::Path;

use clap::{Command, CommandFactory as _};
use clap_complete::Shell;
use clap_mangen::Man;

use crate::args::{Arguments, GenerateArguments};
use crate::commands::CommandError;
use crate::exit::Exit;

const SHELLS: [Shell; 3] = [Shell::Bash, Shell::Zsh, Shell::Fish];

pub(super) fn run(arguments: &GenerateArguments) -> Result<Exit, CommandError> {
    let folder = &arguments.folder;
    let failed = |source| CommandError::Generate { path: folder.clone(), source };
    let mut command = Arguments::command().disable_help_subcommand(true);
    for shell in SHELLS {
        clap_complete::generate_to(shell, &mut command, "sterna", folder).map_err(failed)?;
    }
    command.build();
    write_pages(&command, folder).map_err(failed)?;
    Ok(Exit::Success)
}

/// Writes a page for a command, and for each of its subcommands.
fn write_pages(command: &Command, folder: &Path) -> io::Result<()> {
    let source = format!("sterna {}", env!("CARGO_PKG_VERSION"));
    Man::new(command.clone()).source(source).manual("Sterna").generate_to(folder)?;
    let shown = command.get_subcommands().filter(|command| !command.is_hide_set());
    shown.into_iter().try_for_each(|command| write_pages(command, folder))
}
