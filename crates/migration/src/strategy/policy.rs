//! The decisions in which strategies differ, and which an [`Engine`] leaves to a policy.
//!
//! ```text
//!   a guest's write ──────────────► course ───────────────► held, to the source, to both stores, in part
//!   after any event ──────────────► judge_convergence ────► guests are throttled, or not
//!          │                        next_run ─────────────► a run is copied, or there is none
//!          │                        judge_round ──────────► the next round begins, or copying on is of no use
//!          │                        judge_pass ───────────► copying continues, or the copied blocks are confirmed
//!          └──────────────────────► standing ─────────────► behind, converged, synchronised
//! ```
//! A strategy is one file with one policy; [`Chosen`] has a variant for each. A policy keeps no state of blocks, writes or
//! chunks, but queries the engine (`engine/questions.rs`).

use std::time::Duration;

use chronicle::BlockRange;

use super::asynchronous::AsynchronousMirror;
use super::engine::{Engine, Standing, Terms, Toll, Verdict, Write};
use super::mirror::Mirror;
use super::post_copy::PostCopy;
use super::tracking::Tracking;
use super::{Round, Route, Strategy};

/// The decisions for one volume that is being copied.
///
/// Every method may rely on an engine that has handled all events. The engine enforces the rules common to all strategies. Blocks
/// in flight are not sent again, a copy waits for earlier writes, and only synchronised blocks take values.
pub(super) trait Policy {
    fn terms(&self) -> Terms;

    /// Decides the route of a write that has arrived or is held. A held write is decided again after each event, and at the end
    /// of its patience, when it must be submitted.
    fn course(&mut self, engine: &Engine, now: Duration, write: &Write) -> Course;

    /// Checks whether the copying converges, and throttles guests if it does not.
    fn judge_convergence(&mut self, engine: &mut Engine, now: Duration);

    /// Decides what follows at this point of the round. Only for strategies with rounds.
    fn judge_round(&mut self, engine: &Engine, now: Duration) -> RoundVerdict {
        let _ = (engine, now);
        RoundVerdict::GoOn
    }

    /// Returns the ended rounds. Only for strategies with rounds.
    fn rounds(&self) -> &[Round] {
        &[]
    }

    /// Returns the next run to copy, missing and not in flight; `None` if there is none for the time being. Called only while
    /// another chunk may begin.
    fn next_run(&mut self, engine: &mut Engine) -> Option<BlockRange>;

    /// Decides what follows at this point of the copying. Called only while the target could be flushed.
    fn judge_pass(&self, engine: &Engine) -> Verdict;

    /// Returns whether the missing set may be sent to the target. Only for strategies that hand over incomplete volumes.
    fn may_tell(&self, engine: &Engine) -> bool {
        let _ = engine;
        false
    }

    /// Returns how near the replica is to the volume. [`Standing::Synchronised`] only if both are equal, or the target knows
    /// its missing set exactly and may lack it. That must hold until the engine receives the next write.
    fn standing(&mut self, engine: &Engine, now: Duration) -> Standing;

    /// Returns when the standing changes without an event, and the reason of the wait.
    fn deadline(&self, engine: &Engine) -> Option<(Duration, &'static str)>;
}

/// The decision about a guest's write.
#[derive(Debug)]
pub(super) enum Course {
    /// Hold it, because of other work on its blocks.
    Hold,
    /// Hold it and all later writes, because the target is slow.
    Queue {
        /// The earliest time of its submission; `None`: when the target has taken more.
        until: Option<Duration>,
    },
    /// Submit it; its guest waits for every store that it goes to.
    Mirror(Route),
    /// Submit it; its guest waits for the source only.
    Send {
        route: Route,
        /// The cost for the target; `None`: nothing to count.
        toll: Option<Toll>,
    },
    /// Submit it to the source only, and put off its blocks, which are synchronised.
    Merge { toll: Option<Toll> },
    /// Submit it to the source only instead of by value, because the limit of bytes in flight is reached.
    Overflow { toll: Option<Toll> },
}

/// The decision at this point of a round.
#[derive(Debug)]
pub(super) enum RoundVerdict {
    GoOn,
    /// Copy the blocks that guests have written meanwhile.
    Next,
    /// Copy these, and the blocks that were put off.
    NextOfAll,
    /// The copying will not converge; the text gives the figures, and what would help.
    GiveUp(String),
    /// It will not converge either, and this strategy copies the rest.
    ChangeTo(Strategy),
}

pub(super) enum Chosen {
    Mirror(Mirror),
    AsynchronousMirror(AsynchronousMirror),
    Tracking(Box<Tracking>),
    PostCopy(PostCopy),
}

impl Chosen {
    pub(super) fn new(strategy: Strategy) -> Self {
        match strategy {
            Strategy::Mirror => Self::Mirror(Mirror),
            Strategy::AsynchronousMirror { buffer_bytes_max, drain_max, hot } => {
                Self::AsynchronousMirror(AsynchronousMirror::new(buffer_bytes_max, drain_max, hot))
            }
            Strategy::Tracking { recording, hot, distance, drain_max, otherwise } => {
                let otherwise = otherwise.strategy(hot);
                Self::Tracking(Box::new(Tracking::new(recording, hot, distance, drain_max, otherwise)))
            }
            Strategy::PostCopy { rounds_max } => Self::PostCopy(PostCopy::new(rounds_max)),
        }
    }
}

/// Calls the chosen policy through a match instead of a table of functions, because every guest write needs a decision.
macro_rules! ask {
    ($chosen:expr, $policy:ident => $answer:expr) => {
        match $chosen {
            Chosen::Mirror($policy) => $answer,
            Chosen::AsynchronousMirror($policy) => $answer,
            Chosen::Tracking($policy) => $answer,
            Chosen::PostCopy($policy) => $answer,
        }
    };
}

impl Policy for Chosen {
    fn terms(&self) -> Terms {
        ask!(self, policy => policy.terms())
    }

    fn course(&mut self, engine: &Engine, now: Duration, write: &Write) -> Course {
        ask!(self, policy => policy.course(engine, now, write))
    }

    fn judge_convergence(&mut self, engine: &mut Engine, now: Duration) {
        ask!(self, policy => policy.judge_convergence(engine, now));
    }

    fn judge_round(&mut self, engine: &Engine, now: Duration) -> RoundVerdict {
        ask!(self, policy => policy.judge_round(engine, now))
    }

    fn rounds(&self) -> &[Round] {
        ask!(self, policy => policy.rounds())
    }

    fn next_run(&mut self, engine: &mut Engine) -> Option<BlockRange> {
        ask!(self, policy => policy.next_run(engine))
    }

    fn judge_pass(&self, engine: &Engine) -> Verdict {
        ask!(self, policy => policy.judge_pass(engine))
    }

    fn may_tell(&self, engine: &Engine) -> bool {
        ask!(self, policy => policy.may_tell(engine))
    }

    fn standing(&mut self, engine: &Engine, now: Duration) -> Standing {
        ask!(self, policy => policy.standing(engine, now))
    }

    fn deadline(&self, engine: &Engine) -> Option<(Duration, &'static str)> {
        ask!(self, policy => policy.deadline(engine))
    }
}
