//! The operations about who may use the API over TLS.

use hyper::Method;

use super::exchange::Segment;
use super::{Client, ClientError};
use crate::{Access, Grant, NewGrant, NewlyGranted, PageLink, RedeemGrant, SetGrant};

impl Client {
    /// Returns the keys that may use the API over TLS, and where the daemon listens.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn access(&self) -> Result<Access, ClientError> {
        self.get("/v1/access").await
    }

    /// Grants a user access to the API over TLS.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::GrantExists`](crate::ErrorCode::GrantExists).
    pub async fn grant_access(&self, grant: &NewGrant) -> Result<NewlyGranted, ClientError> {
        self.send(Method::POST, "/v1/access", Some(grant)).await
    }

    /// Changes a user's role, from the user's next request on.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::GrantNotFound`](crate::ErrorCode::GrantNotFound).
    pub async fn set_access(&self, name: &str, change: &SetGrant) -> Result<Grant, ClientError> {
        self.send(Method::PATCH, &format!("/v1/access/{}", Segment(name)), Some(change)).await
    }

    /// Revokes a user's access, from the user's next request on.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::GrantNotFound`](crate::ErrorCode::GrantNotFound).
    pub async fn revoke_access(&self, name: &str) -> Result<Grant, ClientError> {
        self.send(Method::DELETE, &format!("/v1/access/{}", Segment(name)), None::<&()>).await
    }

    /// Redeems an access token, with whose key this client connects, and registers the client's own key.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::InvitationRefused`](crate::ErrorCode::InvitationRefused).
    pub async fn redeem_access(&self, redemption: &RedeemGrant) -> Result<Grant, ClientError> {
        self.send(Method::POST, "/v1/redemption", Some(redemption)).await
    }

    /// Returns a link with which one browser signs in to the page, with this client's rights.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::NotPermitted`](crate::ErrorCode::NotPermitted) if the page has no port.
    pub async fn page_link(&self) -> Result<PageLink, ClientError> {
        self.send(Method::POST, "/v1/page-links", None::<&()>).await
    }
}
