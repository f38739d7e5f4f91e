//! Creates volumes: a new image in a store, or an existing image that is served in place.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use api::{NewVolume, VolumeSource};
use block::held;
use block::store::{Access, ImageError, Opened};
use chronicle::{BlockSize, Generation};
use lane::TargetContent;
use migration::custody::{Owner, Step as CustodyStep, Word};
use migration::journal::{
    ExportAccess, ExportSettings, ImageFormat, ImageLocation, Place, Record, SnapshotOf, VolumeRecord,
};
use migration::{CommitFault, VolumeId};

use crate::custody::is_same;
use crate::error::{RequestError, with_causes};
use crate::fail_point::{self, Step};
use crate::files::descriptors;
use crate::host::VolumeOrders;
use crate::host::blocking;
use crate::images::opening::{self, at_once};
use crate::images::{self, SECTOR_BYTES, SIZE_STEP_BYTES, copying, half_made};
use crate::migrations::view::image_format;
use crate::names;
use crate::stores::{StoreClaim, new_path, path_text};
use crate::volumes::claims::within::check_written_whole;
use crate::volumes::exports::export_settings;
use crate::volumes::orders::clone::NewClone;
use crate::volumes::orders::given::{self, GivenImage};
use crate::volumes::orders::import::ImportedImage;
use crate::volumes::registry::{Claim, Creation, Service};

impl VolumeOrders {
    /// Creates a volume and serves it. After an error there is no such volume, except after [`RequestError::VolumeUnavailable`].
    pub(crate) async fn create_volume(
        self: Arc<Self>,
        order: NewVolume,
    ) -> Result<api::Volume, RequestError> {
        self.draining.refuse_new()?;
        let NewVolume { name, source, export } = order;
        names::check(&name).map_err(|reason| RequestError::Name { name: name.clone(), reason })?;
        self.sockets.check(&name).map_err(|error| RequestError::Invalid(with_causes(&error)))?;
        let export = export_settings(&export)?;
        blocking(descriptors::require_for_volume).await?;
        let (claim, creation) = self.volumes.claim_new(&name)?;
        match source {
            VolumeSource::Create { size_bytes, store, image, format } => {
                let image = image.map(absolute).transpose()?;
                let format = format.map(image_format);
                let order = NewImage { name: name.clone(), size_bytes, store, image, format, export };
                self.create_image(&claim, order, creation).await?;
            }
            VolumeSource::Clone { volume, store, format } => {
                let order = NewClone {
                    of: volume,
                    name: name.clone(),
                    store,
                    format: format.map(image_format),
                    export,
                };
                self.clone_volume(&claim, order, &creation).await?;
            }
            VolumeSource::Import { store, file, format } => {
                let order = ImportedImage { store, file, format: format.map(image_format), export };
                self.import_image(&claim, &name, order).await?;
            }
            VolumeSource::Add { image, device, nbd, format, fenced } => {
                let place = given_place(image, device, nbd)?;
                let order = AdoptedImage { place, format: format.map(image_format), export };
                let fences = if fenced { Fences::Pass } else { Fences::Hold };
                self.adopt_image(&claim, &name, order, fences).await?;
            }
        }
        tracing::info!(volume = %name, "volume made");
        self.serving.serve_in_background(&name);
        self.first_service(&name).await?;
        drop(claim);
        self.views.describe_volume(&name).await
    }

    /// Makes an image under an unfinished name, records the volume, then renames the image.
    async fn create_image(
        self: &Arc<Self>,
        claim: &Claim,
        order: NewImage,
        creation: Arc<Creation>,
    ) -> Result<(), RequestError> {
        let (name, export) = (order.name.clone(), order.export.clone());
        let host = Arc::clone(self);
        let staged = blocking(move || host.stage_image(&order, &creation)).await?;
        self.place_staged(vec![Placed { claim, name, staged, export, taken: None }]).await
    }

