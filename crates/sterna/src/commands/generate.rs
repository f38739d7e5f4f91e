//! `sterna generate`: writes manual pages and completions for packages.

use clap::CommandFactory as _;
use console::write_manual;

use crate::args::{Arguments, GenerateArguments};
use crate::commands::CommandError;
use crate::complete;
use crate::exit::Exit;

/// The shells, each with the name of its script.
const SHELLS: [(&str, &str); 3] = [("bash", "sterna.bash"), ("zsh", "_sterna"), ("fish", "sterna.fish")];

pub(super) fn run(arguments: &GenerateArguments) -> Result<Exit, CommandError> {
    let folder = &arguments.folder;
    let failed = |source| CommandError::Generate { path: folder.clone(), source };
    let mut command = Arguments::command().disable_help_subcommand(true);
    for (shell, name) in SHELLS {
        let written = complete::script(shell).and_then(|script| std::fs::write(folder.join(name), script));
        written.map_err(failed)?;
    }
    command.build();
    write_manual(&command, env!("CARGO_PKG_VERSION"), folder).map_err(failed)?;
    Ok(Exit::Success)
}
