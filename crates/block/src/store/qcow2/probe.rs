//! Detects the format of an image by its first bytes.
//!
//! **N.B.** A guest that owns a raw image can write any header into it. So a volume's format is detected once and stored with the
//! volume; it is never guessed again.

use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{FileType, OFlags};

use super::header::{MAGIC, SIZE};
use crate::held::{ByName, Finder, Held};
use crate::store::image::ImageError;

/// The format of an image, by its first bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Format {
    /// The plain bytes of the disk; assumed for anything unknown.
    Raw,
    /// The qcow2 format of QEMU.
    Qcow2,
    /// Another known format, which cannot be served; by its name in `qemu-img`.
    Other(String),
}

const BEGINNINGS: [(&[u8], &str); 6] = [
    (b"KDMV", "vmdk"),
    (b"# Disk DescriptorFile", "vmdk"),
    (b"vhdxfile", "vhdx"),
    (b"conectix", "vpc"),
    (b"QED\0", "qed"),
    (b"LUKS\xba\xbe", "luks"),
];
/// The place of `vdi`'s mark, behind a line of text.
const VDI_MARK: (usize, &[u8]) = (64, b"\x7f\x10\xda\xbe");
/// The other format that begins as qcow2 does.
const QCOW1_VERSION: &[u8] = &[0, 0, 0, 1];
/// The place of the backing file name's offset in a qcow2 header; 0: no backing file.
const BACKING_NAME_OFFSET: Range<usize> = 8..16;
const PROBED: usize = 512;

/// Detects the format of the image at `path`; raw if no other one matches. May sleep; locks nothing.
///
/// # Errors
/// The system's error if it cannot be read.
pub fn probe_format(path: &Path) -> Result<Format, ImageError> {
    Ok(beginning(path)?.map_or(Format::Raw, |bytes| format_of(&bytes)))
}

/// Detects the format of a held image; as [`probe_format`].
pub fn probe_held(held: &Held) -> Result<Format, ImageError> {
    Ok(beginning_of(held)?.map_or(Format::Raw, |bytes| format_of(&bytes)))
}

/// Returns whether the qcow2 image at `path` names a backing file, without opening that. May sleep; locks nothing.
///
/// # Errors
/// The system's error if it cannot be read.
pub fn names_backing_file(path: &Path) -> Result<bool, ImageError> {
    Ok(beginning(path)?.is_some_and(|bytes| has_backing_name(&bytes)))
}

/// Returns the size in bytes of the disk in the image at `path`, from a qcow2 header, or from a raw image's length. `None` for
/// another format, and if a header is too short. Does not check whether the image can be opened. May sleep; locks nothing.
///
/// # Errors
/// The system's error if it cannot be read.
pub fn disk_size(path: &Path) -> Result<Option<u64>, ImageError> {
    let Some(bytes) = beginning(path)? else { return Ok(None) };
    match format_of(&bytes) {
        Format::Raw => {
            let found = ByName.find(path, None).map_err(|error| ImageError::of("examine", path, error))?;
            // The kernel keeps file sizes below 2^63.
            Ok(Some(found.status().st_size as u64))
        }
        Format::Qcow2 => Ok(size_in_header(&bytes)),
        Format::Other(_) => Ok(None),
    }
}

fn size_in_header(bytes: &[u8]) -> Option<u64> {
    let size = bytes.get(SIZE)?;
    Some(u64::from_be_bytes(size.try_into().ok()?))
}

fn beginning(path: &Path) -> Result<Option<Vec<u8>>, ImageError> {
    let found = ByName.find(path, None).map_err(|error| ImageError::of("examine", path, error))?;
    beginning_of(&found)
}

fn beginning_of(held: &Held) -> Result<Option<Vec<u8>>, ImageError> {
    let path = held.path();
    if !matches!(held.kind(), FileType::RegularFile | FileType::BlockDevice) {
        // A read from a pipe could wait for ever; opening it as an image reports the error.
        return Ok(None);
    }
    let file = held.open(OFlags::RDONLY).map_err(|error| ImageError::of("open", path, error))?;
    let mut bytes = vec![0; PROBED];
    let count = file.read_at(&mut bytes, 0).map_err(|error| ImageError::of("read", path, error))?;
    bytes.truncate(count);
    Ok(Some(bytes))
}

fn has_backing_name(bytes: &[u8]) -> bool {
    let offset = bytes.get(BACKING_NAME_OFFSET);
    bytes.starts_with(&MAGIC) && offset.is_some_and(|offset| offset.iter().any(|byte| *byte != 0))
}

fn format_of(bytes: &[u8]) -> Format {
    if bytes.starts_with(&MAGIC) {
        return match bytes.get(4..8) {
            Some(version) if version == QCOW1_VERSION => Format::Other("qcow".to_owned()),
            _ => Format::Qcow2,
        };
    }
    let (place, mark) = VDI_MARK;
    if bytes.get(place..).is_some_and(|rest| rest.starts_with(mark)) {
        return Format::Other("vdi".to_owned());
    }
    let known = BEGINNINGS.iter().find(|(beginning, _)| bytes.starts_with(beginning));
    known.map_or(Format::Raw, |(_, name)| Format::Other((*name).to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_told_by_how_they_begin() {
        let check = |bytes: &[u8], expected: &str| {
            let told = match format_of(bytes) {
                Format::Raw => "raw".to_owned(),
                Format::Qcow2 => "qcow2".to_owned(),
                Format::Other(name) => name,
            };
            assert_eq!(told, expected, "{bytes:?}");
        };
        check(b"", "raw");
        check(&[0; 512], "raw");
        check(b"QFI", "raw");
        check(b"QFI\xfb\0\0\0\x03", "qcow2");
        check(b"QFI\xfb\0\0\0\x01", "qcow");
        check(b"LUKS\xba\xbe\0\x01", "luks");
        check(b"vhdxfile", "vhdx");
        let mut vdi = [b' '; 80];
        vdi[64..68].copy_from_slice(VDI_MARK.1);
        check(&vdi, "vdi");
    }

    #[test]
    fn the_size_of_a_disk_is_told_without_opening_its_image() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        let check = |bytes: &[u8], expected: Option<u64>| {
            std::fs::write(&path, bytes).unwrap();
            assert_eq!(disk_size(&path).unwrap(), expected, "{bytes:?}");
        };
        check(&[0; 1000], Some(1000));
        check(b"KDMV", None);
        let mut header = [&b"QFI\xfb\0\0\0\x03"[..], &[0; 24]].concat();
        header[24..32].copy_from_slice(&(5u64 << 30).to_be_bytes());
        check(&header, Some(5 << 30));
        check(&header[..31], None);
    }

    #[test]
    fn a_header_with_a_backing_file_is_told_from_one_without() {
        assert!(has_backing_name(b"QFI\xfb\0\0\0\x03\0\0\0\0\0\0\x01\x18"));
        assert!(!has_backing_name(b"QFI\xfb\0\0\0\x03\0\0\0\0\0\0\0\0"));
        assert!(!has_backing_name(b"QFI\xfb\0\0\0\x03"));
        assert!(!has_backing_name(b"\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x01\x18"));
    }
}
