//! Moves a stopped VM with its volumes: this host's part when the VM leaves, and when it arrives.
//!
//! ```text
//!   source                                        target
//!   checks ──► offer, with its name ────────────► name free ──► its volumes arrive
//!   the whole VM ────────────────────────────────► could it run? kept, durably
//!   volumes copied
//!   the whole VM, again ─────────────────────────► kept ──► hook
//!   hook ──► volumes released ───────────────────► owned
//!   left: forgotten, with its files               arrived: at home, stopped
//! ```
//! The migration of its volumes takes all other decisions, in the journals. A killed daemon repeats its part.

use std::sync::Arc;
use std::time::Duration;

use api::{Memory, MigrateVolume};
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use migration::vm::cold::{self, Form, Purpose, Step};
use migration::{HostId, MigrationId};
use tokio::sync::Mutex;
use transport::Session;

use crate::config::HOOK_TIMEOUT_S;
use crate::error::RequestError;
use crate::hooks::{HookRunner, HookSide};
use crate::host::VmOrders;
use crate::migrations::volume_hooks::VolumeHooksFault;
use crate::peers::host_id;
use crate::vms::moving::{ColdArrival, ColdKeeper, MoveFault, Patience, Terms, Turn, ask};
use crate::vms::{Extent, VmError, Vms};

/// The pause before the other host is asked again.
const ASK_INTERVAL: Duration = Duration::from_secs(2);
/// How long the other host may take to check and to keep a VM.
const KEEP_TIMEOUT: Duration = Duration::from_secs(30);
/// How long it may take with its hook. It may be restarting meanwhile.
const HANDOVER_TIMEOUT: Duration = Duration::from_secs(60 + *HOOK_TIMEOUT_S.end());

impl VmOrders {
    /// Returns the description of a stopped VM for a target host.
    pub(crate) async fn describe_cold(
        self: &Arc<Self>,
        name: &str,
        extent: Extent,
    ) -> Result<Vec<u8>, RequestError> {
        let held = self.allocated(&self.vms.get(name)?.volumes).await?;
        Ok(self.vms.describe_cold(name, held, extent).await?)
    }

    /// Returns the description with which another host can start a VM, running or not, once it has its volumes.
    pub(crate) async fn describe_as_it_is(self: &Arc<Self>, name: &str) -> Result<Vec<u8>, RequestError> {
        self.describe_cold(name, Extent::AsItIs).await
    }

    /// Returns how a VM moves whose migration a restart has found.
    pub(crate) fn form_of_moving(&self, name: &str) -> Form {
        if self.vms.is_cold(name) { Form::Cold } else { Form::Live }
    }

    /// Asks the target of this migration to keep a stopped VM for this purpose. The error says why it does not.
    pub(crate) async fn ask_to_keep(
        self: &Arc<Self>,
        session: &Session,
        migration: MigrationId,
        name: &str,
        purpose: Purpose,
    ) -> Result<(), MoveFault> {
        if !cold::is_asked(purpose) {
            return Ok(());
        }
        // N.B. read now: a target that has lost it must get it as it is.
        let description = self.describe_cold(name, Extent::Everything).await?;
        let channel = self.peers.hooks_channel(session, self.peers.own(), migration);
        let limit = match purpose {
            Purpose::Copying => KEEP_TIMEOUT,
            Purpose::Handover => HANDOVER_TIMEOUT,
        };
        ask(channel, description, purpose, Patience { again: ASK_INTERVAL, limit }).await
    }

    /// Prepares what comes before the handover of a stopped VM's volumes: the question to the target, and the hooks.
    pub(crate) fn prepare_cold_away(self: &Arc<Self>, migration: MigrationId, name: &str, session: &Session) {
        let other = self.hosts.name_of(host_id(session.peer()));
        let hooks = self.migration_hooks.hook_runner(migration, name, HookSide::Source, &other);
        let (host, session, name) = (Arc::clone(self), session.clone(), name.to_owned());
        let question = async move {
            let asked = host.ask_to_keep(&session, migration, &name, Purpose::Handover);
            asked.await.map_err(VolumeHooksFault::from)
        };
        self.volume_hooks.leaves(migration, hooks, Some(question.boxed()));
        self.migration_hooks.run_hooks_after(migration);
    }

