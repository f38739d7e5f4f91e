//! The control plane of one host: the operations of the API, and the parts that carry them out.
//!
//! ```text
//!   http ──► Host ──┬─ migrations   ordered, checked, begun, received, resumed, promoted
//!                   ├─ volumes      created, served, exported, resized, removed
//!                   ├─ vms          adopted and released, moved, settled
//!                   ├─ access, describe, overview, metrics, readiness, accounts, pairing, release, store_files
//!                   └─ the journal, the stores and its other parts: a file of the crate each
//! ```
//!
//! Each operation runs in a task of its own, so a client that disconnects does not leave it half done.

mod access;
mod accounts;
mod describe;
mod metrics;
mod migrations;
mod overview;
mod pairing;
mod readiness;
mod release;
pub(crate) mod reload;
mod restoration;
mod store_files;
pub(crate) mod vms;
pub(crate) mod volumes;

pub(crate) use self::migrations::ahead::roomy;
use self::migrations::session::Sessions;
use self::overview::Overviews;

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use lane::{Encryption, LaneHandle};
use migration::VolumeId;
use tokio::sync::{Mutex, Semaphore, watch};

use crate::audit::Audit;
use crate::config::{Config, Limits};
use crate::custody::Custody;
use crate::error::RequestError;
use crate::files::sockets::SocketFolder;
use crate::grants::Grants;
use crate::hooks::Hooks;
use crate::hosts::Hosts;
use crate::journal::{Journal, now_unix_ms};
use crate::migrations::ends::Ends;
use crate::migrations::history::Histories;
use crate::migrations::metadata::MetadataFolder;
use crate::migrations::queue::Queue;
use crate::migrations::recovery;
use crate::migrations::registry::Migrations;
use crate::migrations::shares::Shares;
use crate::migrations::volume_hooks::VolumeHooks;
use crate::peers::Peers;
use crate::sign_ins::SignIns;
use crate::stores::Stores;
use crate::take_over::{Clients, Estate, PassedClient};
use crate::vms::moving::VmMoves;
use crate::vms::proved::{Proofs, ProvedImages};
use crate::vms::{Adoptions, VmError, Vms};
use crate::volumes::chronicles::Chronicles;
use crate::volumes::registry::{Service, Volumes};

/// The number of operations that run at a time. Others wait; each may hold a helper thread.
const OPERATIONS_MAX: u32 = 32;
/// How long a stopping daemon waits for running hooks. The next daemon continues with the rest.
const HOOKS_WAIT_MAX: Duration = Duration::from_secs(5);
const HOOKS_FOLDER: &str = "hooks";
/// The number of helper threads that query stores at a time, so that a hanging store does not use all of them.
const LOOKS_MAX: usize = 64;

pub(crate) struct Host {
    /// The record of orders and who gave them.
    pub(crate) audit: Audit,
    /// Who may use the API over TLS.
    pub(crate) grants: Arc<Grants>,
    /// The browsers that may give orders on the page.
    pub(crate) sign_ins: SignIns,
    pub(crate) config: Config,
    limits: RwLock<Limits>,
    pub(crate) journal: Journal,
    /// The chronicles of volumes, across restarts.
    pub(crate) chronicles: Chronicles,
    /// Deletes and renames images.
    pub(crate) custody: Custody,
    pub(crate) stores: Stores,
    pub(crate) volumes: Arc<Volumes>,
    pub(crate) migrations: Arc<Migrations>,
    /// Migrations that wait for their turn.
    pub(crate) queue: Arc<Queue>,
    /// What other hosts use here, and may use.
    pub(crate) shares: Arc<Shares>,
    /// The metadata of migrations besides the journal.
    pub(crate) metadata_folder: Arc<MetadataFolder>,
    pub(crate) histories: Arc<Histories>,
    ends: Ends,
    sessions: Sessions,
    /// The TLS of volumes' ports.
    encryption: Encryption,
    pub(crate) sockets: SocketFolder,
    pub(crate) hosts: Arc<Hosts>,
    /// The messages with other hosts about migrations.
    pub(crate) peers: Arc<Peers>,
    /// Hooks that run before volumes without a VM change hands.
    pub(crate) volume_hooks: Arc<VolumeHooks>,
    /// Hooks that run before and after migrations.
    pub(crate) hooks: Arc<Hooks>,
    /// Determines the owners of volumes after the journal was restored.
    restoring: restoration::Restoring,
    /// VMs that are leaving or arriving.
    pub(crate) moving: Arc<VmMoves>,
    pub(crate) vms: Arc<Vms>,
    /// The files of adopted disks.
    proofs: Proofs,
    overviews: Arc<Overviews>,
    started_unix_ms: u64,
    operations: Arc<Semaphore>,
    /// Limits queries of stores for descriptions; those at a hanging disk keep their permits.
    looks: Arc<Semaphore>,
    /// Held from the choice of a migration's identity until it is in the journal.
    starting_migration: Mutex<()>,
    /// Held while an image becomes a volume, from its check until it is in the journal.
    adding_image: Mutex<()>,
    /// True once the daemon is to stop.
    stopping: watch::Sender<bool>,
}

