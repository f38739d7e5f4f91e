//! The kernel's information about a QEMU process: its command, and its open files.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

const PROCESSES: &str = "/proc";
/// Flags of a descriptor, as the kernel reports them: its access mode, and that it has none (`O_PATH`).
const ACCESS_MODE: u32 = 0o3;
const READ_ONLY: u32 = 0o0;
const READ_WRITE: u32 = 0o2;
const PATH_ONLY: u32 = 0o10_000_000;

/// The known properties of a QEMU process, whatever has launched it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Launched {
    /// The path of the program's file.
    pub program: PathBuf,
    /// Its words, with the name that the program was called by.
    pub command: Vec<String>,
    /// The folder where relative paths begin, unless it has changed since (`-daemonize`).
    pub folder: PathBuf,
    /// The files that it has open.
    pub files: Vec<PathBuf>,
    /// Its open files, once for each readable descriptor.
    pub descriptors: Vec<Descriptor>,
    /// The user and the group that it runs as.
    pub owner: (u32, u32),
    /// The other groups that it is in.
    pub groups: Vec<u32>,
}

/// A file that a process has open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// The file by the kernel's numbers: of the file system, and within it.
    pub file: (u64, u64),
    /// The access by this descriptor.
    pub used: Use,
}

/// The access by a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Use {
    /// The process can read the file.
    Read,
    /// The process can read and write it.
    ReadWrite,
}

impl Launched {
    /// Reads the information about the process with this number. May sleep.
    ///
    /// # Errors
    /// The system's: the kernel does not report it, or not to this user.
    pub fn of(process: i32) -> io::Result<Self> {
        Self::look(&Path::new(PROCESSES).join(process.to_string()))
    }

    /// Resolves a path that QEMU was given; `None`: it is not known.
    pub fn resolve(&self, path: &Path) -> Option<PathBuf> {
        if path.is_absolute() {
            return Some(path.to_owned());
        }
        let end = path.strip_prefix(".").unwrap_or(path);
        let mut open = self.files.iter().filter(|file| file.ends_with(end));
        match (open.next(), open.next()) {
            (Some(one), None) => Some(one.clone()),
            // N.B. existence is not checked here: that would tell a stranger which files exist.
            _ if self.folder.is_absolute() => Some(self.folder.join(end)),
            _ => None,
        }
    }

    /// Returns how many descriptors of a file it has with at least this access.
    ///
    /// **N.B.** A process may hold a file that it may not open: such a descriptor (`O_PATH`) proves nothing, and is not counted.
    pub fn descriptors_of(&self, file: (u64, u64), used: Use) -> usize {
        self.descriptors.iter().filter(|open| open.file == file && open.used >= used).count()
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
            // N.B. The link of a descriptor leads to the open file itself, whatever has its name.
            let (Ok(open), Some(number)) = (std::fs::metadata(&entry), entry.file_name()) else { continue };
            let told = std::fs::read_to_string(process.join("fdinfo").join(number)).unwrap_or_default();
            let used = use_told(&told);
            descriptors.extend(used.map(|used| Descriptor { file: (open.dev(), open.ino()), used }));
        }
        let status = std::fs::read_to_string(process.join("status"))?;
        let owner = owner_told(&status).ok_or(io::ErrorKind::InvalidData)?;
        let groups = status.lines().find_map(|line| line.strip_prefix("Groups:")).unwrap_or_default();
        let groups = groups.split_whitespace().filter_map(|group| group.parse().ok()).collect();
        files.sort();
        files.dedup();
        Ok(Self {
            program: std::fs::read_link(process.join("exe"))?,
            command: words.split('\0').map(str::to_owned).collect(),
            folder: std::fs::read_link(process.join("cwd"))?,
            files,
            descriptors,
            owner,
            groups,
        })
    }
}

fn use_told(told: &str) -> Option<Use> {
    let flags = told.lines().find_map(|line| line.strip_prefix("flags:"))?;
    let flags = u32::from_str_radix(flags.trim(), 8).ok()?;
    match flags & ACCESS_MODE {
        _ if flags & PATH_ONLY != 0 => None,
        READ_ONLY => Some(Use::Read),
        READ_WRITE => Some(Use::ReadWrite),
        _ => None,
    }
}

/// Parses the user and the group that the kernel checks when a process opens a file.
fn owner_told(told: &str) -> Option<(u32, u32)> {
    let effective = |begin: &str| {
        let line = told.lines().find_map(|line| line.strip_prefix(begin))?;
        // Real, then effective.
        line.split_whitespace().nth(1)?.parse().ok()
    };
    Some((effective("Uid:")?, effective("Gid:")?))
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
        assert_eq!(closed.resolve(Path::new("images/foreign-image.raw")), Some(open));
        // The existence of such a file is not revealed.
        let nowhere = folder.path().join("foreign-image.raw");
        assert_eq!(closed.resolve(Path::new("foreign-image.raw")), Some(nowhere));
    }

    #[test]
    fn a_descriptor_counts_for_what_can_be_done_by_it() {
        use std::os::unix::fs::OpenOptionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        let written = std::fs::File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        let counted = || {
            let itself = Launched::look(Path::new("/proc/self")).unwrap();
            let found = std::fs::metadata(&path).unwrap();
            [Use::Read, Use::ReadWrite].map(|used| itself.descriptors_of((found.dev(), found.ino()), used))
        };
        assert_eq!(counted(), [1, 1]);
        let read = std::fs::File::open(&path).unwrap();
        assert_eq!(counted(), [2, 1]);
        drop((written, read));
        let _appended = std::fs::File::options().append(true).open(&path).unwrap();
        let held = PATH_ONLY.cast_signed();
        let _held = std::fs::File::options().read(true).custom_flags(held).open(&path).unwrap();
        assert_eq!(counted(), [0, 0]);
    }

    #[test]
    fn who_a_process_runs_as_is_whom_the_kernel_asks_for() {
        let told = "Name:\tqemu\nUid:\t1\t2\t3\t4\nGid:\t5\t6\t7\t8\n";
        assert_eq!((owner_told(told), owner_told("Uid:\t1\n")), (Some((2, 6)), None));
        let itself = Launched::look(Path::new("/proc/self")).unwrap();
        assert_eq!(itself.owner.0, std::fs::metadata("/proc/self").unwrap().uid());
    }
}
