//! What becomes of a volume that waits: one table of what the hosts say, how the image looks, and what somebody orders.
//!
//! ```text
//!                          image is    not looked at, missing   half-made, rival   fit, not alone
//!   hosts                  order:      any                      none known force   none   known  force
//!   agreed, no doubt                   -                        -    -     branch  serve  serve  serve
//!   agreed, a doubt                    -                        -    -     branch  -      serve  serve
//!   unlisted, silent, unreliable       -                        -    -     branch  -      branch branch
//!   contradicted                       -                        -    -     branch  -      -      branch
//!   away (of a departure)              a host has it: where it is stays as it was, whatever the image is; by force a branch
//! ```
//! A volume that lacked blocks is never served. *branch*: another host may have it as well. The hosts' words and the look are separate
//! facts: neither hides the other.

use chronicle::Generation;

use super::hosts::Lacks;
use super::knowledge::Word;
use super::machine::Look;
use super::order::{Order, Refused};
use crate::identity::HostId;
use crate::planted::{Bug, broken};

/// All that is known of a volume that waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    /// What the other hosts say.
    pub words: Words,
    /// How its image looks; `None`: nobody has looked yet.
    pub look: Option<Look>,
    /// Whether something remains that no host can know.
    pub doubt: InDoubt,
    /// With which generation it came back here after the backup was made; `None`: no host says so.
    pub came_back: Option<Generation>,
}

/// What other hosts say of a volume, all together. Of two the first counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Words {
    /// It had left, and this host knows who has it, with this generation.
    Away(HostId, Generation),
    /// These contradict.
    Contradicted(Vec<(HostId, Word)>),
    /// Not all hosts can be asked.
    Unlisted(Lacks),
    /// These have not said what they know.
    Unheard(Vec<HostId>),
    /// These have confirmed, but were put back themselves, so what they do not know says nothing.
    Unreliable(Vec<HostId>),
    /// All have answered, and nothing speaks against it.
    Agreed,
}

/// Whether something remains that no host can know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InDoubt {
    /// Nothing does.
    No,
    /// Somebody has to decide.
    Yes,
    /// It lacked blocks, and nobody can tell which.
    Hollow,
}

/// What becomes of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ruling {
    /// It is this host's.
    Serve(Claims),
    /// It is where the backup says it has gone.
    StaysAway,
    /// It waits, or the order is refused.
    Waits(Refused),
}

/// Whether another host may have a volume as well that is served here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claims {
    /// None can.
    Sole,
    /// One may: a branch of the history begins.
    Branch,
}

/// Decides what becomes of a volume. `order`: what somebody orders; `None`: nobody does.
pub fn ruling(standing: &Standing, order: Option<Order>) -> Ruling {
    use Claims::{Branch, Sole};
    use Ruling::{Serve, StaysAway, Waits};
    if standing.doubt == InDoubt::Hollow {
        return Waits(Refused::Hollow);
    }
    if let (Words::Away(..), None) = (&standing.words, order) {
        return StaysAway;
    }
    let by_force = order == Some(Order::Force);
    // N.B. the look counts whatever the hosts say, and also if they say nothing.
    let is_hidden = broken(Bug::RestoredLookHidden) && standing.words != Words::Agreed;
    match &standing.look {
        _ if is_hidden && order.is_some() => {}
        None => return Waits(Refused::NotLooked),
        Some(Look::Missing) => return Waits(Refused::NoImage),
        Some(Look::HalfMade) if broken(Bug::RestoredHalfMade) => {}
        Some(Look::Rival(_)) if broken(Bug::RestoredRival) => {}
        Some(Look::HalfMade | Look::Rival(_)) if by_force => return Serve(Branch),
        Some(Look::HalfMade | Look::Rival(_)) => return Waits(Refused::Contradicted),
        Some(Look::Fit | Look::NotAlone(_)) => {}
    }
    match (&standing.words, order) {
        (Words::Agreed, Some(_)) => Serve(Sole),
        (Words::Agreed, None) if standing.doubt == InDoubt::No || broken(Bug::RestoredDoubt) => Serve(Sole),
        (Words::Agreed, None) => Waits(Refused::InDoubt),
        (Words::Unheard(_) | Words::Unlisted(_), None) if broken(Bug::RestoredUnasked) => Serve(Sole),
        (Words::Unlisted(_) | Words::Unheard(_) | Words::Unreliable(_), Some(_)) => Serve(Branch),
        (Words::Unlisted(_) | Words::Unheard(_) | Words::Unreliable(_), None) => Waits(Refused::Unheard),
        (Words::Contradicted(_) | Words::Away(..), Some(Order::Force)) => Serve(Branch),
        (Words::Contradicted(_) | Words::Away(..), _) => Waits(Refused::Contradicted),
    }
}
