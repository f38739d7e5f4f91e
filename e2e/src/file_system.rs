//! Small file systems that tests mount as stores: full soon, or hung when told to. They need root.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};

use crate::program::Program;

/// A mounted file system.
///
/// Dropping it thaws and unmounts it, and removes what it was made of.
#[derive(Debug)]
pub struct FileSystem {
    folder: PathBuf,
    /// The image that is mounted, if it is one.
    image: Option<PathBuf>,
}

impl FileSystem {
    /// Mounts an empty ext4 of so many bytes over a folder; its image lies beside the folder.
    ///
    /// # Errors
    /// If this is not root, or a program is missing.
    pub fn ext4(folder: &Path, bytes: u64) -> anyhow::Result<Self> {
        let root = rustix::process::geteuid().is_root();
        ensure!(root, "mounting file systems needs root: run the tests as root, or in a virtual machine");
        let image = folder.with_extension("ext4");
        let file = std::fs::File::create_new(&image).context("make an image")?;
        file.set_len(bytes).context("set the size of an image")?;
        // No reserved blocks: what is free is free for root and others alike.
        Program::of_package("mkfs.ext4", "e2fsprogs").args(["-q", "-F", "-m", "0"]).arg(&image).succeed()?;
        Program::of_package("mount", "mount").args(["-o", "loop"]).arg(&image).arg(folder).succeed()?;
        Ok(Self { folder: folder.to_owned(), image: Some(image) })
    }

    /// Where it is mounted.
    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        // Lazily: a test that failed may have left something open in it.
        let unmounted = Program::of_package("umount", "mount").arg("--lazy").arg(&self.folder).succeed();
        if let Err(error) = unmounted {
            eprintln!("{} stays mounted: {error:#}", self.folder.display());
        }
        if let Some(image) = &self.image {
            // The folder around it is removed anyway.
            let _ = std::fs::remove_file(image);
        }
    }
}

/// A file system whose changes wait until this is dropped: a store that hangs.
#[derive(Debug)]
pub struct Frozen {
    folder: PathBuf,
}

impl Frozen {
    /// Lets every change of the file system at `folder` wait.
    ///
    /// # Errors
    /// If this is not root, or the file system cannot do that.
    pub fn freeze(folder: &Path) -> anyhow::Result<Self> {
        Program::of_package("fsfreeze", "util-linux").arg("--freeze").arg(folder).succeed()?;
        Ok(Self { folder: folder.to_owned() })
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        let thawed =
            Program::of_package("fsfreeze", "util-linux").arg("--unfreeze").arg(&self.folder).succeed();
        if let Err(error) = thawed {
            eprintln!("{} stays frozen: {error:#}", self.folder.display());
        }
    }
}
