//! A machine comes: it is started when its disks are here, loaded, and runs when they are this host's.
//!
//! ```text
//!   parcel ─► could it run? ─► Start heard ─► hook ─► started, paused ─► its memory ─► loaded, still ─► volumes owned ─► runs
//! ```

pub(crate) mod trail;

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::try_join_all;
use hypervisor::{Hypervisor, HypervisorError, RunState};
use tokio::sync::{OnceCell, watch};

use super::line::{Heard, Line};
use super::stream::Turn;
use super::words::{Terms, Word};
use super::{SocketFile, announce, carried};
use crate::hooks::Errand;
use crate::qemu_sockets;

/// How long memory may be on its way: its source gives up long before if it makes no progress.
const LOADED_MAX: Duration = Duration::from_secs(24 * 3600);

/// What is said of a machine that is to run and cannot.
const NOT_LOADED: &str = "the VM is not loaded";

/// What becomes of a machine here is somebody else's affair: whether it could run, and starting it.
pub(crate) trait Keeper: Send + Sync {
    /// Looks whether the machine of this parcel could be run here, and on which of the wished terms its memory can come; the
    /// text says why not.
    fn check(
        &self,
        parcel: &[u8],
        wished: Terms,
    ) -> Pin<Box<dyn Future<Output = Result<Terms, String>> + Send>>;

    /// The machine runs here, and its memory never will be whole: ends it, and remembers why.
    fn lose(&self, reason: String) -> Pin<Box<dyn Future<Output = ()> + Send>>;

    /// The machine has all that its source's hypervisor had: makes durable what it keeps beside its volumes and is not in its
    /// memory; the text says why that cannot be.
    fn keep(&self) -> Pin<Box<dyn Future<Output = Result<(), String>> + Send>>;

    /// Starts the machine of this parcel so that it waits for its memory, which comes on these terms; the text says why it
    /// could not.
    fn start(
        &self,
        parcel: Vec<u8>,
        terms: Terms,
    ) -> Pin<Box<dyn Future<Output = Result<Arc<dyn Hypervisor>, String>> + Send>>;
}

/// A machine that comes.
pub(crate) struct Coming {
    line: Line,
    /// Its hypervisor, once that waits for its memory.
    started: OnceCell<Arc<dyn Hypervisor>>,
    /// Whether it has all that it needs to run; then why not.
    loaded: watch::Sender<Option<Result<(), String>>>,
    /// Whether it runs, or is to, before all of its memory is here.
    runs_ahead: AtomicBool,
    /// True once nobody waits for it any more.
    is_over: watch::Sender<bool>,
    /// What is run here before and after.
    errand: Arc<Errand>,
}

impl Coming {
    /// A machine that is to come over `line`.
    pub(crate) fn new(line: Line, errand: Arc<Errand>) -> Self {
        Self {
            line,
            started: OnceCell::new(),
            loaded: watch::Sender::new(None),
            runs_ahead: AtomicBool::new(false),
            is_over: watch::Sender::new(false),
            errand,
        }
    }

    /// A machine that was started here before this daemon was; whether it is loaded is seen when it is to run.
    pub(crate) fn found(line: Line, vm: Arc<dyn Hypervisor>, errand: Arc<Errand>) -> Self {
        let started = OnceCell::new_with(Some(vm));
        Self { started, loaded: watch::Sender::new(Some(Ok(()))), ..Self::new(line, errand) }
    }

    /// It may run here without all of its memory, from before this daemon began.
    pub(crate) fn may_run_ahead(self) -> Self {
        self.runs_ahead.store(true, Ordering::Release);
        self
    }

    /// What is run here before and after.
    pub(crate) fn errand(&self) -> Arc<Errand> {
        Arc::clone(&self.errand)
    }

    /// Takes part in the copying of the memory, to its end; the source hears what becomes of it.
    pub(crate) async fn take_part(&self, keeper: &dyn Keeper) {
        if let Err(reason) = self.load(keeper).await {
            tracing::warn!(reason, "a VM that was to come is not loaded");
            self.line.say(&Word::failed(&reason));
            self.loaded.send_replace(Some(Err(reason)));
        }
    }

    /// Whether it runs before all of its memory is here: what carries that is to go on.
    pub(crate) fn runs_ahead(&self) -> bool {
        self.runs_ahead.load(Ordering::Acquire)
    }

    /// Nobody waits for it any more: [`Coming::take_part`] ends soon.
    pub(crate) fn give_up(&self) {
        self.is_over.send_replace(true);
    }

