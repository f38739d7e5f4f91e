//! The command line of `sterna replica`.

use clap::Subcommand;

#[derive(Debug, Subcommand)]
pub(crate) enum ReplicaCommand {
    /// List the kept images of former migrations (`--keep-source`), with their places and space.
    #[command(visible_alias = "ls", after_help = LIST_HELP)]
    List,
    /// Delete a kept image. Its space is free again, and a return of the volume then copies everything.
    #[command(after_help = DROP_HELP)]
    Drop {
        /// Name of the volume.
        name: String,
        /// The migration that has left it, for example m7; optional if there is only one image.
        #[arg(long, value_name = "ID")]
        migration: Option<String>,
        /// Delete every kept image of the volume.
        #[arg(long, conflicts_with = "migration")]
        all: bool,
    },
}

const LIST_HELP: &str = "\
Examples:
  sterna replica list
  sterna replica list --json | jq 'map(.allocated_bytes) | add'

A replica has the content of the volume when it left. If the image is unchanged, and the volume returns to its store from
another host, only later writes are sent.";

const DROP_HELP: &str = "\
Examples:
  sterna replica drop web1
  sterna replica drop web1 --migration m7
  sterna replica drop web1 --all

The command is refused during another operation on the volume, or while another program has the image open.";
