//! Files of extents: the spools of a standby, and what its images held before they were overwritten.
//!
//! ```text
//!   [ head: mark, volume, kind, first block, number of blocks, checksum of head and content ] [ content, if it is no zeroes ]
//! ```
//! An extent whose checksum is wrong ends the file: it was being appended when power was cut. If whole ones follow it, the file is
//! damaged, and stays so: [`Extents::whole`] refuses it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use chronicle::BlockRange;
use lane::capture::BLOCK_BYTES;
use standby::VolumeIndex;

const HEAD_BYTES: usize = 32;
const MARK: [u8; 4] = *b"SXT1";
/// So much of a file is searched at a time.
const SEARCH_BYTES: usize = 1 << 20;
/// The greatest content of one extent, in bytes. Longer runs are cut.
pub(super) const CONTENT_BYTES_MAX: u64 = 4 << 20;

/// One extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) volume: VolumeIndex,
    pub(super) blocks: BlockRange,
    /// Whether it reads as zeroes, and has no content.
    pub(super) is_zero: bool,
}

/// A file of extents that is appended to.
pub(crate) struct Extents {
    file: File,
    length: u64,
}

impl Extents {
    /// Continues a file: at the end of its last whole extent.
    pub(super) fn open(file: File, mut each: impl FnMut(Extent)) -> io::Result<Self> {
        let mut extents = Self { file, length: u64::MAX };
        let length = extents.each(|extent, _| {
            each(extent);
            Ok(())
        })?;
        let found = extents.file.metadata()?.len();
        // N.B. What a power cut leaves is cut off. Damage is not: without it the file would look whole, and lack what follows.
        let is_damaged = length < found && goes_on_after(&extents.file, length, found)?;
        extents.length = if is_damaged { found } else { length };
        extents.file.set_len(extents.length)?;
        Ok(extents)
    }

    /// Opens a file all of whose extents must be whole.
    pub(super) fn whole(file: File) -> io::Result<Self> {
        let extents = Self { file, length: u64::MAX };
        let (found, valid) = (extents.file.metadata()?.len(), extents.each(|_, _| Ok(()))?);
        if found == valid {
            return Ok(Self { length: valid, ..extents });
        }
        let text = format!(
            "a file of the standby is damaged: {valid} of its {found} bytes are as they were written"
        );
        Err(io::Error::new(io::ErrorKind::InvalidData, text))
    }

    /// Begins a file that is empty.
    pub(super) fn new(file: File) -> Self {
        Self { file, length: 0 }
    }

    /// Appends an extent. `content` has the bytes of its blocks; it is empty for zeroes.
    pub(super) fn append(&mut self, extent: Extent, content: &[u8]) -> io::Result<()> {
        let head = head(extent, content);
        self.file.write_all_at(&head, self.length)?;
        self.file.write_all_at(content, self.length + HEAD_BYTES as u64)?;
        self.length += HEAD_BYTES as u64 + content.len() as u64;
        Ok(())
    }

    /// Appends what is no extent, and one that is: the file is not whole from then on.
    pub(super) fn damage(&mut self) -> io::Result<()> {
        self.file.write_all_at(&[0; HEAD_BYTES], self.length)?;
        self.length += HEAD_BYTES as u64;
        let blocks = BlockRange::new(0, 1);
        self.append(Extent { volume: VolumeIndex(u16::MAX), blocks, is_zero: true }, &[])
    }

    /// Returns the extent at a position of a file, its content, and the position of the next one; `None`: the file ends there.
    pub(super) fn at(file: &File, position: u64) -> io::Result<Option<(Extent, Vec<u8>, u64)>> {
        let length = file.metadata()?.len();
        let Some(start) = position.checked_add(HEAD_BYTES as u64).filter(|start| *start <= length) else {
            return Ok(None);
        };
        let mut bytes = [0; HEAD_BYTES];
        file.read_exact_at(&mut bytes, position)?;
        let damaged = || io::Error::new(io::ErrorKind::InvalidData, "what was kept is damaged");
        let (extent, checksum) = parse(&bytes).ok_or_else(damaged)?;
        let count = if extent.is_zero { 0 } else { extent.blocks.len().saturating_mul(BLOCK_BYTES) };
        if count > CONTENT_BYTES_MAX || count > length - start {
            return Err(damaged());
        }
        let mut content = vec![0; count as usize];
        file.read_exact_at(&mut content, start)?;
        if checksum_of(&bytes, &content) != checksum {
            return Err(damaged());
        }
        Ok(Some((extent, content, start + count)))
    }

    /// Reads a file whose extents are not checked.
    pub(super) fn new_of(file: File) -> Self {
        Self { file, length: u64::MAX }
    }

    /// Calls `each` for the head of every extent, in order, up to the first one that is none.
    pub(super) fn heads(&self, mut each: impl FnMut(Extent) -> io::Result<()>) -> io::Result<()> {
        let length = self.file.metadata()?.len().min(self.length);
        let mut position = 0;
        while position + HEAD_BYTES as u64 <= length {
            let mut bytes = [0; HEAD_BYTES];
            self.file.read_exact_at(&mut bytes, position)?;
            let Some((extent, _)) = parse(&bytes) else { break };
            each(extent)?;
            let count = if extent.is_zero { 0 } else { extent.blocks.len().saturating_mul(BLOCK_BYTES) };
            position = position.saturating_add(HEAD_BYTES as u64).saturating_add(count);
        }
        Ok(())
    }

