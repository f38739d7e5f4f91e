//! The target's side of a moving VM: starts it when its disks are here, loads it, and runs it when this host owns the disks.
//!
//! ```text
//!   VM description ─► could it run? ─► Start received ─► hook ─► started, paused ─► memory ─► loaded, still ─► volumes owned ─► runs
//! ```

pub(crate) mod post_copy;

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::try_join_all;
use hypervisor::{Hypervisor, HypervisorError, RunState};
use tokio::sync::{OnceCell, watch};
use tokio::time::timeout;

use super::channel::{PeerStatus, VmChannel};
use super::fault::MoveFault;
use super::message::{Terms, VmMessage};
use super::stream::Turn;
use super::{SocketFile, announce, carried};
use crate::hooks::HookRunner;
use crate::vms::qemu_sockets;

/// How long receiving memory may take. The source abandons a copy without progress long before.
const LOADED_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// How long the streams of a loaded VM may take to close, so that the last data of both hypervisors arrives.
const CLOSED_TIMEOUT: Duration = Duration::from_secs(10);

/// The host's part for an arriving VM: checks whether the VM could run, starts it, and keeps its state.
pub(crate) trait Keeper: Send + Sync {
    /// Checks whether the described VM could run here, and on which of the requested terms its memory can come.
    fn check(
        &self,
        manifest: &[u8],
        wished: Terms,
    ) -> Pin<Box<dyn Future<Output = Result<Terms, MoveFault>> + Send>>;

    /// Ends a VM that runs here and whose memory never will be complete, and records why.
    fn lose(&self, reason: String) -> Pin<Box<dyn Future<Output = ()> + Send>>;

    /// Makes durable what a complete VM keeps besides its volumes and its memory.
    fn keep(&self) -> Pin<Box<dyn Future<Output = Result<(), MoveFault>> + Send>>;

    /// Writes the VM's files, which its QEMU has open, as they were when it stopped.
    fn renew(&self, files: Vec<u8>) -> Pin<Box<dyn Future<Output = Result<(), MoveFault>> + Send>>;

    /// Makes durable that the VM's user has paused it, so that it stays paused.
    fn stays_paused(&self) -> Pin<Box<dyn Future<Output = Result<(), MoveFault>> + Send>>;

    /// Starts the described VM so that it waits for its memory, on these terms.
    fn start(
        &self,
        manifest: Vec<u8>,
        terms: Terms,
    ) -> Pin<Box<dyn Future<Output = Result<Arc<dyn Hypervisor>, MoveFault>> + Send>>;
}

pub(crate) struct IncomingVm {
    channel: VmChannel,
    /// Its hypervisor, once it waits for the memory.
    started: OnceCell<Arc<dyn Hypervisor>>,
    /// Whether it has all that it needs to run, or why not.
    loaded: watch::Sender<Option<Result<(), Arc<MoveFault>>>>,
    /// Whether it runs, or is to run, before all of its memory is here.
    runs_ahead: AtomicBool,
    /// Whether its user had paused it, so that it stays paused.
    stays_paused: AtomicBool,
    /// True once nothing waits for it.
    is_over: watch::Sender<bool>,
    hooks: Arc<HookRunner>,
}

impl IncomingVm {
    pub(crate) fn new(channel: VmChannel, hooks: Arc<HookRunner>) -> Self {
        Self {
            channel,
            started: OnceCell::new(),
            loaded: watch::Sender::new(None),
            runs_ahead: AtomicBool::new(false),
            stays_paused: AtomicBool::new(false),
            is_over: watch::Sender::new(false),
            hooks,
        }
    }

    /// Returns a VM that an earlier daemon has started here. Whether it is loaded is checked when it is to run.
    pub(crate) fn found(channel: VmChannel, vm: Arc<dyn Hypervisor>, hooks: Arc<HookRunner>) -> Self {
        let started = OnceCell::new_with(Some(vm));
        Self { started, loaded: watch::Sender::new(Some(Ok(()))), ..Self::new(channel, hooks) }
    }

    /// Lets it run without all of its memory, as an earlier daemon did.
    pub(crate) fn may_run_ahead(self) -> Self {
        self.runs_ahead.store(true, Ordering::Release);
        self
    }

    /// Keeps it paused, as an earlier daemon did.
    pub(crate) fn staying_paused(self) -> Self {
        self.stays_paused.store(true, Ordering::Release);
        self
    }

    pub(crate) fn hooks(&self) -> Arc<HookRunner> {
        Arc::clone(&self.hooks)
    }

    /// Receives the memory to its end, and reports the result to the source.
    pub(crate) async fn take_part(&self, keeper: &dyn Keeper) {
        if let Err(reason) = self.load(keeper).await {
            tracing::warn!(%reason, "cannot load an arriving VM");
            self.channel.send(&VmMessage::failed(&reason.to_string()));
            self.loaded.send_replace(Some(Err(Arc::new(reason))));
        }
    }

    /// Returns whether it runs before all of its memory is here, so that its streams must continue.
    pub(crate) fn runs_ahead(&self) -> bool {
        self.runs_ahead.load(Ordering::Acquire)
    }

    /// Ends [`IncomingVm::take_part`] soon.
    pub(crate) fn give_up(&self) {
        self.is_over.send_replace(true);
    }

