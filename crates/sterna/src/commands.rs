//! The commands, one file for each noun.

mod access;
mod config;
mod divergence;
mod evacuate;
mod generate;
mod health;
mod host;
mod journal;
mod lab;
mod libvirt;
mod metrics;
mod migrate;
mod migration;
mod named;
mod notices;
mod remote;
mod replica;
mod report;
mod serve;
mod snapshots;
mod standby;
mod store;
mod top;
mod vm;
mod volume;
mod watch;

use std::path::{Path, PathBuf};
use std::time::Duration;

use api::{Address, Client, ClientError};
use daemon::{ConfigError, Folders, JournalError, ServeError};

pub(crate) use self::libvirt::{DomainMove, LibvirtError, Obstacle};
use crate::args::{Arguments, Command, HostCommand, VolumeCommand};
use crate::exit::Exit;
use crate::output::{self, Format};
use crate::remotes::{RemoteError, Remotes};
use crate::tunnel::{HostAddress, Tunnel, TunnelError};

/// Time after which a command says that it waits for the daemon. Most answers take some milliseconds.
const LATE: Duration = Duration::from_millis(1500);

#[derive(Debug, thiserror::Error)]
pub(crate) enum CommandError {
    /// The daemon cannot be reached, or has refused.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The daemon has ended while a migration was watched, and has not come back.
    #[error("the outcome of {id} is unknown; when the daemon runs again: sterna migration watch {id}")]
    Lost {
        id: String,
        /// The error of the last try.
        source: ClientError,
    },
    /// The daemon's machine cannot be reached by ssh.
    #[error(transparent)]
    Tunnel(#[from] TunnelError),
    /// The machine is reached, but no daemon answers there.
    #[error(
        "no daemon answers at {address}: it does not run, it has another socket (ssh://HOST/PATH), or the ssh user may not use it"
    )]
    NoDaemonThere {
        address: String,
        /// How the connection ended.
        source: ClientError,
    },
    /// The daemon cannot be reached over TLS.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// The configuration cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("there is no journal {path}; name the data folder of a daemon: sterna journal check PATH")]
    NoJournal { path: PathBuf },
    #[error(transparent)]
    Journal(JournalError),
    #[error(transparent)]
    Restore(#[from] daemon::RestoreError),
    /// The daemon could not start, or had to stop.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// `sterna-lab` was not found.
    #[error(
        "sterna-lab is not beside {program}; it carries out `bench` and `demo`: install the whole package, or build it with: cargo build -p lab"
    )]
    NoLab { program: PathBuf },
    #[error("{program} does not start")]
    Lab {
        program: PathBuf,
        /// What the system answered.
        source: std::io::Error,
    },
    /// The program that should switch a host off has failed.
    #[error(
        "{} has not switched host \"{host}\" off: {reason}; nothing is promoted; once that host is off: --source-is-off {host}",
        program.display()
    )]
    NotFenced { program: PathBuf, host: String, reason: String },
    /// The path of this program's own file is unknown.
    #[error("the program cannot find its own file")]
    Program(#[source] std::io::Error),
    #[error("there is no terminal to draw on; print one screen with: sterna top --once")]
    NoTerminal,
    /// The handler of Ctrl-C cannot be installed.
    #[error("signals cannot be waited for")]
    Signals(#[source] std::io::Error),
    /// The result could not be printed.
    #[error("standard output cannot be written")]
    Unwritten(#[from] std::io::Error),
    /// The report could not be written.
    #[error(
        "the report cannot be written to {path}; choose another file with --output, or - for standard output"
    )]
    Report {
        path: PathBuf,
        /// What the system answered.
        source: std::io::Error,
    },
    /// What only one host has of a volume could not be written.
    #[error("the divergence cannot be written to {path}; name a new file in a folder that has room")]
    Divergence {
        path: PathBuf,
        /// What the system answered.
        source: std::io::Error,
    },
    /// A domain of libvirt does not move.
    #[error(transparent)]
    Libvirt(#[from] LibvirtError),
    /// Manual pages and completions could not be written.
    #[error("manual pages and completions cannot be written to {path}")]
    Generate {
        path: PathBuf,
        /// What the system answered.
        source: std::io::Error,
    },
    /// A file of the command line cannot be read.
    #[error("the file {path} cannot be read")]
    File {
        path: PathBuf,
        /// What the system answered.
        source: std::io::Error,
    },
    /// A path of the command line cannot be made absolute.
    #[error("the path {path} cannot be followed")]
    Path {
        path: PathBuf,
        /// What the system answered.
        source: std::io::Error,
    },
}

pub(crate) async fn run(arguments: Arguments) -> Result<Exit, CommandError> {
    let format = arguments.format();
    let tunnel = match &arguments.host {
        Some(HostAddress::Ssh(there)) if arguments.command.asks_a_daemon() => {
            Some(Tunnel::open(there).await?)
        }
        _ => None,
    };
    let late = asks_others(&arguments.command);
    let client = |host: Option<&HostAddress>| -> Result<Client, CommandError> {
        let late = late.clone();
        let client = match (&tunnel, host) {
            (Some(tunnel), _) => Client::new(tunnel.address().clone()),
            (None, Some(HostAddress::Here(address))) => Client::new(address.clone()),
            (None, Some(HostAddress::Https(address))) => Remotes::of_this_user()?.client(address)?,
            (None, _) => {
                let socket = Folders::of_this_user().commands_socket();
                Client::new(Address::unix(socket).map_err(ConfigError::from)?)
            }
        };
        Ok(match format {
            Format::Text => client.when_late(LATE, move |address| {
                output::say(&match &late {
                    Some(what) => format!("still {what}"),
                    None => format!("waiting for the answer of the daemon at {address}"),
                });
            }),
            Format::Json => client,
        })
    };
    let there = arguments.host.as_ref();
    let done = run_command(arguments.command, || client(there), format).await;
    match (done, there) {
        // ssh is connected, but no daemon answers at the socket.
        (Err(CommandError::Client(source @ ClientError::Broken(_))), Some(HostAddress::Ssh(there))) => {
            Err(CommandError::NoDaemonThere { address: there.to_string(), source })
        }
        (done, _) => done,
    }
}

/// Returns what the daemon does for a command while it waits for other hosts.
fn asks_others(command: &Command) -> Option<String> {
    match command {
        Command::Migrate(order) => Some(match order.to.split_once(':') {
            Some((host, _)) => format!("asking {host} about the migration"),
            None => format!("preparing the migration to {}", order.to),
        }),
        Command::Evacuate(order) if order.dry_run => {
            Some("asking the other hosts what they can take".to_owned())
        }
        Command::Host(HostCommand::Join(order)) => Some(format!("asking the host at {}", order.address)),
        Command::Volume(VolumeCommand::Promote(_)) => {
            Some("asking the other hosts about the volume".to_owned())
        }
        _ => None,
    }
}

async fn run_command(
    command: Command,
    client: impl Fn() -> Result<Client, CommandError>,
    format: Format,
) -> Result<Exit, CommandError> {
    match command {
        Command::Bench(_) | Command::Demo(_) => Err(lab::run()),
        Command::Config(command) => config::run(command, format),
        Command::Generate(order) => generate::run(&order),
        Command::Journal(command) => journal::run(command, format),
        Command::Serve(order) => serve::run(order).await,
        Command::Store(command) => store::run(&client()?, command, format).await,
        Command::Access(command) => access::run(&client()?, command, format).await,
        Command::Page => access::show_page_link(&client()?, format).await,
        Command::Remote(command) => remote::run(command, format).await,
        Command::Host(command) => host::run(&client()?, command, format).await,
        Command::Volume(command) => volume::run(&client()?, command, format).await,
        Command::Replica(command) => replica::run(&client()?, command, format).await,
        Command::Standby(command) => standby::run(&client()?, command, format).await,
        Command::Vm(command) => vm::run(&client()?, command, format).await,
        Command::Libvirt(command) => libvirt::run(&client()?, command, format).await,
        Command::Migrate(order) => migrate::run(&client()?, order, format).await,
        Command::Evacuate(order) => evacuate::run(&client()?, order, format).await,
        Command::Health => health::run(&client()?, format).await,
        Command::Top(order) => top::run(&client()?, &order, format).await,
        Command::Watch => watch::run(&client()?, format).await,
        Command::Notices(command) => notices::run(&client()?, command, format).await,
        Command::Metrics => metrics::run(&client()?, format).await,
        Command::Migration(command) => migration::run(&client()?, &command, format).await,
    }
}

/// Returns an absolute path, because the daemon's current folder is another one.
fn absolute(path: &Path) -> Result<String, CommandError> {
    let failed = |source| CommandError::Path { path: path.to_owned(), source };
    let absolute = std::path::absolute(path).map_err(failed)?;
    let text = absolute.to_str().ok_or_else(|| failed(std::io::ErrorKind::InvalidFilename.into()))?;
    Ok(text.to_owned())
}
