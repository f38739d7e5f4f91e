//! The command line of `sterna journal`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

#[derive(Debug, Subcommand)]
pub(crate) enum JournalCommand {
    /// Say whether the journal is intact, and what it says of each volume. No daemon is asked, and nothing is changed.
    #[command(after_help = CHECK_HELP)]
    Check(JournalArguments),
    /// Print all that the journal says as JSON, for support, to look up later what was true, or to put it back.
    #[command(after_help = EXPORT_HELP)]
    Export(JournalArguments),
    /// Put a journal back from a backup, while no daemon runs. Nothing of it is served before other hosts, or you, have said whose it is.
    #[command(after_help = RESTORE_HELP)]
    Restore(RestoreArguments),
}

#[derive(Debug, Args)]
pub(crate) struct RestoreArguments {
    /// What `sterna journal export` has printed, a copy of a journal file, or a data folder. If the whole data folder came from a
    /// backup: that folder.
    #[arg(value_name = "BACKUP")]
    pub(crate) from: PathBuf,
    /// Also if the data folder has a journal that a daemon would go on with. It is kept under another name.
    #[arg(long)]
    pub(crate) replace: bool,
    /// The list of hosts in the data folder (`sterna host list`) names every host that can have a volume of this one. Without it that is
    /// looked at, and if it cannot be told no volume is served by itself.
    #[arg(long)]
    pub(crate) hosts_complete: bool,
    /// The data folder that gets it; by default that of the daemon that `sterna serve` would be.
    #[arg(long, value_name = "PATH", conflicts_with = "config")]
    pub(crate) data_dir: Option<PathBuf>,
    /// The configuration that names the data folder; by default the one that `sterna serve` would read.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
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

Names of volumes, stores and hosts, paths and identities are in it, and no keys. `sterna journal restore` puts it back. It exits as `journal check` does; of a damaged journal it prints what comes
before the fault.";

const RESTORE_HELP: &str = "\
Examples:
  sterna journal restore journal.json
  sterna journal restore /backup/sterna/journal --replace
  sterna journal restore /var/lib/sterna

A backup says what was true once. Volumes may have left since, or have been moved to other images, and been written to there: whoever
serves an old image has lost that. So the daemon that is started next serves none of the backup's volumes before every host that it
is paired with has said what it knows of it, and its image is there and whole. Then it serves the volume by itself. Another host may
have it, or not answer, or nobody can know (what is on a device): `sterna volume list` says so for each volume, and what to do, which
is one of
  sterna volume promote NAME --restored   you know that this image is the volume
  sterna volume remove NAME               it is not: forget it here, the image stays
Migrations of then have ended, and nothing is deleted on behalf of a backup.

A host that is not asked may have every volume. If the list of hosts was lost, or put back as well, or if hosts were removed from it since
the backup, no volume is served by itself. Then pair this host with all those hosts again (`sterna host invite`, `sterna host join`):
each says what it has. What is left after that you promote by name; or, if all hosts are in the list, stop the daemon and run
`sterna journal restore DATA_FOLDER --hosts-complete`.

The last form of the examples is for a data folder that was put back as a whole: do it before the daemon is started with it.";
