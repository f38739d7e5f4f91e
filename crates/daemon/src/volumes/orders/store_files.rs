//! The content of stores: lists all files, and deletes half-made targets on request.
//!
//! ```text
//!   drop:  the file is half-made, and unclaimed ─► no program has it open ─► still so ─► deleted, and its mark
//! ```

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use api::{FileRole, StoreContent, StoreFile};
use migration::custody::{Owner, Word};
use migration::journal::{ImageLocation, Place, ReservedContent, State};

use super::VolumeOrders;
use crate::custody::CustodyError;
use crate::error::{RequestError, StoreFileError, StoreFileObstacle, fenced};
use crate::host::blocking;
use crate::images::content;
use crate::images::half_made::{self, Marked};
use crate::stores::{Occupant, Store, StoreKind};
use crate::volumes::views::{answer_within, store_kind};

/// How long listing all files of a store may take: thousands of files on a slow disk.
const LOOK_MAX: Duration = Duration::from_secs(30);

impl VolumeOrders {
    /// Describes all files of a store. A store that cannot be read is described as such.
    pub(crate) async fn describe_content(
        self: &Arc<Self>,
        name: String,
    ) -> Result<StoreContent, RequestError> {
        let (kind, path) = store_kind(self.stores.get(&name)?);
        let host = Arc::clone(self);
        let asked = name.clone();
        let found = answer_within(LOOK_MAX, &self.looks, move || host.content_of(&asked)).await;
        let found = found.unwrap_or_else(|| Err("its disk does not answer".to_owned()));
        let ((files, files_left_out), problem) = match found {
            Ok(found) => (found, None),
            Err(problem) => ((Vec::new(), 0), Some(problem)),
        };
        Ok(StoreContent { store: name, kind, path, problem, files, files_left_out })
    }

    /// Deletes an unclaimed half-made target; returns what it was. After a [`RequestError::StoreFile`] it stays.
    pub(crate) async fn drop_half_made(
        self: Arc<Self>,
        store: String,
        file: String,
    ) -> Result<StoreFile, RequestError> {
        blocking(move || {
            let path = self.path_in_store(&store, &file)?;
            let error = |obstacle| StoreFileError { store: store.clone(), file: file.clone(), obstacle };
            let shown = self.half_made(&path).map_err(error)?;
            let image = ImageLocation::raw_file(store.clone(), crate::stores::path_text(&path)?);
            self.custody.discard(&image, &Owner::Administrator(Word::Plain)).map_err(
                |refused| match refused {
                    CustodyError::Refused { refused, .. } => {
                        RequestError::from(error(StoreFileObstacle::InUse(refused.to_string())))
                    }
                    failed @ CustodyError::Io { .. } => failed.into(),
                },
            )?;
            tracing::info!(%store, file = ?file, "deleted a half-made target");
            Ok(shown)
        })
        .await
    }

    /// Returns the path of a file in a store, which must be a usable folder. Blocks.
    pub(crate) fn path_in_store(&self, store: &str, file: &str) -> Result<PathBuf, RequestError> {
        let found = self.stores.get(store)?;
        let error = |obstacle| StoreFileError { store: store.to_owned(), file: file.to_owned(), obstacle };
        let StoreKind::Folder { folder, .. } = found.kind() else {
            return Err(error(StoreFileObstacle::NoFolder).into());
        };
        if file.is_empty() || file == "." || file == ".." || file.contains(['/', '\0']) {
            return Err(error(StoreFileObstacle::NoName).into());
        }
        found.require()?;
        Ok(folder.path().join(file))
    }

    /// Returns what the file at `path` is. Blocks.
    pub(crate) fn look_at_file(&self, path: &Path) -> Result<StoreFile, StoreFileObstacle> {
        let state = self.journal.read(State::clone);
        let found = content::of_file(path, &self.config.data_dir, &state);
        found
            .map_err(|error| StoreFileObstacle::NoImage(error.to_string()))?
            .ok_or(StoreFileObstacle::NotFound)
    }

