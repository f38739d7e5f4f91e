//! The backing files named in images' headers. Headers are read by descriptor, and cached until the file changes.
//!
//! An order examines every file of every store. An unchanged file is not opened: it costs three system calls.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use block::store::qcow2::{FilesBelow, HEADER_MAX};
use rustix::fs::{FileType, Mode, OFlags, Stat};

const REMEMBERED_MAX: usize = 200_000;
/// They tell the format of every image.
const FIRST_BYTES: usize = 80;
/// In a VDI image at byte 64, after a text.
const VDI_SIGNATURE: [u8; 4] = 0xbeda_107f_u32.to_le_bytes();
/// A file that changed within this time may change again with the same timestamp: clocks of file systems tick.
const STILL_CHANGES: Duration = Duration::from_secs(2);

/// The contents of headers, by file system and inode.
#[derive(Default)]
pub(super) struct Headers {
    known: Mutex<BTreeMap<(u64, u64), (Stamp, Arc<Says>)>>,
}

/// The backing files that an image's header names.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Says {
    /// No backing file: the image is raw, or names none.
    Nothing,
    /// These files, as written in the header.
    Names(Vec<Named>),
    /// The header is unknown, or cannot be parsed.
    Unknown(String),
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Named {
    pub(super) name: Vec<u8>,
    /// Whether the header says that this file is raw, and so has no backing file itself.
    pub(super) is_raw: bool,
}

/// An examined image, with the content of its header.
pub(super) struct Looked {
    /// The file system and the inode.
    pub(super) identity: (u64, u64),
    pub(super) says: Arc<Says>,
    /// The folders for relative names: that of the image's name, and that of the file itself.
    pub(super) folders: Vec<PathBuf>,
}

/// A file's state: the times of its last write and of its last change, and its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    written: (i64, u64),
    changed: (i64, u64),
    size: i64,
}

impl Headers {
    /// Examines the file or device at `path`, following links; `None` for anything else. After an error
    /// its backing file is unknown.
    pub(super) fn look(&self, path: &Path) -> io::Result<Option<Looked>> {
        // N.B. first opened as a path only: to open a pipe could wait, and to open a device can have effects.
        let held = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let stat = rustix::fs::fstat(&held)?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        if !matches!(kind, FileType::RegularFile | FileType::BlockDevice) {
            return Ok(None);
        }
        let identity = (stat.st_dev, stat.st_ino);
        let stamp = Stamp::of(&stat);
        let is_file = kind == FileType::RegularFile;
        let says = match self.known(identity, stamp).filter(|_| is_file) {
            Some(says) => says,
            None => {
                let says = Arc::new(read(&held)?);
                if is_file && stamp.is_settled() {
                    self.remember(identity, stamp, &says);
                }
                says
            }
        };
        let folders = match *says {
            Says::Names(_) => folders_of(path, &held)?,
            _ => Vec::new(),
        };
        Ok(Some(Looked { identity, says, folders }))
    }

    fn known(&self, identity: (u64, u64), stamp: Stamp) -> Option<Arc<Says>> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let (seen, says) = known.get(&identity)?;
        (*seen == stamp).then(|| Arc::clone(says))
    }

    fn remember(&self, identity: (u64, u64), stamp: Stamp, says: &Arc<Says>) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= REMEMBERED_MAX {
            known.clear();
        }
        known.insert(identity, (stamp, Arc::clone(says)));
    }
}

impl Stamp {
    fn of(stat: &Stat) -> Self {
        Self {
            written: (stat.st_mtime, stat.st_mtime_nsec),
            changed: (stat.st_ctime, stat.st_ctime_nsec),
            size: stat.st_size,
        }
    }

    /// Returns whether another change would have another timestamp.
    fn is_settled(self) -> bool {
        let (seconds, _) = self.changed.max(self.written);
        let changed = UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap_or_default());
        SystemTime::now().duration_since(changed).is_ok_and(|passed| passed > STILL_CHANGES)
    }
}

fn read(held: &OwnedFd) -> io::Result<Says> {
    let file = File::open(link_of(held))?;
    // Most files are raw: their first bytes are enough.
    let mut bytes = beginning(&file, FIRST_BYTES)?;
    if let Some(format) = other_format(&bytes) {
        return Ok(Says::Unknown(format!("it has the format {format}, which is not read here")));
    }
    if !matches!(bytes.get(..4).map(FilesBelow::parse), None | Some(Ok(None))) {
        bytes = beginning(&file, HEADER_MAX)?;
    }
    Ok(match FilesBelow::parse(&bytes) {
        Ok(None) => Says::Nothing,
        Ok(Some(below)) => named(below),
        Err(error) => Says::Unknown(error.to_string()),
    })
}

