//! The faults that each strategy has met in simulations with one, two and three hosts together.
//!
//! A fault on one host and between hosts counts wherever it strikes. A cell is impossible if it is impossible in each table of
//! the strategy's migrations. Cells that need another fault as well are not required; their reasons are recorded, too.

use std::fmt;

use migration::Phase;

use super::{Cell, Coverage, Kind, PHASES, Table, impossible, is_seldom};
use crate::faults::Fault;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ByStrategy([[[u64; PHASES]; Fault::COUNT]; Kind::ALL.len()]);

impl ByStrategy {
    pub(crate) fn add(&mut self, coverage: &Coverage) {
        for kind in Kind::ALL.into_iter().filter(|kind| kind.is_of(coverage.table)) {
            let rows = self.0[kind as usize].iter_mut().zip(&coverage.by_kind[kind as usize]);
            for (counts, others) in rows {
                counts.iter_mut().zip(others).for_each(|(count, other)| *count += other);
            }
        }
    }

    pub(crate) fn below(&self, wanted: u64) -> Vec<(Kind, Cell)> {
        let cells = Kind::ALL.into_iter().flat_map(|kind| self.possible(kind).map(move |cell| (kind, cell)));
        cells.filter(|(_, cell)| cell.seeds < wanted).collect()
    }

    pub(crate) fn contradictions(&self) -> Vec<(Kind, Cell)> {
        let cells = Kind::ALL.into_iter().flat_map(|kind| cells(kind).map(move |cell| (kind, cell)));
        let impossible = cells.filter(|(kind, (fault, phase))| never(*kind, *fault, *phase).is_some());
        let counted = impossible.map(|(kind, (fault, phase))| {
            (kind, Cell { fault, phase, seeds: self.count(kind, fault, phase) })
        });
        counted.filter(|(_, cell)| cell.seeds > 0).collect()
    }

    pub(crate) fn fewest(&self) -> u64 {
        Kind::ALL.into_iter().flat_map(|kind| self.possible(kind)).map(|cell| cell.seeds).min().unwrap_or(0)
    }

    fn possible(&self, kind: Kind) -> impl Iterator<Item = Cell> + use<'_> {
        let cells = cells(kind).filter(move |(fault, phase)| {
            never(kind, *fault, *phase).is_none() && excused(kind, *fault, *phase).is_none()
        });
        cells.map(move |(fault, phase)| Cell { fault, phase, seeds: self.count(kind, fault, phase) })
    }

    fn count(&self, kind: Kind, fault: Fault, phase: Phase) -> u64 {
        self.0[kind as usize][fault as usize][phase as usize]
    }
}

fn cells(kind: Kind) -> impl Iterator<Item = (Fault, Phase)> {
    faults(kind).into_iter().flat_map(|fault| Phase::ALL.map(|phase| (fault, phase)))
}

fn faults(kind: Kind) -> Vec<Fault> {
    let mut faults = Vec::new();
    for table in [Table::OneHost, Table::Hosts].into_iter().filter(|table| kind.is_of(*table)) {
        let more: Vec<_> = table.faults().iter().copied().filter(|fault| !faults.contains(fault)).collect();
        faults.extend(more);
    }
    faults
}

fn never(kind: Kind, fault: Fault, phase: Phase) -> Option<&'static str> {
    let mut reason = None;
    for table in [Table::OneHost, Table::Hosts] {
        if kind.is_of(table) && table.faults().contains(&fault) {
            reason = Some(impossible(table, fault, phase).or_else(|| impossible_by(kind, fault, phase))?);
        }
    }
    reason
}

fn impossible_by(kind: Kind, _: Fault, phase: Phase) -> Option<&'static str> {
    match phase {
        Phase::Filling if kind != Kind::PostCopy => Some("nothing is left behind"),
        _ => None,
    }
}

