//! The source's side of a VM that runs at the target before all of its memory is there.
//!
//! ```text
//!   stands still here ─► volumes released ─► Owned received ─► its devices ─► runs there
//!                                                                            │ pages, as it asks for them, and all others
//!             Recover ◄── the stream has broken: a daemon was killed ◄───────┤
//!                └──────────── another stream ──────────────────────────────►│
//!                      Lost: either hypervisor has ended ◄───────────────────┤
//!     is it complete there? ◄── all is sent, the stream has broken, this ◄──┤
//!        │        │         hypervisor does not notice                       │
//!        ▼        ▼                                                          ▼
//!      Lost     Complete                                                     │
//!                                                                            ▼
//!                                                       Complete: this hypervisor can end
//! ```
//! **N.B.** After *its devices* are sent this VM never runs here again: its memory changes at the target, and no host has all
//! of it until the last of it has arrived there.

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

const LOOK_INTERVAL: Duration = Duration::from_millis(200);
/// How long the other host may take to say that it expects the rest over another stream, before it is asked again.
const EXPECTED_TIMEOUT: Duration = Duration::from_secs(5);
/// How often the other host may answer that it does not know whether everything has come. Its hypervisor may fail to answer
/// for some seconds each time.
const REFUSED_MAX: u32 = 20;
/// How long the hypervisor may take to begin with another stream.
const RECOVERED_TIMEOUT: Duration = Duration::from_secs(10);
/// The pause before the next attempt with another stream.
const RECOVER_INTERVAL: Duration = Duration::from_millis(500);
/// How long a hypervisor that has sent everything may take to notice that its stream has broken, before the other host is asked
/// whether everything has come. It usually takes milliseconds. QEMU 7.2 never notices it then, and 10.0 fails at once.
const NOTICED_TIMEOUT: Duration = Duration::from_secs(5);

/// The state of the memory that follows after the switch-over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PostCopyState {
    /// It is not complete.
    OnItsWay,
    /// All of it is at the target.
    Complete,
    /// It never will be complete.
    Lost { reason: String },
}

/// The transfer of the rest of a VM's memory.
#[derive(Default)]
pub(super) struct PostCopy {
    state: Mutex<PostCopyTasks>,
    /// Whether the volumes are durably the target's.
    is_released: AtomicBool,
}

#[derive(Default)]
struct PostCopyTasks {
    /// The task that carries the stream, while there is one.
    carrying: Option<Carrying>,
    /// The task that waits until the volumes are the target's.
    switches: Option<AbortHandle>,
    /// The task that handles the rest, once there is one, and the future that waits for it. Each of the volumes may wait.
    goes: Option<(AbortHandle, Shared<BoxFuture<'static, ()>>)>,
    lost: Option<String>,
}

impl PostCopy {
    pub(super) fn lost(&self) -> Option<String> {
        self.lock().lost.clone()
    }

    /// Records that the memory is lost.
    pub(super) fn lose(&self, reason: String) {
        self.lock().lost.get_or_insert(reason);
    }

    /// The state stays consistent after a panic of another holder.
    fn lock(&self) -> MutexGuard<'_, PostCopyTasks> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OutgoingVm {
    pub(crate) fn memory_lost(&self) -> Option<String> {
        self.post_copy.lost()
    }

    /// Records that the volumes are durably the target's.
    pub(crate) fn released(&self) {
        self.post_copy.is_released.store(true, Ordering::Release);
    }

    /// Begins the switch-over of a stopped VM: the rest goes once the volumes are the target's.
    pub(super) fn switch_to_post_copy(self: &Arc<Self>, carrying: Carrying) {
        let leaving = Arc::clone(self);
        let switches = tokio::spawn(async move {
            match leaving.switch_over_when_owned().await {
                // N.B. The VM need not run there yet: missing memory may keep it, or its daemon, from confirming that.
                Ok(()) => drop(leaving.memory_has_gone(&Handle::current())),
                Err(reason) => {
                    // The target returns the volumes if the VM does not run there.
                    tracing::warn!(%reason, "cannot switch a paused VM over to the target");
                    leaving.channel.send(&VmMessage::failed(&reason.to_string()));
                }
            }
        });
        let mut state = self.post_copy.lock();
        (state.carrying, state.switches) = (Some(carrying), Some(switches.abort_handle()));
    }

    /// Breaks the stream, because nothing more is to go.
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

    /// Handles the rest after a restart of this daemon, if the VM was switched over before. It may run at the target already.
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
        // N.B. The target's message is not enough: if it came before the release, the VM would run without its disks.
        if !self.post_copy.is_released.load(Ordering::Acquire) {
            return Err(MoveFault::NotReleased);
        }
        self.vm.switch_over().await?;
        let begun = [MigrationStatus::PostcopyActive, MigrationStatus::Completed];
        self.vm.await_status(&begun, DEVICE_TIMEOUT).await?;
        Ok(())
    }

