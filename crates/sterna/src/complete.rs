//! Completes words of the command line in a shell, also with the names of what the daemon has.
//!
//! ```text
//!   sterna migrate w⇥ ─► STERNA_COMPLETE=bash sterna -- migrate w ─► asks the daemon of this user ─► web1 web2
//! ```
//! A daemon that does not answer at once has no names.

use std::time::Duration;

use api::{Address, Client, ClientError};
use clap::{Command, CommandFactory as _};
use clap_complete::CompleteEnv;
use clap_complete::engine::{ArgValueCandidates, CompletionCandidate};
use clap_complete::env::Shells;
use daemon::Folders;

use crate::args::Arguments;

/// The variable by which a shell asks for candidates.
pub(crate) const VARIABLE: &str = "STERNA_COMPLETE";
/// Longest time that a shell waits for names.
const ANSWER_MAX: Duration = Duration::from_millis(500);

/// What an argument names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Names {
    Volumes,
    Vms,
    /// Whatever can be migrated.
    Movables,
    Stores,
    Hosts,
    /// Stores of this host, and other hosts.
    Targets,
    /// Migrations by their identities, and by what they move.
    Migrations,
    /// Volumes with kept images.
    Replicas,
    Standbys,
}

/// The arguments with names: the command, the name of the argument, and what it names.
const ARGUMENTS: &[(&str, &str, Names)] = &[
    ("volume show", "name", Names::Volumes),
    ("volume promote", "name", Names::Volumes),
    ("volume resize", "name", Names::Volumes),
    ("volume remove", "name", Names::Volumes),
    ("volume create", "store", Names::Stores),
    ("volume promote", "store", Names::Stores),
    ("vm start", "name", Names::Vms),
    ("vm stop", "name", Names::Vms),
    ("vm suspend", "name", Names::Vms),
    ("vm release", "name", Names::Vms),
    ("vm resume", "name", Names::Vms),
    ("vm set", "name", Names::Vms),
    ("vm show", "name", Names::Vms),
    ("vm remove", "name", Names::Vms),
    ("vm adopt", "store", Names::Stores),
    ("evacuate", "to", Names::Hosts),
    ("migrate", "names", Names::Movables),
    ("migrate", "to", Names::Targets),
    ("migration show", "id", Names::Migrations),
    ("migration watch", "id", Names::Migrations),
    ("migration report", "id", Names::Migrations),
    ("migration pause", "id", Names::Migrations),
    ("migration resume", "id", Names::Migrations),
    ("migration set", "id", Names::Migrations),
    ("migration retry", "id", Names::Migrations),
    ("migration cancel", "id", Names::Migrations),
    ("replica drop", "name", Names::Replicas),
    ("standby add", "volumes", Names::Movables),
    ("standby add", "to", Names::Hosts),
    ("standby show", "name", Names::Standbys),
    ("standby pause", "name", Names::Standbys),
    ("standby resume", "name", Names::Standbys),
    ("standby set", "name", Names::Standbys),
    ("standby check", "name", Names::Standbys),
    ("standby export", "name", Names::Standbys),
    ("standby promote", "name", Names::Standbys),
    ("standby test", "name", Names::Standbys),
    ("standby remove", "name", Names::Standbys),
    ("store scan", "name", Names::Stores),
    ("store release", "name", Names::Stores),
    ("host show", "name", Names::Hosts),
    ("host set", "name", Names::Hosts),
    ("host remove", "name", Names::Hosts),
];

/// Answers a shell that asks for candidates, and ends the program then.
pub(crate) fn answer_a_shell() {
    CompleteEnv::with_factory(command).var(VARIABLE).complete();
}

/// Returns the script by which a shell asks `sterna` for candidates.
pub(crate) fn script(shell: &str) -> std::io::Result<Vec<u8>> {
    let mut script = Vec::new();
    let shells = Shells::builtins();
    let shell = shells.completer(shell).ok_or(std::io::ErrorKind::Unsupported)?;
    shell.write_registration(VARIABLE, "sterna", "sterna", "sterna", &mut script)?;
    Ok(script)
}

