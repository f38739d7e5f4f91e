//! The command line of `sterna config`, and of what a package takes from the program.

use std::path::PathBuf;

use clap::{Args, Subcommand};

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Say all that is wrong with a configuration, and what to do about it. No daemon is asked, and nothing is changed.
    #[command(after_help = CHECK_HELP)]
    Check {
        /// The file; by default the one that `sterna serve` would read.
        #[arg(value_name = "FILE")]
        file: Option<PathBuf>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct GenerateArguments {
    /// The folder, which exists.
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

Keys and values are checked, and whether what they name is there and can be used by who runs this: folders, devices,
certificates, hooks, addresses to listen on. It exits with 0 if nothing is wrong, with 1 if something is.";
