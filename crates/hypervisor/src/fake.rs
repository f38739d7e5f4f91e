//! A VM without a hypervisor, for tests: it moves a few bytes over the given sockets, through the same states.
//!
//! ```text
//!   source                                     target
//!   offer_memory: connects, "memory" ────────► expect_memory: listens
//!   pre-switchover, paused
//!   switch_over: "devices" ──────────────────► paused, loaded
//!   completed ◄──────────────────── "loaded" ─
//! ```
//! It has no post-copy, and answers [`HypervisorError::Refused`] to that. The methods of [`FakeVm`] itself are for tests.

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{oneshot, watch};

use crate::{
    Hypervisor, HypervisorError, HypervisorFuture, MemoryOptions, MemoryProgress, MemoryTransfer,
    MigrationStatus, PostCopyStart, RecoverMemory, RunChange, RunChanges, RunState,
};

const PRODUCT: &str = "the fake hypervisor";
const MEMORY: &[u8; 6] = b"memory";
const DEVICES: &[u8; 7] = b"devices";
const LOADED: u8 = b'L';

/// A VM that exists only in this process.
#[derive(Debug)]
pub struct FakeVm {
    socket: PathBuf,
    state: Arc<watch::Sender<FakeState>>,
}

#[derive(Clone, Debug)]
struct FakeState {
    run: RunState,
    migration: MigrationStatus,
    blockers: Vec<String>,
    /// Lets the sending task continue.
    switches: Arc<std::sync::Mutex<Option<oneshot::Sender<()>>>>,
    has_ended: bool,
    memory_limits: Vec<Option<NonZeroU64>>,
}

impl FakeVm {
    /// Makes a running VM; `socket` is the path of its memory sockets.
    pub fn running(socket: PathBuf) -> Self {
        Self::new(socket, RunState::Running)
    }

    /// Makes a VM that was started to wait for memory.
    pub fn waiting(socket: PathBuf) -> Self {
        Self::new(socket, RunState::InMigrate)
    }

    fn new(socket: PathBuf, run: RunState) -> Self {
        let state = FakeState {
            run,
            migration: MigrationStatus::None,
            blockers: Vec::new(),
            switches: Arc::default(),
            has_ended: false,
            memory_limits: Vec::new(),
        };
        Self { socket, state: Arc::new(watch::Sender::new(state)) }
    }

    /// Makes the VM unmigratable, for this reason.
    pub fn block(&self, reason: &str) {
        self.state.send_modify(|state| state.blockers.push(reason.to_owned()));
    }

    /// Changes the run state, as another program would.
    pub fn be(&self, run: RunState) {
        self.state.send_modify(|state| state.run = run);
    }

    /// Returns the limits that its transfer of memory was given, in order.
    pub fn memory_limits(&self) -> Vec<Option<NonZeroU64>> {
        self.state.borrow().memory_limits.clone()
    }

    /// Ends the VM's process.
    pub fn end(&self) {
        self.state.send_modify(|state| state.has_ended = true);
    }

    fn look<T: Send + 'static>(&self, look: impl FnOnce(&FakeState) -> T) -> HypervisorFuture<'_, T> {
        let state = self.state.borrow();
        let found = if state.has_ended { Err(gone()) } else { Ok(look(&state)) };
        Box::pin(std::future::ready(found))
    }

    fn change(
        &self,
        change: impl FnOnce(&mut FakeState) -> Result<(), HypervisorError>,
    ) -> HypervisorFuture<'_, ()> {
        let mut changed = Err(gone());
        self.state.send_modify(|state| {
            if !state.has_ended {
                changed = change(state);
            }
        });
        Box::pin(std::future::ready(changed))
    }

    async fn until<T>(
        &self,
        what: &str,
        deadline: Duration,
        mut found: impl FnMut(&FakeState) -> Option<Result<T, HypervisorError>>,
    ) -> Result<T, HypervisorError> {
        let mut states = self.state.subscribe();
        let waits = async {
            loop {
                {
                    let state = states.borrow_and_update();
                    if let Some(found) = found(&state) {
                        return found;
                    }
                    if state.has_ended {
                        return Err(gone());
                    }
                }
                let _ = states.changed().await;
            }
        };
        let waited = tokio::time::timeout(deadline, waits).await;
        waited.unwrap_or_else(|_| {
            let still = self.state.borrow().migration.to_string();
            Err(HypervisorError::Deadline { what: what.to_owned(), still, waited: deadline })
        })
    }
}

