//! The command line of `sterna host`.

use std::path::PathBuf;

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
        /// Let the other host bring VMs, which run on this one.
        #[arg(long)]
        allow_machines: bool,
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
    /// Change what another host is trusted with.
    #[command(after_help = SET_HELP)]
    Set {
        /// Name of the host.
        name: String,
        #[command(flatten)]
        machines: MachinesArguments,
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
    /// What `sterna host invite` has printed there. Given here it is seen by whoever lists processes, and kept in the shell's
    /// history: leave it out to be asked for it.
    #[arg(conflicts_with = "token_file")]
    pub(crate) token: Option<String>,
    /// Read the invitation from this file; `-`: from the standard input.
    #[arg(long, value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,
    /// Let the other host bring VMs, which run on this one.
    #[arg(long)]
    pub(crate) allow_machines: bool,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct MachinesArguments {
    /// Let it bring VMs, which run on this host.
    #[arg(long)]
    pub(crate) allow_machines: bool,
    /// Let it bring none from now on.
    #[arg(long)]
    pub(crate) deny_machines: bool,
}

const INVITE_HELP: &str = "\
Examples:
  sterna host invite
  sterna host invite --minutes 5
  sterna host invite --allow-machines

The invitation holds a secret: send it where only the other host's administrator reads it. It is good for one host, and not
after the daemon was started again, or that host was removed. Without --allow-machines the other host may bring volumes, and no
machines: those run here, so it takes a host that you trust with that. sterna host set changes it.";

const REMOVE_HELP: &str = "\
Examples:
  sterna host remove rack3-b
  sterna host remove rack3-b --force

It is refused while a migration with that host is under way, or clients are forwarded there. With --force these wait until
the two hosts are paired again.";

const SET_HELP: &str = "\
Examples:
  sterna host set rack3-b --allow-machines
  sterna host set rack3-b --deny-machines

A machine that another host brings runs on this one. A host may bring none before that was said, by --allow-machines here, with
sterna host invite or with sterna host join; sterna host list shows who may. One that is on its way already comes.";

const JOIN_HELP: &str = "\
Examples:
  sterna host join 10.0.0.1:7423
  sterna host join 10.0.0.1:7423 --token-file invitation
  ssh rack3-a sterna host invite --json | jq -r .token | sterna host join 10.0.0.1:7423 --token-file -

The invitation is asked for, or read from a file, or from the environment: STERNA_INVITATION. It may be given behind the address
as well, but is seen in the list of processes then.

It names the host that made it: if another one answers at the address, nothing is told to it. The two hosts need
to reach each other only in one direction, but links that can be dialled from both sides are made again sooner.";
