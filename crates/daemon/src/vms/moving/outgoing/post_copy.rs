//! The source of a VM that runs at the target before all of its memory is there.
//!
//! ```text
//!   stands still here ─► volumes released ─► Owned heard ─► its devices ─► runs there
//!                                                                            │ pages, as it asks for them, and all others
//!             Recover ◄── the stream has broken: a daemon was killed ◄───────┤
//!                └──────────── another stream ──────────────────────────────►│
//!                      Lost: either hypervisor has ended ◄───────────────────┤
//!     is it whole there? ◄── all is sent, the stream has broken, and this ◄──┤
//!        │        │         hypervisor does not notice                       │
//!        ▼        ▼                                                          ▼
//!      Lost     Complete                                                     │
//!                                                                            ▼
//!                                                       Complete: this hypervisor is not needed any more
//! ```
//! **N.B.** from *its devices* on this VM never runs here again: its memory goes on at the target, and is whole nowhere
//! until the last of it has come there.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared};
use hypervisor::MigrationStatus;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout};

use super::{Carrying, DEVICE_TIMEOUT, Listening, OutgoingVm, overdue};
use crate::vms::moving::carried;
use crate::vms::moving::channel::{FIRST_RECOVERY_STREAM, PeerStatus, VmChannel};
use crate::vms::moving::fault::MoveFault;
use crate::vms::moving::message::VmMessage;

/// How often it is looked how far the rest is.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);
/// How long the other host may take to say that it expects the rest over another stream, before it is asked again.
const EXPECTED_TIMEOUT: Duration = Duration::from_secs(5);
/// How often the other host may answer that it does not know whether all has come. Its hypervisor may be silent for some
/// seconds each time.
const REFUSED_MAX: u32 = 20;
/// How long the hypervisor may take to begin with another stream.
const RECOVERED_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause before another stream is tried again.
const RECOVER_INTERVAL: Duration = Duration::from_millis(500);
/// How long a hypervisor that has sent everything may take to notice that its stream has broken, before the other host is asked
/// whether all of it has come. It is a matter of milliseconds; QEMU 7.2 never notices it then, and 10.0 fails at once.
const NOTICED_TIMEOUT: Duration = Duration::from_secs(5);

/// What has become of the memory that was to follow after the switch-over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PostCopyState {
    /// It is not all there.
    OnItsWay,
    /// All of it is at the target.
    Complete,
    /// It never will be.
    Lost { reason: String },
}

/// What is done for the rest of a VM's memory.
#[derive(Default)]
pub(super) struct PostCopy {
    state: Mutex<State>,
    /// The volumes are the target's, durably.
    is_released: AtomicBool,
}

#[derive(Default)]
struct State {
    /// What carries the stream, while there is one.
    carrying: Option<Carrying>,
    /// What waits for the volumes to be the target's.
    switches: Option<AbortHandle>,
    /// What sees to the rest, once something does, and what waits for that: each of the volumes may.
    goes: Option<(AbortHandle, Shared<BoxFuture<'static, ()>>)>,
    /// Why the memory is lost.
    lost: Option<String>,
}

impl PostCopy {
    /// Why the memory is lost, if it is.
    pub(super) fn lost(&self) -> Option<String> {
        self.lock().lost.clone()
    }

    /// The memory is lost.
    pub(super) fn lose(&self, reason: String) {
        self.lock().lost.get_or_insert(reason);
    }

    /// A panic elsewhere leaves what is carried as it was.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OutgoingVm {
    /// Why the VM's memory is lost, if it is.
    pub(crate) fn memory_lost(&self) -> Option<String> {
        self.post_copy.lost()
    }

    /// The volumes are the target's, durably.
    pub(crate) fn released(&self) {
        self.post_copy.is_released.store(true, Ordering::Release);
    }

