//! Which faults have really struck in which phases, and which cannot.

use migration::Phase;

use crate::faults::Fault;

/// The cells that one simulation has reached; each counts once a seed, however often it was struck.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Struck([[bool; PHASES]; FAULTS]);

/// How many seeds have reached each cell.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Coverage([[u64; PHASES]; FAULTS]);

const PHASES: usize = Phase::ALL.len();
const FAULTS: usize = Fault::ALL.len();
/// What each possible cell is to reach in 100,000 seeds.
pub(crate) const SEEDS_WANTED: u64 = 50;

impl Struck {
    /// A fault has struck in a phase.
    pub(crate) fn add(&mut self, fault: Fault, phase: Phase) {
        self.0[row(fault)][phase as usize] = true;
    }
}

impl Coverage {
    /// Adds the cells of one simulation.
    pub(crate) fn add(&mut self, struck: &Struck) {
        for (counts, cells) in self.0.iter_mut().zip(&struck.0) {
            for (count, cell) in counts.iter_mut().zip(cells) {
                *count += u64::from(*cell);
            }
        }
    }

    /// Adds another table, of other seeds.
    pub(crate) fn merge(&mut self, other: &Self) {
        for (counts, others) in self.0.iter_mut().zip(&other.0) {
            for (count, other) in counts.iter_mut().zip(others) {
                *count += other;
            }
        }
    }

    /// The possible cells that fewer than `wanted` seeds have reached.
    pub(crate) fn below(&self, wanted: u64) -> Vec<(Fault, Phase, u64)> {
        let cells = Fault::ALL.into_iter().flat_map(|fault| Phase::ALL.map(|phase| (fault, phase)));
        let possible = cells.filter(|(fault, phase)| impossible(*fault, *phase).is_none());
        let counted = possible.map(|(fault, phase)| (fault, phase, self.0[row(fault)][phase as usize]));
        counted.filter(|(_, _, count)| *count < wanted).collect()
    }
}

impl std::fmt::Display for Coverage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:<15}", "fault × phase")?;
        for phase in Phase::ALL {
            write!(f, "{:>12}", phase.name())?;
        }
        let mut reasons: Vec<&'static str> = Vec::new();
        for fault in Fault::ALL {
            write!(f, "\n{:<15}", fault.name())?;
            for phase in Phase::ALL {
                let count = self.0[row(fault)][phase as usize];
                match impossible(fault, phase) {
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
        for (index, reason) in reasons.iter().enumerate() {
            write!(f, "\n  -{} impossible: {reason}", index + 1)?;
        }
        Ok(())
    }
}

fn row(fault: Fault) -> usize {
    Fault::ALL.iter().position(|known| *known == fault).unwrap_or(0)
}

/// Why a fault cannot strike in a phase; `None` if it can.
pub(crate) fn impossible(fault: Fault, phase: Phase) -> Option<&'static str> {
    use Phase::{
        Closing, Committing, Copying, Discarding, Ended, Preparing, Releasing, Retiring, TakingBack,
    };
    match (fault, phase) {
        (Fault::Kill | Fault::PowerCut | Fault::Cancel, _) => None,
        (_, Ended) => Some("it is over at the instant at which it begins"),
        (Fault::SourceError | Fault::SourceSlow, Releasing | Committing | TakingBack) => {
            Some("nothing is asked of the source: the gates are closed, or it owns nothing")
        }
        (Fault::TargetError | Fault::TargetHang | Fault::TargetSlow, Releasing | TakingBack) => {
            Some("nothing is asked of the target")
        }
        (Fault::TargetFull, Preparing | Releasing | Committing | TakingBack | Discarding) => {
            Some("nothing is written to the target, or the copying has been stopped")
        }
        (Fault::TargetFull | Fault::TargetRestart, Retiring) => {
            Some("the target is the owner: its faults are no longer the migration's")
        }
        (Fault::TargetRestart, TakingBack | Discarding) => Some("the target has nothing to lose any more"),
        (Fault::HandBack, phase) if phase != Committing => Some("the trial is made while committing"),
        (Fault::JournalError | Fault::JournalSlow, Closing) => Some("nothing is committed"),
        (_, Copying | Closing | Preparing | Releasing | Committing | Retiring | TakingBack | Discarding) => {
            None
        }
    }
}
