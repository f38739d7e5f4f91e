//! The VM's kernel and initramfs, which `scripts/guest-image` builds.

use std::path::{Path, PathBuf};

use anyhow::bail;

use crate::program::target_folder;

const VARIABLE: &str = "STERNA_GUEST_IMAGE";
/// The folder of the guest image in a package.
const SYSTEM_FOLDER: &str = "/usr/share/sterna/guest-image";

/// Kernel and initramfs of the VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestImage {
    /// Path of the kernel.
    pub kernel: PathBuf,
    /// Path of the initramfs with busybox and the checker.
    pub initramfs: PathBuf,
}

impl GuestImage {
    /// Finds the image in `folder`, in `STERNA_GUEST_IMAGE`, in this program's cargo target folder, or in the folder
    /// of packages, in this order.
    ///
    /// # Errors
    /// If it is in none of them; the message says how to build it.
    pub fn find(folder: Option<&Path>) -> anyhow::Result<Self> {
        let folders = match (folder, std::env::var_os(VARIABLE)) {
            (Some(folder), _) => vec![folder.to_owned()],
            (None, Some(folder)) => vec![folder.into()],
            (None, None) => {
                let target = target_folder().map(|target| target.join("guest-image")).ok();
                target.into_iter().chain([SYSTEM_FOLDER.into()]).collect()
            }
        };
        // QEMU may run in another folder.
        let absolute = |folder: &PathBuf| std::path::absolute(folder).unwrap_or_else(|_| folder.clone());
        if let Some(image) = folders.iter().map(|folder| Self::of(&absolute(folder))).find(Self::is_there) {
            return Ok(image);
        }
        let folders: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
        bail!(
            "there is no guest image in {}: build it with scripts/guest-image, or run the demo without a VM",
            folders.join(" or ")
        )
    }

    fn of(folder: &Path) -> Self {
        Self { kernel: folder.join("vmlinuz"), initramfs: folder.join("initramfs") }
    }

    fn is_there(&self) -> bool {
        self.kernel.is_file() && self.initramfs.is_file()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_found_only_when_both_files_are_there() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("vmlinuz"), b"").unwrap();
        let error = GuestImage::find(Some(folder.path())).unwrap_err().to_string();
        assert!(error.contains(folder.path().to_str().unwrap()) && error.contains("scripts/guest-image"));
        std::fs::write(folder.path().join("initramfs"), b"").unwrap();
        assert_eq!(GuestImage::find(Some(folder.path())).unwrap(), GuestImage::of(folder.path()));
        let up = "../".repeat(std::env::current_dir().unwrap().components().count());
        let relative = Path::new(&up).join(folder.path().strip_prefix("/").unwrap());
        assert!(GuestImage::find(Some(&relative)).unwrap().kernel.is_absolute());
    }
}
