//! Migrations that keep a chain: the new image has the same backing file as the present one. Checks which images allow that.

use std::path::Path;

use api::{Allocation, ImageFormat as AskedFormat, MigrateVolume};
use block::held::Finder;
use block::store::qcow2::TopLayer;
use migration::journal::{ImageFormat, VolumeRecord};

use crate::error::RequestError;
use crate::stores::{Store, StoreKind};

/// Returns the top of the chain that a new image in `store` must have below it; `finder` says which files may be opened.
/// Blocks. Fails if the volume has no chain, if the backing file is missing, or if the new image cannot be qcow2.
pub(crate) fn kept(
    record: &VolumeRecord,
    order: &MigrateVolume,
    store: &Store,
    finder: &dyn Finder,
) -> Result<TopLayer, RequestError> {
    let invalid = |why: &str| {
        let name = &record.name;
        Err(RequestError::Invalid(format!("the chain of volume \"{name}\" cannot be kept: {why}")))
    };
    if !matches!(store.kind(), StoreKind::Folder { .. }) {
        return invalid("only a store that is a folder can hold a qcow2 image; leave --keep-chain out");
    }
    if order.format == Some(AskedFormat::Raw) {
        return invalid("a raw image has no backing file; leave --format out, or --keep-chain");
    }
    if order.allocation == Allocation::Thick {
        return invalid("its whole space cannot be reserved as well; leave --thick out, or --keep-chain");
    }
    let path = match (record.image.format, record.image.place.file()) {
        (ImageFormat::Qcow2, Some(path)) => Path::new(path),
        _ => return invalid("its image is not qcow2, and has no backing file; leave --keep-chain out"),
    };
    let top = TopLayer::of(path, finder)?;
    if top.backing.is_none() {
        return invalid("its image has no backing file; leave --keep-chain out");
    }
    Ok(top)
}
