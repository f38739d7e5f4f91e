//! What the kernel tells of a QEMU that somebody else has started: its command, and the files that it has open.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use hypervisor::qemu::Qemu;

use super::VmError;

/// Where the kernel tells of processes.
const PROCESSES: &str = "/proc";

/// What is known of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Foreign {
    /// The program's file.
    pub(super) program: PathBuf,
    /// Its words, with the name that the program was called by.
    pub(super) command: Vec<String>,
    /// Where relative paths begin, unless it has gone elsewhere since (`-daemonize`).
    pub(super) folder: PathBuf,
    /// The files that it has open.
    pub(super) files: Vec<PathBuf>,
    /// What it has open by the kernel's numbers, of the file system and within it: once for each descriptor.
    pub(super) descriptors: Vec<(u64, u64)>,
    /// The user and the group that it runs as.
    pub(crate) owner: (u32, u32),
}

impl Foreign {
    /// Looks at the process behind a monitor. It may sleep.
    ///
    /// # Errors
    /// [`VmError`]: the kernel does not tell, or not to this user.
    pub(crate) async fn of(vm: &str, qemu: &Qemu) -> Result<Self, VmError> {
        let id = qemu.process();
        let id = id.ok_or_else(|| VmError::Unusable("the kernel names no process".to_owned()))?;
        let looked =
            tokio::task::spawn_blocking(move || Self::look(&Path::new(PROCESSES).join(id.to_string())));
        let looked = looked.await.map_err(|error| VmError::Unusable(error.to_string()))?;
        looked.map_err(|source| VmError::Hidden { vm: vm.to_owned(), id, source })
    }

    /// Where a path is that QEMU was given; `None`: nobody knows.
    pub(crate) fn resolve(&self, path: &Path) -> Option<PathBuf> {
        if path.is_absolute() {
            return Some(path.to_owned());
        }
        let end = path.strip_prefix(".").unwrap_or(path);
        let mut open = self.files.iter().filter(|file| file.ends_with(end));
        match (open.next(), open.next()) {
            (Some(one), None) => Some(one.clone()),
            _ => self.folder.join(end).canonicalize().ok(),
        }
    }

    /// How many descriptors it has of the file that is at `path` for us, whatever it calls it. It may sleep for a moment.
    pub(crate) fn descriptors_of(&self, path: &Path) -> usize {
        let Ok(found) = std::fs::metadata(path) else { return 0 };
        let identity = (found.dev(), found.ino());
        self.descriptors.iter().filter(|descriptor| **descriptor == identity).count()
    }

    fn look(process: &Path) -> io::Result<Self> {
        let words = std::fs::read(process.join("cmdline"))?;
        let words = String::from_utf8(words).map_err(|_| io::ErrorKind::InvalidData)?;
        let words = words.strip_suffix('\0').unwrap_or(&words);
        let (mut files, mut descriptors) = (Vec::new(), Vec::new());
        for entry in std::fs::read_dir(process.join("fd"))? {
            let entry = entry?.path();
            // One that was closed meanwhile has none.
            files.extend(std::fs::read_link(&entry).ok().filter(|file| file.is_absolute()));
            // N.B. that leads to the file itself, not to what has its name here.
            let open = std::fs::metadata(&entry).ok();
            descriptors.extend(open.map(|open| (open.dev(), open.ino())));
        }
        let itself = std::fs::metadata(process)?;
        files.sort();
        files.dedup();
        Ok(Self {
            program: std::fs::read_link(process.join("exe"))?,
            command: words.split('\0').map(str::to_owned).collect(),
            folder: std::fs::read_link(process.join("cwd"))?,
            files,
            descriptors,
            owner: (itself.uid(), itself.gid()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_its_words_and_files() {
        let folder = tempfile::tempdir().unwrap();
        let open = folder.path().join("images/foreign-image.raw");
        std::fs::create_dir(folder.path().join("images")).unwrap();
        let file = std::fs::File::create(&open).unwrap();
        let itself = Foreign::look(Path::new("/proc/self")).unwrap();
        assert_eq!(itself.command, std::env::args().collect::<Vec<_>>());
        assert_eq!(itself.program, std::env::current_exe().unwrap());
        let elsewhere = Foreign { folder: folder.path().to_owned(), ..itself };
        for path in [
            open.to_str().unwrap(),
            "images/foreign-image.raw",
            "./images/foreign-image.raw",
            "foreign-image.raw",
        ] {
            assert_eq!(elsewhere.resolve(Path::new(path)), Some(open.clone()), "{path}");
        }
        drop(file);
        let closed = Foreign { files: Vec::new(), ..elsewhere };
        assert_eq!(closed.resolve(Path::new("images/foreign-image.raw")), Some(open.canonicalize().unwrap()));
        assert_eq!(closed.resolve(Path::new("foreign-image.raw")), None);
    }
}