/// Returns the format of an image that may stand on others, other than qcow2, by its first bytes.
fn other_format(bytes: &[u8]) -> Option<&'static str> {
    let begins = |magic: &[u8]| bytes.starts_with(magic);
    let formats: [(&str, &[&[u8]]); 5] = [
        ("QED", &[b"QED\0"]),
        ("VMDK", &[b"KDMV", b"COWD", b"# Disk DescriptorFile"]),
        ("VHDX", &[b"vhdxfile"]),
        ("VHD", &[b"conectix"]),
        ("Parallels", &[b"WithoutFreeSpace", b"WithouFreSpacExt"]),
    ];
    let is_vdi = bytes.get(64..68) == Some(&VDI_SIGNATURE);
    let found = formats.iter().find(|(_, magics)| magics.iter().any(|magic| begins(magic)));
    found.map(|(name, _)| *name).or_else(|| is_vdi.then_some("VDI"))
}

/// Returns the first bytes of a file, at most so many.
fn beginning(file: &File, most: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; most];
    let mut count = 0;
    while let Some(rest) = bytes.get_mut(count..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, count as u64) {
            Ok(0) => break,
            Ok(read) => count += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    bytes.truncate(count);
    Ok(bytes)
}

fn named(below: FilesBelow) -> Says {
    let is_raw = matches!(below.backing_format.as_deref(), Some("raw" | "file" | "host_device"));
    // Options may put any format below a raw one.
    let backing = below.backing.map(|name| Named { is_raw: is_raw && !name.starts_with(b"json:"), name });
    let data_file = below.data_file.map(|name| Named { name, is_raw: true });
    let names: Vec<Named> = backing.into_iter().chain(data_file).collect();
    if names.is_empty() { Says::Nothing } else { Says::Names(names) }
}

/// Returns the folders for relative names: QEMU uses the folder of the name that it was given.
fn folders_of(path: &Path, held: &OwnedFd) -> io::Result<Vec<PathBuf>> {
    let itself = std::fs::read_link(link_of(held))?;
    let mut folders: Vec<PathBuf> =
        [path, &itself].iter().filter_map(|path| Some(path.parent()?.to_owned())).collect();
    folders.dedup();
    Ok(folders)
}

fn link_of(held: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", held.as_raw_fd())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn overlay(name: &str) -> Vec<u8> {
        let mut bytes = vec![0; 4096];
        bytes[..8].copy_from_slice(b"QFI\xfb\0\0\0\x02");
        bytes[8..16].copy_from_slice(&512_u64.to_be_bytes());
        bytes[16..20].copy_from_slice(&(name.len() as u32).to_be_bytes());
        bytes[20..24].copy_from_slice(&16_u32.to_be_bytes());
        bytes[512..512 + name.len()].copy_from_slice(name.as_bytes());
        bytes
    }

    fn names(headers: &Headers, path: &Path) -> Vec<String> {
        match &*headers.look(path).unwrap().unwrap().says {
            Says::Names(names) => {
                names.iter().map(|named| String::from_utf8(named.name.clone()).unwrap()).collect()
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_file_is_read_once_and_again_when_it_has_changed() {
        let folder = tempfile::tempdir().unwrap();
        let (headers, path) = (Headers::default(), folder.path().join("any name"));
        std::fs::write(&path, overlay("one")).unwrap();
        assert_eq!(names(&headers, &path), ["one"]);
        assert_eq!(headers.known.lock().unwrap().len(), 0, "it may change within the same tick");
        let stat = rustix::fs::stat(&path).unwrap();
        let (identity, stamp) = ((stat.st_dev, stat.st_ino), Stamp::of(&stat));
        headers.remember(identity, stamp, &Arc::new(Says::Nothing));
        assert_eq!(*headers.look(&path).unwrap().unwrap().says, Says::Nothing);
        std::fs::write(&path, overlay("other")).unwrap();
        File::open(&path).unwrap().set_modified(UNIX_EPOCH).unwrap();
        assert_eq!(names(&headers, &path), ["other"]);
    }

    #[test]
    fn what_is_no_image_is_not_opened_and_what_is_damaged_is_unknown() {
        let folder = tempfile::tempdir().unwrap();
        let (headers, path) = (Headers::default(), folder.path().join("x"));
        assert!(headers.look(folder.path()).unwrap().is_none());
        for (bytes, is_unknown) in
            [(&b"QFI\xfb\0\0\0\x02"[..], true), (b"QFI", false), (b"", false), (&[0; 99], false)]
        {
            std::fs::write(&path, bytes).unwrap();
            let says = headers.look(&path).unwrap().unwrap().says;
            assert_eq!(matches!(*says, Says::Unknown(_)), is_unknown, "{bytes:?}: {says:?}");
        }
    }
}
