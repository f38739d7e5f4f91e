//! Counts which faults have struck in which phases, and lists which cannot.
//!
//! A cell of the table is possible, and then enough seeds must reach it; or impossible for a recorded reason, and then no seed
//! may. An outdated reason is as much a failure as a missed cell.

mod by_strategy;
mod operations;

use migration::Phase;
use migration::strategy::Strategy;

use crate::faults::Fault;

pub(crate) use by_strategy::ByStrategy;
pub(crate) use operations::{Given, Operation, Orders};

/// The tables differ: other faults are possible in a phase between hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Table {
    #[default]
    OneHost,
    Pair,
    Hosts,
}

/// The cells that one simulation has reached, by strategy; each counts once per seed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Struck([[[bool; PHASES]; Fault::COUNT]; Kind::ALL.len()]);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Kind {
    #[default]
    Mirror,
    AsynchronousMirror,
    Tracking,
    PostCopy,
}

impl Kind {
    pub(crate) const ALL: [Self; 4] =
        [Self::Mirror, Self::AsynchronousMirror, Self::Tracking, Self::PostCopy];

    pub(crate) fn of(strategy: Strategy) -> Self {
        match strategy {
            Strategy::Mirror => Self::Mirror,
            Strategy::AsynchronousMirror { .. } => Self::AsynchronousMirror,
            Strategy::Tracking { .. } => Self::Tracking,
            Strategy::PostCopy { .. } => Self::PostCopy,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Mirror => "mirror",
            Self::AsynchronousMirror => "asynchronous mirror",
            Self::Tracking => "tracking",
            Self::PostCopy => "post-copy",
        }
    }

    /// Returns whether migrations of this kind must meet a phase. Handing over incomplete volumes is drawn too seldom for all
    /// cells, and only it has the phases that follow.
    pub(crate) fn is_to_meet(self, phase: Phase) -> bool {
        self != Self::PostCopy && phase != Phase::Filling
    }