    /// Answers the source of a stopped VM that comes with the volumes of this migration, which has another number there.
    pub(crate) fn expect_cold_vm(
        self: &Arc<Self>,
        session: &Session,
        (migration, remote): (MigrationId, MigrationId),
        name: &str,
        volumes: Vec<String>,
    ) {
        let peer: HostId = host_id(session.peer());
        let hooks =
            self.migration_hooks.hook_runner(migration, name, HookSide::Target, &self.hosts.name_of(peer));
        let turn = Arc::new(Mutex::new(Turn::Open));
        let keeper = Arc::new(ColdReception {
            host: Arc::clone(self),
            name: name.to_owned(),
            volumes,
            hooks: Arc::clone(&hooks),
            turn: Arc::clone(&turn),
        });
        let channel = self.peers.hooks_channel(session, peer, remote);
        self.moving
            .comes_cold(migration, |runtime| ColdArrival::begin(runtime, channel, (keeper, turn), hooks));
    }
}

struct ColdReception {
    host: Arc<VmOrders>,
    name: String,
    volumes: Vec<String>,
    hooks: Arc<HookRunner>,
    turn: Arc<Mutex<Turn>>,
}

impl ColdReception {
    fn check_offered(&self, description: &[u8]) -> Result<(), MoveFault> {
        let (name, volumes) = Vms::announced(description)?;
        if name != self.name || volumes != self.volumes {
            return Err(MoveFault::NotOffered { name, volumes });
        }
        Ok(())
    }
}

impl ColdKeeper for ColdReception {
    fn keep(&self, description: Vec<u8>, purpose: Purpose) -> BoxFuture<'_, Result<(), MoveFault>> {
        async move {
            self.check_offered(&description)?;
            let found = self.host.vms.what_is_kept(&description).await?;
            for step in cold::steps(found, purpose) {
                match step {
                    Step::Examine => {
                        self.host.check_vm_name(&self.name)?;
                        self.host.check_arrival(&description, Terms::default()).await?;
                    }
                    Step::Forget => self.host.vms.abandon_arrival(&self.name).await?,
                    Step::Keep => self.store(description.clone()).await?,
                    Step::RunHook => self.hooks.before().await?,
                    Step::Answer => {}
                    Step::Refuse => return Err(VmError::Exists(self.name.clone()).into()),
                }
            }
            Ok(())
        }
        .boxed()
    }
}

impl ColdReception {
    /// Makes the VM durable, to the end in any case: nothing would forget a VM that is kept after the migration has ended.
    async fn store(&self, description: Vec<u8>) -> Result<(), MoveFault> {
        let (host, turn) = (Arc::clone(&self.host), Arc::clone(&self.turn));
        let stored = tokio::spawn(async move {
            let turn = turn.lock().await;
            if *turn == Turn::Over {
                return Err(MoveFault::MigrationEnded);
            }
            Ok(host.vms.keep_cold(&description).await?)
        });
        stored.await?
    }
}

/// Refuses an order that means nothing for a stopped VM.
pub(crate) fn check_cold_order(name: &str, order: &MigrateVolume) -> Result<(), RequestError> {
    let is_of_memory = match order {
        MigrateVolume { memory: Memory::PostCopy, .. } => Some("--memory post-copy"),
        MigrateVolume { memory_streams: Some(_), .. } => Some("--memory-streams"),
        _ => None,
    };
    let option = match (is_of_memory, order.strategy.leaves_blocks()) {
        (Some(option), _) => option.to_owned(),
        (None, true) => format!("--strategy {}", order.strategy.name()),
        (None, false) => return Ok(()),
    };
    let reason = format!(
        "it is stopped, so nothing waits for its memory or its disks: leave {option} out, or start the VM first"
    );
    Err(RequestError::VmUnmovable { vm: name.to_owned(), reason })
}
