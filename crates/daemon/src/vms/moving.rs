//! VMs that move between hosts: their memory, and when they stand still and run.
//!
//! ```text
//!   source's lane ── stop_vm, entered ──► VmMoves ──► OutgoingVm ══ Line ══► IncomingVm ◄── VmMoves ◄── run_machine ── target's
//! ```
//! A VM is where its volumes are. The decisions about these, in the journals of both hosts, apply to the VM.

pub(crate) mod channel;
mod choice;
mod cold;
mod convergence;
mod fault;
mod incoming;
pub(crate) mod message;
mod outgoing;
mod share;
mod stream;
mod window;

use std::collections::BTreeMap;
use std::future::pending;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_channel::oneshot;
use hypervisor::Hypervisor;
use migration::journal::Outcome;
use migration::session::VmPlace;
use migration::{MigrationId, Phase};
use tokio::task::{AbortHandle, JoinHandle};

use crate::hooks::HookRunner;

pub(crate) use choice::side_streams;
pub(crate) use cold::{ColdArrival, ColdKeeper, Patience, Turn, ask};
pub(crate) use fault::{MoveFault, PeerFault};
pub(crate) use incoming::post_copy::PostCopyRecovery;
pub(crate) use incoming::{IncomingVm, Keeper};
pub(crate) use message::{Terms, VmMessage};
pub(crate) use outgoing::post_copy::PostCopyState;
pub(crate) use outgoing::{Account, OutgoingVm, Wishes, Witness};

/// The number of departed VMs whose figures are kept for `migration list`.
const ACCOUNTS_MAX: usize = 100;

pub(crate) struct VmMoves {
    runtime: tokio::runtime::Handle,
    leaving: Mutex<BTreeMap<MigrationId, Departure>>,
    coming: Mutex<BTreeMap<MigrationId, Arrival>>,
    /// The stopped VMs that arrive.
    cold: Mutex<BTreeMap<MigrationId, ColdArrival>>,
    /// The figures of VMs that have left since this daemon began.
    gone: Mutex<BTreeMap<MigrationId, Account>>,
}

struct Arrival {
    coming: Arc<IncomingVm>,
    /// The task that receives its memory.
    takes_part: Option<JoinHandle<()>>,
}

struct Departure {
    leaving: Arc<OutgoingVm>,
    /// The task that copies the memory, while there is one.
    stops: Option<AbortHandle>,
}

impl VmMoves {
    pub(crate) fn new(runtime: tokio::runtime::Handle) -> Arc<Self> {
        Arc::new(Self {
            runtime,
            leaving: Mutex::default(),
            coming: Mutex::default(),
            cold: Mutex::default(),
            gone: Mutex::default(),
        })
    }

    pub(crate) fn leaves(&self, migration: MigrationId, leaving: Arc<OutgoingVm>) {
        lock(&self.leaving).insert(migration, Departure { leaving, stops: None });
    }

    /// Registers a VM that comes with the volumes of this migration, and begins to receive it.
    pub(crate) fn comes(&self, migration: MigrationId, coming: &Arc<IncomingVm>, keeper: Arc<dyn Keeper>) {
        let takes_part = {
            let coming = Arc::clone(coming);
            self.runtime.spawn(async move { coming.take_part(&*keeper).await })
        };
        let arrival = Arrival { coming: Arc::clone(coming), takes_part: Some(takes_part) };
        lock(&self.coming).insert(migration, arrival);
    }

    /// Registers a stopped VM that comes with the volumes of this migration, and begins to answer its source.
    pub(crate) fn comes_cold(
        &self,
        migration: MigrationId,
        begin: impl FnOnce(&tokio::runtime::Handle) -> ColdArrival,
    ) {
        if let Some(former) = lock(&self.cold).insert(migration, begin(&self.runtime)) {
            // Its driver was lost, and another one has taken its place.
            former.abort();
        }
    }

    /// Registers a VM that is here already, from before a restart.
    pub(crate) fn came(&self, migration: MigrationId, coming: Arc<IncomingVm>) {
        lock(&self.coming).insert(migration, Arrival { coming, takes_part: None });
    }

    /// Ends the part of a VM whose migration has ended. Returns its hooks, some of which may still have to run.
    pub(crate) async fn forget(&self, migration: MigrationId, place: VmPlace) -> Option<Arc<HookRunner>> {
        let mut hooks = None;
        if let Some(departure) = lock(&self.leaving).remove(&migration) {
            hooks = Some(departure.leaving.hooks());
            let mut gone = lock(&self.gone);
            gone.insert(migration, departure.leaving.account());
            while gone.len() > ACCOUNTS_MAX {
                gone.pop_first();
            }
        }
        let cold = lock(&self.cold).remove(&migration);
        if let Some(cold) = cold {
            hooks = Some(cold.end().await);
        }
        let arrival = lock(&self.coming).remove(&migration);
        if let Some(Arrival { coming, takes_part }) = arrival {
            hooks = Some(coming.hooks());
            if !(place == VmPlace::Here && coming.runs_ahead()) {
                coming.give_up();
            }
            // The task that carries the rest of its memory continues while there is a hypervisor.
            if !coming.runs_ahead()
                && let Some(takes_part) = takes_part
            {
                // A panic of it is in the log.
                let _ = takes_part.await;
            }
        }
        hooks
    }

