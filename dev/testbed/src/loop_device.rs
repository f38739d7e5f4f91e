//! Loop devices.

use std::path::{Path, PathBuf};

use crate::program::Program;

/// A loop device over a file. Dropping it detaches it; while it is still open, the kernel does so at the last close.
#[derive(Debug)]
pub struct LoopDevice {
    path: PathBuf,
}

impl LoopDevice {
    /// Attaches a file.
    ///
    /// # Errors
    /// If that is not allowed.
    pub fn attach(file: &Path) -> anyhow::Result<Self> {
        Self::attach_with(losetup(), file)
    }

    /// Attaches a file without a cache, so that each error reaches its request.
    ///
    /// # Errors
    /// If that is not allowed.
    pub(crate) fn attach_uncached(file: &Path) -> anyhow::Result<Self> {
        Self::attach_with(losetup().arg("--direct-io=on"), file)
    }

    /// Returns the path of the device.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives the device the size that its file has.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn follow_size(&self) -> anyhow::Result<()> {
        losetup().arg("--set-capacity").arg(&self.path).succeed().map(drop)
    }

    /// Returns whether its file answers nothing to the system. The file has no number then: `/dev/loop0: []: (/tmp/file)`.
    pub(crate) fn file_is_lost(&self) -> anyhow::Result<bool> {
        Ok(losetup().arg(&self.path).succeed()?.contains(": []:"))
    }

    fn attach_with(losetup: Program, file: &Path) -> anyhow::Result<Self> {
        let path = losetup.args(["--find", "--show"]).arg(file).succeed()?;
        Ok(Self { path: PathBuf::from(path.trim_end()) })
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        if let Err(error) = losetup().arg("--detach").arg(&self.path).succeed() {
            eprintln!("{} stays attached: {error:#}", self.path.display());
        }
    }
}

fn losetup() -> Program {
    Program::of_package("losetup", "mount")
}
