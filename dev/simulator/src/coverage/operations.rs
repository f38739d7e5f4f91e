//! The orders of administrators that simulations have given: by strategy, and by the phase in which they came.
//!
//! A cell is demanded, or excused for a recorded reason.

use std::fmt;

use migration::Phase;

use super::{Kind, PHASES, Table};

const OPERATIONS: usize = Operation::ALL.len();
/// The seeds of [`SEEDS_OF_WANTED`] that must reach each demanded cell; fewer seeds proportionally less.
const SEEDS_WANTED: u64 = 10;
const SEEDS_OF_WANTED: u64 = 100_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Cancel,
    /// The target's administrator cancels.
    CancelThere,
    Pause,
    Resume,
    Bandwidth,
    /// Interrupted migrations are tried again at once.
    LookAgain,
    /// The source's daemon is stopped in order.
    Stop,
    /// The target's copy is promoted by the ticket that the source prints, or does not.
    Ticket,
}

impl Operation {
    pub(crate) const ALL: [Self; 8] = [
        Self::Cancel,
        Self::CancelThere,
        Self::Pause,
        Self::Resume,
        Self::Bandwidth,
        Self::LookAgain,
        Self::Stop,
        Self::Ticket,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Cancel => "cancel",
            Self::CancelThere => "cancel there",
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::Bandwidth => "bandwidth",
            Self::LookAgain => "look again",
            Self::Stop => "stop",
            Self::Ticket => "ticket",
        }
    }

    pub(crate) fn is_of(self, table: Table) -> bool {
        table != Table::OneHost || !matches!(self, Self::CancelThere | Self::Ticket)
    }
}

/// The orders of one simulation; each cell counts once per seed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Given([[[bool; PHASES]; OPERATIONS]; Kind::ALL.len()]);

impl Given {
    pub(crate) fn add(&mut self, kind: Kind, operation: Operation, phase: Phase) {
        self.0[kind as usize][operation as usize][phase as usize] = true;
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Orders {
    table: Table,
    counts: [[[u64; PHASES]; OPERATIONS]; Kind::ALL.len()],
}

impl Orders {
    pub(crate) fn of(table: Table) -> Self {
        Self { table, ..Self::default() }
    }

    pub(crate) fn add(&mut self, given: &Given) {
        let rows = self.counts.iter_mut().flatten().zip(given.0.iter().flatten());
        for (counts, given) in rows {
            counts.iter_mut().zip(given).for_each(|(count, given)| *count += u64::from(*given));
        }
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        let rows = self.counts.iter_mut().flatten().zip(other.counts.iter().flatten());
        for (counts, others) in rows {
            counts.iter_mut().zip(others).for_each(|(count, other)| *count += other);
        }
    }

    /// Returns what is wrong: demanded cells that too few seeds have reached, and excused ones that were reached.
    pub(crate) fn wrong(&self, seeds: u64) -> Vec<String> {
        let wanted = wanted(seeds);
        let cells = self.cells().filter_map(|(kind, operation, phase)| {
            let count = self.count(kind, operation, phase);
            let what = format!("{} in {phase}, {}", operation.name(), kind.name());
            match excused(self.table, kind, operation, phase) {
                Some(reason) if count > 0 => Some(format!("{what}: given in {count} seeds, though {reason}")),
                None if count < wanted => {
                    Some(format!("{what}: given in {count} seeds, {wanted} are wanted"))
                }
                _ => None,
            }
        });
        cells.collect()
    }

    fn cells(&self) -> impl Iterator<Item = (Kind, Operation, Phase)> + use<'_> {
        let kinds = Kind::ALL.into_iter().filter(|kind| kind.is_of(self.table));
        let rows = kinds.flat_map(|kind| Operation::ALL.map(|operation| (kind, operation)));
        let rows = rows.filter(|(_, operation)| operation.is_of(self.table));
        rows.flat_map(|(kind, operation)| Phase::ALL.map(|phase| (kind, operation, phase)))
    }

    fn count(&self, kind: Kind, operation: Operation, phase: Phase) -> u64 {
        self.counts[kind as usize][operation as usize][phase as usize]
    }
}

fn wanted(seeds: u64) -> u64 {
    SEEDS_WANTED * seeds / SEEDS_OF_WANTED
}

/// Returns why no order can come in a phase.
fn excused(table: Table, kind: Kind, operation: Operation, phase: Phase) -> Option<&'static str> {
    match phase {
        Phase::Ended => Some("it is over at the instant at which it begins"),
        Phase::Memory if table == Table::OneHost => Some("no VM goes along on one host"),
        Phase::Filling if kind != Kind::PostCopy => Some("nothing is left behind"),
        Phase::Memory if operation == Operation::Stop => {
            Some("a VM outlives its daemon, whose orderly stop is not simulated")
        }
        _ => None,
    }
}

impl fmt::Display for Orders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut reasons: Vec<&'static str> = Vec::new();
        let mut row = None;
        for (kind, operation, phase) in self.cells() {
            if row.map(|(kind, _)| kind) != Some(kind) {
                write!(f, "\n{:<32}", format!("order × phase: {}", kind.name()))?;
                Phase::ALL.iter().try_for_each(|phase| write!(f, "{:>12}", phase.name()))?;
            }
            if row != Some((kind, operation)) {
                write!(f, "\n{:<32}", operation.name())?;
            }
            row = Some((kind, operation));
            match (excused(self.table, kind, operation, phase), self.count(kind, operation, phase)) {
                (Some(reason), 0) => {
                    let index = reasons.iter().position(|known| *known == reason).unwrap_or_else(|| {
                        reasons.push(reason);
                        reasons.len() - 1
                    });
                    write!(f, "{:>12}", format!("-{}", index + 1))?;
                }
                (Some(_), count) => write!(f, "{:>12}", format!("{count}!"))?,
                (None, count) => write!(f, "{count:>12}")?,
            }
        }
        reasons
            .iter()
            .enumerate()
            .try_for_each(|(index, reason)| write!(f, "\n  -{} not: {reason}", index + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fewest seeds that are asked for anything.
    const SEEDS: u64 = SEEDS_OF_WANTED / SEEDS_WANTED;

    fn all(table: Table) -> Given {
        let mut given = Given::default();
        let demanded = Orders::of(table);
        let cells = demanded
            .cells()
            .filter(|(kind, operation, phase)| excused(table, *kind, *operation, *phase).is_none());
        cells.for_each(|(kind, operation, phase)| given.add(kind, operation, phase));
        given
    }

    #[test]
    fn a_demanded_cell_without_an_order_and_an_excused_one_with_one_are_found() {
        for table in [Table::OneHost, Table::Pair, Table::Hosts] {
            let mut orders = Orders::of(table);
            orders.add(&all(table));
            assert_eq!(orders.wrong(SEEDS), [] as [String; 0]);
            assert_eq!(Orders::of(table).wrong(SEEDS - 1), [] as [String; 0]);
            let mut more = Given::default();
            more.add(Kind::Tracking, Operation::Pause, Phase::Filling);
            orders.add(&more);
            assert_eq!(orders.wrong(SEEDS).len(), 1);
            let empty = Orders::of(table).wrong(SEEDS);
            assert!(empty.len() > 100 && empty[0].contains("1 are wanted"), "{empty:?}");
        }
    }

    #[test]
    fn what_is_excused_is_shown_with_its_reason() {
        let shown = Orders::of(Table::OneHost).to_string();
        assert!(shown.contains("nothing is left behind") && !shown.contains("ticket"), "{shown}");
    }
}
