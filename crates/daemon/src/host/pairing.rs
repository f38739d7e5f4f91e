//! Operations about other hosts: making this one's identity, inviting, joining, forgetting.

use std::sync::Arc;
use std::time::SystemTime;

use super::{Host, blocking};
use crate::error::RequestError;

impl Host {
    /// Makes this host's identity.
    ///
    /// # Errors
    /// [`RequestError::Hosts`].
    pub(crate) async fn create_identity(
        self: Arc<Self>,
        order: api::NewIdentity,
    ) -> Result<api::Identity, RequestError> {
        blocking(move || {
            self.hosts.create_identity(&order.name)?;
            Ok(self.hosts.describe_identity()?)
        })
        .await
    }

    /// Makes an invitation.
    ///
    /// # Errors
    /// [`RequestError::Hosts`].
    pub(crate) async fn invite(
        self: Arc<Self>,
        order: api::NewInvitation,
    ) -> Result<api::Invitation, RequestError> {
        let token = self.hosts.invite(order.lifetime_s)?;
        let expires = token.expires().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Ok(api::Invitation {
            token: token.to_string(),
            addresses: token.addresses().to_vec(),
            expires_unix_ms: u64::try_from(expires.as_millis()).unwrap_or(u64::MAX),
        })
    }

    /// Redeems another host's invitation.
    ///
    /// # Errors
    /// [`RequestError::Hosts`].
    pub(crate) async fn join_host(self: Arc<Self>, order: api::JoinHost) -> Result<api::Peer, RequestError> {
        blocking(move || {
            let peer = self.hosts.join(&order.token, order.address)?;
            Ok(self.hosts.describe(&peer))
        })
        .await
    }

    /// Forgets another host.
    ///
    /// # Errors
    /// [`RequestError::Hosts`].
    pub(crate) async fn remove_host(self: Arc<Self>, name: String) -> Result<api::RemovedPeer, RequestError> {
        blocking(move || {
            let removed = self.hosts.remove(&name)?;
            Ok(api::RemovedPeer { name: removed.name, id: removed.id.to_string() })
        })
        .await
    }
}