    /// Makes everything durable that was appended.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// Calls `each` for every whole extent, in order, with its content. Returns where the last one ends.
    pub(super) fn each(&self, mut each: impl FnMut(Extent, &[u8]) -> io::Result<()>) -> io::Result<u64> {
        let length = self.file.metadata()?.len().min(self.length);
        let (mut position, mut content) = (0, Vec::new());
        while position + HEAD_BYTES as u64 <= length {
            let mut bytes = [0; HEAD_BYTES];
            self.file.read_exact_at(&mut bytes, position)?;
            let Some((extent, checksum)) = parse(&bytes) else { break };
            let count = if extent.is_zero { 0 } else { extent.blocks.len() * BLOCK_BYTES };
            if count > CONTENT_BYTES_MAX || position + HEAD_BYTES as u64 + count > length {
                break;
            }
            content.resize(count as usize, 0);
            self.file.read_exact_at(&mut content, position + HEAD_BYTES as u64)?;
            if checksum_of(&bytes, &content) != checksum {
                break;
            }
            each(extent, &content)?;
            position += HEAD_BYTES as u64 + count;
        }
        Ok(position)
    }
}

/// Returns whether a whole extent begins after `position`, in a file of `length` bytes.
fn goes_on_after(file: &File, position: u64, length: u64) -> io::Result<bool> {
    let mut piece = vec![0; SEARCH_BYTES];
    let mut from = position + 1;
    while from + HEAD_BYTES as u64 <= length {
        let count = (length - from).min(SEARCH_BYTES as u64) as usize;
        file.read_exact_at(&mut piece[..count], from)?;
        let marks = piece[..count].windows(MARK.len()).enumerate().filter(|(_, found)| *found == MARK);
        for (found, _) in marks {
            if matches!(Extents::at(file, from + found as u64), Ok(Some(_))) {
                return Ok(true);
            }
        }
        // A mark may begin at the end of a piece.
        from += (count - (MARK.len() - 1)).max(1) as u64;
    }
    Ok(false)
}

fn head(extent: Extent, content: &[u8]) -> [u8; HEAD_BYTES] {
    let mut head = [0; HEAD_BYTES];
    head[..4].copy_from_slice(&MARK);
    head[4..6].copy_from_slice(&extent.volume.0.to_le_bytes());
    head[6] = u8::from(extent.is_zero);
    head[8..16].copy_from_slice(&extent.blocks.start.0.to_le_bytes());
    head[16..24].copy_from_slice(&extent.blocks.len().to_le_bytes());
    let checksum = checksum_of(&head, content);
    head[24..28].copy_from_slice(&checksum.to_le_bytes());
    head
}

fn checksum_of(head: &[u8; HEAD_BYTES], content: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&head[..24]), content)
}

fn parse(head: &[u8; HEAD_BYTES]) -> Option<(Extent, u32)> {
    let number = |from: usize| head[from..from + 8].try_into().map(u64::from_le_bytes).ok();
    let volume = VolumeIndex(u16::from_le_bytes([head[4], head[5]]));
    let (start, count) = (number(8)?, number(16)?);
    let blocks = BlockRange::new(start, start.checked_add(count)?);
    let checksum = head[24..28].try_into().map(u32::from_le_bytes).ok()?;
    let is_extent = head[..4] == MARK && count > 0;
    is_extent.then_some((Extent { volume, blocks, is_zero: head[6] == 1 }, checksum))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_goes_on_after_damage_is_never_whole_again() {
        let file = tempfile::tempfile().unwrap();
        let mut extents = Extents::new(file.try_clone().unwrap());
        let content = vec![7; BLOCK_BYTES as usize];
        for start in 0..3 {
            let blocks = BlockRange::new(start, start + 1);
            extents.append(Extent { volume: VolumeIndex(0), blocks, is_zero: false }, &content).unwrap();
        }
        let middle = HEAD_BYTES as u64 + BLOCK_BYTES;
        file.write_all_at(&[8], middle + 100).unwrap();
        let mut again = Extents::open(file.try_clone().unwrap(), |_| {}).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 3 * middle, "nothing is cut off");
        let blocks = BlockRange::new(9, 10);
        again.append(Extent { volume: VolumeIndex(0), blocks, is_zero: true }, &[]).unwrap();
        let refused = Extents::whole(file).map(drop).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn what_was_appended_is_read_up_to_the_first_torn_extent() {
        let file = tempfile::tempfile().unwrap();
        let mut extents = Extents::new(file.try_clone().unwrap());
        let of = |start: u64, is_zero| Extent {
            volume: VolumeIndex(1),
            blocks: BlockRange::new(start, start + 2),
            is_zero,
        };
        let content = vec![7; 2 * BLOCK_BYTES as usize];
        extents.append(of(3, false), &content).unwrap();
        extents.append(of(9, true), &[]).unwrap();
        extents.append(of(20, false), &content).unwrap();
        let length = file.metadata().unwrap().len();
        file.write_all_at(&[8], length - 1).unwrap();
        let mut seen = Vec::new();
        let mut again = Extents::open(file.try_clone().unwrap(), |extent| seen.push(extent)).unwrap();
        assert_eq!(seen, [of(3, false), of(9, true)]);
        again.append(of(30, true), &[]).unwrap();
        let mut contents = Vec::new();
        again
            .each(|extent, content| {
                contents.push((extent.blocks.start.0, content.len() as u64));
                Ok(())
            })
            .unwrap();
        assert_eq!(contents, [(3, 2 * BLOCK_BYTES), (9, 0), (30, 0)]);
    }
}
