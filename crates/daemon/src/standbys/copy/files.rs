//! The files of a standby: images, spools and recovery points.
//!
//! ```text
//!   image-N                      the image of volume N
//!   spool-new                    the epoch that is received
//!   spool-LIFE-EPOCH             a sealed epoch
//!   point-LIFE-EPOCH-N           a recovery point of volume N that shares blocks with the image (reflink)
//!   undo-LIFE-EPOCH              a recovery point: what the images held before later epochs were applied
//! ```
//! Everything here may block. Records are in [`super::super::book`].

use std::fmt::Display;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::time::{Duration, SystemTime};

use chronicle::{BlockCount, BlockRange};
use lane::capture::BLOCK_BYTES;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use standby::record::{KeptBy, Point, Sealed};
use standby::{VolumeIndex, Watermark};

use super::extents::{CONTENT_BYTES_MAX, Extent, Extents};
use super::folder::{Folder, Foreign, lock};
use super::undo::{Undo, content_bytes};
use crate::standbys::book::Look;

const NEW_SPOOL: &str = "spool-new";
/// More than the coarsest clock of a file system's times.
const AGED: Duration = Duration::from_secs(10);
/// Writes to images of so many bytes wait for the undo file: less than a source has under way.
const WAITING_BYTES_MAX: u64 = 8 << 20;
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// The open files.
pub(crate) struct Files {
    folder: Folder,
    images: Vec<File>,
    spool: Option<Extents>,
    undo: Option<Undo>,
    /// Writes to the images that wait until the undo file has, durably, what they overwrite.
    waiting: Vec<Waiting>,
    waiting_bytes: u64,
    /// Recovery points, the oldest first.
    points: Vec<(Watermark, KeptBy)>,
}

/// A write to an image.
struct Waiting {
    volume: VolumeIndex,
    blocks: BlockRange,
    /// `None`: zeroes.
    content: Option<Vec<u8>>,
}

/// A file of a clone, and the one that it is a clone of.
pub(super) struct Cloned {
    pub(super) from: File,
    pub(super) to: File,
    pub(super) bytes: u64,
    /// Whether it shares blocks, so that nothing has to be copied.
    pub(super) is_shared: bool,
}

/// Whether the images have the sizes that were asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    Enough,
    TooLittle,
}

impl Files {
    /// Opens the files of a standby with images of these sizes, which are made if it `is_new`. Deletes files that the record does
    /// not name.
    pub(crate) fn open(
        store: &Path,
        standby: &str,
        sizes: &[BlockCount],
        is_new: bool,
        points: &[Point],
        sealed: &[Sealed],
    ) -> io::Result<Self> {
        let folder = Folder::open(store, standby)?;
        let mut images = Vec::new();
        for (index, size) in sizes.iter().enumerate() {
            let name = image_name(index);
            let bytes = size.0.saturating_mul(BLOCK_BYTES);
            let image = if is_new { folder.file_or_new(&name) } else { folder.file(&name) };
            let image = image.map_err(|error| lost(&name, &error.to_string()))?;
            lock(&image)?;
            match image.metadata()?.len() {
                length if length >= bytes => {}
                _ if is_new => image.set_len(bytes)?,
                // N.B. What is gone is not made anew: it would read as zeroes, and count as a copy.
                length => return Err(lost(&name, &format!("it has {length} bytes of {bytes}"))),
            }
            images.push(image);
        }
        folder.sync()?;
        let points: Vec<_> = points.iter().map(|point| (point.watermark, point.kept_by)).collect();
        let mut files =
            Self { folder, images, spool: None, undo: None, waiting: Vec::new(), waiting_bytes: 0, points };
        files.sweep(sealed)?;
        files.open_undo()?;
        Ok(files)
    }

