//! The operations about who may use the API over TLS.

use hyper::Method;

use super::exchange::Segment;
use super::{Client, ClientError};
use crate::{Access, Grant, NewGrant, NewlyGranted, RedeemGrant, SetGrant};

impl Client {
    /// Who may use the API over TLS, and where.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn access(&self) -> Result<Access, ClientError> {
        self.get("/v1/access").await
    }

    /// Lets somebody use the API over TLS.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::GrantExists`](crate::ErrorCode::GrantExists).
    pub async fn grant_access(&self, grant: &NewGrant) -> Result<NewlyGranted, ClientError> {
        self.send(Method::POST, "/v1/access", Some(grant)).await
    }

    /// Changes what somebody may do; holds from his next request on.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::GrantNotFound`](crate::ErrorCode::GrantNotFound).
    pub async fn set_access(&self, name: &str, change: &SetGrant) -> Result<Grant, ClientError> {
        self.send(Method::PATCH, &format!("/v1/access/{}", Segment(name)), Some(change)).await
    }

    /// Lets somebody in no more; holds from his next request on.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::GrantNotFound`](crate::ErrorCode::GrantNotFound).
    pub async fn revoke_access(&self, name: &str) -> Result<Grant, ClientError> {
        self.send(Method::DELETE, &format!("/v1/access/{}", Segment(name)), None::<&()>).await
    }

    /// Redeems an invitation, by whose key this client connects: it is known by another key from then on.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::InvitationRefused`](crate::ErrorCode::InvitationRefused).
    pub async fn redeem_access(&self, redemption: &RedeemGrant) -> Result<Grant, ClientError> {
        self.send(Method::POST, "/v1/redemption", Some(redemption)).await
    }
}
