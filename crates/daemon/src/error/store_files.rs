//! Why a file in a store does not become a volume, or is not deleted.

use api::ErrorCode;

/// Why a file in a store is left as it is, and what to do.
#[derive(Debug, thiserror::Error)]
#[error("the file {} in store \"{store}\" {obstacle}{}", spelled(.file), advice(.store, .file, .obstacle))]
pub(crate) struct StoreFileError {
    pub(crate) store: String,
    pub(crate) file: String,
    pub(crate) obstacle: StoreFileObstacle,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum StoreFileObstacle {
    #[error("does not exist")]
    NotFound,
    #[error("is no name of a file in it: write STORE/FILE as sterna store scan does")]
    NoName,
    #[error("is no file: the store takes one volume, and is no folder")]
    NoFolder,
    #[error("is the volume \"{0}\"; see: sterna volume show {0}")]
    OfVolume(String),
    #[error("is being filled by {0}; see: sterna migration show {0}")]
    OfMigration(String),
    #[error("is the backing file of another image: {0}; writes of a guest would damage that image")]
    Backing(String),
    #[error("is a half-made target: parts of the disk are missing")]
    HalfMade,
    #[error("is the old copy of volume \"{volume}\" that {migration} left")]
    Replica { volume: String, migration: String },
    #[error("is being made or deleted; if that was interrupted, the next start of the daemon completes it")]
    Unsettled,
    #[error("is no image that can be served: {0}")]
    NoImage(String),
    #[error("is no half-made target but {0}, and is not deleted")]
    NotHalfMade(&'static str),
    #[error("is in use: {0}")]
    InUse(String),
}

impl StoreFileError {
    pub(super) fn code(&self) -> ErrorCode {
        match &self.obstacle {
            StoreFileObstacle::NotFound => ErrorCode::ImageNotFound,
            StoreFileObstacle::NoName | StoreFileObstacle::NoFolder => ErrorCode::InvalidRequest,
            StoreFileObstacle::OfVolume(_)
            | StoreFileObstacle::OfMigration(_)
            | StoreFileObstacle::Backing(_)
            | StoreFileObstacle::Unsettled
            | StoreFileObstacle::InUse(_) => ErrorCode::ImageInUse,
            StoreFileObstacle::HalfMade
            | StoreFileObstacle::Replica { .. }
            | StoreFileObstacle::NoImage(_) => ErrorCode::ImageUnsuitable,
            StoreFileObstacle::NotHalfMade(_) => ErrorCode::NotHalfMade,
        }
    }
}

/// Returns what to do, if the obstacle does not say it.
fn advice(store: &str, file: &str, obstacle: &StoreFileObstacle) -> String {
    match obstacle {
        StoreFileObstacle::NotFound | StoreFileObstacle::NotHalfMade(_) => {
            format!("; see: sterna store scan {store}")
        }
        StoreFileObstacle::NoFolder => {
            format!(
                "; to make a volume there: sterna volume create NAME --store {store}; to give up the image that a migration \
                 left: sterna store release {store}"
            )
        }
        StoreFileObstacle::HalfMade => format!(
            "; if it is not needed: sterna store drop {store}/{}; if it is the right image: sterna volume add NAME --image PATH \
             --fenced",
            spelled(file)
        ),
        StoreFileObstacle::Replica { .. } => {
            "; see: sterna replica list; to serve it anyway: sterna volume add NAME --image PATH".to_owned()
        }
        _ => String::new(),
    }
}

/// Returns a name in a form that can be printed and typed.
fn spelled(file: &str) -> String {
    let is_plain = file.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-+".contains(&byte));
    if is_plain { file.to_owned() } else { format!("{file:?}") }
}
