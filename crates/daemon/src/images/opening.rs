//! Opens images of all kinds, and makes the targets of migrations. Everything here may block.
//!
//! ```text
//!                    raw            qcow2
//!   file             Image          Qcow2Image      locked; waits for a killed daemon's last writes
//!   block device     Image          -               locked; may be larger than its volume
//!   NBD export       RemoteImage    -               not locked: its server decides who else may use it
//! ```

use std::fs::File;
use std::path::Path;

use block::ZeroMode;
use block::held::{ByName, Finder};
use block::store::image::Patience;
use block::store::qcow2::{CLUSTER_SIZE, TopLayer};
use block::store::{Access, Holder, Image, ImageError, Kind, Opened, Qcow2Image, Qcow2Options, RemoteImage};
use lane::{Chunks, MigrationTarget, TargetContent};
use migration::custody::{Remedy, remedy_for_size};
use migration::journal::{ExportAccess, ImageFormat, ImageLocation, Place, VolumeRecord};
use nbd_protocol::UriError;
use rustix::io::Errno;

use crate::custody::{self, Custody};
use crate::error::RequestError;
use crate::fail_point::{self, Step};
use crate::files::folder_entries::sync_folder_of;
use crate::stores::new_path;

/// When a new image's space is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Allocation {
    /// The image grows as it is written.
    Thin,
    /// All of it, before anything is copied.
    Thick,
}

impl From<api::Allocation> for Allocation {
    fn from(ordered: api::Allocation) -> Self {
        match ordered {
            api::Allocation::Thin => Self::Thin,
            api::Allocation::Thick => Self::Thick,
        }
    }
}

/// Opens a volume's image with the volume's size, waiting while another process has it locked. `custody` says whether the image is
/// the volume's, and `finder` which file may be opened. `grows_to` is the image's possible size after an interrupted growth.
/// `on_held` is called with the process that has the lock, and returns whether to wait. Errors: [`RequestError`]: the image cannot
/// be used, or differs from the journal.
pub(crate) fn open(
    custody: &Custody,
    record: &VolumeRecord,
    grows_to: Option<u64>,
    finder: &dyn Finder,
    on_held: impl FnMut(&Holder) -> Patience,
) -> Result<Opened, RequestError> {
    let access = match record.export.access {
        ExportAccess::ReadWrite => Access::ReadWrite,
        ExportAccess::ReadOnly => Access::ReadOnly,
    };
    let opened = open_found(&record.image, access, finder, on_held)?;
    confirm(custody, &record.image.place, &opened)?;
    if access == Access::ReadWrite {
        custody.check_mounts(&record.image)?;
    }
    if opened.size() == record.size_bytes {
        return Ok(opened);
    }
    let may_be_larger = grows_to.is_some_and(|size| opened.size() <= size);
    if record.image.place.outlasts_its_volume() || may_be_larger {
        return narrow(opened, &record.image.place, record.size_bytes);
    }
    let detail = format!(
        "it has {} bytes, and the volume {}: is it another file? {}",
        opened.size(),
        record.size_bytes,
        size_advice(record, opened.size()),
    );
    Err(RequestError::ImageUnsuitable { path: record.image.place.name().into(), detail })
}

/// Checks that what was opened is the image that the journal means.
fn confirm(custody: &Custody, place: &Place, opened: &Opened) -> Result<(), RequestError> {
    match opened.held() {
        Some(held) => Ok(custody.confirm(place, held)?),
        None => Ok(()),
    }
}

/// Returns what to do about an image that does not have the size of its volume.
fn size_advice(record: &VolumeRecord, found: u64) -> String {
    let (image, name, wanted) = (&record.image, &record.name, record.size_bytes);
    let again = format!(
        "to serve it as it is: sterna volume remove {name} --keep-image, then sterna volume add {name} --image FILE"
    );
    match remedy_for_size(&image.place, image.format, found, wanted) {
        Remedy::Lengthen => {
            // N.B. zeroes at its end would count as the disk's content, and a copy elsewhere may have that.
            format!(
                "its end, from byte {found} to {wanted}, is missing: put the whole image back, from a backup for example"
            )
        }
        // N.B. no advice may ever cut bytes off.
        Remedy::KeepLonger => {
            format!("the bytes behind that may be the guest's: do not cut them off; {again}")
        }
        Remedy::ByItsProgram => {
            format!("do not change the file's own size: that destroys a qcow2 image; {again}")
        }
        Remedy::NoFile => "give it its former size back".to_owned(),
    }
}

