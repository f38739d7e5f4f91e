//! Arguments of `sterna volume`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use console::units::parse_size;

use super::{ExportArguments, ImageFormat};

/// The place of an image to serve.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct PlaceArguments {
    /// The file to serve.
    #[arg(long, value_name = "FILE")]
    pub(crate) image: Option<PathBuf>,
    /// The block device to serve.
    #[arg(long, value_name = "DEVICE")]
    pub(crate) device: Option<PathBuf>,
    /// The export of another NBD server to serve.
    #[arg(long, value_name = "URI")]
    pub(crate) nbd: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct CloneArguments {
    /// Name of the volume to copy.
    pub(crate) name: String,
    /// Name of the new volume: letters, digits, '.', '_' and '-'.
    pub(crate) new: String,
    /// The store for the new image; by default that of the volume.
    #[arg(long)]
    pub(crate) store: Option<String>,
    /// Format of the new image; by default the volume's, or the store's.
    #[arg(long, value_enum)]
    pub(crate) format: Option<ImageFormat>,
    #[command(flatten)]
    pub(crate) export: ExportArguments,
}

#[derive(Debug, Args)]
pub(crate) struct ResizeArguments {
    /// Name of the volume.
    pub(crate) name: String,
    /// New size, a multiple of 4 KiB; not less than the present size.
    #[arg(value_parser = parse_size, allow_negative_numbers = true)]
    pub(crate) size: u64,
    /// Accept a size that is larger than the whole store. A volume never shrinks.
    #[arg(long)]
    pub(crate) beyond_store: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RemoveArguments {
    /// Name of the volume.
    pub(crate) name: String,
    /// Remove it even while clients are connected; they are disconnected.
    #[arg(long)]
    pub(crate) force: bool,
    /// Keep the image. An image that you had before (volume add) is always kept.
    #[arg(long)]
    pub(crate) keep_image: bool,
    /// Delete the image, even if you had it before.
    #[arg(long, conflicts_with = "keep_image")]
    pub(crate) delete_image: bool,
    /// Only end the forwarding of a volume that another host has. The order is refused if this host has the volume.
    #[arg(long, conflicts_with_all = ["keep_image", "delete_image"])]
    pub(crate) only_forwarding: bool,
}

#[derive(Debug, Args)]
pub(crate) struct AttachArguments {
    /// Name of the volume.
    pub(crate) name: String,
    /// The paired host that offers it to its clients.
    #[arg(long, value_name = "HOST")]
    pub(crate) at: String,
    /// Clients there may only read.
    #[arg(long)]
    pub(crate) read_only: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DetachArguments {
    /// Name of the volume.
    pub(crate) name: String,
    /// The host that offers it; the default is this host.
    #[arg(long, value_name = "HOST")]
    pub(crate) at: Option<String>,
    /// Detach it even while clients are connected there, which are disconnected, and even if that host does not answer.
    #[arg(long)]
    pub(crate) force: bool,
}

#[derive(Debug, Args)]
pub(crate) struct YieldArguments {
    /// Name of a volume, its VM, or the standby. All volumes of the standby are given up.
    pub(crate) name: String,
    /// Give them up even while clients are connected; they are disconnected.
    #[arg(long)]
    pub(crate) force: bool,
    /// At the first host: give them up although the other host has not agreed, because it serves them.
    #[arg(long)]
    pub(crate) unasked: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum DivergenceCommand {
    /// List what only this host has: what it wrote before it lost its volumes, and the other host has not received.
    #[command(visible_alias = "ls", after_help = "Example:\n  sterna volume divergence list")]
    List,
    /// Write it to a new file: a raw image with these blocks at their places, and holes elsewhere.
    #[command(after_help = DIVERGENCE_EXPORT_HELP)]
    Export {
        /// Name of the divergence.
        name: String,
        /// The file, which must not exist.
        file: PathBuf,
    },
    /// Release it: it is deleted.
    #[command(after_help = "Example:\n  sterna volume divergence drop web1")]
    Drop {
        /// Name of the divergence.
        name: String,
    },
}

pub(super) const DIVERGENCE_HELP: &str = "\
Examples:
  sterna volume divergence list
  sterna volume divergence export web1 /var/tmp/web1-lost.img
  sterna volume divergence drop web1

After a promotion the former owner may have writes that the other host has never received. They are kept until you release them by
name, also when the direction is turned round (sterna standby reprotect).";

const DIVERGENCE_EXPORT_HELP: &str = "\
Example:
  sterna volume divergence export web1 /var/tmp/web1-lost.img --json | jq '.ranges[]'

With --json the ranges are listed that this host may have written. If this host was killed, they are larger than what it has
written: the other blocks have what both hosts had. If nothing is known of what was written, the whole image is exported.";

pub(super) const ATTACH_HELP: &str = "\
Examples:
  sterna volume attach web1 --at beta
  sterna volume attach iso --at beta --read-only

The other host offers the volume under the same name, and forwards each request to the host that has it, also after the volume has
moved. So a VM whose disks are volumes can be migrated as over shared storage. If the volume itself moves to that host, the attachment
has become the volume. It lasts across restarts of both hosts.";

pub(super) const DETACH_HELP: &str = "\
Examples:
  sterna volume detach web1 --at beta
  sterna volume detach web1                 at the host that offers it

While clients are connected there, this is refused.";

pub(super) const YIELD_HELP: &str = "\
Example:
  sterna volume yield web1

The images are kept, and named. What only they have: sterna volume divergence list. To make them a standby of the other host's
volumes, there: sterna standby reprotect. Remove the VM first (sterna vm remove): the other host has it.
At the host that has promoted its standby, this gives the promotion up: the first host serves the volumes again.";

pub(super) const PROMOTE_HELP: &str = "\
Examples:
  sterna volume promote web1 --ticket sterna-ticket-1-…
  sterna volume promote web1 --force
  sterna volume promote web1 --without-missing
  sterna volume promote web1 --restored
  sterna volume promote web1 --unasked
  sterna volume promote web1 --exchanged
  sterna volume promote --exchanged --store disks

--ticket and --force are for a complete copy whose source was about to hand it over. If the source comes back, it learns of
the promotion. --without-missing is for an incomplete volume that is served here already (post-copy, three-phase). --restored is
for an unconfirmed volume after `sterna journal restore`. If another host has the volume, there are then two copies of it, and
this one lacks the writes of that host. --exchanged is for a volume whose image was put back from a backup, or copied to another
disk, under its name; with --force for one whose images both hosts of a handover have lost.";

pub(super) const CLONE_HELP: &str = "\
Examples:
  sterna volume clone web1 web1-test
  sterna volume clone web1 web1-test --store archive

The copy has everything that the guest was told to be written before the order, and is what the disk would be after a power cut at
one instant: file systems and databases recover from that. To have it tidy, let the guest freeze its file systems first (fsfreeze).
Within one btrfs or XFS the two images share their blocks, and the copy is there at once. Elsewhere the volume is copied while
its guest works; to cancel that: sterna volume remove NEW. Afterwards neither volume has to do with the other one.";

pub(super) const RESIZE_HELP: &str = "\
Examples:
  sterna volume resize web1 40GiB
  lvextend -L 40G vg/web2 && sterna volume resize web2 40GiB

Enlarge a device, or the export of another NBD server, first. If the volume is moving, its image at the target grows as
well; if that fails, nothing changes.

The new part reads as zeroes. NBD clients get the size when they connect, so guests see the new size once their client
reconnects. docs/nbd.md shows how to do that with QEMU while the VM runs.";