    /// Resolves when all of the memory is at the target, or never will be. The first call starts the work, whether the
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
        // Since when everything is sent, and no task carries the stream.
        let mut unnoticed: Option<Instant> = None;
        // How often the other host did not know whether everything has come.
        let mut refused = 0_u32;
        let rest = loop {
            match channel.peer_status() {
                PeerStatus::Complete => break PostCopyState::Complete,
                PeerStatus::Lost(reason) => break PostCopyState::Lost { reason },
                // The other daemon was restarted, so the data on its way is lost.
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
                            tracing::info!(%reason, "it is not known yet whether all of a VM's memory has arrived");
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
                    self.share_limit(&progress).await;
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
                            tracing::info!(%reason, "cannot send the rest of a VM's memory yet; trying again");
                            sleep(RECOVER_INTERVAL).await;
                        }
                    }
                }
                // Complete, as nearly always; or nothing was to follow at all.
                MigrationStatus::Completed | MigrationStatus::None | MigrationStatus::Cancelled => {
                    break PostCopyState::Complete;
                }
                // N.B. The VM was never switched over, and the volumes are the target's, which has served them since a restart.
                MigrationStatus::Setup | MigrationStatus::Active | MigrationStatus::PreSwitchover => {
                    let reason = "a daemon was stopped before the VM's devices were sent".to_owned();
                    self.account.send_modify(|account| account.post_copy = Some(PostCopyState::OnItsWay));
                    channel.send(&VmMessage::lost(&reason));
                    break PostCopyState::Lost { reason };
                }
                // A transient status.
                _ => self.await_change(&channel).await,
            }
        };
        let post_copy = self.account.borrow().post_copy.is_some();
        if let (true, PostCopyState::Lost { reason }) = (post_copy, &rest) {
            tracing::error!(reason, "the memory of a VM that has moved is lost");
            self.post_copy.lose(reason.clone());
            self.hooks().note(format!(
                "the VM's memory was lost before all of it had arrived ({reason}); its disks are complete, at the target: start \
                 it there (sterna vm start)"
            ));
        }
        let memory = self.vm.memory_progress().await.ok();
        self.account.send_modify(|account| {
            account.memory = memory.or(account.memory.take());
            account.post_copy = post_copy.then_some(rest);
        });
    }

    /// Waits for a relevant change, for a limited time.
    async fn await_change(&self, channel: &VmChannel) {
        let changes = [MigrationStatus::Completed, MigrationStatus::PostcopyPaused];
        let known = channel.peer_status();
        tokio::select! {
            // The caller checks the state anew in any case.
            _ = self.vm.await_status(&changes, LOOK_INTERVAL) => {}
            _ = channel.peer_changed(&known) => {}
        }
    }

    fn is_carried(&self) -> bool {
        self.post_copy.lock().carrying.as_ref().is_some_and(|carrying| !carrying.0.is_finished())
    }

    /// Asks the other host whether everything has come, because the stream has broken for good.
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
                reason: overdue("the other host to report whether all of it has arrived", EXPECTED_TIMEOUT),
            },
            Ok(PeerStatus::Complete) => Asked::Told(PostCopyState::Complete),
            Ok(PeerStatus::Lost(reason)) => Asked::Told(PostCopyState::Lost { reason }),
            Ok(PeerStatus::Failed(reason)) => Asked::Refused { reason },
            // The target still waits for missing memory.
            Ok(_) => {
                if self.vm.memory_progress().await.is_ok_and(|progress| progress.status != *status) {
                    return Asked::TakesAnother;
                }
                let product = self.vm.product();
                let reason = format!(
                    "a daemon was stopped after {product} at the source had sent all of the memory and before all of it had \
                     arrived, and QEMU sends no page twice"
                );
                channel.send(&VmMessage::lost(&reason));
                Asked::Told(PostCopyState::Lost { reason })
            }
        }
    }

    /// Sends the rest over another stream.
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
        tracing::info!("the rest of a VM's memory is sent over another stream");
        let channel = Arc::clone(channel);
        let carrying = Carrying(tokio::spawn(async move {
            // It lives as long as its stream.
            let _line = channel;
            carried(side.stream.carry(accepted)).await
        }));
        // N.B. QEMU is slow to report that it has left the paused state. Acting on the old status would break this stream, from
        // which QEMU 7.2 may never recover. If the status does not change soon, it is checked anew.
        let begun =
            [MigrationStatus::PostcopyRecover, MigrationStatus::PostcopyActive, MigrationStatus::Completed];
        let _ = self.vm.await_status(&begun, RECOVERED_TIMEOUT).await;
        Ok(carrying)
    }
}

/// The result of asking the other host whether all of the memory has come.
enum Asked {
    Told(PostCopyState),
    /// The hypervisor here accepts another stream after all.
    TakesAnother,
    /// The other host has not answered.
    Nothing {
        reason: MoveFault,
    },
    /// The other host does not know.
    Refused {
        reason: String,
    },
}

/// Returns the number of the stream of an attempt, which no other attempt uses soon.
fn recovery_stream(attempt: u8) -> u8 {
    FIRST_RECOVERY_STREAM.saturating_add(attempt % (u8::MAX - FIRST_RECOVERY_STREAM))
}