    /// The VM stands still, and what is left goes when the volumes are the target's.
    pub(super) fn switch_to_post_copy(self: &Arc<Self>, carrying: Carrying) {
        let leaving = Arc::clone(self);
        let switches = tokio::spawn(async move {
            match leaving.switch_over_when_owned().await {
                // N.B. not only when it runs there: what it misses may be what keeps it, or its daemon, from saying so.
                Ok(()) => drop(leaving.memory_has_gone(&Handle::current())),
                Err(reason) => {
                    // The target gives the volumes back if the VM does not run there.
                    tracing::warn!(%reason, "a VM that stands still is not run at the target");
                    leaving.channel.send(&VmMessage::failed(&reason.to_string()));
                }
            }
        });
        let mut state = self.post_copy.lock();
        (state.carrying, state.switches) = (Some(carrying), Some(switches.abort_handle()));
    }

    /// Nothing more is to go: breaks the stream.
    pub(super) fn stop_post_copy(&self) {
        let mut state = self.post_copy.lock();
        if let Some(switches) = state.switches.take() {
            switches.abort();
        }
        if let Some((sees_to_it, _)) = state.goes.take() {
            sees_to_it.abort();
        }
        state.carrying = None;
    }

    /// After a restart of this daemon: sees to the rest if the VM was switched over before. Whether it runs there already is
    /// not known.
    pub(crate) fn resume_post_copy(self: &Arc<Self>) {
        let leaving = Arc::clone(self);
        tokio::spawn(async move {
            let progress = leaving.vm.memory_progress().await;
            if progress.is_ok_and(|progress| progress.status.is_post_copy()) {
                drop(leaving.memory_has_gone(&Handle::current()));
            }
        });
    }

    async fn switch_over_when_owned(&self) -> Result<(), MoveFault> {
        self.channel.wait_for(&PeerStatus::Owned).await?;
        // N.B. whoever says so too early would have the VM run without its disks.
        if !self.post_copy.is_released.load(Ordering::Acquire) {
            return Err(MoveFault::NotReleased);
        }
        self.vm.switch_over().await?;
        let begun = [MigrationStatus::PostcopyActive, MigrationStatus::Completed];
        self.vm.await_status(&begun, DEVICE_TIMEOUT).await?;
        Ok(())
    }

    /// Resolves when all of the memory is at the target, or never will be. It is seen to from the first call on, whether the
    /// future is polled or not.
    pub(crate) fn memory_has_gone(self: &Arc<Self>, runtime: &Handle) -> Shared<BoxFuture<'static, ()>> {
        let mut state = self.post_copy.lock();
        let (_, gone) = state.goes.get_or_insert_with(|| {
            let leaving = Arc::clone(self);
            let task = runtime.spawn(async move { leaving.see_memory_off().await });
            (task.abort_handle(), task.map(drop).boxed().shared())
        });
        gone.clone()
    }

