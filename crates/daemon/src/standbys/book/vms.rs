//! The descriptions of VMs: a file for each, and one for the pieces of a description that is arriving.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::time::UNIX_EPOCH;

use super::Book;
use crate::files::folder_entries::sync_folder_of;
use crate::files::whole_file;
use crate::vms::MANIFEST_BYTES_MAX;

/// N.B. The end of a name, because a VM may be called `x.copy.json`.
const SUFFIX: &str = ".vm";

/// A VM that was described.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DescribedVm {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    pub(crate) written_unix_ms: u64,
}

impl Book {
    /// Keeps a piece that begins at `offset`. Fails unless it follows what is there; one at 0 begins anew.
    pub(crate) fn take_piece(&self, id: &str, offset: u64, piece: &[u8]) -> io::Result<()> {
        let mut options = OpenOptions::new();
        let mut file = options.append(true).create(true).mode(0o600).open(self.pieces_path(id))?;
        if offset == 0 {
            file.set_len(0)?;
        }
        if file.metadata()?.len() != offset {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a piece of a description is missing"));
        }
        file.write_all(piece)
    }

    /// Returns how many bytes of descriptions that are not whole yet these standbys have.
    pub(crate) fn bytes_of_pieces(&self, ids: &[String]) -> io::Result<u64> {
        ids.iter().try_fold(0, |sum, id| match std::fs::metadata(self.pieces_path(id)) {
            Ok(found) => Ok(sum + found.len()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(sum),
            Err(error) => Err(error),
        })
    }

    /// Returns all pieces together, and deletes their file.
    pub(crate) fn take_whole(&self, id: &str, bytes_max: u64) -> io::Result<Vec<u8>> {
        let path = self.pieces_path(id);
        let whole = whole_file::content(File::open(&path)?, bytes_max)?;
        std::fs::remove_file(path)?;
        Ok(whole)
    }

    pub(crate) fn write_vm(&self, id: &str, name: &str, description: &[u8]) -> io::Result<()> {
        whole_file::replace(&self.vm_path(id, name), description)
    }

    pub(crate) fn vm(&self, id: &str, name: &str) -> io::Result<Option<Vec<u8>>> {
        whole_file::read(&self.vm_path(id, name), MANIFEST_BYTES_MAX as u64)
    }

    /// Returns the VMs of a standby that were described, by name.
    pub(crate) fn vms(&self, id: &str) -> io::Result<Vec<DescribedVm>> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&self.folder)? {
            let entry = entry?;
            let file = entry.file_name();
            let name =
                file.to_str().and_then(|file| file.strip_prefix(id)?.strip_prefix('.')?.strip_suffix(SUFFIX));
            let Some(name) = name else { continue };
            let metadata = entry.metadata()?;
            let written = metadata.modified()?.duration_since(UNIX_EPOCH).unwrap_or_default();
            found.push(DescribedVm {
                name: name.to_owned(),
                bytes: metadata.len(),
                written_unix_ms: u64::try_from(written.as_millis()).unwrap_or(u64::MAX),
            });
        }
        found.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(found)
    }

    /// Forgets a description durably.
    pub(crate) fn forget_vm(&self, id: &str, name: &str) -> io::Result<()> {
        let path = self.vm_path(id, name);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => sync_folder_of(&path),
        }
    }

    /// Forgets all VMs of a standby.
    pub(crate) fn forget_vms(&self, id: &str) -> io::Result<()> {
        for vm in self.vms(id)? {
            self.forget_vm(id, &vm.name)?;
        }
        self.forget_pieces(id)
    }

    /// Forgets a description that is not whole yet.
    pub(crate) fn forget_pieces(&self, id: &str) -> io::Result<()> {
        match std::fs::remove_file(self.pieces_path(id)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn vm_path(&self, id: &str, name: &str) -> PathBuf {
        self.folder.join(format!("{id}.{name}{SUFFIX}"))
    }

    fn pieces_path(&self, id: &str) -> PathBuf {
        self.folder.join(format!("{id}.pieces"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::standbys::book::{CopyConfig, Side};

    #[test]
    fn pieces_become_whole_in_their_order_alone() {
        let folder = tempfile::tempdir().unwrap();
        let book = Book::open(folder.path()).unwrap();
        assert!(book.take_piece("1", 3, b"def").is_err(), "the beginning is missing");
        book.take_piece("1", 0, b"xyz").unwrap();
        book.take_piece("1", 0, b"abc").unwrap();
        assert!(book.take_piece("1", 2, b"def").is_err());
        book.take_piece("1", 3, b"def").unwrap();
        book.take_piece("2", 0, b"g").unwrap();
        assert_eq!(book.bytes_of_pieces(&["1", "2", "3"].map(str::to_owned)).unwrap(), 7);
        book.forget_pieces("2").unwrap();
        assert_eq!(book.bytes_of_pieces(&["1", "2", "3"].map(str::to_owned)).unwrap(), 6);
        assert!(book.take_whole("1", 5).is_err());
        assert_eq!(book.take_whole("1", 6).unwrap(), b"abcdef");
        assert!(book.take_piece("1", 6, b"g").is_err(), "nothing is left");
    }

    #[test]
    fn a_vm_is_no_record_whatever_its_name_is() {
        let folder = tempfile::tempdir().unwrap();
        let book = Book::open(folder.path()).unwrap();
        for name in ["web1", "x.copy.json", "x.source.json", "y.vm"] {
            book.write_vm("1", name, b"description").unwrap();
        }
        book.write_vm("12", "other", b"").unwrap();
        assert_eq!(book.configs::<CopyConfig>(Side::Copy).unwrap().0, []);
        let names: Vec<_> = book.vms("1").unwrap().into_iter().map(|vm| vm.name).collect();
        assert_eq!(names, ["web1", "x.copy.json", "x.source.json", "y.vm"]);
        assert_eq!(book.vm("1", "y.vm").unwrap(), Some(b"description".to_vec()));
        book.forget(Side::Copy, "1").unwrap();
        assert_eq!(book.vms("1").unwrap(), []);
        assert_eq!(book.vms("12").unwrap().len(), 1);
    }
}
