//! Moves a VM with its volumes: this host's part when the VM leaves, arrives, and after a restart.
//!
//! ```text
//!   source                                        target
//!   checks ──► offer, with its name ────────────► name free ──► its volumes arrive
//!   VM description ──────────────────────────────► could it run?
//!   volumes copied ──► memory ──► stands ────────► loaded
//!   volumes released ────────────────────────────► owned ──► it runs
//!   left: its QEMU ended, forgotten                arrived: at home
//! ```
//! The migration of its volumes takes all the decisions, in the journals ([`crate::vms::moving`]).

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use api::{MEMORY_STREAMS_MAX, Memory, MigrateVolume};
use futures_util::FutureExt;
use hypervisor::qemu::{Qemu, memory_socket};
use hypervisor::{Hypervisor, HypervisorError, RecoverMemory};
use migration::journal::Stage;
use migration::vm::cold::Form;
use migration::vm::departure::Departure;
use migration::{Budget, HostId, MigrationId, authority};
use transport::Session;

use crate::error::RequestError;
use crate::hooks::{HookRunner, HookSide};
use crate::host::VmOrders;
use crate::vms::moving::channel::VmChannel;
use crate::vms::moving::{
    IncomingVm, Keeper, MoveFault, OutgoingVm, PostCopyRecovery, PostCopyRequest, Terms, VmMessage, Wishes,
    side_streams,
};
use crate::vms::{Adopted, Standing, VmError, Vms};

/// The downtime limit of an order without one.
const DOWNTIME_DEFAULT: Duration = Duration::from_millis(300);
/// How long the handover of the disks may take while the VM stands still. It is longer than the usual limit: completing a late
/// move is better than a downtime without a move.
pub(crate) const HANDOVER_TIMEOUT: Duration = Duration::from_secs(3);

pub(crate) struct Company {
    pub(crate) name: String,
    /// What the target host needs to run the VM.
    pub(crate) manifest: Vec<u8>,
    pub(crate) travels: Travels,
}

/// How a VM moves along, as ordered.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Travels {
    Live {
        downtime_max: Duration,
        /// When the VM may run at the target, and over how many streams its memory goes.
        memory: (Memory, Option<u8>),
    },
    /// The VM is stopped, and stays stopped.
    Cold,
}

impl Travels {
    pub(crate) fn form(self) -> Form {
        match self {
            Self::Live { .. } => Form::Live,
            Self::Cold => Form::Cold,
        }
    }

    /// Returns the downtime that the VM may have; `None`: it has none.
    pub(crate) fn downtime_max(self) -> Option<Duration> {
        match self {
            Self::Live { downtime_max, .. } => Some(downtime_max),
            Self::Cold => None,
        }
    }

    /// Returns how a running VM is to leave over this session.
    pub(crate) async fn wishes(self, vm: &dyn Hypervisor, session: &Session, budget: Budget) -> Wishes {
        match self {
            Self::Live { downtime_max, memory } => {
                Wishes { downtime_max, budget, terms: terms(vm, memory, session).await }
            }
            Self::Cold => resumed_wishes(budget),
        }
    }
}

/// Returns the settings for a VM whose migration a restart resumes: only the rest of its memory may still have to go.
pub(crate) fn resumed_wishes(budget: Budget) -> Wishes {
    Wishes { downtime_max: DOWNTIME_DEFAULT, budget, terms: Terms::default() }
}

pub(crate) enum Expected {
    Anew,
    /// An earlier daemon expected it; it may be here, and loaded.
    Again(Option<Arc<dyn Hypervisor>>),
}

impl VmOrders {
    /// Checks whether a running VM can move by this order, and returns what moves.
    pub(crate) async fn live_company(
        self: &Arc<Self>,
        name: String,
        volumes: &[String],
        order: &MigrateVolume,
    ) -> Result<Company, RequestError> {
        let qemu = self.vms.qemu(&name)?;
        self.check_movable(&name, &qemu, self.vms.adoptions()?.get(&name).as_ref()).await?;
        self.check_tpm(&name)?;
        if order.memory == Memory::PostCopy {
            check_post_copy(&name, &*qemu).await?;
        }
        let travels =
            Travels::Live { downtime_max: downtime_max(order), memory: (order.memory, order.memory_streams) };
        Ok(Company { manifest: self.manifest_of(&name, volumes).await?, travels, name })
    }

    /// Returns the object that moves a VM out by this migration.
    pub(crate) fn leaving(
        &self,
        migration: MigrationId,
        name: &str,
        vm: Arc<dyn Hypervisor>,
        wishes: Wishes,
        session: &Session,
        hooks: Arc<HookRunner>,
    ) -> Arc<OutgoingVm> {
        let streams = self.peers.vm_streams(session, self.peers.own(), migration);
        let named = (name.to_owned(), vm, Arc::clone(&self.vms.holds));
        Arc::new(OutgoingVm::new(named, streams, wishes, self.vms.witness(name), hooks))
    }

