//! What a target was told that it lacks, before the volume is this host's; a [`Filling`] is made of nothing else.
//!
//! ```text
//!   told, piece by piece ──► kept ──┐
//!   found by a restart ─────────────┴──► Told ──the volume is this host's──► Filling
//! ```

use chronicle::{BlockRange, LayeredBitmap};

use super::{Filling, FillingSettings, LogEntry, Manifest, Telling, UnitMap, decode_runs, units_of};
use crate::planted::{Bug, broken};

/// Runs in one entry of what is kept: an entry stays far below what a frame holds.
const ENTRY_RUNS_MAX: usize = 256 << 10;

/// What was told, and is durable when its telling is complete.
#[derive(Debug)]
pub struct Told {
    size_bytes: u64,
    /// What was told, or what a restart has found.
    units: UnitMap,
    /// Runs of the telling that is not complete.
    pieces: Vec<BlockRange>,
    /// Whether that is the one of everything.
    is_base: bool,
    /// Whether all that was told is kept, durably. Not before the last entry is: another telling that is under way, or one that
    /// could not be kept, makes that false until the next of everything.
    is_kept: bool,
    /// Number of the latest telling that was to be kept.
    latest: u64,
}

/// A telling of which the last piece has come.
#[derive(Debug)]
pub struct Complete {
    number: u64,
    /// What is to be kept, in this order, and whether that is the first of all.
    pub entries: Vec<(LogEntry, bool)>,
}

/// A piece that is not one of this volume, or that goes on from a telling which is not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("take a piece of what is missing")]
pub struct NoPiece;

impl Told {
    /// Begins with what a restart has found ([`super::replay`]); `None`: nothing was told, or nothing of that is left.
    pub fn new(size_bytes: u64, found: Option<UnitMap>) -> Self {
        let is_kept = found.is_some();
        let empty = || LayeredBitmap::new(units_of(size_bytes));
        let mut units = found.unwrap_or_else(|| UnitMap {
            missing: empty(),
            late: empty(),
            volatile: empty(),
            manifest: Manifest::NOTHING,
        });
        if broken(Bug::NotedForgotten) {
            units.volatile.clear();
        }
        Self { size_bytes, units, pieces: Vec::new(), is_base: false, is_kept, latest: 0 }
    }

    /// Begins to fill the volume: it is this host's. What guests wrote before a kill is recorded by the next round.
    pub fn begin(&self, settings: FillingSettings) -> Filling {
        Filling::new(settings, self.units.clone())
    }

    /// Takes a piece of a telling, and returns all of it if that was the last.
    ///
    /// # Errors
    /// [`NoPiece`].
    pub fn take(&mut self, is_base: bool, is_last: bool, runs: &[u8]) -> Result<Option<Complete>, NoPiece> {
        let runs = decode_runs(runs, self.size_bytes).ok_or(NoPiece)?;
        if is_base {
            self.pieces.clear();
            self.is_base = true;
        } else if !self.is_base && !self.is_kept {
            return Err(NoPiece);
        }
        self.pieces.extend(runs);
        if !is_last {
            return Ok(None);
        }
        let (pieces, is_base) = (std::mem::take(&mut self.pieces), std::mem::take(&mut self.is_base));
        let UnitMap { missing, late, volatile, manifest } = &mut self.units;
        if is_base {
            missing.clear();
            late.clear();
            volatile.clear();
        }
        for run in &pieces {
            missing.insert(*run);
            volatile.remove(*run);
            if !is_base {
                late.insert(*run);
            }
        }
        *manifest = Manifest::of(missing);
        self.is_kept = false;
        self.latest += 1;
        let mut chunks: Vec<Vec<_>> = pieces.chunks(ENTRY_RUNS_MAX).map(<[_]>::to_vec).collect();
        if chunks.is_empty() && is_base {
            // Nothing is missing, and that has to be known.
            chunks.push(Vec::new());
        }
        let entry = |(index, runs)| {
            let telling = match (is_base, index) {
                (true, 0) => Telling::Everything,
                (true, _) => Telling::EverythingGoesOn,
                (false, _) => Telling::Since,
            };
            (LogEntry::Missing { telling, runs }, telling == Telling::Everything)
        };
        let entries = chunks.into_iter().enumerate().map(entry).collect();
        Ok(Some(Complete { number: self.latest, entries }))
    }

    /// A telling is kept, and with it all that was told unless another has come meanwhile.
    pub fn kept(&mut self, telling: &Complete) {
        self.is_kept = self.latest == telling.number;
    }

    /// What identifies all that was told; `None`: nothing was, or not all of it is kept.
    pub fn manifest(&self) -> Option<Manifest> {
        self.is_kept.then_some(self.units.manifest)
    }

    /// How many units are missing.
    pub fn units_missing(&self) -> u64 {
        self.units.missing.count()
    }
}

#[cfg(test)]
mod tests {
    use super::super::encode_runs;
    use super::*;

    const SIZE_BYTES: u64 = 64 << 10;

    fn runs(blocks: &[(u64, u64)]) -> Vec<u8> {
        let mut missing = LayeredBitmap::new(units_of(SIZE_BYTES));
        for (start, end) in blocks {
            missing.insert(BlockRange::new(*start, *end));
        }
        encode_runs(missing.runs(), 1 << 10).concat()
    }

    #[test]
    fn what_is_missing_is_known_only_when_all_of_it_is_kept() {
        let mut told = Told::new(SIZE_BYTES, None);
        assert!(told.take(true, false, &runs(&[(0, 2)])).expect("a piece").is_none());
        let base = told.take(false, true, &runs(&[(4, 5)])).expect("a piece").expect("the last");
        assert_eq!(told.manifest(), None, "nothing was kept");
        told.kept(&base);
        assert_eq!(told.units_missing(), 3);
        let known = told.manifest().expect("all was kept");

        let more = told.take(false, true, &runs(&[(8, 9)])).expect("a piece").expect("the last");
        assert_eq!(told.manifest(), None, "what came later is not kept");
        told.kept(&more);
        assert_ne!(told.manifest().expect("all was kept"), known);
    }

    #[test]
    fn what_could_not_be_kept_is_followed_by_everything_only() {
        let mut told = Told::new(SIZE_BYTES, None);
        let lost = told.take(true, true, &runs(&[(0, 2)])).expect("a piece").expect("the last");
        assert!(told.take(false, true, &runs(&[(4, 5)])).is_err(), "it goes on from what is not kept");
        let base = told.take(true, true, &runs(&[(1, 2)])).expect("a piece").expect("the last");
        told.kept(&lost);
        assert_eq!(told.manifest(), None, "an older telling says nothing of a newer");
        told.kept(&base);
        assert_eq!(told.units_missing(), 1);
        assert!(told.manifest().is_some());
    }
}