    /// Returns the figures of a VM that leaves or has left.
    pub(crate) fn account(&self, migration: MigrationId) -> Option<Account> {
        let leaves = lock(&self.leaving).get(&migration).map(|departure| departure.leaving.account());
        leaves.or_else(|| lock(&self.gone).get(&migration).cloned())
    }

    /// Brings the VM of a migration to a stand; called on a lane's thread. See [`lane::Control::stop_vm`].
    pub(crate) fn stop(
        &self,
        migration: MigrationId,
        paused: oneshot::Sender<()>,
    ) -> impl Future<Output = Result<(), MoveFault>> + use<> {
        let task = lock(&self.leaving).get_mut(&migration).map(|departure| {
            let leaving = Arc::clone(&departure.leaving);
            let task = self.runtime.spawn(async move { leaving.stop(paused).await });
            departure.stops = Some(task.abort_handle());
            task
        });
        async move {
            let task = task.ok_or(MoveFault::NoVm)?;
            task.await.unwrap_or(Err(MoveFault::GivenUp))
        }
    }

    /// Resolves when all of a VM's memory is at the target, where the VM runs, or never will be; at once if there is no VM. The
    /// work is done whether the future is polled or not.
    pub(crate) fn memory_has_gone(&self, migration: MigrationId) -> impl Future<Output = ()> + Send + use<> {
        let leaving = lock(&self.leaving).get(&migration).map(|departure| Arc::clone(&departure.leaving));
        let task = leaving.map(|leaving| leaving.memory_has_gone(&self.runtime));
        async move {
            if let Some(task) = task {
                task.await;
            }
        }
    }

    /// Resumes the VM that has come by a migration; called on a lane's thread. See [`lane::Control::run_vm`].
    pub(crate) fn run(&self, migration: MigrationId) -> impl Future<Output = Result<(), MoveFault>> + use<> {
        let coming = lock(&self.coming).get(&migration).map(|arrival| Arc::clone(&arrival.coming));
        let runtime = self.runtime.clone();
        let task = coming.map(|coming| {
            self.runtime.spawn(async move {
                coming.run().await?;
                // Do not wait for the end of the migration here, which depends on the other host.
                runtime.spawn(async move { coming.hooks().after(&moved()).await });
                Ok(())
            })
        });
        async move {
            let task = task.ok_or(MoveFault::LostInRestart)?;
            task.await.unwrap_or_else(|error| Err(error.into()))
        }
    }

    /// Handles a new phase of a migration; called on a lane's thread.
    pub(crate) fn entered(&self, migration: MigrationId, phase: Phase) {
        match phase {
            // Not earlier: until then the volumes may be the target's (design §5.12).
            Phase::Discarding => {}
            Phase::Committing => {
                if let Some(departure) = lock(&self.leaving).get(&migration) {
                    departure.leaving.released();
                }
                return;
            }
            Phase::Filling | Phase::Retiring => {
                if let Some(departure) = lock(&self.leaving).get(&migration) {
                    departure.leaving.runs_there();
                }
                return;
            }
            _ => return,
        }
        let departure = lock(&self.leaving).get_mut(&migration).map(|departure| {
            // N.B. The abort breaks the stream, which even a hanging hypervisor notices.
            departure.stops.take().inspect(AbortHandle::abort);
            Arc::clone(&departure.leaving)
        });
        let Some(leaving) = departure else { return };
        self.runtime.spawn(async move {
            match leaving.go_on().await {
                Ok(()) => tracing::info!(%migration, "the VM continues here"),
                Err(reason) => {
                    tracing::error!(%migration, %reason, "cannot resume the VM here; check its state");
                }
            }
        });
    }
}

/// What the source of a VM that runs here says about the rest of its memory.
pub(crate) enum PostCopyRequest {
    /// The source offers to send it over this stream.
    Recover(u8),
    /// The memory is lost, for this reason.
    Lost(String),
}

/// Decodes a message about the rest of a VM's memory; `None`: it is another one.
pub(crate) fn post_copy_request(head: &[u8]) -> Option<PostCopyRequest> {
    match VmMessage::decode(head) {
        Ok(VmMessage::Recover { stream }) => Some(PostCopyRequest::Recover(stream)),
        Ok(VmMessage::Lost { detail }) => Some(PostCopyRequest::Lost(detail)),
        _ => None,
    }
}

/// The file of a socket, which is deleted when this is dropped.
pub(crate) struct SocketFile(pub(crate) PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        // The hypervisor may have deleted it.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Resolves with the reason when memory streams break, and never if they end normally.
async fn carried<T>(streams: impl Future<Output = io::Result<T>>) -> MoveFault {
    match streams.await {
        // Both hypervisors have sent everything.
        Ok(_) => pending().await,
        Err(error) => MoveFault::StreamBroke(error),
    }
}

/// Has the VM announce its place to the network. If that fails, the network learns it from the guest's next packet.
async fn announce(vm: &dyn Hypervisor) {
    if let Err(error) = vm.announce().await {
        tracing::warn!(%error, "cannot announce the VM to the network, which learns its place from the guest's next packet");
    }
}

fn moved() -> Outcome {
    Outcome::Moved { left_over: String::new() }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