    /// Records the volumes of new images, all or none, and gives the images their names.
    pub(super) async fn place_staged(self: &Arc<Self>, placed: Vec<Placed<'_>>) -> Result<(), RequestError> {
        let mut records = Vec::new();
        let mut names: Vec<(PathBuf, PathBuf, VolumeId)> = Vec::new();
        let mut volumes = Vec::new();
        for placed in &placed {
            let (staged, export) = (&placed.staged, placed.export.clone());
            let record = record(&placed.name, staged.size_bytes, staged.image.clone(), export);
            let volume = record.volume;
            volumes.push(volume);
            names.extend(
                staged.image.place.file().map(PathBuf::from).map(|file| (new_path(&file), file, volume)),
            );
            // N.B. One commit for all: at no time is another file taken for the image.
            records.push(Record::VolumeAdded(record));
            records.extend(staged.known.clone());
            let taken = placed.taken.clone().map(Box::new);
            records.extend(taken.map(|taken| Record::SnapshotKnown { volume, taken }));
        }
        if let Err(fault) = self.journal.commit(records).await {
            if fault == CommitFault::NotWritten {
                names.iter().for_each(|(new, _, _)| self.forget_staged(new));
            }
            return Err(fault.into());
        }
        // N.B. From here on a restart finds the volumes, and renames the images itself.
        let (host, renamed) = (Arc::clone(self), names.clone());
        let named = blocking(move || {
            let rename = |(new, file, volume): &(PathBuf, PathBuf, VolumeId)| {
                host.custody.rename(new, file, &Owner::Volume(*volume)).map(drop)
            };
            Ok(renamed.iter().try_for_each(rename)?)
        });
        if let Err(error) = named.await {
            // N.B. Those that have their names get the unfinished ones back first: a crash in between leaves no image unowned.
            for (new, file, volume) in &names {
                if !new.exists() {
                    self.custody.rename(file, new, &Owner::Volume(*volume))?;
                }
            }
            let removed = volumes.iter().map(|volume| Record::VolumeRemoved { volume: *volume }).collect();
            self.journal.commit(removed).await?;
            names.iter().for_each(|(new, _, _)| self.forget_staged(new));
            return Err(error);
        }
        placed.iter().zip(volumes).for_each(|(placed, volume)| placed.claim.created(volume));
        Ok(())
    }

    /// Makes the image; a file gets its unfinished name. Blocks.
    fn stage_image(&self, order: &NewImage, creation: &Arc<Creation>) -> Result<Staged, RequestError> {
        let store = self.stores.choose(order.store.as_deref())?;
        store.require_writable()?;
        let image = store.image_of(&order.name, order.format, ImageFormat::Raw)?;
        let claim = self.journal.read(|state| store.claim(state))?;
        let given = order.image.as_deref().map(GivenImage::open).transpose()?;
        let size_bytes = size_of(order.size_bytes, given.as_ref())?;
        if let Some(given) = &given {
            store.require_space(given.allocated_bytes)?;
            creation.bytes_total.store(given.size_bytes, Ordering::Relaxed);
        }
        let staged = |image, known| Staged { image, size_bytes, known, _claim: claim };
        let Some(path) = image.place.file().map(Path::new) else {
            // The content does not say who needs it: the configuration and the claims do.
            self.custody.check(CustodyStep::Zero, &Owner::Maker, &image)?;
            let target = opening::open_whole(&image, Access::ReadWrite, at_once)?;
            let known = self.known(&image.place, &target)?;
            let target = opening::narrow(target, &image.place, size_bytes)?;
            let target = self.stores.impair(&image, target);
            let source = given.map(|given| given.opened);
            copying::fill(source, target, TargetContent::Unknown, &creation.bytes_done)?;
            return Ok(staged(image, known));
        };
        if path.symlink_metadata().is_ok() {
            return Err(RequestError::TargetExists { path: path.to_owned() });
        }
        let new = new_path(path);
        // The name is claimed and the store is ours, so this file is left over from a failed attempt.
        self.custody.delete(&new, &Owner::Housekeeping)?;
        fail_point::before(Step::CreateImage);
        let made = self.stage_file(&new, &image, size_bytes, given, creation);
        let known = made.inspect_err(|_| self.forget_staged(&new))?;
        fail_point::after(Step::CreateImage);
        Ok(staged(image, known))
    }

