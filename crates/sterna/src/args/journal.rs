//! The command line of `sterna journal`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

#[derive(Debug, Subcommand)]
pub(crate) enum JournalCommand {
    /// Say whether the journal is intact, and what it says of each volume. No daemon is asked, and nothing is changed.
    #[command(after_help = CHECK_HELP)]
    Check(JournalArguments),
    /// Print all that the journal says as JSON, for support, or to look up later what was true.
    #[command(after_help = EXPORT_HELP)]
    Export(JournalArguments),
}

#[derive(Debug, Args)]
pub(crate) struct JournalArguments {
    /// The data folder, or a journal file; by default that of the daemon that `sterna serve` would be.
    #[arg(value_name = "PATH")]
    pub(crate) path: Option<PathBuf>,
    /// The configuration that names the data folder; by default the one that `sterna serve` would read.
    #[arg(long, value_name = "FILE", conflicts_with = "path")]
    pub(crate) config: Option<PathBuf>,
}

const CHECK_HELP: &str = "\
Examples:
  sterna journal check
  sterna journal check /var/lib/sterna --json | jq -e .intact

It may run while the daemon does, and by who may read the data folder. A journal is intact if a daemon would go on with it: its
records are whole and fit together. A commit that was cut off at its end is no damage, for nobody was told that it was durable.
It exits with 0 if the journal is intact, with 1 if it is not: then what it says before the fault is printed all the same.";

const EXPORT_HELP: &str = "\
Example:
  sterna journal export >journal.json

Names of volumes, stores and hosts, paths and identities are in it, and no keys. It is no backup to put back: a journal says who owns
each volume, and one of before says what was true then. It exits as `journal check` does; of a damaged journal it prints what comes
before the fault.";
