//! The command line of `sterna evacuate`.

use clap::Args;

use crate::moments::parse_moment;

#[derive(Debug, Args)]
pub(crate) struct EvacuateArguments {
    /// The hosts that may take something, each with a store if it has several. The default is every host that is connected.
    #[arg(long, value_name = "HOST[:STORE],…", value_delimiter = ',', conflicts_with_all = ["abort", "status"])]
    pub(crate) to: Vec<String>,
    /// When everything is to have left, for example 15m or 04:00.
    #[arg(long, value_name = "TIME", value_parser = parse_moment, conflicts_with_all = ["abort", "status"])]
    pub(crate) deadline: Option<u64>,
    /// Shut VMs down in time that will not have left at the deadline, as `sterna vm stop` does. Without this they go on running.
    #[arg(long, requires = "deadline")]
    pub(crate) stop_rest: bool,
    /// Print what would go where, and when, and what would stay; begin nothing.
    #[arg(long, conflicts_with_all = ["detach", "abort", "status"])]
    pub(crate) dry_run: bool,
    /// Return as soon as it has begun.
    #[arg(long, conflicts_with_all = ["abort", "status"])]
    pub(crate) detach: bool,
    /// End the evacuation that runs: nothing more begins, and what moves is cancelled. What has left stays where it is.
    #[arg(long, conflicts_with = "status")]
    pub(crate) abort: bool,
    /// Print the evacuation that runs, or the last one.
    #[arg(long)]
    pub(crate) status: bool,
}

pub(super) const EVACUATE_HELP: &str = "\
Examples:
  sterna evacuate --dry-run
  sterna evacuate --to rack3-b,rack3-c:fast --deadline 15m
  sterna evacuate --deadline 10m --stop-rest --detach
  sterna evacuate --status
  sterna evacuate --abort

All VMs and volumes leave this host. Those of a higher priority go first (sterna vm set --priority), among equals those with a
standby, then the longest. As many move at a time as the links and stores carry. While it runs, the host takes nothing new.
Ctrl-C ends only the watching; a restart of the daemon goes on with what is left.";