    fn half_made(&self, path: &Path) -> Result<StoreFile, StoreFileObstacle> {
        let found = self.look_at_file(path)?;
        match found.role {
            FileRole::HalfMade if half_made::marked(path) == Marked::Other => {
                let why = "a file that has come to the name of one, whose mark names another file; if nobody needs it, delete it \
                           by hand, and the mark (.FILE.partial)";
                Err(StoreFileObstacle::NotHalfMade(why))
            }
            FileRole::HalfMade => Ok(found),
            role => Err(StoreFileObstacle::NotHalfMade(role_in_words(role))),
        }
    }

    /// Says of an image that its volume was given up here.
    fn name_given_up(&self, folder: &Path, file: &mut StoreFile) {
        let Some(given_up) = self.custody.given_up(&folder.join(&file.name)) else { return };
        file.role = FileRole::Unsettled;
        file.note = Some(format!(
            "given up for host {}: there, sterna standby reprotect makes it a standby; here, sterna volume divergence drop {} releases it",
            given_up.host, given_up.volume
        ));
        file.volume = Some(given_up.volume);
    }

    fn content_of(&self, name: &str) -> Result<(Vec<StoreFile>, u64), String> {
        let store = self.stores.get(name).map_err(|error| error.message())?;
        store.check().map_err(|problem| problem.to_string())?;
        let state = self.journal.read(State::clone);
        match store.kind() {
            StoreKind::Folder { folder, .. } => {
                let found = content::of_folder(folder.path(), &self.config.data_dir, &state);
                let (mut files, left_out) = found.map_err(|error| {
                    format!("the folder {} cannot be read: {error}", folder.path().display())
                })?;
                files.iter_mut().for_each(|file| self.name_given_up(folder.path(), file));
                Ok((files, left_out))
            }
            StoreKind::Single(place) => Ok((single(store, place, &state).into_iter().collect(), 0)),
        }
    }
}

/// Returns what is in a device or an export; `None`: nothing known.
fn single(store: &Store, place: &Place, state: &State) -> Option<StoreFile> {
    let fence = state.reservations.get(place);
    let (role, volume, migration) = match (store.occupant(state), fence) {
        (Some(Occupant::Volume(volume)), _) => (FileRole::Volume, Some(volume), None),
        (Some(Occupant::Migration(migration)), _) => (FileRole::Target, None, Some(migration)),
        (_, Some(fence)) => {
            let role = match fence.content {
                ReservedContent::HalfMade => FileRole::HalfMade,
                ReservedContent::Left | ReservedContent::Kept => FileRole::StaleReplica,
            };
            (role, Some(fence.volume.clone()), Some(fence.migration))
        }
        (_, None) => return None,
    };
    let record = volume.as_deref().and_then(|name| Some(&state.volume_named(name)?.1.record));
    Some(StoreFile {
        name: place.name().to_owned(),
        role,
        format: Some(api::ImageFormat::Raw),
        size_bytes: record.filter(|_| role == FileRole::Volume).map(|record| record.size_bytes),
        volume,
        migration: migration.map(|migration| migration.to_string()),
        allocated_bytes: None,
        modified_unix_ms: None,
        note: fence.filter(|_| role != FileRole::Volume && role != FileRole::Target).map(fenced),
    })
}

fn role_in_words(role: FileRole) -> &'static str {
    match role {
        FileRole::Volume => "the image of a volume",
        FileRole::Backing => "the backing file of another image",
        FileRole::Target => "what a migration fills",
        FileRole::Replica | FileRole::StaleReplica => "an image that a migration left (sterna replica drop)",
        FileRole::HalfMade => "one",
        FileRole::Unsettled => "being made or deleted",
        FileRole::Unclaimed => "an image",
        FileRole::Other => "something else",
    }
}
