//! The part of a dry run about sources on file systems that take no writes.
//!
//! ```text
//!   the image's file system ─► takes writes: nothing to say
//!                         └──► read-only ─► a flush of the image ─┬─ succeeds ─► a warning: the image keeps its name
//!                                                                 └─ fails ────► a refusal: no handover without a flush
//! ```

use std::io;
use std::path::{Path, PathBuf};

use api::MigrationPlan;
use migration::journal::VolumeRecord;

use super::Draw as _;
use crate::error::RequestError;
use crate::host::{MigrationOrders, blocking};
use crate::stores::is_read_only;

/// What a migration away from an image must expect of its file system.
enum Source {
    /// It takes writes, or it is no file.
    Usual,
    /// It takes no writes, and a flush succeeds.
    ReadOnly,
    /// It takes no writes, and a flush fails.
    Failing(io::Error),
}

impl MigrationOrders {
    /// Adds to the plan what fails because a source takes no writes.
    pub(crate) async fn plan_read_only(&self, records: &[VolumeRecord], plan: &mut MigrationPlan) {
        for record in records {
            let Some(path) = record.image.place.file().map(PathBuf::from) else { continue };
            let looked_at = path.clone();
            match blocking(move || Ok(look(&looked_at))).await {
                Ok(Source::Usual) | Err(_) => {}
                Ok(Source::ReadOnly) => plan.warnings.push(format!(
                    "{} is on a file system that takes no writes: writes of guests fail there, and after the migration the old \
                     image of \"{}\" keeps its name: it cannot be renamed or deleted",
                    path.display(),
                    record.name
                )),
                Ok(Source::Failing(error)) => plan.refuse(&RequestError::ImageUnsuitable {
                    detail: format!(
                        "its file system takes no writes, and a flush fails ({error}): without a flush no volume is handed over, \
                         whatever the strategy; repair the file system and mount it again, or copy the image by hand and serve \
                         the copy: sterna volume add"
                    ),
                    path,
                }),
            }
        }
    }
}

/// Examines the file system of an image. Blocks.
fn look(path: &Path) -> Source {
    // An image that cannot be examined is a problem of its volume, which others report.
    if !is_read_only(path).unwrap_or(false) {
        return Source::Usual;
    }
    match std::fs::File::open(path).and_then(|file| file.sync_all()) {
        Ok(()) => Source::ReadOnly,
        Err(error) => Source::Failing(error),
    }
}
