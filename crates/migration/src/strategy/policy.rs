//! What strategies differ in: the decisions that an [`Engine`] does not take itself.
//!
//! ```text
//!   a guest's write ──────────────► course ───────────────► held, to the source, to both stores, in part
//!   after whatever happened ──────► judge_convergence ────► guests are throttled, or not
//!          │                        next_run ─────────────► a run is copied, or there is none
//!          │                        judge_round ──────────► the next round begins, or there is no use in going on
//!          │                        judge_pass ───────────► the copying goes on, or what is there is confirmed
//!          └──────────────────────► standing ─────────────► behind, converged, synchronised
//! ```
//! A strategy is one file with one policy in it; [`Chosen`] has a line for each. A policy keeps no books of blocks, writes
//! or chunks: it asks the engine for them (`engine/questions.rs`).

use std::time::Duration;

use chronicle::BlockRange;

use super::asynchronous::AsynchronousMirror;
use super::engine::{Engine, Standing, Terms, Toll, Verdict, Write};
use super::mirror::Mirror;
use super::post_copy::PostCopy;
use super::tracking::Tracking;
use super::{Round, Route, Strategy};

/// Decides for one volume that is being copied.
///
/// Every method may rely on the engine's being up to date with everything that has happened. The engine, not the policy,
/// keeps the rules that hold whatever the strategy: what is in flight is not sent again, what is copied waits for the
/// writes submitted before, only synchronised blocks take values.
pub(super) trait Policy {
    /// What the engine has to know beforehand.
    fn terms(&self) -> Terms;

    /// Where a guest's write goes that has arrived, or is held. One that is held is asked about again after whatever
    /// happens next, and when its patience ends: then it must be submitted.
    fn course(&mut self, engine: &Engine, now: Duration, write: &Write) -> Course;

    /// Judges whether the copying converges, and holds guests back if not.
    fn judge_convergence(&mut self, engine: &mut Engine, now: Duration);

    /// What it means how far the round has come. Only of strategies that copy in rounds.
    fn judge_round(&mut self, engine: &Engine, now: Duration) -> RoundVerdict {
        let _ = (engine, now);
        RoundVerdict::GoOn
    }

    /// The rounds that have ended. Only of strategies that copy in rounds.
    fn rounds(&self) -> &[Round] {
        &[]
    }

    /// The run that is copied next: missing, and not in flight. `None`: there is none for the time being. Asked only
    /// while the mover may begin another chunk.
    fn next_run(&mut self, engine: &mut Engine) -> Option<BlockRange>;

    /// What it means how far the copying has come. Asked only while the target could be flushed.
    fn judge_pass(&self, engine: &Engine) -> Verdict;

    /// Tells whether the target is to be told what it lacks. Only of strategies that hand over with blocks missing.
    fn may_tell(&self, engine: &Engine) -> bool {
        let _ = engine;
        false
    }

    /// How near the replica is to the volume: [`Standing::Synchronised`] only if they are equal, or the target knows exactly
    /// what it lacks and may lack it, and that stays so until the engine hears of the next write.
    fn standing(&mut self, engine: &Engine, now: Duration) -> Standing;

    /// When the standing changes though nothing happens, and what is waited for until then.
    fn deadline(&self, engine: &Engine) -> Option<(Duration, &'static str)>;
}

/// What becomes of a guest's write.
#[derive(Debug)]
pub(super) enum Course {
    /// It is held by what is under way where it goes.
    Hold,
    /// It is held by the target, and so are all that come after it.
    Queue {
        /// When it may go, at the earliest; `None`: when the target has taken more.
        until: Option<Duration>,
    },
    /// It is submitted, and its guest waits for every store that it goes to.
    Mirror(Route),
    /// It is submitted, and its guest waits for the source only.
    Send {
        route: Route,
        /// What it costs the target; `None`: nothing that is to be counted.
        toll: Option<Toll>,
    },
    /// It is submitted to the source only, and its blocks, which are synchronised, are put off.
    Merge { toll: Option<Toll> },
    /// It is submitted to the source only, although it could go by value: as much is on its way as may be.
    Overflow { toll: Option<Toll> },
}

/// What it means how far a round has come.
#[derive(Debug)]
pub(super) enum RoundVerdict {
    GoOn,
    /// What guests have written meanwhile is copied now.
    Next,
    /// The same, and what was put off.
    NextOfAll,
    /// The copying will not converge; for people, by which numbers, and what would.
    GiveUp(String),
}

/// The policy of the strategy that was chosen.
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
            Strategy::Tracking { recording, hot, distance, drain_max } => {
                Self::Tracking(Box::new(Tracking::new(recording, hot, distance, drain_max)))
            }
            Strategy::PostCopy { rounds_max } => Self::PostCopy(PostCopy::new(rounds_max)),
        }
    }
}

/// Asks the chosen policy, by a match rather than a table of functions: one is asked for every guest write.
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
