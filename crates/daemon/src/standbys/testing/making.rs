//! Makes the volumes of a test, and deletes them.
//!
//! ```text
//!   made:     clone in the standby's folder ─► a second name in the store ─► in the journal ─► served
//!   deleted:  out of the journal, with the image ─► the name in the store, if it is of this clone ─► the clone
//! ```
//! Only what bears an identity of the test's record, or is the same file as its clone, is deleted.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use api::RemoveVolume;

use super::Testing;
use crate::error::RequestError;
use crate::host::blocking;
use crate::standbys::book::{TestRecord, TestVolume};
use crate::standbys::copy::{Input, delete_clone, name_clone, text};
use crate::standbys::promotion::{NewVolume, parse_point};
use crate::standbys::{Kept, Standbys};

impl Standbys {
    /// Makes everything of a test. The error says why that is not possible; what was made until then is there.
    pub(super) async fn make_test(
        self: &Arc<Self>,
        kept: &Arc<Kept>,
        testing: &Testing,
    ) -> Result<TestRecord, String> {
        let test = testing.record();
        let point = test.ordered_point.as_deref().and_then(|point| parse_point(kept, point));
        let answered = kept.copy.clone_point(point, Arc::clone(&testing.progress));
        let at = tokio::select! {
            answer = answered => answer.map_err(|_| "its files cannot be used".to_owned())??,
            () = testing.told_to_end() => return Err("it was ended".to_owned()),
        };
        let words = |error: RequestError| error.message();
        let paths = self.paths_of(kept, &test).map_err(words)?;
        let store = self.folder_of(&kept.config.store)?;
        let (id, named) = (kept.config.id.clone(), paths.clone());
        let names = blocking(move || {
            for (index, path) in named.iter().enumerate() {
                name_clone(&store, &id, index, path)
                    .map_err(|error| RequestError::storage("name the clone", path, &error))?;
            }
            Ok(())
        });
        names.await.map_err(words)?;
        for (volume, path) in test.volumes.iter().zip(&paths) {
            let new = new_volume(kept, volume);
            self.add_volume(new, path).await.map_err(words)?;
        }
        for volume in &test.volumes {
            self.volumes.lane(&volume.name).await.map_err(|error| RequestError::from(error).message())?;
        }
        Ok(TestRecord { point: Some(text(at)), ..test })
    }

    /// Deletes everything of a test. After an error some of it may be left.
    pub(super) async fn clear_test(&self, kept: &Kept, test: &TestRecord) -> Result<(), String> {
        let words = |error: RequestError| error.message();
        kept.copy.give(Input::EndClone);
        for volume in test.volumes.iter().filter(|volume| self.has_volume(&volume.volume)) {
            let how = RemoveVolume { force: true, keep_image: false, delete_image: true };
            let removed = Arc::clone(&self.volume_orders).remove_volume(volume.name.clone(), how).await;
            removed.map_err(words)?;
        }
        let paths = self.paths_of(kept, test).map_err(words)?;
        let (store, id) = (self.folder_of(&kept.config.store)?, kept.config.id.clone());
        let deleted = blocking(move || {
            let paths: Vec<&Path> = paths.iter().map(PathBuf::as_path).collect();
            delete_clone(&store, &id, &paths)
                .map_err(|error| RequestError::storage("delete the clone in", &store, &error))
        });
        deleted.await.map_err(words)
    }

    fn paths_of(&self, kept: &Kept, test: &TestRecord) -> Result<Vec<PathBuf>, RequestError> {
        test.volumes.iter().map(|volume| self.path_of(&kept.config.store, &volume.name)).collect()
    }
}

fn new_volume<'a>(kept: &'a Kept, volume: &'a TestVolume) -> NewVolume<'a> {
    NewVolume { store: &kept.config.store, name: &volume.name, identity: &volume.volume }
}