    /// Deletes what no record names: it was being made, or being deleted.
    fn sweep(&self, sealed: &[Sealed]) -> io::Result<()> {
        let mut known: Vec<String> = sealed.iter().map(|sealed| spool_name(sealed.watermark)).collect();
        let undo = |(at, kept_by): &(Watermark, KeptBy)| kept_by.is_undo().then(|| undo_name(*at));
        known.extend(self.points.iter().filter_map(undo));
        // N.B. A point has a file for each volume, also while the images are lent, and none of them is open here.
        let points: Vec<String> = self.points.iter().map(|(at, _)| point_name(*at, "")).collect();
        let is_known = |name: &String| {
            let point = name.trim_end_matches(|digit: char| digit.is_ascii_digit());
            is_of_others(name) || known.contains(name) || points.iter().any(|known| known == point)
        };
        for name in self.folder.names()?.iter().filter(|name| !is_known(name)) {
            self.folder.remove(name)?;
        }
        Ok(())
    }

    /// Returns how recovery points are kept here: by reflink if the file system has it.
    pub(crate) fn keeps_points_by(&self) -> KeptBy {
        // N.B. Not with an image: there is none while they are lent.
        let (from, to) = ("probe", "probe-to");
        let probe = || -> io::Result<()> {
            let cloned = rustix::fs::ioctl_ficlone(&self.folder.new_file(to)?, &self.folder.new_file(from)?);
            self.folder.remove(from)?;
            self.folder.remove(to)?;
            Ok(cloned?)
        };
        if probe().is_ok() { KeptBy::Reflink } else { KeptBy::Undo }
    }

    /// Appends to the spool of the epoch that is received.
    pub(crate) fn spool(
        &mut self,
        volume: VolumeIndex,
        blocks: BlockRange,
        content: Option<&[u8]>,
    ) -> io::Result<()> {
        if self.spool.is_none() {
            self.spool = Some(Extents::new(self.folder.new_file(NEW_SPOOL)?));
        }
        let Some(spool) = &mut self.spool else { return Ok(()) };
        let Some(content) = content else {
            return spool.append(Extent { volume, blocks, is_zero: true }, &[]);
        };
        for (start, piece) in (0_u64..)
            .step_by((CONTENT_BYTES_MAX / BLOCK_BYTES) as usize)
            .zip(content.chunks(CONTENT_BYTES_MAX as usize))
        {
            let first = blocks.start.0 + start;
            let blocks = BlockRange::new(first, first + piece.len() as u64 / BLOCK_BYTES);
            spool.append(Extent { volume, blocks, is_zero: false }, piece)?;
        }
        Ok(())
    }

    /// Makes the spool of the epoch that is received durable, under the name of its epoch.
    pub(crate) fn seal_spool(&mut self, watermark: Watermark) -> io::Result<()> {
        match self.spool.take() {
            Some(spool) => spool.sync()?,
            None => drop(self.folder.new_file(NEW_SPOOL)?),
        }
        self.folder.rename(NEW_SPOOL, &spool_name(watermark))?;
        self.folder.sync()
    }

    pub(crate) fn drop_unsealed(&mut self) -> io::Result<()> {
        // An epoch that was written in place is sent again: whether these were written is all the same.
        self.write_waiting()?;
        self.spool = None;
        self.folder.remove(NEW_SPOOL)
    }

    pub(crate) fn unlink_spool(&self, watermark: Watermark) -> io::Result<()> {
        self.folder.remove(&spool_name(watermark))
    }

    /// Applies a sealed spool to the images, which get the sizes of its epoch.
    pub(crate) fn apply(&mut self, sealed: &Sealed) -> io::Result<Room> {
        self.write_waiting()?;
        let spool = Extents::whole(self.folder.file(&spool_name(sealed.watermark))?)?;
        if self.grow(&sealed.sizes)? == Room::TooLittle {
            return Ok(Room::TooLittle);
        }
        if let Some(undo) = &mut self.undo {
            spool.each(|extent, _| undo.keep(&self.images, extent.volume, extent.blocks))?;
            undo.sync()?;
        }
        spool.each(|extent, content| {
            write(&self.images, extent.volume, extent.blocks, (!extent.is_zero).then_some(content))
        })?;
        Ok(Room::Enough)
    }

