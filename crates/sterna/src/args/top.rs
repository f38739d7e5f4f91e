//! The command lines of `sterna top` and `sterna watch`.

use clap::Args;

#[derive(Debug, Args)]
pub(crate) struct TopArguments {
    /// Print what the screen would show, once, and end; with --json, all that is known.
    #[arg(long)]
    pub(crate) once: bool,
}

pub(super) const TOP_HELP: &str = "\
Examples:
  sterna top
  sterna top --once
  sterna top --json | jq '.volumes[] | {name, p99_us: .activity.p99_us}'

Keys: q quits, Tab goes to VMs, stores, hosts and history, s sorts volumes, r reverses, / filters, ? lists them all. A daemon
that goes away is waited for. Rates and latencies are those of the last second.";

pub(super) const WATCH_HELP: &str = "\
Examples:
  sterna watch
  sterna watch --json | jq -r 'select(.about == \"migration\" and .event == \"ended\") | .message'

The first lines say what is under way. With --json each line is an object: time_unix_ms, about (daemon, migration, volume, vm,
host, store), name, event (present, added, removed, changed, begun, ended, away, back), message, and of a migration all that is
known of it. It ends with Ctrl-C, and when nobody reads it any more; a daemon that goes away is waited for.";
