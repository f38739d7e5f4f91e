//! The phases of a migration at its source, and the table of transitions.
//!
//! ```text
//!            ┌─────── an attempt is given up ◄───────────────┐
//!            ▼                                               │
//!  ──► Copying ──► Closing ──► Preparing ──► Releasing ──►╫ Committing ──► [Filling] ──► Retiring ──► Ended
//!       │   │       ▲ │            │      (undecided until ╫     │                        ▲
//!       │   ▼       │ │            │                       ╫     │                        │
//!       │  Memory ──┘ │            │                       ╫     │                        │
//!       └───┴─────────┴────────────┴──► Discarding ────────╫─────┼─► TakingBack ──────────┤
//!                                            │             ╫     (nothing was written)    │
//!                                            └─────────────╫─────────────────────────────►┘
//!                                                          ╫ the commit point: no way back to the left
//! ```
//! The phase Memory occurs only if a VM moves with its volumes; then an attempt that is given up is the last one.

use serde::Serialize;

/// The phase of a migration. The variants are in order; a migration never moves backwards except to [`Phase::Copying`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Blocks are copied and writes mirrored; the guest works.
    Copying,
    /// The disks are mirrored while the memory of their VM is copied, until the VM is paused.
    Memory,
    /// The gates are closing; requests in flight complete.
    Closing,
    /// The source's stores are flushed while the target flushes and promises to wait.
    Preparing,
    /// The release is being made durable. Only its end shows whether the commit point is passed.
    Releasing,
    /// The commit point is passed, and the target takes over.
    Committing,
    /// The guest works at the target, which fetches its missing blocks from here. Only after a handover of incomplete volumes.
    Filling,
    /// The guest works at the target; the source images are deleted or kept.
    Retiring,
    /// The target could not start, and hands the volumes back.
    TakingBack,
    /// The migration has failed or was cancelled, and the target images are deleted. The guest works at the source.
    Discarding,
    /// Nothing is left to do.
    Ended,
}

impl Phase {
    /// All phases, in order.
    pub const ALL: [Self; 11] = [
        Self::Copying,
        Self::Memory,
        Self::Closing,
        Self::Preparing,
        Self::Releasing,
        Self::Committing,
        Self::Filling,
        Self::Retiring,
        Self::TakingBack,
        Self::Discarding,
        Self::Ended,
    ];

    /// Returns the name shown to users.
    pub fn name(self) -> &'static str {
        match self {
            Self::Copying => "copying",
            Self::Memory => "memory",
            Self::Closing => "closing",
            Self::Preparing => "preparing",
            Self::Releasing => "releasing",
            Self::Committing => "committing",
            Self::Filling => "filling",
            Self::Retiring => "retiring",
            Self::TakingBack => "taking-back",
            Self::Discarding => "discarding",
            Self::Ended => "ended",
        }
    }

    /// Returns whether the table of transitions permits `next`.
    pub fn may_become(self, next: Self) -> bool {
        use Phase::{
            Closing, Committing, Copying, Discarding, Ended, Filling, Memory, Preparing, Releasing, Retiring,
            TakingBack,
        };
        matches!(
            (self, next),
            (Copying, Memory | Closing | Discarding)
                | (Memory, Closing | Discarding)
                | (Closing, Copying | Preparing | Discarding)
                | (Preparing, Copying | Releasing | Discarding)
                // A release that was certainly not written counts as not begun.
                | (Releasing, Copying | Committing)
                | (Committing, Filling | Retiring | TakingBack)
                | (Filling, Retiring)
                | (TakingBack, Discarding)
                | (Retiring | Discarding, Ended)
        )
    }

    /// Returns whether the migration can still be cancelled.
    pub fn can_be_cancelled(self) -> bool {
        matches!(self, Self::Copying | Self::Memory | Self::Closing | Self::Preparing)
    }

    /// Returns whether an orderly stop waits for the end of this phase. Copying and filling may take hours, and the next start
    /// continues them.
    pub fn holds_a_stop(self) -> bool {
        !self.can_be_cancelled() && self != Self::Filling
    }
}

impl std::fmt::Display for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::Phase;

    #[test]
    fn transition_table_is_the_one_that_was_agreed_upon() {
        let table: Vec<String> = Phase::ALL
            .iter()
            .map(|from| {
                let next: Vec<_> =
                    Phase::ALL.iter().filter(|to| from.may_become(**to)).map(ToString::to_string).collect();
                format!("{from} -> {}", next.join(" | "))
            })
            .collect();
        insta::assert_snapshot!(table.join("\n"), @r"
        copying -> memory | closing | discarding
        memory -> closing | discarding
        closing -> copying | preparing | discarding
        preparing -> copying | releasing | discarding
        releasing -> copying | committing
        committing -> filling | retiring | taking-back
        filling -> retiring
        retiring -> ended
        taking-back -> discarding
        discarding -> ended
        ended -> 
        ");
    }

    #[test]
    fn no_phase_after_the_commit_point_leads_back_to_copying() {
        let mut reached = vec![Phase::Committing];
        for index in 0.. {
            let Some(from) = reached.get(index).copied() else { break };
            let next =
                Phase::ALL.into_iter().filter(|next| from.may_become(*next) && !reached.contains(next));
            reached.extend(next.collect::<Vec<_>>());
        }
        assert!(!reached.contains(&Phase::Copying));
    }

    #[test]
    fn a_stop_waits_for_no_phase_of_any_length() {
        for phase in [Phase::Copying, Phase::Memory, Phase::Filling] {
            assert!(!phase.holds_a_stop(), "{phase}");
        }
        for phase in [Phase::Releasing, Phase::Committing, Phase::TakingBack] {
            assert!(phase.holds_a_stop(), "{phase}");
        }
    }
}
