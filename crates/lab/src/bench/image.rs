//! Images that are measured: filled with random data, compared, and forgotten by the page cache.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use crate::demo::Progress;
use crate::workload::random::Random;

/// Images are written in steps of this size; between them a signal is noticed.
const STEP_BYTES: u64 = 32 << 20;
/// Holes and data alternate within pieces of this size: larger than any block, smaller than any image.
const PIECE_BYTES: u64 = 4 << 20;

/// How much of an image is a hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holes {
    /// Every block has been written.
    None,
}

impl Holes {
    /// Bytes of data at the beginning of each piece; the rest of it is a hole.
    fn data_bytes(self) -> u64 {
        match self {
            Self::None => PIECE_BYTES,
        }
    }
}

/// Makes an image of random data, which nothing can compress or take for zeroes, and waits until it is on the disk.
///
/// # Errors
/// What the system says.
pub(super) async fn fill(
    path: &Path,
    size_bytes: u64,
    holes: Holes,
    progress: &mut Progress,
) -> anyhow::Result<()> {
    let context = || format!("fill the image {}", path.display());
    let file = File::options().read(true).write(true).create(true).truncate(true).open(path);
    let mut file = file.with_context(context)?;
    file.set_len(size_bytes).with_context(context)?;
    for begin in (0..size_bytes).step_by(STEP_BYTES as usize) {
        let end = (begin + STEP_BYTES).min(size_bytes);
        let step = move || fill_step(&file, begin..end, holes).map(|()| file);
        file = tokio::task::spawn_blocking(step).await?.with_context(context)?;
        progress.advance(end as f64 / size_bytes as f64);
    }
    tokio::task::spawn_blocking(move || file.sync_all()).await?.with_context(context)
}

fn fill_step(file: &File, range: std::ops::Range<u64>, holes: Holes) -> std::io::Result<()> {
    let mut random = Random::new(range.start);
    let mut bytes = Vec::new();
    for begin in range.clone().step_by(PIECE_BYTES as usize) {
        let length = holes.data_bytes().min(range.end - begin);
        bytes.clear();
        while (bytes.len() as u64) < length {
            bytes.extend_from_slice(&random.next_u64().to_le_bytes());
        }
        bytes.truncate(length as usize);
        file.write_all_at(&bytes, begin)?;
    }
    Ok(())
}

/// How much the page cache has forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Forgotten {
    /// Everything.
    All,
    /// The pages of the images; for the rest one must be root.
    Images,
}

/// Writes everything to disks, and drops the page cache: that of the images in any case, all of it if that is allowed.
///
/// # Errors
/// If an image cannot be opened.
pub(super) async fn drop_caches(images: &[&Path]) -> anyhow::Result<Forgotten> {
    let images: Vec<PathBuf> = images.iter().map(|&path| path.to_owned()).collect();
    tokio::task::spawn_blocking(move || {
        rustix::fs::sync();
        for path in &images {
            let file = File::open(path).with_context(|| format!("open {}", path.display()))?;
            let forgotten = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
            forgotten.with_context(|| format!("drop the cached pages of {}", path.display()))?;
        }
        let all = File::options().write(true).open("/proc/sys/vm/drop_caches");
        // Root of a container is refused too.
        let all = all.and_then(|mut file| file.write_all(b"3"));
        Ok(if all.is_ok() { Forgotten::All } else { Forgotten::Images })
    })
    .await?
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[tokio::test]
    async fn a_full_image_has_data_everywhere() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        let size = STEP_BYTES + PIECE_BYTES + 4096;
        fill(&path, size, Holes::None, &mut Progress::silent()).await.unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(bytes.len() as u64, size);
        assert!(bytes.chunks(4096).all(|block| block.iter().any(|&byte| byte != 0)));
        assert!(std::fs::metadata(&path).unwrap().blocks() * 512 >= size);
        drop_caches(&[&path]).await.unwrap();
        assert!(drop_caches(&[Path::new("/no/such/image")]).await.is_err());
    }
}