    fn is_of(self, table: Table) -> bool {
        match self {
            Self::Mirror => table == Table::OneHost,
            Self::AsynchronousMirror | Self::Tracking => true,
            Self::PostCopy => table != Table::OneHost,
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Coverage {
    table: Table,
    counts: [[u64; PHASES]; Fault::COUNT],
    by_kind: [[[u64; PHASES]; Fault::COUNT]; Kind::ALL.len()],
}

const PHASES: usize = Phase::ALL.len();
/// The seeds of [`SEEDS_OF_WANTED`] that must reach each possible cell: enough to see rare failures.
const SEEDS_WANTED: u64 = 50;
/// The same between hosts, where a fault must find the migration, the phase and the host.
const SEEDS_WANTED_OF_HOSTS: u64 = 10;
/// The seeds that must reach each possible cell with each strategy.
const SEEDS_WANTED_OF_KIND: u64 = 10;
/// The seeds of a full run; fewer seeds must reach proportionally less.
const SEEDS_OF_WANTED: u64 = 100_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cell {
    pub(crate) fault: Fault,
    pub(crate) phase: Phase,
    pub(crate) seeds: u64,
}

pub(crate) fn wanted(table: Table, seeds: u64) -> u64 {
    let wanted = match table {
        Table::OneHost => SEEDS_WANTED,
        Table::Pair | Table::Hosts => SEEDS_WANTED_OF_HOSTS,
    };
    wanted * seeds / SEEDS_OF_WANTED
}

pub(crate) fn wanted_of_kind(seeds: u64) -> u64 {
    SEEDS_WANTED_OF_KIND * seeds / SEEDS_OF_WANTED
}

impl Struck {
    pub(crate) fn add(&mut self, kind: Kind, fault: Fault, phase: Phase) {
        self.0[kind as usize][fault as usize][phase as usize] = true;
    }

    fn has(&self, fault: Fault, phase: Phase) -> bool {
        self.0.iter().any(|cells| cells[fault as usize][phase as usize])
    }

    pub(crate) fn contradictions(&self, table: Table) -> Vec<(Fault, Phase)> {
        cells(table)
            .filter(|cell| self.has(cell.0, cell.1) && impossible(table, cell.0, cell.1).is_some())
            .collect()
    }
}

impl Table {
    pub(crate) fn of_hosts(hosts: usize) -> Self {
        match hosts {
            ..=1 => Self::OneHost,
            2 => Self::Pair,
            _ => Self::Hosts,
        }
    }

    pub(crate) fn faults(self) -> &'static [Fault] {
        match self {
            Self::OneHost => &Fault::OF_ONE_HOST,
            Self::Pair | Self::Hosts => &Fault::BETWEEN_HOSTS,
        }
    }
}

impl Coverage {
    pub(crate) fn of(table: Table) -> Self {
        Self { table, ..Self::default() }
    }

    pub(crate) fn add(&mut self, struck: &Struck) {
        for (fault, phase) in cells(self.table) {
            let (row, column) = (fault as usize, phase as usize);
            self.counts[row][column] += u64::from(struck.has(fault, phase));
            for (counts, cells) in self.by_kind.iter_mut().zip(&struck.0) {
                counts[row][column] += u64::from(cells[row][column]);
            }
        }
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        let rows = self.by_kind.iter_mut().flatten().zip(other.by_kind.iter().flatten());
        for (counts, others) in rows.chain(self.counts.iter_mut().zip(&other.counts)) {
            for (count, other) in counts.iter_mut().zip(others) {
                *count += other;
            }
        }
    }

    pub(crate) fn by_strategy(&self) -> impl Iterator<Item = (Kind, Self)> {
        let kinds = Kind::ALL.into_iter().filter(|kind| kind.is_of(self.table));
        kinds.map(|kind| {
            let counts = self.by_kind[kind as usize];
            (kind, Self { table: self.table, counts, ..Self::default() })
        })
    }

    pub(crate) fn below(&self, wanted: u64) -> Vec<Cell> {
        self.possible().filter(|cell| cell.seeds < wanted).collect()
    }

    pub(crate) fn fewest(&self) -> u64 {
        self.possible().map(|cell| cell.seeds).min().unwrap_or(0)
    }

    fn possible(&self) -> impl Iterator<Item = Cell> {
        let is_asked_for = |(fault, phase): &(Fault, Phase)| {
            impossible(self.table, *fault, *phase).is_none() && !is_seldom(self.table, *fault, *phase)
        };
        let possible = cells(self.table).filter(is_asked_for);
        possible.map(|(fault, phase)| Cell {
            fault,
            phase,
            seeds: self.counts[fault as usize][phase as usize],
        })
    }
}

impl std::fmt::Display for Coverage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let count = |fault, phase| self.counts[fault as usize][phase as usize];
        table(f, self.table.faults(), count, |fault, phase| impossible(self.table, fault, phase))
    }
}

/// Shows cells, and below them why some are impossible.
fn table(
    f: &mut std::fmt::Formatter<'_>,
    faults: &[Fault],
    count: impl Fn(Fault, Phase) -> u64,
    impossible: impl Fn(Fault, Phase) -> Option<&'static str>,
) -> std::fmt::Result {
    write!(f, "{:<15}", "fault × phase")?;
    for phase in Phase::ALL {
        write!(f, "{:>12}", phase.name())?;
    }
    let mut reasons: Vec<&'static str> = Vec::new();
    for fault in faults.iter().copied() {
        write!(f, "\n{:<15}", fault.name())?;
        for phase in Phase::ALL {
            let count = count(fault, phase);
            match impossible(fault, phase) {
                Some(_) if count > 0 => write!(f, "{:>12}", format!("{count}!"))?,
                Some(reason) => {
                    let known = reasons.iter().position(|known| *known == reason);
                    let index = known.unwrap_or_else(|| {
                        reasons.push(reason);
                        reasons.len() - 1
                    });
                    write!(f, "{:>12}", format!("-{}", index + 1))?;
                }
                None => write!(f, "{count:>12}")?,
            }
        }
    }
    for (index, reason) in reasons.iter().enumerate() {
        write!(f, "\n  -{} impossible: {reason}", index + 1)?;
    }
    Ok(())
}