    /// Checks whether the VM's TPM, if it has one, can move; fails with [`RequestError::VmUnmovable`].
    pub(crate) fn check_tpm(&self, name: &str) -> Result<(), RequestError> {
        self.vms.tpm_obstacle(name).map_or(Ok(()), |reason| {
            Err(RequestError::VmUnmovable { vm: name.to_owned(), reason: reason.to_owned() })
        })
    }

    /// Checks whether a host may bring VMs. Later checks would reveal more of this host to it.
    pub(crate) fn check_may_bring_vms(&self, peer: HostId) -> Result<(), RequestError> {
        if self.hosts.may_bring_vms(peer) {
            return Ok(());
        }
        let text = match self.config.hosts.machines {
            false => "it accepts no VMs of other hosts; to allow them: machines = true below [hosts] in its configuration".to_owned(),
            true => {
                let name = self.hosts.name_of(peer);
                format!("it accepts no VMs of this host; run there: sterna host set {name} --allow-machines")
            }
        };
        Err(RequestError::Invalid(text))
    }

    pub(crate) fn check_vm_name(&self, name: &str) -> Result<(), RequestError> {
        crate::names::check(name).map_err(|reason| RequestError::Name { name: name.to_owned(), reason })?;
        if self.vms.adoptions()?.get(name).is_some() {
            return Err(VmError::Exists(name.to_owned()).into());
        }
        match self.vms.get(name) {
            Err(VmError::NotFound(_)) => Ok(()),
            Err(error) => Err(error.into()),
            Ok(_) => Err(VmError::Exists(name.to_owned()).into()),
        }
    }

    /// Prepares for a VM that comes with the volumes of this migration, which has another number at its source.
    pub(crate) fn expect_vm(
        self: &Arc<Self>,
        session: &Session,
        (migration, remote): (MigrationId, MigrationId),
        name: &str,
        volumes: Vec<String>,
        expected: Expected,
    ) {
        let peer = crate::peers::host_id(session.peer());
        let channel = VmChannel::new(self.peers.vm_streams(session, peer, remote));
        let hooks =
            self.migration_hooks.hook_runner(migration, name, HookSide::Target, &self.hosts.name_of(peer));
        if let Expected::Again(Some(qemu)) = expected {
            let coming = IncomingVm::found(channel, qemu, hooks);
            let may_run_ahead = self.vms.lifeline(name).is_some();
            let coming = if may_run_ahead { coming.may_run_ahead() } else { coming };
            let coming = if self.vms.stays_paused(name) { coming.staying_paused() } else { coming };
            self.moving.came(migration, Arc::new(coming));
            return;
        }
        let keeper = Reception { host: Arc::clone(self), name: name.to_owned(), volumes };
        self.moving.comes(migration, &Arc::new(IncomingVm::new(channel, hooks)), Arc::new(keeper));
    }

    /// Returns what is known of a VM that comes with volumes; `stage` is where a restart found them.
    pub(crate) async fn expected(self: &Arc<Self>, vm: &str, stage: Option<&Stage>) -> Expected {
        match stage {
            None => Expected::Anew,
            // N.B. Before this host has promised to wait, a restart ends the migration: a loaded VM might wait for volumes that
            // wait for it.
            Some(Stage::Copying) => Expected::Again(None),
            Some(_) => {
                let found = self.vms.found(vm).await;
                // The VM may have been loaded just before the last daemon was killed.
                let is_kept = self.vms.keep_tpm(vm).await.map_err(|error| {
                    tracing::warn!(vm = %vm, %error, "cannot run an arriving VM without its TPM");
                });
                Expected::Again(found.filter(|_| is_kept.is_ok()))
            }
        }
    }