    /// Makes a file under its unfinished name, and fills it; says what it is.
    fn stage_file(
        &self,
        new: &Path,
        image: &ImageLocation,
        size_bytes: u64,
        given: Option<GivenImage>,
        creation: &Arc<Creation>,
    ) -> Result<Option<Record>, RequestError> {
        // The lock on the new image is kept while it is filled, and taken again by the lane.
        let made = opening::create_file(new, image.format, size_bytes)?;
        if let Some(held) = made.held() {
            self.custody.note_made(new, held)?;
        }
        let known = self.known(&image.place, &made)?;
        match given {
            None => {}
            Some(given) if (given.format, image.format) == (ImageFormat::Raw, ImageFormat::Raw) => {
                let source = given.opened.held();
                let source = source.ok_or_else(|| RequestError::Internal("a file is none".to_owned()))?;
                // N.B. Copies the locked file, whatever has its name by now.
                images::copy_into(source, new, &creation.bytes_done)?;
            }
            Some(given) => {
                copying::fill(Some(given.opened), made, TargetContent::Zero, &creation.bytes_done)?;
            }
        }
        Ok(known)
    }

    /// What an image is that is open, for the journal.
    pub(crate) fn known(&self, place: &Place, opened: &Opened) -> Result<Option<Record>, RequestError> {
        let Some(held) = opened.held() else { return Ok(None) };
        let known = self.custody.record_of(place, held);
        known.map_err(|error| RequestError::storage("look at", Path::new(place.name()), &error))
    }

    /// Deletes a file under its unfinished name. If that fails, the next start deletes it.
    pub(super) fn forget_staged(&self, new: &Path) {
        if let Err(error) = self.custody.delete(new, &Owner::Maker) {
            tracing::warn!(%error, "an unfinished image is left over");
        }
    }

    async fn adopt_image(
        self: &Arc<Self>,
        claim: &Claim,
        name: &str,
        order: AdoptedImage,
        fences: Fences,
    ) -> Result<(), RequestError> {
        let AdoptedImage { place, format, export } = order;
        let given = place.clone();
        let access = match export.access {
            ExportAccess::ReadWrite => Access::ReadWrite,
            ExportAccess::ReadOnly => Access::ReadOnly,
        };
        let image = blocking(move || {
            let place = one_spelling(place)?;
            let format = given::format_in_place(&place, format)?;
            Ok(ImageLocation { store: String::new(), place, format })
        })
        .await?;
        // N.B. Held from the check until the record: of two orders for one image, one gets it.
        let _adding = self.adding_image.lock().await;
        let (host, opened, finder) = (Arc::clone(self), image.clone(), self.finders.of(name));
        let (size_bytes, known) = blocking(move || {
            host.check_free(&opened.place, fences)?;
            // A mark lies beside the image, or beside a link that leads to it.
            let mut paths = [&opened.place, &given].into_iter().filter_map(Place::file).map(Path::new);
            if let Some(path) = paths.find(|path| fences == Fences::Hold && half_made::is_marked(path)) {
                let detail =
                    "it is a half-made target: parts of the disk are missing; to serve it anyway: --fenced";
                return Err(RequestError::ImageUnsuitable {
                    path: path.to_owned(),
                    detail: detail.to_owned(),
                });
            }
            host.custody.check(service_step(access), &Owner::Administrator(word(fences)), &opened)?;
            if access == Access::ReadWrite {
                check_written_whole(&opened)?;
            }
            // Tries the lock, so that an image in use is refused. The lane takes the lock again.
            let store = opening::open_found(&opened, access, &finder, at_once)?;
            check_size(&opened, store.size())?;
            Ok((store.size(), host.known(&opened.place, &store)?))
        })
        .await?;
        let record = record(name, size_bytes, image, export);
        let volume = record.volume;
        let added = vec![Record::VolumeAdded(record.clone())].into_iter().chain(known).collect();
        self.journal.commit(added).await?;
        // N.B. before the answer: by its mark the image of a volume could be dropped, once the journal is lost.
        let journal = self.journal.clone();
        blocking(move || {
            half_made::unmark_completed(&journal, &[Record::VolumeAdded(record)]);
            Ok(())
        })
        .await?;
        claim.created(volume);
        Ok(())
    }

