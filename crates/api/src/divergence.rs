//! What a host has written and nobody has received, of volumes that it has given up after a promotion.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What only this host has of a volume that it has given up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Divergence {
    /// Its name: that of the volume. One that is not the only one with its name has a part of an identity in it.
    pub name: String,
    /// The volume.
    pub volume: String,
    /// The host that has promoted the volume's standby.
    pub host: String,
    /// Where it is.
    pub state: DivergenceState,
    /// The image, if it is in one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// The size of the volume.
    pub size_bytes: u64,
    /// The bytes of the blocks that nobody may have received; `None`: it is not known which they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// When the volume was given up, in milliseconds since 1970.
    pub given_up_unix_ms: u64,
    /// Why the image is not the standby's yet, although that was ordered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Where a divergence is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DivergenceState {
    /// In the image as the volume was given up.
    InImage,
    /// Beside the image, which has become that of a standby.
    Kept,
}

/// The position from which a piece of a divergence is asked for.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, utoipa::IntoParams,
)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct DivergenceFrom {
    /// What the piece before has named; zero at first.
    #[serde(default)]
    pub from: u64,
}

/// A piece of a divergence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DivergencePiece {
    /// The size of the volume.
    pub size_bytes: u64,
    /// The piece; `None`: there are no more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extent: Option<DivergenceExtent>,
    /// Where the next piece is; `None`: there are no more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<u64>,
}

/// Successive bytes of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DivergenceExtent {
    /// Where they are, in bytes.
    pub offset: u64,
    /// Their number.
    pub length: u64,
    /// The bytes as hexadecimal digits; `None`: zeroes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
}
