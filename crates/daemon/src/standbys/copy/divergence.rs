//! Images that were given up: what only they have is kept beside them, and they become a standby's.
//!
//! ```text
//!   divergence-ID/image-N     the whole image, sharing blocks with the standby's (reflink)
//!   divergence-ID/blocks-N    elsewhere: the content of the blocks that nobody may have received
//!   ID/image-N                the image, once it is the standby's
//! ```
//! Everything here may block.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;

use chronicle::{BlockCount, BlockIndex, BlockRange, LayeredBitmap};
use lane::capture::BLOCK_BYTES;
use ring::digest::{SHA256, SHA256_OUTPUT_LEN, digest};
use standby::VolumeIndex;

use super::extents::{CONTENT_BYTES_MAX, Extents};
use super::files::image_name;
use super::folder::Folder;
use super::room::has_room;
use super::undo::{Undo, content_bytes, next_data};
use crate::standbys::book::{KeptDivergence, Look};

/// The most bytes of one piece of a divergence.
const PIECE_BYTES: u64 = 256 << 10;
const ONE: VolumeIndex = VolumeIndex(0);

/// A part of what only a given-up image has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) offset: u64,
    pub(crate) length: u64,
    /// `None`: zeroes.
    pub(crate) content: Option<Vec<u8>>,
    /// Where the next piece is found; `None`: this is the last one.
    pub(crate) next: Option<u64>,
}

/// Returns the attributes of an open image.
pub(crate) fn look_of(image: &File) -> io::Result<Look> {
    let found = image.metadata()?;
    Ok(Look {
        inode: found.ino(),
        size_bytes: found.size(),
        mtime: (found.mtime(), found.mtime_nsec()),
        ctime: (found.ctime(), found.ctime_nsec()),
    })
}

/// Returns how many bytes keeping these blocks of an image takes, and whether the store has room for them beside the reserve.
pub(crate) fn room_for(
    store: &Path,
    id: &str,
    image: &File,
    written: &LayeredBitmap,
) -> io::Result<(u64, bool)> {
    let folder = Folder::open(store, &folder_name(id))?;
    if clone_of(&folder, "probe", image)? {
        folder.remove("probe")?;
        return Ok((0, true));
    }
    let mut bytes = 0;
    for run in written.runs() {
        bytes += content_bytes(image, run)?;
    }
    let (free, total) = folder.space()?;
    Ok((bytes, has_room(free, total, bytes)))
}

/// Keeps what an image has in these blocks, durably: as a whole if the file system can share its blocks.
pub(crate) fn keep(
    store: &Path,
    id: &str,
    volume: usize,
    image: &File,
    written: &LayeredBitmap,
) -> io::Result<KeptDivergence> {
    let folder = Folder::open(store, &folder_name(id))?;
    if clone_of(&folder, &image_name(volume), image)? {
        folder.sync()?;
        return Ok(KeptDivergence::Clone);
    }
    let new = "blocks-new";
    let images = [image.try_clone()?];
    let mut kept = Undo::new(folder.new_file(new)?, &images)?;
    let mut bytes = 0;
    for run in written.runs() {
        bytes += content_bytes(image, run)?;
        kept.keep(&images, ONE, run)?;
    }
    kept.sync()?;
    folder.rename(new, &blocks_name(volume))?;
    folder.sync()?;
    Ok(KeptDivergence::Blocks(bytes))
}

/// Makes a clone of an image that shares its blocks; returns whether the file system can.
fn clone_of(folder: &Folder, name: &str, image: &File) -> io::Result<bool> {
    let clone = folder.new_file(name)?;
    if rustix::fs::ioctl_ficlone(&clone, image).is_err() {
        folder.remove(name)?;
        return Ok(false);
    }
    clone.sync_all()?;
    Ok(true)
}

/// Moves a proved image from a path into the folder of a standby, with the size of the new owner's volume, durably. Does nothing if
/// the folder has it.
pub(crate) fn take(
    store: &Path,
    standby: &str,
    volume: usize,
    from: &Path,
    proved: &Look,
    size: BlockCount,
) -> io::Result<()> {
    let (folder, name) = (Folder::open(store, standby)?, image_name(volume));
    folder.move_in(from, &name)?;
    let image = folder.file(&name)?;
    // N.B. The folder of the store is not this user's alone.
    if look_of(&image)?.inode != proved.inode {
        return Err(io::Error::other("another file has taken the place of the image"));
    }
    image.set_len(size.0.saturating_mul(BLOCK_BYTES))?;
    image.sync_all()?;
    folder.sync()
}