/// Returns the command line with candidates for its names.
fn command() -> Command {
    with_candidates(Arguments::command(), "")
}

/// Adds the candidates to a command that is called `path`, and to those below it.
fn with_candidates(command: Command, path: &str) -> Command {
    let command = command.mut_args(|argument| {
        let found = ARGUMENTS.iter().find(|(at, name, _)| *at == path && argument.get_id() == *name);
        match found {
            Some((_, _, names)) => argument.add(ArgValueCandidates::new(|| candidates(*names))),
            None => argument,
        }
    });
    command.mut_subcommands(|below| {
        let name = below.get_name().to_owned();
        let path = if path.is_empty() { name } else { format!("{path} {name}") };
        with_candidates(below, &path)
    })
}

fn candidates(names: Names) -> Vec<CompletionCandidate> {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
        return Vec::new();
    };
    let found = runtime.block_on(async {
        let asked = async { ask(&client()?, names).await.ok() };
        tokio::time::timeout(ANSWER_MAX, asked).await.ok().flatten()
    });
    runtime.shutdown_background();
    found.unwrap_or_default().into_iter().map(CompletionCandidate::new).collect()
}

/// A client of the daemon that this user's commands ask, if it has a socket here.
fn client() -> Option<Client> {
    let address = match std::env::var("STERNA_HOST") {
        Ok(address) => address.parse::<Address>().ok()?,
        Err(_) => Address::unix(Folders::of_this_user().commands_socket()).ok()?,
    };
    Some(Client::new(address))
}

async fn ask(client: &Client, names: Names) -> Result<Vec<String>, ClientError> {
    Ok(match names {
        Names::Volumes => volumes(client).await?,
        Names::Vms => vms(client).await?,
        Names::Movables => [volumes(client).await?, vms(client).await?].concat(),
        Names::Stores => stores(client).await?,
        Names::Hosts => hosts(client).await?,
        Names::Targets => [stores(client).await?, hosts(client).await?].concat(),
        Names::Migrations => {
            let migrations = client.migrations().await?;
            let words = |migration: api::Migration| [migration.id, migration.name];
            let mut words: Vec<String> = migrations.into_iter().flat_map(words).collect();
            words.retain(|word| !word.is_empty());
            // A volume that has moved several times is offered once.
            words.sort_unstable();
            words.dedup();
            words
        }
        Names::Standbys => client.standbys().await?.into_iter().map(|standby| standby.name).collect(),
        Names::Replicas => client.replicas().await?.into_iter().map(|replica| replica.volume).collect(),
    })
}

async fn volumes(client: &Client) -> Result<Vec<String>, ClientError> {
    Ok(client.volumes().await?.into_iter().map(|volume| volume.name).collect())
}

async fn vms(client: &Client) -> Result<Vec<String>, ClientError> {
    Ok(client.vms().await?.into_iter().map(|vm| vm.name).collect())
}

async fn stores(client: &Client) -> Result<Vec<String>, ClientError> {
    Ok(client.stores().await?.into_iter().map(|store| store.name).collect())
}

async fn hosts(client: &Client) -> Result<Vec<String>, ClientError> {
    Ok(client.peers().await?.into_iter().map(|peer| peer.name).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_argument_with_names_exists() {
        for (path, argument, _) in ARGUMENTS {
            let mut command = Arguments::command();
            for name in path.split(' ') {
                command = command.find_subcommand(name).unwrap_or_else(|| panic!("{path}")).clone();
            }
            let mut arguments = command.get_arguments();
            assert!(arguments.any(|found| found.get_id() == argument), "{path} {argument}");
        }
        // Nothing is lost on the way.
        command().debug_assert();
    }
}
