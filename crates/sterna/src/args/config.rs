//! The command lines of `sterna config` and `sterna generate`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Print every mistake of a configuration, with what to do about it. This needs no daemon and changes nothing.
    #[command(after_help = CHECK_HELP)]
    Check {
        /// The file to check; by default the one that `sterna serve` would read.
        #[arg(value_name = "FILE")]
        file: Option<PathBuf>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct GenerateArguments {
    /// An existing folder for the files.
    #[arg(value_name = "DIR")]
    pub(crate) folder: PathBuf,
}

pub(super) const GENERATE_HELP: &str = "\
Example:
  sterna generate target/generated";

const CHECK_HELP: &str = "\
Examples:
  sterna config check
  sterna config check /etc/sterna/sterna.toml.new --json | jq -r '.problems[].advice'

The command checks keys and values, and whether this user can use the named folders, devices, certificates, hooks and
addresses. It exits with 0 if there are no mistakes, and with 1 if there are.";
