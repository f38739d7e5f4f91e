//! A machine leaves: its memory is copied, it is brought to a stand, and then it is where its volumes are.
//!
//! ```text
//!   stop:  started there ─► hook ─► memory, round after round ─► paused here ─► last memory, devices ─► loaded there, still
//!                                                          ▲ downtime begins                      │
//!   then its volumes are handed over:  released ─► it ends here │ not released ─► it goes on here ◄┘
//! ```
//! Nothing is decided here: until its volumes are released it can always go on, whatever was sent (design §5.15).

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use futures_channel::oneshot;
use hypervisor::qemu::{Machine, MachineError, MemoryOptions, MemoryProgress, MigrationStatus, RunState};
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use super::convergence::{AIMS, Convergence, Verdict};
use super::line::{Heard, Line};
use super::words::Word;
use super::{announce, memory_socket};
use crate::config::HOOK_TIMEOUT_S;
use crate::hooks::Errand;

/// How long the other host may take to say whether it could run a machine.
const CHECK_MAX: Duration = Duration::from_secs(30);
/// How long the other host may take to start a machine that waits for its memory, after what it runs before that.
const START_MAX: Duration = Duration::from_secs(60 + *HOOK_TIMEOUT_S.end());
/// How long the hypervisor may take to connect to where it was told to send the memory.
const CONNECT_MAX: Duration = Duration::from_secs(10);
/// How long the memory may take: what does not become less is noticed long before.
const MEMORY_MAX: Duration = Duration::from_secs(24 * 3600);
/// How long the last of the memory and the devices may take, the machine standing still; a longer `--max-downtime` is
/// added. After that the machine is better off where it was.
const DEVICE_MAX: Duration = Duration::from_secs(5);
/// How often it is looked how far the memory is.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);
/// How long a hypervisor may take to let a machine go on that was not moved.
const GO_ON_MAX: Duration = Duration::from_secs(10);
/// Pause between two attempts at that.
const GO_ON_PAUSE: Duration = Duration::from_millis(20);

/// What is known of a machine that leaves.
#[derive(Clone, Debug, Default)]
pub(crate) struct Account {
    /// How far its memory is; `None` before the first byte.
    pub(crate) memory: Option<MemoryProgress>,
    /// When it came to a stand.
    pub(crate) stopped: Option<Instant>,
    /// When it was loaded at the target.
    pub(crate) loaded: Option<Instant>,
    /// When it was heard that it runs at the target.
    pub(crate) runs: Option<Instant>,
}

impl Account {
    /// How long the machine stood still: until it was loaded at the target, and from then until it was heard to run.
    pub(crate) fn downtime(&self) -> Option<(Duration, Duration)> {
        let (stopped, loaded, runs) = (self.stopped?, self.loaded?, self.runs?);
        Some((loaded.saturating_duration_since(stopped), runs.saturating_duration_since(loaded)))
    }
}

/// A machine that leaves.
pub(crate) struct Leaving {
    machine: Arc<Machine>,
    line: Line,
    /// How long it may stand still.
    downtime_max: Duration,
    account: watch::Sender<Account>,
    /// What is run here before and after.
    errand: Arc<Errand>,
}

impl Leaving {
    /// A machine that is to leave over `line`; nothing is done yet.
    pub(crate) fn new(
        machine: Arc<Machine>,
        line: Line,
        downtime_max: Duration,
        errand: Arc<Errand>,
    ) -> Self {
        Self { machine, line, downtime_max, account: watch::Sender::default(), errand }
    }

    /// What is run here before and after.
    pub(crate) fn errand(&self) -> Arc<Errand> {
        Arc::clone(&self.errand)
    }

    /// Asks the other host whether it could run the machine, before anything is copied.
    ///
    /// # Errors
    /// Why not.
    pub(crate) async fn check(&self, parcel: Vec<u8>) -> Result<(), String> {
        self.line.offer(parcel);
        let fits = timeout(CHECK_MAX, self.line.hear(&Heard::Fits)).await;
        fits.map_err(|_| overdue("the other host to say whether it can run the machine", CHECK_MAX))?
    }

    /// The target says that the machine runs there.
    pub(crate) fn runs_there(&self) {
        self.account.send_modify(|account| account.runs = Some(Instant::now()));
    }

    /// What is known at this moment.
    pub(crate) fn account(&self) -> Account {
        self.account.borrow().clone()
    }

    /// Copies the memory and brings the machine to a stand, loaded at the target. That the future is dropped breaks the
    /// stream; [`Leaving::go_on`] lets the machine run again. `paused` is told when the machine does nothing any more, while
    /// its last memory and its devices are still sent.
    ///
    /// # Errors
    /// Why it was not moved: the machine may stand still.
    pub(crate) async fn stop(&self, paused: oneshot::Sender<()>) -> Result<(), String> {
        self.line.say(&Word::Start);
        let waits = timeout(START_MAX, self.line.hear(&Heard::Waiting)).await;
        waits.map_err(|_| overdue("the machine to be started at the target", START_MAX))??;
        // The target has run its own by now: what the machine needs there is there.
        tokio::select! {
            done = self.errand.before() => done.map_err(|fault| fault.to_string())?,
            reason = self.line.failed() => return Err(reason),
        }
        let stream = self.connect().await?;
        let breaks = async {
            match self.line.carry(stream).await {
                // Both hypervisors have said all that they had to say.
                Ok(()) => pending().await,
                Err(error) => format!("the stream of the machine's memory broke: {error}"),
            }
        };
        tokio::select! {
            sent = self.send(paused) => sent,
            reason = breaks => Err(reason),
            reason = self.line.failed() => Err(reason),
        }
    }

