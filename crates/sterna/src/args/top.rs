//! The command lines of `sterna top` and `sterna watch`.

use clap::Args;

#[derive(Debug, Args)]
pub(crate) struct TopArguments {
    /// Print the content of the screen once, and end; with --json, all data.
    #[arg(long)]
    pub(crate) once: bool,
}

pub(super) const TOP_HELP: &str = "\
Examples:
  sterna top
  sterna top --once
  sterna top --json | jq '.volumes[] | {name, p99_us: .activity.p99_us}'

Keys: q quits, Tab changes to VMs, stores, hosts and history, s sorts volumes, r reverses, / filters, ? lists all keys. While the
daemon does not answer, the screen waits for it. Rates and latencies are of the last second.";

pub(super) const WATCH_HELP: &str = "\
Examples:
  sterna watch
  sterna watch --json | jq -r 'select(.about == \"migration\" and .event == \"ended\") | .message'

The first lines show the present state. With --json each line is an object: time_unix_ms, about (daemon, migration, volume, vm,
host, store), name, event (present, added, removed, changed, begun, ended, away, back), message, and for a migration all of its
data. The command ends with Ctrl-C, or when its output is closed. While the daemon does not answer, it waits.";