    /// Writes to an image, before [`Files::flush`] at the latest: the undo file is made durable once for many writes.
    pub(crate) fn write(
        &mut self,
        volume: VolumeIndex,
        blocks: BlockRange,
        content: Option<&[u8]>,
    ) -> io::Result<()> {
        let Some(undo) = &mut self.undo else { return write(&self.images, volume, blocks, content) };
        undo.keep(&self.images, volume, blocks)?;
        self.waiting_bytes += content.map_or(BLOCK_BYTES, |content| content.len() as u64);
        self.waiting.push(Waiting { volume, blocks, content: content.map(<[u8]>::to_vec) });
        if self.waiting_bytes >= WAITING_BYTES_MAX { self.write_waiting() } else { Ok(()) }
    }

    /// Carries out the writes that wait.
    fn write_waiting(&mut self) -> io::Result<()> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        if let Some(undo) = &mut self.undo {
            undo.sync()?;
        }
        self.waiting_bytes = 0;
        for Waiting { volume, blocks, content } in std::mem::take(&mut self.waiting) {
            write(&self.images, volume, blocks, content.as_deref())?;
        }
        Ok(())
    }

    /// Returns how many bytes a write to an image adds to the undo file, at most.
    pub(crate) fn undo_bytes(&self, volume: VolumeIndex, blocks: BlockRange) -> io::Result<u64> {
        match (&self.undo, self.images.get(volume.index())) {
            (Some(_), Some(image)) => content_bytes(image, blocks),
            _ => Ok(0),
        }
    }

    /// Returns how many bytes of content a sealed spool overwrites.
    pub(crate) fn measure(&self, sealed: &Sealed) -> io::Result<u64> {
        let spool = Extents::new_of(self.folder.file(&spool_name(sealed.watermark))?);
        let mut bytes = 0;
        spool.heads(|extent| {
            if let Some(image) = self.images.get(extent.volume.index()) {
                bytes += content_bytes(image, extent.blocks)?;
            }
            Ok(())
        })?;
        Ok(bytes)
    }

    /// Returns the free bytes of the store, and all.
    pub(crate) fn space(&self) -> io::Result<(u64, u64)> {
        self.folder.space()
    }

    /// Gives the images these sizes. One that is larger was made so by another program: volumes never shrink.
    pub(crate) fn grow(&mut self, sizes: &[BlockCount]) -> io::Result<Room> {
        for (image, size) in self.images.iter().zip(sizes) {
            let bytes = size.0.saturating_mul(BLOCK_BYTES);
            if image.metadata()?.len() == bytes {
                continue;
            }
            match image.set_len(bytes) {
                Err(error)
                    if matches!(
                        error.raw_os_error(),
                        Some(too_large::FBIG | too_large::INVAL | too_large::NOSPC)
                    ) =>
                {
                    return Ok(Room::TooLittle);
                }
                grown => grown?,
            }
        }
        // N.B. A point of before has zeroes there: what is written there is undone, too.
        self.undo.iter_mut().try_for_each(|undo| undo.grow(&self.images))?;
        Ok(Room::Enough)
    }

    /// Makes the images durable.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.write_waiting()?;
        self.images.iter().try_for_each(File::sync_all)
    }

    /// Keeps the images, which are flushed, as a recovery point.
    pub(crate) fn keep_point(&mut self, at: Watermark, kept_by: KeptBy) -> io::Result<()> {
        self.write_waiting()?;
        match kept_by {
            KeptBy::Undo | KeptBy::Passed => {
                self.undo = Some(Undo::new(self.folder.new_file(&undo_name(at))?, &self.images)?);
            }
            KeptBy::Reflink => {
                for (index, image) in self.images.iter().enumerate() {
                    let point = self.folder.new_file(&point_name(at, index))?;
                    rustix::fs::ioctl_ficlone(&point, image)?;
                    point.sync_all()?;
                }
            }
        }
        self.folder.sync()?;
        self.points.push((at, kept_by));
        Ok(())
    }

    /// Gives what other recovery points have only through these that are not kept any more to the next older one, durably. Called
    /// before the record without them is durable: a start deletes what no record names.
    pub(crate) fn prepare_to_drop(&mut self, kept: &[Point]) -> io::Result<()> {
        self.write_waiting()?;
        let is_kept = |at: Watermark| kept.iter().any(|point| point.watermark == at);
        let undo: Vec<Watermark> =
            self.points.iter().filter(|(_, by)| by.is_undo()).map(|(at, _)| *at).collect();
        let mut newest = undo.last().copied();
        // N.B. What only dropped points have is copied nowhere: a full store has no room for it.
        let first = undo.iter().position(|at| is_kept(*at)).unwrap_or(undo.len());
        let pairs = undo.iter().zip(undo.iter().skip(1)).skip(first);
        for (older, at) in pairs.rev().filter(|(_, at)| !is_kept(**at)) {
            let mut into = Undo::open(self.folder.file(&undo_name(*older))?, &self.images)?;
            let from = Extents::open(self.folder.file(&undo_name(*at))?, |_| {})?;
            from.each(|extent, content| into.add(extent, content))?;
            // N.B. The older point needs all of it, so it is as damaged as this one.
            if Extents::whole(self.folder.file(&undo_name(*at))?).is_err() {
                into.damage()?;
            }
            into.sync()?;
            if newest == Some(*at) {
                self.undo = Some(into);
                newest = Some(*older);
            }
        }
        Ok(())
    }

    /// Deletes a recovery point, after [`Files::prepare_to_drop`].
    pub(crate) fn drop_point(&mut self, at: Watermark) -> io::Result<()> {
        let Some(index) = self.points.iter().position(|(other, _)| *other == at) else { return Ok(()) };
        let (_, kept_by) = self.points.remove(index);
        match kept_by {
            KeptBy::Reflink => {
                (0..self.images.len()).try_for_each(|index| self.folder.remove(&point_name(at, index)))
            }
            KeptBy::Undo | KeptBy::Passed => {
                self.folder.remove(&undo_name(at))?;
                self.open_undo()
            }
        }
    }

    /// Copies a recovery point into the images, sizes included.
    pub(crate) fn restore_point(&mut self, at: Watermark) -> io::Result<()> {
        self.write_waiting()?;
        let Some((_, kept_by)) = self.points.iter().find(|(other, _)| *other == at) else {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the recovery point is gone"));
        };
        if *kept_by == KeptBy::Reflink {
            for (number, image) in self.images.iter().enumerate() {
                let point = self.folder.file(&point_name(at, number))?;
                // N.B. The image is never shorter than before meanwhile: a start after a kill would take it for another one.
                rustix::fs::ioctl_ficlone(image, &point)?;
                image.set_len(point.metadata()?.len())?;
            }
            return Ok(());
        }
        self.undo_since(at)?.iter().try_for_each(|undo| put_back(&self.images, undo))
    }

    /// Makes files for a clone of a recovery point, one a volume. Those that do not share their blocks with it are to be filled.
    pub(super) fn begin_clone(&mut self, at: Watermark) -> io::Result<Vec<Cloned>> {
        self.write_waiting()?;
        let Some((_, kept_by)) = self.points.iter().find(|(other, _)| *other == at) else {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the recovery point is gone"));
        };
        let cloned = (0..self.images.len()).map(|number| {
            let name = match kept_by {
                KeptBy::Reflink => point_name(at, number),
                KeptBy::Undo | KeptBy::Passed => image_name(number),
            };
            // N.B. Opened anew: a clone that is being made does not hold the lock of the image.
            let (from, to) = (self.folder.file(&name)?, self.folder.new_file(&clone_name(number))?);
            let bytes = from.metadata()?.len();
            to.set_len(bytes)?;
            let is_shared = rustix::fs::ioctl_ficlone(&to, &from).is_ok();
            Ok(Cloned { from, to, bytes, is_shared })
        });
        cloned.collect()
    }

    /// Returns what later epochs have overwritten since a recovery point: what was written last comes first. Nothing if that point
    /// shares blocks with the images.
    pub(super) fn undo_since(&self, at: Watermark) -> io::Result<Vec<Extents>> {
        let index = self.points.iter().position(|(other, _)| *other == at).unwrap_or(self.points.len());
        let since = self.points.get(index..).unwrap_or_default();
        if since.first().is_none_or(|(_, kept_by)| *kept_by == KeptBy::Reflink) {
            return Ok(Vec::new());
        }
        let undo = since.iter().rev().filter(|(_, kept_by)| kept_by.is_undo());
        undo.map(|(at, _)| Extents::whole(self.folder.file(&undo_name(*at))?)).collect()
    }

    /// Returns which blocks of a volume from `first` on have contents with these hashes.
    pub(crate) fn same(
        &mut self,
        volume: VolumeIndex,
        first: u64,
        hashes: &[u8],
    ) -> io::Result<Vec<(u64, u64)>> {
        self.write_waiting()?;
        let image = self.images.get(volume.index()).ok_or(io::ErrorKind::NotFound)?;
        super::divergence::same(image, first, hashes)
    }

    /// Returns whether an image has any content.
    pub(crate) fn has_content(&self) -> bool {
        // An image that cannot be asked counts as empty: then everything is sent.
        self.images.iter().any(|image| image.metadata().is_ok_and(|metadata| metadata.blocks() > 0))
    }

    /// Returns the runs of blocks of an image whose contents have these hashes, with the contents.
    pub(crate) fn found(
        &mut self,
        volume: VolumeIndex,
        first: u64,
        hashes: &[u8],
        is_taken: bool,
    ) -> io::Result<Vec<(BlockRange, Vec<u8>)>> {
        self.write_waiting()?;
        let image = self.images.get(volume.index()).ok_or(io::ErrorKind::NotFound)?;
        super::found::found(image, first, hashes, is_taken)
    }

    /// Opens a file that is to become an image.
    pub(super) fn foreign(&self, path: &Path) -> io::Result<Foreign> {
        self.folder.foreign(path)
    }

    /// Puts a file in the place of an image without content. It gets the volume's size.
    pub(super) fn replace_image(&self, index: usize, by: &Foreign, size: BlockCount) -> io::Result<()> {
        self.folder.take_in(by, &image_name(index), size.0.saturating_mul(BLOCK_BYTES))
    }

    /// Moves the image of a volume out of the folder, to a path that no file has.
    pub(crate) fn move_image(&self, index: usize, to: &Path) -> io::Result<()> {
        self.folder.move_out(&image_name(index), to)
    }

    /// Gives the image of a volume a second name, outside the folder, that no file has. The image stays here.
    pub(crate) fn lend_image(&self, index: usize, to: &Path) -> io::Result<()> {
        self.folder.link_out(&image_name(index), to)
    }

    /// Returns the attributes of the images.
    pub(crate) fn looks(&self) -> io::Result<Vec<Look>> {
        let looked = self.images.iter().map(|image| {
            let metadata = image.metadata()?;
            Ok(Look {
                inode: metadata.ino(),
                size_bytes: metadata.size(),
                mtime: (metadata.mtime(), metadata.mtime_nsec()),
                ctime: (metadata.ctime(), metadata.ctime_nsec()),
            })
        });
        looked.collect()
    }

    /// Returns when each image was written to last.
    pub(crate) fn written_at(&self) -> io::Result<Vec<(i64, i64)>> {
        let looked = self.images.iter().map(|image| {
            let metadata = image.metadata()?;
            Ok((metadata.mtime(), metadata.mtime_nsec()))
        });
        looked.collect()
    }

    /// Sets the time of the last write of each image to one that no later write gets. Returns these times.
    pub(crate) fn age(&self) -> io::Result<Vec<(i64, i64)>> {
        for image in &self.images {
            image.set_modified(SystemTime::now() - AGED)?;
        }
        self.written_at()
    }

    /// Deletes the names of the images here.
    pub(crate) fn forget_images(&self, count: usize) -> io::Result<()> {
        (0..count).try_for_each(|index| self.folder.remove(&image_name(index)))?;
        self.folder.sync()
    }

    /// Closes the images: others have them.
    pub(crate) fn close(&mut self) {
        self.images.clear();
        self.waiting.clear();
        self.spool = None;
        self.undo = None;
    }

    /// Opens the undo file of the newest recovery point that has one.
    fn open_undo(&mut self) -> io::Result<()> {
        let newest = self.points.iter().rev().find(|(_, kept_by)| kept_by.is_undo());
        self.undo = match newest {
            Some((at, _)) => Some(Undo::open(self.folder.file(&undo_name(*at))?, &self.images)?),
            None => None,
        };
        Ok(())
    }
}

