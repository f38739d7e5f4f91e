//! Strategies: how a volume is copied while its guests write.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How a volume is copied while its guests write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// The daemon chooses `mirror` or `tracking` when the migration begins, and says why.
    #[default]
    Auto,
    /// One pass. Guest writes to blocks that are copied already go to both stores. It always converges.
    Mirror,
    /// Rounds. Each copies the blocks that guests have written in the round before. Guests never wait for the target before the
    /// last round. It fails with a reason if guests write faster than it copies.
    Tracking,
    /// At most `rounds` rounds, then the handover with blocks missing. The target fetches them: at once if a guest reads them,
    /// otherwise in the background. Only between hosts. It always ends. Until the volume is complete, losing
    /// either host loses the volume.
    ThreePhase,
    /// The same without rounds: the guest moves to the other host at once.
    PostCopy,
}

impl Strategy {
    /// Every strategy that a migration can have once it has begun.
    pub const ALL: [Self; 4] = [Self::Mirror, Self::Tracking, Self::ThreePhase, Self::PostCopy];

    /// The default of the largest number of rounds with [`Strategy::ThreePhase`].
    pub const ROUNDS_USUAL: u32 = 4;

    /// Returns whether volumes are handed over with blocks missing.
    pub fn leaves_blocks(self) -> bool {
        matches!(self, Self::ThreePhase | Self::PostCopy)
    }

    pub(crate) fn is_auto(&self) -> bool {
        *self == Self::Auto
    }

    /// Returns the strategy of a migration that has begun. Orders of older daemons name none, and mean `mirror`.
    #[must_use]
    pub fn begun(self) -> Self {
        if self == Self::Auto { Self::Mirror } else { self }
    }

    /// Returns the strategy's word in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Mirror => "mirror",
            Self::Tracking => "tracking",
            Self::ThreePhase => "three-phase",
            Self::PostCopy => "post-copy",
        }
    }
}

/// An ended round of a volume that is copied in rounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Round {
    /// Position of the volume in the migration, counted from 0.
    pub volume: u32,
    /// Number of blocks that were copied in this round.
    pub blocks: u64,
    /// Bytes that were written to the target for these blocks.
    pub bytes: u64,
    /// Duration of the round in seconds.
    pub seconds: f64,
    /// Bytes of blocks that guests have written meanwhile, which are left to the next round.
    pub dirtied: u64,
    /// Bytes of hot blocks, which guests write again and again, that were put off to a later round.
    #[serde(default)]
    pub put_off: u64,
}
