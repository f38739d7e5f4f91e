//! What a target was told that it lacks, before the volume is this host's.

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
    /// Whether all of what was told has been kept; known to be only once something was.
    is_complete: bool,
}

impl Told {
    pub(super) fn new(size_bytes: u64, known: Option<UnitMap>) -> Self {
        let empty = || LayeredBitmap::new(units_of(size_bytes));
        let is_complete = known.is_some();
        let (missing, late) = match known {
            Some(known) => (known.missing, known.late),
            None => (empty(), empty()),
        };
        Self { size_bytes, missing, late, pieces: Vec::new(), is_base: false, is_complete }
    }

    /// Takes a piece of a telling; `None`: it is none. Returns what is to be kept, in this order, and whether that is the first
    /// of all.
    pub(super) fn take(
        &mut self,
        is_base: bool,
        is_last: bool,
        runs: &[u8],
    ) -> Option<Vec<(LogEntry, bool)>> {
        let runs = decode_runs(runs, self.size_bytes)?;
        if is_base {
            self.pieces.clear();
            self.is_base = true;
            self.is_complete = false;
        }
        self.pieces.extend(runs);
        if !is_last {
            return Some(Vec::new());
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
        self.is_complete = true;
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
        Some(chunks.into_iter().enumerate().map(entry).collect())
    }

    /// What identifies all that was told; `None`: nothing was, or not all of it.
    pub(super) fn manifest(&self) -> Option<Manifest> {
        self.is_complete.then(|| Manifest::of(&self.missing))
    }

    /// What is missing by that.
    pub(super) fn units(&self) -> UnitMap {
        let manifest = Manifest::of(&self.missing);
        let volatile = LayeredBitmap::new(self.missing.blocks());
        UnitMap { missing: self.missing.clone(), late: self.late.clone(), volatile, manifest }
    }
}