async fn send(
    state: &watch::Sender<FakeState>,
    stream: &Path,
    switched: oneshot::Receiver<()>,
) -> std::io::Result<()> {
    let mut stream = UnixStream::connect(stream).await?;
    stream.write_all(MEMORY).await?;
    set(state, RunState::FinishMigrate, MigrationStatus::PreSwitchover);
    switched.await.map_err(|_| std::io::ErrorKind::Interrupted)?;
    set(state, RunState::FinishMigrate, MigrationStatus::Device);
    stream.write_all(DEVICES).await?;
    stream.read_u8().await?;
    set(state, RunState::PostMigrate, MigrationStatus::Completed);
    Ok(())
}

async fn receive(state: &watch::Sender<FakeState>, listener: UnixListener) -> std::io::Result<()> {
    let (mut stream, _) = listener.accept().await?;
    let mut all = [0; MEMORY.len() + DEVICES.len()];
    stream.read_exact(&mut all).await?;
    stream.write_u8(LOADED).await?;
    set(state, RunState::Paused, MigrationStatus::Completed);
    Ok(())
}

fn set(state: &watch::Sender<FakeState>, run: RunState, migration: MigrationStatus) {
    state.send_modify(|state| (state.run, state.migration) = (run, migration));
}

impl Hypervisor for FakeVm {
    fn product(&self) -> String {
        PRODUCT.to_owned()
    }

    fn process(&self) -> Option<i32> {
        None
    }

    fn memory_socket(&self) -> PathBuf {
        self.socket.clone()
    }

