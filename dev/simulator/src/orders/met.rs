//! Which orders were given in which phases, and the table of them.

use std::fmt;

use migration::Phase;

use super::given::Order;

const PHASES: usize = Phase::ALL.len();
const ORDERS: usize = Order::ALL.len();
/// The seeds of [`SEEDS_OF_WANTED`] that must reach each cell.
const SEEDS_WANTED: u64 = 10;
const SEEDS_OF_WANTED: u64 = 10_000;

/// The seeds that have given an order in a phase: of a whole volume, and of one that leaves blocks behind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Met([[[u64; PHASES]; ORDERS]; 2]);

impl Met {
    pub(super) fn add(&mut self, order: Order, phase: Phase, is_hollow: bool) {
        self.0[usize::from(is_hollow)][order as usize][phase as usize] += 1;
    }

    pub(super) fn add_seed(&mut self, seed: &Self) {
        let rows = self.0.iter_mut().flatten().zip(seed.0.iter().flatten());
        for (counts, given) in rows {
            counts.iter_mut().zip(given).for_each(|(count, given)| *count += u64::from(*given > 0));
        }
    }

    /// Returns the cells that too few seeds have reached, and those that are said to be impossible and were reached.
    pub(crate) fn wrong(&self, seeds: u64) -> Vec<String> {
        let wanted = SEEDS_WANTED * seeds / SEEDS_OF_WANTED;
        let cells = [false, true].into_iter().flat_map(|hollow| Order::ALL.map(|order| (hollow, order)));
        let cells = cells.flat_map(|(hollow, order)| Phase::ALL.map(|phase| (hollow, order, phase)));
        let wrong = cells.filter_map(|(hollow, order, phase)| {
            let count = self.0[usize::from(hollow)][order as usize][phase as usize];
            let what = format!("{} in {phase} of {} volumes", order.name(), kind(hollow));
            match excused(order, phase, hollow) {
                Some(reason) if count > 0 => {
                    Some(format!("{what} was given in {count} seeds, and is excused: {reason}"))
                }
                None if count < wanted => {
                    Some(format!("{what} was given in {count} seeds, {wanted} are wanted"))
                }
                _ => None,
            }
        });
        wrong.collect()
    }
}

fn kind(is_hollow: bool) -> &'static str {
    if is_hollow { "incomplete" } else { "complete" }
}

/// Returns why an order cannot be given in a phase.
fn excused(_: Order, phase: Phase, is_hollow: bool) -> Option<&'static str> {
    match phase {
        Phase::Memory => Some("no VM goes along"),
        Phase::Filling if !is_hollow => Some("nothing is missing at the target"),
        Phase::Ended if is_hollow => Some("between migrations no volume lacks blocks by one"),
        _ => None,
    }
}

impl fmt::Display for Met {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut reasons: Vec<&'static str> = Vec::new();
        for is_hollow in [false, true] {
            write!(f, "{:<20}", format!("order, {}", kind(is_hollow)))?;
            Phase::ALL.iter().try_for_each(|phase| write!(f, "{:>12}", phase.name()))?;
            for order in Order::ALL {
                write!(f, "\n{:<20}", order.name())?;
                for phase in Phase::ALL {
                    let count = self.0[usize::from(is_hollow)][order as usize][phase as usize];
                    match excused(order, phase, is_hollow) {
                        Some(reason) if count == 0 => {
                            let known = reasons.iter().position(|known| *known == reason);
                            let index = known.unwrap_or_else(|| {
                                reasons.push(reason);
                                reasons.len() - 1
                            });
                            write!(f, "{:>12}", format!("-{}", index + 1))?;
                        }
                        _ => write!(f, "{count:>12}")?,
                    }
                }
            }
            writeln!(f)?;
        }
        reasons
            .iter()
            .enumerate()
            .try_for_each(|(index, reason)| writeln!(f, "  -{} not: {reason}", index + 1))
    }
}
