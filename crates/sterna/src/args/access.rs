//! The command line of `sterna access` and `sterna remote`.

use std::path::PathBuf;

use api::Role;
use clap::{Args, Subcommand};

use crate::remotes::RemoteAddress;

#[derive(Debug, Subcommand)]
pub(crate) enum AccessCommand {
    /// Grant a user access to this daemon over TLS: print an access token, or use the user's present key.
    #[command(after_help = GRANT_HELP)]
    Grant(GrantArguments),
    /// List who may use this daemon over TLS.
    #[command(visible_alias = "ls", after_help = "Example:\n  sterna access list")]
    List,
    /// Change a user's role, from the user's next request on.
    #[command(after_help = "Example:\n  sterna access set alice --role read")]
    Set {
        /// Name of the user.
        name: String,
        /// New role of the user.
        #[arg(long, value_name = ROLES)]
        role: Role,
    },
    /// Revoke a user's access, from the user's next request on.
    #[command(visible_aliases = ["remove", "rm"], after_help = "Example:\n  sterna access revoke alice")]
    Revoke {
        /// Name of the user.
        name: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct GrantArguments {
    /// Name of the user, for the list and the audit log: letters, digits, '.', '-' and '_'.
    pub(crate) name: String,
    /// Role of the user.
    #[arg(long, value_name = ROLES)]
    pub(crate) role: Role,
    /// Life of the access token.
    #[arg(long, value_name = "MINUTES", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=10_080))]
    pub(crate) minutes: u64,
    /// Digest of the user's present key, instead of an access token; `sterna remote key` prints it.
    #[arg(long, value_name = "64 DIGITS", conflicts_with = "minutes")]
    pub(crate) key: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum RemoteCommand {
    /// Add a daemon over TLS, with an access token from its administrator.
    #[command(after_help = ADD_HELP)]
    Add(AddRemoteArguments),
    /// List the daemons that this user has added.
    #[command(visible_alias = "ls", after_help = "Example:\n  sterna remote list")]
    List,
    /// Forget a daemon on this machine. Have your access revoked there as well.
    #[command(visible_alias = "rm", after_help = "Example:\n  sterna remote remove https://rack3-a:7425")]
    Remove {
        /// Address of the daemon.
        #[arg(value_name = "https://HOST:PORT")]
        address: RemoteAddress,
    },
    /// Print the digest of this user's key for `sterna access grant --key`, and make the key if there is none.
    #[command(after_help = "Example:\n  sterna remote key")]
    Key,
}

#[derive(Debug, Args)]
pub(crate) struct AddRemoteArguments {
    /// Address of the daemon.
    #[arg(value_name = "https://HOST:PORT")]
    pub(crate) address: RemoteAddress,
    /// Read the access token from this file; `-`: from the standard input. By default there is a prompt.
    #[arg(long, value_name = "FILE", conflicts_with = "server_key")]
    pub(crate) token_file: Option<PathBuf>,
    /// Digest of the daemon's key (`sterna access list`), if the daemon knows this user's key already.
    #[arg(long, value_name = "64 DIGITS")]
    pub(crate) server_key: Option<String>,
}

const ROLES: &str = "read|operate|admin";

const GRANT_HELP: &str = "\
Examples:
  sterna access grant alice --role operate
  sterna access grant prometheus --role read --key 5f0c…

read     sees everything except tickets and definitions of VMs; runs preflight checks (migrate --dry-run)
operate  migrates, pauses, cancels, resizes; adopts, starts and stops VMs: operations that lose nothing
admin    everything: makes, promotes and removes volumes, pairs hosts, grants access. This equals root

The daemon serves its API over TLS if its configuration has [api_tls]. The access token holds a secret: send it where only
this user reads it. It works once, and registers the user's own key, which never leaves the user's machine.";

const ADD_HELP: &str = "\
Examples:
  sterna remote add https://rack3-a:7425
  ssh rack3-a sterna access grant alice --role read --json | jq -r .token | sterna remote add https://rack3-a --token-file -
  sterna --host https://rack3-a:7425 volume list

The access token is read at a prompt, from a file, or from the environment variable STERNA_INVITATION. It has the daemon's
key: nothing is sent to another server at that address. This user's key is in ~/.config/sterna/identity.";

pub(crate) const PAGE_HELP: &str = "\
Example:
  sterna page

The page shows the host to every process of the host; orders need this link. It works once, within five minutes, and the
browser that opens it stays signed in for twelve hours, until it is closed, or until the daemon restarts. It has your rights,
and at most those of the role operate. Paste the link into the browser: a program's arguments are visible to other users.";
