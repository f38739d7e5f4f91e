//! The command line of `sterna vm`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use super::snapshot::{self, RevertArguments, SnapshotVmArguments};

#[derive(Debug, Subcommand)]
pub(crate) enum VmCommand {
    /// Add a VM by its definition. It is refused by name if it could not move to another host.
    #[command(after_help = ADD_HELP)]
    Add(AddVmArguments),
    /// Start a VM, and return when its QEMU answers; or all VMs that start at a boot, in their order. A suspended VM goes on where it was.
    #[command(after_help = START_HELP)]
    Start(StartVmArguments),
    /// Stop a VM: press its power button, and wait until its guest has shut down.
    #[command(after_help = STOP_HELP)]
    Stop(StopVmArguments),
    /// Suspend a VM to disk: write its memory to a file, and end its QEMU. `sterna vm start` restores it.
    #[command(after_help = SUSPEND_HELP)]
    Suspend(SuspendVmArguments),
    /// Adopt the disks of a running QEMU, or of a domain of libvirt, so that they can be moved.
    #[command(after_help = ADOPT_HELP)]
    Adopt(AdoptArguments),
    /// Give a VM its disks back as plain files, so that it runs without Sterna.
    #[command(after_help = "Example:\n  sterna vm release web1")]
    Release(VmArguments),
    /// Resume a VM that was paused by an error of a disk, by a failed move or adoption, or by hand.
    #[command(after_help = "Example:\n  sterna vm resume web1")]
    Resume(VmArguments),
    /// Take a snapshot of all volumes of a VM at one instant, also while it runs.
    #[command(after_help = snapshot::SNAPSHOT_VM_HELP)]
    Snapshot(SnapshotVmArguments),
    /// Make all volumes of a stopped VM what they were at a snapshot.
    #[command(after_help = snapshot::REVERT_VM_HELP)]
    Revert(RevertArguments),
    /// Change a VM: whether and when it starts after a boot of the host, and its priority in an evacuation.
    #[command(after_help = SET_HELP)]
    Set(SetVmArguments),
    /// List the VMs of the host.
    #[command(visible_alias = "ls", after_help = "Example:\n  sterna vm list")]
    List,
    /// Show one VM: its state, its disks, its process.
    #[command(after_help = "Example:\n  sterna vm show web1 --json")]
    Show(VmArguments),
    /// Remove a VM that does not run. Its volumes stay.
    #[command(visible_alias = "rm", after_help = "Example:\n  sterna vm remove web1")]
    Remove(VmArguments),
}

#[derive(Debug, Args)]
pub(crate) struct VmArguments {
    /// Name of the VM.
    pub(crate) name: String,
}

#[derive(Debug, Args)]
pub(crate) struct SuspendVmArguments {
    /// Name of the VM.
    pub(crate) name: String,
    /// Time for writing its memory, while it is paused; by default 600. After that the command fails, and the VM runs on.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) timeout: Option<u64>,
}

#[derive(Debug, Args)]
pub(crate) struct SetVmArguments {
    /// Name of the VM.
    pub(crate) name: String,
    /// A higher one leaves first (sterna evacuate); from 0 to 100. A VM that was given none has 50.
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u8).range(0..=i64::from(api::SetVm::PRIORITY_MAX)))]
    pub(crate) priority: Option<u8>,
    /// Whether the VM is started when its host has booted; without a value: yes.
    #[arg(long, value_name = "YES|NO", num_args = 0..=1, require_equals = true, default_missing_value = "yes")]
    pub(crate) start_at_boot: Option<YesNo>,
    /// VMs with a lower one start first, and stop last; from 0 to 65535. A VM that was given none has 100.
    #[arg(long, value_name = "NUMBER")]
    pub(crate) order: Option<u16>,
    /// What VMs of a higher order wait for after this one has started: `tcp:HOST:PORT` until something accepts connections there,
    /// `console:TEXT` until a log in the VM's own folder has this text ("-serial", "file:{path:console}"), or `nothing`.
    #[arg(long, value_name = "WHAT")]
    pub(crate) wait_for: Option<String>,
    /// The longest that they wait, in seconds; by default 120. They are started without it then.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(..=i64::from(api::SetVm::WAIT_MAX_S_MAX)))]
    pub(crate) wait_max: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum YesNo {
    Yes,
    No,
}

#[derive(Debug, Args)]
pub(crate) struct StartVmArguments {
    /// Name of the VM.
    #[arg(required_unless_present = "all")]
    pub(crate) name: Option<String>,
    /// Start all VMs that start at a boot (vm set --start-at-boot) and do not run, in their order.
    #[arg(long, conflicts_with_all = ["name", "discard_memory"])]
    pub(crate) all: bool,
    /// Boot a suspended VM without its memory, as after a power cut, and delete its memory's file.
    #[arg(long)]
    pub(crate) discard_memory: bool,
}

