//! The command line.

mod access;
mod bench;
mod config;
mod demo;
mod host;
mod journal;
mod migration;
mod replica;
mod store;
mod strategy;
mod top;
mod vm;
mod volume;

use std::path::PathBuf;

pub(crate) use self::access::{AccessCommand, AddRemoteArguments, RemoteCommand};
pub(crate) use self::bench::{
    BenchCommand, BenchLinkArguments, BenchMachineArguments, BenchMirrorArguments, BenchNbdArguments,
    BenchReturnArguments, BenchStrategiesArguments,
};
pub(crate) use self::config::{ConfigCommand, GenerateArguments};
pub(crate) use self::demo::{DemoArguments, Scene};
pub(crate) use self::host::HostCommand;
pub(crate) use self::journal::{JournalArguments, JournalCommand, RestoreArguments};
pub(crate) use self::migration::{Limit, MigrationCommand, ReportArguments, RetryArguments, SetArguments};
pub(crate) use self::replica::ReplicaCommand;
pub(crate) use self::store::{ImportArguments, StoreCommand};
use self::strategy::StrategyArguments;
pub(crate) use self::top::TopArguments;
pub(crate) use self::vm::VmCommand;
pub(crate) use self::volume::{PlaceArguments, RemoveArguments, ResizeArguments};

use api::Address;
use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::exit;
use crate::output::Format;
use crate::tunnel::HostAddress;
use crate::units::{parse_rate, parse_size};

/// Moves the disks of running VMs.
#[derive(Debug, Parser)]
#[command(name = "sterna", version, after_help = exit::HELP, max_term_width = 110)]
#[command(subcommand_required = true, arg_required_else_help = true)]
pub(crate) struct Arguments {
    /// The daemon to talk to, here or, by ssh or over TLS (sterna remote), on another machine; by default the one of the same user. Paths that a command
    /// names are of the daemon's machine.
    #[arg(
        long,
        global = true,
        env = "STERNA_HOST",
        value_name = "unix:PATH|ssh://USER@HOST|https://HOST:PORT"
    )]
    pub(crate) host: Option<HostAddress>,
    /// Print JSON instead of text; errors too.
    #[arg(long, global = true)]
    json: bool,
    /// What to log to standard error: a level (error, warn, info, debug, trace) or a filter such as daemon=debug.
    #[arg(long, global = true, env = "STERNA_LOG", value_name = "FILTER", default_value = "info")]
    pub(crate) log: String,
    /// How to log: lines for people, or one JSON object a line.
    #[arg(long, global = true, env = "STERNA_LOG_FORMAT", value_enum, default_value = "text")]
    pub(crate) log_format: LogFormat,
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// How the log is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// For people.
    Text,
    /// For programs.
    Json,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the daemon: serve volumes to guests, and the API to the other commands.
    #[command(after_help = SERVE_HELP)]
    Serve(ServeArguments),
    /// The configuration: check it.
    #[command(subcommand)]
    Config(ConfigCommand),
    /// The journal, which remembers whose each volume is: check and export it.
    #[command(subcommand)]
    Journal(JournalCommand),
    /// The stores that volumes can be in: list them, see what lies there, make volumes of it.
    #[command(subcommand)]
    Store(StoreCommand),
    /// Other hosts: pair this one with them, see how they are connected.
    #[command(subcommand)]
    Host(HostCommand),
    /// Who may use this daemon over TLS: grant, list, revoke.
    #[command(subcommand)]
    Access(AccessCommand),
    /// Daemons that this user asks over TLS: add, list, remove.
    #[command(subcommand)]
    Remote(RemoteCommand),
    /// Volumes: make, list, remove.
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Images that migrations left and that were kept: list, delete.
    #[command(subcommand)]
    Replica(ReplicaCommand),
    /// VMs: add, start, stop, show; take over the disks of one that runs.
    #[command(subcommand)]
    Vm(VmCommand),
    /// Move a volume to another store or another host, or a whole VM to another host, while it works.
    #[command(after_help = MIGRATE_HELP)]
    Migrate(MigrateArguments),
    /// Migrations: list, watch, cancel.
    #[command(subcommand)]
    Migration(MigrationCommand),
    /// Watch the host on the screen: volumes, VMs, migrations, stores and other hosts, and what they do at present.
    #[command(after_help = top::TOP_HELP)]
    Top(TopArguments),
    /// Print what happens on the host, a line each: migrations, volumes, VMs, other hosts.
    #[command(after_help = top::WATCH_HELP)]
    Watch,
    /// Say whether the daemon does all that it is to do, by the exit code as well.
    #[command(after_help = "Example:\n  sterna health --json")]
    Health,
    /// Print the daemon's figures in Prometheus' text format.
    #[command(after_help = "Example:\n  sterna metrics >/var/lib/prometheus/node-exporter/sterna.prom")]
    Metrics,
    /// Watch the disk of a busy guest move between two stores of a temporary daemon, or between two hosts, and be verified.
    #[command(after_help = demo::HELP)]
    Demo(DemoArguments),
    /// Measure Sterna beside the raw disk, QEMU's storage daemon and off-line copies.
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Write manual pages and the shells' completions into a folder: what packages install.
    #[command(hide = true, after_help = config::GENERATE_HELP)]
    Generate(GenerateArguments),
}

