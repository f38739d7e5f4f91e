//! Collects the missing-set updates at a target before the volume is this host's. Only this makes a [`Filling`].
//!
//! ```text
//!   received, update by update ──► kept ──┐
//!   found by a restart ───────────────────┴──► Told ──the volume is this host's──► Filling
//! ```

use chronicle::{BlockRange, LayeredBitmap};

use super::{Filling, FillingSettings, LogEntry, Manifest, Telling, UnitMap, decode_runs, units_of};
use crate::planted::{Bug, broken};

/// The most runs in one kept entry: an entry stays far below the limit of a frame.
const ENTRY_RUNS_MAX: usize = 256 << 10;

/// The missing set of a volume, as received. It is durable once its update is complete.
#[derive(Debug)]
pub struct Told {
    size_bytes: u64,
    units: UnitMap,
    /// The runs of the update that is not complete yet.
    pieces: Vec<BlockRange>,
    /// Whether that update is a complete set.
    is_base: bool,
    /// Whether the whole missing set is durable, up to the last entry. An update under way, or one that could not be kept,
    /// makes this false until the next complete set.
    is_kept: bool,
    latest: u64,
}

/// An update whose last piece has arrived.
#[derive(Debug)]
pub struct Complete {
    number: u64,
    /// The entries to keep, in order; `true` marks an entry that begins the file anew.
    pub entries: Vec<(LogEntry, bool)>,
}

/// A piece that does not belong to this volume, or that continues an update which is not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("take a piece of what is missing")]
pub struct NoPiece;

impl Told {
    /// Begins with the result of a restart ([`super::replay`]); `None` if nothing was received or kept.
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

    /// Begins to fill the volume, which is now this host's. The next round records the units that guests wrote before a kill.
    pub fn begin(&self, settings: FillingSettings) -> Filling {
        Filling::new(settings, self.units.clone())
    }

    /// Adds a piece of an update, and returns the complete update if this was the last piece.
    ///
    /// # Errors
    /// [`NoPiece`]: the piece is malformed or out of order.
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
            // An empty missing set must be recorded, too.
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

    /// Notes that an update is durable. The whole missing set is, unless another update has arrived meanwhile.
    pub fn kept(&mut self, telling: &Complete) {
        self.is_kept = self.latest == telling.number;
    }

    /// Returns the manifest of the missing set; `None` if there is none, or not all of it is kept.
    pub fn manifest(&self) -> Option<Manifest> {
        self.is_kept.then_some(self.units.manifest)
    }

    /// Returns the number of missing units.
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