    /// Resumes the VM. The error says why it does not run.
    pub(crate) async fn run(&self) -> Result<(), MoveFault> {
        let vm = self.started.get().ok_or(MoveFault::NotLoaded)?;
        let mut loaded = self.loaded.subscribe();
        if loaded.borrow().is_none() && self.channel.terms().post_copy {
            // N.B. From here on the VM may not be able to run at the source.
            self.runs_ahead.store(true, Ordering::Release);
            self.channel.send(&VmMessage::Owned);
            // The sender lives as long as this.
            let _ = loaded.wait_for(Option::is_some).await;
        }
        loaded.borrow().clone().ok_or(MoveFault::NotLoaded)??;
        loop {
            let resumed = tokio::select! {
                resumed = self.resume(&**vm) => resumed,
                lost = self.channel.lost() => return Err(lost.into()),
            };
            match resumed {
                Ok(()) => break,
                // It waits for a page itself, and cannot return to the source: another stream will bring that page.
                Err(MoveFault::Hypervisor(HypervisorError::Silent(_))) if self.runs_ahead() => {}
                Err(reason) => return Err(reason),
            }
        }
        // QEMU announced it when the VM was loaded, which may be long ago. Nothing waits for this.
        let vm = Arc::clone(vm);
        tokio::spawn(async move { announce(&*vm).await });
        Ok(())
    }

    async fn load(&self, keeper: &dyn Keeper) -> Result<(), MoveFault> {
        let asked = async {
            self.channel.wait_for(&PeerStatus::Check).await?;
            let manifest = self.channel.manifest();
            let terms = keeper.check(&manifest, self.channel.terms()).await?;
            self.channel.accept(terms);
            self.channel.wait_for(&PeerStatus::Start).await?;
            Ok((manifest, terms))
        };
        let (manifest, terms) = self.unless_over(asked).await?;
        self.unless_over(async { Ok(self.hooks.before().await?) }).await?;
        // N.B. The start is awaited in any case: nothing would end a VM that is half started.
        let vm = keeper.start(manifest, terms).await?;
        // It is started once.
        let _ = self.started.set(Arc::clone(&vm));
        self.receive(&*vm, terms, keeper).await
    }

    async fn receive(&self, vm: &dyn Hypervisor, terms: Terms, keeper: &dyn Keeper) -> Result<(), MoveFault> {
        let socket = &vm.memory_socket();
        let file = SocketFile(socket.clone());
        // An earlier attempt may have left it.
        let _ = std::fs::remove_file(socket);
        vm.expect_memory(&qemu_sockets::place(socket), terms.transfer()).await?;
        qemu_sockets::take_out(socket)
            .map_err(|source| MoveFault::Socket { path: socket.clone(), source })?;
        let sides = self.channel.side_streams(terms.side_streams);
        let (is_connected, connects) = watch::channel(false);
        let main = self.channel.main().connect_and_carry(socket, Turn::Main(is_connected));
        let others =
            sides.iter().map(|side| side.stream.connect_and_carry(socket, Turn::AfterMain(connects.clone())));
        let others = try_join_all(others);
        let carries = async { tokio::try_join!(main, others).map(drop) }.fuse();
        tokio::pin!(carries);
        self.channel.send(&VmMessage::Waiting);
        let loads = async {
            tokio::select! {
                loaded = vm.await_loaded(LOADED_TIMEOUT) => Ok(loaded?),
                reason = carried(&mut carries) => Err(reason),
                reason = self.channel.failed() => Err(reason.into()),
            }
        };
        self.unless_over(loads).await?;
        // N.B. The files are written before the source learns that the VM is loaded, because the source may then forget the VM.
        let last = self.channel.last();
        if !last.files.is_empty() {
            keeper.renew(last.files).await?;
        }
        if last.stays_paused {
            keeper.stays_paused().await?;
            self.stays_paused.store(true, Ordering::Release);
        }
        keeper.keep().await?;
        self.loaded.send_replace(Some(Ok(())));
        self.channel.send(&VmMessage::Loaded);
        // N.B. The socket goes before the next move of this VM, which uses the same name.
        drop(file);
        if !terms.post_copy {
            // N.B. the last bytes of the hypervisor here may not have been read yet, and the source's hypervisor waits for them.
            let closed = async { Ok(timeout(CLOSED_TIMEOUT, carries).await) };
            // If the migration has ended meanwhile, nothing waits for them.
            let _ = self.unless_over(closed).await;
        } else {
            post_copy::until_whole(vm, &self.channel, carries, keeper).await;
        }
        Ok(())
    }

    /// Resumes the loaded VM, unless it stays paused.
    async fn resume(&self, vm: &dyn Hypervisor) -> Result<(), MoveFault> {
        // N.B. a guest that still waits for memory would run at once with an incomplete memory.
        match vm.run_state().await? {
            RunState::Paused | RunState::PreLaunch if self.stays_paused.load(Ordering::Acquire) => {
                let socket = vm.memory_socket();
                let _file = SocketFile(socket.clone());
                Ok(vm.take_disks(&qemu_sockets::place(&socket)).await?)
            }
            RunState::Paused | RunState::Running => Ok(vm.resume().await?),
            other => Err(MoveFault::NotPaused(other)),
        }
    }

    async fn unless_over<T>(&self, work: impl Future<Output = Result<T, MoveFault>>) -> Result<T, MoveFault> {
        let mut is_over = self.is_over.subscribe();
        tokio::select! {
            result = work => result,
            // The sender lives as long as this.
            _ = is_over.wait_for(|over| *over) => Err(MoveFault::MigrationEnded),
        }
    }
}
