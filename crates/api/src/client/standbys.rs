//! The operations on standbys.

use hyper::Method;

use super::exchange::Segment;
use super::{Client, ClientError};
use crate::{
    Divergence, DivergencePiece, ExportStandby, NewStandby, PromoteStandby, RemoveStandby, ReprotectStandby,
    SeedStandby, SetStandby, Standby, TestStandby,
};

impl Client {
    /// Lists the standbys of both roles, by name.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn standbys(&self) -> Result<Vec<Standby>, ClientError> {
        self.get("/v1/standbys").await
    }

    /// Orders a standby.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn add_standby(&self, order: &NewStandby) -> Result<Standby, ClientError> {
        self.send(Method::POST, "/v1/standbys", Some(order)).await
    }

    /// Returns the standby of this name.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::StandbyNotFound`](crate::ErrorCode::StandbyNotFound).
    pub async fn standby(&self, name: &str) -> Result<Standby, ClientError> {
        self.get(&format!("/v1/standbys/{}", Segment(name))).await
    }

    /// Changes a standby at its source.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::StandbyNotFound`](crate::ErrorCode::StandbyNotFound).
    pub async fn set_standby(&self, name: &str, change: &SetStandby) -> Result<Standby, ClientError> {
        self.send(Method::PATCH, &format!("/v1/standbys/{}", Segment(name)), Some(change)).await
    }

    /// Removes a standby; returns what it was.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::StandbyNotFound`](crate::ErrorCode::StandbyNotFound).
    pub async fn remove_standby(&self, name: &str, how: RemoveStandby) -> Result<Standby, ClientError> {
        let path = format!("/v1/standbys/{}?force={}", Segment(name), how.force);
        self.send(Method::DELETE, &path, None::<&()>).await
    }

    /// Promotes a standby that the daemon's host keeps.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::StandbyNotFound`](crate::ErrorCode::StandbyNotFound), [`ErrorCode::StandbyRefused`](crate::ErrorCode::StandbyRefused).
    pub async fn promote_standby(&self, name: &str, order: &PromoteStandby) -> Result<Standby, ClientError> {
        self.send(Method::POST, &format!("/v1/standbys/{}/promote", Segment(name)), Some(order)).await
    }

    /// Turns the direction of a promoted standby round: the host that had the volumes before keeps a standby of them.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::StandbyRefused`](crate::ErrorCode::StandbyRefused), [`ErrorCode::HostRefused`](crate::ErrorCode::HostRefused).
    pub async fn reprotect_standby(
        &self,
        name: &str,
        order: &ReprotectStandby,
    ) -> Result<Standby, ClientError> {
        self.send(Method::POST, &format!("/v1/standbys/{}/reprotect", Segment(name)), Some(order)).await
    }

    /// Lists what only the daemon's host has of volumes that it has given up.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn divergences(&self) -> Result<Vec<Divergence>, ClientError> {
        self.get("/v1/divergences").await
    }

    /// Returns a piece of a divergence, from the position on that the piece before has named.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::StandbyNotFound`](crate::ErrorCode::StandbyNotFound).
    pub async fn divergence_piece(&self, name: &str, from: u64) -> Result<DivergencePiece, ClientError> {
        self.get(&format!("/v1/divergences/{}?from={from}", Segment(name))).await
    }

    /// Releases a divergence: what is kept of it is deleted.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::StandbyNotFound`](crate::ErrorCode::StandbyNotFound).
    pub async fn drop_divergence(&self, name: &str) -> Result<Divergence, ClientError> {
        self.send(Method::DELETE, &format!("/v1/divergences/{}", Segment(name)), None::<&()>).await
    }

    /// Has all blocks of a standby compared with those of its volumes, which are at the daemon's host. The standby shows how far it is.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::StandbyNotFound`](crate::ErrorCode::StandbyNotFound), [`ErrorCode::StandbyRefused`](crate::ErrorCode::StandbyRefused).
    pub async fn check_standby(&self, name: &str) -> Result<Standby, ClientError> {
        self.send(Method::POST, &format!("/v1/standbys/{}/check", Segment(name)), None::<&()>).await
    }

    /// Begins a standby that the daemon's host keeps with images from its store.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::StandbyNotFound`](crate::ErrorCode::StandbyNotFound), [`ErrorCode::StandbyRefused`](crate::ErrorCode::StandbyRefused).
    pub async fn seed_standby(&self, name: &str, order: &SeedStandby) -> Result<Standby, ClientError> {
        self.send(Method::POST, &format!("/v1/standbys/{}/seed", Segment(name)), Some(order)).await
    }

    /// Begins to export a standby whose volumes are at the daemon's host. The standby shows how far it is.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::StandbyNotFound`](crate::ErrorCode::StandbyNotFound), [`ErrorCode::StandbyRefused`](crate::ErrorCode::StandbyRefused).
    pub async fn export_standby(&self, name: &str, order: &ExportStandby) -> Result<Standby, ClientError> {
        self.send(Method::POST, &format!("/v1/standbys/{}/export", Segment(name)), Some(order)).await
    }

    /// Cancels the export of a standby.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::StandbyNotFound`](crate::ErrorCode::StandbyNotFound), [`ErrorCode::StandbyRefused`](crate::ErrorCode::StandbyRefused).
    pub async fn cancel_export(&self, name: &str) -> Result<Standby, ClientError> {
        self.send(Method::DELETE, &format!("/v1/standbys/{}/export", Segment(name)), None::<&()>).await
    }

    /// Begins a test of a standby that the daemon's host keeps.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::StandbyNotFound`](crate::ErrorCode::StandbyNotFound), [`ErrorCode::StandbyRefused`](crate::ErrorCode::StandbyRefused).
    pub async fn test_standby(&self, name: &str, order: &TestStandby) -> Result<Standby, ClientError> {
        self.send(Method::POST, &format!("/v1/standbys/{}/test", Segment(name)), Some(order)).await
    }

    /// Ends the test of a standby.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::StandbyNotFound`](crate::ErrorCode::StandbyNotFound).
    pub async fn end_standby_test(&self, name: &str) -> Result<Standby, ClientError> {
        self.send(Method::DELETE, &format!("/v1/standbys/{}/test", Segment(name)), None::<&()>).await
    }
}
