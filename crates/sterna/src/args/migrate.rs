//! The command line of `sterna migrate`.

use clap::{Args, ValueEnum};

use super::ImageFormat;
use super::pace::PaceArguments;
use super::strategy::StrategyArguments;

#[derive(Debug, Args)]
pub(crate) struct MigrateArguments {
    /// Name of the volume or VM. A VM moves to another host with its memory and volumes, a stopped one without memory, and to a
    /// store of this host with its volumes alone. Several volumes move to another host together: all or none. If a volume and a VM have the same
    /// name, write volume:NAME or vm:NAME.
    #[arg(required = true, value_name = "NAME")]
    pub(crate) names: Vec<String>,
    /// The target store, or another host: its only store, or one of them.
    #[arg(long, value_name = "STORE|HOST[:STORE]")]
    pub(crate) to: String,
    #[command(flatten)]
    pub(crate) pace: PaceArguments,
    /// Keep the source's image under another name, so that nothing starts from it by mistake.
    #[arg(long)]
    pub(crate) keep_source: bool,
    /// Format of the new image; the default is the store's format, or that of the present image.
    #[arg(long, value_enum)]
    pub(crate) format: Option<ImageFormat>,
    /// Copy only the data of the volume's qcow2 image itself; the new image uses the same backing file.
    #[arg(long, conflicts_with = "thick")]
    pub(crate) keep_chain: bool,
    /// Let the new image grow as it is written; this is the default.
    #[arg(long, conflicts_with = "thick")]
    thin: bool,
    /// Allocate all of the new image's space before the copying; without enough space, nothing is begun.
    #[arg(long)]
    pub(crate) thick: bool,
    /// Keep serving the volume here as well, from the other host's store; by default only to clients that stay connected.
    #[arg(long)]
    pub(crate) serve_here: bool,
    /// Move even if the host of a standby cannot note that the volumes leave. Until it has, nobody may promote the standby there.
    #[arg(long)]
    pub(crate) standby_untold: bool,
    /// Copy everything, even if the other host has kept an image of the volume.
    #[arg(long)]
    pub(crate) full: bool,
    /// Whether to write directly to the other host's store if this host can open it.
    #[arg(long, value_enum, value_name = "WHEN", default_value = "auto")]
    pub(crate) shared_target: SharedTarget,
    #[command(flatten)]
    pub(crate) strategy: StrategyArguments,
    /// Longest downtime of a VM, or longest hold of guests with --strategy tracking, in milliseconds.
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    pub(crate) max_downtime: u64,
    /// Number of streams for a VM's memory; by default several if it is large or there are several links.
    #[arg(long, value_name = "N|auto", default_value = "auto", value_parser = parse_streams)]
    pub(crate) memory_streams: Streams,
    /// When a VM may run at the other host; see below for the price of post-copy.
    #[arg(long, value_name = "WAY", value_enum, default_value_t = Memory::PreCopy)]
    pub(crate) memory: Memory,
    /// Return as soon as the migration has begun.
    #[arg(long)]
    pub(crate) detach: bool,
    /// Print what would move where, the expected time, and every obstacle; begin nothing.
    #[arg(long, conflicts_with = "detach")]
    pub(crate) dry_run: bool,
}

/// Whether to write directly to a store that both hosts can open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SharedTarget {
    /// Directly, if it is proved to be the same store.
    Auto,
    /// Always over the link.
    Never,
}

impl From<SharedTarget> for api::SharedTarget {
    fn from(when: SharedTarget) -> Self {
        match when {
            SharedTarget::Auto => Self::Auto,
            SharedTarget::Never => Self::Never,
        }
    }
}

/// When a moving VM may run at the other host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Memory {
    /// When all of its memory has arrived; a VM that writes faster than the link is slowed down.
    PreCopy,
    /// Earlier, if it writes faster than its memory is sent.
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

/// Number of streams for a VM's memory; `None`: chosen by the daemon.
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
