//! The command line.

mod access;
mod config;
mod evacuate;
mod host;
mod journal;
mod libvirt;
mod migrate;
mod migration;
mod notices;
mod pace;
mod replica;
mod snapshot;
mod standby;
mod store;
mod strategy;
mod top;
mod vm;
mod volume;

use std::ffi::OsString;
use std::path::PathBuf;

pub(crate) use self::access::{AccessCommand, AddRemoteArguments, RemoteCommand};
pub(crate) use self::config::{ConfigCommand, GenerateArguments};
pub(crate) use self::evacuate::EvacuateArguments;
pub(crate) use self::host::HostCommand;
pub(crate) use self::journal::{JournalArguments, JournalCommand, RestoreArguments};
pub(crate) use self::libvirt::{LibvirtCommand, MigrateDomainArguments};
pub(crate) use self::migrate::MigrateArguments;
pub(crate) use self::migration::{Limit, MigrationCommand, ReportArguments, RetryArguments, SetArguments};
pub(crate) use self::notices::NoticesCommand;
pub(crate) use self::pace::PaceArguments;
pub(crate) use self::replica::ReplicaCommand;
pub(crate) use self::snapshot::{HowToKeep, RevertArguments, SnapshotArguments, SnapshotsArguments};
pub(crate) use self::standby::{
    AddStandbyArguments, PromoteStandbyArguments, StandbyCommand, TestStandbyArguments,
};
pub(crate) use self::store::{ImportArguments, StoreCommand};
pub(crate) use self::top::TopArguments;
pub(crate) use self::vm::{VmCommand, YesNo};
pub(crate) use self::volume::{
    AttachArguments, CloneArguments, DetachArguments, DivergenceCommand, PlaceArguments, RemoveArguments,
    ResizeArguments, YieldArguments,
};

use api::Address;
use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::exit;
use crate::output::Format;
use crate::tunnel::HostAddress;
use console::units::parse_size;

