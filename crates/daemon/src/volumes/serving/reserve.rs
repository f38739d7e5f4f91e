//! Reserves the place of a volume's new image before anything is written there.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use block::store::qcow2::TopLayer;
use migration::custody::{Owner, Step};
use migration::journal::{ImageFormat, ImageLocation, Place};

use crate::error::RequestError;
use crate::host::{Serving, blocking};
use crate::images::opening::Allocation;
use crate::stores::StoreClaim;

/// An order for a volume's new image.
pub(crate) struct Wanted {
    pub store: String,
    pub volume: String,
    pub format: Option<ImageFormat>,
    /// The format if neither the order nor the store names one.
    pub otherwise: ImageFormat,
    pub allocation: api::Allocation,
    pub size_bytes: u64,
    /// The top of the chain below the new image; `None`: it has no backing file.
    pub chain: Option<TopLayer>,
}

pub(crate) struct Reserved {
    pub location: ImageLocation,
    pub allocation: Allocation,
    /// The top of the chain below the new image; `None`: it has no backing file.
    pub chain: Option<TopLayer>,
    /// The empty file; `None`: the target is a device or an export.
    pub file: Option<(PathBuf, File)>,
    /// `None`: the existing image claims the store already.
    _claim: Option<StoreClaim>,
}

impl Reserved {
    /// Returns the place of an existing image that a volume reuses.
    pub(crate) fn of_image(location: ImageLocation) -> Self {
        Self { location, allocation: Allocation::Thin, chain: None, file: None, _claim: None }
    }
}

/// The place that an image would have.
pub(crate) struct Looked {
    pub location: ImageLocation,
    pub allocation: Allocation,
}

impl Serving {
    /// Checks the target and reserves it: makes an empty file, or claims the device or export. `thin_bytes` returns how many
    /// bytes a thin image will need. After an error nothing is left.
    pub(crate) async fn reserve(
        self: &Arc<Self>,
        wanted: Wanted,
        thin_bytes: impl FnOnce() -> Result<u64, RequestError> + Send + 'static,
    ) -> Result<Reserved, RequestError> {
        let host = Arc::clone(self);
        blocking(move || {
            let (claim, Looked { location, allocation }) = host.look_at_place(&wanted, thin_bytes)?;
            let chain = wanted.chain;
            let Some(path) = location.place.file().map(PathBuf::from) else {
                // The size is checked when the target is opened, before anything is copied.
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

    /// Returns the place and a claim of the target, if it can be reserved. May block.
    pub(crate) fn look_at_place(
        &self,
        wanted: &Wanted,
        thin_bytes: impl FnOnce() -> Result<u64, RequestError>,
    ) -> Result<(StoreClaim, Looked), RequestError> {
        let store = self.stores.get(&wanted.store)?;
        store.require_writable()?;
        let location = store.image_of(&wanted.volume, wanted.format, wanted.otherwise)?;
        let claim = self.journal.read(|state| store.claim(state))?;
        let allocation = allocation(wanted, &location.place)?;
        if location.place.file().is_none() {
            // Under any name of the device: its content will be overwritten.
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
