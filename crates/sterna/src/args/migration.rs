//! The command line of `sterna migration`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};

use super::pace::parse_impact;
use console::units::{UnitError, parse_rate, parse_time};

#[derive(Debug, Subcommand)]
pub(crate) enum MigrationCommand {
    /// List the migrations under way and the latest ended ones, with outcomes and reasons.
    #[command(visible_alias = "ls", after_help = LIST_HELP)]
    List(ListArguments),
    /// Show one migration: its progress, what it waits for, where the guest runs.
    #[command(after_help = "Examples:\n  sterna migration show m7\n  sterna migration show web1")]
    Show(MigrationArguments),
    /// Follow a migration to its end. The exit code is its outcome.
    #[command(after_help = WATCH_HELP)]
    Watch(MigrationArguments),
    /// Write a migration's report: an HTML page with its course, its cost for the guest, and the decisions.
    #[command(after_help = REPORT_HELP)]
    Report(ReportArguments),
    /// Pause a migration: nothing is copied until it is resumed.
    #[command(after_help = "Example:\n  sterna migration pause m7")]
    Pause(MigrationArguments),
    /// Resume a paused migration.
    #[command(after_help = "Example:\n  sterna migration resume m7")]
    Resume(MigrationArguments),
    /// Change the bandwidth of a migration that is under way.
    #[command(after_help = SET_HELP)]
    Set(SetArguments),
    /// Repeat a failed or cancelled migration with the same volume or VM, target and options, under a new identity.
    #[command(after_help = RETRY_HELP)]
    Retry(RetryArguments),
    /// Cancel a migration: the volume stays at the source, the half-made target is deleted.
    #[command(after_help = "Examples:\n  sterna migration cancel m7\n  sterna migration cancel web1")]
    Cancel(MigrationArguments),
}

#[derive(Debug, Args)]
pub(crate) struct ListArguments {
    /// Only migrations that have not ended: under way, paused, or queued.
    #[arg(long)]
    pub(crate) running: bool,
    /// Only migrations that have not ended, or have ended within this time: a number with s, m, h or d.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub(crate) since: Option<Duration>,
}

const LIST_HELP: &str = "\
Examples:
  sterna migration list
  sterna migration list --running
  sterna migration list --since 2h --json

The daemon keeps the latest 1000 ended migrations.";

#[derive(Debug, Args)]
pub(crate) struct ReportArguments {
    /// The migration, for example m7; or its volume or VM, whose migration under way is meant, or else the latest.
    #[arg(value_name = "MIGRATION|NAME")]
    pub(crate) id: String,
    /// The file to write, - for standard output; by default the identity with the ending .html.
    #[arg(long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct RetryArguments {
    /// The migration to repeat, for example m7; or its volume or VM, whose latest migration is meant.
    #[arg(value_name = "MIGRATION|NAME")]
    pub(crate) id: String,
    /// Return as soon as the new migration has begun.
    #[arg(long)]
    pub(crate) detach: bool,
}

#[derive(Debug, Args)]
pub(crate) struct SetArguments {
    /// The migration, for example m7; or its volume or VM, whose migration under way is meant, or else the latest.
    #[arg(value_name = "MIGRATION|NAME")]
    pub(crate) id: String,
    /// Largest rate of the copying, for example 200MiB/s or 1Gbit/s; `none`: no limit.
    #[arg(long, value_name = "RATE", value_parser = parse_limit, required_unless_present = "impact")]
    pub(crate) bandwidth: Option<Limit>,
    /// What guests of the disks may lose to the copying, of their throughput, for example 10%; `none`: copy at full speed.
    #[arg(long, value_name = "PERCENT|none", value_parser = parse_impact)]
    pub(crate) impact: Option<u8>,
}

/// A limit of the copying.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Limit {
    /// There is no limit.
    None,
    /// The rate in bytes a second.
    Rate(u64),
}

#[derive(Debug, Args)]
pub(crate) struct MigrationArguments {
    /// The migration, for example m7; or its volume or VM, whose migration under way is meant, or else the latest.
    #[arg(value_name = "MIGRATION|NAME")]
    pub(crate) id: String,
}

fn parse_limit(text: &str) -> Result<Limit, UnitError> {
    if text == "none" { Ok(Limit::None) } else { parse_rate(text).map(Limit::Rate) }
}

const REPORT_HELP: &str = "\
Examples:
  sterna migration report m7
  sterna migration report m7 --output /tmp/web1.html

The page needs no other files. You can make it while the migration is under way, and later: the daemon keeps the recordings
of the latest 100 migrations.";

const RETRY_HELP: &str = "\
Examples:
  sterna migration retry m7
  sterna migration retry m7 --detach --json

The command is refused while m7 is under way, if m7 has succeeded, and if its volume is not here. It waits for
the end of the new migration, as `sterna migrate` does.";

const WATCH_HELP: &str = "\
Examples:
  sterna migration watch m7
  sterna migration watch web1

With --json each change is one line. Ctrl-C stops watching; the migration continues.";

const SET_HELP: &str = "\
Examples:
  sterna migration set m7 --bandwidth 50MiB/s
  sterna migration set m7 --bandwidth none

The limit holds at once, after restarts of the daemon, and for `sterna migration retry`. It does not limit guests' writes, and the
rest that is copied at the switch-over. For a migration from another host, set it there.";