/// Moves the disks of running VMs.
#[derive(Debug, Parser)]
#[command(name = "sterna", version, after_help = exit::HELP, max_term_width = 110)]
#[command(subcommand_required = true, arg_required_else_help = true)]
pub(crate) struct Arguments {
    /// Address of the daemon: on this machine, or on another one by ssh or over TLS (sterna remote). The default is this user's
    /// daemon or, without one, the system's. Paths in commands are paths of the daemon's machine.
    #[arg(
        long,
        global = true,
        env = "STERNA_HOST",
        value_name = "unix:PATH|ssh://USER@HOST|https://HOST:PORT"
    )]
    pub(crate) host: Option<HostAddress>,
    /// Print JSON instead of text, also for errors.
    #[arg(long, global = true)]
    json: bool,
    /// What to log to standard error: a level (error, warn, info, debug, trace) or a filter such as daemon=debug.
    #[arg(long, global = true, env = "STERNA_LOG", value_name = "FILTER", default_value = "info")]
    pub(crate) log: String,
    /// Format of the log: text, or one JSON object a line.
    #[arg(long, global = true, env = "STERNA_LOG_FORMAT", value_enum, default_value = "text")]
    pub(crate) log_format: LogFormat,
    /// The command to run.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Format of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// Lines of text, for users.
    Text,
    /// One JSON object a line.
    Json,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the daemon: serve volumes to guests, and the API to the other commands.
    #[command(after_help = SERVE_HELP)]
    Serve(ServeArguments),
    /// Check a configuration file.
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Check, export and restore the journal, which records the owner of each volume.
    #[command(subcommand)]
    Journal(JournalCommand),
    /// Manage stores: list them and their files, make volumes of images.
    #[command(subcommand)]
    Store(StoreCommand),
    /// Manage other hosts: pair this one with them, show the connections.
    #[command(subcommand)]
    Host(HostCommand),
    /// Manage access to this daemon over TLS: grant, list, revoke.
    #[command(subcommand)]
    Access(AccessCommand),
    /// Print a link that gives one browser the page's buttons: migrate, pause, resume, cancel, retry.
    #[command(after_help = access::PAGE_HELP)]
    Page,
    /// Manage the daemons that this user reaches over TLS: add, list, remove.
    #[command(subcommand)]
    Remote(RemoteCommand),
    /// Manage volumes: make, list, resize, remove.
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// List and delete the kept images of former migrations.
    #[command(subcommand)]
    Replica(ReplicaCommand),
    /// Keep copies of volumes at other hosts that are seconds old, and go on there when a host is lost.
    #[command(subcommand)]
    Standby(StandbyCommand),
    /// Manage VMs: add, start, stop, show; adopt the disks of a running VM.
    #[command(subcommand)]
    Vm(VmCommand),
    /// Move a volume to another store or host, or a whole VM to another host, while it works.
    #[command(after_help = MIGRATE_HELP)]
    Migrate(MigrateArguments),
    /// Move domains of libvirt with their disks.
    #[command(subcommand)]
    Libvirt(LibvirtCommand),
    /// Empty this host: everything moves to other hosts, in order, against a deadline.
    #[command(after_help = evacuate::EVACUATE_HELP)]
    Evacuate(EvacuateArguments),
    /// Manage migrations: list, watch, pause, cancel, repeat.
    #[command(subcommand)]
    Migration(MigrationCommand),
    /// Watch the host on the screen: volumes, VMs, migrations, stores and other hosts, with their present load.
    #[command(after_help = top::TOP_HELP)]
    Top(TopArguments),
    /// Print a line for each event on the host: migrations, volumes, VMs, other hosts.
    #[command(after_help = top::WATCH_HELP)]
    Watch,
    /// Print the daemon's problems; the exit code says whether there are any.
    #[command(after_help = "Example:\n  sterna health --json")]
    Health,
    /// Show where the daemon sends notices of its problems, and try it.
    #[command(subcommand)]
    Notices(NoticesCommand),
    /// Print the daemon's figures in Prometheus' text format.
    #[command(after_help = "Example:\n  sterna metrics >/var/lib/prometheus/node-exporter/sterna.prom")]
    Metrics,
    /// Show how the disk of a busy guest moves between two stores or hosts of temporary daemons, and verify it.
    #[command(disable_help_flag = true, after_help = DEMO_HELP)]
    Demo(LabArguments),
    /// Measure Sterna beside the raw disk, QEMU's storage daemon and off-line copies.
    #[command(disable_help_flag = true, after_help = BENCH_HELP)]
    Bench(LabArguments),
    /// Write manual pages and shell completions for packages into a folder.
    #[command(hide = true, after_help = config::GENERATE_HELP)]
    Generate(GenerateArguments),
}

