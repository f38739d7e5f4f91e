//! The volumes of the host as they are served: the lane of each, or the reason why it has none.
//!
//! ```text
//!   Creating ──► Starting ──► Serving ──► Removing ──► gone
//!                 │  ▲  ▲                   ▲
//!                 ▼  │  └──► Failed ────────┤      (tried again every few seconds)
//!               Waiting ────────────────────┘      (another program has the image locked)
//! ```
//!
//! A volume of a restored journal is Unconfirmed before it is Starting. The journal holds what a volume *is*; this file holds
//! what this process does with it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use lane::{Duplicated, LaneHandle};
use migration::{MigrationId, VolumeId};
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use crate::error::RequestError;

/// How long a request waits for a volume whose image is locked. The last writes of a killed daemon took 4.5 s
/// in one observed case; a longer lock is probably another program's.
const GHOST_WAIT_MAX: Duration = Duration::from_secs(5);

#[derive(Default)]
pub(crate) struct Volumes {
    entries: Mutex<BTreeMap<String, Entry>>,
    /// Notified when a volume's service has changed.
    changed: Notify,
}

struct Entry {
    /// `None` while it is being created and not in the journal yet.
    volume: Option<VolumeId>,
    service: Service,
    /// Whether an operation holds the volume.
    is_claimed: bool,
    /// The migration by which it arrives, while that holds the claim.
    arrival: Option<MigrationId>,
    /// Set to end the attempts to serve it.
    given_up: Arc<AtomicBool>,
}

#[derive(Clone)]
pub(crate) enum Service {
    Creating(Arc<Creation>),
    Starting,
    /// Its image is locked; the text says by which program.
    Waiting(String),
    /// It arrives from another host; its lane waits for it.
    Arriving(LaneHandle, MigrationId),
    Serving(LaneHandle),
    /// It cannot be served; the text says why.
    Failed(String),
    /// The journal was restored, and the volume's owner is unknown; the text says which hosts must confirm it.
    Unconfirmed(String),
    Removing,
}

/// The progress of making an image.
#[derive(Debug, Default)]
pub(crate) struct Creation {
    pub bytes_done: Arc<AtomicU64>,
    pub bytes_total: AtomicU64,
    /// A copy of another volume, which can be cancelled; unset: it is none.
    pub copy: OnceLock<Arc<Duplicated>>,
}

impl Creation {
    /// Returns how many bytes are done.
    pub(crate) fn done(&self) -> u64 {
        let Some(copy) = self.copy.get() else { return self.bytes_done.load(Ordering::Relaxed) };
        let part = copy.done_ppm.load(Ordering::Relaxed) as f64 / 1e6;
        // A part of the total.
        (self.bytes_total.load(Ordering::Relaxed) as f64 * part) as u64
    }
}

/// The exclusive right to change one volume.
pub(crate) struct Claim {
    volumes: Arc<Volumes>,
    name: String,
}

impl Volumes {
    /// Claims a name for a new volume, or fails with [`RequestError::VolumeExists`].
    pub(crate) fn claim_new(self: &Arc<Self>, name: &str) -> Result<(Claim, Arc<Creation>), RequestError> {
        let mut entries = self.lock();
        if entries.contains_key(name) {
            return Err(RequestError::VolumeExists(name.to_owned()));
        }
        let creation = Arc::<Creation>::default();
        let service = Service::Creating(Arc::clone(&creation));
        let entry =
            Entry { volume: None, service, is_claimed: true, arrival: None, given_up: Arc::default() };
        entries.insert(name.to_owned(), entry);
        Ok((Claim { volumes: Arc::clone(self), name: name.to_owned() }, creation))
    }

    /// Claims a volume for one operation. Errors: [`RequestError::VolumeNotFound`],
    /// [`RequestError::VolumeArriving`], [`RequestError::VolumeBusy`].
    pub(crate) fn claim(self: &Arc<Self>, name: &str) -> Result<(Claim, VolumeId), RequestError> {
        let mut entries = self.lock();
        let entry = entries.get_mut(name).ok_or_else(|| RequestError::VolumeNotFound(name.to_owned()))?;
        match (entry.volume, &entry.service) {
            (Some(volume), _) if !entry.is_claimed => {
                entry.is_claimed = true;
                Ok((Claim { volumes: Arc::clone(self), name: name.to_owned() }, volume))
            }
            // Its arrival holds the claim until it ends.
            (_, Service::Arriving(_, migration)) => {
                Err(RequestError::VolumeArriving { volume: name.to_owned(), migration: *migration })
            }
            _ => Err(RequestError::VolumeBusy(name.to_owned())),
        }
    }

    pub(crate) fn add(&self, name: &str, volume: VolumeId) {
        let entry = Entry {
            volume: Some(volume),
            service: Service::Starting,
            is_claimed: false,
            arrival: None,
            given_up: Arc::default(),
        };
        self.lock().insert(name.to_owned(), entry);
    }