    /// Handles a message about the rest of a VM's memory, from the source of a VM whose stream has broken.
    pub(crate) async fn post_copy_request(
        self: &Arc<Self>,
        session: &Session,
        remote: MigrationId,
        said: PostCopyRequest,
    ) {
        let peer = crate::peers::host_id(session.peer());
        let names = match self.journal.read(|state| authority::judge_memory(state, peer, remote)) {
            Ok(names) => names,
            Err(reason) => {
                return tracing::warn!(%peer, remote = %remote, %reason, "ignored a host's message about a VM's memory");
            }
        };
        let channel = VmChannel::without_main(self.peers.vm_streams(session, peer, remote));
        let known = names.first().and_then(|volume| self.vms.get(&self.vms.user_of(volume)?).ok());
        // A VM that leaves for another host is not the one that came from the sender.
        let known = known.filter(|known| known.standing != Standing::Leaving);
        let Some(known) = known else {
            return channel.send(&VmMessage::lost("it is not known at the target"));
        };
        let (vms, name) = (Arc::clone(&self.vms), known.name.clone());
        let recovery = PostCopyRecovery {
            memory_socket: memory_socket(&known.monitor),
            lifeline: self.vms.lifeline(&known.name).map(|lifeline| lifeline as Arc<dyn RecoverMemory>),
            // N.B. the answer may take as long as the rest of the memory.
            found: async move { vms.found(&name).await }.boxed().shared(),
        };
        let keeper = Reception { host: Arc::clone(self), name: known.name, volumes: names };
        match said {
            PostCopyRequest::Recover(stream) => recovery.recover(channel, stream, Arc::new(keeper)).await,
            PostCopyRequest::Lost(reason) => recovery.lose(reason, &keeper).await,
        }
    }

    /// Returns the VM of an outgoing migration that a restart interrupted.
    pub(crate) fn vm_of_departure(&self, volumes: &[String]) -> Option<String> {
        self.vm_with(volumes, Standing::Leaving)
    }

    /// Returns the VM that owns these volumes and is not recorded as leaving.
    pub(crate) fn vm_at_home(&self, volumes: &[String]) -> Option<String> {
        self.vm_with(volumes, Standing::Home)
    }

    /// Returns the VM of an incoming migration that a restart interrupted.
    pub(crate) fn vm_of_arrival(&self, volumes: &[String]) -> Option<String> {
        self.vm_with(volumes, Standing::Arriving)
    }

    pub(crate) fn vm_is_leaving(&self, name: &str) -> bool {
        self.vms.get(name).is_ok_and(|known| known.standing == Standing::Leaving)
    }

    fn vm_with(&self, volumes: &[String], standing: Standing) -> Option<String> {
        let name = self.vms.user_of(volumes.first()?)?;
        let known = self.vms.get(&name).ok()?;
        (known.standing == standing).then_some(name)
    }
}

struct Reception {
    host: Arc<VmOrders>,
    name: String,
    volumes: Vec<String>,
}

impl Reception {
    fn check_offered(&self, manifest: &[u8]) -> Result<(), MoveFault> {
        let (name, volumes) = Vms::announced(manifest)?;
        if name != self.name || volumes != self.volumes {
            return Err(MoveFault::NotOffered { name, volumes });
        }
        Ok(self.host.check_vm_name(&name)?)
    }
}

impl Keeper for Reception {
    fn check(
        &self,
        manifest: &[u8],
        wished: Terms,
    ) -> Pin<Box<dyn Future<Output = Result<Terms, MoveFault>> + Send>> {
        let is_offered = self.check_offered(manifest);
        let (host, manifest) = (Arc::clone(&self.host), manifest.to_vec());
        Box::pin(async move {
            is_offered?;
            host.check_arrival(&manifest, wished).await
        })
    }

    fn lose(&self, reason: String) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let (host, name) = (Arc::clone(&self.host), self.name.clone());
        Box::pin(async move {
            tracing::error!(vm = %name, reason, "the memory of a VM that runs here is lost");
            let vm = host.vms.qemu(&name).ok();
            let vm = vm.as_deref().map(|vm| vm as &dyn Hypervisor);
            host.vms.lose(&name, vm, memory_lost(&name, &reason)).await;
        })
    }

    fn keep(&self) -> Pin<Box<dyn Future<Output = Result<(), MoveFault>> + Send>> {
        let (host, name) = (Arc::clone(&self.host), self.name.clone());
        Box::pin(async move { Ok(host.vms.keep_tpm(&name).await?) })
    }

    fn renew(&self, files: Vec<u8>) -> Pin<Box<dyn Future<Output = Result<(), MoveFault>> + Send>> {
        let (host, name) = (Arc::clone(&self.host), self.name.clone());
        Box::pin(async move { Ok(host.vms.renew_files(&name, files).await?) })
    }

    fn stays_paused(&self) -> Pin<Box<dyn Future<Output = Result<(), MoveFault>> + Send>> {
        let (host, name) = (Arc::clone(&self.host), self.name.clone());
        Box::pin(async move { Ok(host.vms.note_paused(&name).await?) })
    }

    fn start(
        &self,
        manifest: Vec<u8>,
        terms: Terms,
    ) -> Pin<Box<dyn Future<Output = Result<Arc<dyn Hypervisor>, MoveFault>> + Send>> {
        let host = Arc::clone(&self.host);
        Box::pin(async move {
            let arrival = host.vms.prepare_arrival(&manifest, terms, &host.sockets).await?;
            tracing::info!(vm = %arrival.name, "a VM waits for its memory");
            Ok(arrival.vm)
        })
    }
}