    async fn see_memory_off(&self) {
        let (mut channel, mut attempt) = (Arc::clone(&self.channel), 0_u8);
        // Since when all is sent, and nothing carries it.
        let mut unnoticed: Option<Instant> = None;
        // How often the other host was asked whether all is there, and did not know.
        let mut refused = 0_u32;
        let rest = loop {
            match channel.peer_status() {
                PeerStatus::Complete => break PostCopyState::Complete,
                PeerStatus::Lost(reason) => break PostCopyState::Lost { reason },
                // The other daemon was started again: what was on its way is gone with it.
                PeerStatus::Failed(_) => self.post_copy.lock().carrying = None,
                _ => {}
            }
            let progress = match self.vm.memory_progress().await {
                Ok(progress) => progress,
                Err(error) if error.is_gone() => {
                    let reason = "its QEMU at the source has ended".to_owned();
                    channel.send(&VmMessage::lost(&reason));
                    break PostCopyState::Lost { reason };
                }
                Err(_) => continue,
            };
            let status = progress.status.clone();
            let is_sent = status == MigrationStatus::PostcopyActive && progress.remaining_bytes == 0;
            unnoticed = (is_sent && !self.is_carried()).then(|| unnoticed.unwrap_or_else(Instant::now));
            let takes_nothing = status == MigrationStatus::Failed
                || unnoticed.is_some_and(|since| since.elapsed() >= NOTICED_TIMEOUT);
            match &status {
                _ if takes_nothing => {
                    self.account.send_modify(|account| account.post_copy = Some(PostCopyState::OnItsWay));
                    self.post_copy.lock().carrying = None;
                    attempt = attempt.wrapping_add(1);
                    channel = Arc::new(VmChannel::without_main(Arc::clone(&self.streams)));
                    match self.ask_for_the_end(&channel, attempt, &status).await {
                        Asked::Told(rest) => break rest,
                        Asked::TakesAnother => {}
                        Asked::Nothing { reason } => {
                            tracing::info!(%reason, "whether all of a VM's memory has come is not known yet");
                            sleep(RECOVER_INTERVAL).await;
                        }
                        Asked::Refused { reason } => {
                            refused += 1;
                            if refused >= REFUSED_MAX {
                                channel.send(&VmMessage::lost(&reason));
                                break PostCopyState::Lost { reason };
                            }
                            sleep(RECOVER_INTERVAL).await;
                        }
                    }
                }
                MigrationStatus::PostcopyActive
                | MigrationStatus::PostcopyRecoverSetup
                | MigrationStatus::PostcopyRecover => {
                    self.account.send_modify(|account| {
                        account.memory = Some(progress);
                        account.post_copy = Some(PostCopyState::OnItsWay);
                    });
                    self.await_change(&channel).await;
                }
                MigrationStatus::PostcopyPaused => {
                    self.account.send_modify(|account| account.post_copy = Some(PostCopyState::OnItsWay));
                    self.post_copy.lock().carrying = None;
                    attempt = attempt.wrapping_add(1);
                    channel = Arc::new(VmChannel::without_main(Arc::clone(&self.streams)));
                    match self.recover(&channel, attempt).await {
                        Ok(carrying) => self.post_copy.lock().carrying = Some(carrying),
                        Err(reason) => {
                            tracing::info!(%reason, "the rest of a VM's memory waits");
                            sleep(RECOVER_INTERVAL).await;
                        }
                    }
                }
                // With all of it, as nearly always; or without having been to follow at all.
                MigrationStatus::Completed | MigrationStatus::None | MigrationStatus::Cancelled => {
                    break PostCopyState::Complete;
                }
                // N.B. it was never told to switch over, and the volumes are the target's: a restart there has served them.
                MigrationStatus::Setup | MigrationStatus::Active | MigrationStatus::PreSwitchover => {
                    let reason = "a daemon was ended before the VM's devices had gone".to_owned();
                    self.account.send_modify(|account| account.post_copy = Some(PostCopyState::OnItsWay));
                    channel.send(&VmMessage::lost(&reason));
                    break PostCopyState::Lost { reason };
                }
                // On its way to one of these.
                _ => self.await_change(&channel).await,
            }
        };
        let post_copy = self.account.borrow().post_copy.is_some();
        if let (true, PostCopyState::Lost { reason }) = (post_copy, &rest) {
            tracing::error!(reason, "the memory of a VM that has moved is lost");
            self.post_copy.lose(reason.clone());
            self.hooks().note(format!(
                "the VM's memory was lost before all of it had come ({reason}); its disks are whole, at the target: start \
                 it there (sterna vm start)"
            ));
        }
        let memory = self.vm.memory_progress().await.ok();
        self.account.send_modify(|account| {
            account.memory = memory.or(account.memory.take());
            account.post_copy = post_copy.then_some(rest);
        });
    }

    /// Waits until there may be something else to be done, but not for long.
    async fn await_change(&self, channel: &VmChannel) {
        let changes = [MigrationStatus::Completed, MigrationStatus::PostcopyPaused];
        let known = channel.peer_status();
        tokio::select! {
            // Whatever becomes of it is looked at anew.
            _ = self.vm.await_status(&changes, LOOK_INTERVAL) => {}
            _ = channel.peer_changed(&known) => {}
        }
    }

