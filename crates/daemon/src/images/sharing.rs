//! Whether an image can share its blocks with a new one, so that it is cloned instead of copied, and why not.
//!
//! What the places and formats say is decided first, without a look at any file. Then the file system is asked, by a trial.

use std::fs::File;
use std::path::Path;

use block::clone::{NoClones, try_clones};
use block::held;
use lane::Chunks;
use migration::journal::{ImageFormat, ImageLocation, Place};
use rustix::fs::OFlags;

use crate::images::opening::Allocation;
use crate::stores::Stores;

/// Why an image is copied.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WhyCopied {
    #[error("{0} is no file")]
    NoFile(String),
    #[error("a qcow2 image has a layout of its own: only raw images are cloned")]
    Qcow2,
    #[error("the space of the new image is to be its own (--thick)")]
    Thick,
    #[error("the store \"{0}\" is slowed down, or fails, on purpose")]
    Impaired(String),
    #[error("{0}")]
    NoClones(NoClones),
}

/// A move of an image within this host.
pub(crate) struct Within<'a> {
    pub(crate) from: &'a ImageLocation,
    pub(crate) to: &'a ImageLocation,
    pub(crate) allocation: Allocation,
}

/// Returns how an image gets to a place on this host, or why it cannot be cloned. May block.
pub(crate) fn find_out(stores: &Stores, within: &Within<'_>) -> Result<(), WhyCopied> {
    let [from, to] = [file_of(within.from)?, file_of(within.to)?];
    if within.allocation == Allocation::Thick {
        return Err(WhyCopied::Thick);
    }
    let names = [within.from, within.to].map(|image| image.store.as_str());
    if let Some(name) = names.into_iter().find(|name| stores.impairment(name).is_some()) {
        return Err(WhyCopied::Impaired(name.to_owned()));
    }
    let failed = |error: std::io::Error| {
        let errno = rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::IO);
        WhyCopied::NoClones(NoClones::Failed(errno))
    };
    let source: File = held::find(from).and_then(|held| held.open(OFlags::RDONLY)).map_err(failed)?;
    // A path of a file has a folder.
    try_clones(&source, to.parent().unwrap_or(to)).map_err(WhyCopied::NoClones)
}

/// Returns how chunks of a move get to the target. May block.
pub(crate) fn chunks(stores: &Stores, within: &Within<'_>) -> Chunks {
    match find_out(stores, within) {
        Ok(()) => Chunks::Cloned,
        Err(why) => {
            tracing::debug!(target = within.to.place.name(), reason = %why, "the image is copied, not cloned");
            Chunks::Copied
        }
    }
}

fn file_of(image: &ImageLocation) -> Result<&Path, WhyCopied> {
    match (&image.place, image.format) {
        (Place::File(path), ImageFormat::Raw) => Ok(Path::new(path)),
        (Place::File(_), ImageFormat::Qcow2) => Err(WhyCopied::Qcow2),
        (place, _) => Err(WhyCopied::NoFile(place.name().to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn what_cannot_be_cloned_is_known_by_its_place_format_and_file_system() {
        let [one, other] = [tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap()];
        let path = one.path().join("v.img");
        std::fs::write(&path, [7; 4096]).unwrap();
        let stores = Stores::new(&BTreeMap::new());
        let place = |path: &Path| Place::File(path.to_str().unwrap().to_owned());
        let image = |place, format| ImageLocation { store: "a".to_owned(), place, format };
        let raw = image(place(&path), ImageFormat::Raw);
        let why = |to: ImageLocation, allocation| {
            find_out(&stores, &Within { from: &raw, to: &to, allocation }).unwrap_err().to_string()
        };
        let there = place(&other.path().join("v.img"));
        assert!(why(image(there.clone(), ImageFormat::Qcow2), Allocation::Thin).contains("only raw images"));
        assert!(why(image(there.clone(), ImageFormat::Raw), Allocation::Thick).contains("--thick"));
        let device = Place::Device("/dev/vdz".to_owned());
        assert_eq!(why(image(device, ImageFormat::Raw), Allocation::Thin), "/dev/vdz is no file");
        let apart = why(image(there, ImageFormat::Raw), Allocation::Thin);
        assert_eq!(apart, "the two images are on different file systems");
    }
}
