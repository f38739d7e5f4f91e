//! A machine comes: it is started when its disks are here, loaded, and runs when they are this host's.
//!
//! ```text
//!   parcel ─► could it run? ─► Start heard ─► hook ─► started, paused ─► its memory ─► loaded, still ─► volumes owned ─► runs
//! ```

use std::future::pending;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use hypervisor::qemu::{Machine, RunState};
use tokio::net::UnixStream;
use tokio::sync::{OnceCell, watch};

use super::line::{Heard, Line};
use super::words::Word;
use super::{announce, memory_socket};
use crate::hooks::Errand;

/// How long memory may be on its way: its source gives up long before if it makes no progress.
const LOADED_MAX: Duration = Duration::from_secs(24 * 3600);

/// What becomes of a machine here is somebody else's affair: whether it could run, and starting it.
pub(crate) trait Keeper: Send + Sync {
    /// Looks whether the machine of this parcel could be run here; the text says why not.
    fn check(&self, parcel: &[u8]) -> Pin<Box<dyn Future<Output = Result<(), String>> + Send>>;

    /// Starts the machine of this parcel so that it waits for its memory; the text says why it could not.
    fn start(&self, parcel: Vec<u8>) -> Pin<Box<dyn Future<Output = Result<Arc<Machine>, String>> + Send>>;
}

/// A machine that comes.
pub(crate) struct Coming {
    line: Line,
    machine: OnceCell<Arc<Machine>>,
    /// True once nobody waits for it any more.
    is_over: watch::Sender<bool>,
    /// What is run here before and after.
    errand: Arc<Errand>,
}

impl Coming {
    /// A machine that is to come over `line`.
    pub(crate) fn new(line: Line, errand: Arc<Errand>) -> Self {
        Self { line, machine: OnceCell::new(), is_over: watch::Sender::new(false), errand }
    }

    /// A machine that was started here before this daemon was; whether it is loaded is seen when it is to run.
    pub(crate) fn found(line: Line, machine: Arc<Machine>, errand: Arc<Errand>) -> Self {
        let machine = OnceCell::new_with(Some(machine));
        Self { line, machine, is_over: watch::Sender::new(false), errand }
    }

    /// What is run here before and after.
    pub(crate) fn errand(&self) -> Arc<Errand> {
        Arc::clone(&self.errand)
    }

    /// Takes part in the copying of the memory, to its end; the source hears what becomes of it.
    pub(crate) async fn take_part(&self, keeper: &dyn Keeper) {
        match self.load(keeper).await {
            Ok(()) => self.line.say(&Word::Loaded),
            Err(reason) => {
                tracing::warn!(reason, "a machine that was to come is not loaded");
                self.line.say(&Word::failed(&reason));
            }
        }
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
        let machine = self.machine.get().ok_or("the machine is not loaded")?;
        // N.B. one that still waits for memory would begin as soon as it is told to, with whatever it has.
        match machine.status().await {
            Ok(RunState::Paused | RunState::Running) => {}
            Ok(other) => return Err(format!("the machine is not loaded: it is {other}")),
            Err(error) => return Err(error.to_string()),
        }
        machine.resume().await.map_err(|error| error.to_string())?;
        // QEMU has said it when the machine was loaded, which may be long ago. Nobody waits for it.
        let machine = Arc::clone(machine);
        tokio::spawn(async move { announce(&machine).await });
        Ok(())
    }

    async fn load(&self, keeper: &dyn Keeper) -> Result<(), String> {
        let asked = async {
            self.line.hear(&Heard::Check).await?;
            let parcel = self.line.parcel();
            keeper.check(&parcel).await?;
            self.line.say(&Word::Fits);
            self.line.hear(&Heard::Start).await?;
            Ok(parcel)
        };
        let parcel = self.unless_over(asked).await?;
        let prepared = async { self.errand.before().await.map_err(|fault| fault.to_string()) };
        self.unless_over(prepared).await?;
        // N.B. to its end in any case: what is started half nobody would end.
        let machine = keeper.start(parcel).await?;
        self.unless_over(self.receive(&machine)).await?;
        // Nobody has set it: it is started once.
        let _ = self.machine.set(machine);
        Ok(())
    }

    /// Takes the memory of a machine that waits for it.
    async fn receive(&self, machine: &Machine) -> Result<(), String> {
        let socket = memory_socket(machine);
        // What an earlier attempt may have left.
        let _ = std::fs::remove_file(&socket);
        machine.expect_memory(&socket).await.map_err(|error| error.to_string())?;
        let stream = UnixStream::connect(&socket).await;
        let _ = std::fs::remove_file(&socket);
        let stream = stream.map_err(|error| format!("the hypervisor does not take the memory: {error}"))?;
        self.line.say(&Word::Waiting);
        let breaks = async {
            match self.line.carry(stream).await {
                Ok(()) => pending().await,
                Err(error) => format!("the stream of the machine's memory broke: {error}"),
            }
        };
        tokio::select! {
            loaded = machine.await_loaded(LOADED_MAX) => loaded.map_err(|error| error.to_string()),
            reason = breaks => Err(reason),
            reason = self.line.failed() => Err(reason),
        }
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
