//! The command line of `sterna access` and `sterna remote`.

use std::path::PathBuf;

use api::Role;
use clap::{Args, Subcommand};

use crate::remotes::RemoteAddress;

#[derive(Debug, Subcommand)]
pub(crate) enum AccessCommand {
    /// Let somebody use this daemon over TLS: print an invitation for him, or take the key that he has.
    #[command(after_help = GRANT_HELP)]
    Grant(GrantArguments),
    /// List who may use this daemon over TLS.
    #[command(visible_alias = "ls", after_help = "Example:\n  sterna access list")]
    List,
    /// Change what somebody may do, from his next request on.
    #[command(after_help = "Example:\n  sterna access set alice --role read")]
    Set {
        /// What he is called.
        name: String,
        /// What he may do.
        #[arg(long, value_name = ROLES)]
        role: Role,
    },
    /// Let somebody in no more, from his next request on.
    #[command(visible_aliases = ["remove", "rm"], after_help = "Example:\n  sterna access revoke alice")]
    Revoke {
        /// What he is called.
        name: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct GrantArguments {
    /// What he is called, in the list and in the audit log: letters, digits, '.', '-' and '_'.
    pub(crate) name: String,
    /// What he may do.
    #[arg(long, value_name = ROLES)]
    pub(crate) role: Role,
    /// How long the invitation is good.
    #[arg(long, value_name = "MINUTES", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=10_080))]
    pub(crate) minutes: u64,
    /// The digest of a key that he has already, in the place of an invitation; `sterna remote key` prints it.
    #[arg(long, value_name = "64 DIGITS", conflicts_with = "minutes")]
    pub(crate) key: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum RemoteCommand {
    /// Add a daemon that is asked over TLS, by an invitation of its administrator.
    #[command(after_help = ADD_HELP)]
    Add(AddRemoteArguments),
    /// List the daemons that this user has added.
    #[command(visible_alias = "ls", after_help = "Example:\n  sterna remote list")]
    List,
    /// Forget a daemon here; have your access revoked there too.
    #[command(visible_alias = "rm", after_help = "Example:\n  sterna remote remove https://rack3-a:7425")]
    Remove {
        /// Where it is.
        #[arg(value_name = "https://HOST:PORT")]
        address: RemoteAddress,
    },
    /// Print the digest of this user's key, which is made if there is none: for `sterna access grant --key`.
    #[command(after_help = "Example:\n  sterna remote key")]
    Key,
}

#[derive(Debug, Args)]
pub(crate) struct AddRemoteArguments {
    /// Where it is.
    #[arg(value_name = "https://HOST:PORT")]
    pub(crate) address: RemoteAddress,
    /// Read the invitation from this file; `-`: from the standard input. Without it it is asked for.
    #[arg(long, value_name = "FILE", conflicts_with = "server_key")]
    pub(crate) token_file: Option<PathBuf>,
    /// The digest of the daemon's key (`sterna access list`), where this user's key is known already.
    #[arg(long, value_name = "64 DIGITS")]
    pub(crate) server_key: Option<String>,
}

/// How the roles are written.
const ROLES: &str = "read|operate|admin";

const GRANT_HELP: &str = "\
Examples:
  sterna access grant alice --role operate
  sterna access grant prometheus --role read --key 5f0c…

  read     sees everything but tickets and definitions of VMs; looks ahead (migrate --dry-run)
  operate  migrates, pauses, cancels, resizes; adopts, starts and stops VMs: day-to-day operations that lose nothing
  admin    everything: makes, promotes and removes volumes, pairs hosts, grants access. It is as much as root

The daemon serves its API over TLS if its configuration has [api_tls]. The invitation holds a secret: send it where only he
reads it. It is good once; with it he brings a key of his own, which never leaves his machine.";

const ADD_HELP: &str = "\
Examples:
  sterna remote add https://rack3-a:7425
  ssh rack3-a sterna access grant alice --role read --json | jq -r .token | sterna remote add https://rack3-a --token-file -
  sterna --host https://rack3-a:7425 volume list

The invitation is asked for, or read from a file, or from the environment: STERNA_INVITATION. It names the daemon's key: nobody
else who answers at that address is told anything. This user's key is in ~/.config/sterna/identity.";
