//! Making volumes: a new image in a store, or a file that is served where it is.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use api::{NewVolume, VolumeSource};
use block::store::{Access, Image, ImageError};
use chronicle::{BlockSize, Generation};
use migration::journal::{ExportSettings, ImageLocation, Record, VolumeRecord};
use migration::{CommitFault, VolumeId};

use super::{Host, blocking};
use crate::error::{RequestError, with_causes};
use crate::fail_point::{self, Step};
use crate::images::{self, SECTOR_BYTES, SIZE_STEP_BYTES};
use crate::names;
use crate::stores::new_path;
use crate::volumes::{Claim, Creation, Service};

impl Host {
    /// Makes a volume and serves it.
    ///
    /// # Errors
    /// [`RequestError`]: there is no such volume then, except after [`RequestError::VolumeUnavailable`].
    pub(crate) async fn create_volume(
        self: Arc<Self>,
        order: NewVolume,
    ) -> Result<api::Volume, RequestError> {
        let NewVolume { name, source } = order;
        names::check(&name).map_err(|reason| RequestError::Name { name: name.clone(), reason })?;
        self.sockets.check(&name).map_err(|error| RequestError::Invalid(with_causes(&error)))?;
        let (claim, creation) = self.volumes.claim_new(&name)?;
        match source {
            VolumeSource::Create { size_bytes, store, image } => {
                let image = image.map(absolute).transpose()?;
                let order = NewImage { name: name.clone(), size_bytes, store, image };
                self.create_image(&claim, order, creation).await?;
            }
            VolumeSource::Add { image } => self.adopt_image(&claim, &name, absolute(image)?).await?,
        }
        tracing::info!(volume = %name, "volume made");
        self.serve_in_background(&name);
        self.first_service(&name).await?;
        drop(claim);
        self.describe_volume(&name).await
    }

    /// Makes an image beside where it will be, records the volume, then puts the image in its place.
    async fn create_image(
        self: &Arc<Self>,
        claim: &Claim,
        order: NewImage,
        creation: Arc<Creation>,
    ) -> Result<(), RequestError> {
        let name = order.name.clone();
        let host = Arc::clone(self);
        let staged = blocking(move || host.stage_image(&order, &creation)).await?;
        let image = ImageLocation::raw_file(staged.store.clone(), path_text(&staged.path)?);
        let record = record(&name, staged.size_bytes, image);
        if let Err(fault) = self.journal.commit(vec![Record::VolumeAdded(record.clone())]).await {
            if fault == CommitFault::NotWritten {
                let _ = std::fs::remove_file(new_path(&staged.path));
            }
            return Err(fault.into());
        }
        // N.B. From here on a restart finds the volume, and puts the image in its place by itself.
        let path = staged.path.clone();
        let placed = blocking(move || {
            images::rename_without_replacing(&new_path(&path), &path)
                .map_err(|error| RequestError::storage("make", &path, &error))
        });
        if let Err(error) = placed.await {
            self.journal.commit(vec![Record::VolumeRemoved { volume: record.volume }]).await?;
            let _ = std::fs::remove_file(new_path(&staged.path));
            return Err(error);
        }
        claim.created(record.volume);
        Ok(())
    }

    /// Makes the image under its unfinished name; sleeps.
    fn stage_image(&self, order: &NewImage, creation: &Creation) -> Result<Staged, RequestError> {
        let store = self.stores.choose(order.store.as_deref())?;
        store.require()?;
        let given = order.image.as_deref().map(GivenImage::open).transpose()?;
        let size_bytes = size_of(order.size_bytes, given.as_ref())?;
        let path = store.image_path(&order.name);
        if path.symlink_metadata().is_ok() {
            return Err(RequestError::TargetExists { path });
        }
        if let Some(given) = &given {
            store.require_space(given.allocated_bytes)?;
            creation.bytes_total.store(given.size_bytes, Ordering::Relaxed);
        }
        let new = new_path(&path);
        // The name is claimed and the store is ours: what is there is the left-over of an attempt that failed.
        let _ = std::fs::remove_file(&new);
        fail_point::before(Step::CreateImage);
        // The lock on the new image is kept while it is filled, and taken again by the lane.
        let _made = Image::create(&new, size_bytes)?;
        if let Some(given) = &given {
            images::copy_into(&given.path, &new, &creation.bytes_done).inspect_err(|_| {
                let _ = std::fs::remove_file(&new);
            })?;
        }
        fail_point::after(Step::CreateImage);
        Ok(Staged { store: store.name().to_owned(), path, size_bytes })
    }

