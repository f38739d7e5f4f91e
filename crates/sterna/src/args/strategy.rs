//! How a volume is copied, on the command line.

use clap::{Args, ValueEnum};

/// How volumes are copied while their guests write.
#[derive(Debug, Args)]
pub(crate) struct StrategyArguments {
    /// How volumes are copied while their guests write.
    #[arg(long, value_enum, default_value_t = Strategy::Mirror)]
    pub(crate) strategy: Strategy,
    /// Of three-phase: how many rounds are copied beforehand, at most [default: 4].
    #[arg(long, value_name = "N")]
    pub(crate) rounds: Option<u32>,
    /// Of tracking, for comparison: record also what is written before a round has come to it.
    #[arg(long)]
    pub(crate) no_incremental: bool,
    /// For comparison: copy blocks that are written again and again as all others, rather than put them off.
    #[arg(long)]
    pub(crate) ignore_hot_blocks: bool,
}

/// How a volume is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Strategy {
    /// In one pass; writes to what is copied go to both stores. It converges whatever guests write.
    Mirror,
    /// In rounds; writes go to the source, and what they changed is copied in the next round. It may give up.
    Tracking,
    /// To another host: a few rounds, then the guest goes on there and what is missing follows it. It ends whatever guests write.
    ThreePhase,
    /// To another host: the guest goes on there at once, and its disk follows it.
    PostCopy,
}

impl From<Strategy> for api::Strategy {
    fn from(strategy: Strategy) -> Self {
        match strategy {
            Strategy::Mirror => Self::Mirror,
            Strategy::Tracking => Self::Tracking,
            Strategy::ThreePhase => Self::ThreePhase,
            Strategy::PostCopy => Self::PostCopy,
        }
    }
}
