//! The command line of `sterna vm`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

#[derive(Debug, Subcommand)]
pub(crate) enum VmCommand {
    /// Add a virtual machine by its definition. What could not move to another host is refused by name.
    #[command(after_help = ADD_HELP)]
    Add(AddVmArguments),
    /// Start a machine, and return when its QEMU answers.
    #[command(after_help = "Example:\n  sterna vm start web1")]
    Start(VmArguments),
    /// Stop a machine: press its power button, and cut its power if it does not shut down.
    #[command(after_help = "Examples:\n  sterna vm stop web1\n  sterna vm stop web1 --now")]
    Stop(StopVmArguments),
    /// List the machines.
    #[command(visible_alias = "ls", after_help = "Example:\n  sterna vm list")]
    List,
    /// Show one machine: what it does, its disks, its process.
    #[command(after_help = "Example:\n  sterna vm show web1 --json")]
    Show(VmArguments),
    /// Forget a machine that does not run. Its volumes stay.
    #[command(visible_alias = "rm", after_help = "Example:\n  sterna vm remove web1")]
    Remove(VmArguments),
}

#[derive(Debug, Args)]
pub(crate) struct VmArguments {
    /// Name of the machine.
    pub(crate) name: String,
}

#[derive(Debug, Args)]
pub(crate) struct AddVmArguments {
    /// Name of the machine: letters, digits, '.', '_' and '-'.
    pub(crate) name: String,
    /// A TOML file: the command that starts the machine, its disks and its files.
    #[arg(long, value_name = "FILE")]
    pub(crate) definition: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct StopVmArguments {
    /// Name of the machine.
    pub(crate) name: String,
    /// Cut its power at once.
    #[arg(long, conflicts_with = "wait")]
    pub(crate) now: bool,
    /// How long its guest may take to shut down; by default a minute.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(..=3600))]
    pub(crate) wait: Option<u64>,
}

const ADD_HELP: &str = "\
Example:
  sterna vm add web1 --definition web1.toml

A definition:
  command = [\"qemu-system-x86_64\", \"-m\", \"2048\", \"-qmp\", \"unix:{qmp},server=on,wait=off\", \"-blockdev\",
    \"driver=nbd,node-name=root,server.type=unix,server.path={disk:root},export={export:root},reconnect-delay=30\",
    \"-device\", \"virtio-blk-pci,drive=root\"]
  [disks]
  root = \"web1-root\"        # a volume";
