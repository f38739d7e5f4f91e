//! Replicas: kept images that migrations have left at their sources.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::volume::{ImageFormat, ImageKind};

/// A kept image that a volume has left when it moved. It is fenced: nothing is served from it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Replica {
    /// Name of the volume that has left it.
    pub volume: String,
    /// The migration that has left it, for example `m7`. It holds the volume's content at that handover.
    pub migration: String,
    /// Where the volume went: a store, or `HOST:STORE` of another host; `None` if the daemon has forgotten that.
    pub went_to: Option<String>,
    /// Name of the store that it is in; `None` for an image that was served in place.
    pub store: Option<String>,
    /// Absolute path of the file or device, or the URI of the export.
    pub image: String,
    /// Whether it is a file, a device or an export.
    pub kind: ImageKind,
    /// The format of the image.
    pub format: ImageFormat,
    /// Size of the volume in bytes; `None` if that is not known.
    pub size_bytes: Option<u64>,
    /// Bytes that it takes in its store; `None` for a device or an export.
    pub allocated_bytes: Option<u64>,
    /// When the volume has left it, in milliseconds since 1970; `None` if that is not known.
    pub kept_unix_ms: Option<u64>,
    /// Whether a return of the volume can reuse it, so that only later writes are sent.
    pub shortens_return: bool,
}

/// Selects the image of a volume to delete; sent as the query of a DELETE.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct DropReplica {
    /// The migration that has left it, for example `m7`; optional if there is only one image.
    #[serde(default)]
    pub migration: Option<String>,
}
