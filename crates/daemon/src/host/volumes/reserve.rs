//! Takes the place of an image that a volume is to come to, before anything is written there.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use block::store::qcow2::TopLayer;
use migration::custody::{Owner, Step};
use migration::journal::{ImageFormat, ImageLocation, Place};

use crate::error::RequestError;
use crate::host::{Host, blocking};
use crate::images::opening::Allocation;
use crate::stores::StoreClaim;

/// The image that a volume needs.
pub(in crate::host) struct Wanted {
    /// Name of its store.
    pub store: String,
    /// Name of the volume.
    pub volume: String,
    /// Its format, if somebody says one.
    pub format: Option<ImageFormat>,
    /// Its format, if neither somebody nor the store says one.
    pub otherwise: ImageFormat,
    /// How much of its space is taken at once.
    pub allocation: api::Allocation,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// The top of the chain that it is to stand on as well; `None`: it stands alone.
    pub chain: Option<TopLayer>,
}

/// A target that nothing else can take.
pub(in crate::host) struct Reserved {
    pub location: ImageLocation,
    /// How much of its space is taken at once.
    pub allocation: Allocation,
    /// The top of the chain that it is to stand on as well; `None`: it stands alone.
    pub chain: Option<TopLayer>,
    /// Its file, empty; `None`: it is none.
    pub file: Option<(PathBuf, File)>,
    /// `None`: it is taken already, by what is there.
    _claim: Option<StoreClaim>,
}

impl Reserved {
    /// The place of an image that is there, and that a volume comes into.
    pub(in crate::host) fn of_image(location: ImageLocation) -> Self {
        Self { location, allocation: Allocation::Thin, chain: None, file: None, _claim: None }
    }
}

/// Where an image would be.
pub(in crate::host) struct Looked {
    pub location: ImageLocation,
    /// How much of its space would be taken at once.
    pub allocation: Allocation,
}

impl Host {
    /// Checks the target and takes it: its file is made, empty, or its device or export claimed.
    ///
    /// `thin_bytes` says how many bytes a thin image will need.
    ///
    /// # Errors
    /// [`RequestError`]: nothing is left.
    pub(in crate::host) async fn reserve(
        self: &Arc<Self>,
        wanted: Wanted,
        thin_bytes: impl FnOnce() -> Result<u64, RequestError> + Send + 'static,
    ) -> Result<Reserved, RequestError> {
        let host = Arc::clone(self);
        blocking(move || {
            let (claim, Looked { location, allocation }) = host.look_at_place(&wanted, thin_bytes)?;
            let chain = wanted.chain;
            let Some(path) = location.place.file().map(PathBuf::from) else {
                // The size is seen when it is opened, before anything is copied.
                return Ok(Reserved { location, allocation, chain, file: None, _claim: Some(claim) });
            };
            match host.custody.reserve(&path)? {
                Some(file) => Ok(Reserved {
                    location,
                    allocation,
                    chain,
                    file: Some((path, file)),
                    _claim: Some(claim),
                }),
                None => Err(RequestError::TargetExists { path }),
            }
        })
        .await
    }

    /// Looks whether the target could be taken, and where it would be; the claim keeps others from a store that takes one
    /// volume. May sleep.
    ///
    /// # Errors
    /// [`RequestError`].
    pub(in crate::host) fn look_at_place(
        &self,
        wanted: &Wanted,
        thin_bytes: impl FnOnce() -> Result<u64, RequestError>,
    ) -> Result<(StoreClaim, Looked), RequestError> {
        let store = self.stores.get(&wanted.store)?;
        store.require()?;
        let location = store.image_of(&wanted.volume, wanted.format, wanted.otherwise)?;
        let claim = self.journal.read(|state| store.claim(state))?;
        let allocation = allocation(wanted, &location.place)?;
        if location.place.file().is_none() {
            // By whatever name the device is known: what is on it is written over.
            self.custody.check(Step::Zero, &Owner::Maker, &location)?;
        }
        if let Some(path) = location.place.file() {
            let path = PathBuf::from(path);
            if path.symlink_metadata().is_ok() {
                return Err(RequestError::TargetExists { path });
            }
            store.require_space(match allocation {
                Allocation::Thick => wanted.size_bytes,
                Allocation::Thin => thin_bytes()?,
            })?;
        }
        Ok((claim, Looked { location, allocation }))
    }
}

fn allocation(wanted: &Wanted, place: &Place) -> Result<Allocation, RequestError> {
    match (wanted.allocation, place) {
        (api::Allocation::Thin, _) => Ok(Allocation::Thin),
        (api::Allocation::Thick, Place::File(_)) => Ok(Allocation::Thick),
        (api::Allocation::Thick, _) => Err(RequestError::Invalid(format!(
            "store \"{}\" is no folder: its space is not ours to reserve; leave --thick out",
            wanted.store
        ))),
    }
}
