//! A VM comes: it is started when its disks are here, loaded, and runs when they are this host's.
//!
//! ```text
//!   manifest ─► could it run? ─► Start received ─► hook ─► started, paused ─► its memory ─► loaded, still ─► volumes owned ─► runs
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

/// How long memory may be on its way: its source gives up long before if it makes no progress.
const LOADED_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// How long the streams of a VM that is loaded may take to close: what both hypervisors say last is to arrive.
const CLOSED_TIMEOUT: Duration = Duration::from_secs(10);

/// What the host does for a VM that comes: it judges whether the VM could run, starts it, and keeps its state.
pub(crate) trait Keeper: Send + Sync {
    /// Looks whether the VM of this manifest could be run here, and on which of the wished terms its memory can come.
    fn check(
        &self,
        manifest: &[u8],
        wished: Terms,
    ) -> Pin<Box<dyn Future<Output = Result<Terms, MoveFault>> + Send>>;

    /// The VM runs here, and its memory never will be whole: ends it, and remembers why.
    fn lose(&self, reason: String) -> Pin<Box<dyn Future<Output = ()> + Send>>;

    /// The VM has all that its source's hypervisor had: makes durable what it keeps beside its volumes and is not in its
    /// memory.
    fn keep(&self) -> Pin<Box<dyn Future<Output = Result<(), MoveFault>> + Send>>;

    /// Writes the VM's files, which its QEMU has open, as they were when it stood still.
    fn renew(&self, files: Vec<u8>) -> Pin<Box<dyn Future<Output = Result<(), MoveFault>> + Send>>;

    /// Makes durable that the VM was paused by somebody else, and stays so.
    fn stays_paused(&self) -> Pin<Box<dyn Future<Output = Result<(), MoveFault>> + Send>>;

    /// Starts the VM of this manifest so that it waits for its memory, which comes on these terms.
    fn start(
        &self,
        manifest: Vec<u8>,
        terms: Terms,
    ) -> Pin<Box<dyn Future<Output = Result<Arc<dyn Hypervisor>, MoveFault>> + Send>>;
}

/// A VM that comes.
pub(crate) struct IncomingVm {
    channel: VmChannel,
    /// Its hypervisor, once that waits for its memory.
    started: OnceCell<Arc<dyn Hypervisor>>,
    /// Whether it has all that it needs to run; then why not.
    loaded: watch::Sender<Option<Result<(), Arc<MoveFault>>>>,
    /// Whether it runs, or is to, before all of its memory is here.
    runs_ahead: AtomicBool,
    /// Somebody has paused it where it was, and it stays so.
    stays_paused: AtomicBool,
    /// True once nobody waits for it any more.
    is_over: watch::Sender<bool>,
    /// Runs the hooks of this host.
    hooks: Arc<HookRunner>,
}

impl IncomingVm {
    /// A VM that is to come over `channel`.
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

    /// A VM that was started here before this daemon was; whether it is loaded is seen when it is to run.
    pub(crate) fn found(channel: VmChannel, vm: Arc<dyn Hypervisor>, hooks: Arc<HookRunner>) -> Self {
        let started = OnceCell::new_with(Some(vm));
        Self { started, loaded: watch::Sender::new(Some(Ok(()))), ..Self::new(channel, hooks) }
    }

    /// It may run here without all of its memory, from before this daemon began.
    pub(crate) fn may_run_ahead(self) -> Self {
        self.runs_ahead.store(true, Ordering::Release);
        self
    }

    /// It stays paused when it is here, from before this daemon began.
    pub(crate) fn staying_paused(self) -> Self {
        self.stays_paused.store(true, Ordering::Release);
        self
    }

    /// Runs the hooks of this host.
    pub(crate) fn hooks(&self) -> Arc<HookRunner> {
        Arc::clone(&self.hooks)
    }

    /// Takes part in the copying of the memory, to its end; the source hears what becomes of it.
    pub(crate) async fn take_part(&self, keeper: &dyn Keeper) {
        if let Err(reason) = self.load(keeper).await {
            tracing::warn!(%reason, "a VM that was to come is not loaded");
            self.channel.send(&VmMessage::failed(&reason.to_string()));
            self.loaded.send_replace(Some(Err(Arc::new(reason))));
        }
    }

    /// Whether it runs before all of its memory is here: what carries that is to go on.
    pub(crate) fn runs_ahead(&self) -> bool {
        self.runs_ahead.load(Ordering::Acquire)
    }

    /// Ends [`IncomingVm::take_part`] soon: the migration does not wait for it any more.
    pub(crate) fn give_up(&self) {
        self.is_over.send_replace(true);
    }

    /// Lets the VM run.
    ///
    /// # Errors
    /// Why it does not.
    pub(crate) async fn run(&self) -> Result<(), MoveFault> {
        let vm = self.started.get().ok_or(MoveFault::NotLoaded)?;
        let mut loaded = self.loaded.subscribe();
        if loaded.borrow().is_none() && self.channel.terms().post_copy {
            // N.B. from here on it may not be able to go on at the source any more.
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
                // It waits for a page itself, and there is no way back: another stream will bring that page.
                Err(MoveFault::Hypervisor(HypervisorError::Silent(_))) if self.runs_ahead() => {}
                Err(reason) => return Err(reason),
            }
        }
        // QEMU has said it when the VM was loaded, which may be long ago. Nobody waits for it.
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
        // N.B. to its end in any case: what is started half nobody would end.
        let vm = keeper.start(manifest, terms).await?;
        // It is started once.
        let _ = self.started.set(Arc::clone(&vm));
        self.receive(&*vm, terms, keeper).await
    }

    /// Takes the memory of a VM that waits for it.
    async fn receive(&self, vm: &dyn Hypervisor, terms: Terms, keeper: &dyn Keeper) -> Result<(), MoveFault> {
        let socket = &vm.memory_socket();
        let file = SocketFile(socket.clone());
        // What an earlier attempt may have left.
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
        // N.B. before anybody hears that it is loaded: its source may forget it then.
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
        // N.B. the next move of this VM uses the same name.
        drop(file);
        if !terms.post_copy {
            // N.B. the last bytes of the hypervisor here may not have been read yet, and the source's waits for them.
            let closed = async { Ok(timeout(CLOSED_TIMEOUT, carries).await) };
            // That the migration has ended meanwhile is as good: nobody waits for them any more.
            let _ = self.unless_over(closed).await;
        } else {
            post_copy::until_whole(vm, &self.channel, carries, keeper).await;
        }
        Ok(())
    }

    /// Lets the VM run that is loaded, unless it stays paused: then it has its disks.
    async fn resume(&self, vm: &dyn Hypervisor) -> Result<(), MoveFault> {
        // N.B. one that still waits for memory would begin as soon as it is told to, with whatever it has.
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
