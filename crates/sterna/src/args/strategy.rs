//! How a volume is copied, on the command line.

use clap::{Args, ValueEnum};

/// The options of the copying.
#[derive(Debug, Args)]
pub(crate) struct StrategyArguments {
    /// How volumes are copied while their guests write.
    #[arg(long, value_enum, default_value_t = Strategy::Auto)]
    pub(crate) strategy: Strategy,
    /// Largest number of rounds before the handover with three-phase [default: 4].
    #[arg(long, value_name = "N")]
    pub(crate) rounds: Option<u32>,
    /// With tracking, for comparison: also copy blocks again that were written before a round has reached them.
    #[arg(long)]
    pub(crate) no_incremental: bool,
    /// With tracking: if the rounds do not converge, mirror what is left, instead of failing. Without --strategy this is the default.
    #[arg(long)]
    pub(crate) or_mirror: bool,
    /// Do not put off blocks that are written again and again; for comparison.
    #[arg(long)]
    pub(crate) ignore_hot_blocks: bool,
}

/// The strategy of the copying.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Strategy {
    /// Mirror; or tracking, if guests write nearly as fast as the copy to another host, and its rounds will end. If they do not, it
    /// is mirrored after all.
    Auto,
    /// One pass; writes to copied blocks go to both stores. It always converges.
    Mirror,
    /// Rounds; each copies the blocks that were written in the round before. It may fail to converge.
    Tracking,
    /// To another host: a few rounds, then the handover; missing blocks follow. It always ends.
    ThreePhase,
    /// The handover to another host at once; the disk follows.
    PostCopy,
}

impl From<Strategy> for api::Strategy {
    fn from(strategy: Strategy) -> Self {
        match strategy {
            Strategy::Auto => Self::Auto,
            Strategy::Mirror => Self::Mirror,
            Strategy::Tracking => Self::Tracking,
            Strategy::ThreePhase => Self::ThreePhase,
            Strategy::PostCopy => Self::PostCopy,
        }
    }
}
