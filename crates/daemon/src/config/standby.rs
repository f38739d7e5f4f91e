//! What concerns the standbys of this host's volumes.

use serde::Deserialize;
use standby::asking::IfSilent;

/// The settings of all standbys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct StandbyConfig {
    /// What a start does if the host of a standby does not say whether that was promoted.
    pub if_silent: IfSilent,
}
