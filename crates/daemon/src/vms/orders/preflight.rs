//! The checks before a VM moves: what the source says that the VM needs, and whether the target has it.
//!
//! ```text
//!   source: manifest_of ── definition, files, needs ──► target: check_arrival ── what QEMU and the kernel there have, space
//! ```
//! Nothing is copied before the target has answered.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use migration::journal::Side;

use crate::error::RequestError;
use crate::host::{VmOrders, blocking};
use crate::images;
use crate::vms::Differences;
use crate::vms::moving::{MoveFault, Terms};

impl VmOrders {
    /// Returns the VM description for a target host, for a VM with these volumes.
    pub(crate) async fn manifest_of(
        self: &Arc<Self>,
        name: &str,
        volumes: &[String],
    ) -> Result<Vec<u8>, RequestError> {
        let held = self.allocated(volumes).await?;
        Ok(self.vms.definition(name, held).await?)
    }

    /// Returns how many bytes a copy of each volume needs.
    pub(crate) async fn allocated(&self, volumes: &[String]) -> Result<Vec<(String, u64)>, RequestError> {
        let mut places = Vec::new();
        for volume in volumes {
            let record = self.claims.record_named(volume)?;
            places.push((volume.clone(), record.image.place, record.size_bytes));
        }
        blocking(move || {
            let held = places.into_iter().map(|(volume, place, size_bytes)| {
                // A device takes its whole size; the backing files of an image are found while it is copied.
                let taken = place.file().and_then(|path| images::allocated_bytes(Path::new(path)).ok());
                (volume, taken.map_or(size_bytes, |taken| taken.min(size_bytes)))
            });
            Ok(held.collect())
        })
        .await
    }

    /// Checks whether this host has what an arriving VM needs, once the images of its volumes are reserved. Returns on which of
    /// the requested terms its memory can come. The error says what is missing, and what to do about it.
    pub(crate) async fn check_arrival(
        self: &Arc<Self>,
        manifest: &[u8],
        wished: Terms,
    ) -> Result<Terms, MoveFault> {
        // N.B. The comparison comes first: it refuses a description that cannot be parsed before it reads anything of this host.
        let compared = self.vms.compare_files(manifest).await?;
        // Warnings were shown before the VM was offered.
        let (Differences { faults, .. }, _) = compared;
        if !faults.is_empty() {
            return Err(MoveFault::Unfit(faults.join("; ")));
        }
        let (held, terms) = self.vms.examine(manifest, wished).await?;
        let host = Arc::clone(self);
        blocking(move || host.check_space(&held)).await?;
        Ok(terms)
    }

    /// Checks whether arriving volumes fit into their stores. May block.
    fn check_space(&self, held: &[(String, u64)]) -> Result<(), RequestError> {
        let mut needed = BTreeMap::<String, u64>::new();
        for (volume, bytes) in held {
            let image = self.journal.read(|state| {
                let mut coming = state.unfinished().filter_map(|(_, known)| match &known.side {
                    Side::Incoming { volumes, .. } => Some(volumes),
                    _ => None,
                });
                coming
                    .find_map(|volumes| volumes.iter().find(|record| record.name == *volume))
                    .map(|record| record.image.clone())
            });
            // A device or an export was checked when it was reserved.
            let Some((image, path)) = image.as_ref().and_then(|image| Some((image, image.place.file()?)))
            else {
                continue;
            };
            // An image that was kept from an earlier residency has its space already.
            let taken = images::allocated_bytes(Path::new(path)).unwrap_or(0);
            *needed.entry(image.store.clone()).or_default() += bytes.saturating_sub(taken);
        }
        for (store, bytes) in needed {
            self.stores.get(&store)?.require_space(bytes)?;
        }
        Ok(())
    }
}
