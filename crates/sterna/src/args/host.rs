//! The command line of `sterna host`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

#[derive(Debug, Subcommand)]
pub(crate) enum HostCommand {
    /// Make this host's identity, once: the key by which other hosts know it.
    #[command(after_help = "Examples:\n  sterna host init\n  sterna host init --name rack3-a")]
    Init {
        /// Name of this host: letters, digits, '.', '-' and '_'; by default its host name.
        #[arg(long)]
        name: Option<String>,
    },
    /// Print an invitation, which pairs one other host with this one.
    #[command(after_help = INVITE_HELP)]
    Invite {
        /// Life of the invitation.
        #[arg(long, value_name = "MINUTES", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=10_080))]
        minutes: u64,
        /// Let the other host bring VMs, which run on this one.
        #[arg(long)]
        allow_machines: bool,
    },
    /// Redeem an invitation of another host, which pairs both.
    #[command(after_help = JOIN_HELP)]
    Join(JoinArguments),
    /// List the other hosts.
    #[command(visible_alias = "ls", after_help = "Example:\n  sterna host list")]
    List,
    /// Show another host with its connections; without a name, this host.
    #[command(after_help = "Examples:\n  sterna host show\n  sterna host show rack3-b --json")]
    Show {
        /// Name of the other host.
        name: Option<String>,
    },
    /// Take nothing new from now on, for maintenance: no volumes and VMs, neither made here nor from other hosts. All that is here
    /// goes on; to move it away: sterna evacuate.
    #[command(after_help = "Example:\n  sterna host drain")]
    Drain,
    /// Take volumes and VMs again.
    #[command(after_help = "Example:\n  sterna host undrain")]
    Undrain,
    /// Change the permissions of another host, or the addresses at which it is reached.
    #[command(after_help = SET_HELP)]
    Set {
        /// Name of the host.
        name: String,
        #[command(flatten)]
        change: HostChange,
    },
    /// Remove another host, which is refused from then on. Remove this host there as well.
    #[command(visible_alias = "rm", after_help = REMOVE_HELP)]
    Remove {
        /// Name of the host.
        name: String,
        /// Remove it even if migrations or forwarded volumes depend on it.
        #[arg(long)]
        force: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct JoinArguments {
    /// Address and port of the other host.
    #[arg(value_name = "HOST:PORT")]
    pub(crate) address: String,
    /// The invitation that `sterna host invite` has printed there. As an argument it is visible in the list of processes and in
    /// the shell's history: leave it out for a prompt.
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
#[group(required = true, multiple = true)]
pub(crate) struct HostChange {
    /// Let the host bring VMs, which run on this one.
    #[arg(long)]
    pub(crate) allow_machines: bool,
    /// Let the host bring no VMs from now on.
    #[arg(long, conflicts_with = "allow_machines")]
    pub(crate) deny_machines: bool,
    /// An address of the host, instead of all that are known. Give it several times if the host has several.
    #[arg(long = "address", value_name = "HOST:PORT")]
    pub(crate) addresses: Vec<String>,
}

const INVITE_HELP: &str = "\
Examples:
  sterna host invite
  sterna host invite --minutes 5
  sterna host invite --allow-machines

The invitation holds a secret: send it where only the other host's administrator reads it. It works for one host, until the
daemon is restarted or that host is removed. Without --allow-machines the other host may bring volumes, but no machines, because
those run here. sterna host set changes this permission.";

const REMOVE_HELP: &str = "\
Examples:
  sterna host remove rack3-b
  sterna host remove rack3-b --force

The command is refused while a migration with that host is under way, or clients are forwarded there. With --force these wait
until the two hosts are paired again.";

const SET_HELP: &str = "\
Examples:
  sterna host set rack3-b --allow-machines
  sterna host set rack3-b --deny-machines
  sterna host set rack3-b --address 10.0.7.2:7423

A machine that another host brings runs on this one. A host needs this permission, by --allow-machines here, with sterna host
invite or with sterna host join; sterna host list shows it. A machine that is already moving here is not affected.

If one of two hosts gets another address, the other one still reaches it if it calls; if both do, set one of them at the other.
The keys of both stay, so nothing has to be paired again.";

const JOIN_HELP: &str = "\
Examples:
  sterna host join 10.0.0.1:7423
  sterna host join 10.0.0.1:7423 --token-file invitation
  ssh rack3-a sterna host invite --json | jq -r .token | sterna host join 10.0.0.1:7423 --token-file -

The invitation is read at a prompt, from a file, or from the environment variable STERNA_INVITATION. As an argument after the
address it is visible in the list of processes.

It has the key of the inviting host: nothing is sent to another host at that address. The two hosts need to reach each
other only in one direction, but links that both sides can dial are made again sooner.";