impl Command {
    /// Whether it needs a daemon, and does not bring its own.
    pub(crate) fn asks_a_daemon(&self) -> bool {
        !matches!(
            self,
            Self::Serve(_)
                | Self::Config(_)
                | Self::Journal(_)
                | Self::Remote(_)
                | Self::Demo(_)
                | Self::Bench(_)
                | Self::Generate(_)
        )
    }
}

#[derive(Debug, Args)]
pub(crate) struct ServeArguments {
    /// The configuration file.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Where the journal is, and the store if none is configured.
    #[arg(long, value_name = "DIR")]
    pub(crate) data_dir: Option<PathBuf>,
    /// Where the API is served; the volumes' sockets are in the folder `volumes` beside it.
    #[arg(long, value_name = "unix:PATH")]
    pub(crate) api: Option<Address>,
    /// Go on with the clients of the daemon that runs now, which ends: guests wait for a moment, and no connection breaks.
    /// For daemons that no service manager has started: systemctl restart does the same.
    #[arg(long)]
    pub(crate) take_over: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum VolumeCommand {
    /// Make a volume: empty, or a copy of an image.
    #[command(after_help = CREATE_HELP)]
    Create(CreateArguments),
    /// Serve an image where it is: a file, a block device, or what an NBD server serves. `volume remove` leaves it.
    #[command(after_help = ADD_HELP)]
    Add(AddArguments),
    /// List the volumes.
    #[command(visible_alias = "ls", after_help = "Example:\n  sterna volume list")]
    List,
    /// Show one volume: where it is, what clients connect to, what its guest does.
    #[command(after_help = SHOW_HELP)]
    Show(VolumeArguments),
    /// Take over a volume that waits for another host, which is not heard any more: for its word, or for what is missing.
    #[command(after_help = PROMOTE_HELP)]
    Promote(PromoteArguments),
    /// Make a volume larger, while its guest works and also while it moves.
    #[command(after_help = RESIZE_HELP)]
    Resize(ResizeArguments),
    /// Stop serving a volume. Its image is deleted, unless what is in it was yours before (volume add).
    #[command(visible_alias = "rm", after_help = REMOVE_HELP)]
    Remove(RemoveArguments),
}

#[derive(Debug, Args)]
pub(crate) struct VolumeArguments {
    /// Name of the volume.
    pub(crate) name: String,
}

#[derive(Debug, Args)]
pub(crate) struct CreateArguments {
    /// Name of the volume: letters, digits, '.', '_' and '-'.
    pub(crate) name: String,
    /// Size, a multiple of 512 bytes; with --image, by default that of the image, rounded up to 4 KiB.
    #[arg(long, value_parser = parse_size, required_unless_present = "image")]
    pub(crate) size: Option<u64>,
    /// The store that holds the image; it may be left out if there is only one.
    #[arg(long)]
    pub(crate) store: Option<String>,
    /// An image that is copied in, raw or qcow2; its holes stay holes.
    #[arg(long, value_name = "FILE")]
    pub(crate) image: Option<PathBuf>,
    /// Format of the new image; by default that of the store, or raw.
    #[arg(long, value_enum)]
    pub(crate) format: Option<ImageFormat>,
    #[command(flatten)]
    pub(crate) export: ExportArguments,
}

/// The format of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ImageFormat {
    /// The bytes of the disk, one after the other.
    Raw,
    /// QEMU's format of clusters and tables.
    Qcow2,
}