impl Command {
    /// Returns whether the command needs a running daemon.
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
    /// Path of the configuration file.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// The folder of the journal, and of the store if none is configured.
    #[arg(long, value_name = "DIR")]
    pub(crate) data_dir: Option<PathBuf>,
    /// The address of the API; the volumes' sockets are in the folder `volumes` beside it.
    #[arg(long, value_name = "unix:PATH")]
    pub(crate) api: Option<Address>,
    /// Take over the clients of the running daemon, which then ends: guests wait for a moment, and no connection breaks. Use it
    /// for daemons without a service manager; systemctl restart does the same.
    #[arg(long)]
    pub(crate) take_over: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum VolumeCommand {
    /// Make a volume: empty, or a copy of an image.
    #[command(after_help = CREATE_HELP)]
    Create(CreateArguments),
    /// Make a volume that is a copy of another one as it is now, also while a guest uses that.
    #[command(after_help = volume::CLONE_HELP)]
    Clone(CloneArguments),
    /// Take snapshots of volumes at one instant, also while guests use them.
    #[command(after_help = snapshot::SNAPSHOT_HELP)]
    Snapshot(SnapshotArguments),
    /// List the snapshots of a volume, or of all.
    #[command(after_help = snapshot::SNAPSHOTS_HELP)]
    Snapshots(SnapshotsArguments),
    /// Make a volume what it was at a snapshot.
    #[command(after_help = snapshot::REVERT_HELP)]
    Revert(RevertArguments),
    /// Serve an existing image in place: a file, a block device, or the export of an NBD server. `volume remove` leaves it.
    #[command(after_help = ADD_HELP)]
    Add(AddArguments),
    /// List the volumes of the host.
    #[command(visible_alias = "ls", after_help = "Example:\n  sterna volume list")]
    List,
    /// Show one volume: its image, its address for clients, its load.
    #[command(after_help = SHOW_HELP)]
    Show(VolumeArguments),
    /// Make this host the owner of a volume whose source, target or former host does not answer.
    #[command(after_help = volume::PROMOTE_HELP)]
    Promote(PromoteArguments),
    /// Make a volume larger while its guest works, also while it moves.
    #[command(after_help = volume::RESIZE_HELP)]
    Resize(ResizeArguments),
    /// Remove a volume. Its image is deleted, unless you had it before (volume add).
    #[command(visible_alias = "rm", after_help = REMOVE_HELP)]
    Remove(RemoveArguments),
    /// Let another host offer a volume of this host to its clients. It forwards their requests.
    #[command(after_help = volume::ATTACH_HELP)]
    Attach(AttachArguments),
    /// End that: at the host that has the volume, or at the one that offers it.
    #[command(after_help = volume::DETACH_HELP)]
    Detach(DetachArguments),
    /// After a promotion, give up the volumes at one of the two hosts that have them: the other one's are the volumes.
    #[command(after_help = volume::YIELD_HELP)]
    Yield(YieldArguments),
    /// What only this host has of volumes that it has given up after a promotion.
    #[command(subcommand, after_help = volume::DIVERGENCE_HELP)]
    Divergence(DivergenceCommand),
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
    /// Size, a multiple of 512 bytes; with --image, the default is the image's size, rounded up to 4 KiB.
    #[arg(long, value_parser = parse_size, required_unless_present = "image", allow_hyphen_values = true)]
    pub(crate) size: Option<u64>,
    /// The store for the image; optional if there is only one.
    #[arg(long)]
    pub(crate) store: Option<String>,
    /// An image to copy in, raw or qcow2; its holes stay holes.
    #[arg(long, value_name = "FILE")]
    pub(crate) image: Option<PathBuf>,
    /// Format of the new image; the default is the store's format, or raw.
    #[arg(long, value_enum)]
    pub(crate) format: Option<ImageFormat>,
    #[command(flatten)]
    pub(crate) export: ExportArguments,
}

/// The format of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ImageFormat {
    /// The bytes of the disk, without any metadata.
    Raw,
    /// QEMU's qcow2 format.
    Qcow2,
}

/// How a volume is offered to its clients.
#[derive(Debug, Args)]
pub(crate) struct ExportArguments {
    /// Allow clients only to read.
    #[arg(long)]
    read_only: bool,
    /// Serve the volume on this port as well, for clients of other machines; see `[nbd]` of the configuration for TLS.
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<String>,
    /// Largest number of connections at a time; the default is in the configuration.
    #[arg(long, value_name = "NUMBER")]
    connections_max: Option<u32>,
    /// Mode of the volume's socket; the default is in the configuration.
    #[arg(long, value_name = "OCTAL")]
    socket_mode: Option<String>,
    /// Owner of the volume's socket; the default is in the configuration.
    #[arg(long, value_name = "USER:GROUP")]
    socket_owner: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct AddArguments {
    /// Name of the volume: letters, digits, '.', '_' and '-'.
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) place: PlaceArguments,
    /// Format of a file; by default recognised by its first bytes, once.
    #[arg(long, value_enum)]
    pub(crate) format: Option<ImageFormat>,
    /// Add the image even if it is marked as an old or partial copy of a volume.
    #[arg(long)]
    pub(crate) fenced: bool,
    #[command(flatten)]
    pub(crate) export: ExportArguments,
}