    /// Lets the machine run.
    ///
    /// # Errors
    /// Why it does not.
    pub(crate) async fn run(&self) -> Result<(), String> {
        let vm = self.started.get().ok_or(NOT_LOADED)?;
        let mut loaded = self.loaded.subscribe();
        if loaded.borrow().is_none() && self.line.terms().post_copy {
            // N.B. from here on it may not be able to go on at the source any more.
            self.runs_ahead.store(true, Ordering::Release);
            self.line.say(&Word::Owned);
            // The sender lives as long as this.
            let _ = loaded.wait_for(Option::is_some).await;
        }
        loaded.borrow().clone().unwrap_or_else(|| Err(NOT_LOADED.to_owned()))?;
        loop {
            let resumed = tokio::select! {
                resumed = resume(&**vm) => resumed,
                lost = self.line.lost() => return Err(lost),
            };
            match resumed {
                Ok(()) => break,
                // It waits for a page itself, and there is no way back: another stream will bring that page.
                Err(NotResumed::Silent(_)) if self.runs_ahead() => {}
                Err(NotResumed::Silent(reason) | NotResumed::Refused(reason)) => return Err(reason),
            }
        }
        // QEMU has said it when the machine was loaded, which may be long ago. Nobody waits for it.
        let vm = Arc::clone(vm);
        tokio::spawn(async move { announce(&*vm).await });
        Ok(())
    }

    async fn load(&self, keeper: &dyn Keeper) -> Result<(), String> {
        let asked = async {
            self.line.hear(&Heard::Check).await?;
            let parcel = self.line.parcel();
            let terms = keeper.check(&parcel, self.line.terms()).await?;
            self.line.accept(terms);
            self.line.hear(&Heard::Start).await?;
            Ok((parcel, terms))
        };
        let (parcel, terms) = self.unless_over(asked).await?;
        let prepared = async { self.errand.before().await.map_err(|fault| fault.to_string()) };
        self.unless_over(prepared).await?;
        // N.B. to its end in any case: what is started half nobody would end.
        let vm = keeper.start(parcel, terms).await?;
        // It is started once.
        let _ = self.started.set(Arc::clone(&vm));
        self.receive(&*vm, terms, keeper).await
    }

    /// Takes the memory of a machine that waits for it.
    async fn receive(&self, vm: &dyn Hypervisor, terms: Terms, keeper: &dyn Keeper) -> Result<(), String> {
        let socket = &vm.memory_socket();
        let file = SocketFile(socket.clone());
        // What an earlier attempt may have left.
        let _ = std::fs::remove_file(socket);
        let expected = vm.expect_memory(&qemu_sockets::place(socket), terms.transfer()).await;
        expected.map_err(|error| error.to_string())?;
        qemu_sockets::take_out(socket).map_err(|error| format!("{}: {error}", socket.display()))?;
        let sides = self.line.side_streams(terms.side_streams);
        let (is_connected, connects) = watch::channel(false);
        let main = self.line.main().connect_and_carry(socket, Turn::Main(is_connected));
        let others =
            sides.iter().map(|side| side.stream.connect_and_carry(socket, Turn::AfterMain(connects.clone())));
        let others = try_join_all(others);
        let carries = async { tokio::try_join!(main, others).map(drop) }.fuse();
        tokio::pin!(carries);
        self.line.say(&Word::Waiting);
        let loads = async {
            tokio::select! {
                loaded = vm.await_loaded(LOADED_MAX) => loaded.map_err(|error| error.to_string()),
                reason = carried(&mut carries) => Err(reason),
                reason = self.line.failed() => Err(reason),
            }
        };
        self.unless_over(loads).await?;
        // N.B. before anybody hears that it is loaded: its source may forget it then.
        keeper.keep().await?;
        self.loaded.send_replace(Some(Ok(())));
        self.line.say(&Word::Loaded);
        // N.B. the next move of this machine uses the same name.
        drop(file);
        if terms.post_copy {
            trail::until_whole(vm, &self.line, carries, keeper).await;
        }
        Ok(())
    }

    async fn unless_over<T>(&self, work: impl Future<Output = Result<T, String>>) -> Result<T, String> {
        let mut is_over = self.is_over.subscribe();
        tokio::select! {
            result = work => result,
            // The sender lives as long as this.
            _ = is_over.wait_for(|over| *over) => Err("its migration has ended".to_owned()),
        }
    }
}

/// Why a loaded machine does not run.
enum NotResumed {
    /// Its hypervisor does not answer.
    Silent(String),
    /// Anything else.
    Refused(String),
}

/// Lets a machine run that is loaded.
async fn resume(vm: &dyn Hypervisor) -> Result<(), NotResumed> {
    let explain = |error: HypervisorError| match error {
        HypervisorError::Silent(_) => NotResumed::Silent(error.to_string()),
        error => NotResumed::Refused(error.to_string()),
    };
    // N.B. one that still waits for memory would begin as soon as it is told to, with whatever it has.
    match vm.run_state().await.map_err(explain)? {
        RunState::Paused | RunState::Running => vm.resume().await.map_err(explain),
        other => Err(NotResumed::Refused(format!("the VM is not loaded: it is {other}"))),
    }
}
