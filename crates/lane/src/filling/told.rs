//! What a target was told that it lacks, before the volume is this host's.

use block::IoError;
use chronicle::LayeredBitmap;
use migration::filling::{LogEntry, Manifest, Telling, UnitMap, decode_runs, units_of};

/// Runs in one entry of what is kept: an entry stays far below what a frame holds.
const ENTRY_RUNS_MAX: usize = 256 << 10;

/// What was told, and is durable when its telling is complete.
pub(super) struct Told {
    size_bytes: u64,
    missing: LayeredBitmap,
    /// Of that, what was told later.
    late: LayeredBitmap,
    /// Runs of the telling that is not complete.
    pieces: Vec<chronicle::BlockRange>,
    /// Whether that is the one of everything.
    is_base: bool,
    /// Whether all that was told is kept, durably. Not before the last entry is: another telling that is under way, or one that
    /// could not be kept, makes that false until the next of everything.
    is_kept: bool,
    /// Number of the latest telling that was to be kept.
    latest: u64,
}

/// A telling of which the last piece has come.
pub(super) struct Complete {
    number: u64,
    /// What is to be kept, in this order, and whether that is the first of all.
    pub(super) entries: Vec<(LogEntry, bool)>,
}

impl Told {
    pub(super) fn new(size_bytes: u64, known: Option<UnitMap>) -> Self {
        let empty = || LayeredBitmap::new(units_of(size_bytes));
        let is_kept = known.is_some();
        let (missing, late) = match known {
            Some(known) => (known.missing, known.late),
            None => (empty(), empty()),
        };
        Self { size_bytes, missing, late, pieces: Vec::new(), is_base: false, is_kept, latest: 0 }
    }

    /// Takes a piece of a telling, and returns all of it if that was the last.
    ///
    /// # Errors
    /// [`IoError::Unsupported`]: it is none, or goes on from one that is not kept.
    pub(super) fn take(
        &mut self,
        is_base: bool,
        is_last: bool,
        runs: &[u8],
    ) -> Result<Option<Complete>, IoError> {
        let runs = decode_runs(runs, self.size_bytes).ok_or(IoError::Unsupported)?;
        if is_base {
            self.pieces.clear();
            self.is_base = true;
        } else if !self.is_base && !self.is_kept {
            return Err(IoError::Unsupported);
        }
        self.pieces.extend(runs);
        if !is_last {
            return Ok(None);
        }
        let (pieces, is_base) = (std::mem::take(&mut self.pieces), std::mem::take(&mut self.is_base));
        if is_base {
            self.missing.clear();
            self.late.clear();
        }
        for run in &pieces {
            self.missing.insert(*run);
            if !is_base {
                self.late.insert(*run);
            }
        }
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
    pub(super) fn kept(&mut self, telling: &Complete) {
        self.is_kept = self.latest == telling.number;
    }

    /// What identifies all that was told; `None`: nothing was, or not all of it is kept.
    pub(super) fn manifest(&self) -> Option<Manifest> {
        self.is_kept.then(|| Manifest::of(&self.missing))
    }

    /// What is missing by that.
    pub(super) fn units(&self) -> UnitMap {
        let manifest = Manifest::of(&self.missing);
        let volatile = LayeredBitmap::new(self.missing.blocks());
        UnitMap { missing: self.missing.clone(), late: self.late.clone(), volatile, manifest }
    }
}

#[cfg(test)]
mod tests {
    use migration::filling::encode_runs;

    use super::*;

    const SIZE_BYTES: u64 = 64 << 10;

    fn runs(blocks: &[(u64, u64)]) -> Vec<u8> {
        let mut missing = LayeredBitmap::new(units_of(SIZE_BYTES));
        for (start, end) in blocks {
            missing.insert(chronicle::BlockRange::new(*start, *end));
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
        assert_eq!(told.units().missing.count(), 3);
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
        assert_eq!(told.units().missing.count(), 1);
        assert!(told.manifest().is_some());
    }
}
