//! Chunks that are cloned, while the file system does that.
//!
//! ```text
//!   both images plain files, and the daemon has tried it ──► cloned, not paced ──refused──► copied, and paced as any copy
//! ```
//! A clone costs the disk next to nothing, so the pacers of the disks are not told of cloned chunks. Their bytes would pass for a
//! disk of enormous speed, and other copies would be slowed down for them. What guests do wait for is the file system, which
//! lets no write to either file pass meanwhile. So one chunk is cloned at a time, and it is small. A bandwidth that an
//! administrator has set holds for clones as well.

use std::cell::Cell;
use std::rc::Rc;

use block::clone::PlainFile;
use block::{BlockDevice, IoError};
use migration::PacingSettings;
use rustix::io::Errno;

use crate::driver::{Chunks, CopySettings, GivesWay, Replica};

/// The bytes of a chunk that is cloned. 16 GiB are 2,048 of them, so the time of a call does not count. The blocks of a badly
/// fragmented image are cloned one by one: up to 2,048 in a call, for which a guest waits for some 15 ms (XFS: 8 µs each).
const CHUNK_BYTES: u64 = 8 << 20;

/// A copying whose chunks are cloned.
pub(crate) struct Cloning {
    from: PlainFile,
    /// What guests may lose once chunks are copied.
    impact: Cell<Option<pacer::Impact>>,
    is_over: Cell<bool>,
}

/// Returns the cloning of a replica, if it begins with one, how it gives way, and its pace.
pub(crate) fn begin(
    source: &Rc<dyn BlockDevice>,
    replica: &Replica,
    settings: &CopySettings,
) -> (Option<Cloning>, GivesWay, PacingSettings) {
    let (gives_way, pacing) = (settings.gives_way.clone(), settings.pacing.clone());
    // Both are asked: a store that is slowed down on purpose, or a cipher, is no plain file.
    let files = source.plain_file().zip(replica.bulk.plain_file());
    match files.filter(|_| replica.chunks == Chunks::Cloned) {
        None => (None, gives_way, pacing),
        Some((from, _)) => {
            let impact = Cell::new(gives_way.impact);
            let cloning = Cloning { from, impact, is_over: Cell::new(false) };
            let pacing = PacingSettings { depth: 1, chunk_bytes: CHUNK_BYTES, ..pacing };
            (Some(cloning), GivesWay { impact: None, ..gives_way }, pacing)
        }
    }
}

impl Cloning {
    pub(crate) fn from(&self) -> PlainFile {
        self.from.clone()
    }

    /// Returns whether chunks are copied from now on.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over.get()
    }

    pub(crate) fn set_impact(&self, impact: Option<pacer::Impact>) {
        self.impact.set(impact);
    }

    /// Decides what follows when a chunk was not cloned. Returns what guests may lose to further chunks, if these are copied.
    pub(crate) fn refused(&self, error: &IoError) -> Option<Option<pacer::Impact>> {
        // N.B. A range may be unfit by itself, as one that begins within a block of the file system.
        if self.is_over.get() || error.errno() == Errno::INVAL {
            return None;
        }
        tracing::info!(%error, "the file system does not clone: the rest is copied");
        self.is_over.set(true);
        Some(self.impact.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_that_is_unfit_is_copied_and_a_file_system_that_refuses_ends_the_cloning() {
        let folder = tempfile::tempdir().unwrap();
        let image = block::Image::create(&folder.path().join("image"), 1 << 20).unwrap();
        let (_driver, engine) = block::engine::open(block::engine::EngineChoice::Threads).unwrap();
        let from = block::FileStore::new(image, engine).plain_file().unwrap();
        let cloning = Cloning { from, impact: Cell::new(None), is_over: Cell::new(false) };
        let unfit = IoError::os("clone", Errno::INVAL);
        assert_eq!((cloning.refused(&unfit), cloning.is_over()), (None, false));
        // An order that comes meanwhile holds for what is copied.
        let ordered = pacer::Impact::percent(5).unwrap();
        cloning.set_impact(Some(ordered));
        let refused = IoError::os("clone", Errno::XDEV);
        assert_eq!(cloning.refused(&refused), Some(Some(ordered)));
        // A second chunk that was under way changes nothing.
        assert_eq!((cloning.refused(&refused), cloning.is_over()), (None, true));
    }
}