    /// Lets the machine go on here, after its volumes were not released.
    ///
    /// # Errors
    /// Why it does not run: somebody has to look after it.
    pub(crate) async fn go_on(&self) -> Result<(), String> {
        let deadline = Instant::now() + GO_ON_MAX;
        loop {
            let refused = match self.try_going_on().await {
                Ok(()) => {
                    // The other QEMU may have told the network already that the machine is there.
                    announce(&self.machine).await;
                    return Ok(());
                }
                Err(error) => error,
            };
            if refused.is_gone() || Instant::now() >= deadline {
                return Err(refused.to_string());
            }
            tokio::time::sleep(GO_ON_PAUSE).await;
        }
    }

    async fn connect(&self) -> Result<tokio::net::UnixStream, String> {
        let socket = memory_socket(&self.machine);
        // What an earlier attempt may have left.
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket)
            .map_err(|error| format!("cannot listen on {}: {error}", socket.display()))?;
        let aim = MemoryOptions::for_downtime(self.aim(AIMS[0]));
        let offered = self.machine.offer_memory(&socket, aim).await;
        let accepted = match offered {
            Ok(()) => timeout(CONNECT_MAX, listener.accept()).await,
            Err(error) => return Err(error.to_string()),
        };
        let _ = std::fs::remove_file(&socket);
        match accepted {
            Ok(Ok((stream, _))) => Ok(stream),
            Ok(Err(error)) => Err(format!("the hypervisor cannot send the memory: {error}")),
            Err(_) => Err(overdue("the hypervisor to send the memory", CONNECT_MAX)),
        }
    }

    async fn send(&self, told: oneshot::Sender<()>) -> Result<(), String> {
        let paused = [MigrationStatus::PreSwitchover];
        tokio::select! {
            reached = self.machine.await_status(&paused, MEMORY_MAX) => drop(reached.map_err(explain)?),
            hopeless = self.converge() => return Err(hopeless),
        }
        self.account.send_modify(|account| account.stopped = Some(Instant::now()));
        // Nobody waits for it if the migration has ended meanwhile.
        let _ = told.send(());
        let limit = DEVICE_MAX + self.downtime_max;
        let switched = timeout(limit, async {
            self.machine.switch_over().await.map_err(explain)?;
            let completed = [MigrationStatus::Completed];
            let sent =
                async { self.machine.await_status(&completed, limit).await.map(drop).map_err(explain) };
            tokio::try_join!(sent, self.line.hear(&Heard::Loaded)).map(drop)
        });
        switched.await.map_err(|_| overdue("the machine to be loaded at the target", limit))??;
        let memory = self.machine.memory_progress().await.ok();
        self.account.send_modify(|account| {
            account.loaded = Some(Instant::now());
            account.memory = memory.or(account.memory.take());
        });
        Ok(())
    }

    /// Sees to it that what is left becomes less from round to round; ends with the reason why it does not.
    async fn converge(&self) -> String {
        let mut convergence = Convergence::default();
        let began = Instant::now();
        loop {
            tokio::time::sleep(LOOK_INTERVAL).await;
            let Ok(progress) = self.machine.memory_progress().await else { continue };
            match convergence.judge(began.elapsed(), &progress) {
                Verdict::GoOn => {}
                Verdict::Aim { divisor } => {
                    if let Err(error) = self.machine.aim_at_downtime(self.aim(divisor)).await {
                        tracing::warn!(%error, "the hypervisor does not aim at another downtime");
                    }
                }
                Verdict::Throttle { percent } => {
                    tracing::info!(
                        percent,
                        "the machine writes memory faster than it is sent; it is slowed down"
                    );
                    if let Err(error) = self.machine.raise_throttle(percent).await {
                        tracing::warn!(%error, "the machine cannot be slowed down");
                    }
                }
                Verdict::Hopeless { reason } => return reason,
            }
            self.account.send_modify(|account| account.memory = Some(progress));
        }
    }

    /// A part of the stand that is allowed: a short one is tried first.
    fn aim(&self, divisor: u32) -> Duration {
        (self.downtime_max / divisor).max(Duration::from_millis(1))
    }

    async fn try_going_on(&self) -> Result<(), MachineError> {
        let under_way = self.machine.memory_progress().await?;
        match under_way.status {
            MigrationStatus::Setup | MigrationStatus::Active | MigrationStatus::PreSwitchover => {
                self.machine.abandon().await?;
            }
            // N.B. it ends by itself, because its stream is broken, and nothing else ends it (hard case E5).
            MigrationStatus::Device | MigrationStatus::Cancelling => {}
            _ => {
                if self.machine.status().await? == RunState::Running {
                    return Ok(());
                }
                return self.machine.resume().await;
            }
        }
        let ends = [MigrationStatus::Cancelled, MigrationStatus::Failed, MigrationStatus::Completed];
        self.machine.await_status(&ends, GO_ON_MAX).await?;
        match self.machine.status().await? {
            RunState::Running => Ok(()),
            _ => self.machine.resume().await,
        }
    }
}

fn overdue(what: &str, limit: Duration) -> String {
    format!("{} s were not enough for {what}", limit.as_secs())
}

#[expect(clippy::needless_pass_by_value, reason = "it is passed to map_err")]
fn explain(error: MachineError) -> String {
    error.to_string()
}
