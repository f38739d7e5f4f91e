//! Arguments of `sterna volume`.

use std::path::PathBuf;

use clap::Args;

use console::units::parse_size;

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
}

#[derive(Debug, Args)]
pub(crate) struct YieldArguments {
    /// Name of a volume, its VM, or the standby. All volumes of the standby are given up.
    pub(crate) name: String,
    /// Give them up even while clients are connected; they are disconnected.
    #[arg(long)]
    pub(crate) force: bool,
}

pub(super) const YIELD_HELP: &str = "\
Example:
  sterna volume yield web1

The images are kept, and named: what only they have is lost with them. Remove the VM first (sterna vm remove): the other host has it.
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

pub(super) const RESIZE_HELP: &str = "\
Examples:
  sterna volume resize web1 40GiB
  lvextend -L 40G vg/web2 && sterna volume resize web2 40GiB

Enlarge a device, or the export of another NBD server, first. If the volume is moving, its image at the target grows as
well; if that fails, nothing changes.

The new part reads as zeroes. NBD clients get the size when they connect, so guests see the new size once their client
reconnects. docs/nbd.md shows how to do that with QEMU while the VM runs.";