    /// Sets how a volume is served, unless `attempt` has ended: then the volume is gone, or a later attempt serves it.
    pub(crate) fn set(&self, name: &str, attempt: &Arc<AtomicBool>, service: Service) {
        if let Some(entry) = self.lock().get_mut(name)
            && Arc::ptr_eq(&entry.given_up, attempt)
            && !attempt.load(Ordering::SeqCst)
        {
            entry.service = service;
        }
        self.changed.notify_waiters();
    }

    /// Returns the migration by which a volume arrives, while that holds the claim.
    pub(crate) fn arrival_of(&self, name: &str) -> Option<MigrationId> {
        self.lock().get(name).and_then(|entry| entry.arrival)
    }

    /// Resolves when a volume has stopped arriving.
    pub(crate) async fn arrived(&self, name: &str) {
        loop {
            let changed = self.changed();
            if !matches!(self.service(name), Some(Service::Arriving(..))) {
                return;
            }
            changed.await;
        }
    }

    /// Returns the lane of a volume that is served, or that waits for its arrival. Fails like [`Volumes::lane`].
    pub(crate) async fn lane_of_migration(&self, name: &str) -> Result<LaneHandle, RequestError> {
        match self.service(name) {
            Some(Service::Arriving(lane, _)) => Ok(lane),
            _ => self.lane(name).await,
        }
    }

    /// Forgets a volume that has left this host, unless a later attempt serves it.
    pub(crate) fn forget(&self, name: &str, attempt: &Arc<AtomicBool>) {
        self.lock().retain(|known, entry| known != name || !Arc::ptr_eq(&entry.given_up, attempt));
        self.changed.notify_waiters();
    }

    pub(crate) fn service(&self, name: &str) -> Option<Service> {
        self.lock().get(name).map(|entry| entry.service.clone())
    }

    /// Returns all volumes, by name; those being created have no identity.
    pub(crate) fn list(&self) -> Vec<(String, Option<VolumeId>, Service)> {
        let entries = self.lock();
        entries.iter().map(|(name, entry)| (name.clone(), entry.volume, entry.service.clone())).collect()
    }

    /// Returns the lane of a volume that is served, or will be in a moment. Errors:
    /// [`RequestError::VolumeNotFound`], [`RequestError::VolumeUnavailable`].
    pub(crate) async fn lane(&self, name: &str) -> Result<LaneHandle, RequestError> {
        let served = async {
            loop {
                let changed = self.changed();
                if !matches!(self.service(name), Some(Service::Starting | Service::Waiting(_))) {
                    return;
                }
                changed.await;
            }
        };
        // The error says what the volume waits for.
        let _ = tokio::time::timeout(GHOST_WAIT_MAX, served).await;
        self.lane_now(name)
    }

    fn lane_now(&self, name: &str) -> Result<LaneHandle, RequestError> {
        let reason = match self.service(name) {
            None => return Err(RequestError::VolumeNotFound(name.to_owned())),
            Some(Service::Serving(lane)) => return Ok(lane),
            Some(Service::Waiting(reason) | Service::Failed(reason) | Service::Unconfirmed(reason)) => reason,
            Some(Service::Creating(_)) => "it is being created".to_owned(),
            Some(Service::Arriving(_, migration)) => format!("it is still arriving here ({migration})"),
            Some(Service::Starting) => "its image is being opened".to_owned(),
            Some(Service::Removing) => "it is being removed".to_owned(),
        };
        Err(RequestError::VolumeUnavailable { volume: name.to_owned(), reason })
    }

    /// Returns the attempt to serve a volume, if the volume exists: it becomes true when the attempt is to end.
    pub(crate) fn attempt(&self, name: &str) -> Option<Arc<AtomicBool>> {
        self.lock().get(name).map(|entry| Arc::clone(&entry.given_up))
    }

    /// Ends the attempts to serve every volume.
    pub(crate) fn give_up_all(&self) {
        self.lock().values().for_each(|entry| entry.given_up.store(true, Ordering::SeqCst));
        self.changed.notify_waiters();
    }

    /// Resolves when it is known for every volume whether it can be served at once.
    pub(crate) async fn started(&self) {
        loop {
            let changed = self.changed();
            if !self.lock().values().any(|entry| matches!(entry.service, Service::Starting)) {
                return;
            }
            changed.await;
        }
    }