    async fn adopt_image(
        self: &Arc<Self>,
        claim: &Claim,
        name: &str,
        path: PathBuf,
    ) -> Result<(), RequestError> {
        let (path, size_bytes) = blocking(move || {
            // One file has many spellings; the journal has the one that does not change.
            let path = path.canonicalize().map_err(|error| match error.kind() {
                std::io::ErrorKind::NotFound => ImageError::NotFound { path: path.clone() }.into(),
                _ => RequestError::storage("follow", &path, &error),
            })?;
            // The lock is tried here, so that a file that is in use is refused, and taken again by the lane.
            let image = Image::open(&path, Access::ReadWrite)?;
            check_raw(&path)?;
            if image.size() == 0 || !image.size().is_multiple_of(SECTOR_BYTES) {
                let detail = format!(
                    "its size of {} bytes is no multiple of {SECTOR_BYTES}; grow it with: truncate -s %{SECTOR_BYTES} FILE",
                    image.size(),
                );
                return Err(RequestError::ImageUnsuitable { path, detail });
            }
            Ok((path, image.size()))
        })
        .await?;
        let image = ImageLocation::raw_file(String::new(), path_text(&path)?);
        let record = record(name, size_bytes, image);
        self.journal.commit(vec![Record::VolumeAdded(record.clone())]).await?;
        claim.created(record.volume);
        Ok(())
    }

    /// Waits until a new volume is served, or cannot be.
    async fn first_service(&self, name: &str) -> Result<(), RequestError> {
        loop {
            let changed = self.volumes.changed();
            match self.volumes.service(name) {
                Some(Service::Starting | Service::Creating(_)) => changed.await,
                Some(Service::Serving(_)) => return Ok(()),
                Some(Service::Waiting(reason) | Service::Failed(reason)) => {
                    let reason = format!("it was made, but {reason}");
                    return Err(RequestError::VolumeUnavailable { volume: name.to_owned(), reason });
                }
                Some(Service::Removing) | None => return Err(RequestError::VolumeNotFound(name.to_owned())),
            }
        }
    }
}

/// What image is to be made.
struct NewImage {
    name: String,
    size_bytes: Option<u64>,
    store: Option<String>,
    /// A raw image to copy; absolute.
    image: Option<PathBuf>,
}

/// An image that was made and is not yet in its place.
struct Staged {
    store: String,
    /// Where it will be.
    path: PathBuf,
    size_bytes: u64,
}

/// An image that is to be copied: locked against writers while it is.
struct GivenImage {
    path: PathBuf,
    size_bytes: u64,
    allocated_bytes: u64,
    _locked: Image,
}

impl GivenImage {
    fn open(path: &Path) -> Result<Self, RequestError> {
        let locked = Image::open(path, Access::ReadOnly)?;
        check_raw(path)?;
        let allocated = images::allocated_bytes(path);
        let allocated_bytes = allocated.map_err(|error| RequestError::storage("examine", path, &error))?;
        Ok(Self { path: path.to_owned(), size_bytes: locked.size(), allocated_bytes, _locked: locked })
    }
}

fn size_of(asked: Option<u64>, given: Option<&GivenImage>) -> Result<u64, RequestError> {
    let size = match (asked, given) {
        (Some(size), _) => size,
        (None, Some(given)) => given.size_bytes.next_multiple_of(SIZE_STEP_BYTES),
        (None, None) => return Err(RequestError::Invalid("say how large the volume is to be".to_owned())),
    };
    if size == 0 || !size.is_multiple_of(SIZE_STEP_BYTES) {
        let detail = format!(
            "the size {size} is no multiple of {SIZE_STEP_BYTES} bytes; the next one is {}",
            size.max(1).checked_next_multiple_of(SIZE_STEP_BYTES).unwrap_or(SIZE_STEP_BYTES),
        );
        return Err(RequestError::Invalid(detail));
    }
    match given {
        Some(given) if given.size_bytes > size => Err(RequestError::TargetTooSmall {
            place: format!("a volume of {size} bytes"),
            needed: given.size_bytes,
            detail: "give a larger --size, or none".to_owned(),
        }),
        _ => Ok(size),
    }
}

fn check_raw(path: &Path) -> Result<(), RequestError> {
    let format = images::other_format(path).map_err(|error| RequestError::storage("read", path, &error))?;
    let Some(format) = format else { return Ok(()) };
    let detail = format!(
        "it is a {format} image, and only raw ones can be served; convert it: qemu-img convert -O raw FILE NEW"
    );
    Err(RequestError::ImageUnsuitable { path: path.to_owned(), detail })
}

fn record(name: &str, size_bytes: u64, image: ImageLocation) -> VolumeRecord {
    VolumeRecord {
        volume: new_identity(),
        name: name.to_owned(),
        size_bytes,
        // A power of two within the bounds, so it fits.
        block_size_bytes: u32::try_from(BlockSize::DEFAULT.bytes()).unwrap_or(BlockSize::MIN_BYTES),
        image,
        generation: Generation(0),
        export: ExportSettings::default(),
    }
}

/// An identity that no other volume on any host has.
fn new_identity() -> VolumeId {
    let mut bytes = [0; 16];
    let random = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    if random.is_err() {
        // Without a source of randomness the time is unique enough on one host.
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        bytes = now.as_nanos().to_le_bytes();
    }
    VolumeId(bytes)
}

fn absolute(path: String) -> Result<PathBuf, RequestError> {
    let path = PathBuf::from(path);
    if path.is_absolute() {
        return Ok(path);
    }
    Err(RequestError::Invalid(format!("the path {} of the image must be absolute", path.display())))
}

/// The journal and the API hold paths as text.
fn path_text(path: &Path) -> Result<String, RequestError> {
    let text = path.to_str().map(str::to_owned);
    text.ok_or_else(|| RequestError::Invalid(format!("the path {} is not UTF-8", path.display())))
}