#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("grounds").required(true).args(["ticket", "force", "without_missing", "restored", "exchanged", "unasked"]).multiple(true)))]
pub(crate) struct PromoteArguments {
    /// Name of the volume.
    #[arg(required_unless_present = "store")]
    pub(crate) name: Option<String>,
    /// Accept, together with --exchanged, the present images of all failed volumes of this store.
    #[arg(long, requires = "exchanged", conflicts_with_all = ["name", "force"])]
    pub(crate) store: Option<String>,
    /// The ticket that `sterna migration show` prints at the other host. It proves that the host has released the volume.
    #[arg(long, conflicts_with = "force")]
    pub(crate) ticket: Option<String>,
    /// Promote without a ticket, or take back a volume that left for a lost host. If the other host serves it, there are two copies.
    #[arg(long)]
    pub(crate) force: bool,
    /// For an incomplete volume (post-copy, three-phase) whose former host is lost: reads of missing blocks become I/O errors
    /// instead of waiting. This is final; `volume show` lists the missing ranges. With --force even if that host answers.
    #[arg(long, conflicts_with = "ticket")]
    pub(crate) without_missing: bool,
    /// For an unconfirmed volume after the journal was restored: its image here is the volume, and no other host has it. With
    /// --force even if another host contradicts.
    #[arg(long, conflicts_with_all = ["ticket", "without_missing"])]
    pub(crate) restored: bool,
    /// For a volume that is not served because another file or device has the name of its image: accept that one as the image. It
    /// may be a backup that was put back, or be on a disk to which the store was copied. Also for a complete copy that waits for its
    /// source, and an image that a volume has left. With --force the volume is also promoted or taken back, from that file.
    #[arg(long, conflicts_with_all = ["ticket", "without_missing", "restored"])]
    pub(crate) exchanged: bool,
    /// For a volume that waits for the host of its standby: serve it, although that host does not say whether the standby was promoted.
    /// With --force even if it says so: then both hosts have the volume.
    #[arg(long, conflicts_with_all = ["ticket", "without_missing", "restored", "exchanged", "store"])]
    pub(crate) unasked: bool,
    /// With --restored, for a volume on a larger device or export: the size of the volume. It may have grown since the backup.
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

/// Arguments of another program, `sterna-lab`, which parses them.
#[derive(Debug, Args)]
pub(crate) struct LabArguments {
    #[arg(value_name = "ARGUMENT", trailing_var_arg = true, allow_hyphen_values = true)]
    _arguments: Vec<OsString>,
}

impl Arguments {
    pub(crate) fn format(&self) -> Format {
        if self.json { Format::Json } else { Format::Text }
    }
}

const DEMO_HELP: &str = "\
Examples:
  sterna demo
  sterna demo --hosts --vm
  sterna demo --help";

const BENCH_HELP: &str = "\
Examples:
  sterna bench nbd
  sterna bench --help";

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
  [api_tls]                        # the API over TLS, for keys that sterna access has granted
  listen = \"0.0.0.0:7425\"
  [web]                            # the page for browsers, besides on the API's socket
  listen = \"127.0.0.1:7424\"
  [hooks]                          # programs that run on both hosts when a machine changes its host
  before = \"/etc/sterna/before\"
  [stores.fast]                    # a folder; new images there are raw, or
  path = \"/srv/fast\"
  format = \"qcow2\"
  [stores.lv]                      # a block device: one volume at a time
  device = \"/dev/vg/lv\"
  [stores.far]                     # the export of another NBD server: one volume at a time
  nbd = \"nbd://host/export\"
  [limits]
  mirror_wait_max_ms = 1000        # longest that a migration may hold a guest's write
  stop_wait_max_ms = 10000         # longest that a stopping daemon waits for a volume's requests
  migrations_per_host = 4          # under way at a time; more are queued
  migrations_per_store = 2         # of these, migrations that use one store

SIGTERM and Ctrl-C stop in order: requests in flight end, stores are flushed, a migration before its commit point is
ended with the volume at its source. A second signal stops at once, as a crash; the next start recovers.";

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

The format of a file is recognised by its first bytes, once. A raw image that begins as another format is refused, because a
guest could have written these bytes. Give --format raw if it is a raw image.";

const SHOW_HELP: &str = "\
Examples:
  sterna volume show web1
  qemu-img info \"$(sterna volume show web1 --json | jq -r .uri)\"";

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

With --memory post-copy a machine that writes faster than its memory is sent runs at the other host before all of its
memory has arrived; the rest follows. From the switch-over until the last page has arrived, losing either host, or the link
for good, loses its memory, as by a power cut. Killing either daemon just at the switch-over, while the devices are sent, does
so as well, and with QEMU 7.2 also just before the end. Its disks stay complete, and it can be started again from them. Without
post-copy such a machine is slowed down, or stays where it is.

The command waits for the end and exits with 0 only if the volume is at the target. Ctrl-C cancels the migration and
waits until that is done; a second Ctrl-C stops waiting. With --dry-run it exits with 0 if the migration could begin,
and with 4 if there are obstacles.";

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
