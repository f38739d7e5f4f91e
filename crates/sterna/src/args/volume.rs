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

pub(super) const RESIZE_HELP: &str = "\
Examples:
  sterna volume resize web1 40GiB
  lvextend -L 40G vg/web2 && sterna volume resize web2 40GiB

Enlarge a device, or the export of another NBD server, first. If the volume is moving, its image at the target grows as
well; if that fails, nothing changes.

The new part reads as zeroes. NBD clients get the size when they connect, so guests see the new size once their client
reconnects. docs/nbd.md shows how to do that with QEMU while the VM runs.";
