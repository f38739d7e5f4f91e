//! Decides about a waiting volume: one table of the hosts' answers, the image and the order.
//!
//! ```text
//!                          image is    unchecked, missing           incomplete, rival  fit, not alone
//!   hosts                  order:      any                      none known force   none   known  force
//!   agreed, no doubt                   -                        -    -     branch  serve  serve  serve
//!   agreed, a doubt                    -                        -    -     branch  -      serve  serve
//!   unlisted, silent, unreliable       -                        -    -     branch  -      branch branch
//!   contradicted                       -                        -    -     branch  -      -      branch
//!   away (of a departure)              a host has it: its place is unchanged, whatever the image is; by force a branch
//! ```
//! A volume that lacked blocks is never served. *branch*: another host may have it as well. The hosts' answers and the image
//! are separate facts: neither overrides the other.

use chronicle::Generation;

use super::hosts::Lacks;
use super::knowledge::Word;
use super::machine::Look;
use super::order::{Order, Refused};
use crate::identity::HostId;
use crate::planted::{Bug, broken};

/// All evidence about a waiting volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    /// The combined answers of other hosts.
    pub words: Words,
    /// The result of inspecting its image; `None` before the first inspection.
    pub look: Option<Look>,
    /// Whether a doubt remains that no host can settle.
    pub doubt: InDoubt,
    /// The generation with which it returned here after the backup; `None` if no host reports that.
    pub came_back: Option<Generation>,
}

/// The combined answers of other hosts about a volume. Of two that apply the first counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Words {
    /// The volume had left, and this host has it with this generation.
    Away(HostId, Generation),
    /// These answers contradict the backup.
    Contradicted(Vec<(HostId, Word)>),
    /// Some hosts cannot be asked.
    Unlisted(Lacks),
    /// These hosts have not answered.
    Unheard(Vec<HostId>),
    /// These hosts have confirmed, but their own journals were restored, so their silence says nothing.
    Unreliable(Vec<HostId>),
    /// All hosts have answered, and none contradicts.
    Agreed,
}

/// Whether a doubt remains that no host can settle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InDoubt {
    /// No doubt remains about the volume.
    No,
    /// The administrator must decide.
    Yes,
    /// The volume lacked blocks, and it is not known which.
    Hollow,
}

/// The decision about a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ruling {
    /// The volume is this host's.
    Serve(Claims),
    /// The volume is where the backup says it went.
    StaysAway,
    /// The volume waits, or the order is refused.
    Waits(Refused),
}

/// Whether another host may also have a volume that is served here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claims {
    /// No other host can have it.
    Sole,
    /// Another host may have it: a branch of the history begins.
    Branch,
}

/// Decides about a volume; `order` is the administrator's order, if any.
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
    // **N.B.** The image counts whatever the hosts answer, and even if they do not answer.
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
