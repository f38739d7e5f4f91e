//! The VM description for another host: a VM's definition and its small files, as bytes.
//!
//! ```text
//!   version, length of the head: 4 bytes each, little endian │ head: JSON │ the files, one after the other │ its TPM's state
//! ```
//!
//! The bytes come from an untrusted host, so every length is checked before it is used.

use std::collections::BTreeMap;
use std::fs::DirBuilder;
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use block::held::{self, User};
use rustix::fs::{FileType, OFlags};
use serde::{Deserialize, Serialize};

use super::needs::Needs;
use super::preferences::Preferences;
use super::tpm;
use crate::files::whole_file;
use crate::names;

const VERSION: u32 = 1;
/// The length of version and length, in bytes.
const PREFIX_BYTES: usize = 8;
/// The longest head: a definition with its quotes and line ends escaped.
const HEAD_BYTES_MAX: usize = 100 << 10;
/// The size limit of all files of a VM together. UEFI variables have 528 KiB, a cloud-init image has 366, a firmware image has
/// 4 MiB; anything larger is a disk. Each host has them in memory while the VM moves.
pub(super) const FILES_BYTES_MAX: usize = 8 << 20;
/// The longest description. It is sent in pieces.
pub(crate) const MANIFEST_BYTES_MAX: usize =
    PREFIX_BYTES + HEAD_BYTES_MAX + FILES_BYTES_MAX + tpm::PERMANENT_BYTES_MAX as usize;
const FILES_FOLDER: &str = "files";
/// The folder, in a VM's own, of the sockets that it serves and the logs that it writes.
const OWN_FOLDER: &str = "own";
/// Only the user that runs the daemon, and QEMU, may read them.
const FOLDER_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Manifest {
    pub(super) name: String,
    pub(super) definition: String,
    /// The files' contents by placeholder name.
    pub(super) files: Vec<(String, Vec<u8>)>,
    pub(super) needs: Needs,
    /// The state of the TPM of a stopped VM; `None`: there is none, or it comes with the VM's memory.
    pub(super) tpm_state: Option<Vec<u8>>,
    pub(super) preferences: Preferences,
}

/// Why a VM's small files cannot move along, or why bytes are no VM description.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ManifestError {
    #[error("the file {path} cannot be read: {source}")]
    File { path: PathBuf, source: io::Error },
    #[error(
        "the files of a VM may have {} MiB together; make a volume of a larger file: sterna volume add",
        FILES_BYTES_MAX >> 20
    )]
    TooLarge,
    #[error("the other host's description of the VM cannot be read: {0}")]
    Malformed(&'static str),
}

#[derive(Serialize, Deserialize)]
struct Head {
    name: String,
    definition: String,
    files: Vec<FileHead>,
    needs: Needs,
    /// The length of the TPM's state, which follows the files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tpm_bytes: Option<usize>,
    #[serde(flatten)]
    preferences: Preferences,
}

#[derive(Serialize, Deserialize)]
struct FileHead {
    name: String,
    bytes: usize,
}

impl Manifest {
    /// Encodes the description for another host.
    pub(super) fn encode(&self) -> Result<Vec<u8>, ManifestError> {
        let files =
            self.files.iter().map(|(name, content)| FileHead { name: name.clone(), bytes: content.len() });
        let head = Head {
            name: self.name.clone(),
            definition: self.definition.clone(),
            files: files.collect(),
            needs: self.needs.clone(),
            tpm_bytes: self.tpm_state.as_ref().map(Vec::len),
            preferences: self.preferences.clone(),
        };
        let head = serde_json::to_vec(&head).map_err(|_| ManifestError::Malformed("it has no JSON form"))?;
        let length = u32::try_from(head.len()).ok().filter(|_| head.len() <= HEAD_BYTES_MAX);
        let length = length.ok_or(ManifestError::Malformed("its head is too long"))?;
        let mut bytes = [VERSION.to_le_bytes(), length.to_le_bytes()].concat();
        bytes.extend(head);
        self.files.iter().for_each(|(_, content)| bytes.extend(content));
        bytes.extend(self.tpm_state.iter().flatten());
        Ok(bytes)
    }

