//! Images that migrations kept: lists them, and drops those that the administrator does not need.
//!
//! ```text
//!   drop:  the volume's name claimed ─► no program holds the file ─► its record goes, durably ─► the file goes
//! ```
//! A crash in between leaves a file that is listed as before, and that no incremental return uses. Dropping
//! it again completes the operation.

use std::path::Path;
use std::sync::Arc;

use api::{DropReplica, Replica};
use migration::custody::{Advice, Kind, Owner, Step, Word};
use migration::journal::{ImageLocation, Record, State};

use crate::custody::Custody;
use crate::error::RequestError;
use crate::host::{VolumeOrders, blocking};
use crate::images::inventory::{self, Kept};
use crate::images::replicas;
use crate::migrations::view::image_location;
use crate::volumes::registry::Claim;
use crate::volumes::views::answer;

impl VolumeOrders {
    /// Describes the kept images, by volume and age. Leaves out stores that do not answer.
    pub(crate) async fn describe_replicas(self: &Arc<Self>) -> Vec<Replica> {
        let found = self.find_kept().await;
        let data_dir = self.config.data_dir.clone();
        let described =
            tokio::task::spawn_blocking(move || found.iter().map(|kept| describe(&data_dir, kept)).collect());
        described.await.unwrap_or_default()
    }

    /// Deletes a kept image. Errors: [`RequestError::ReplicaNotFound`];
    /// [`RequestError::ReplicaInUse`], [`RequestError::Invalid`]: the image stays.
    pub(crate) async fn drop_replica(
        self: Arc<Self>,
        volume: String,
        which: DropReplica,
    ) -> Result<Replica, RequestError> {
        let found = self.find_kept().await;
        choose(&found, &volume, which.migration.as_deref())?;
        // N.B. A returning volume has its name claimed from before it looks for its replica until its arrival.
        let _claim = self.claim_replica(&volume)?;
        // A returning volume may have reused it meanwhile.
        let found = self.find_kept().await;
        let kept = choose(&found, &volume, which.migration.as_deref())?.clone();
        let data_dir = self.config.data_dir.clone();
        let (shown, kept) = blocking(move || Ok((describe(&data_dir, &kept), kept))).await?;
        let Some(path) = inventory::file_of(&kept) else {
            self.journal.commit(vec![Record::ReservationLifted { place: kept.image.place.clone() }]).await?;
            tracing::info!(%volume, place = %kept.image.place, "gave up the image that a migration kept");
            return Ok(shown);
        };
        let (data_dir, image, is_adopted) =
            (self.config.data_dir.clone(), kept.image.clone(), kept.image.is_adopted());
        let (custody, owner) = (self.custody.clone(), Owner::Administrator(Word::Plain));
        blocking(move || {
            if is_adopted {
                return Err(left_to_user(&custody, &path, &image, "existed before it was served in place"));
            }
            match delete(&custody, &data_dir, &path, &image, &owner) {
                Err(RequestError::Claimed { refused, .. }) if refused.claims.contains(&Kind::Exchanged) => {
                    let why = "is another file than the one that the migration kept under this name";
                    Err(left_to_user(&custody, &path, &image, why))
                }
                deleted => deleted,
            }
        })
        .await?;
        tracing::info!(%volume, migration = %kept.migration, image = %kept.image.place, "deleted a kept image");
        Ok(shown)
    }

    /// Deletes an image that no incremental return uses; no volume's name has to be claimed for that. Errors:
    /// [`RequestError::ReplicaInUse`], [`RequestError::PlaceTaken`], [`RequestError::Storage`]: the image stays.
    pub(crate) async fn drop_spare(&self, spare: &Kept) -> Result<(), RequestError> {
        let Some(path) = inventory::file_of(spare) else { return Ok(()) };
        let (data_dir, image) = (self.config.data_dir.clone(), spare.image.clone());
        let custody = self.custody.clone();
        blocking(move || delete(&custody, &data_dir, &path, &image, &Owner::Housekeeping)).await
    }