/// What a host remembers across restarts.
pub(crate) struct Books {
    pub(crate) audit: Audit,
    pub(crate) journal: Journal,
    pub(crate) chronicles: Chronicles,
}

impl Host {
    /// Puts the parts together. Nothing is served yet.
    pub(crate) fn new(
        config: Config,
        Books { audit, journal, chronicles }: Books,
        stores: Stores,
        sockets: SocketFolder,
        encryption: Encryption,
        hosts: Arc<Hosts>,
        peers: Arc<Peers>,
    ) -> Arc<Self> {
        let grants = Grants::begin(&config);
        let migrations = Arc::<Migrations>::default();
        migrations.name({
            let hosts = Arc::clone(&hosts);
            move || hosts.own()
        });
        let queue = Arc::new(Queue::new(config.limits.queue));
        let shares = Arc::new(Shares::new(config.limits.shares));
        let metadata_folder = Arc::new(journal.read(|state| MetadataFolder::open(&config.data_dir, state)));
        migrations.add_waiting(&queue, &metadata_folder);
        let moving = VmMoves::new(tokio::runtime::Handle::current());
        migrations.ask_of_vms(&moving);
        let hooks = Hooks::open(config.hooks.clone(), config.data_dir.join(HOOKS_FOLDER));
        let custody = Custody::new(journal.clone(), &stores);
        Arc::new(Self {
            custody,
            audit,
            grants,
            sign_ins: SignIns::default(),
            encryption,
            hosts,
            peers,
            histories: Arc::new(Histories::new(&config.data_dir)),
            ends: Ends::default(),
            proofs: Proofs::default(),
            vms: Vms::open(&config.data_dir, &sockets, &config.machines),
            limits: RwLock::new(config.limits),
            config,
            journal,
            chronicles,
            stores,
            volumes: Arc::default(),
            migrations,
            queue,
            shares,
            metadata_folder,
            sessions: Sessions::default(),
            restoring: restoration::Restoring::default(),
            moving,
            volume_hooks: VolumeHooks::new(tokio::runtime::Handle::current()),
            hooks,
            sockets,
            overviews: Arc::default(),
            started_unix_ms: now_unix_ms(),
            operations: Arc::new(Semaphore::new(OPERATIONS_MAX as usize)),
            looks: Arc::new(Semaphore::new(LOOKS_MAX)),
            starting_migration: Mutex::new(()),
            adding_image: Mutex::new(()),
            stopping: watch::Sender::new(false),
        })
    }

    pub(crate) fn limits(&self) -> Limits {
        *self.limits.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_limits(&self, limits: Limits) {
        *self.limits.write().unwrap_or_else(PoisonError::into_inner) = limits;
        self.queue.set_limits(limits.queue);
        self.shares.set_limits(limits.shares);
    }

    /// Runs an operation to its end, even if its client has left. Errors: the operation's;
    /// [`RequestError::ShuttingDown`]; [`RequestError::Internal`] if it panicked.
    pub(crate) async fn operate<T: Send + 'static>(
        self: &Arc<Self>,
        operation: impl Future<Output = Result<T, RequestError>> + Send + 'static,
    ) -> Result<T, RequestError> {
        let permit = Arc::clone(&self.operations).acquire_owned().await;
        let permit = permit.map_err(|_| RequestError::ShuttingDown)?;
        let task = tokio::spawn(async move {
            let result = operation.await;
            drop(permit);
            result
        });
        task.await.unwrap_or_else(|error| Err(RequestError::Internal(error.to_string())))
    }

    fn adoptions(&self) -> Result<&Adoptions, VmError> {
        self.vms.adoptions()
    }

    fn finder_of(&self, volume: &str) -> ProvedImages {
        // Without the list, a file found by its name passes the same checks except for its owner.
        let adopted = self.adoptions().ok().and_then(|known| known.find(|adopted| adopted.uses(volume)));
        let proved = adopted.map(|adopted| adopted.proved(volume)).unwrap_or_default();
        self.proofs.finder(volume, proved)
    }

    pub(crate) async fn stopping(&self) {
        // The sender lives as long as the host.
        let _ = self.stopping.subscribe().wait_for(|stopping| *stopping).await;
    }

    pub(crate) fn is_stopping(&self) -> bool {
        *self.stopping.borrow()
    }

