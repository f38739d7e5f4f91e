//! Replicas: images that migrations left behind because somebody wanted them kept.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::volume::{ImageFormat, ImageKind};

/// An image that a volume left behind when it moved, and that was kept. It is fenced: nothing is served from it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Replica {
    /// Name of the volume.
    pub volume: String,
    /// The migration that left it, for example `m7`: it holds what the volume was then.
    pub migration: String,
    /// Where the volume went: a store, or `HOST:STORE` of another host; `None` if the daemon has forgotten that.
    pub went_to: Option<String>,
    /// Name of the store that it is in; `None` for an image that was served in place.
    pub store: Option<String>,
    /// Absolute path of the file or device, or the URI of the export.
    pub image: String,
    /// What it is.
    pub kind: ImageKind,
    /// How the volume's bytes lie in it.
    pub format: ImageFormat,
    /// Size of the volume in bytes; `None` if that is not known.
    pub size_bytes: Option<u64>,
    /// Bytes that it takes in its store; `None` for a device or an export.
    pub allocated_bytes: Option<u64>,
    /// When it was left, in milliseconds since 1970; `None` if that is not known.
    pub kept_unix_ms: Option<u64>,
    /// Whether the volume's way home from another host begins with it: only what was written since is sent then.
    pub shortens_return: bool,
}

/// Which image of a volume is to be deleted; sent as the query of a DELETE.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct DropReplica {
    /// The migration that left it, for example `m7`; it may be left out if there is only one.
    #[serde(default)]
    pub migration: Option<String>,
}