fn cells(table: Table) -> impl Iterator<Item = (Fault, Phase)> {
    table.faults().iter().flat_map(|fault| Phase::ALL.map(|phase| (*fault, phase)))
}

pub(crate) fn impossible(table: Table, fault: Fault, phase: Phase) -> Option<&'static str> {
    match table {
        Table::OneHost => impossible_on_one_host(fault, phase),
        Table::Pair if matches!(fault, Fault::KillOther | Fault::PowerCutOther | Fault::OtherLinkCut) => {
            Some("there is no third host")
        }
        Table::Pair | Table::Hosts => impossible_between_hosts(fault, phase),
    }
}

fn impossible_between_hosts(fault: Fault, phase: Phase) -> Option<&'static str> {
    use Phase::{Committing, Discarding, Ended, Filling, Releasing, Retiring, TakingBack};
    match (fault, phase) {
        (_, Ended) => Some("it is over at the instant at which it begins"),
        (Fault::Cancel, Releasing | Committing | Filling | Retiring | TakingBack | Discarding) => {
            Some("it is too late for that")
        }
        // The departure of a volume that returns into its reservoir may still be in this phase.
        (Fault::HandBack, phase) if !matches!(phase, Committing | Filling | TakingBack | Discarding) => {
            Some("trials are made once the volumes have been handed over, and not given back")
        }
        _ => None,
    }
}

/// Returns whether a fault strikes in a phase only with a cancellation: no other record is committed while the gates close.
pub(crate) fn commits_a_cancellation(fault: Fault, phase: Phase) -> bool {
    matches!(fault, Fault::JournalError | Fault::JournalSlow) && phase == Phase::Closing
}

/// Returns whether a fault strikes in a phase only if another one has struck as well: such cells are not required.
fn is_seldom(table: Table, fault: Fault, phase: Phase) -> bool {
    use Phase::{
        Closing, Committing, Discarding, Filling, Memory, Preparing, Releasing, Retiring, TakingBack,
    };
    if table == Table::OneHost {
        // The missing set of a copy is kept during the copying: the source's flush for it may end later.
        return matches!(fault, Fault::SourceError | Fault::SourceSlow)
            && matches!(phase, Releasing | Committing | TakingBack);
    }
    match fault {
        // The source's disk gets no request past the commit point, and before it only if the mirror is behind.
        Fault::SourceSlow if phase == Filling => false,
        Fault::SourceError | Fault::SourceSlow => !matches!(phase, Phase::Copying | Discarding),
        // The target's disk gets no request between its promise and the commit, nor after a hand-back.
        Fault::TargetError | Fault::TargetHang | Fault::TargetSlow => {
            matches!(phase, Releasing | Filling | Retiring | TakingBack | Discarding)
        }
        Fault::TargetFull => {
            matches!(phase, Preparing | Releasing | Committing | Filling | Retiring | TakingBack)
        }
        // No record is committed except late ones of an earlier attempt.
        Fault::JournalError | Fault::JournalSlow => matches!(phase, Memory | Closing | TakingBack),
        // A target that has promised something cannot cancel.
        Fault::CancelThere => {
            matches!(phase, Releasing | Committing | Filling | Retiring | TakingBack | Discarding)
        }
        Fault::HandBack => phase != Committing,
        // With two hosts, one has the volume, and the other's image is in use during the move.
        Fault::ImageTouched if table == Table::Pair => true,
        // Few migrations get there, and fewer with this fault.
        Fault::KillOther | Fault::PowerCutOther | Fault::OtherLinkCut | Fault::ImageTouched => {
            matches!(phase, TakingBack | Memory)
        }
        _ => false,
    }
}