/// Whether a store that both hosts can open is written to directly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SharedTarget {
    /// If it is proved to be the same at both.
    Auto,
    /// Over the link in any case.
    Never,
}

/// How a volume is offered to its clients.
#[derive(Debug, Args)]
pub(crate) struct ExportArguments {
    /// Clients may only read.
    #[arg(long)]
    read_only: bool,
    /// Serve the volume on this port, too, for clients of other hosts; see `[nbd]` of the configuration for TLS.
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<String>,
    /// Connections at a time; by default what the configuration says.
    #[arg(long, value_name = "NUMBER")]
    connections_max: Option<u32>,
    /// Mode of the volume's socket; by default that of the configuration.
    #[arg(long, value_name = "OCTAL")]
    socket_mode: Option<String>,
    /// Owner of the volume's socket; by default that of the configuration.
    #[arg(long, value_name = "USER:GROUP")]
    socket_owner: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct AddArguments {
    /// Name of the volume: letters, digits, '.', '_' and '-'.
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) place: PlaceArguments,
    /// Format of a file; by default what it begins with tells, once and for all.
    #[arg(long, value_enum)]
    pub(crate) format: Option<ImageFormat>,
    /// Also if a migration left there what is an old copy of a volume, or a part of one.
    #[arg(long)]
    pub(crate) fenced: bool,
    #[command(flatten)]
    pub(crate) export: ExportArguments,
}

#[derive(Debug, Args)]
pub(crate) struct MigrateArguments {
    /// Name of the volume, or of the VM: that goes to another host with its memory and its volumes, and to a store of this one
    /// with its volumes alone. Several volumes go to another host as one: all of them, or none. Where both have a name,
    /// volume:NAME and vm:NAME tell them apart.
    #[arg(required = true, value_name = "NAME")]
    pub(crate) names: Vec<String>,
    /// The store to move it to, or another host: its only store, or one of them.
    #[arg(long, value_name = "STORE|HOST[:STORE]")]
    pub(crate) to: String,
    /// Copy at most this fast, for example 200MiB/s; the guest's own writes are not slowed, nor is a VM's memory.
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    pub(crate) bandwidth: Option<u64>,
    /// Keep the source's image, renamed so that nothing starts from it by mistake.
    #[arg(long)]
    pub(crate) keep_source: bool,
    /// Format of the new image; by default that of the store, or that of the image that is moved.
    #[arg(long, value_enum)]
    pub(crate) format: Option<ImageFormat>,
    /// Copy only what the volume's qcow2 image has itself; the new one stands on the same backing file.
    #[arg(long, conflicts_with = "thick")]
    pub(crate) keep_chain: bool,
    /// Let the new image grow as it is written; this is the default.
    #[arg(long, conflicts_with = "thick")]
    thin: bool,
    /// Take all of the new image's space before anything is copied; without room for it, nothing is begun.
    #[arg(long)]
    pub(crate) thick: bool,
    /// Go on serving the volume here, from the other host's store; by default only to clients that stay connected.
    #[arg(long)]
    pub(crate) serve_here: bool,
    /// Copy everything, also if the other host keeps an image of an earlier stay.
    #[arg(long)]
    pub(crate) full: bool,
    /// Whether blocks are written straight to the other host's store where this host can open it, too.
    #[arg(long, value_enum, value_name = "WHEN", default_value = "auto")]
    pub(crate) shared_target: SharedTarget,
    #[command(flatten)]
    pub(crate) strategy: StrategyArguments,
    /// How long a VM may stand still, or guests of a tracked volume be held, in milliseconds.
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    pub(crate) max_downtime: u64,
    /// How many streams carry a VM's memory; by default several if it is large or there are several links.
    #[arg(long, value_name = "N|auto", default_value = "auto", value_parser = parse_streams)]
    pub(crate) memory_streams: Streams,
    /// When a VM may run at the other host; see below for what post-copy costs.
    #[arg(long, value_name = "WAY", value_enum, default_value_t = Memory::PreCopy)]
    pub(crate) memory: Memory,
    /// Return as soon as the migration has begun.
    #[arg(long)]
    pub(crate) detach: bool,
    /// Say what would move where, how long that would take, and all that is in the way; begin nothing.
    #[arg(long, conflicts_with = "detach")]
    pub(crate) dry_run: bool,
}