    /// Checks that a place holds no volume of this host, and nothing that a migration left there. May block.
    fn check_free(&self, place: &Place, fences: Fences) -> Result<(), RequestError> {
        let store = self.stores.of_place(place);
        if let Some(store) = store {
            let detail = format!("it is the store \"{store}\"; make a volume there: sterna volume create");
            return Err(RequestError::ImageUnsuitable { path: place.name().into(), detail });
        }
        self.journal.read(|state| {
            let is_here = |image: &ImageLocation| image.place == *place;
            let volume = state.claimed_records().find(|record| is_here(&record.image));
            volume.map_or(Ok(()), |volume| {
                Err(RequestError::PlaceTaken { place: place.clone(), volume: volume.name.clone() })
            })
        })?;
        // N.B. compared outside of the journal: a disk that hangs must not hold it. A device has several names.
        let reservations = self.journal.read(|state| state.reservations.clone());
        match reservations.into_iter().find(|(reserved, _)| is_same(reserved, place)) {
            Some((_, fence)) if fences == Fences::Hold => {
                Err(RequestError::Fenced { place: place.clone(), fence })
            }
            _ => Ok(()),
        }
    }

    /// Resolves when a volume is served or cannot be served, or if there is no such volume.
    pub(crate) async fn until_decided(&self, name: &str) {
        loop {
            let changed = self.volumes.changed();
            match self.volumes.service(name) {
                Some(Service::Starting | Service::Creating(_)) => changed.await,
                _ => return,
            }
        }
    }

    /// Waits until a new volume is served or cannot be served.
    pub(super) async fn first_service(&self, name: &str) -> Result<(), RequestError> {
        loop {
            let changed = self.volumes.changed();
            match self.volumes.service(name) {
                Some(Service::Starting | Service::Creating(_)) => changed.await,
                Some(Service::Serving(_) | Service::Arriving(..)) => return Ok(()),
                Some(Service::Waiting(reason) | Service::Failed(reason) | Service::Unconfirmed(reason)) => {
                    let reason = format!("it was made, but {reason}");
                    return Err(RequestError::VolumeUnavailable { volume: name.to_owned(), reason });
                }
                Some(Service::Removing) | None => return Err(RequestError::VolumeNotFound(name.to_owned())),
            }
        }
    }
}

struct NewImage {
    name: String,
    size_bytes: Option<u64>,
    store: Option<String>,
    /// The absolute path of an image to copy.
    image: Option<PathBuf>,
    /// `None`: the store's default.
    format: Option<ImageFormat>,
    export: ExportSettings,
}

/// An order to serve an image in place.
struct AdoptedImage {
    place: Place,
    /// `None`: the format is detected.
    format: Option<ImageFormat>,
    export: ExportSettings,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fences {
    Hold,
    Pass,
}

fn word(fences: Fences) -> Word {
    match fences {
        Fences::Hold => Word::Plain,
        Fences::Pass => Word::Insists,
    }
}

fn service_step(access: Access) -> CustodyStep {
    match access {
        Access::ReadWrite => CustodyStep::ServeReadWrite,
        Access::ReadOnly => CustodyStep::ServeReadOnly,
    }
}

/// A new volume, once its image is made.
pub(super) struct Placed<'a> {
    pub(super) claim: &'a Claim,
    pub(super) name: String,
    pub(super) staged: Staged,
    pub(super) export: ExportSettings,
    /// What it is a snapshot of; `None`: it is none.
    pub(super) taken: Option<SnapshotOf>,
}

/// A new image; a file has its unfinished name.
pub(super) struct Staged {
    pub(super) image: ImageLocation,
    pub(super) size_bytes: u64,
    /// The image's identity, for the journal.
    pub(super) known: Option<Record>,
    pub(super) _claim: StoreClaim,
}