    fn closed(&self) -> Pin<Box<dyn Future<Output = String> + Send + '_>> {
        Box::pin(async {
            let mut states = self.state.subscribe();
            let _ = states.wait_for(|state| state.has_ended).await;
            "it has ended".to_owned()
        })
    }

    fn run_state(&self) -> HypervisorFuture<'_, RunState> {
        self.look(|state| state.run.clone())
    }

    fn run_changes(&self) -> Box<dyn RunChanges> {
        let mut states = self.state.subscribe();
        let runs = states.borrow_and_update().run == RunState::Running;
        Box::new(FakeRunChanges { states, runs })
    }

    fn resume(&self) -> HypervisorFuture<'_, ()> {
        self.change(|state| {
            if state.run == RunState::InMigrate {
                return Err(refused("it waits for its memory"));
            }
            state.run = RunState::Running;
            Ok(())
        })
    }

    fn take_disks<'a>(&'a self, _socket: &'a Path) -> HypervisorFuture<'a, ()> {
        self.look(|_| ())
    }

    fn announce(&self) -> HypervisorFuture<'_, ()> {
        self.look(|_| ())
    }

    fn has_disk_over_nothing(&self) -> HypervisorFuture<'_, bool> {
        self.look(|_| false)
    }

    fn memory_bytes(&self) -> HypervisorFuture<'_, u64> {
        self.look(|_| MEMORY.len() as u64)
    }

    fn migration_blockers(&self) -> HypervisorFuture<'_, Vec<String>> {
        self.look(|state| state.blockers.clone())
    }

    fn post_copy_blocker(&self) -> HypervisorFuture<'_, Option<String>> {
        self.look(|_| Some("it has no post-copy".to_owned()))
    }

    fn knows_side_streams(&self) -> HypervisorFuture<'_, bool> {
        self.look(|_| false)
    }

    fn offer_memory<'a>(&'a self, stream: &'a Path, options: MemoryOptions) -> HypervisorFuture<'a, ()> {
        self.change(|state| {
            state.memory_limits.push(options.bandwidth_max_bytes_per_s);
            if !state.blockers.is_empty() {
                return Err(HypervisorError::Blocked { product: PRODUCT, reasons: state.blockers.clone() });
            }
            state.migration = MigrationStatus::Active;
            let (switches, switched) = oneshot::channel();
            state.switches = Arc::new(std::sync::Mutex::new(Some(switches)));
            let (shared, stream) = (Arc::clone(&self.state), stream.to_owned());
            tokio::spawn(async move {
                if send(&shared, &stream, switched).await.is_err() {
                    let was_abandoned = shared.borrow().migration == MigrationStatus::Cancelled;
                    if !was_abandoned {
                        set(&shared, RunState::Running, MigrationStatus::Failed);
                    }
                }
            });
            Ok(())
        })
    }

    fn memory_progress(&self) -> HypervisorFuture<'_, MemoryProgress> {
        self.look(|state| MemoryProgress {
            total_bytes: MEMORY.len() as u64,
            ..MemoryProgress::with_status(state.migration.clone())
        })
    }

    fn await_status<'a>(
        &'a self,
        wanted: &'a [MigrationStatus],
        deadline: Duration,
    ) -> HypervisorFuture<'a, MigrationStatus> {
        Box::pin(self.until("the migration to continue", deadline, move |state| match &state.migration {
            status if wanted.contains(status) => Some(Ok(status.clone())),
            status if status.is_end() => Some(Err(ended(status))),
            _ => None,
        }))
    }

    fn set_downtime_target(&self, _downtime: Duration) -> HypervisorFuture<'_, ()> {
        self.look(|_| ())
    }

    fn limit_memory(&self, bytes_per_s: Option<NonZeroU64>) -> HypervisorFuture<'_, ()> {
        self.change(|state| {
            state.memory_limits.push(bytes_per_s);
            Ok(())
        })
    }

    fn raise_throttle(&self, _percent: u8) -> HypervisorFuture<'_, ()> {
        self.look(|_| ())
    }

    fn begin_post_copy(&self) -> HypervisorFuture<'_, PostCopyStart> {
        Box::pin(std::future::ready(Err(refused("it has no post-copy"))))
    }

    fn switch_over(&self) -> HypervisorFuture<'_, ()> {
        self.change(|state| {
            let switches = state.switches.lock().ok().and_then(|mut switches| switches.take());
            match (switches, &state.migration) {
                (Some(switches), MigrationStatus::PreSwitchover) => {
                    // A broken stream has a status of its own.
                    let _ = switches.send(());
                    Ok(())
                }
                _ => Err(refused("it is not waiting for the switch-over")),
            }
        })
    }

    fn resend_memory<'a>(&'a self, _stream: &'a Path) -> HypervisorFuture<'a, ()> {
        Box::pin(std::future::ready(Err(refused("it has no post-copy"))))
    }

    fn abandon(&self) -> HypervisorFuture<'_, ()> {
        self.change(|state| {
            if !state.migration.is_end() && state.migration != MigrationStatus::None {
                (state.run, state.migration) = (RunState::Running, MigrationStatus::Cancelled);
                // The waiting task then breaks the stream.
                state.switches = Arc::default();
            }
            Ok(())
        })
    }

    fn expect_memory<'a>(&'a self, socket: &'a Path, _transfer: MemoryTransfer) -> HypervisorFuture<'a, ()> {
        self.change(|state| {
            if state.run != RunState::InMigrate {
                return Err(HypervisorError::State {
                    expected: RunState::InMigrate,
                    found: state.run.clone(),
                });
            }
            let listener =
                UnixListener::bind(socket).map_err(|error| HypervisorError::Refused(error.into()))?;
            let shared = Arc::clone(&self.state);
            tokio::spawn(async move {
                if receive(&shared, listener).await.is_err() {
                    set(&shared, RunState::InMigrate, MigrationStatus::Failed);
                }
            });
            Ok(())
        })
    }

    fn await_loaded(&self, deadline: Duration) -> HypervisorFuture<'_, ()> {
        Box::pin(self.until("the VM's memory to arrive", deadline, |state| {
            match (&state.run, &state.migration) {
                (RunState::Paused, _) => Some(Ok(())),
                (_, status @ MigrationStatus::Failed) => Some(Err(ended(status))),
                (RunState::InMigrate, _) => None,
                (found, _) => {
                    Some(Err(HypervisorError::State { expected: RunState::Paused, found: found.clone() }))
                }
            }
        }))
    }
}

impl RecoverMemory for FakeVm {
    fn recover_memory<'a>(&'a self, _socket: &'a Path) -> HypervisorFuture<'a, ()> {
        Box::pin(std::future::ready(Err(refused("it has no post-copy"))))
    }
}

struct FakeRunChanges {
    states: watch::Receiver<FakeState>,
    runs: bool,
}

impl RunChanges for FakeRunChanges {
    fn next(&mut self) -> Pin<Box<dyn Future<Output = Option<RunChange>> + Send + '_>> {
        Box::pin(async {
            let before = self.runs;
            let changed = |state: &FakeState| state.has_ended || (state.run == RunState::Running) != before;
            let state = self.states.wait_for(changed).await.ok()?;
            if state.has_ended {
                return None;
            }
            self.runs = !before;
            Some(if before { RunChange::Stopped } else { RunChange::Runs })
        })
    }
}

fn gone() -> HypervisorError {
    HypervisorError::Gone("it has ended".into())
}

fn refused(reason: &str) -> HypervisorError {
    HypervisorError::Refused(reason.into())
}

fn ended(status: &MigrationStatus) -> HypervisorError {
    HypervisorError::MigrationEnded { product: PRODUCT, status: status.clone(), detail: None }
}
