//! A benchmark's folder: on the measured disk, and removed afterwards.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use rustix::fs::{Mode, OFlags};
use tempfile::TempDir;

use crate::demo::{check_free_space, usual_parent};

/// Room for journals, logs and the file system's own records, besides the images.
const RESERVE_BYTES: u64 = 128 << 20;

#[derive(Debug)]
pub(super) struct BenchFolder {
    folder: TempDir,
}

impl BenchFolder {
    /// Makes the folder below `parent`, or in the demo's usual place. Fails if `images` images of `size_bytes` do not fit, or if
    /// files there cannot be used past the page cache.
    pub(super) fn create(parent: Option<&Path>, images: u64, size_bytes: u64) -> anyhow::Result<Self> {
        let parent = parent.map_or_else(usual_parent, Path::to_owned);
        let needed = size_bytes.saturating_mul(images).saturating_add(RESERVE_BYTES);
        check_free_space(
            &parent,
            needed,
            "the benchmark",
            &format!("{images} images of {size_bytes} bytes"),
        )?;
        let folder = tempfile::Builder::new()
            .prefix("sterna-bench-")
            .tempdir_in(&parent)
            .with_context(|| format!("make a temporary folder in {}", parent.display()))?;
        let folder = Self { folder };
        folder.check_direct_io()?;
        Ok(folder)
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(super) fn root(&self) -> &Path {
        self.folder.path()
    }

    /// Removes the folder and reports failures; dropping the folder hides them.
    pub(super) fn remove(self) -> anyhow::Result<()> {
        let path = self.root().to_owned();
        self.folder.close().with_context(|| format!("remove {}", path.display()))
    }

    /// Checks that direct I/O works here: otherwise the page cache would be measured, and all contenders would
    /// be as fast as memory.
    fn check_direct_io(&self) -> anyhow::Result<()> {
        let path = self.path("direct");
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::DIRECT | OFlags::CLOEXEC;
        match rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR) {
            Ok(_) => std::fs::remove_file(&path).with_context(|| format!("remove {}", path.display())),
            Err(rustix::io::Errno::INVAL) => bail!(
                "the file system of {} has no direct I/O, so that memory would be measured: \
                 choose a folder on a disk with --folder",
                self.root().display()
            ),
            Err(error) => Err(error).with_context(|| format!("make {}", path.display())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::BenchFolder;

    #[test]
    fn images_that_do_not_fit_are_refused_with_the_figures() {
        let parent = tempfile::tempdir().unwrap();
        let error = BenchFolder::create(Some(parent.path()), 2, 1 << 60).unwrap_err().to_string();
        assert!(error.starts_with("the benchmark needs") && error.contains("2 images of"), "{error}");
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0, "nothing may be left behind");
    }
}
