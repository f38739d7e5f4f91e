//! The command line of `sterna host`.

use clap::{Args, Subcommand};

#[derive(Debug, Subcommand)]
pub(crate) enum HostCommand {
    /// Make this host's identity, once: a key that other hosts know it by.
    #[command(after_help = "Examples:\n  sterna host init\n  sterna host init --name rack3-a")]
    Init {
        /// What people call this host: letters, digits, '.', '-' and '_'; by default its host name.
        #[arg(long)]
        name: Option<String>,
    },
    /// Print an invitation, with which one other host can be paired with this one.
    #[command(after_help = INVITE_HELP)]
    Invite {
        /// How long it is good.
        #[arg(long, value_name = "MINUTES", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=10_080))]
        minutes: u64,
    },
    /// Redeem an invitation of another host: both know each other from then on.
    #[command(after_help = JOIN_HELP)]
    Join(JoinArguments),
    /// List the other hosts.
    #[command(visible_alias = "ls", after_help = "Example:\n  sterna host list")]
    List,
    /// Show another host and the connections with it; without a name, this host.
    #[command(after_help = "Examples:\n  sterna host show\n  sterna host show rack3-b --json")]
    Show {
        /// Name of the other host.
        name: Option<String>,
    },
    /// Forget another host: it is refused from then on. Remove this host there too.
    #[command(visible_alias = "rm", after_help = REMOVE_HELP)]
    Remove {
        /// Name of the host.
        name: String,
        /// Also when migrations or forwarded volumes depend on it.
        #[arg(long)]
        force: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct JoinArguments {
    /// Address and port of the other host.
    #[arg(value_name = "HOST:PORT")]
    pub(crate) address: String,
    /// What `sterna host invite` has printed there.
    pub(crate) token: String,
}

const INVITE_HELP: &str = "\
Examples:
  sterna host invite
  sterna host invite --minutes 5

The token holds a secret: send it where only the other host's administrator reads it. It is good for one host, and not
after the daemon was started again.";

const REMOVE_HELP: &str = "\
Examples:
  sterna host remove rack3-b
  sterna host remove rack3-b --force

It is refused while a migration with that host is under way, or clients are forwarded there. With --force these wait until
the two hosts are paired again.";

const JOIN_HELP: &str = "\
Example:
  sterna host join 10.0.0.1:7423 sterna-invitation-1-…

The token names the host that made it: if another one answers at the address, nothing is told to it. The two hosts need
to reach each other only in one direction, but links that can be dialled from both sides are made again sooner.";