    pub(crate) async fn find_kept(self: &Arc<Self>) -> Vec<Kept> {
        let state = Arc::new(self.journal.read(State::clone));
        let names: Vec<String> = self.stores.iter().map(|store| store.name().to_owned()).collect();
        let looks = names.into_iter().map(|name| {
            let (host, state, asked) = (Arc::clone(self), Arc::clone(&state), name.clone());
            async move {
                let found = answer(&self.looks, move || {
                    inventory::in_store(host.stores.get(&asked).ok()?, &state).ok()
                });
                let found = found.await.flatten();
                if found.is_none() {
                    tracing::warn!(store = %name, "cannot examine the kept images in the store");
                }
                found.unwrap_or_default()
            }
        });
        let mut found = futures_util::future::join_all(looks).await.concat();
        let host = Arc::clone(self);
        let elsewhere = answer(&self.looks, move || inventory::elsewhere(&host.stores, &state));
        found.extend(elsewhere.await.unwrap_or_default());
        found.sort_by(|a, b| (&a.volume, a.migration).cmp(&(&b.volume, b.migration)));
        found
    }

    /// Claims the volume's name, so that it cannot return meanwhile.
    fn claim_replica(&self, volume: &str) -> Result<Claim, RequestError> {
        let in_use = || RequestError::ReplicaInUse {
            volume: volume.to_owned(),
            user: "another operation on the volume is under way; wait until it is served again".to_owned(),
        };
        match self.volumes.claim_new(volume) {
            Ok((claim, _)) => Ok(claim),
            Err(_) => self.volumes.claim(volume).map(|(claim, _)| claim).map_err(|_| in_use()),
        }
    }
}

fn choose<'a>(found: &'a [Kept], volume: &str, migration: Option<&str>) -> Result<&'a Kept, RequestError> {
    let of_volume: Vec<&Kept> = found.iter().filter(|kept| kept.volume == volume).collect();
    let fits = |kept: &&&Kept| migration.is_none_or(|id| kept.migration.to_string() == id);
    let chosen: Vec<&&Kept> = of_volume.iter().filter(fits).collect();
    let names =
        |kept: &[&Kept]| kept.iter().map(|kept| kept.migration.to_string()).collect::<Vec<_>>().join(", ");
    match chosen.as_slice() {
        [one] => Ok(one),
        [] => Err(RequestError::ReplicaNotFound { volume: volume.to_owned(), known: names(&of_volume) }),
        _ => Err(RequestError::Invalid(format!(
            "{} images of \"{volume}\" are kept; name one, --migration with one of {}, or give --all",
            of_volume.len(),
            names(&of_volume)
        ))),
    }
}

/// Returns why a kept image is not deleted by Sterna, and what to do. Blocks.
fn left_to_user(custody: &Custody, path: &Path, image: &ImageLocation, why: &str) -> RequestError {
    let owner = Owner::Administrator(Word::Plain);
    let path = path.display();
    let advice = match custody.check(Step::Advise(Advice::Delete), &owner, image) {
        Ok(()) => format!("if it is not needed: rm {path}"),
        Err(refused) => format!("and it is needed: {refused}"),
    };
    RequestError::Invalid(format!("{path} {why}, so it is not deleted; {advice}"))
}

/// Deletes an unused kept image. Blocks.
fn delete(
    custody: &Custody,
    data_dir: &Path,
    path: &Path,
    image: &ImageLocation,
    owner: &Owner,
) -> Result<(), RequestError> {
    custody.check(Step::Discard, owner, image)?;
    // N.B. The record is removed first: a return must never begin with an image that is half deleted.
    replicas::forget(data_dir, path).map_err(|error| RequestError::storage("forget", path, &error))?;
    Ok(custody.discard(image, owner)?)
}

fn describe(data_dir: &Path, kept: &Kept) -> Replica {
    let image = image_location(&kept.image);
    Replica {
        volume: kept.volume.clone(),
        migration: kept.migration.to_string(),
        went_to: kept.went_to.clone(),
        store: image.store,
        image: image.image,
        kind: image.kind,
        format: image.format,
        size_bytes: kept.size_bytes,
        allocated_bytes: kept.allocated_bytes,
        kept_unix_ms: kept.kept_unix_ms,
        shortens_return: inventory::file_of(kept).is_some_and(|path| replicas::is_untouched(data_dir, &path)),
    }
}
