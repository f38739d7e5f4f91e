//! The command line of `sterna libvirt`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::pace::PaceArguments;

#[derive(Debug, Subcommand)]
pub(crate) enum LibvirtCommand {
    /// Move a domain whose disks are volumes to another host: its disks by this daemon, its memory by `virsh migrate`.
    #[command(after_help = MIGRATE_HELP)]
    Migrate(MigrateDomainArguments),
}

#[derive(Debug, Args)]
pub(crate) struct MigrateDomainArguments {
    /// Name or UUID of the domain.
    pub(crate) domain: String,
    /// The other host, with a store for the disks if it has several.
    #[arg(long, value_name = "HOST[:STORE]")]
    pub(crate) to: String,
    /// Move the memory first. Until the disks have followed, the guest uses them over the link.
    #[arg(long, conflicts_with = "at")]
    pub(crate) memory_first: bool,
    /// libvirt at this host.
    #[arg(long, value_name = "URI", default_value = "qemu:///system")]
    pub(crate) connect: String,
    /// libvirt at the other host. The default is qemu+ssh://ADDRESS/system with the address by which this host is paired with it.
    #[arg(long, value_name = "URI")]
    pub(crate) to_uri: Option<String>,
    /// The folder of the volumes' sockets at the other host. The default is that of this host.
    #[arg(long, value_name = "FOLDER", value_parser = parse_folder)]
    pub(crate) sockets: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) pace: PaceArguments,
    /// Print the steps, what moves where, the expected time, and every obstacle; begin nothing.
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Further options of `virsh migrate`, for example --migrateuri tcp://192.0.2.7 --auto-converge.
    #[arg(last = true, value_name = "OPTION", allow_hyphen_values = true)]
    pub(crate) options: Vec<String>,
}

fn parse_folder(text: &str) -> Result<PathBuf, String> {
    let folder = PathBuf::from(text);
    if folder.is_absolute() {
        Ok(folder)
    } else {
        Err("an absolute path of the other host is needed".to_owned())
    }
}

const MIGRATE_HELP: &str = "\
Examples:
  sterna libvirt migrate web1 --to rack3-b
  sterna libvirt migrate web1 --to rack3-b:fast --memory-first
  sterna libvirt migrate web1 --to rack3-b --dry-run
  sterna libvirt migrate web1 --to rack3-b -- --auto-converge --parallel

The disks move first, all together, while the guest uses them here; then its memory moves. If the command ends early for whatever
reason, give it again: it goes on with what is missing. Ctrl-C cancels the step under way. A domain that is shut off moves, too.
virsh (libvirt-clients) must be installed here, and must reach the other host's libvirt without a password.";