/// Refuses a contradictory order for a VM's memory.
pub(crate) fn check_order(order: &MigrateVolume) -> Result<(), RequestError> {
    match order.memory_streams {
        Some(streams) if !(1..=MEMORY_STREAMS_MAX).contains(&streams) => {
            let text = format!("memory is sent over 1 to {MEMORY_STREAMS_MAX} streams, not {streams}");
            Err(RequestError::Invalid(text))
        }
        Some(2..) if order.memory == Memory::PostCopy => {
            let text = "QEMU sends memory over one stream if some of it may follow later; leave --memory-streams out";
            Err(RequestError::Invalid(text.to_owned()))
        }
        _ => Ok(()),
    }
}

/// Checks from this side whether a VM can run at the target before all of its memory is there.
pub(crate) async fn check_post_copy(name: &str, vm: &dyn Hypervisor) -> Result<(), RequestError> {
    let unmovable = |reason: String| RequestError::VmUnmovable { vm: name.to_owned(), reason };
    let silent = |error: HypervisorError| unmovable(error.to_string());
    match vm.post_copy_blocker().await.map_err(silent)? {
        None => Ok(()),
        Some(reason) => Err(unmovable(format!("--memory post-copy: {reason}"))),
    }
}

/// Returns the message for a VM whose memory is lost, at the host of its disks.
pub(crate) fn memory_lost(name: &str, reason: &str) -> String {
    format!(
        "its memory is lost: {reason}, and it ran before all of its memory had arrived (--memory post-copy). Its disks are \
         complete, and here; start it again: sterna vm start {name}"
    )
}

/// Returns the requested way for a VM's memory over this session.
async fn terms(vm: &dyn Hypervisor, ordered: (Memory, Option<u8>), session: &Session) -> Terms {
    let (memory, streams) = ordered;
    if memory == Memory::PostCopy {
        return Terms { side_streams: 0, post_copy: true };
    }
    let memory_bytes = vm.memory_bytes().await.unwrap_or_default();
    let side_streams = side_streams(streams, memory_bytes, session.status().connections.len());
    let can = side_streams > 0 && vm.knows_side_streams().await.unwrap_or(false);
    Terms { side_streams: if can { side_streams } else { 0 }, post_copy: false }
}

pub(crate) fn not_to_a_store(volumes: &[String], order: &MigrateVolume) -> RequestError {
    RequestError::Invalid(format!(
        "a VM moves to another host; to move its disks to the store \"{}\", one by one: sterna migrate {} --to {}",
        order.to,
        volumes.first().map_or("VOLUME", String::as_str),
        order.to
    ))
}

pub(crate) fn no_volumes(vm: &str) -> RequestError {
    RequestError::Invalid(format!(
        "the VM \"{vm}\" has no volume that could move: start it at the other host"
    ))
}

pub(crate) fn downtime_max(order: &MigrateVolume) -> Duration {
    order.max_downtime_ms.map_or(DOWNTIME_DEFAULT, Duration::from_millis)
}

impl VmOrders {
    /// Checks whether a VM can be moved in its present state; [`RequestError::VmUnmovable`] lists all obstacles.
    pub(crate) async fn check_movable(
        &self,
        name: &str,
        vm: &Qemu,
        adopted: Option<&Adopted>,
    ) -> Result<(), RequestError> {
        let found = match self.vms.look(name, vm, adopted).await {
            // The size of its files does not count yet.
            Ok(found) => Departure::begin(&found.does, &found.differences, 0).map(drop),
            Err(error) => Err(error.to_string()),
        };
        let memory = check_memory(name, vm).await;
        match (memory, found) {
            (memory, Ok(())) => memory,
            (Err(RequestError::VmUnmovable { vm, reason }), Err(other)) => {
                Err(RequestError::VmUnmovable { vm, reason: format!("{reason}; {other}") })
            }
            (_, Err(reason)) => Err(RequestError::VmUnmovable { vm: name.to_owned(), reason }),
        }
    }
}

/// Checks whether the memory of a VM can be sent now.
pub(crate) async fn check_memory(name: &str, vm: &dyn Hypervisor) -> Result<(), RequestError> {
    let unmovable = |reason: String| RequestError::VmUnmovable { vm: name.to_owned(), reason };
    let silent = |error: HypervisorError| unmovable(error.to_string());
    if vm.memory_progress().await.map_err(silent)?.status.is_post_copy() {
        let text = "the rest of its memory is still arriving from its former host; wait until it is here";
        return Err(unmovable(text.to_owned()));
    }
    let reasons = vm.migration_blockers().await.map_err(silent)?;
    if reasons.is_empty() { Ok(()) } else { Err(unmovable(reasons.join("; "))) }
}
