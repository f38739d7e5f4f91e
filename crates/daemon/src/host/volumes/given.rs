//! Images that somebody gives: to be copied in, or to be served where they are. Everything here may sleep.
//!
//! The format of an image is told by its first bytes here, once: what is recognised is written into the journal. From then
//! on a guest may write there what it likes.

use std::path::Path;

use block::store::qcow2::{Format, names_backing_file, probe_format};
use block::store::{Access, Opened};
use migration::journal::{ImageFormat, ImageLocation, Place};

use crate::error::RequestError;
use crate::images;
use crate::images::opening::{self, at_once};

/// An image that is to be copied: locked against writers while it is.
pub(in crate::host) struct GivenImage {
    pub(in crate::host) format: ImageFormat,
    pub(in crate::host) size_bytes: u64,
    /// Bytes that the copy will need, about.
    pub(in crate::host) allocated_bytes: u64,
    pub(in crate::host) opened: Opened,
}

impl GivenImage {
    /// Opens a file of any format.
    ///
    /// # Errors
    /// [`RequestError`]; [`RequestError::ImageUnsuitable`]: as with [`format_in_place`], but only if other files were opened.
    pub(in crate::host) fn open(path: &Path) -> Result<Self, RequestError> {
        let place = Place::File(crate::stores::path_text(path)?);
        let format = format_of(&place, None)?;
        if format == ImageFormat::Qcow2 && !is_named_qcow2(path) && names_backing_file(path)? {
            let detail = "it begins as a qcow2 image that stands on another file, is not named so, and a guest can have written \
                          that into its raw disk; if it is a qcow2 image, let its name end in .qcow2; if it is a raw disk: sterna \
                          volume add NAME --image FILE --format raw";
            return Err(RequestError::ImageUnsuitable { path: path.to_owned(), detail: detail.to_owned() });
        }
        let image = ImageLocation { store: String::new(), place, format };
        let opened = opening::open_whole(&image, Access::ReadOnly, at_once)?;
        let allocated_bytes = needed_bytes(&opened, path)?;
        Ok(Self { format, size_bytes: opened.size(), allocated_bytes, opened })
    }
}

/// Bytes that a copy will need, about: those that the image takes, and the images that it stands on.
///
/// # Errors
/// [`RequestError::Storage`].
pub(in crate::host) fn needed_bytes(opened: &Opened, path: &Path) -> Result<u64, RequestError> {
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

/// As [`format_of`], for an image that is served where it is.
///
/// A guest may have written the beginning of a qcow2 image into its raw disk. Whoever opened that as one would show the
/// guest any file that it names: so the file's name, which no guest chooses, must say the same.
///
/// # Errors
/// As there; [`RequestError::ImageUnsuitable`]: the name and the content say different things.
pub(in crate::host) fn format_in_place(
    place: &Place,
    said: Option<ImageFormat>,
) -> Result<ImageFormat, RequestError> {
    let format = format_of(place, said)?;
    match place.file().map(Path::new) {
        Some(path) if said.is_none() && format == ImageFormat::Qcow2 && !is_named_qcow2(path) => {
            let detail = "it begins as a qcow2 image and is not named so, and a guest can have written that into its raw disk; \
                          say which it is: --format raw or --format qcow2";
            Err(RequestError::ImageUnsuitable { path: path.to_owned(), detail: detail.to_owned() })
        }
        _ => Ok(format),
    }
}

fn is_named_qcow2(path: &Path) -> bool {
    path.extension().is_some_and(|end| end == "qcow2" || end == "qcow")
}

/// The format of what is at `place`: what the user says, or what it begins with.
///
/// # Errors
/// [`RequestError::ImageUnsuitable`] for a format that cannot be served, unless it is said to be raw.
pub(in crate::host) fn format_of(
    place: &Place,
    said: Option<ImageFormat>,
) -> Result<ImageFormat, RequestError> {
    let Some(path) = place.file().map(Path::new) else {
        if said == Some(ImageFormat::Qcow2) {
            let detail = "only files can be qcow2 images; leave --format out".to_owned();
            return Err(RequestError::ImageUnsuitable { path: place.name().into(), detail });
        }
        // What is there is raw; a guest's disk may hold an image of any format as its content.
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
        "it begins as a {name} image, and those cannot be served; convert it: qemu-img convert -O qcow2 FILE NEW; if it \
         is a raw disk all the same: --format raw"
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