/// Returns whether the folder of a standby has the image of a volume.
pub(crate) fn is_taken(store: &Path, standby: &str, volume: usize) -> io::Result<bool> {
    match Folder::open(store, standby)?.file(&image_name(volume)) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Opens the whole image that a divergence is kept as.
pub(crate) fn whole(store: &Path, id: &str, volume: usize) -> io::Result<File> {
    Folder::open(store, &folder_name(id))?.file(&image_name(volume))
}

/// Returns the next piece of an image from a block on: of these blocks, or of all content if they are not known.
pub(crate) fn piece_of_image(
    image: &File,
    written: Option<&LayeredBitmap>,
    from: u64,
) -> io::Result<Option<Piece>> {
    let end = image.metadata()?.len().div_ceil(BLOCK_BYTES);
    let run = match written {
        Some(written) => written.next_run(BlockIndex(from), u64::MAX),
        None => Some(BlockRange::new(from, end)),
    };
    let run = run.map(|run| run.intersect(&BlockRange::new(from, end))).filter(|run| !run.is_empty());
    let Some(run) = run else { return Ok(None) };
    let (data, until) = next_data(image, run.start.0, run.end.0)?;
    if data > run.start.0 {
        // N.B. What is not known to be written is not said to be zeroes: a hole is left out.
        return match written {
            Some(_) => Ok(Some(zeroes(run.start.0, data))),
            None => piece_of_image(image, written, data),
        };
    }
    let blocks = (until - data).min(PIECE_BYTES / BLOCK_BYTES);
    let length = (blocks * BLOCK_BYTES).min(image.metadata()?.len() - data * BLOCK_BYTES);
    let mut content = vec![0; length as usize];
    image.read_exact_at(&mut content, data * BLOCK_BYTES)?;
    let content = Some(content).filter(|content| !block::buffer::is_zero(content));
    Ok(Some(Piece { offset: data * BLOCK_BYTES, length, content, next: Some(data + blocks) }))
}

fn zeroes(from: u64, to: u64) -> Piece {
    let (offset, length) = (from * BLOCK_BYTES, (to - from) * BLOCK_BYTES);
    Piece { offset, length, content: None, next: Some(to) }
}

/// Returns the next piece of kept blocks, from a position in their file on.
pub(crate) fn piece_of_blocks(store: &Path, id: &str, volume: usize, from: u64) -> io::Result<Option<Piece>> {
    let folder = Folder::open(store, &folder_name(id))?;
    let Some((extent, content, next)) = Extents::at(&folder.file(&blocks_name(volume))?, from)? else {
        return Ok(None);
    };
    let (offset, length) = (extent.blocks.start.0 * BLOCK_BYTES, extent.blocks.len() * BLOCK_BYTES);
    let content = (!extent.is_zero).then_some(content);
    Ok(Some(Piece { offset, length, content, next: Some(next) }))
}

/// Deletes what is kept of a volume.
pub(crate) fn drop_kept(store: &Path, id: &str, volume: usize) -> io::Result<()> {
    let folder = Folder::open(store, &folder_name(id))?;
    folder.remove(&image_name(volume))?;
    folder.remove(&blocks_name(volume))?;
    folder.sync()
}

/// Deletes all that is kept of a group.
pub(crate) fn drop_all(store: &Path, id: &str) -> io::Result<()> {
    Folder::delete(store, &folder_name(id))
}

/// Returns the runs of blocks from `first` on whose contents have these SHA-256 hashes.
pub(super) fn same(image: &File, first: u64, hashes: &[u8]) -> io::Result<Vec<(u64, u64)>> {
    let length = image.metadata()?.len();
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for (hash, index) in hashes.chunks_exact(SHA256_OUTPUT_LEN).zip(0..) {
        // N.B. The first block is what another host says.
        let block = first.saturating_add(index);
        let Some(offset) = block.checked_mul(BLOCK_BYTES).filter(|offset| *offset < length) else { break };
        let mut content = vec![0; BLOCK_BYTES as usize];
        let count = (length - offset).min(BLOCK_BYTES) as usize;
        image.read_exact_at(&mut content[..count], offset)?;
        if digest(&SHA256, &content).as_ref() != hash {
            continue;
        }
        match runs.last_mut() {
            Some((start, count)) if *start + *count == block => *count += 1,
            _ => runs.push((block, 1)),
        }
    }
    Ok(runs)
}

fn folder_name(id: &str) -> String {
    format!("divergence-{id}")
}

fn blocks_name(volume: usize) -> String {
    format!("blocks-{volume}")
}

const _: () = assert!(CONTENT_BYTES_MAX >= PIECE_BYTES);

#[cfg(test)]
mod tests {
    use super::*;

    fn image(blocks: &[(u64, u8)], length: u64) -> File {
        let image = tempfile::tempfile().unwrap();
        image.set_len(length * BLOCK_BYTES).unwrap();
        for (block, byte) in blocks {
            image.write_all_at(&[*byte; BLOCK_BYTES as usize], block * BLOCK_BYTES).unwrap();
        }
        image
    }

    fn set(runs: &[(u64, u64)], length: u64) -> LayeredBitmap {
        let mut set = LayeredBitmap::new(BlockCount(length));
        runs.iter().for_each(|(start, end)| {
            set.insert(BlockRange::new(*start, *end));
        });
        set
    }

    /// Returns the first byte of each block of all pieces; zero for zeroes.
    fn all(mut next: impl FnMut(u64) -> Option<Piece>) -> Vec<(u64, u8)> {
        let (mut found, mut from) = (Vec::new(), Some(0));
        while let Some(piece) = from.and_then(&mut next) {
            for block in 0..piece.length / BLOCK_BYTES {
                let byte =
                    piece.content.as_ref().map_or(0, |content| content[(block * BLOCK_BYTES) as usize]);
                found.push((piece.offset / BLOCK_BYTES + block, byte));
            }
            from = piece.next;
        }
        found
    }

    #[test]
    fn what_only_an_image_has_is_kept_and_read_again() {
        let store = tempfile::tempdir().unwrap();
        let image = image(&[(1, 1), (2, 2), (9, 9), (200, 7)], 300);
        let written = set(&[(2, 4), (9, 10), (200, 201)], 300);
        let expected = [(2, 2), (3, 0), (9, 9), (200, 7)];
        let of_image = all(|from| piece_of_image(&image, Some(&written), from).unwrap());
        assert_eq!(of_image, expected);
        let kept = keep(store.path(), "s", 0, &image, &written).unwrap();
        image.write_all_at(&[5; 4096], 2 * BLOCK_BYTES).unwrap();
        let found = match kept {
            KeptDivergence::Blocks(bytes) => {
                assert_eq!(bytes, 3 * BLOCK_BYTES);
                all(|from| piece_of_blocks(store.path(), "s", 0, from).unwrap())
            }
            _ => {
                let whole = whole(store.path(), "s", 0).unwrap();
                all(|from| piece_of_image(&whole, Some(&written), from).unwrap())
            }
        };
        assert_eq!(found, expected);
        drop_kept(store.path(), "s", 0).unwrap();
        assert!(piece_of_blocks(store.path(), "s", 0, 0).is_err());
    }

    #[test]
    fn an_image_of_unknown_history_is_read_without_its_holes() {
        let image = image(&[(1, 1), (200, 7)], 300);
        assert_eq!(all(|from| piece_of_image(&image, None, from).unwrap()), [(1, 1), (200, 7)]);
    }

    #[test]
    fn blocks_of_the_same_content_are_found_and_others_are_not() {
        let image = image(&[(1, 1), (2, 2), (4, 4)], 5);
        let hash = |byte: u8| digest(&SHA256, &[byte; BLOCK_BYTES as usize]).as_ref().to_vec();
        let hashes: Vec<u8> = [1, 2, 0, 5, 4].into_iter().flat_map(hash).collect();
        assert_eq!(same(&image, 1, &hashes).unwrap(), [(1, 3)]);
        assert_eq!(same(&image, u64::MAX, &hashes).unwrap(), []);
    }

    #[test]
    fn an_image_becomes_the_standby_s_once_and_no_other_file_does() {
        let store = tempfile::tempdir().unwrap();
        let path = store.path().join("v.img");
        std::fs::write(&path, [1; 4096]).unwrap();
        let proved = look_of(&File::open(&path).unwrap()).unwrap();
        let stranger = Look { inode: proved.inode + 1, ..proved.clone() };
        assert!(!is_taken(store.path(), "s", 0).unwrap());
        for _ in 0..2 {
            take(store.path(), "s", 0, &path, &proved, BlockCount(3)).unwrap();
        }
        assert!(is_taken(store.path(), "s", 0).unwrap() && !path.exists());
        let taken = Folder::open(store.path(), "s").unwrap().file("image-0").unwrap();
        assert_eq!(taken.metadata().unwrap().len(), 3 * BLOCK_BYTES);
        std::fs::write(&path, [1; 4096]).unwrap();
        assert!(take(store.path(), "other", 0, &path, &stranger, BlockCount(3)).is_err());
    }
}