#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("grounds").required(true).args(["ticket", "force", "without_missing", "restored"]).multiple(true)))]
pub(crate) struct PromoteArguments {
    /// Name of the volume.
    pub(crate) name: String,
    /// What `sterna migration show` prints at the other host: it has released the volume, and nobody else has it.
    #[arg(long, conflicts_with = "force")]
    pub(crate) ticket: Option<String>,
    /// Without a ticket: if the other host goes on with the volume, there are two of it from then on.
    #[arg(long)]
    pub(crate) force: bool,
    /// Of a volume that works here while the rest of it follows (post-copy, three-phase), and whose former host is lost: clients
    /// that read what is missing get I/O errors, and wait for it no longer. For good; what is missing is told by `volume show`. With
    /// --force also if that host answers.
    #[arg(long, conflicts_with = "ticket")]
    pub(crate) without_missing: bool,
    /// Of a volume that is not served since the journal was put back from a backup: its image here is the volume, and no other host
    /// has it. With --force also if another host says otherwise.
    #[arg(long, conflicts_with_all = ["ticket", "without_missing"])]
    pub(crate) restored: bool,
    /// With --restored, of a volume on a device or an export that is larger than the volume was: how large the volume is. It may have
    /// grown since the backup.
    #[arg(long, value_parser = parse_size, requires = "restored")]
    pub(crate) size: Option<u64>,
}

impl From<ImageFormat> for api::ImageFormat {
    fn from(format: ImageFormat) -> Self {
        match format {
            ImageFormat::Raw => Self::Raw,
            ImageFormat::Qcow2 => Self::Qcow2,
        }
    }
}

impl From<SharedTarget> for api::SharedTarget {
    fn from(when: SharedTarget) -> Self {
        match when {
            SharedTarget::Auto => Self::Auto,
            SharedTarget::Never => Self::Never,
        }
    }
}

impl From<ExportArguments> for api::ExportSettings {
    fn from(given: ExportArguments) -> Self {
        Self {
            read_only: given.read_only,
            listen: given.listen,
            connections_max: given.connections_max,
            socket_mode: given.socket_mode,
            socket_owner: given.socket_owner,
        }
    }
}

/// When a VM that moves may run at the other host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Memory {
    /// When all of its memory is there; one that writes faster than it is sent is slowed down.
    PreCopy,
    /// Before that, if it writes faster than it is sent.
    PostCopy,
}

impl From<Memory> for api::Memory {
    fn from(memory: Memory) -> Self {
        match memory {
            Memory::PreCopy => Self::PreCopy,
            Memory::PostCopy => Self::PostCopy,
        }
    }
}

