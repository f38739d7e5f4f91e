//! IO mirroring (\[ESX\] §2.4): one pass of a cursor over the volume, and writes behind it go to both stores at once.
//!
//! ```text
//!    0 ................ cursor ............................... end of the volume
//!      behind:          │ ahead:
//!      synchronised ─► both stores            every write ─► source only; its blocks are missing,
//!      missing, or being copied ─►              also where there was a hole
//!      source only, and missing (again)
//! ```
//! The paper defers writes to a chunk that is being copied. Here such a write goes to the source at once, and its blocks are
//! copied again right after the chunk has landed. Writes to *that* second pass wait for it, so a chunk is never copied for ever.
//! A target that fails or is slow never delays the guest by more than
//! [`CopyingSettings::wait_max`](super::CopyingSettings::wait_max). Mirroring is suspended, writes make blocks missing, and
//! mirroring is tried again later.

use std::time::Duration;

use chronicle::BlockRange;

use super::engine::{Engine, InFlight, Rewritten, Standing, Terms, Verdict, Write, Written};
use super::policy::{Course, Policy};
use super::{HotBlocks, Route};
use crate::planted::{Bug, broken};

pub(super) struct Mirror;

impl Policy for Mirror {
    fn terms(&self) -> Terms {
        Terms {
            in_flight: InFlight::Chunks,
            rewritten: Rewritten::AtOnce,
            written: Written::AnyTime,
            hot: HotBlocks::AsOthers,
        }
    }

    fn course(&mut self, engine: &Engine, now: Duration, write: &Write) -> Course {
        let route = engine.route(write.range, write.blocks);
        let waits = match route {
            Route::Both => engine.follows_another(write),
            Route::BothInPart(_) => {
                engine.follows_another(write) || engine.is_being_copied_again(write.blocks)
            }
            Route::SourceOnly => engine.is_being_copied_again(write.blocks),
        };
        if now >= write.patience_ends {
            // Its wait is over, and it waits for no target. Its blocks are copied again after everything under way there.
            Course::Mirror(Route::SourceOnly)
        } else if waits {
            Course::Hold
        } else {
            Course::Mirror(route)
        }
    }

    /// Does nothing: guests wait for the target, so they write at its rate.
    fn judge_convergence(&mut self, _: &mut Engine, _: Duration) {}

    fn next_run(&mut self, engine: &mut Engine) -> Option<BlockRange> {
        engine.next_of_pass().or_else(|| engine.next_missing())
    }

    fn judge_pass(&self, engine: &Engine) -> Verdict {
        let is_over = engine.is_bulk_applied() && engine.is_copied();
        if is_over { Verdict::Confirm } else { Verdict::GoOn }
    }

    fn standing(&mut self, engine: &Engine, _: Duration) -> Standing {
        let is_equal = engine.is_equal() || broken(Bug::MissingHandedOver);
        let is_synchronised = engine.may_hand_over() && is_equal && engine.is_bulk_durable();
        if is_synchronised { Standing::Synchronised } else { Standing::Behind }
    }

    fn deadline(&self, _: &Engine) -> Option<(Duration, &'static str)> {
        None
    }
}
