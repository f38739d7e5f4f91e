//! Arguments about snapshots.

use clap::Args;

#[derive(Debug, Args)]
pub(crate) struct SnapshotArguments {
    /// Names of the volumes: all are cut off at one instant.
    #[arg(required = true, value_name = "NAME")]
    pub(crate) names: Vec<String>,
    #[command(flatten)]
    pub(crate) how: HowToKeep,
}

#[derive(Debug, Args)]
pub(crate) struct SnapshotVmArguments {
    /// Name of the VM: all of its volumes are cut off at one instant.
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) how: HowToKeep,
}

/// How snapshots are kept.
#[derive(Debug, Args)]
pub(crate) struct HowToKeep {
    /// The label: letters, digits, '.', '_' and '-'; by default the time in UTC, as 20261130T050102.
    #[arg(long)]
    pub(crate) label: Option<String>,
    /// The store for the images; by default that of each volume.
    #[arg(long)]
    pub(crate) store: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct SnapshotsArguments {
    /// Name of the volume; by default those of all volumes.
    pub(crate) name: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct RevertArguments {
    /// Name of the volume, or of the VM.
    pub(crate) name: String,
    /// The label of the snapshot; of a volume's also its name, NAME@LABEL.
    pub(crate) snapshot: String,
    /// Take a snapshot of the present state first, with the label before-revert-TIME. It needs room for a whole copy, and where
    /// the file system cannot share blocks it takes as long as one.
    #[arg(long)]
    pub(crate) keep_current: bool,
}

pub(crate) const SNAPSHOT_HELP: &str = "\
Examples:
  sterna volume snapshot web1
  sterna volume snapshot db-data db-log --label before-upgrade

A snapshot is a read-only volume NAME@LABEL: list it with `volume snapshots`, read it by its socket, end it with `volume remove`.
It is what the disks would be after a power cut at one instant: file systems and databases recover from that. To have it tidy, let
the guest freeze its file systems first (fsfreeze). Within one btrfs or XFS it shares the blocks of its volume, and is there at once.
A volume has up to 64 snapshots. They stay at this host when the volume moves to another one.";

pub(crate) const SNAPSHOTS_HELP: &str = "\
Examples:
  sterna volume snapshots
  sterna volume snapshots web1 --json";

pub(crate) const REVERT_HELP: &str = "\
Example:
  sterna volume revert web1 before-upgrade

No client may be connected: stop the VM first. Only blocks that differ are changed. What the volume has grown by since the snapshot
reads as zeroes. What was written since the snapshot is lost, unless --keep-current is given. After a crash the revert goes on, and no
client is served before it is done.";

pub(crate) const SNAPSHOT_VM_HELP: &str = "\
Example:
  sterna vm snapshot web1 --label before-upgrade

See: sterna volume snapshot --help";

pub(crate) const REVERT_VM_HELP: &str = "\
Example:
  sterna vm stop web1 && sterna vm revert web1 before-upgrade && sterna vm start web1

All volumes of the VM must have a snapshot with this label: all are reverted, or none. See: sterna volume revert --help";
