//! Images for measurements: filling them with random data, comparing them, and dropping their page cache.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};

use super::folder::BenchFolder;
use crate::demo::Progress;
use crate::workload::random::Random;

/// Images are written in steps of this size; a signal is noticed between steps.
const STEP_BYTES: u64 = 32 << 20;
/// Holes and data alternate within pieces of this size: larger than any block, smaller than any image.
const PIECE_BYTES: u64 = 4 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holes {
    None,
    /// A quarter: the end of every piece.
    Quarter,
}

impl Holes {
    /// Returns the bytes of data at the beginning of each piece; the rest is a hole.
    fn data_bytes(self) -> u64 {
        match self {
            Self::None => PIECE_BYTES,
            Self::Quarter => PIECE_BYTES / 4 * 3,
        }
    }

    pub(super) fn data_bytes_of(self, size_bytes: u64) -> u64 {
        size_bytes / PIECE_BYTES * self.data_bytes() + (size_bytes % PIECE_BYTES).min(self.data_bytes())
    }
}

/// Makes an image of random data, which cannot be compressed or taken for zeroes. Returns once it is on the disk.
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Forgotten {
    All,
    /// The pages of the images; the rest needs root.
    Images,
}

/// Writes everything to disks, then drops the images' page cache, and all of it if that is allowed.
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
        // The root user of a container is refused too.
        let all = all.and_then(|mut file| file.write_all(b"3"));
        Ok(if all.is_ok() { Forgotten::All } else { Forgotten::Images })
    })
    .await?
}

/// A set of an image's blocks, numbered from its beginning.
#[derive(Clone, Debug, Default)]
pub(super) struct Blocks(Vec<bool>);

impl Blocks {
    /// File systems allocate blocks of this many bytes, and no request is smaller.
    const BYTES: u64 = 4096;

    pub(super) fn add(&mut self, begin: u64, length: u64) {
        let blocks = (begin / Self::BYTES) as usize..(begin + length).div_ceil(Self::BYTES) as usize;
        if self.0.len() < blocks.end {
            self.0.resize(blocks.end, false);
        }
        self.0[blocks].fill(true);
    }

    fn contains(&self, offset: u64) -> bool {
        self.0.get((offset / Self::BYTES) as usize).is_some_and(|&is_there| is_there)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Compared {
    pub(super) bytes: u64,
    pub(super) first_difference: Option<u64>,
}

/// Compares two images, except for the blocks in `except`. Fails if they differ in size.
pub(super) async fn compare(first: &Path, second: &Path, except: Blocks) -> anyhow::Result<Compared> {
    let open = |path: &Path| File::open(path).with_context(|| format!("open {}", path.display()));
    let (first, second) = (open(first)?, open(second)?);
    tokio::task::spawn_blocking(move || compare_files(&first, &second, &except)).await?
}

fn compare_files(first: &File, second: &File, except: &Blocks) -> anyhow::Result<Compared> {
    let size = first.metadata()?.len();
    let other_size = second.metadata()?.len();
    ensure!(size == other_size, "the images differ in size: {size} and {other_size} bytes");
    let mut compared = Compared { bytes: 0, first_difference: None };
    let mut buffers = [vec![0; PIECE_BYTES as usize], vec![0; PIECE_BYTES as usize]];
    for begin in (0..size).step_by(PIECE_BYTES as usize) {
        let length = PIECE_BYTES.min(size - begin) as usize;
        let [ours, theirs] = &mut buffers;
        first.read_exact_at(&mut ours[..length], begin)?;
        second.read_exact_at(&mut theirs[..length], begin)?;
        let pairs = ours[..length].chunks(Blocks::BYTES as usize).zip(theirs.chunks(Blocks::BYTES as usize));
        for (index, (ours, theirs)) in pairs.enumerate() {
            let offset = begin + index as u64 * Blocks::BYTES;
            if except.contains(offset) {
                continue;
            }
            compared.bytes += ours.len() as u64;
            if ours != &theirs[..ours.len()] && compared.first_difference.is_none() {
                compared.first_difference = Some(offset);
            }
        }
    }
    Ok(compared)
}

/// Returns the bytes that an image takes on its file system.
fn allocated_bytes(path: &Path) -> anyhow::Result<u64> {
    /// The unit of `stat`, whatever the file system's own blocks are.
    const STAT_BLOCK_BYTES: u64 = 512;
    let metadata = std::fs::metadata(path).with_context(|| format!("look at {}", path.display()))?;
    Ok(metadata.blocks() * STAT_BLOCK_BYTES)
}

/// The images of copies, one after the other: a source, and a place for its copy.
#[derive(Debug)]
pub(super) struct Images {
    pub(super) source: PathBuf,
    pub(super) target: PathBuf,
    pub(super) size_bytes: u64,
}

/// A copy that was compared with its source, and deleted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Finished {
    pub(super) allocated_bytes: u64,
    pub(super) compared_bytes: u64,
}

impl Images {
    pub(super) async fn make(
        folder: &BenchFolder,
        size_bytes: u64,
        holes: Holes,
        progress: &mut Progress,
    ) -> anyhow::Result<Self> {
        let (source, target) = (folder.path("source.img"), folder.path("target.img"));
        progress.begin("filling the image");
        fill(&source, size_bytes, holes, progress).await?;
        Ok(Self { source, target, size_bytes })
    }

