//! Measures for a moment how fast an image is read and a store is written, where nothing has been moved yet.

use std::fs::File;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use block::Buffer;
use rustix::fs::{Mode, OFlags, SeekFrom, open, seek};
use rustix::io::{pread, pwrite};

/// The bytes of a request.
const PIECE: usize = 1 << 20;
/// The most bytes that are read, and written.
const BYTES_MAX: u64 = 64 << 20;
/// The longest time that is spent on either.
const TIME_MAX: Duration = Duration::from_millis(500);

/// Returns the rate at which an image can be copied into a folder, in bytes a second. What it writes has no name, and is gone with
/// it. `None`: it cannot be measured there. May block for a second.
pub(crate) fn rate(image: &Path, folder: &Path) -> Option<f64> {
    let read =
        reading(image).inspect_err(|error| tracing::debug!(image = %image.display(), %error, "cannot probe"));
    let written = writing(folder)
        .inspect_err(|error| tracing::debug!(folder = %folder.display(), %error, "cannot probe"));
    // A store that is too small to be measured does not limit.
    match (read.ok()?, written.ok()?) {
        (Some(read), Some(written)) => Some(read.min(written)),
        (None, written) => written,
        (read, None) => read,
    }
}

/// Reads data of the image past the page cache.
fn reading(image: &Path) -> io::Result<Option<f64>> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let file =
        open(image, flags | OFlags::DIRECT, Mode::empty()).or_else(|_| open(image, flags, Mode::empty()))?;
    let mut buffer = Buffer::zeroed(PIECE);
    let mut at = 0_u64;
    timed(|| {
        // Holes say nothing about the disk.
        let Ok(data) = seek(&file, SeekFrom::Data(at)) else { return Ok(0) };
        let data = data / PIECE as u64 * PIECE as u64;
        at = data.max(at) + PIECE as u64;
        let Some(space) = buffer.as_mut_slice() else { return Ok(0) };
        Ok(pread(&file, space, at - PIECE as u64)?)
    })
}

/// Writes data to a file without a name, past the page cache, and makes it durable.
fn writing(folder: &Path) -> io::Result<Option<f64>> {
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR;
    let file = open(folder, flags | OFlags::DIRECT, mode).or_else(|_| open(folder, flags, mode))?;
    let file = File::from(file);
    let mut buffer = Buffer::zeroed(PIECE);
    // Zeroes may cost less than data.
    if let Some(space) = buffer.as_mut_slice() {
        space.iter_mut().zip((0..=u8::MAX).cycle()).for_each(|(byte, value)| *byte = value ^ 0x5a);
    }
    let mut at = 0;
    timed(|| {
        let written = pwrite(&file, buffer.as_slice(), at)?;
        at += written as u64;
        if at >= BYTES_MAX {
            file.sync_data()?;
        }
        Ok(written)
    })
}

/// Repeats a request until enough is known; `None`: there is too little to do.
fn timed(mut request: impl FnMut() -> io::Result<usize>) -> io::Result<Option<f64>> {
    let begun = Instant::now();
    let mut bytes = 0_u64;
    while bytes < BYTES_MAX && begun.elapsed() < TIME_MAX {
        match request()? {
            0 => break,
            some => bytes += some as u64,
        }
    }
    let is_enough = bytes >= 4 * PIECE as u64;
    Ok(is_enough.then(|| bytes as f64 / begun.elapsed().as_secs_f64()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_measures_reading_and_writing_and_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("image");
        std::fs::write(&image, vec![7; 16 << 20]).unwrap();
        let target = tempfile::tempdir().unwrap();
        assert!(rate(&image, target.path()).unwrap() > 0.0);
        assert_eq!(std::fs::read_dir(target.path()).unwrap().count(), 0);
        assert_eq!(rate(&image, &folder.path().join("missing")), None);
        // An image without data does not limit the copying.
        File::create(&image).unwrap().set_len(1 << 30).unwrap();
        assert!(rate(&image, target.path()).is_some());
    }
}