    /// Stops serving, in order: operations end, lanes drain, interrupted migrations are left to the next daemon. Returns the
    /// rest of the restart state, which is empty if clients are to be closed. Whatever does not end in time is in the
    /// journal for the next start.
    pub(crate) async fn stop(self: &Arc<Self>, clients: Clients) -> Estate {
        let deadline = self.limits().stop_wait_max;
        // While guests are served: a running hook may be what their addresses depend on.
        self.hooks.stop(HOOKS_WAIT_MAX).await;
        self.stopping.send_replace(true);
        self.volumes.give_up_all();
        let ended = tokio::time::timeout(deadline, self.operations.acquire_many(OPERATIONS_MAX)).await;
        if ended.is_err() {
            tracing::warn!("an operation is still under way; the next start completes it");
        }
        self.operations.close();
        if clients == Clients::PassedOn {
            self.settle_lanes(deadline).await;
        }
        let since_unix_ms = now_unix_ms();
        let passed = self.stop_lanes(deadline, clients).await;
        let hosts = Arc::clone(&self.hosts);
        if tokio::task::spawn_blocking(move || hosts.stop()).await.is_err() {
            tracing::warn!("the connections to other hosts were not ended in order");
        }
        self.note_interrupted().await;
        // The lanes of these migrations are gone, so the work of a restart can be done at once.
        if let Err(error) = recovery::run(&self.journal, &self.custody).await {
            tracing::warn!(%error, "an interrupted migration waits for the next start");
        }
        if clients == Clients::PassedOn {
            let mut left = self.sockets.listening().leave();
            left.since_unix_ms = since_unix_ms;
            left.clients.extend(passed);
            return left;
        }
        for (name, _, _) in self.volumes.list() {
            if let Err(error) = self.sockets.forget_volume(&name) {
                tracing::warn!(volume = %name, %error, "a socket is left over");
            }
        }
        Estate::default()
    }

    /// Flushes guests' writes while the guests run, so that the final flush is short.
    async fn settle_lanes(&self, deadline: Duration) {
        let settling = self.lanes().map(|(name, _, lane)| async move {
            if tokio::time::timeout(deadline, lane.settle()).await.is_err() {
                tracing::warn!(volume = %name, "the volume's store is slow: its clients will wait for it");
            }
        });
        futures_util::future::join_all(settling).await;
    }

    async fn stop_lanes(&self, deadline: Duration, clients: Clients) -> Vec<PassedClient> {
        let stops = self.lanes().map(|(name, volume, lane)| async move {
            let ended = async {
                match (clients, volume) {
                    (Clients::PassedOn, Some(volume)) => {
                        let passed = lane.pass(deadline).await.into_iter();
                        passed.map(|connection| PassedClient { volume, connection }).collect()
                    }
                    _ => {
                        lane.stop(deadline).await;
                        Vec::new()
                    }
                }
            };
            // A hanging store may keep the lane from answering; the lane abandons its requests before that.
            let ended = tokio::time::timeout(deadline * 2, ended).await;
            ended.unwrap_or_else(|_| {
                tracing::warn!(volume = %name, "the volume's requests do not end; they are abandoned");
                Vec::new()
            })
        });
        futures_util::future::join_all(stops).await.into_iter().flatten().collect()
    }

    fn lanes(&self) -> impl Iterator<Item = (String, Option<VolumeId>, LaneHandle)> + use<> {
        self.volumes.list().into_iter().filter_map(|(name, volume, service)| match service {
            Service::Serving(lane) | Service::Arriving(lane, _) => Some((name, volume, lane)),
            _ => None,
        })
    }

    /// Closes connections that an earlier daemon left for volumes that are not served here, once it is known which these are.
    pub(crate) fn close_unknown_clients(&self) {
        let (by_name, by_id) = self.journal.read(|state| {
            let moved = state.moved.values().filter(|moved| self.begins_with_lane(state, moved));
            let records = state.volumes.values().map(|volume| &volume.record);
            let records = records.chain(moved.map(|moved| &moved.volume.record));
            let (mut by_name, mut by_id) = (BTreeSet::new(), BTreeSet::new());
            for record in records {
                by_name.insert(record.name.clone());
                by_id.insert(record.volume);
            }
            // Volumes on their way here have lanes already, or will.
            for (_, migration) in state.unfinished() {
                by_name.extend(migration.names.iter().cloned());
                by_id.extend(migration.volumes.iter().map(|moving| moving.volume));
            }
            (by_name, by_id)
        });
        let listening = self.sockets.listening();
        let closed = listening.close_clients(|volume| by_id.contains(&volume));
        if closed > 0 {
            tracing::warn!(
                clients = closed,
                "closed connections of clients to volumes that have left this host"
            );
        }
        let is_known = |name: &String| by_name.contains(name) || self.volumes.service(name).is_some();
        for name in listening.unclaimed().into_iter().filter(|name| !is_known(name)) {
            tracing::info!(volume = %name, "closed a socket of the previous daemon, because its volume is not here");
            if let Err(error) = self.sockets.forget_volume(&name) {
                tracing::warn!(volume = %name, %error, "a socket is left over");
            }
        }
    }
}

/// Runs work that may block on a helper thread.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, RequestError> + Send + 'static,
) -> Result<T, RequestError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(RequestError::Internal(error.to_string())))
}