    /// Decodes a description from another host.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, ManifestError> {
        const SHORT: ManifestError = ManifestError::Malformed("it is too short");
        let (version, rest) = bytes.split_first_chunk().ok_or(SHORT)?;
        let (length, rest) = rest.split_first_chunk().ok_or(SHORT)?;
        if u32::from_le_bytes(*version) != VERSION {
            return Err(ManifestError::Malformed("it has another version"));
        }
        let length = u32::from_le_bytes(*length) as usize;
        if length > HEAD_BYTES_MAX {
            return Err(ManifestError::Malformed("its head is too long"));
        }
        let (head, mut rest) = rest.split_at_checked(length).ok_or(SHORT)?;
        let head: Head =
            serde_json::from_slice(head).map_err(|_| ManifestError::Malformed("its head is not valid"))?;
        names::check(&head.name).map_err(|_| ManifestError::Malformed("its name is not valid"))?;
        let mut files = Vec::new();
        for FileHead { name, bytes } in &head.files {
            names::check(name).map_err(|_| ManifestError::Malformed("the name of a file is not valid"))?;
            let content;
            (content, rest) = rest.split_at_checked(*bytes).ok_or(SHORT)?;
            files.push((name.clone(), content.to_vec()));
        }
        let tpm_state = match head.tpm_bytes {
            Some(bytes) if bytes as u64 > tpm::PERMANENT_BYTES_MAX => {
                return Err(ManifestError::Malformed("the state of its TPM is too long"));
            }
            Some(bytes) => {
                let state;
                (state, rest) = rest.split_at_checked(bytes).ok_or(SHORT)?;
                Some(state.to_vec())
            }
            None => None,
        };
        if !rest.is_empty() {
            return Err(ManifestError::Malformed("something follows its end"));
        }
        let Head { name, definition, needs, preferences, .. } = head;
        let preferences = preferences.limited();
        Ok(Self { name, definition, files, needs, tpm_state, preferences })
    }
}

pub(super) fn file(folder: &Path, name: &str) -> PathBuf {
    files_folder(folder).join(name)
}

/// Returns the path of a socket that a VM serves, or of a log that it writes.
pub(super) fn own_path(folder: &Path, name: &str) -> PathBuf {
    own_folder(folder).join(name)
}

pub(super) fn files_folder(folder: &Path) -> PathBuf {
    folder.join(FILES_FOLDER)
}

/// Returns the folder of the paths of [`own_path`].
pub(super) fn own_folder(folder: &Path) -> PathBuf {
    folder.join(OWN_FOLDER)
}

/// Makes that folder. May block.
pub(super) fn make_own_folder(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(FOLDER_MODE).create(own_folder(folder))
}

/// On whose behalf files are read.
#[derive(Clone, Debug)]
pub(super) enum Reader {
    /// An administrator who has named them, or the VM to which they belong.
    Administrator,
    /// The user of a QEMU whose command names them: only files that this user may read.
    User(User),
}

impl Reader {
    fn read(&self, path: &Path, bytes_max: u64) -> io::Result<Option<Vec<u8>>> {
        let Self::User(user) = self else { return whole_file::read(path, bytes_max) };
        let found = held::find(path)?;
        if found.kind() != FileType::RegularFile || !found.lets_read(user) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        whole_file::content(found.open(OFlags::RDONLY)?, bytes_max).map(Some)
    }
}

/// Reads files. May block.
pub(super) fn read_files(
    files: &BTreeMap<String, PathBuf>,
    reader: &Reader,
) -> Result<Vec<(String, Vec<u8>)>, ManifestError> {
    let mut left = FILES_BYTES_MAX;
    let mut read = Vec::new();
    for (name, path) in files {
        let failed = |source| ManifestError::File { path: path.clone(), source };
        let content = match reader.read(path, left as u64) {
            Err(error) if error.kind() == io::ErrorKind::FileTooLarge => return Err(ManifestError::TooLarge),
            content => content.map_err(failed)?.ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?,
        };
        left -= content.len();
        read.push((name.clone(), content));
    }
    Ok(read)
}

/// Makes a VM's folder with its files, durably, and deletes leftovers of an earlier VM. May block.
pub(super) fn write_files(folder: &Path, files: &[(String, Vec<u8>)]) -> io::Result<()> {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let below = files_folder(folder);
    DirBuilder::new().recursive(true).mode(FOLDER_MODE).create(&below)?;
    for (name, content) in files {
        let path = file(folder, name);
        let mut written =
            std::fs::OpenOptions::new().write(true).create_new(true).mode(FILE_MODE).open(path)?;
        written.write_all(content)?;
        written.sync_all()?;
    }
    // N.B. its name, too: the source may delete the VM as soon as it is here.
    let above = [below.as_path(), folder].into_iter().chain(folder.ancestors().skip(1).take(2));
    above.map(std::fs::File::open).try_for_each(|opened| opened?.sync_all())
}

