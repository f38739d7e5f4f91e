//! The marks of one volume in one epoch: a file with a bit for every few blocks. Bits are only ever set.
//!
//! ```text
//!   4096 bytes   "STERNAM" and the version, then zeroes
//!   …            bit n: of the 16 blocks from 16 n on, some may be written in this epoch
//! ```
//! If a power cut tears a page, each of its bits is as before or after: no acknowledged mark is lost, and one more may appear.
//! So there is no checksum, and a mark is one small write in place.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;

use chronicle::BlockRange;
use rustix::fs::OFlags;

use crate::files::folder_entries::sync_folder_of;

/// The first bytes of the file; the last of them is the version.
const HEADER: [u8; 8] = *b"STERNAM\x02";
/// The number of blocks of one bit. Marks are regions of at least 1 MiB, so this is no coarser for blocks of up to 64 KiB. The
/// bits of 16 TiB in blocks of 4 KiB fit into 32 MiB.
const BLOCKS_PER_BIT: u64 = 16;
/// The unit of writes, and the offset of the bits.
const PAGE_BYTES: usize = 4096;
/// The longest file that is read: marks of 1 PiB in blocks of 4 KiB.
const FILE_BYTES_MAX: u64 = 2 << 30;

#[derive(Debug)]
pub(super) struct MarksFile {
    file: File,
    bits: Vec<u8>,
}

impl MarksFile {
    /// Opens the file; makes it durably if it does not exist.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = options.custom_flags(OFlags::DSYNC.bits() as i32).open(path)?;
        let bits = match read_bits(&file)? {
            Some(bits) => {
                // N.B. Written once more: data of a failed write may be in memory only, and reads as if it were on the disk.
                file.write_all_at(&bits, PAGE_BYTES as u64)?;
                sync_folder_of(path)?;
                bits
            }
            None => {
                let mut page = vec![0; PAGE_BYTES];
                page[..HEADER.len()].copy_from_slice(&HEADER);
                file.write_all_at(&page, 0)?;
                sync_folder_of(path)?;
                Vec::new()
            }
        };
        Ok(Self { file, bits })
    }

    /// Sets the bits of these blocks; they are durable when it returns.
    pub(super) fn mark(&mut self, blocks: &[BlockRange]) -> io::Result<()> {
        let bits_of = |run: &BlockRange| run.start.0 / BLOCKS_PER_BIT..run.end.0.div_ceil(BLOCKS_PER_BIT);
        let end = blocks.iter().map(|run| bits_of(run).end.div_ceil(8)).max().unwrap_or(0);
        let end = usize::try_from(end).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
        if self.bits.len() < end {
            self.bits.resize(end.next_multiple_of(PAGE_BYTES), 0);
        }
        let mut pages = Vec::new();
        for run in blocks {
            for bit in bits_of(run) {
                // It lies below `end`, which fits.
                let (byte, bit) = ((bit / 8) as usize, 1 << (bit % 8));
                if self.bits[byte] & bit == 0 {
                    self.bits[byte] |= bit;
                    let page = byte / PAGE_BYTES;
                    if pages.last() != Some(&page) {
                        pages.push(page);
                    }
                }
            }
        }
        pages.sort_unstable();
        pages.dedup();
        for page in pages {
            let bytes = &self.bits[page * PAGE_BYTES..(page + 1) * PAGE_BYTES];
            self.file.write_all_at(bytes, ((page + 1) * PAGE_BYTES) as u64)?;
        }
        Ok(())
    }
}

/// Returns the marked runs of a file, in order.
pub(super) fn read(path: &Path) -> io::Result<Vec<BlockRange>> {
    let Some(bits) = read_bits(&File::open(path)?)? else { return Ok(Vec::new()) };
    let mut runs: Vec<BlockRange> = Vec::new();
    let set = bits.iter().zip(0_u64..).filter(|(byte, _)| **byte != 0).flat_map(|(byte, index)| {
        (0..8).filter(move |bit| byte & (1 << bit) != 0).map(move |bit| index * 8 + bit)
    });
    for bit in set {
        let (start, end) = (bit * BLOCKS_PER_BIT, (bit + 1) * BLOCKS_PER_BIT);
        match runs.last_mut() {
            Some(last) if last.end.0 == start => last.end.0 = end,
            _ => runs.push(BlockRange::new(start, end)),
        }
    }
    Ok(runs)
}

/// Returns the bits of a file; `None`: the file was not completed, so none of its marks was acknowledged.
fn read_bits(file: &File) -> io::Result<Option<Vec<u8>>> {
    let length = file.metadata()?.len();
    if length > FILE_BYTES_MAX {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    // It fits, as checked above.
    let mut bytes = vec![0; length as usize];
    file.read_exact_at(&mut bytes, 0)?;
    let Some((header, bits)) = bytes.split_at_checked(PAGE_BYTES) else { return Ok(None) };
    if !header.starts_with(&HEADER) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "it holds no marks, or marks of another version",
        ));
    }
    let mut bits = bits.to_vec();
    bits.resize(bits.len().next_multiple_of(PAGE_BYTES), 0);
    Ok(Some(bits))
}