#[derive(Debug, Args)]
pub(crate) struct AddVmArguments {
    /// Name of the VM: letters, digits, '.', '_' and '-'.
    pub(crate) name: String,
    /// A TOML file: the command that starts the VM, its disks and its files.
    #[arg(long, value_name = "FILE")]
    pub(crate) definition: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct StopVmArguments {
    /// Name of the VM.
    #[arg(required_unless_present = "all")]
    pub(crate) name: Option<String>,
    /// Stop all VMs of Sterna that run: those with the highest order first, those of one order together. Adopted VMs run on.
    #[arg(long, conflicts_with = "name")]
    pub(crate) all: bool,
    /// Cut its power at once.
    #[arg(long, conflicts_with = "wait")]
    pub(crate) now: bool,
    /// Time for its guest to shut down; by default 60. After that the command fails, and the VM runs on.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(..=3600))]
    pub(crate) wait: Option<u64>,
}

#[derive(Debug, Args)]
pub(crate) struct AdoptArguments {
    /// Name for the VM; its volumes get the names NAME, or NAME-0, NAME-1 and so on. A domain of libvirt
    /// keeps its name by default.
    #[arg(required_unless_present = "libvirt")]
    pub(crate) name: Option<String>,
    /// The socket of its monitor.
    #[arg(long, value_name = "SOCKET", required_unless_present = "libvirt", conflicts_with = "libvirt")]
    pub(crate) qmp: Option<PathBuf>,
    /// Name or UUID of a domain of libvirt (qemu:///system), which copies its disks to new volumes while the guest works.
    #[arg(long, value_name = "DOMAIN")]
    pub(crate) libvirt: Option<String>,
    /// The store for the volumes of a domain of libvirt; by default the only one.
    #[arg(long, value_name = "STORE", requires = "libvirt")]
    pub(crate) store: Option<String>,
    /// The socket of libvirt; by default that of virtqemud or libvirtd.
    #[arg(long, value_name = "SOCKET", requires = "libvirt")]
    pub(crate) libvirt_socket: Option<PathBuf>,
    /// A disk, by the name of its device or node, or by libvirt's name (vda); by default all writable disks.
    #[arg(long, value_name = "ID")]
    pub(crate) disk: Vec<String>,
}

const ADOPT_HELP: &str = "\
Examples:
  sterna vm adopt web1 --qmp /run/web1.qmp
  sterna vm adopt --libvirt web1 --store fast

The disks must be raw or qcow2 images, attached by -blockdev or -drive. The VM is paused for a moment, but not restarted. Then
its disks can be moved, and it can move to another host as a whole: sterna migrate web1 --to HOST. No other client may be
connected to the monitor meanwhile. QEMU may run as any user: that user gets the sockets of the VM's volumes.

libvirt itself copies the disks of its domain to new volumes; nothing is paused. A copy that takes longer than a minute
continues in the background: sterna vm show web1. `sterna vm release` copies the disks back to files.";

const START_HELP: &str = "\
Examples:
  sterna vm start web1
  sterna vm start web1 --discard-memory
  sterna vm start --all";

const STOP_HELP: &str = "\
Examples:
  sterna vm stop web1
  sterna vm stop web1 --now
  sterna vm stop --all --wait 90";

const SET_HELP: &str = "\
Examples:
  sterna vm set db1 --start-at-boot --order 10 --wait-for tcp:10.0.0.5:5432
  sterna vm set web1 --start-at-boot --order 20
  sterna vm set web1 --start-at-boot=no
  sterna vm set web1 --priority 80

All of this moves with the VM to other hosts. VMs of one order start together, and the next order follows when each of them has
started and is ready, or its --wait-max is over. A VM that cannot be started is tried again until it starts.";

const SUSPEND_HELP: &str = "\
Examples:
  sterna vm suspend web1
  sterna vm suspend web1 --timeout 120

The VM is paused while its memory is written to a file of this host, which takes as long as its disk needs for the memory that
the guest has used. Its programs go on at the next `sterna vm start web1`, also after a restart of the host. Until then its
disks must stay as they are: they cannot be moved, grown or reverted, and a VM whose disk was written meanwhile is not restored.
If the command fails, the VM runs on.";

const ADD_HELP: &str = "\
Example:
  sterna vm add web1 --definition web1.toml

A definition:
  command = [\"qemu-system-x86_64\", \"-m\", \"2048\", \"-qmp\", \"unix:{qmp},server=on,wait=off\", \"-blockdev\",
    \"driver=nbd,node-name=root,server.type=unix,server.path={disk:root},export={export:root},reconnect-delay=60\",
    \"-device\", \"virtio-blk-pci,drive=root\"]
  [disks]
  root = \"web1-root\"        # a volume";