/// Writes a VM's existing files durably and in place, because its QEMU has them open. May block.
pub(super) fn renew_files(folder: &Path, files: &[(String, Vec<u8>)]) -> io::Result<()> {
    for (name, content) in files {
        let mut options = std::fs::OpenOptions::new();
        // N.B. QEMU can write to this folder, so links that it may have put there are not followed.
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
        options.write(true).custom_flags(flags.bits().cast_signed());
        let mut there = options.open(file(folder, name))?;
        if !there.metadata()?.is_file() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{name} is no regular file now"),
            ));
        }
        there.set_len(content.len() as u64)?;
        there.write_all(content)?;
        there.sync_all()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let files = vec![("seed".to_owned(), vec![]), ("vars".to_owned(), vec![7; 1000])];
        Manifest {
            name: "web1".to_owned(),
            definition: "command = []\n".to_owned(),
            files,
            needs: Needs::default(),
            tpm_state: None,
            preferences: Preferences::default(),
        }
    }

    #[test]
    fn a_manifest_arrives_as_it_was_sent() {
        let bytes = manifest().encode().unwrap();
        assert!(bytes.len() < MANIFEST_BYTES_MAX);
        assert_eq!(Manifest::decode(&bytes).unwrap(), manifest());
        let needs = Needs { volumes: vec![("web1".to_owned(), 7)], ..Needs::default() };
        for tpm_state in [None, Some(Vec::new()), Some(b"keys".to_vec())] {
            let manifest = Manifest { needs: needs.clone(), tpm_state, ..manifest() };
            assert_eq!(Manifest::decode(&manifest.encode().unwrap()).unwrap(), manifest);
        }
        let long = Some(vec![0; tpm::PERMANENT_BYTES_MAX as usize + 1]);
        let long = Manifest { tpm_state: long, ..manifest() }.encode().unwrap();
        assert!(Manifest::decode(&long).unwrap_err().to_string().contains("TPM"));
    }

    #[test]
    fn what_a_newer_version_says_besides_is_passed_over() {
        let head =
            r#"{"name":"a","definition":"","files":[],"needs":{"memory_bytes":7,"moon":"full"},"more":1}"#;
        let length = u32::try_from(head.len()).unwrap();
        let bytes = [&VERSION.to_le_bytes()[..], &length.to_le_bytes(), head.as_bytes()].concat();
        assert_ne!(Manifest::decode(&bytes).unwrap().needs, Needs::default());
    }

    #[test]
    fn what_is_cut_longer_or_changed_is_refused_or_another_manifest_and_never_panics() {
        let bytes = Manifest { tpm_state: Some(b"keys".to_vec()), ..manifest() }.encode().unwrap();
        for length in 0..bytes.len() {
            assert!(Manifest::decode(&bytes[..length]).is_err(), "{length}");
        }
        assert!(Manifest::decode(&[&bytes[..], &[0]].concat()).is_err());
        for at in 0..bytes.len() - 1000 {
            for value in [0, 0xff, b'"', b'9', b'/'] {
                let mut changed = bytes.clone();
                changed[at] = value;
                if let Ok(decoded) = Manifest::decode(&changed) {
                    let names = decoded.files.iter().map(|(name, _)| name).chain([&decoded.name]);
                    names.for_each(|name| names::check(name).unwrap());
                }
            }
        }
    }

    #[test]
    fn files_are_read_and_written_within_their_limits() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("original");
        std::fs::write(&path, b"variables").unwrap();
        let files = BTreeMap::from([("vars".to_owned(), path.clone())]);
        let read = read_files(&files, &Reader::Administrator).unwrap();
        let vm = folder.path().join("vms/web1");
        write_files(&vm, &read).unwrap();
        std::fs::write(vm.join("log"), b"old").unwrap();
        write_files(&vm, &read).unwrap();
        assert_eq!(std::fs::read(file(&vm, "vars")).unwrap(), b"variables");
        assert!(!vm.join("log").exists());
        std::fs::File::create(&path).unwrap().set_len(FILES_BYTES_MAX as u64 + 1).unwrap();
        assert!(matches!(read_files(&files, &Reader::Administrator), Err(ManifestError::TooLarge)));
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(read_files(&files, &Reader::Administrator), Err(ManifestError::File { .. })));
    }

    #[test]
    fn what_the_user_of_a_vm_may_not_read_does_not_go_along() {
        if !rustix::process::geteuid().is_root() {
            return omission::machine_lacks("root, to read what others may not");
        }
        let folder = tempfile::tempdir().unwrap();
        let passed = std::os::unix::fs::PermissionsExt::from_mode(0o711);
        std::fs::set_permissions(folder.path(), passed).unwrap();
        let path = folder.path().join("secret");
        std::fs::write(&path, b"root's").unwrap();
        let files = BTreeMap::from([("table".to_owned(), path.clone())]);
        let user = Reader::User(User { user: 24_005, groups: vec![24_005] });
        for (mode, is_read) in [(0o600, false), (0o640, false), (0o644, true)] {
            std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
            assert_eq!(read_files(&files, &user).is_ok(), is_read, "{mode:o}");
            assert!(read_files(&files, &Reader::Administrator).is_ok());
        }
    }
}
