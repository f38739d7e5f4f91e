//! The command line of `sterna migration`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};

use crate::units::{UnitError, parse_rate, parse_time};

#[derive(Debug, Subcommand)]
pub(crate) enum MigrationCommand {
    /// List the migrations under way and the latest that have ended, with what became of them and why.
    #[command(visible_alias = "ls", after_help = LIST_HELP)]
    List(ListArguments),
    /// Show one migration: how far it is, what it waits for, where the guest runs.
    #[command(after_help = "Example:\n  sterna migration show m7")]
    Show(MigrationArguments),
    /// Follow a migration to its end. The exit code says how it ended.
    #[command(after_help = WATCH_HELP)]
    Watch(MigrationArguments),
    /// Write a migration's report: one HTML page with its course, its cost to the guest, and what was decided.
    #[command(after_help = REPORT_HELP)]
    Report(ReportArguments),
    /// Let a migration rest: nothing is copied, the volume stays where it is.
    #[command(after_help = "Example:\n  sterna migration pause m7")]
    Pause(MigrationArguments),
    /// Go on with a migration that rests.
    #[command(after_help = "Example:\n  sterna migration resume m7")]
    Resume(MigrationArguments),
    /// Change how fast a migration copies, while it does.
    #[command(after_help = SET_HELP)]
    Set(SetArguments),
    /// Do once more what failed or was cancelled: same volume or VM, same target, same options, a new identity.
    #[command(after_help = RETRY_HELP)]
    Retry(RetryArguments),
    /// Cancel a migration: the volume stays at the source, the half-made target is deleted.
    #[command(after_help = "Example:\n  sterna migration cancel m7")]
    Cancel(MigrationArguments),
}

#[derive(Debug, Args)]
pub(crate) struct ListArguments {
    /// Only those that have not ended: under way, paused, or waiting for their turn.
    #[arg(long)]
    pub(crate) running: bool,
    /// Only those that have not ended, or ended at most so long ago: a number with s, m, h or d.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub(crate) since: Option<Duration>,
}

const LIST_HELP: &str = "\
Examples:
  sterna migration list
  sterna migration list --running
  sterna migration list --since 2h --json

The daemon remembers the latest 1000 that have ended.";

#[derive(Debug, Args)]
pub(crate) struct ReportArguments {
    /// Identity of the migration, for example m7.
    pub(crate) id: String,
    /// The file to write, - for standard output; by default the identity with the ending .html.
    #[arg(long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct RetryArguments {
    /// Identity of the migration that is to be done once more, for example m7.
    pub(crate) id: String,
    /// Return as soon as the new migration has begun.
    #[arg(long)]
    pub(crate) detach: bool,
}

#[derive(Debug, Args)]
pub(crate) struct SetArguments {
    /// Identity of the migration, for example m7.
    pub(crate) id: String,
    /// Copy at most this fast, for example 200MiB/s or 1Gbit/s; `none`: as fast as it goes.
    #[arg(long, value_name = "RATE", value_parser = parse_limit)]
    pub(crate) bandwidth: Limit,
}

/// A limit of what is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Limit {
    /// There is none.
    None,
    /// In bytes a second.
    Rate(u64),
}

#[derive(Debug, Args)]
pub(crate) struct MigrationArguments {
    /// Identity of the migration, for example m7.
    pub(crate) id: String,
}

fn parse_limit(text: &str) -> Result<Limit, UnitError> {
    if text == "none" { Ok(Limit::None) } else { parse_rate(text).map(Limit::Rate) }
}

const REPORT_HELP: &str = "\
Examples:
  sterna migration report m7
  sterna migration report m7 --output /tmp/web1.html

The page needs nothing besides itself. It can be made while the migration is under way, and long after: the daemon keeps
what it recorded of the latest 100 migrations.";

const RETRY_HELP: &str = "\
Examples:
  sterna migration retry m7
  sterna migration retry m7 --detach --json

It is refused while m7 is under way, if m7 has ended well, and if its volume is not here any more. The command waits for
the end of the new migration, as `sterna migrate` does.";

const WATCH_HELP: &str = "\
Example:
  sterna migration watch m7

With --json each change is one line. Ctrl-C stops watching; the migration goes on.";

const SET_HELP: &str = "\
Examples:
  sterna migration set m7 --bandwidth 50MiB/s
  sterna migration set m7 --bandwidth none

It holds at once, after restarts of the daemon, and for `sterna migration retry`. What guests write is not slowed, nor is what is left when
their requests are held at the switch-over. A migration that comes from another host is set there.";
