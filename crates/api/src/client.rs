//! A client of the API, over a unix socket or a [`Connect`] of the program. It makes one connection for each request, which costs
//! tens of microseconds over a socket, and two round trips over TLS.

mod access;
mod evacuation;
mod exchange;
mod snapshots;
mod standbys;
mod vms;
mod way;

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::{Method, StatusCode};
use serde::Serialize;
use serde::de::DeserializeOwned;

use self::exchange::{Answer, Segment, exchange};
use self::way::Way;
pub use self::way::{Connect, Connecting, Stream};
use crate::{
    Address, AttachVolume, DetachVolume, DetachedVolume, DropReplica, ErrorCode, ErrorDetail, Host, Identity,
    Invitation, JoinHost, MigrateVolume, Migration, MigrationHistory, MigrationPlan, NewIdentity,
    NewInvitation, NewVolume, NoticeDestination, Overview, Peer, PromoteVolume, RESPONSE_BYTES_MAX,
    Readiness, RemovePeer, RemoveVolume, RemovedPeer, RemovedVolume, Replica, ResizeVolume, SetMigration,
    SetPeer, Store, StoreContent, StoreFile, Volume, Watch, YieldVolume,
};

/// A client of one daemon.
#[derive(Clone)]
pub struct Client {
    way: Way,
    late: Option<Late>,
}

/// A callback for answers that take long.
#[derive(Clone)]
struct Late {
    after: Duration,
    tell: Arc<dyn Fn(&str) + Send + Sync>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("address", &self.address()).finish_non_exhaustive()
    }
}

/// Why a request has no usable answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No daemon listens at the address, or it refuses this client.
    #[error("no daemon answers at {address}")]
    Unreachable {
        /// The address of the daemon, as users write it.
        address: String,
        /// The error of the system.
        source: std::io::Error,
    },
    /// The connection broke before the answer was complete: the request may have been carried out or not.
    #[error("the connection to the daemon broke before it had answered")]
    Broken(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The answer is larger than [`RESPONSE_BYTES_MAX`].
    #[error("the daemon's answer is larger than {RESPONSE_BYTES_MAX} bytes")]
    TooLarge,
    /// The answer is not JSON of the expected shape.
    #[error("the daemon's answer (status {status}) cannot be read")]
    Malformed {
        /// HTTP status of the answer.
        status: u16,
        /// The position of the first difference.
        source: serde_json::Error,
    },
    /// The daemon has refused the request.
    #[error("{}", .0.message)]
    Refused(ErrorDetail),
}

impl ClientError {
    /// Returns the daemon's code, if the daemon has refused the request.
    pub fn code(&self) -> Option<ErrorCode> {
        match self {
            Self::Refused(detail) => Some(detail.code),
            _ => None,
        }
    }
}

impl Client {
    /// Returns a client of the daemon at `address`. It connects with each request.
    pub fn new(address: Address) -> Self {
        Self { way: Way::Unix(address), late: None }
    }

    /// Returns a client of the daemon that `connect` reaches. It connects with each request.
    pub fn over(connect: Arc<dyn Connect>) -> Self {
        Self { way: Way::Other(connect), late: None }
    }

    /// Returns the same client without the callback for late answers.
    #[must_use]
    pub fn never_late(&self) -> Self {
        Self { way: self.way.clone(), late: None }
    }

    /// Calls `tell` once for each request that has no answer after the time `after`. Requests that wait on purpose
    /// ([`Watch::wait_ms`]) do not count.
    #[must_use]
    pub fn when_late(self, after: Duration, tell: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Self { late: Some(Late { after, tell: Arc::new(tell) }), ..self }
    }

    /// Returns the address of the daemon, as users write it.
    pub fn address(&self) -> String {
        self.way.to_string()
    }

    /// Returns the daemon's description.
    ///
    /// # Errors
    /// [`ClientError`], as all methods.
    pub async fn host(&self) -> Result<Host, ClientError> {
        self.get("/v1/host").await
    }