fn impossible_on_one_host(fault: Fault, phase: Phase) -> Option<&'static str> {
    use Phase::{Committing, Discarding, Ended, Filling, Memory, Preparing, Releasing, Retiring, TakingBack};
    match (fault, phase) {
        (_, Filling) => Some("nothing is left behind on one host"),
        (_, Memory) => Some("no VM goes along: the two hosts' model in `migration` has one"),
        (Fault::Kill | Fault::PowerCut | Fault::Cancel, _) => None,
        (_, Ended) => Some("it is over at the instant at which it begins"),
        (Fault::TargetError | Fault::TargetHang | Fault::TargetSlow, Releasing) => {
            Some("nothing is asked of the target between its promise and the commit")
        }
        (Fault::TargetFull, Preparing | Releasing | Committing | TakingBack) => Some(
            "nothing is written to the target: all is synchronised, and the gates are closed, or the try is over",
        ),
        (Fault::TargetFull | Fault::TargetRestart, Retiring) => {
            Some("the target is the owner: its faults are no longer the migration's")
        }
        // The trials of several volumes end one after the other: the first failure begins the hand-back.
        (Fault::HandBack, phase) if !matches!(phase, Committing | TakingBack | Discarding) => {
            Some("trials are made once the volumes have been handed over, and not given back")
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn struck(cells: &[(Fault, Phase)]) -> Struck {
        let mut struck = Struck::default();
        cells.iter().for_each(|(fault, phase)| struck.add(Kind::Tracking, *fault, *phase));
        struck
    }

    fn reached(seeds: u64, cells: &[(Fault, Phase)]) -> Coverage {
        let struck = struck(cells);
        let mut coverage = Coverage::default();
        (0..seeds).for_each(|_| coverage.add(&struck));
        coverage
    }

    fn possible() -> Vec<(Fault, Phase)> {
        cells(Table::OneHost)
            .filter(|(fault, phase)| impossible(Table::OneHost, *fault, *phase).is_none())
            .collect()
    }

    #[test]
    fn a_possible_cell_that_too_few_seeds_reach_is_found() {
        let mut cells = possible();
        assert_eq!(reached(5, &cells).below(5), []);
        let left_out = cells.remove(7);
        let found = reached(5, &cells).below(5);
        assert_eq!(found, [Cell { fault: left_out.0, phase: left_out.1, seeds: 0 }]);
        assert_eq!(reached(5, &cells).fewest(), 0);
    }

    #[test]
    fn what_one_strategy_meets_counts_for_no_other() {
        let coverage = reached(5, &possible());
        let fewest: Vec<_> =
            coverage.by_strategy().map(|(kind, table)| (kind.name(), table.fewest())).collect();
        assert_eq!(fewest, [("mirror", 0), ("asynchronous mirror", 0), ("tracking", 5)]);
    }

    #[test]
    fn an_impossible_cell_that_is_reached_is_found() {
        assert_eq!(struck(&possible()).contradictions(Table::OneHost), []);
        let wrong = [(Fault::TargetFull, Phase::Committing)];
        assert_eq!(struck(&wrong).contradictions(Table::OneHost), wrong);
        let table = reached(3, &wrong).to_string();
        assert!(table.contains("3!"), "{table}");
    }

    #[test]
    fn a_cancellation_can_be_committed_while_the_gates_close() {
        let cells = [(Fault::JournalError, Phase::Closing), (Fault::JournalSlow, Phase::Closing)];
        assert_eq!(struck(&cells).contradictions(Table::OneHost), []);
    }

    #[test]
    fn fewer_seeds_are_to_reach_proportionally_less() {
        let wanted = |seeds| wanted(Table::OneHost, seeds);
        assert_eq!([300, 10_000, 100_000, 200_000].map(wanted), [0, 5, 50, 100]);
    }
}
