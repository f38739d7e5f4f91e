//! Accepts what has the name of an image by now as that image, by order. `migration::named_image` decides from the journal alone for
//! which images an order can do that.
//!
//! ```text
//!   --exchanged          ─► nothing has the image open ─► recorded, durably ─► what waits for the image continues
//!   --exchanged --force  ─► recorded, durably ─► promoted, or taken back
//! ```

use std::sync::Arc;
use std::time::Duration;

use migration::custody::Owner;
use migration::journal::{ImageLocation, Moved, VolumeRecord};
use migration::named_image::{self, NamedImage, Role};
use migration::{MigrationId, StayKey, VolumeId};

use crate::error::RequestError;
use crate::host::{Ownership, blocking};
use crate::volumes::registry::Service;

/// How long it may take until what waits for the image has found it: it is tried again every few seconds.
const TAKEN_MAX: Duration = Duration::from_secs(15);
/// How often it is looked meanwhile.
const TAKEN_POLL: Duration = Duration::from_millis(50);

impl Ownership {
    /// Lets what waits for the image of a volume continue with what has the image's name.
    pub(crate) async fn take_exchanged(self: Arc<Self>, name: String) -> Result<api::Volume, RequestError> {
        let Some(NamedImage { volume, image, role }) = self.named_image(&name)? else {
            // It is at another host, or unknown.
            self.claims.record_named(&name)?;
            return Err(RequestError::VolumeNotFound(name));
        };
        match role {
            Role::Served => self.take_exchanged_image(&name, volume, image).await?,
            Role::Reservoir(left) => self.take_exchanged_reservoir(&name, *left).await?,
            Role::Left(migration) => {
                if !self.migrations.obstacles().contains_key(&migration) {
                    let text = format!(
                        "\"{name}\" has left by {migration}, and nothing waits for its image here: to serve the volume here from \
                         what has the image's name: sterna volume promote {name} --force --exchanged"
                    );
                    return Err(RequestError::Invalid(text));
                }
                require_other(&name, self.accept(&name, Owner::Migration(migration), &image).await?)?;
                self.await_no_obstacle(migration).await;
            }
            Role::Copy(migration) => {
                require_other(&name, self.take_exchanged_copy(&name).await?)?;
                self.await_no_obstacle(migration).await;
            }
        }
        self.views.describe_volume(&name).await
    }

    /// Accepts what has the name of the image of a complete copy that waits for its source. Returns whether it was another one.
    pub(crate) async fn take_exchanged_copy(&self, name: &str) -> Result<bool, RequestError> {
        let migration = match self.named_image(name)? {
            Some(NamedImage { image, role: Role::Copy(migration), .. }) => {
                let is_open = match self.volumes.service(name) {
                    Some(Service::Arriving(..)) => true,
                    Some(_) => self.volumes.arrival_of(name) == Some(migration),
                    None => false,
                };
                if !is_open {
                    return self.accept(name, Owner::Migration(migration), &image).await;
                }
                migration
            }
            _ => {
                let text = format!(
                    "\"{name}\" is no copy that waits here for its source: give --exchanged without --force"
                );
                return Err(RequestError::Invalid(text));
            }
        };
        let text = format!(
            "migration {migration} has the image of \"{name}\" open with which it began: there is no other image to accept"
        );
        Err(RequestError::Invalid(text))
    }

    /// Durably makes what has the name of an image the image of `name`. Returns whether it was another one.
    pub(crate) async fn accept(
        &self,
        name: &str,
        owner: Owner,
        image: &ImageLocation,
    ) -> Result<bool, RequestError> {
        let (custody, place) = (self.custody.clone(), image.place.clone());
        let is_other = blocking(move || Ok(custody.accept(&owner, &place)?)).await?;
        if is_other {
            tracing::warn!(
                volume = %name, image = %image.place,
                "by order, the file or device that has the name of the volume's image is its image from here on"
            );
        }
        Ok(is_other)
    }

    fn named_image(&self, name: &str) -> Result<Option<NamedImage>, RequestError> {
        let found = self.journal.read(|state| named_image::named_image(state, name));
        found.map_err(|refused| {
            RequestError::Invalid(format!("no other image is accepted for \"{name}\": {refused}"))
        })
    }

    /// Serves a volume from what has the name of its image.
    async fn take_exchanged_image(
        &self,
        name: &str,
        volume: VolumeId,
        image: ImageLocation,
    ) -> Result<(), RequestError> {
        if let Some(Service::Serving(_)) = self.volumes.service(name) {
            let text = format!(
                "\"{name}\" is served from the image that it was opened with: there is no other image to accept"
            );
            return Err(RequestError::Invalid(text));
        }
        require_other(name, self.accept(name, Owner::Volume(volume), &image).await?)?;
        let deadline = tokio::time::Instant::now() + TAKEN_MAX;
        while !matches!(self.volumes.service(name), Some(Service::Serving(_)))
            && tokio::time::Instant::now() < deadline
        {
            // Another task tries to serve the volume again; this one only waits for that.
            tokio::time::sleep(TAKEN_POLL).await;
        }
        Ok(())
    }

    /// Lets another host read missing blocks from what has the name of the image that a volume has left.
    async fn take_exchanged_reservoir(&self, name: &str, left: Moved) -> Result<(), RequestError> {
        let migration = left.migration;
        if !self.migrations.obstacles().contains_key(&migration) {
            let text = format!(
                "host \"{}\" reads the missing blocks of \"{name}\" from the image that the volume left: there is no other \
                 image to accept",
                left.host_name
            );
            return Err(RequestError::Invalid(text));
        }
        let key = StayKey { volume: left.volume.record.volume, stay: left.volume.stay };
        let (custody, chronicles, image) =
            (self.custody.clone(), self.chronicles.clone(), left.volume.record.image.clone());
        let place = image.place.clone();
        let is_taken = blocking(move || {
            let is_other = custody.accept(&Owner::Migration(migration), &image.place)?;
            // N.B. Both records are tried: an earlier order may have ended between them.
            Ok(chronicles.accept_left(key, &image) || is_other)
        });
        if !is_taken.await? {
            let text = format!("the image is the one that it was; see: sterna migration show {migration}");
            return Err(RequestError::Invalid(text));
        }
        tracing::warn!(
            volume = %name, image = %place,
            "by order, the file or device that has the name of the image that the volume left is that image from here on"
        );
        self.await_no_obstacle(migration).await;
        Ok(())
    }

    /// Waits until a migration has found its image, which another task tries again and again.
    async fn await_no_obstacle(&self, migration: MigrationId) {
        let deadline = tokio::time::Instant::now() + TAKEN_MAX;
        while self.migrations.obstacles().contains_key(&migration) && tokio::time::Instant::now() < deadline {
            tokio::time::sleep(TAKEN_POLL).await;
        }
    }
}

/// Refuses an order that has nothing to accept.
fn require_other(name: &str, is_other: bool) -> Result<(), RequestError> {
    let text = || format!("the image of \"{name}\" is the one that it was; see: sterna volume show {name}");
    if is_other { Ok(()) } else { Err(RequestError::Invalid(text())) }
}

/// Adds to the error of an image that is gone what leads out.
pub(crate) fn lost_image(record: &VolumeRecord, error: RequestError) -> RequestError {
    if error.code() != api::ErrorCode::ImageNotFound {
        return error;
    }
    RequestError::ImageLost {
        volume: record.name.clone(),
        path: record.image.place.name().into(),
        size_bytes: record.size_bytes,
    }
}
