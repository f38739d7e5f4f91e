//! Receives the rest of a VM's memory while the VM runs here.
//!
//! ```text
//!   loaded, runs ─► the rest comes ─► complete: Complete is sent
//!                      │       ▲
//!                broken│       │ Recover, over another stream, after a daemon was restarted. The lifeline asks QEMU for it,
//!                      ▼       │ because QEMU's main thread may wait for a page and answer only when that has come
//!                  runs on what it has
//!                      │ either hypervisor has ended
//!                      ▼
//!                    lost: it is ended, and its disks are complete here
//! ```

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, FusedFuture, Shared};
use hypervisor::{Hypervisor, MigrationStatus, RecoverMemory};
use tokio::sync::watch;
use tokio::time::timeout;

use super::{CLOSED_TIMEOUT, Keeper};
use crate::vms::moving::SocketFile;
use crate::vms::moving::channel::{FIRST_RECOVERY_STREAM, PeerStatus, VmChannel};
use crate::vms::moving::message::VmMessage;
use crate::vms::moving::stream::Turn;
use crate::vms::qemu_sockets;

/// How often the progress of the rest is checked, besides the hypervisor's events.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// How long a hypervisor that refuses another stream may take to report its progress. The source asks again a little later.
const STATUS_TIMEOUT: Duration = Duration::from_secs(4);

/// The message to the source when the hypervisor has ended.
const ENDED: &str = "its QEMU at the target has ended";
/// The message that asks the source for another stream.
const BROKEN: &str = "the stream of the VM's memory has broken at the target";

/// Receives the rest of a VM's memory, over streams that `carries` carries.
pub(super) async fn until_whole(
    vm: &dyn Hypervisor,
    channel: &VmChannel,
    mut carries: impl FusedFuture<Output = io::Result<()>> + Unpin,
    keeper: &dyn Keeper,
) {
    // A hypervisor that was offered another stream is paused until that stream has begun.
    let (mut has_begun, mut is_broken) = (false, false);
    loop {
        match channel.peer_status() {
            PeerStatus::Lost(reason) => {
                keeper.lose(reason).await;
                return;
            }
            // The other daemon was restarted. It says over which stream the rest comes.
            PeerStatus::Failed(_) => return,
            // It has abandoned this stream, and asks again.
            PeerStatus::Recover(_) => return channel.send(&VmMessage::failed(BROKEN)),
            _ => {}
        }
        let known = channel.peer_status();
        let progress = tokio::select! {
            progress = vm.memory_progress() => progress,
            // Its main thread does not answer while it waits for a page.
            _ = channel.peer_changed(&known) => continue,
            ended = &mut carries, if !carries.is_terminated() => {
                is_broken |= is_break(ended);
                continue;
            }
        };
        match progress {
            Ok(progress) => match progress.status {
                MigrationStatus::Completed | MigrationStatus::None => {
                    channel.send(&VmMessage::Complete);
                    if !carries.is_terminated() {
                        // Their result does not matter.
                        let _ = timeout(CLOSED_TIMEOUT, carries).await;
                    }
                    return;
                }
                MigrationStatus::Failed | MigrationStatus::Cancelled => {
                    let reason = "its QEMU at the target has given up";
                    channel.send(&VmMessage::lost(reason));
                    keeper.lose(reason.to_owned()).await;
                    return;
                }
                // It runs on what it has, until another stream is offered.
                MigrationStatus::PostcopyPaused if has_begun => {
                    return channel.send(&VmMessage::failed(BROKEN));
                }
                _ if is_broken => return channel.send(&VmMessage::failed(BROKEN)),
                status => has_begun |= status != MigrationStatus::PostcopyPaused,
            },
            Err(error) if error.is_gone() => return has_ended(channel, keeper).await,
            Err(_) if is_broken => return channel.send(&VmMessage::failed(BROKEN)),
            Err(_) => {}
        }
        let changes = match has_begun {
            true => [MigrationStatus::Completed, MigrationStatus::PostcopyPaused],
            false => [MigrationStatus::PostcopyActive, MigrationStatus::PostcopyRecover],
        };
        tokio::select! {
            _ = vm.await_status(&changes, LOOK_INTERVAL) => {}
            _ = channel.peer_changed(&known) => {}
            ended = &mut carries, if !carries.is_terminated() => is_broken |= is_break(ended),
        }
    }
}

/// A VM that runs here and whose stream has broken, with the ways to reach it.
pub(crate) struct PostCopyRecovery {
    /// The socket at which its hypervisor listens for its memory.
    pub(crate) memory_socket: PathBuf,
    /// The connection that works while the VM's main thread waits for memory; `None`: it was started without one.
    pub(crate) lifeline: Option<Arc<dyn RecoverMemory>>,
    /// Its hypervisor, as soon as it answers; `None`: it has ended.
    pub(crate) found: Shared<BoxFuture<'static, Option<Arc<dyn Hypervisor>>>>,
}

