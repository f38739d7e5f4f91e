//! Finds additional data in a qcow2 image that an operation would lose: internal snapshots when it is copied, bitmaps of backup
//! tools when it is written.

use std::path::Path;

use block::store::qcow2::Within;
use migration::VolumeId;
use migration::journal::{ImageFormat, ImageLocation, VolumeRecord};

use crate::error::RequestError;
use crate::host::{VolumeClaims, blocking};

impl VolumeClaims {
    /// Checks that a move loses nothing in a volume's image; [`RequestError::Invalid`]: it has snapshots.
    pub(crate) async fn check_moves_whole(&self, volume: VolumeId) -> Result<(), RequestError> {
        let record = self.journal.read(|state| state.volumes.get(&volume).map(|known| known.record.clone()));
        match record {
            Some(record) => check_moves_whole(record).await,
            None => Ok(()),
        }
    }
}

/// Does the same as [`VolumeClaims::check_moves_whole`], for a known record.
pub(crate) async fn check_moves_whole(record: VolumeRecord) -> Result<(), RequestError> {
    let name = record.name.clone();
    let within = blocking(move || within(&record.image)).await?;
    if within.snapshots == 0 {
        return Ok(());
    }
    Err(RequestError::Invalid(format!(
        "the image of volume \"{name}\" has {} internal snapshots, which would not move, and would be deleted with it: stop \
         serving it (sterna volume remove {name} --keep-image), remove them (qemu-img snapshot -l, -d) or keep a copy of it, and \
         add it again (sterna volume add)",
        within.snapshots
    )))
}

/// Checks that writing an image makes nothing in it worthless: bitmaps of a backup tool would be. Blocks.
pub(crate) fn check_written_whole(image: &ImageLocation) -> Result<(), RequestError> {
    if !within(image)?.has_bitmaps {
        return Ok(());
    }
    let path = Path::new(image.place.name()).to_owned();
    let detail = "it has persistent bitmaps of a backup tool, which the first write would make worthless, so that the next backup is a \
                  full one: remove them (qemu-img bitmap --remove FILE NAME; qemu-img info names them), or add it with --read-only"
        .to_owned();
    Err(RequestError::ImageUnsuitable { path, detail })
}

fn within(image: &ImageLocation) -> Result<Within, RequestError> {
    match (image.format, image.place.file()) {
        (ImageFormat::Qcow2, Some(path)) => Ok(Within::of(Path::new(path))?),
        _ => Ok(Within::default()),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use migration::journal::Place;

    use super::*;

    /// Runs `qemu-img`; returns whether it exists and succeeded.
    fn qemu_img(words: &[&str]) -> bool {
        Command::new("qemu-img").args(words).status().is_ok_and(|status| status.success())
    }

    #[test]
    fn what_is_within_an_image_keeps_it_where_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("d.qcow2");
        let text = path.to_str().unwrap();
        if !qemu_img(&["create", "-q", "-f", "qcow2", text, "1M"]) {
            return omission::machine_lacks("qemu-img");
        }
        let format = ImageFormat::Qcow2;
        let image = ImageLocation { store: String::new(), place: Place::File(text.to_owned()), format };
        assert_eq!(within(&image).unwrap(), Within::default());
        assert!(check_written_whole(&image).is_ok());
        assert!(
            qemu_img(&["snapshot", "-c", "before", text]) && qemu_img(&["bitmap", "--add", text, "nightly"])
        );
        assert_eq!(within(&image).unwrap(), Within { snapshots: 1, has_bitmaps: true });
        assert!(check_written_whole(&image).unwrap_err().to_string().contains("bitmaps"));
    }
}
