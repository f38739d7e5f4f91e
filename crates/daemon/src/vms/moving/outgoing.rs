//! The source's side of a moving VM: copies its memory and stops it. Then the VM is where its volumes are.
//!
//! ```text
//!   stop:  started there ─► hook ─► memory, round after round ─► paused here ─► last memory, devices ─► loaded there, still
//!                                                          ▲ downtime begins                      │
//!   then its volumes are handed over:  released ─► it ends here │ not released ─► it is resumed ◄┘
//! ```
//! If the rest of its memory may follow later (post-copy), the stop ends earlier, and [`post_copy`] handles the rest:
//!
//! ```text
//!   stop:  … ─► memory, round after round ─► paused here ─► its volumes are handed over ─► devices ─► runs there ─► the rest
//! ```
//! Nothing is decided here: until its volumes are released it can always be resumed here, whatever was sent (design §5.15).

pub(crate) mod post_copy;

use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use block::engine::clock;
use futures_channel::oneshot;
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, try_join_all};
use hypervisor::{
    Hypervisor, MemoryOptions, MemoryProgress, MigrationStatus, PostCopyStart, RunChange, RunChanges,
};
use migration::Budget;
use migration::vm::departure::{Departure, Does, Files, Step, Then};
use migration::vm::hold::Reason;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use self::post_copy::{PostCopy, PostCopyState};
use super::channel::{Last, PeerStatus, VmChannel, VmStreams};
use super::convergence::{Convergence, DOWNTIME_DIVISORS, Verdict};
use super::fault::MoveFault;
use super::message::{Terms, VmMessage};
use super::share::MemoryShare;
use super::{announce, carried};
use crate::config::HOOK_TIMEOUT_S;
use crate::hooks::HookRunner;
use crate::vms::looks::Found;
use crate::vms::qemu_sockets;
use crate::vms::{Holds, Ran, Reached};

/// How long the other host may take to check whether it could run a VM.
const CHECK_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the other host may take to start a VM that waits for its memory, including its hook.
const START_TIMEOUT: Duration = Duration::from_secs(60 + *HOOK_TIMEOUT_S.end());
/// How long the hypervisor may take to connect to the socket for its memory.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long copying the memory may take. A copy that does not converge is noticed long before.
const MEMORY_TIMEOUT: Duration = Duration::from_secs(24 * 3600);
/// How long the last of the memory and the devices may take while the VM stands still, in addition to `--max-downtime`. After
/// that the VM is better off at the source.
const DEVICE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a VM whose rest follows later may take from its pause to the switch-over: the data on its way arrives first.
const PAUSE_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the end of QEMU's monitor may come after the end of its memory stream. QEMU has the same time to say why it is late.
const FAREWELL_TIMEOUT: Duration = Duration::from_millis(100);
/// How long it may take to determine what has stopped a VM.
const JUDGED_TIMEOUT: Duration = Duration::from_secs(4);
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// Compares a leaving VM with what is known of it.
pub(crate) trait Witness: Send + Sync {
    /// Returns the VM's state and its differences.
    fn look(&self) -> BoxFuture<'_, Result<Found, MoveFault>>;

    /// Returns a checksum of its small files as they are now, and the files in the form for another host.
    fn files(&self) -> BoxFuture<'_, Result<(u64, Vec<u8>), MoveFault>>;

    /// Returns the same checksum of the files in a VM description.
    fn sum(&self, manifest: &[u8]) -> Result<u64, MoveFault>;
}

/// The figures of a VM that leaves.
#[derive(Clone, Debug, Default)]
pub(crate) struct Account {
    /// The progress of its memory; `None` before the first byte.
    pub(crate) memory: Option<MemoryProgress>,
    pub(crate) streams: u8,
    /// The state of the memory that was to follow after the switch-over; `None`: none was.
    pub(crate) post_copy: Option<PostCopyState>,
    pub(crate) stopped: Option<Instant>,
    pub(crate) loaded: Option<Instant>,
    pub(crate) runs: Option<Instant>,
}

