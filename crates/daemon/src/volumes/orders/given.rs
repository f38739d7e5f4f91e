//! Images that a request names, to be copied or to be served in place. Everything here may block. The format of an image is
//! detected here once, from its first bytes, and recorded in the journal. From then on a guest may write anything to these bytes.

use std::path::Path;

use block::store::qcow2::{Format, names_backing_file, probe_format};
use block::store::{Access, Opened};
use migration::journal::{ImageFormat, ImageLocation, Place};

use crate::error::RequestError;
use crate::images;
use crate::images::opening::{self, at_once};

/// An image to copy, locked against writers meanwhile.
pub(crate) struct GivenImage {
    pub(crate) format: ImageFormat,
    pub(crate) size_bytes: u64,
    /// About how many bytes the copy will need.
    pub(crate) allocated_bytes: u64,
    pub(crate) opened: Opened,
}

impl GivenImage {
    /// Opens a file of any format. [`RequestError::ImageUnsuitable`]: as with [`format_in_place`], but only
    /// if other files were opened.
    pub(crate) fn open(path: &Path) -> Result<Self, RequestError> {
        let place = Place::File(crate::stores::path_text(path)?);
        let format = format_of(&place, None)?;
        if format == ImageFormat::Qcow2 && !is_named_qcow2(path) && names_backing_file(path)? {
            let detail = "it begins as a qcow2 image with a backing file, but its name does not end in .qcow2, and a guest can \
                          have written that into its raw disk; if it is a qcow2 image, rename it to end in .qcow2; if it is a \
                          raw disk: sterna volume add NAME --image FILE --format raw";
            return Err(RequestError::ImageUnsuitable { path: path.to_owned(), detail: detail.to_owned() });
        }
        let image = ImageLocation { store: String::new(), place, format };
        let opened = opening::open_whole(&image, Access::ReadOnly, at_once)?;
        let allocated_bytes = needed_bytes(&opened, path)?;
        Ok(Self { format, size_bytes: opened.size(), allocated_bytes, opened })
    }
}

/// Returns about how many bytes a copy needs: those that the image and its backing files take.
pub(crate) fn needed_bytes(opened: &Opened, path: &Path) -> Result<u64, RequestError> {
    let backing: Vec<&Path> =
        if let Opened::Qcow2(image) = opened { image.backing_files().collect() } else { Vec::new() };
    let mut bytes = 0_u64;
    for path in std::iter::once(path).chain(backing) {
        let allocated = images::allocated_bytes(path);
        bytes =
            bytes.saturating_add(allocated.map_err(|error| RequestError::storage("examine", path, &error))?);
    }
    Ok(bytes.min(opening::qcow2_bytes_max(opened.size())))
}

/// Does the same as [`format_of`], for an image that is served in place. A guest may have written the header of a qcow2
/// image into its raw disk. Opening that as qcow2 would show the guest any file that the header names. So the file's
/// name, which no guest chooses, must agree with the content. Errors: those of [`format_of`];
/// [`RequestError::ImageUnsuitable`]: name and content disagree.
pub(crate) fn format_in_place(place: &Place, said: Option<ImageFormat>) -> Result<ImageFormat, RequestError> {
    let format = format_of(place, said)?;
    match place.file().map(Path::new) {
        Some(path) if said.is_none() && format == ImageFormat::Qcow2 && !is_named_qcow2(path) => {
            let detail = "it begins as a qcow2 image, but its name does not end in .qcow2, and a guest can have written that \
                          into its raw disk; name the format: --format raw or --format qcow2";
            Err(RequestError::ImageUnsuitable { path: path.to_owned(), detail: detail.to_owned() })
        }
        _ => Ok(format),
    }
}

fn is_named_qcow2(path: &Path) -> bool {
    path.extension().is_some_and(|end| end == "qcow2" || end == "qcow")
}

/// Returns the format of the image at `place`: as the user says, or detected. [`RequestError::ImageUnsuitable`]: the format
/// cannot be served and the user did not say raw.
pub(crate) fn format_of(place: &Place, said: Option<ImageFormat>) -> Result<ImageFormat, RequestError> {
    let Some(path) = place.file().map(Path::new) else {
        if said == Some(ImageFormat::Qcow2) {
            let detail = "only files can be qcow2 images; leave --format out".to_owned();
            return Err(RequestError::ImageUnsuitable { path: place.name().into(), detail });
        }
        // The place is raw; a guest's disk may contain an image of any format.
        return Ok(ImageFormat::Raw);
    };
    if let Some(said) = said {
        return Ok(said);
    }
    let name = match probe_format(path)? {
        Format::Raw => return Ok(ImageFormat::Raw),
        Format::Qcow2 => return Ok(ImageFormat::Qcow2),
        Format::Other(name) => name,
    };
    let detail = format!(
        "it begins as a {name} image, which cannot be served; convert it: qemu-img convert -O qcow2 FILE NEW; if it is a raw \
         disk after all: --format raw"
    );
    Err(RequestError::ImageUnsuitable { path: path.to_owned(), detail })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_raw_disk_that_begins_like_a_qcow2_image_is_not_taken_for_one() {
        let folder = tempfile::tempdir().unwrap();
        let check = |name: &str, said, expected: Option<ImageFormat>| {
            let path = folder.path().join(name);
            std::fs::write(&path, [&b"QFI\xfb\0\0\0\x03"[..], &[0; 4088]].concat()).unwrap();
            let found = format_in_place(&Place::File(path.display().to_string()), said);
            assert_eq!(found.ok(), expected, "{name}");
        };
        check("guest.raw", None, None);
        check("guest", None, None);
        check("guest.raw", Some(ImageFormat::Raw), Some(ImageFormat::Raw));
        check("guest.raw", Some(ImageFormat::Qcow2), Some(ImageFormat::Qcow2));
        check("guest.qcow2", None, Some(ImageFormat::Qcow2));
    }
}
