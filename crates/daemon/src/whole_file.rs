//! Small files that are read and replaced as a whole.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::Path;

/// Reads a file; `None`: there is none.
///
/// # Errors
/// What the system answers; that it has more than `bytes_max` bytes.
pub(crate) fn read(path: &Path, bytes_max: u64) -> io::Result<Option<Vec<u8>>> {
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    let mut content = Vec::new();
    // One byte more tells that there is more.
    file.take(bytes_max.saturating_add(1)).read_to_end(&mut content)?;
    if content.len() as u64 > bytes_max {
        let message = format!("it has more than {bytes_max} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
    }
    Ok(Some(content))
}

/// Replaces a file: after a power cut there is the old one or the new one.
///
/// # Errors
/// What the system answers; the file is as before then, or the new one.
pub(crate) fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let begun = path.with_extension("new");
    let mut file = File::create(&begun)?;
    file.write_all(content)?;
    file.sync_all()?;
    fs::rename(&begun, path)?;
    match path.parent() {
        Some(folder) => File::open(folder)?.sync_all(),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::{read, replace};

    #[test]
    fn a_file_is_read_and_replaced_as_a_whole_within_its_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("list.json");
        assert_eq!(read(&path, 9).unwrap(), None);
        replace(&path, b"one").unwrap();
        replace(&path, b"second").unwrap();
        assert_eq!(read(&path, 6).unwrap().unwrap(), b"second");
        assert_eq!(read(&path, 5).unwrap_err().kind(), std::io::ErrorKind::FileTooLarge);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