    /// Returns the whole host at a glance.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn overview(&self) -> Result<Overview, ClientError> {
        self.get("/v1/overview").await
    }

    /// Returns the daemon's problems.
    ///
    /// # Errors
    /// [`ClientError`]; problems of the daemon are no error.
    pub async fn readiness(&self) -> Result<Readiness, ClientError> {
        self.ask(Method::GET, "/ready", None::<&()>).await?.parse_also(StatusCode::SERVICE_UNAVAILABLE)
    }

    /// Lists where notices go.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn notices(&self) -> Result<Vec<NoticeDestination>, ClientError> {
        self.get("/v1/notices").await
    }

    /// Sends a notice to each destination, and returns them with what has become of it.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::InvalidRequest`]: there is no destination.
    pub async fn test_notices(&self) -> Result<Vec<NoticeDestination>, ClientError> {
        self.send(Method::POST, "/v1/notices/test", None::<&()>).await
    }

    /// Returns the figures of the daemon, in Prometheus' text format.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn metrics(&self) -> Result<String, ClientError> {
        self.ask(Method::GET, "/metrics", None::<&()>).await?.text()
    }

    /// Lists the stores, by name.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn stores(&self) -> Result<Vec<Store>, ClientError> {
        self.get("/v1/stores").await
    }

    /// Lists the volumes, by name.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn volumes(&self) -> Result<Vec<Volume>, ClientError> {
        self.get("/v1/volumes").await
    }

    /// Returns the volume of this name.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::VolumeNotFound`].
    pub async fn volume(&self, name: &str) -> Result<Volume, ClientError> {
        self.get(&format!("/v1/volumes/{}", Segment(name))).await
    }

    /// Gives up the old copy that a migration has left in a store for one volume.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::StoreNotFound`].
    pub async fn release_store(&self, name: &str) -> Result<Store, ClientError> {
        self.send(Method::POST, &format!("/v1/stores/{}/release", Segment(name)), None::<&()>).await
    }

    /// Lists the files of a store.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::StoreNotFound`]. An unreadable store is no error.
    pub async fn store_content(&self, name: &str) -> Result<StoreContent, ClientError> {
        self.get(&format!("/v1/stores/{}/files", Segment(name))).await
    }

    /// Deletes a half-made target without an owner, and returns its description.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::ImageNotFound`], [`ErrorCode::NotHalfMade`].
    pub async fn drop_half_made(&self, store: &str, file: &str) -> Result<StoreFile, ClientError> {
        let path = format!("/v1/stores/{}/files/{}", Segment(store), Segment(file));
        self.send(Method::DELETE, &path, None::<&()>).await
    }

    /// Makes a volume, and returns it once it is served, which includes copying its image.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn create_volume(&self, volume: &NewVolume) -> Result<Volume, ClientError> {
        self.send(Method::POST, "/v1/volumes", Some(volume)).await
    }

    /// Makes a volume larger, and returns it once new connections get the new size.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::CannotShrink`], [`ErrorCode::CannotGrow`].
    pub async fn resize_volume(&self, name: &str, order: &ResizeVolume) -> Result<Volume, ClientError> {
        self.send(Method::POST, &format!("/v1/volumes/{}/resize", Segment(name)), Some(order)).await
    }

    /// Makes this host the owner of a volume, and returns it once it is served.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::NotPrepared`], [`ErrorCode::TicketRefused`].
    pub async fn promote_volume(&self, name: &str, order: &PromoteVolume) -> Result<Volume, ClientError> {
        self.send(Method::POST, &format!("/v1/volumes/{}/promote", Segment(name)), Some(order)).await
    }

    /// Changes a migration that is under way.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::NotMigrating`].
    pub async fn set_migration(&self, id: &str, order: &SetMigration) -> Result<Migration, ClientError> {
        self.send(Method::PATCH, &format!("/v1/migrations/{}", Segment(id)), Some(order)).await
    }

    /// Pauses the copying of a migration.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::NotMigrating`].
    pub async fn pause_migration(&self, id: &str) -> Result<Migration, ClientError> {
        self.send(Method::POST, &format!("/v1/migrations/{}/pause", Segment(id)), None::<&()>).await
    }

    /// Resumes a paused migration.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::NotMigrating`].
    pub async fn resume_migration(&self, id: &str) -> Result<Migration, ClientError> {
        self.send(Method::POST, &format!("/v1/migrations/{}/resume", Segment(id)), None::<&()>).await
    }

    /// Removes a volume, and returns what was done with its image.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::VolumeInUse`], [`ErrorCode::AlreadyMigrating`].
    pub async fn remove_volume(&self, name: &str, how: RemoveVolume) -> Result<RemovedVolume, ClientError> {
        let RemoveVolume { force, keep_image, delete_image, only_forwarding } = how;
        let query = format!(
            "force={force}&keep_image={keep_image}&delete_image={delete_image}&only_forwarding={only_forwarding}"
        );
        let path = format!("/v1/volumes/{}?{query}", Segment(name));
        self.send(Method::DELETE, &path, None::<&()>).await
    }

    /// Lets another host offer a volume to its clients, and returns the volume once they can connect there.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::HostNotFound`], [`ErrorCode::HostRefused`], [`ErrorCode::HostUnreachable`].
    pub async fn attach_volume(&self, name: &str, order: &AttachVolume) -> Result<Volume, ClientError> {
        self.send(Method::POST, &format!("/v1/volumes/{}/attach", Segment(name)), Some(order)).await
    }

    /// Ends the attachment of a volume at a host.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::VolumeInUse`], [`ErrorCode::HostRefused`], [`ErrorCode::HostUnreachable`].
    pub async fn detach_volume(
        &self,
        name: &str,
        order: &DetachVolume,
    ) -> Result<DetachedVolume, ClientError> {
        self.send(Method::POST, &format!("/v1/volumes/{}/detach", Segment(name)), Some(order)).await
    }

    /// Gives up the volumes of a standby that was promoted, at one of the two hosts that have them.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::StandbyRefused`], [`ErrorCode::VolumeInUse`].
    pub async fn yield_volume(
        &self,
        name: &str,
        how: YieldVolume,
    ) -> Result<Vec<RemovedVolume>, ClientError> {
        self.send(Method::POST, &format!("/v1/volumes/{}/yield", Segment(name)), Some(&how)).await
    }

    /// Lists the kept images of migrations, by volume.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn replicas(&self) -> Result<Vec<Replica>, ClientError> {
        self.get("/v1/replicas").await
    }

    /// Deletes a kept image, and returns its description.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::ReplicaNotFound`], [`ErrorCode::ImageInUse`].
    pub async fn drop_replica(&self, volume: &str, which: &DropReplica) -> Result<Replica, ClientError> {
        let query = which.migration.as_ref().map(|id| format!("?migration={}", Segment(id)));
        let path = format!("/v1/replicas/{}{}", Segment(volume), query.unwrap_or_default());
        self.send(Method::DELETE, &path, None::<&()>).await
    }

    /// Begins a migration, and returns it once it has begun or is queued.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn migrate(&self, name: &str, order: &MigrateVolume) -> Result<Migration, ClientError> {
        self.send(Method::POST, &format!("/v1/volumes/{}/migrate", Segment(name)), Some(order)).await
    }

    /// Returns what a migration would do, without beginning it.
    ///
    /// # Errors
    /// [`ClientError`]; obstacles are no error, but a part of the plan.
    pub async fn plan_migration(
        &self,
        name: &str,
        order: &MigrateVolume,
    ) -> Result<MigrationPlan, ClientError> {
        self.send(Method::POST, &format!("/v1/volumes/{}/plan", Segment(name)), Some(order)).await
    }

    /// Lists the migrations under way and the ended ones that the daemon knows, oldest first.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn migrations(&self) -> Result<Vec<Migration>, ClientError> {
        self.get("/v1/migrations").await
    }

    /// Returns a migration, after a change of it if `watch` says so.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::MigrationNotFound`].
    pub async fn migration(&self, id: &str, watch: Watch) -> Result<Migration, ClientError> {
        let after = watch.after.map(|change| format!("&after={change}")).unwrap_or_default();
        let path = format!("/v1/migrations/{}?wait_ms={}{after}", Segment(id), watch.wait_ms);
        match watch.wait_ms {
            0 => self.get(&path).await,
            _ => exchange(&self.way, Method::GET, &path, None::<&()>).await?.parse(),
        }
    }

    /// Cancels a migration, and returns it at once, not when it has ended.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::NotMigrating`], [`ErrorCode::TooLate`].
    pub async fn cancel_migration(&self, id: &str) -> Result<Migration, ClientError> {
        self.send(Method::POST, &format!("/v1/migrations/{}/cancel", Segment(id)), None::<&()>).await
    }

    /// Repeats a failed or cancelled migration, and returns the new one.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::CannotRetry`], and those of [`Client::migrate`].
    pub async fn retry_migration(&self, id: &str) -> Result<Migration, ClientError> {
        self.send(Method::POST, &format!("/v1/migrations/{}/retry", Segment(id)), None::<&()>).await
    }

    /// Returns a migration with its recording.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::MigrationNotFound`].
    pub async fn migration_history(&self, id: &str) -> Result<MigrationHistory, ClientError> {
        self.get(&format!("/v1/migrations/{}/history", Segment(id))).await
    }

    /// Returns this host's identity for other hosts.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::NoIdentity`].
    pub async fn identity(&self) -> Result<Identity, ClientError> {
        self.get("/v1/identity").await
    }

    /// Makes this host's identity.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::IdentityExists`].
    pub async fn create_identity(&self, identity: &NewIdentity) -> Result<Identity, ClientError> {
        self.send(Method::POST, "/v1/identity", Some(identity)).await
    }

    /// Makes an invitation for one other host.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::NoIdentity`].
    pub async fn invite(&self, invitation: &NewInvitation) -> Result<Invitation, ClientError> {
        self.send(Method::POST, "/v1/invitations", Some(invitation)).await
    }

    /// Redeems another host's invitation, and returns that host once both are paired.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::InvitationRefused`], [`ErrorCode::HostUnreachable`].
    pub async fn join_host(&self, order: &JoinHost) -> Result<Peer, ClientError> {
        self.send(Method::POST, "/v1/hosts", Some(order)).await
    }

    /// Lists the other hosts, by name.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn peers(&self) -> Result<Vec<Peer>, ClientError> {
        self.get("/v1/hosts").await
    }

    /// Returns another host with its connections.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::HostNotFound`].
    pub async fn peer(&self, name: &str) -> Result<Peer, ClientError> {
        self.get(&format!("/v1/hosts/{}", Segment(name))).await
    }

    /// Changes the permissions of another host.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::HostNotFound`].
    pub async fn set_peer(&self, name: &str, change: &SetPeer) -> Result<Peer, ClientError> {
        self.send(Method::PATCH, &format!("/v1/hosts/{}", Segment(name)), Some(change)).await
    }

    /// Removes another host, which is refused from then on.
    ///
    /// # Errors
    /// [`ClientError`]; [`ErrorCode::HostNotFound`].
    pub async fn remove_peer(&self, name: &str, how: RemovePeer) -> Result<RemovedPeer, ClientError> {
        let path = format!("/v1/hosts/{}?force={}", Segment(name), how.force);
        self.send(Method::DELETE, &path, None::<&()>).await
    }

    async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.send(Method::GET, path, None::<&()>).await
    }

    async fn send<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<T, ClientError> {
        self.ask(method, path, body).await?.parse()
    }

    /// Calls the callback once if the answer takes long.
    async fn ask(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<Answer, ClientError> {
        let mut exchange = pin!(exchange(&self.way, method, path, body));
        let Some(Late { after, tell }) = &self.late else { return exchange.await };
        match tokio::time::timeout(*after, &mut exchange).await {
            Ok(answer) => answer,
            Err(_) => {
                tell(&self.address());
                exchange.await
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::{Address, Client, ClientError, ErrorCode};

    /// Answers one request with `answer`, and returns the client's result.
    async fn check(answer: &'static [u8]) -> Result<Vec<crate::Store>, ClientError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("api.sock");
        let listener = tokio::net::UnixListener::bind(&path).unwrap();
        let client = Client::new(Address::unix(path).unwrap());
        let server = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 1024];
            let length = stream.read(&mut request).await.unwrap();
            assert!(request[..length].starts_with(b"GET /v1/stores HTTP/1.1\r\n"));
            stream.write_all(answer).await.unwrap();
        };
        tokio::join!(client.stores(), server).0
    }

    #[tokio::test]
    async fn answer_of_the_expected_shape_is_returned() {
        let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]";
        assert_eq!(check(answer).await.unwrap(), Vec::new());
    }

    #[tokio::test]
    async fn error_body_becomes_its_code_and_message() {
        let answer = b"HTTP/1.1 404 Not Found\r\ncontent-length: 56\r\n\r\n{\"error\":{\"code\":\"store_not_found\",\"message\":\"no such\"}}";
        let error = check(answer).await.unwrap_err();
        assert_eq!(error.code(), Some(ErrorCode::StoreNotFound), "{error:?}");
        assert_eq!(error.to_string(), "no such");
    }

    #[tokio::test]
    async fn answer_that_ends_too_early_or_is_no_json_is_an_error() {
        let cut = check(b"HTTP/1.1 200 OK\r\ncontent-length: 200\r\n\r\n[").await;
        assert!(matches!(cut, Err(ClientError::Broken(_))), "{cut:?}");
        let none = check(b"").await;
        assert!(matches!(none, Err(ClientError::Broken(_))), "{none:?}");
        let text = check(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello").await;
        assert!(matches!(text, Err(ClientError::Malformed { status: 200, .. })), "{text:?}");
    }

    #[tokio::test]
    async fn somebody_is_told_once_of_an_answer_that_takes_long() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("api.sock");
        let listener = tokio::net::UnixListener::bind(&path).unwrap();
        let (told, mut waits) = tokio::sync::mpsc::unbounded_channel();
        let client = Client::new(Address::unix(path).unwrap())
            .when_late(Duration::from_millis(1), move |address| told.send(address.to_string()).unwrap());
        let server = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            // It answers once the wait was reported.
            let address = waits.recv().await.unwrap();
            assert!(address.ends_with("api.sock"), "{address}");
            // Closing with unread data would break the connection.
            assert!(stream.read(&mut [0; 1024]).await.unwrap() > 0);
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]").await.unwrap();
            waits
        };
        let (answer, mut waits) = tokio::join!(client.stores(), server);
        assert_eq!(answer.unwrap(), Vec::new());
        assert!(waits.try_recv().is_err(), "once");
    }

    #[tokio::test]
    async fn absent_daemon_is_unreachable() {
        let client = Client::new(Address::unix("/nonexistent/api.sock").unwrap());
        assert!(matches!(client.host().await, Err(ClientError::Unreachable { .. })));
    }
}