/// Returns why a fault need not strike in a phase, although it may if another fault strikes as well.
fn excused(kind: Kind, fault: Fault, phase: Phase) -> Option<&'static str> {
    use Fault::{
        CancelThere, HandBack, JournalError, JournalSlow, SourceError, SourceSlow, TargetError, TargetFull,
        TargetHang, TargetSlow,
    };
    use Phase::{
        Closing, Committing, Discarding, Filling, Memory, Preparing, Releasing, Retiring, TakingBack,
    };

    // It needs no other fault on one host.
    let alone = Table::OneHost;
    let is_met_alone = impossible(alone, fault, phase).is_none() && !is_seldom(alone, fault, phase);
    if kind.is_of(alone) && alone.faults().contains(&fault) && is_met_alone {
        return None;
    }
    let rests = kind == Kind::PostCopy && matches!(phase, Memory | Closing);
    match (fault, phase) {
        (SourceError, Filling) => {
            Some("what only a reservoir has, and cannot be read, a guest hears of: that is not simulated")
        }
        // A new owner reads missing blocks as soon as it commits.
        (SourceSlow, Committing) if kind == Kind::PostCopy => None,
        (SourceError | SourceSlow, Releasing | Committing | Retiring | TakingBack) => {
            Some("nothing is asked of the source: the gates are closed, or it owns nothing")
        }
        (SourceError | SourceSlow | TargetError | TargetHang | TargetSlow | TargetFull, _) if rests => {
            Some("nothing is copied any more: what is missing follows")
        }
        (TargetError | TargetHang | TargetSlow, Releasing) => {
            Some("nothing is asked of the target between its promise and the commit")
        }
        (TargetError | TargetHang | TargetSlow, Retiring) => Some("the target is the owner"),
        (TargetError | TargetHang | TargetSlow, TakingBack | Discarding) => {
            Some("the target has given the volumes back, or is sent nothing any more")
        }
        (TargetFull, Preparing | Releasing | Committing | Filling | Retiring | TakingBack) => {
            Some("nothing is written to the target before it is the owner: all is there, or follows")
        }
        (HandBack, Filling) => Some("only what goes back to what it lacks is tried while it lacks that"),
        (JournalError | JournalSlow, Memory | Closing) => Some("nothing is committed"),
        (CancelThere, Releasing | Committing | Filling | Retiring | TakingBack | Discarding) => {
            Some("a target that has promised something cannot cancel")
        }
        _ => None,
    }
}

impl fmt::Display for ByStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for kind in Kind::ALL {
            let count = |fault, phase| self.count(kind, fault, phase);
            write!(f, "\n{}:\n", kind.name())?;
            super::table(f, &faults(kind), count, |fault, phase| never(kind, fault, phase))?;
            let mut reasons: Vec<&'static str> = Vec::new();
            for reason in cells(kind).filter_map(|(fault, phase)| excused(kind, fault, phase)) {
                if !reasons.contains(&reason) {
                    reasons.push(reason);
                    write!(f, "\n  not asked for: where {reason}")?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::coverage::Struck;

    fn met(table: Table, kind: Kind, fault: Fault, phase: Phase) -> ByStrategy {
        let mut struck = Struck::default();
        struck.add(kind, fault, phase);
        let (mut coverage, mut met) = (Coverage::of(table), ByStrategy::default());
        coverage.add(&struck);
        met.add(&coverage);
        met.add(&coverage);
        met
    }

    #[test]
    fn what_strikes_on_one_host_and_between_hosts_is_one_cell() {
        for table in [Table::OneHost, Table::Pair, Table::Hosts] {
            let met = met(table, Kind::Tracking, Fault::SourceError, Phase::Copying);
            assert_eq!(met.count(Kind::Tracking, Fault::SourceError, Phase::Copying), 2);
            let is_short = |wanted| {
                let below = met.below(wanted);
                below.iter().any(|(kind, cell)| {
                    (*kind, cell.fault, cell.phase) == (Kind::Tracking, Fault::SourceError, Phase::Copying)
                })
            };
            assert_eq!([2, 3].map(is_short), [false, true]);
        }
    }

    #[test]
    fn a_strategy_is_not_asked_for_what_only_others_meet() {
        let below = ByStrategy::default().below(1);
        assert!(below.iter().all(|(kind, cell)| *kind != Kind::Mirror || cell.fault != Fault::LinkCut));
        let fills = below.iter().filter(|(_, cell)| cell.phase == Phase::Filling);
        assert!(fills.clone().count() > 0 && fills.clone().all(|(kind, _)| *kind == Kind::PostCopy));
    }

    #[test]
    fn a_reason_that_does_not_hold_is_found() {
        let wrong = met(Table::Pair, Kind::Tracking, Fault::LinkCut, Phase::Filling);
        let found = wrong.contradictions();
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].0, found[0].1.fault), (Kind::Tracking, Fault::LinkCut));
    }
}
