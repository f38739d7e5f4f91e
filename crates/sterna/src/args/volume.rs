//! The command line of `sterna volume`: what does not fit beside the commands.

use std::path::PathBuf;

use clap::Args;

use crate::units::parse_size;

/// Where an image is that is to be served there.
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
    /// Its new size, a multiple of 4 KiB; at least the size that it has.
    #[arg(value_parser = parse_size)]
    pub(crate) size: u64,
}

#[derive(Debug, Args)]
pub(crate) struct RemoveArguments {
    /// Name of the volume.
    pub(crate) name: String,
    /// Also when clients are connected: they are cut off.
    #[arg(long)]
    pub(crate) force: bool,
    /// Leave the image in its store. One whose content was yours before (volume add) is left in any case.
    #[arg(long)]
    pub(crate) keep_image: bool,
    /// Delete the image from its store, also one whose content was yours before.
    #[arg(long, conflicts_with = "keep_image")]
    pub(crate) delete_image: bool,
}
