//! The command line of `sterna replica`.

use clap::Subcommand;

#[derive(Debug, Subcommand)]
pub(crate) enum ReplicaCommand {
    /// List the images that migrations left and that were kept (`--keep-source`): where they are, what they take.
    #[command(visible_alias = "ls", after_help = LIST_HELP)]
    List,
    /// Delete an image that was kept: its space is free again, and the volume's way home is a whole copy.
    #[command(after_help = DROP_HELP)]
    Drop {
        /// Name of the volume.
        name: String,
        /// The migration that left it, for example m7; it may be left out if there is only one.
        #[arg(long, value_name = "ID")]
        migration: Option<String>,
        /// Delete every image that was kept of the volume.
        #[arg(long, conflicts_with = "migration")]
        all: bool,
    },
}

const LIST_HELP: &str = "\
Examples:
  sterna replica list
  sterna replica list --json | jq 'map(.allocated_bytes) | add'

A replica holds what the volume was when it left. If nobody has touched it, and the volume comes back to its store from
another host, only what was written since is sent.";

const DROP_HELP: &str = "\
Examples:
  sterna replica drop web1
  sterna replica drop web1 --migration m7
  sterna replica drop web1 --all

It is refused while something is being done with the volume, or while another program has the image open.";
