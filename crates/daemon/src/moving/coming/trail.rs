//! A machine that runs here while the rest of its memory comes, until it has all of it.
//!
//! ```text
//!   loaded, runs ─► the rest comes ─► whole: Complete is said
//!                      │       ▲
//!                broken│       │ Recover, over another stream: a daemon was started again
//!                      ▼       │
//!                  runs on what it has
//!                      │ either hypervisor has ended
//!                      ▼
//!                    lost: it is ended, and its disks are whole here
//! ```

use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::FusedFuture;
use hypervisor::qemu::{Machine, MigrationStatus};
use tokio::sync::watch;
use tokio::time::timeout;

use super::Keeper;
use crate::moving::line::{FIRST_RECOVERY_STREAM, Heard, Line};
use crate::moving::stream::Turn;
use crate::moving::words::Word;
use crate::moving::{SocketFile, memory_socket};

/// How often it is looked how far the rest is, beside the hypervisor's events.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// How long both hypervisors may take to close their streams when all is there: what they say last is to arrive.
const CLOSED_MAX: Duration = Duration::from_secs(10);

/// What the source is told when it is to offer another stream.
const BROKEN: &str = "the stream of the machine's memory has broken at the target";

/// Sees to it that the rest of a machine's memory comes, over streams that `carries` carries.
pub(super) async fn until_whole(
    machine: &Machine,
    line: &Line,
    mut carries: impl FusedFuture<Output = io::Result<()>> + Unpin,
    keeper: &dyn Keeper,
) {
    // One that has been offered another stream is paused until that has begun.
    let (mut has_begun, mut is_broken) = (false, false);
    loop {
        match line.heard() {
            Heard::Lost(reason) => {
                keeper.lose(reason).await;
                return;
            }
            // The other daemon was started again. It says over which stream the rest comes.
            Heard::Failed(_) => return,
            // It has given this stream up, and asks again.
            Heard::Recover(_) => return line.say(&Word::failed(BROKEN)),
            _ => {}
        }
        match machine.memory_progress().await {
            Ok(progress) => match progress.status {
                MigrationStatus::Completed | MigrationStatus::None => {
                    line.say(&Word::Complete);
                    if !carries.is_terminated() {
                        // Whatever they end with.
                        let _ = timeout(CLOSED_MAX, carries).await;
                    }
                    return;
                }
                MigrationStatus::Failed | MigrationStatus::Cancelled => {
                    let reason = "its QEMU at the target has given up";
                    line.say(&Word::lost(reason));
                    keeper.lose(reason.to_owned()).await;
                    return;
                }
                // It runs on what it has, until another stream is offered.
                MigrationStatus::PostcopyPaused if has_begun => return line.say(&Word::failed(BROKEN)),
                _ if is_broken => return line.say(&Word::failed(BROKEN)),
                status => has_begun |= status != MigrationStatus::PostcopyPaused,
            },
            Err(error) if error.is_gone() => {
                let reason = "its QEMU at the target has ended";
                line.say(&Word::lost(reason));
                keeper.lose(reason.to_owned()).await;
                return;
            }
            Err(_) => {}
        }
        let changes = match has_begun {
            true => [MigrationStatus::Completed, MigrationStatus::PostcopyPaused],
            false => [MigrationStatus::PostcopyActive, MigrationStatus::PostcopyRecover],
        };
        let known = line.heard();
        tokio::select! {
            _ = machine.await_status(&changes, LOOK_INTERVAL) => {}
            _ = line.next(&known) => {}
            ended = &mut carries, if !carries.is_terminated() => {
                if let Err(error) = ended {
                    tracing::warn!(%error, "the stream of a machine's memory has broken");
                    is_broken = true;
                }
            }
        }
    }
}

/// Takes the rest of the memory of a machine that runs here over another stream, as its source asks for it.
pub(crate) async fn recover(machine: &Machine, line: Line, stream: u8, keeper: Arc<dyn Keeper>) {
    if stream < FIRST_RECOVERY_STREAM {
        return line.say(&Word::failed("no such stream"));
    }
    let path = memory_socket(machine);
    let _file = SocketFile(path.clone());
    // What an earlier attempt may have left.
    let _ = std::fs::remove_file(&path);
    if let Err(error) = machine.recover_memory(&path).await {
        match machine.memory_progress().await.map(|progress| progress.status) {
            Ok(MigrationStatus::Completed) => line.say(&Word::Complete),
            // It was started again, without what it had.
            Ok(MigrationStatus::None) => line.say(&Word::lost("the machine was started again at the target")),
            // It has not noticed yet that its stream has broken, or still listens for another attempt.
            _ => line.say(&Word::failed(&error.to_string())),
        }
        return;
    }
    let side = line.recovery_stream(stream);
    let (is_connected, _) = watch::channel(false);
    let carries = side.stream.connect_and_carry(&path, Turn::Main(is_connected)).fuse();
    tokio::pin!(carries);
    line.say(&Word::Recovering { stream });
    until_whole(machine, &line, carries, &*keeper).await;
}
