//! Operations on the rights to use the API over TLS.

use std::sync::Arc;

use transport::HostId;

use super::blocking;
use crate::audit::Audit;
use crate::error::RequestError;
use crate::grants::Grants;
use crate::host::Parts;
use crate::journal::now_unix_ms;
use crate::sign_ins::SignIns;

/// Decides who may use the API over TLS, and who has used it.
pub(crate) struct Access {
    /// The record of orders and who gave them.
    pub(crate) audit: Audit,
    pub(crate) grants: Arc<Grants>,
    /// The browsers that may give orders on the page.
    pub(crate) sign_ins: Arc<SignIns>,
}

impl Access {
    pub(crate) fn new(parts: &Parts) -> Arc<Self> {
        let Parts { audit, grants, sign_ins, .. } = parts.clone();
        Arc::new(Self { audit, grants, sign_ins })
    }

    /// Describes who may use the API over TLS, and at which address.
    pub(crate) fn describe_access(&self) -> Result<api::Access, RequestError> {
        Ok(self.grants.describe()?)
    }

    pub(crate) async fn grant_access(
        self: Arc<Self>,
        order: api::NewGrant,
    ) -> Result<api::NewlyGranted, RequestError> {
        blocking(move || Ok(self.grants.grant(order, now_unix_ms())?)).await
    }

    /// Changes the rights of a client.
    pub(crate) async fn set_access(
        self: Arc<Self>,
        name: String,
        order: api::SetGrant,
    ) -> Result<api::Grant, RequestError> {
        blocking(move || Ok(self.grants.set(&name, order.role)?)).await
    }

    pub(crate) async fn revoke_access(self: Arc<Self>, name: String) -> Result<api::Grant, RequestError> {
        blocking(move || Ok(self.grants.revoke(&name)?)).await
    }

    /// Replaces the key of an invited client.
    pub(crate) async fn redeem_access(
        self: Arc<Self>,
        invited: HostId,
        order: api::RedeemGrant,
    ) -> Result<api::Grant, RequestError> {
        blocking(move || Ok(self.grants.redeem(invited, &order.key, now_unix_ms())?)).await
    }
}
