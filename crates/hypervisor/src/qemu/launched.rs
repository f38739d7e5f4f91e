//! What the kernel tells of a QEMU process: its command, and the files that it has open.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Where the kernel tells of processes.
const PROCESSES: &str = "/proc";

/// What is known of a QEMU process, whoever has launched it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Launched {
    /// The program's file.
    pub program: PathBuf,
    /// Its words, with the name that the program was called by.
    pub command: Vec<String>,
    /// Where relative paths begin, unless it has gone elsewhere since (`-daemonize`).
    pub folder: PathBuf,
    /// The files that it has open.
    pub files: Vec<PathBuf>,
    /// What it has open by the kernel's numbers, of the file system and within it: once for each descriptor.
    pub descriptors: Vec<(u64, u64)>,
    /// The user and the group that it runs as.
    pub owner: (u32, u32),
}

impl Launched {
    /// Looks at the process with this number. It may sleep.
    ///
    /// # Errors
    /// The system's: the kernel does not tell, or not to this user.
    pub fn of(process: i32) -> io::Result<Self> {
        Self::look(&Path::new(PROCESSES).join(process.to_string()))
    }

    /// Where a path is that QEMU was given; `None`: nobody knows.
    pub fn resolve(&self, path: &Path) -> Option<PathBuf> {
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
    pub fn descriptors_of(&self, path: &Path) -> usize {
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
            // A descriptor that was closed meanwhile leads nowhere.
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
        let itself = Launched::look(Path::new("/proc/self")).unwrap();
        assert_eq!(itself.command, std::env::args().collect::<Vec<_>>());
        assert_eq!(itself.program, std::env::current_exe().unwrap());
        let elsewhere = Launched { folder: folder.path().to_owned(), ..itself };
        for path in [
            open.to_str().unwrap(),
            "images/foreign-image.raw",
            "./images/foreign-image.raw",
            "foreign-image.raw",
        ] {
            assert_eq!(elsewhere.resolve(Path::new(path)), Some(open.clone()), "{path}");
        }
        drop(file);
        let closed = Launched { files: Vec::new(), ..elsewhere };
        assert_eq!(closed.resolve(Path::new("images/foreign-image.raw")), Some(open.canonicalize().unwrap()));
        assert_eq!(closed.resolve(Path::new("foreign-image.raw")), None);
    }
}
