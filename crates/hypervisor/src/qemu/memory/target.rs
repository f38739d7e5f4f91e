//! The target's side of a transfer of memory.

use std::path::Path;
use std::time::Duration;

use serde_json::json;
use tokio::time::{Instant, timeout};

use super::address;
use super::progress::into_error;
use super::transfer::channels;
use crate::qemu::process::{ANSWER_DEADLINE, Qemu};
use crate::{HypervisorError, MemoryTransfer, MigrationStatus, RunState};

const POLL_INTERVAL: Duration = Duration::from_millis(100);

impl Qemu {
    /// Lets a VM that was started with `-incoming defer` listen on the unix socket `socket` for its memory.
    ///
    /// The VM is paused once it has the memory: it is ordered to stop first, because without `-S` it would run by itself.
    /// Connect the main stream before any other. Connect no other before its first bytes have arrived, which QEMU waits for
    /// without doing anything else.
    ///
    /// # Errors
    /// If the VM does not wait for memory, or QEMU cannot listen there.
    pub async fn expect_memory(
        &self,
        socket: &Path,
        transfer: MemoryTransfer,
    ) -> Result<(), HypervisorError> {
        let address = address(socket)?;
        let found = self.status().await?;
        if found != RunState::InMigrate {
            return Err(HypervisorError::State { expected: RunState::InMigrate, found });
        }
        self.stop().await?;
        self.agree(transfer).await?;
        let channels = json!({ "multifd-channels": channels(transfer) });
        self.tell("migrate-set-parameters", channels, ANSWER_DEADLINE).await?;
        self.tell("migrate-incoming", json!({ "uri": address }), ANSWER_DEADLINE).await
    }

    /// Waits until all of the memory is here and the VM is paused, ready to be resumed.
    ///
    /// # Errors
    /// If the stream breaks or does not fit this VM; QEMU then ends, with the reason on its standard error. Also if the VM is in
    /// a state other than paused, or `deadline` is over.
    pub async fn await_loaded(&self, deadline: Duration) -> Result<(), HypervisorError> {
        let mut events = self.events();
        let begun = Instant::now();
        loop {
            match self.state_within(deadline.saturating_sub(begun.elapsed())).await? {
                None => {}
                Some(RunState::InMigrate) => {
                    self.check_arriving(deadline.saturating_sub(begun.elapsed())).await?;
                }
                // It never ran at the source.
                Some(RunState::Paused | RunState::PreLaunch) => return Ok(()),
                Some(found) => return Err(HypervisorError::State { expected: RunState::Paused, found }),
            }
            if begun.elapsed() >= deadline {
                break;
            }
            // Any event is a reason to query again at once, and so is a silent interval.
            let _ = timeout(deadline.saturating_sub(begun.elapsed()).min(POLL_INTERVAL), events.next()).await;
        }
        Err(HypervisorError::Deadline {
            what: "the VM's memory to arrive".to_owned(),
            still: RunState::InMigrate.to_string(),
            waited: deadline,
        })
    }

    async fn state_within(&self, deadline: Duration) -> Result<Option<RunState>, HypervisorError> {
        match timeout(deadline, self.status()).await {
            Ok(Ok(state)) => Ok(Some(state)),
            Ok(Err(HypervisorError::Silent(_))) | Err(_) => Ok(None),
            Ok(Err(error)) => Err(error),
        }
    }

    /// Newer versions live on when a stream fails.
    async fn check_arriving(&self, deadline: Duration) -> Result<(), HypervisorError> {
        match self.migration_within(deadline).await? {
            Some(progress)
                if matches!(progress.status, MigrationStatus::Failed | MigrationStatus::Cancelled) =>
            {
                Err(into_error(progress))
            }
            _ => Ok(()),
        }
    }
}