    /// Resolves at the next change of any volume's service after this call.
    pub(crate) fn changed(&self) -> Notified<'_> {
        self.changed.notified()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Claim {
    /// Records that the volume is in the journal, and is to be served.
    pub(crate) fn created(&self, volume: VolumeId) {
        if let Some(entry) = self.volumes.lock().get_mut(&self.name) {
            entry.volume = Some(volume);
            entry.service = Service::Starting;
        }
    }

    /// Records that the volume arrives from another host; returns the flag that ends later attempts to serve it.
    pub(crate) fn arriving(
        &self,
        volume: VolumeId,
        lane: LaneHandle,
        migration: MigrationId,
    ) -> Arc<AtomicBool> {
        let mut entries = self.volumes.lock();
        // The claim keeps the entry.
        let Some(entry) = entries.get_mut(&self.name) else { return Arc::default() };
        entry.volume = Some(volume);
        entry.arrival = Some(migration);
        // A lane that forwards clients continues to do so.
        if !matches!(entry.service, Service::Serving(_)) {
            entry.service = Service::Arriving(lane, migration);
        }
        Arc::clone(&entry.given_up)
    }

    /// Records that the volume is being removed, and ends attempts to serve it. Returns how it was served.
    pub(crate) fn removing(&self) -> Option<Service> {
        let mut entries = self.volumes.lock();
        let entry = entries.get_mut(&self.name)?;
        entry.given_up.store(true, Ordering::SeqCst);
        let service = std::mem::replace(&mut entry.service, Service::Removing);
        drop(entries);
        self.volumes.changed.notify_waiters();
        Some(service)
    }

    /// Records that the removal has failed, and that the volume is to be served again.
    pub(crate) fn not_removed(&self) {
        if let Some(entry) = self.volumes.lock().get_mut(&self.name) {
            entry.given_up = Arc::default();
            entry.service = Service::Starting;
        }
    }

    pub(crate) fn removed(self) {
        self.volumes.lock().remove(&self.name);
        self.volumes.changed.notify_waiters();
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut entries = self.volumes.lock();
        let Some(entry) = entries.get_mut(&self.name) else { return };
        entry.is_claimed = false;
        entry.arrival = None;
        // A volume whose creation did not reach the journal does not exist.
        if entry.volume.is_none() {
            entries.remove(&self.name);
        }
        drop(entries);
        self.volumes.changed.notify_waiters();
    }
}

#[derive(Debug)]
pub(crate) struct Users {
    pub(crate) connections: usize,
    /// The numbers of clients that other hosts forward here, by host name.
    pub(crate) elsewhere: Vec<(String, u32)>,
}

impl std::fmt::Display for Users {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let plural = |count: usize| if count == 1 { "" } else { "s" };
        let here = (self.connections > 0)
            .then(|| format!("{} connection{}", self.connections, plural(self.connections)));
        let elsewhere = self.elsewhere.iter().map(|(host, clients)| {
            format!("{clients} client{} at host \"{host}\"", plural(*clients as usize))
        });
        f.write_str(&here.into_iter().chain(elsewhere).collect::<Vec<_>>().join(" and "))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use migration::VolumeId;

    use super::{Service, Volumes};
    use crate::error::RequestError;

    const VOLUME: VolumeId = VolumeId([1; 16]);

    #[test]
    fn one_operation_at_a_time_has_a_volume() {
        let volumes = Arc::<Volumes>::default();
        assert!(matches!(volumes.claim("a"), Err(RequestError::VolumeNotFound(_))));
        volumes.add("a", VOLUME);
        let (claim, volume) = volumes.claim("a").unwrap();
        assert_eq!(volume, VOLUME);
        assert!(matches!(volumes.claim("a"), Err(RequestError::VolumeBusy(_))));
        assert!(matches!(volumes.claim_new("a"), Err(RequestError::VolumeExists(_))));
        drop(claim);
        let (claim, _) = volumes.claim("a").unwrap();
        claim.removed();
        assert!(volumes.list().is_empty());
    }

    #[tokio::test]
    async fn whoever_waits_for_a_volume_is_told_when_it_is_given_back() {
        let volumes = Arc::<Volumes>::default();
        volumes.add("a", VOLUME);
        let (claim, _) = volumes.claim("a").unwrap();
        let changed = volumes.changed();
        assert_eq!(volumes.arrival_of("a"), None);
        drop(claim);
        changed.await;
        volumes.claim("a").unwrap();
    }

    #[test]
    fn creation_that_fails_leaves_no_volume() {
        let volumes = Arc::<Volumes>::default();
        let (claim, _) = volumes.claim_new("a").unwrap();
        assert!(matches!(volumes.claim("a"), Err(RequestError::VolumeBusy(_))));
        drop(claim);
        assert!(volumes.list().is_empty());
        let (claim, _) = volumes.claim_new("a").unwrap();
        claim.created(VOLUME);
        drop(claim);
        assert!(matches!(volumes.service("a"), Some(Service::Starting)));
    }

    #[tokio::test]
    async fn volume_that_is_not_served_says_why() {
        let volumes = Arc::<Volumes>::default();
        volumes.add("a", VOLUME);
        let attempt = volumes.attempt("a").unwrap();
        volumes.set("a", &attempt, Service::Failed("the image is gone".into()));
        let error = volumes.lane("a").await.err().unwrap();
        assert_eq!(error.to_string(), "volume \"a\" is not being served: the image is gone");
        let (claim, _) = volumes.claim("a").unwrap();
        claim.removing();
        // A late end of an attempt to serve it changes nothing.
        volumes.set("a", &attempt, Service::Waiting("somebody".into()));
        assert!(matches!(volumes.service("a"), Some(Service::Removing)));
    }
}