/// Opens a whole image at once, without a proof of its files.
pub(crate) fn open_whole(
    image: &ImageLocation,
    access: Access,
    on_held: impl FnMut(&Holder) -> Patience,
) -> Result<Opened, RequestError> {
    open_found(image, access, &ByName, on_held)
}

/// Does the same as [`open_whole`], if `finder` allows the files of the image.
pub(crate) fn open_found(
    image: &ImageLocation,
    access: Access,
    finder: &dyn Finder,
    on_held: impl FnMut(&Holder) -> Patience,
) -> Result<Opened, RequestError> {
    match (&image.place, image.format) {
        (Place::File(path) | Place::Device(path), ImageFormat::Raw) => {
            let opened = Image::open_found(Path::new(path), access, finder, on_held)?;
            check_kind(&image.place, opened.kind())?;
            Ok(opened.into())
        }
        (Place::File(path), ImageFormat::Qcow2) => {
            Ok(Qcow2Image::open_found(Path::new(path), access, finder, on_held)?.into())
        }
        (Place::Nbd(uri), ImageFormat::Raw) => {
            let parsed = uri.parse().map_err(|error: UriError| RequestError::Invalid(error.to_string()))?;
            Ok(RemoteImage::connect(&parsed, access)?.into())
        }
        (place, format) => {
            let detail = format!("a {} image cannot be served there", format.name());
            Err(RequestError::ImageUnsuitable { path: place.name().into(), detail })
        }
    }
}

/// Gives up at once, for images that no other process may have locked.
pub(crate) fn at_once(_: &Holder) -> Patience {
    Patience::GiveUp
}

/// Makes the target of a migration; its name is the volume's, and the journal has it. `reserved` is its empty file, if it is a
/// file. A thick one has all its space when this returns. With `chain` it gets the same backing file as the source. After an
/// error the caller deletes the file.
pub(crate) fn make_target(
    custody: &Custody,
    image: &ImageLocation,
    reserved: Option<&File>,
    size: u64,
    allocation: Allocation,
    chain: Option<&TopLayer>,
) -> Result<MigrationTarget, RequestError> {
    fail_point::before(Step::CreateImage);
    let (store, content) = match reserved {
        Some(file) => {
            let path = Path::new(image.place.name());
            match image.format {
                ImageFormat::Raw => size_file(file, path, size)?,
                ImageFormat::Qcow2 => put_qcow2(custody, path, file, size, chain)?,
            }
            if allocation == Allocation::Thick {
                allocate(image, size)?;
            }
            let file = File::open(path).map_err(|error| RequestError::storage("open", path, &error))?;
            let synced = file.sync_all().and_then(|()| sync_folder_of(path));
            synced.map_err(|error| RequestError::storage("sync", path, &error))?;
            let content = if chain.is_some() { TargetContent::Backing } else { TargetContent::Zero };
            (open_own(custody, image)?, content)
        }
        None => {
            let store = open_own(custody, image)?;
            (narrow(store, &image.place, size)?, TargetContent::Unknown)
        }
    };
    fail_point::after(Step::CreateImage);
    let zeroes = match allocation {
        Allocation::Thin => ZeroMode::MayUnmap,
        Allocation::Thick => ZeroMode::KeepAllocated,
    };
    Ok(MigrationTarget { store, content, zeroes, chunks: Chunks::Copied })
}

/// Opens the target of a migration that a restart resumes, with what was copied. Changes nothing.
pub(crate) fn open_target_again(
    custody: &Custody,
    image: &ImageLocation,
    size: u64,
    allocation: api::Allocation,
) -> Result<MigrationTarget, RequestError> {
    let opened = open_own(custody, image)?;
    let store = match image.place {
        // A file with another size is another file, which the lane refuses.
        Place::File(_) => opened,
        Place::Device(_) | Place::Nbd(_) => narrow(opened, &image.place, size)?,
    };
    let zeroes = match allocation {
        api::Allocation::Thin => ZeroMode::MayUnmap,
        api::Allocation::Thick => ZeroMode::KeepAllocated,
    };
    // If its missing set turns out to be unknown, it may hold anything.
    Ok(MigrationTarget { store, content: TargetContent::Unknown, zeroes, chunks: Chunks::Copied })
}

/// Opens the target of a migration, which nobody else may hold.
fn open_own(custody: &Custody, image: &ImageLocation) -> Result<Opened, RequestError> {
    let opened = open_whole(image, Access::ReadWrite, at_once)?;
    confirm(custody, &image.place, &opened)?;
    Ok(opened)
}

