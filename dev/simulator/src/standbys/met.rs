//! Which faults and orders have struck in which phases of the standby's host, and the table of them.

use std::fmt;

macro_rules! named {
    ($(#[$doc:meta])* $name:ident: $($variant:ident = $text:literal,)*) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum $name { $($variant,)* }

        impl $name {
            pub(crate) const ALL: &'static [Self] = &[$(Self::$variant),*];

            pub(crate) fn name(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }
        }
    };
}

named! {
    /// What happens.
    Fault:
    OwnerKilled = "owner killed",
    OwnerPowerCut = "owner's power cut",
    Asked = "owner asks",
    OwnerRestored = "owner's journal restored",
    OwnerFlushFailed = "owner's flush failed",
    WriteFailed = "write failed",
    ReadFailed = "read failed",
    StandbyKilled = "standby killed",
    StandbyPowerCut = "standby's power cut",
    StandbyRestored = "standby's journal restored",
    StandbyFlushFailed = "standby's flush failed",
    LinkBroken = "link broken",
    ImageTouched = "image touched",
    NoGrowth = "growth refused",
    Grown = "volume grown",
    HandedOver = "handed over",
    Paused = "paused",
    Tested = "tested",
    PromoteRefused = "promotion refused",
    Promoted = "promoted",
    Consumed = "consumed",
    Doubted = "doubted",
}

named! {
    /// What the standby's host does.
    Phase:
    Down = "down",
    Waiting = "waits",
    Spooling = "spools",
    InPlace = "in place",
    Sealing = "seals",
    Keeping = "point",
    Applying = "applies",
    Flushing = "flushes",
    Recording = "records",
    Restoring = "restores",
    Ended = "ended",
}

/// The seeds of [`SEEDS_OF_WANTED`] that must reach each cell.
const SEEDS_WANTED: u64 = 2;
const SEEDS_OF_WANTED: u64 = 10_000;

/// The number of times that each fault has struck in each phase; of many seeds, the number of seeds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Met(Vec<Vec<u64>>);

impl Default for Met {
    fn default() -> Self {
        Self(vec![vec![0; Phase::ALL.len()]; Fault::ALL.len()])
    }
}

impl Met {
    pub(super) fn add(&mut self, fault: Fault, phase: Phase) {
        self.0[fault as usize][phase as usize] += 1;
    }

    pub(super) fn add_seed(&mut self, seed: &Self) {
        for (counts, met) in self.0.iter_mut().zip(&seed.0) {
            counts.iter_mut().zip(met).for_each(|(count, met)| *count += u64::from(*met > 0));
        }
    }

    /// Returns the cells that too few seeds have reached, and those that are said to be impossible and were reached.
    pub(crate) fn wrong(&self, seeds: u64) -> Vec<String> {
        let of_seeds = SEEDS_WANTED * seeds / SEEDS_OF_WANTED;
        let mut wrong = Vec::new();
        for (fault, phase) in
            Fault::ALL.iter().flat_map(|fault| Phase::ALL.iter().map(move |phase| (*fault, *phase)))
        {
            let count = self.0[fault as usize][phase as usize];
            let wanted = if is_rare(fault, phase) { 0 } else { of_seeds };
            let (fault_name, phase_name) = (fault.name(), phase.name());
            match excused(fault, phase) {
                Some(reason) if count > 0 => {
                    wrong.push(format!("{fault_name} ({phase_name}) was met, and is excused: {reason}"));
                }
                None if count < wanted => {
                    wrong.push(format!(
                        "{fault_name} ({phase_name}) was met in {count} seeds, {wanted} are wanted"
                    ));
                }
                _ => {}
            }
        }
        wrong
    }
}

/// Returns whether a fault need not strike in a phase.
fn is_rare(fault: Fault, phase: Phase) -> bool {
    let is_of_standby = matches!(fault, Fault::StandbyKilled | Fault::StandbyPowerCut);
    match phase {
        // It lasts for a moment, after the owner's host was lost.
        Phase::Restoring => !is_of_standby,
        Phase::Sealing | Phase::Flushing => fault == Fault::ReadFailed,
        // A flush of a spool beside it.
        _ => matches!(fault, Fault::ReadFailed | Fault::StandbyFlushFailed),
    }
}

/// Returns why a fault cannot strike in a phase.
fn excused(fault: Fault, phase: Phase) -> Option<&'static str> {
    let needs_process = matches!(
        fault,
        Fault::StandbyKilled
            | Fault::StandbyPowerCut
            | Fault::StandbyRestored
            | Fault::StandbyFlushFailed
            | Fault::LinkBroken
            | Fault::Tested
            | Fault::PromoteRefused
            | Fault::Promoted
            | Fault::Consumed
            | Fault::HandedOver
    );
    match (fault, phase) {
        (_, Phase::Down) if needs_process => Some("it needs the daemon"),
        (Fault::Promoted | Fault::ImageTouched, Phase::Ended) => Some("it has ended"),
        (Fault::Promoted, Phase::Restoring) => Some("it was promoted before"),
        _ => None,
    }
}

impl fmt::Display for Met {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<28}", "seeds with")?;
        Phase::ALL.iter().try_for_each(|phase| write!(f, "{:>9}", phase.name()))?;
        for fault in Fault::ALL {
            write!(f, "\n{:<28}", fault.name())?;
            for phase in Phase::ALL {
                let count = self.0[*fault as usize][*phase as usize];
                match excused(*fault, *phase) {
                    Some(_) if count == 0 => write!(f, "{:>9}", "-")?,
                    _ => write!(f, "{count:>9}")?,
                }
            }
        }
        Ok(())
    }
}
