//! Another program that changes images without the daemons, and knows its writes.
//!
//! ```text
//!   disk:  ├──────────── the guest's ────────────┤ foreign ┤      the guest never touches the last blocks
//! ```

use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;

use anyhow::{Context as _, ensure};
use lab::workload::Content;
use lab::workload::random::Random;
use testbed::until;

/// Number of blocks at the disk's end that belong to it.
pub(super) const FOREIGN_BLOCKS: u64 = 64;

#[derive(Debug)]
pub(super) enum Foreign {
    /// It writes content of its own to its part of the disk.
    Writes {
        /// Its knowledge of the disk, with the guest's seed, so that one comparison covers both.
        content: Content,
        random: Random,
        /// Blocks written since the last call of [`Self::tell`].
        written: Vec<u64>,
    },
    /// It rewrites the present content, because the guest uses the whole disk.
    Rewrites,
}

impl Foreign {
    /// Returns a program that writes to the last blocks of a disk of zeroes.
    pub(super) fn writes(content: &Content, seed: u64) -> Self {
        Self::Writes { content: content.clone(), random: Random::new(!seed), written: Vec::new() }
    }

    /// Changes an image that no daemon has open, and returns a description.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(super) fn touch_image(&mut self, image: &Path) -> anyhow::Result<String> {
        match self {
            Self::Writes { content, random, written } => {
                let block = content.blocks() - FOREIGN_BLOCKS + random.below(FOREIGN_BLOCKS);
                let mut bytes = vec![0; content.block_bytes() as usize];
                content.next_stamp(block).fill(&mut bytes);
                write(image, block * u64::from(content.block_bytes()), &bytes)?;
                content.note_written(block..block + 1);
                written.push(block);
                Ok(format!("block {block} of {} written", image.display()))
            }
            Self::Rewrites => {
                let mut byte = [0];
                File::open(image)?.read_exact_at(&mut byte, 0)?;
                write(image, 0, &byte)?;
                Ok(format!("a byte of {} written as it was", image.display()))
            }
        }
    }

    /// Changes a kept image, which must then not be reused.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(super) fn touch_kept(image: &Path) -> anyhow::Result<String> {
        write(image, 0, b"this is not the volume's content")?;
        Ok(format!("{} spoilt", image.display()))
    }

    /// Adds the writes to the guest's model.
    pub(super) fn tell(&mut self, guest: &mut Content) {
        if let Self::Writes { written, .. } = self {
            for block in written.drain(..) {
                guest.note_written(block..block + 1);
            }
        }
    }
}

/// Writes to a file until its times change, because the kernel's clock for them has steps of some milliseconds.
fn write(path: &Path, offset: u64, bytes: &[u8]) -> anyhow::Result<()> {
    let file = File::options().write(true).open(path).with_context(|| format!("open {}", path.display()))?;
    let before = file.metadata()?;
    let length = before.len();
    let times = (before.mtime(), before.mtime_nsec());
    until("the image's times change", || {
        file.write_all_at(bytes, offset)?;
        let now = file.metadata()?;
        Ok(((now.mtime(), now.mtime_nsec()) != times).then_some(()))
    })?;
    file.sync_all()?;
    ensure!(file.metadata()?.len() == length, "{} has grown", path.display());
    Ok(())
}