    /// Makes an empty target of the right size, which QEMU's mirror needs.
    pub(super) fn make_target(&self) -> anyhow::Result<()> {
        File::create(&self.target)
            .and_then(|target| target.set_len(self.size_bytes))
            .context("make the target")
    }

    pub(super) fn delete_target(&self) -> anyhow::Result<()> {
        match std::fs::remove_file(&self.target) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            deleted => deleted.context("delete the target"),
        }
    }

    pub(super) async fn flush(&self) -> anyhow::Result<()> {
        let file = File::options().write(true).open(&self.target).context("open the target")?;
        tokio::task::spawn_blocking(move || file.sync_all()).await?.context("flush the target")
    }

    /// Compares a copy with the source, except for some blocks, deletes it, and puts the source back: Sterna fences it by
    /// renaming it. Both must be unused.
    pub(super) async fn finish(&self, copy: &Path, except: Blocks) -> anyhow::Result<Finished> {
        let allocated_bytes = allocated_bytes(copy)?;
        let source = self.fenced_source()?;
        let Compared { bytes, first_difference } = compare(&source, copy, except).await?;
        if let Some(offset) = first_difference {
            bail!("the target differs from the source at byte {offset}");
        }
        ensure!(bytes > 0, "the guest has written every block since the switch: nothing could be compared");
        std::fs::remove_file(copy).context("delete the target")?;
        std::fs::rename(&source, &self.source).context("put the source's image back")?;
        Ok(Finished { allocated_bytes, compared_bytes: bytes })
    }

    fn fenced_source(&self) -> anyhow::Result<PathBuf> {
        let (folder, name) =
            self.source.parent().zip(self.source.file_name()).context("the source has a name")?;
        for entry in std::fs::read_dir(folder).context("look for the source's image")? {
            let entry = entry.context("look for the source's image")?;
            if entry.file_name().as_encoded_bytes().starts_with(name.as_encoded_bytes()) {
                return Ok(entry.path());
            }
        }
        bail!("the source's image has gone, though it was served in place")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_image_with_holes_takes_less_than_its_size() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        fill(&path, 4 * PIECE_BYTES, Holes::Quarter, &mut Progress::silent()).await.unwrap();
        assert_eq!(Holes::Quarter.data_bytes_of(4 * PIECE_BYTES), 3 * PIECE_BYTES);
        assert_eq!(Holes::Quarter.data_bytes_of(PIECE_BYTES + 4096), PIECE_BYTES / 4 * 3 + 4096);
        let allocated = allocated_bytes(&path).unwrap();
        assert!((3 * PIECE_BYTES..4 * PIECE_BYTES).contains(&allocated), "{allocated}");
    }

    #[tokio::test]
    async fn the_first_difference_is_found_unless_it_is_excepted() {
        let folder = tempfile::tempdir().unwrap();
        let (first, second) = (folder.path().join("first"), folder.path().join("second"));
        let size = PIECE_BYTES + 10_000;
        fill(&first, size, Holes::None, &mut Progress::silent()).await.unwrap();
        std::fs::copy(&first, &second).unwrap();
        let equal = Compared { bytes: size, first_difference: None };
        assert_eq!(compare(&first, &second, Blocks::default()).await.unwrap(), equal);
        let file = File::options().write(true).open(&second).unwrap();
        let offset = PIECE_BYTES + 8192;
        file.write_all_at(b"different", offset + 100).unwrap();
        let found = compare(&first, &second, Blocks::default()).await.unwrap();
        assert_eq!(found.first_difference, Some(offset));
        let mut except = Blocks::default();
        except.add(offset + 1, 1);
        let found = compare(&first, &second, except).await.unwrap();
        assert_eq!(found, Compared { bytes: PIECE_BYTES + 8192, first_difference: None });
        file.set_len(size - 1).unwrap();
        assert!(compare(&first, &second, Blocks::default()).await.is_err());
    }

    #[tokio::test]
    async fn a_finished_copy_is_compared_and_the_fenced_source_is_put_back() {
        let parent = tempfile::tempdir().unwrap();
        let folder = BenchFolder::create(Some(parent.path()), 2, PIECE_BYTES).unwrap();
        let images = Images::make(&folder, PIECE_BYTES, Holes::None, &mut Progress::silent()).await.unwrap();
        let fenced = folder.path("source.img.moved");
        std::fs::rename(&images.source, &fenced).unwrap();
        images.make_target().unwrap();
        let error = images.finish(&images.target, Blocks::default()).await.unwrap_err().to_string();
        assert!(error.contains("differs from the source at byte 0"), "{error}");
        std::fs::copy(&fenced, &images.target).unwrap();
        let finished = images.finish(&images.target, Blocks::default()).await.unwrap();
        assert_eq!(finished.compared_bytes, PIECE_BYTES);
        assert!(images.source.exists() && !fenced.exists() && !images.target.exists());
    }

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