impl Account {
    /// Returns the two parts of the downtime: until the VM was loaded at the target, and until the target said that it runs.
    pub(crate) fn downtime(&self) -> Option<(Duration, Duration)> {
        let (stopped, loaded, runs) = (self.stopped?, self.loaded?, self.runs?);
        Some((loaded.saturating_duration_since(stopped), runs.saturating_duration_since(loaded)))
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Wishes {
    pub(crate) downtime_max: Duration,
    /// The limit of the whole migration.
    pub(crate) budget: Budget,
    /// The way of its memory, if the target agrees.
    pub(crate) terms: Terms,
}

pub(crate) struct OutgoingVm {
    name: String,
    vm: Arc<dyn Hypervisor>,
    holds: Arc<Holds>,
    streams: Arc<dyn VmStreams>,
    channel: Arc<VmChannel>,
    post_copy: PostCopy,
    wishes: Wishes,
    share: Mutex<MemoryShare>,
    witness: Arc<dyn Witness>,
    /// The decisions about its move; `None`: the VM has not been compared yet.
    departure: Mutex<Option<Departure>>,
    /// Whether its last change was a stop, and this stop has been evaluated.
    stands: watch::Sender<bool>,
    is_paused_here: AtomicBool,
    /// Whether its memory has been asked for: from then on failures are noticed by the one who sends it.
    has_begun: AtomicBool,
    account: watch::Sender<Account>,
    hooks: Arc<HookRunner>,
}

impl OutgoingVm {
    /// Returns a VM that is to leave by `streams`; nothing is done yet.
    pub(crate) fn new(
        (name, vm, holds): (String, Arc<dyn Hypervisor>, Arc<Holds>),
        streams: Arc<dyn VmStreams>,
        wishes: Wishes,
        witness: Arc<dyn Witness>,
        hooks: Arc<HookRunner>,
    ) -> Self {
        let channel = Arc::new(VmChannel::new(Arc::clone(&streams)));
        let account = watch::Sender::default();
        Self {
            name,
            vm,
            holds,
            streams,
            channel,
            post_copy: PostCopy::default(),
            share: Mutex::new(MemoryShare::new(wishes.budget.clone())),
            wishes,
            witness,
            departure: Mutex::default(),
            stands: watch::Sender::new(false),
            is_paused_here: AtomicBool::new(false),
            has_begun: AtomicBool::new(false),
            account,
            hooks,
        }
    }

    pub(crate) fn hooks(&self) -> Arc<HookRunner> {
        Arc::clone(&self.hooks)
    }

    pub(crate) fn vm(&self) -> &dyn Hypervisor {
        &*self.vm
    }

    /// Asks the other host whether it could run the VM, before anything is copied. The error says why not.
    pub(crate) async fn check(&self, manifest: Vec<u8>) -> Result<(), MoveFault> {
        let sum = self.witness.sum(&manifest)?;
        let found = self.witness.look().await?;
        let departure = Departure::begin(&found.does, &found.differences, sum).map_err(MoveFault::Changed)?;
        *self.departure.lock().unwrap_or_else(PoisonError::into_inner) = Some(departure);
        self.channel.offer(manifest, self.wishes.terms);
        let fits = timeout(CHECK_TIMEOUT, self.channel.wait_for(&PeerStatus::Fits)).await;
        Ok(fits.map_err(|_| overdue("the other host to say whether it can run the VM", CHECK_TIMEOUT))??)
    }

    /// Resolves with the reason when the other host says, while only the volumes are copied, that the VM cannot come: its daemon
    /// was restarted, for example. `None`: this did not happen before the memory was sent, or the VM stays for another reason.
    pub(crate) fn refused_meanwhile(self: &Arc<Self>) -> impl Future<Output = Option<String>> + use<> {
        let (vm, failure) = (Arc::downgrade(self), self.channel.failure());
        async move {
            let reason = failure.await?;
            let vm = vm.upgrade()?;
            (!vm.has_begun.load(Ordering::Acquire)).then(|| reason.to_string())
        }
    }

    /// Records that the VM runs at the target; repetitions change nothing.
    pub(crate) fn runs_there(&self) {
        self.account.send_modify(|account| {
            account.runs.get_or_insert_with(Instant::now);
        });
    }

    pub(crate) fn account(&self) -> Account {
        self.account.borrow().clone()
    }

    /// Copies the memory and stops the VM, loaded at the target. Sends to `paused` when the VM has stopped, while its last
    /// memory and its devices are still sent. Dropping the future breaks the stream; [`OutgoingVm::go_on`] resumes the VM.
    /// After an error the VM may stand still.
    pub(crate) async fn stop(self: &Arc<Self>, paused: oneshot::Sender<()>) -> Result<(), MoveFault> {
        match self.copy_and_stop(paused).await {
            Ok(()) => Ok(()),
            Err(reason) => Err(self.first_cause(reason).await),
        }
    }

    /// Does the same as [`OutgoingVm::stop`], with the last failure as the reason.
    async fn copy_and_stop(self: &Arc<Self>, paused: oneshot::Sender<()>) -> Result<(), MoveFault> {
        self.has_begun.store(true, Ordering::Release);
        let terms = self.agreed();
        let sides = self.channel.side_streams(terms.side_streams);
        self.account.send_modify(|account| account.streams = terms.side_streams.max(1));
        self.channel.send(&VmMessage::Start);
        let waits = timeout(START_TIMEOUT, self.channel.wait_for(&PeerStatus::Waiting)).await;
        waits.map_err(|_| overdue("the VM to be started at the target", START_TIMEOUT))??;
        // The target's hooks have run by now, so what the VM needs there exists.
        tokio::select! {
            done = self.hooks.before() => done?,
            reason = self.channel.failed() => return Err(reason.into()),
        }
        // N.B. subscribed before the comparison, so that later changes by others arrive as events. The hold is durable before its
        // hypervisor may pause it: a daemon that is killed from then on knows that the VM must run.
        let changes = self.vm.run_changes();
        let found = self.witness.look().await?;
        let then = self.decide(|departure| {
            departure.before_memory(&found.does, &found.differences).map_err(MoveFault::Changed)
        })?;
        self.holds.hold(&self.name, Reason::Move, then == Then::Runs).await?;
        let socket = Listening::of(&*self.vm)?;
        let main = self.offer_memory(&socket, terms).await?;
        let channel = Arc::clone(&self.channel);
        // A task of its own, because it may outlast this future.
        let mut carrying = Carrying(tokio::spawn(async move {
            let others = async move {
                // QEMU connects them when it has begun with the main one.
                let mut carries = Vec::new();
                for side in &sides {
                    let (accepted, _) = socket.listener.accept().await?;
                    carries.push(side.stream.carry(accepted));
                }
                // N.B. The socket goes before the next move of this VM, which uses the same name.
                drop(socket);
                try_join_all(carries).await.map(drop)
            };
            carried(async { tokio::try_join!(channel.main().carry(main), others) }).await
        }));
        let sent = tokio::select! {
            sent = self.send(paused, terms) => sent,
            reason = self.note_stop(changes) => match reason {
                Err(reason) => Err(reason),
                Ok(never) => match never {},
            },
            reason = &mut carrying.0 => Err(reason.unwrap_or_else(MoveFault::from)),
            reason = self.channel.failed() => Err(reason.into()),
        };
        if let Sent::WithoutTheRest = sent? {
            self.switch_to_post_copy(carrying);
        }
        Ok(())
    }

    /// Returns why the VM did not leave: the end of its QEMU, if it has ended, or else `reason`.
    async fn first_cause(&self, reason: MoveFault) -> MoveFault {
        match timeout(FAREWELL_TIMEOUT, self.vm.closed()).await {
            Ok(_) => self.ended(),
            Err(_) => reason,
        }
    }

    /// Resumes the VM here after its volumes were not released; resolves when it runs, without a time limit.
    pub(crate) async fn go_on(&self) -> Result<(), MoveFault> {
        self.stop_post_copy();
        if let Some(reason) = self.post_copy.lost() {
            self.holds.forget(&self.name).await;
            return Err(MoveFault::MemoryLost(reason));
        }
        let vm = Arc::clone(&self.vm);
        let find = move || {
            let vm = Arc::clone(&vm);
            // It may not answer, but it is the right hypervisor.
            async move {
                match timeout(Duration::ZERO, vm.closed()).await {
                    Ok(_) => Reached::Ended,
                    Err(_) => Reached::There(vm),
                }
            }
            .boxed()
        };
        match self.holds.let_run(&self.name, find).await {
            Ran::Runs => {
                // The other QEMU may have announced to the network that the VM is there.
                announce(&*self.vm).await;
                Ok(())
            }
            Ran::Ended => Err(self.ended()),
            Ran::Elsewhere => {
                let reason =
                    "it could not start at the target before all of its memory was there, and cannot return";
                self.post_copy.lose(reason.to_owned());
                Err(MoveFault::MemoryLost(reason.to_owned()))
            }
        }
    }

    fn ended(&self) -> MoveFault {
        MoveFault::QemuEnded { vm: self.name.clone() }
    }

    /// Returns the way of the memory: as requested, as far as the target agrees.
    fn agreed(&self) -> Terms {
        let (wished, agreed) = (self.wishes.terms, self.channel.terms());
        Terms {
            side_streams: wished.side_streams.min(agreed.side_streams),
            post_copy: wished.post_copy && agreed.post_copy,
        }
    }

    /// Makes the hypervisor begin to send, and returns its main stream.
    async fn offer_memory(&self, socket: &Listening, terms: Terms) -> Result<UnixStream, MoveFault> {
        let mut options = MemoryOptions::for_downtime(self.downtime_target(DOWNTIME_DIVISORS[0]));
        options.transfer = terms.transfer();
        options.bandwidth_max_bytes_per_s = self.memory_share().begin(clock::now());
        self.vm.offer_memory(&socket.path, options).await?;
        let stream = socket.accept().await?;
        if options.bandwidth_max_bytes_per_s.is_some() {
            // The same limit holds for memory that follows after the VM runs at the target.
            self.vm.limit_memory(options.bandwidth_max_bytes_per_s).await?;
        }
        Ok(stream)
    }

    /// Gives the memory what the volumes leave of the migration's limit.
    async fn share_limit(&self, progress: &MemoryProgress) {
        let limit = self.memory_share().next(clock::now(), progress.transferred_bytes);
        let Some(limit) = limit else { return };
        if let Err(error) = self.vm.limit_memory(limit).await {
            tracing::warn!(%error, "QEMU refuses another limit for the VM's memory; the previous one stays");
        }
    }

    fn memory_share(&self) -> MutexGuard<'_, MemoryShare> {
        self.share.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records when the VM's processors stop and run, from its hypervisor's events. Between the stop and the moment when it is
    /// ready for the switch-over, the VM waits for its disks. The VM's user may also stop it. That is recorded durably, and
    /// applies at the target too. Fails if the VM has ended or this cannot be recorded: then it does not move.
    async fn note_stop(&self, mut changes: Box<dyn RunChanges>) -> Result<Infallible, MoveFault> {
        loop {
            let change = changes.next().await;
            // N.B. The time is taken before the hypervisor is asked, which answers nothing until its disks have.
            let at = Instant::now();
            let does = match change {
                Some(RunChange::Stopped) => Does::of(self.vm.run_state().await?.as_str()),
                Some(RunChange::Runs) => Does::Runs,
                None => return std::future::pending().await,
            };
            let is_ours = self.is_paused_here.load(Ordering::Acquire) && does == Does::Paused;
            let does = if is_ours { Does::Stands } else { does };
            let stopped = (does == Does::Stands).then_some(at);
            self.account.send_modify(|account| account.stopped = stopped);
            for step in self.decide(|departure| Ok(departure.changed(&does)))? {
                match step {
                    Step::Note(then) => {
                        tracing::info!(vm = %self.name, ?then, "another program has paused or resumed the moving VM");
                        self.holds.note_then(&self.name, then).await?;
                    }
                    Step::Stay(why) => return Err(MoveFault::Changed(why)),
                }
            }
            self.stands.send_replace(does != Does::Runs);
        }
    }

    /// Compares the stopped VM once more, and sends its state besides its memory.
    async fn send_last(&self) -> Result<(), MoveFault> {
        let is_to_run = || self.decide(|departure| Ok(departure.then() == Then::Runs));
        if is_to_run()? {
            // The cause of the stop is known a moment later.
            let judged = timeout(JUDGED_TIMEOUT, async {
                self.stands.subscribe().wait_for(|stands| *stands).await.is_ok()
            });
            judged
                .await
                .map_err(|_| overdue("the hypervisor to say why the VM is paused", JUDGED_TIMEOUT))?;
        }
        let found = self.witness.look().await?;
        let (sum, files) = self.witness.files().await?;
        let last =
            self.decide(|departure| departure.stopped(&found.differences, sum).map_err(MoveFault::Changed))?;
        let files = if last.files == Files::Changed { files } else { Vec::new() };
        self.channel.send_last(Last { files, stays_paused: last.then != Then::Runs });
        Ok(())
    }

    fn decide<T>(&self, ask: impl FnOnce(&mut Departure) -> Result<T, MoveFault>) -> Result<T, MoveFault> {
        let mut departure = self.departure.lock().unwrap_or_else(PoisonError::into_inner);
        ask(departure.as_mut().ok_or(MoveFault::NoVm)?)
    }

    async fn send(&self, told: oneshot::Sender<()>, terms: Terms) -> Result<Sent, MoveFault> {
        let paused = [MigrationStatus::PreSwitchover];
        let converged = tokio::select! {
            reached = self.vm.await_status(&paused, MEMORY_TIMEOUT) => {
                reached?;
                Converged::Yes
            }
            does_not = self.converge(terms) => does_not,
        };
        match converged {
            Converged::Yes => {}
            Converged::Never(reason) => return Err(MoveFault::DoesNotConverge(reason)),
            Converged::NotSoon => {
                let stopped = Instant::now();
                // N.B. from here on Sterna has paused it, whichever daemon is killed.
                let runs = self.decide(|departure| Ok(departure.then() == Then::Runs))?;
                self.holds.hold(&self.name, Reason::MoveAhead, runs).await?;
                self.is_paused_here.store(true, Ordering::Release);
                if self.vm.begin_post_copy().await? == PostCopyStart::Begun {
                    tracing::info!("the VM writes memory faster than it is sent; the rest will follow");
                    self.stands_since(stopped);
                    self.vm.await_status(&paused, PAUSE_TIMEOUT).await?;
                    self.send_last().await?;
                    let memory = self.vm.memory_progress().await.ok();
                    self.account.send_modify(|account| {
                        account.memory = memory.or(account.memory.take());
                        account.loaded = Some(Instant::now());
                        account.post_copy = Some(PostCopyState::OnItsWay);
                    });
                    return Ok(Sent::WithoutTheRest);
                }
                self.vm.await_status(&paused, MEMORY_TIMEOUT).await?;
            }
        }
        self.stands_since(Instant::now());
        // The receiver is gone if the migration has ended meanwhile.
        let _ = told.send(());
        let limit = DEVICE_TIMEOUT + self.wishes.downtime_max;
        let switched = timeout(limit, async {
            self.send_last().await?;
            self.vm.switch_over().await?;
            let completed = [MigrationStatus::Completed];
            let sent = async { Ok::<_, MoveFault>(self.vm.await_status(&completed, limit).await.map(drop)?) };
            let loaded = async { Ok(self.channel.wait_for(&PeerStatus::Loaded).await?) };
            tokio::try_join!(sent, loaded).map(drop)
        });
        match switched.await {
            Ok(switched) => switched?,
            Err(_) => return Err(self.not_loaded(limit).await),
        }
        let memory = self.vm.memory_progress().await.ok();
        self.account.send_modify(|account| {
            account.loaded = Some(Instant::now());
            account.memory = memory.or(account.memory.take());
        });
        Ok(Sent::Whole)
    }

    /// Returns why the VM is not loaded at the target `limit` after its pause: which of the two hosts is late.
    async fn not_loaded(&self, limit: Duration) -> MoveFault {
        let here = match timeout(FAREWELL_TIMEOUT, self.vm.memory_progress()).await {
            Ok(Ok(progress)) => format!("is in status {}", progress.status),
            Ok(Err(error)) => format!("does not report its status ({error})"),
            Err(_) => "does not answer".to_owned(),
        };
        let has_said = self.channel.peer_status().implies(&PeerStatus::Loaded);
        let target = if has_said { "has said" } else { "has not said" };
        MoveFault::LoadOverdue { limit, here, target }
    }

    /// Sets when the VM stopped, unless its hypervisor has reported an earlier moment.
    fn stands_since(&self, stopped: Instant) {
        self.account.send_modify(|account| {
            account.stopped.get_or_insert(stopped);
        });
    }

    /// Runs the convergence check until the rest is small enough, or will not become so.
    async fn converge(&self, terms: Terms) -> Converged {
        let mut convergence = Convergence::new(terms.transfer().mode);
        let began = Instant::now();
        loop {
            tokio::time::sleep(LOOK_INTERVAL).await;
            let Ok(progress) = self.vm.memory_progress().await else { continue };
            self.share_limit(&progress).await;
            match convergence.judge(began.elapsed(), &progress) {
                Verdict::GoOn => {}
                Verdict::DowntimeTarget { divisor } => {
                    if let Err(error) = self.vm.set_downtime_target(self.downtime_target(divisor)).await {
                        tracing::warn!(%error, "QEMU refuses another downtime limit for the transfer; the previous one stays");
                    }
                }
                Verdict::Throttle { percent } => {
                    tracing::info!(percent, "the VM writes memory faster than it is sent; it is slowed down");
                    if let Err(error) = self.vm.raise_throttle(percent).await {
                        tracing::warn!(%error, "cannot slow the VM down; its memory may not converge");
                    }
                }
                Verdict::PostCopy => return Converged::NotSoon,
                Verdict::Hopeless { reason } => return Converged::Never(reason),
            }
            self.account.send_modify(|account| account.memory = Some(progress));
        }
    }

    /// Returns a part of the downtime limit: a short downtime is tried first.
    fn downtime_target(&self, divisor: u32) -> Duration {
        (self.wishes.downtime_max / divisor).max(Duration::from_millis(1))
    }
}

/// How much of the memory went before the handover of the volumes.
enum Sent {
    /// All of it, and the VM is loaded at the target.
    Whole,
    /// The VM stands still here, and the rest goes once the volumes are the target's.
    WithoutTheRest,
}

/// Whether the remaining memory is small enough.
enum Converged {
    Yes,
    /// It shrinks too slowly, and may follow later.
    NotSoon,
    /// It will not become small enough, for this reason.
    Never(String),
}

/// The task that carries memory. Dropping this breaks the streams, which even a hanging hypervisor notices.
struct Carrying(JoinHandle<MoveFault>);

impl Drop for Carrying {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The socket to which a hypervisor sends memory.
struct Listening {
    path: PathBuf,
    _file: qemu_sockets::MadeSocket,
    listener: UnixListener,
}

impl Listening {
    /// Opens the socket beside a VM's monitor, for its QEMU.
    fn of(vm: &dyn Hypervisor) -> Result<Self, MoveFault> {
        let path = vm.memory_socket();
        let user = vm.process().and_then(qemu_sockets::user_of_process);
        let listened = qemu_sockets::listen_beside(&path, user);
        let (listener, file) = listened.map_err(|source| MoveFault::Listen { path: path.clone(), source })?;
        let listener = listener.set_nonblocking(true).and_then(|()| UnixListener::from_std(listener));
        let listener = listener.map_err(|source| MoveFault::Listen { path: path.clone(), source })?;
        Ok(Self { path, _file: file, listener })
    }

    async fn accept(&self) -> Result<UnixStream, MoveFault> {
        match timeout(CONNECT_TIMEOUT, self.listener.accept()).await {
            Ok(Ok((stream, _))) => Ok(stream),
            Ok(Err(error)) => Err(MoveFault::NotSent(error)),
            Err(_) => Err(overdue("the hypervisor to send the memory", CONNECT_TIMEOUT)),
        }
    }
}

fn overdue(what: &'static str, limit: Duration) -> MoveFault {
    MoveFault::Overdue { what, limit }
}

#[cfg(test)]
mod tests;