/// How many streams carry a VM's memory; `None`: as many as are worth it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Streams(pub(crate) Option<u8>);

fn parse_streams(text: &str) -> Result<Streams, String> {
    if text == "auto" {
        return Ok(Streams(None));
    }
    let streams = text.parse().ok().filter(|streams| (1..=api::MEMORY_STREAMS_MAX).contains(streams));
    let streams = streams.ok_or_else(|| format!("it must be 1 to {}, or auto", api::MEMORY_STREAMS_MAX))?;
    Ok(Streams(Some(streams)))
}

/// Parses a size in whole MiB that has a least.
fn parse_size_of_at_least(text: &str, bytes_min: u64) -> Result<u64, String> {
    let size = parse_size(text).map_err(|error| error.to_string())?;
    if size < bytes_min || !size.is_multiple_of(1 << 20) {
        return Err(format!("it must be a multiple of 1MiB, and at least {}MiB", bytes_min >> 20));
    }
    Ok(size)
}

impl Arguments {
    /// How results are printed.
    pub(crate) fn format(&self) -> Format {
        if self.json { Format::Json } else { Format::Text }
    }
}

const SERVE_HELP: &str = "\
Examples:
  sterna serve
  sterna serve --config /etc/sterna/sterna.toml
  sterna serve --data-dir /tmp/try/data --api unix:/tmp/try/sterna.sock

