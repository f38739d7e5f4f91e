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
    #[arg(value_parser = parse_size)]
    pub(crate) size: u64,
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