impl PostCopyRecovery {
    /// Receives the rest of its memory over another stream, at the source's request.
    pub(crate) async fn recover(self, channel: VmChannel, stream: u8, keeper: Arc<dyn Keeper>) {
        if stream < FIRST_RECOVERY_STREAM {
            return channel.send(&VmMessage::failed("no such stream"));
        }
        let path = self.memory_socket.clone();
        let _file = SocketFile(path.clone());
        // An earlier attempt may have left it.
        let _ = std::fs::remove_file(&path);
        if let Err(refused) = self.expect_rest(&path).await {
            return match refused {
                Refused::Says(message) => channel.send(&message),
                Refused::HasEnded => has_ended(&channel, &*keeper).await,
            };
        }
        let side = channel.recovery_stream(stream);
        let (is_connected, _) = watch::channel(false);
        let carries = side.stream.connect_and_carry(&path, Turn::Main(is_connected)).fuse();
        tokio::pin!(carries);
        channel.send(&VmMessage::Recovering { stream });
        if let Some(vm) = self.answers(&channel, &mut carries, &*keeper).await {
            until_whole(&*vm, &channel, carries, &*keeper).await;
        }
    }

    /// Handles the source's message that the rest of its memory is lost.
    pub(crate) async fn lose(self, reason: String, keeper: &dyn Keeper) {
        // A hypervisor that accepts another stream still waits for the rest, even if it does not answer.
        let waits = match &self.lifeline {
            Some(lifeline) => {
                lifeline.recover_memory(&qemu_sockets::place(&self.memory_socket)).await.is_ok()
            }
            None => false,
        };
        if waits {
            return keeper.lose(reason).await;
        }
        // It may have been started again since, or may be complete.
        let Some(vm) = self.found.await else { return keeper.lose(reason).await };
        if vm.memory_progress().await.is_ok_and(|progress| progress.status.is_post_copy()) {
            keeper.lose(reason).await;
        }
    }

    /// Makes its hypervisor listen for the rest.
    async fn expect_rest(&self, path: &Path) -> Result<(), Refused> {
        let place = qemu_sockets::place(path);
        let asked = match &self.lifeline {
            Some(lifeline) => lifeline.recover_memory(&place).await,
            None => {
                let vm = self.found.clone().await.ok_or(Refused::HasEnded)?;
                vm.recover_memory(&place).await
            }
        };
        let Err(error) = asked else {
            let taken_out = qemu_sockets::take_out(path);
            return taken_out.map_err(|error| Refused::Says(VmMessage::failed(&error.to_string())));
        };
        let status = timeout(STATUS_TIMEOUT, async {
            let vm = self.found.clone().await.ok_or(Refused::HasEnded)?;
            Ok(vm.memory_progress().await.map(|progress| progress.status).ok())
        });
        Err(Refused::Says(match status.await {
            Ok(Err(refused)) => return Err(refused),
            Ok(Ok(Some(MigrationStatus::Completed))) => VmMessage::Complete,
            // It was started again, without its former memory.
            Ok(Ok(Some(MigrationStatus::None))) => VmMessage::lost("the VM was started again at the target"),
            // It has not noticed the broken stream yet, or still receives another attempt's.
            _ => VmMessage::failed(&error.to_string()),
        }))
    }

    /// Carries the stream, which the hypervisor may need to answer, until it answers. `None`: nothing is left to be carried.
    async fn answers(
        &self,
        channel: &VmChannel,
        carries: &mut (impl FusedFuture<Output = io::Result<()>> + Unpin),
        keeper: &dyn Keeper,
    ) -> Option<Arc<dyn Hypervisor>> {
        let mut found = self.found.clone();
        loop {
            let known = channel.peer_status();
            match &known {
                PeerStatus::Lost(reason) => {
                    keeper.lose(reason.clone()).await;
                    return None;
                }
                PeerStatus::Failed(_) => return None,
                PeerStatus::Recover(_) => break,
                _ => {}
            }
            tokio::select! {
                vm = &mut found => {
                    if vm.is_none() {
                        has_ended(channel, keeper).await;
                    }
                    return vm;
                }
                _ = channel.peer_changed(&known) => {}
                ended = &mut *carries, if !carries.is_terminated() => {
                    if is_break(ended) {
                        break;
                    }
                }
            }
        }
        channel.send(&VmMessage::failed(BROKEN));
        None
    }
}

/// Why a hypervisor accepts no other stream.
enum Refused {
    Says(VmMessage),
    HasEnded,
}

/// Handles the end of its hypervisor, and with it of the memory that had come.
async fn has_ended(channel: &VmChannel, keeper: &dyn Keeper) {
    channel.send(&VmMessage::lost(ENDED));
    keeper.lose(ENDED.to_owned()).await;
}

/// Returns whether a stream has broken, rather than ended.
fn is_break(ended: io::Result<()>) -> bool {
    ended.inspect_err(|error| tracing::warn!(%error, "the stream of a VM's memory has broken")).is_err()
}