/// Writes what an undo file has.
pub(super) fn put_back(images: &[File], undo: &Extents) -> io::Result<()> {
    undo.each(|extent, content| {
        write(images, extent.volume, extent.blocks, (!extent.is_zero).then_some(content))
    })?;
    Ok(())
}

/// Writes to an image; without content zeroes, which need no space if the file system can.
fn write(images: &[File], volume: VolumeIndex, blocks: BlockRange, content: Option<&[u8]>) -> io::Result<()> {
    let Some(image) = images.get(volume.index()) else { return Ok(()) };
    let (offset, length) = (blocks.start.0 * BLOCK_BYTES, blocks.len() * BLOCK_BYTES);
    let Some(content) = content else {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        return match fallocate(image, flags, offset, length) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
                let mut done = 0;
                while done < length {
                    let piece = (length - done).min(ZEROES.len() as u64);
                    image.write_all_at(&ZEROES[..piece as usize], offset + done)?;
                    done += piece;
                }
                Ok(())
            }
            punched => Ok(punched?),
        };
    };
    image.write_all_at(content, offset)
}

/// Numbers of errors of a file that cannot become as large.
mod too_large {
    use rustix::io::Errno;

    pub(super) const FBIG: i32 = Errno::FBIG.raw_os_error();
    pub(super) const INVAL: i32 = Errno::INVAL.raw_os_error();
    pub(super) const NOSPC: i32 = Errno::NOSPC.raw_os_error();
}

fn lost(name: &str, why: &str) -> io::Error {
    let text =
        format!("{name} of the standby is not as it was left ({why}): is the disk of the store mounted?");
    io::Error::new(io::ErrorKind::InvalidData, text)
}

pub(super) fn image_name(index: usize) -> String {
    format!("image-{index}")
}

/// Returns the name of a file of a clone. It is a second name of a volume that a test has.
pub(super) fn clone_name(index: usize) -> String {
    format!("clone-{index}")
}

/// Returns whether no record has to name a file.
fn is_of_others(name: &str) -> bool {
    name.starts_with("image-") || name.starts_with("clone-")
}

fn spool_name(at: Watermark) -> String {
    format!("spool-{}", text(at))
}

fn undo_name(at: Watermark) -> String {
    format!("undo-{}", text(at))
}

fn point_name(at: Watermark, index: impl Display) -> String {
    format!("point-{}-{index}", text(at))
}

/// Returns the life and the epoch of a watermark, for names of files.
pub(crate) fn text(at: Watermark) -> String {
    format!("{:032x}-{}", at.life.0, at.epoch.0)
}

#[cfg(test)]
mod tests;
