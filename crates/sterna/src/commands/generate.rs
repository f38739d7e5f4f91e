//! `sterna generate`: writes manual pages and completions for packages.

use clap::CommandFactory as _;
use clap_complete::Shell;
use console::write_manual;

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
    write_manual(&command, env!("CARGO_PKG_VERSION"), folder).map_err(failed)?;
    Ok(Exit::Success)
}
