//! The command line of `sterna journal`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

#[derive(Debug, Subcommand)]
pub(crate) enum JournalCommand {
    /// Check whether the journal is intact, and print the state of each volume. This needs no daemon and changes nothing.
    #[command(after_help = CHECK_HELP)]
    Check(JournalArguments),
    /// Print the whole journal as JSON, for support, for reference, or as a backup.
    #[command(after_help = EXPORT_HELP)]
    Export(JournalArguments),
    /// Restore a journal from a backup, while no daemon runs. Its volumes are served only once other hosts,
    /// or you, have confirmed them.
    #[command(after_help = RESTORE_HELP)]
    Restore(RestoreArguments),
}

#[derive(Debug, Args)]
pub(crate) struct RestoreArguments {
    /// Output of `sterna journal export`, a copy of a journal file, or a data folder. If the whole data folder came
    /// from a backup: that folder.
    #[arg(value_name = "BACKUP")]
    pub(crate) from: PathBuf,
    /// Restore even if the data folder has an intact journal, which is kept under another name.
    #[arg(long)]
    pub(crate) replace: bool,
    /// The list of hosts in the data folder (`sterna host list`) has every host that can have a volume of this one. Without this
    /// option the daemon checks that, and serves no volume by itself if it cannot be sure.
    #[arg(long)]
    pub(crate) hosts_complete: bool,
    /// The data folder to restore into; by default that of `sterna serve`.
    #[arg(long, value_name = "PATH", conflicts_with = "config")]
    pub(crate) data_dir: Option<PathBuf>,
    /// The configuration that names the data folder; by default the one that `sterna serve` would read.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct JournalArguments {
    /// The data folder, or a journal file; by default that of `sterna serve`.
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

It may run beside the daemon, by any user who may read the data folder. A journal is intact if a daemon would accept it: its
records are complete and fit together. A commit that is cut off at the end is no damage, because it was never acknowledged.
The command exits with 0 if the journal is intact, and with 1 if it is not. Then it prints the state before the damage.";

const EXPORT_HELP: &str = "\
Example:
  sterna journal export >journal.json

The output has names of volumes, stores and hosts, paths and identities, but no keys. `sterna journal restore` restores it. The
command exits as `journal check` does; for a damaged journal it prints the part before the damage.";

const RESTORE_HELP: &str = "\
Examples:
  sterna journal restore journal.json
  sterna journal restore /backup/sterna/journal --replace
  sterna journal restore /var/lib/sterna

A backup describes a past state. Its volumes may have left since, or have other images with later writes, which an old image lacks.
So the next daemon serves none of the backup's volumes before every paired host has answered what it knows of the volume, and
its image is present and complete. Then it serves the volume by itself. If another host has the volume, or does not answer, or
its owner cannot be known (on a device), `sterna volume list` gives the reason for each volume, and one of these commands:
  sterna volume promote NAME --restored   if you know that this image is the volume
  sterna volume remove NAME               if it is not: the volume is forgotten here, the image stays
Migrations of the backup have ended. Sterna deletes nothing because of a backup.

A host that is not asked may have any volume. If the list of hosts was lost or restored as well, or hosts were removed from it
since the backup, no volume is served by itself. Then pair this host with all those hosts again (`sterna host invite`, `sterna
host join`), so that the daemon can ask them. Promote the remaining volumes by name. Or, if all hosts are in the list, stop the
daemon and run `sterna journal restore DATA_FOLDER --hosts-complete`.

The last example is for a data folder that was restored as a whole: run it before you start the daemon.";
