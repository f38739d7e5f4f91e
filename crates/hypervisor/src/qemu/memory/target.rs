//! The side to which a VM comes.

use std::path::Path;
use std::time::Duration;

use serde_json::json;
use tokio::time::{Instant, timeout};

use super::address;
use super::progress::into_error;
use super::transfer::channels;
use crate::qemu::process::{ANSWER_DEADLINE, Qemu};
use crate::{HypervisorError, MemoryTransfer, MigrationStatus, RunState};

/// How often the state is asked for beside the events.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

impl Qemu {
    /// Makes a VM that was started with `-incoming defer` listen on the unix socket `socket` for its memory.
    ///
    /// It will be paused when it has it: it is told to stop first, because without `-S` it would run by itself. Connect the
    /// main stream before any other; of several, none before its first bytes are there, for which QEMU waits and does nothing else.
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
    /// If the stream breaks or does not fit this VM; QEMU ends then, and what it wrote to its standard error says why.
    /// That the VM does anything else than being paused; that `deadline` is over.
    pub async fn await_loaded(&self, deadline: Duration) -> Result<(), HypervisorError> {
        let mut events = self.events();
        let begun = Instant::now();
        loop {
            match self.state_within(deadline.saturating_sub(begun.elapsed())).await? {
                None => {}
                Some(RunState::InMigrate) => {
                    self.check_arriving(deadline.saturating_sub(begun.elapsed())).await?;
                }
                // It never ran where it was.
                Some(RunState::Paused | RunState::PreLaunch) => return Ok(()),
                Some(found) => return Err(HypervisorError::State { expected: RunState::Paused, found }),
            }
            if begun.elapsed() >= deadline {
                break;
            }
            // Whatever happens is a reason to ask again at once, and so is that nothing does.
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