fn size_of(asked: Option<u64>, given: Option<&GivenImage>) -> Result<u64, RequestError> {
    let size = match (asked, given) {
        (Some(size), _) => size,
        (None, Some(given)) => given.size_bytes.next_multiple_of(SIZE_STEP_BYTES),
        (None, None) => return Err(RequestError::Invalid("give the size of the volume".to_owned())),
    };
    if size == 0 && asked.is_none() {
        let detail = "the image is empty: give the size of the volume (--size)".to_owned();
        return Err(RequestError::Invalid(detail));
    }
    if size == 0 || !size.is_multiple_of(SECTOR_BYTES) {
        let detail = format!(
            "the size {size} is no multiple of {SECTOR_BYTES} bytes; the next one is {}",
            size.max(1).checked_next_multiple_of(SECTOR_BYTES).unwrap_or(SECTOR_BYTES),
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

/// Returns the place of an image that was given in one of three ways.
fn given_place(
    image: Option<String>,
    device: Option<String>,
    nbd: Option<String>,
) -> Result<Place, RequestError> {
    match (image, device, nbd) {
        (Some(path), None, None) => Ok(Place::File(path_text(&absolute(path)?)?)),
        (None, Some(path), None) => Ok(Place::Device(path_text(&absolute(path)?)?)),
        (None, None, Some(uri)) => {
            let uri: nbd_protocol::NbdUri = uri
                .parse()
                .map_err(|error: nbd_protocol::UriError| RequestError::Invalid(error.to_string()))?;
            Ok(Place::Nbd(uri.to_string()))
        }
        _ => Err(RequestError::Invalid(
            "give one of: a file (image), a block device (device), an NBD server's export (nbd)".to_owned(),
        )),
    }
}

/// Returns the one spelling that the journal uses for a file with several names. For a device this is the name that the user
/// gave: its number changes with the next start.
fn one_spelling(place: Place) -> Result<Place, RequestError> {
    let Place::File(path) = place else { return Ok(place) };
    let path = PathBuf::from(path);
    let found = held::find(&path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory => {
            ImageError::NotFound { path: path.clone() }.into()
        }
        std::io::ErrorKind::PermissionDenied => ImageError::NotPermitted { path: path.clone() }.into(),
        _ => RequestError::storage("follow", &path, &error),
    })?;
    Ok(Place::File(path_text(found.path())?))
}

pub(crate) fn check_size(image: &ImageLocation, size_bytes: u64) -> Result<(), RequestError> {
    if size_bytes != 0 && size_bytes.is_multiple_of(SECTOR_BYTES) {
        return Ok(());
    }
    let detail = match (image.place.file(), image.format, size_bytes) {
        (_, _, 0) => "it is empty".to_owned(),
        (Some(_), ImageFormat::Raw, size_bytes) => format!(
            "its size of {size_bytes} bytes is no multiple of {SECTOR_BYTES}; grow it with: truncate -s %{SECTOR_BYTES} FILE"
        ),
        (Some(_), ImageFormat::Qcow2, size_bytes) => format!(
            "the size of its disk, {size_bytes} bytes, is no multiple of {SECTOR_BYTES}; grow the disk, and not the file: qemu-img \
             resize FILE {}",
            size_bytes.next_multiple_of(SECTOR_BYTES)
        ),
        (None, _, size_bytes) => {
            format!("its size of {size_bytes} bytes is no multiple of {SECTOR_BYTES}")
        }
    };
    Err(RequestError::ImageUnsuitable { path: image.place.name().into(), detail })
}

pub(crate) fn record(
    name: &str,
    size_bytes: u64,
    image: ImageLocation,
    export: ExportSettings,
) -> VolumeRecord {
    VolumeRecord {
        volume: new_identity(),
        name: name.to_owned(),
        size_bytes,
        block_size_bytes: BlockSize::DEFAULT.into(),
        image,
        generation: Generation(0),
        export,
    }
}

/// Returns a new identity for a volume, unique among all hosts.
fn new_identity() -> VolumeId {
    VolumeId(random_bytes())
}

pub(crate) fn random_number() -> u64 {
    // Half of the bytes are random enough.
    u128::from_le_bytes(random_bytes()) as u64
}

pub(crate) fn random_bytes() -> [u8; 16] {
    let mut bytes = [0; 16];
    let random = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    if random.is_err() {
        // The time is unique enough on one host if there is no source of randomness.
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        bytes = now.as_nanos().to_le_bytes();
    }
    bytes
}

fn absolute(path: String) -> Result<PathBuf, RequestError> {
    let path = PathBuf::from(path);
    if path.is_absolute() {
        return Ok(path);
    }
    Err(RequestError::Invalid(format!("the path {} of the image must be absolute", path.display())))
}