/// Makes a new image file that reads as zeroes. After an error there is no file.
pub(crate) fn create_file(path: &Path, format: ImageFormat, size: u64) -> Result<Opened, RequestError> {
    match format {
        ImageFormat::Raw => Ok(Image::create(path, size)?.into()),
        ImageFormat::Qcow2 => {
            let options = Qcow2Options { cluster_size: CLUSTER_SIZE, backing: None };
            Ok(Qcow2Image::create(path, size, &options)?.into())
        }
    }
}

/// Uses the first `size` bytes of something larger; fails with [`RequestError::TargetTooSmall`] if it is smaller.
pub(crate) fn narrow(opened: Opened, place: &Place, size: u64) -> Result<Opened, RequestError> {
    if opened.size() < size {
        let detail = format!("it has {} bytes; choose or make a larger one", opened.size());
        return Err(RequestError::TargetTooSmall { place: place.to_string(), needed: size, detail });
    }
    match opened {
        Opened::File(image) => Ok(image.narrowed_to(size)?.into()),
        Opened::Remote(image) => Ok(image.narrowed_to(size)?.into()),
        Opened::Qcow2(image) => Ok(image.narrowed_to(size)?.into()),
        Opened::Impaired(store, impairment) => Ok(narrow(*store, place, size)?.impaired(Some(impairment))),
    }
}

/// Returns the most bytes that a qcow2 image of `size` bytes takes: its clusters and their tables. An entry of eight bytes and
/// a count of two bytes for each cluster of 64 KiB are less than one part in 4,096; the first tables are a few clusters.
pub(crate) fn qcow2_bytes_max(size: u64) -> u64 {
    size.saturating_add(size / 4096).saturating_add(8 * CLUSTER_SIZE)
}

/// Checks the kind: a device that was given as a file would be deleted like one, and the other way round.
fn check_kind(place: &Place, kind: Kind) -> Result<(), RequestError> {
    let detail = match (place, kind) {
        (Place::File(_), Kind::Device) => "it is a block device; give it with --device",
        (Place::Device(_), Kind::File) => "it is a file, and no block device; give it with --image",
        _ => return Ok(()),
    };
    Err(RequestError::ImageUnsuitable { path: place.name().into(), detail: detail.to_owned() })
}

fn size_file(file: &File, path: &Path, size: u64) -> Result<(), RequestError> {
    custody::set_size(file, size).map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::FBIG | Errno::INVAL) => RequestError::TargetTooSmall {
            place: path.display().to_string(),
            needed: size,
            detail: "its file system has a lower limit for files; choose a store on another file system"
                .to_owned(),
        },
        Some(Errno::NOSPC | Errno::DQUOT) => ImageError::NoSpace { path: path.to_owned() }.into(),
        _ => RequestError::storage("set the size of", path, &error),
    })
}

/// Puts an empty qcow2 image in place of the empty file that has kept its name.
fn put_qcow2(
    custody: &Custody,
    path: &Path,
    reserved: &File,
    size: u64,
    chain: Option<&TopLayer>,
) -> Result<(), RequestError> {
    let new = new_path(path);
    custody::clear_unfinished(&new).map_err(|error| RequestError::storage("delete", &new, &error))?;
    match chain {
        None => drop(create_file(&new, ImageFormat::Qcow2, size)?),
        Some(top) => drop(Qcow2Image::create(&new, size, &top.options())?),
    }
    Ok(custody.place_made(&new, path, reserved)?)
}

/// Allocates all the space that an image will need; it reads as zeroes before and after.
fn allocate(image: &ImageLocation, size: u64) -> Result<(), RequestError> {
    let path = Path::new(image.place.name());
    let bytes = match image.format {
        ImageFormat::Raw => size,
        ImageFormat::Qcow2 => qcow2_bytes_max(size),
    };
    match custody::allocate(path, image.format, bytes) {
        Ok(()) => Ok(()),
        Err(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => {
            Err(ImageError::NoSpace { path: path.to_owned() }.into())
        }
        Err(Errno::OPNOTSUPP) => {
            let detail = "its file system cannot reserve space; leave --thick out, or choose another store";
            Err(RequestError::ImageUnsuitable { path: path.to_owned(), detail: detail.to_owned() })
        }
        Err(errno) => Err(RequestError::storage("reserve the space of", path, &errno.into())),
    }
}