    /// Whether something carries the stream.
    fn is_carried(&self) -> bool {
        self.post_copy.lock().carrying.as_ref().is_some_and(|carrying| !carrying.0.is_finished())
    }

    /// The stream has broken, and the hypervisor here takes no other one: what has come decides.
    async fn ask_for_the_end(
        &self,
        channel: &Arc<VmChannel>,
        attempt: u8,
        status: &MigrationStatus,
    ) -> Asked {
        let stream = recovery_stream(attempt);
        channel.send(&VmMessage::Recover { stream });
        let missing = PeerStatus::Recover(stream);
        let heard = timeout(EXPECTED_TIMEOUT, async {
            let mut heard = PeerStatus::Nothing;
            while !matches!(&heard, PeerStatus::Complete | PeerStatus::Failed(_) | PeerStatus::Lost(_))
                && heard != missing
            {
                heard = channel.peer_changed(&heard).await;
            }
            heard
        });
        match heard.await {
            Err(_) => Asked::Nothing {
                reason: overdue("the other host to say whether all of it has come", EXPECTED_TIMEOUT),
            },
            Ok(PeerStatus::Complete) => Asked::Told(PostCopyState::Complete),
            Ok(PeerStatus::Lost(reason)) => Asked::Told(PostCopyState::Lost { reason }),
            Ok(PeerStatus::Failed(reason)) => Asked::Refused { reason },
            // It waits for what it misses.
            Ok(_) => {
                if self.vm.memory_progress().await.is_ok_and(|progress| progress.status != *status) {
                    return Asked::TakesAnother;
                }
                let product = self.vm.product();
                let reason = format!(
                    "a daemon was ended when {product} at the source had sent all of it and not all had come, and that \
                     QEMU sends nothing twice"
                );
                channel.send(&VmMessage::lost(&reason));
                Asked::Told(PostCopyState::Lost { reason })
            }
        }
    }

    /// Has the rest go over another stream.
    async fn recover(&self, channel: &Arc<VmChannel>, attempt: u8) -> Result<Carrying, MoveFault> {
        let stream = recovery_stream(attempt);
        let side = channel.recovery_stream(stream);
        channel.send(&VmMessage::Recover { stream });
        let expected = timeout(EXPECTED_TIMEOUT, channel.wait_for(&PeerStatus::Recover(stream))).await;
        expected
            .map_err(|_| overdue("the other host to expect the rest of the memory", EXPECTED_TIMEOUT))??;
        let socket = Listening::of(&*self.vm)?;
        self.vm.resend_memory(&socket.path).await?;
        let accepted = socket.accept().await?;
        tracing::info!("the rest of a VM's memory goes over another stream");
        let channel = Arc::clone(channel);
        let carrying = Carrying(tokio::spawn(async move {
            // It lives as long as its stream.
            let _line = channel;
            carried(side.stream.carry(accepted)).await
        }));
        // N.B. QEMU takes its time to say that it is not paused any more; whoever believed that it still is would break this
        // stream, and QEMU 7.2 may never get over that. If it is not soon, that is looked at anew.
        let begun =
            [MigrationStatus::PostcopyRecover, MigrationStatus::PostcopyActive, MigrationStatus::Completed];
        let _ = self.vm.await_status(&begun, RECOVERED_TIMEOUT).await;
        Ok(carrying)
    }
}

/// What is known when the other host was asked whether all of the memory has come.
enum Asked {
    /// How it has ended.
    Told(PostCopyState),
    /// The hypervisor here takes another stream after all.
    TakesAnother,
    /// The other host has not answered.
    Nothing { reason: MoveFault },
    /// It does not know.
    Refused { reason: String },
}

/// The number of the stream of an attempt: no other has it soon.
fn recovery_stream(attempt: u8) -> u8 {
    FIRST_RECOVERY_STREAM.saturating_add(attempt % (u8::MAX - FIRST_RECOVERY_STREAM))
}