Without --config: /etc/sterna/sterna.toml for root, ~/.config/sterna/sterna.toml for others, if it exists.

  data_dir = \"/var/lib/sterna\"
  api = \"unix:/run/sterna/sterna.sock\"
  engine = \"auto\"                  # or \"io_uring\", \"threads\"
  [volume_sockets]                 # who may connect to volumes; [api_socket]: who may use the API
  mode = \"0660\"
  owner = \"root:kvm\"
  [hosts]                          # where other hosts reach this one
  listen = [\"0.0.0.0:7423\"]
  [api_tls]                        # the API over TLS, for those whom sterna access lets in
  listen = \"0.0.0.0:7425\"
  [web]                            # the page for browsers, besides on the API's socket
  listen = \"127.0.0.1:7424\"
  [hooks]                          # run on both hosts when a machine changes its host
  before = \"/etc/sterna/before\"
  [stores.fast]                    # a folder; new images there are raw, or
  path = \"/srv/fast\"
  format = \"qcow2\"
  [stores.lv]                      # a block device: one volume at a time
  device = \"/dev/vg/lv\"
  [stores.far]                     # what another NBD server serves: likewise
  nbd = \"nbd://host/export\"
  [limits]
  mirror_wait_max_ms = 1000        # longest that a migration may hold a guest's write
  stop_wait_max_ms = 10000         # longest that a stopping daemon waits for a volume's requests
  migrations_per_host = 4          # under way at a time; more wait for their turn
  migrations_per_store = 2         # of these, that use one store

SIGTERM and Ctrl-C stop in order: requests in flight end, stores are flushed, a migration before its commit point is
ended with the volume at its source. A second signal stops at once; the next start puts everything right.";

const CREATE_HELP: &str = "\
Examples:
  sterna volume create scratch --size 4GiB
  sterna volume create web1 --store fast --image debian-12.qcow2 --size 20GiB
  sterna volume create web2 --store fast --size 20GiB --format qcow2 --socket-owner :kvm --socket-mode 0660";

const ADD_HELP: &str = "\
Examples:
  sterna volume add web1 --image /var/lib/libvirt/images/web1.qcow2
  sterna volume add web2 --device /dev/vg/web2
  sterna volume add web3 --nbd nbd://storage.example/web3 --read-only --listen 192.0.2.1:10809

The format of a file is told by its first bytes, once. A raw image that begins as another format's is refused, because a
guest could have written that: say --format raw if it is one.";

const SHOW_HELP: &str = "\
Examples:
  sterna volume show web1
  qemu-img info \"$(sterna volume show web1 --json | jq -r .uri)\"";

const RESIZE_HELP: &str = "\
Examples:
  sterna volume resize web1 40GiB
  lvextend -L 40G vg/web2 && sterna volume resize web2 40GiB

A device, or the export of another NBD server, must have become larger before. If the volume is moving, the store that it
moves to becomes larger as well; if that cannot, nothing changes.

What is new reads as zeroes. NBD tells the size of a disk to who connects, so guests see it when their client connects
anew. How to do that with QEMU while the machine runs is in docs/nbd.md.";

const PROMOTE_HELP: &str = "\
Examples:
  sterna volume promote web1 --ticket sterna-ticket-1-…
  sterna volume promote web1 --force
  sterna volume promote web1 --without-missing
  sterna volume promote web1 --restored

With a ticket or by force a volume is taken over that is all here: its source had everything copied, and was about to hand it
over. If the source comes back, it learns of it. --without-missing is for one that works here already, and was handed over
before all of it had come (post-copy, three-phase). --restored is for one that is not served since the journal was put back from a
backup (`sterna journal restore`): if another host has it, there are two of it from then on, and what was written there is not here.";

const REMOVE_HELP: &str = "\
Examples:
  sterna volume remove scratch
  sterna volume remove web1 --keep-image";

const MIGRATE_HELP: &str = "\
Examples:
  sterna migrate web1 --to fast
  sterna migrate web1 --to slow --bandwidth 200MiB/s --keep-source
  sterna migrate web1 --to fast --format raw --thick
  sterna migrate web1 --to fast --keep-chain
  sterna migrate web1 --to fast --detach --json
  sterna migrate web1 --to rack3-b --memory post-copy
  sterna migrate web1 --to rack3-b --dry-run
  sterna migrate db-data db-log --to rack3-b:fast
  sterna migrate vm:db --to fast               # all its disks, one after the other
  sterna --host ssh://root@rack3-a migrate web1 --to rack3-b

With --memory post-copy a machine that writes faster than its memory is sent runs at the other host before all of it is
there; the rest follows. From the switch-over until the last of it has come, losing either host, or the link for good, is
losing its memory, as if its power had been cut; so is ending either daemon just at the switch-over, while its devices go
over, or with QEMU 7.2 just before the end. Its disks are whole: it is started again where they are. Without it such a machine is slowed down instead, or stays where it is.

The command waits for the end and exits with 0 only if the volume is at the target. Ctrl-C cancels the migration and
waits until that is done; a second Ctrl-C stops waiting. With --dry-run it exits with 0 if the migration could begin,
and with 4 if something is in the way.";

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, Parser as _};

    use super::Arguments;

    #[test]
    fn command_line_is_consistent_and_every_leaf_has_an_example() {
        let mut command = Arguments::command();
        command.clone().debug_assert();
        command.build();
        let mut folders = vec![command];
        while let Some(folder) = folders.pop() {
            for command in folder.get_subcommands().filter(|command| command.get_name() != "help") {
                if command.has_subcommands() {
                    folders.push(command.clone());
                    continue;
                }
                let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
                assert!(help.contains("Example"), "{} has no example", command.get_name());
            }
        }
    }

    #[test]
    fn sizes_and_addresses_are_checked_before_anything_is_done() {
        for line in [
            "sterna volume create a --size 4Gib",
            "sterna volume create a",
            "sterna migrate a --to b --bandwidth 10",
            "sterna --host tcp:1 store list",
            "sterna frobnicate",
        ] {
            assert!(Arguments::try_parse_from(line.split(' ')).is_err(), "{line}");
        }
        for line in ["sterna volume create a --image f", "sterna migrate a --to b --bandwidth 10MiB/s --json"]
        {
            assert!(Arguments::try_parse_from(line.split(' ')).is_ok(), "{line}");
        }
    }
}
