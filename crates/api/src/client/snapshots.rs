//! The operations on snapshots.

use hyper::Method;

use super::{Client, ClientError};
use crate::{NewSnapshot, RevertVolumes, Volume};

impl Client {
    /// Takes snapshots of volumes at one instant, and returns them once they are served.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn take_snapshots(&self, order: &NewSnapshot) -> Result<Vec<Volume>, ClientError> {
        self.send(Method::POST, "/v1/snapshots", Some(order)).await
    }

    /// Reverts volumes to snapshots of them, and returns them once they are served.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::VolumeInUse`](crate::ErrorCode::VolumeInUse).
    pub async fn revert_volumes(&self, order: &RevertVolumes) -> Result<Vec<Volume>, ClientError> {
        self.send(Method::POST, "/v1/reverts", Some(order)).await
    }
}
