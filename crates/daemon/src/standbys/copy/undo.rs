//! The undo file of a recovery point: what the images held before it was overwritten.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use chronicle::{BlockCount, BlockIndex, BlockRange, LayeredBitmap};
use lane::capture::BLOCK_BYTES;
use rustix::fs::SeekFrom;
use rustix::io::Errno;
use standby::VolumeIndex;

use super::extents::{CONTENT_BYTES_MAX, Extent, Extents};

/// The undo file of the newest recovery point.
pub(super) struct Undo {
    extents: Extents,
    /// The blocks of each volume that it has.
    has: Vec<LayeredBitmap>,
}

impl Undo {
    pub(super) fn new(file: File, images: &[File]) -> io::Result<Self> {
        let mut has = Vec::new();
        for image in images {
            has.push(LayeredBitmap::new(BlockCount(image.metadata()?.len() / BLOCK_BYTES)));
        }
        Ok(Self { extents: Extents::new(file), has })
    }

    pub(super) fn open(file: File, images: &[File]) -> io::Result<Self> {
        let mut undo = Self::new(file.try_clone()?, images)?;
        let has = &mut undo.has;
        undo.extents = Extents::open(file, |extent| {
            if let Some(has) = has.get_mut(extent.volume.index()) {
                has.insert(extent.blocks);
            }
        })?;
        Ok(undo)
    }

    /// Takes the images' present sizes: they have grown, and hold zeroes there.
    pub(super) fn grow(&mut self, images: &[File]) -> io::Result<()> {
        for (has, image) in self.has.iter_mut().zip(images) {
            has.grow(BlockCount(image.metadata()?.len() / BLOCK_BYTES));
        }
        Ok(())
    }

    /// Keeps what the images hold in a range, unless it is kept. What was appended is durable after [`Undo::sync`].
    pub(super) fn keep(
        &mut self,
        images: &[File],
        volume: VolumeIndex,
        blocks: BlockRange,
    ) -> io::Result<()> {
        let (Some(image), Some(has)) = (images.get(volume.index()), self.has.get(volume.index())) else {
            return Ok(());
        };
        let end = blocks.end.0.min(has.blocks().0);
        let mut from = blocks.start.0;
        let mut bytes = Vec::new();
        while from < end {
            let kept = self.has[volume.index()].next_run(BlockIndex(from), u64::MAX);
            let fresh_end = kept.map_or(end, |kept| kept.start.0.min(end));
            let (data_start, data_end) = next_data(image, from, fresh_end)?;
            if from < data_start {
                // N.B. A hole stays one: nothing is read, and nothing but its place is kept.
                let blocks = BlockRange::new(from, data_start);
                self.add(Extent { volume, blocks, is_zero: true }, &[])?;
            }
            from = data_start;
            while from < data_end {
                let until = data_end.min(from + CONTENT_BYTES_MAX / BLOCK_BYTES);
                bytes.resize(((until - from) * BLOCK_BYTES) as usize, 0);
                image.read_exact_at(&mut bytes, from * BLOCK_BYTES)?;
                let blocks = BlockRange::new(from, until);
                self.add(Extent { volume, blocks, is_zero: block::buffer::is_zero(&bytes) }, &bytes)?;
                from = until;
            }
            if let Some(kept) = kept.filter(|kept| kept.start.0 == from) {
                from = kept.end.0;
            }
        }
        Ok(())
    }

    /// Adds what an extent has and this does not.
    pub(super) fn add(&mut self, extent: Extent, content: &[u8]) -> io::Result<()> {
        let Extent { volume, blocks, is_zero } = extent;
        let Some(has) = self.has.get_mut(volume.index()) else { return Ok(()) };
        let (mut from, end) = (blocks.start.0, blocks.end.0);
        while from < end {
            let kept = has.next_run(BlockIndex(from), u64::MAX).filter(|kept| kept.start.0 < end);
            let until = kept.map_or(end, |kept| kept.start.0);
            if from < until {
                let blocks = BlockRange::new(from, until);
                let byte = |block: u64| ((block - extent.blocks.start.0) * BLOCK_BYTES) as usize;
                let bytes = if is_zero { &[] } else { &content[byte(from)..byte(until)] };
                has.insert(blocks);
                self.extents.append(Extent { volume, blocks, is_zero }, bytes)?;
            }
            from = kept.map_or(end, |kept| kept.end.0);
        }
        Ok(())
    }

    /// Makes the file one that is not whole, for good: its point cannot be restored.
    pub(super) fn damage(&mut self) -> io::Result<()> {
        self.extents.damage()
    }

    pub(super) fn sync(&self) -> io::Result<()> {
        self.extents.sync()
    }
}

/// Returns how many bytes of a range are no hole of the image.
pub(super) fn content_bytes(image: &File, blocks: BlockRange) -> io::Result<u64> {
    let end = blocks.end.0.min(image.metadata()?.len() / BLOCK_BYTES);
    let (mut from, mut count) = (blocks.start.0, 0);
    while from < end {
        let (start, until) = next_data(image, from, end)?;
        count += until - start;
        from = until.max(from + 1);
    }
    Ok(count * BLOCK_BYTES)
}

/// Returns the first blocks at or after `from` that are no hole; an empty run at `end`: there are none before it.
pub(super) fn next_data(image: &File, from: u64, end: u64) -> io::Result<(u64, u64)> {
    if from >= end {
        return Ok((end, end));
    }
    let start = match rustix::fs::seek(image, SeekFrom::Data(from * BLOCK_BYTES)) {
        // Behind the last content, or no file system that knows holes.
        Err(Errno::NXIO) => return Ok((end, end)),
        Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok((from, end)),
        found => (found? / BLOCK_BYTES).max(from),
    };
    if start >= end {
        return Ok((end, end));
    }
    let hole = rustix::fs::seek(image, SeekFrom::Hole(start * BLOCK_BYTES))?;
    Ok((start, hole.div_ceil(BLOCK_BYTES).clamp(start + 1, end)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hole_is_kept_without_being_read_and_what_is_kept_is_kept_once() {
        let (image, file) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let blocks = 1 << 20;
        image.set_len(blocks * BLOCK_BYTES).unwrap();
        image.write_all_at(&[1; 4096], 5 * BLOCK_BYTES).unwrap();
        image.write_all_at(&[2; 4096], 9 * BLOCK_BYTES).unwrap();
        let images = [image];
        let mut undo = Undo::new(file.try_clone().unwrap(), &images).unwrap();
        for range in [BlockRange::new(4, 7), BlockRange::new(0, blocks), BlockRange::new(3, 100)] {
            undo.keep(&images, VolumeIndex(0), range).unwrap();
        }
        let (mut kept, mut count) = (Vec::new(), 0);
        undo.extents
            .each(|extent, content| {
                count += extent.blocks.len();
                kept.extend((!extent.is_zero).then(|| (extent.blocks.start.0, content[0])));
                Ok(())
            })
            .unwrap();
        assert_eq!((kept, count), (vec![(5, 1), (9, 2)], blocks));
        assert!(file.metadata().unwrap().len() < 3 * BLOCK_BYTES);
        assert_eq!(content_bytes(&images[0], BlockRange::new(0, blocks)).unwrap(), 2 * BLOCK_BYTES);
    }
}
