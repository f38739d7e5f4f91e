//! The source's side of a transfer of memory.

use std::num::NonZeroU64;
use std::path::Path;
use std::time::Duration;

use serde_json::json;
use tokio::time::{Instant, sleep};

use super::{
    DOWNTIME_LIMIT_MAX, POST_COPY_UNLIMITED, THROTTLE_LEAST_PERCENT, THROTTLE_MOST_PERCENT,
    UNLIMITED_BYTES_PER_S, address, parameters, progress,
};
use crate::qemu::error::PRODUCT;
use crate::qemu::process::{ANSWER_DEADLINE, Qemu};
use crate::qemu::qmp::{Event, Events, Heard};
use crate::{HypervisorError, MemoryOptions, MemoryProgress, MigrationStatus};

/// How often the status is queried beside the events, which a slow listener may miss.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// The first version whose record of written pages is right for emulated processors.
const EMULATION_TRACKED_FROM: u64 = 9;
/// Bytes of 64 pages: one word of that record.
const PAGES_AT_ONCE_BYTES: u64 = 64 * 4096;
const EVENT: &str = "MIGRATION";

impl Qemu {
    /// Returns why QEMU cannot migrate this VM at all, in its words; empty if it can.
    pub async fn migration_blockers(&self) -> Result<Vec<String>, HypervisorError> {
        let answer = self.ask("query-migrate").await?;
        let reasons = answer["blocked-reasons"].as_array().map(Vec::as_slice).unwrap_or_default();
        Ok(reasons.iter().filter_map(|reason| reason.as_str().map(str::to_owned)).collect())
    }

    /// Returns why this VM's memory would arrive damaged, although QEMU does not know it; `None`: it would not.
    ///
    /// Before 9.0 QEMU clears its record of written pages in words of 64 without informing the emulator: an emulated processor's
    /// next write beside such a page is not sent again. Memory that is no multiple of 64 pages takes another path through the
    /// records. Real processors are not affected.
    pub async fn memory_hazard(&self) -> Result<Option<String>, HypervisorError> {
        let version = self.version();
        if version.major >= EMULATION_TRACKED_FROM {
            return Ok(None);
        }
        let is_emulated = self.ask("query-kvm").await?["enabled"].as_bool() == Some(false);
        let size = self.ask("query-memory-size-summary").await?["base-memory"].as_u64().unwrap_or_default();
        let is_concerned = is_emulated && size.is_multiple_of(PAGES_AT_ONCE_BYTES);
        Ok(is_concerned.then(|| {
            let less = (size - PAGES_AT_ONCE_BYTES / 64 * 2) >> 10;
            format!(
                "it is emulated (-accel tcg), and QEMU {version} loses writes to the memory of such a VM while it is copied; \
                 start it with -m {less}K, which avoids the defect, or with QEMU {EMULATION_TRACKED_FROM}"
            )
        }))
    }

    /// Begins to send the memory to `stream`, a listening unix socket.
    ///
    /// The VM continues to run. It pauses by itself at [`MigrationStatus::PreSwitchover`], and waits there for
    /// [`Self::switch_over`] or [`Self::abandon`].
    ///
    /// # Errors
    /// If the VM cannot be migrated, or QEMU refuses. No transfer is then in progress.
    pub async fn offer_memory(&self, stream: &Path, options: MemoryOptions) -> Result<(), HypervisorError> {
        let address = address(stream)?;
        let reasons = self.migration_blockers().await?;
        if !reasons.is_empty() {
            return Err(HypervisorError::Blocked { product: PRODUCT, reasons });
        }
        self.agree(options.transfer).await?;
        self.tell("migrate-set-parameters", parameters(options), ANSWER_DEADLINE).await?;
        self.tell("migrate", json!({ "uri": address }), ANSWER_DEADLINE).await
    }

    /// Returns the progress of the transfer. Works at the target too, where most figures are zero.
    ///
    /// # Errors
    /// If QEMU does not answer, as in state *device* while the stream is stalled.
    pub async fn memory_progress(&self) -> Result<MemoryProgress, HypervisorError> {
        Ok(progress::read(&self.ask("query-migrate").await?))
    }

    /// Waits until the transfer has, or has had, one of the statuses, and returns it.
    ///
    /// It listens to QEMU's events, so it returns at once with the change; it also queries at intervals. It keeps waiting for a
    /// silent QEMU until the deadline.
    ///
    /// # Errors
    /// If the transfer ends with another status, QEMU is gone, or `deadline` is over.
    pub async fn await_status(
        &self,
        wanted: &[MigrationStatus],
        deadline: Duration,
    ) -> Result<MigrationStatus, HypervisorError> {
        // Before the first query, so that no later event is missed.
        let mut events = self.events();
        let begun = Instant::now();
        let mut seen = None;
        let mut pause = Duration::ZERO;
        loop {
            let left = deadline.saturating_sub(begun.elapsed());
            let ask = async {
                sleep(pause.min(left)).await;
                self.migration_within(left.saturating_sub(pause)).await
            };
            // The answer to a dropped query is discarded; QEMU may send events without answering.
            let status = tokio::select! {
                biased;
                told = next_status(&mut events) => told,
                asked = ask => asked?.map(|progress| progress.status),
            };
            pause = if status.is_some() { POLL_INTERVAL } else { Duration::ZERO };
            match status {
                Some(status) if wanted.contains(&status) => return Ok(status),
                Some(status) if status.is_end() => return Err(self.ended(status).await),
                Some(status) => seen = Some(status),
                None => {}
            }
            if begun.elapsed() >= deadline {
                break;
            }
        }
        let wanted: Vec<&str> = wanted.iter().map(MigrationStatus::as_str).collect();
        Err(HypervisorError::Deadline {
            what: format!("QEMU's migration to be {}", wanted.join(" or ")),
            still: seen.map_or_else(|| "silent".to_owned(), |status| status.to_string()),
            waited: deadline,
        })
    }

    /// Lets a VM that waits at [`MigrationStatus::PreSwitchover`] send the last of its memory and its devices' states.
    ///
    /// Then wait for [`MigrationStatus::Completed`]. Until that, a failure lets the VM continue here by itself; after
    /// it, only [`Self::resume`] does.
    ///
    /// **N.B.** *Completed* means that the target has everything, not that it is ready: hand nothing over before
    /// [`Self::await_loaded`] has returned there as well.
    ///
    /// # Errors
    /// If it does not wait there, or QEMU does not answer.
    pub async fn switch_over(&self) -> Result<(), HypervisorError> {
        self.tell("migrate-continue", json!({ "state": "pre-switchover" }), ANSWER_DEADLINE).await
    }

    /// Lets QEMU slow the guest's processors down by up to `percent` of their time, so that the guest dirties less memory.
    ///
    /// QEMU does so only while memory is dirtied at more than half the rate of sending, and then in one step, at the end of a
    /// round. `percent` is limited to 1 to 99.
    pub async fn raise_throttle(&self, percent: u8) -> Result<(), HypervisorError> {
        let percent = percent.clamp(THROTTLE_LEAST_PERCENT, THROTTLE_MOST_PERCENT);
        let parameters = json!({ "max-cpu-throttle": percent, "cpu-throttle-increment": percent });
        self.tell("migrate-set-parameters", parameters, ANSWER_DEADLINE).await
    }

    /// Limits the bytes a second of a transfer in progress, before and after the VM runs at the target; `None`: no limit.
    ///
    /// QEMU lets through what a VM at the target waits for, and what it sends while the VM stands still.
    pub async fn limit_memory(&self, bytes_per_s: Option<NonZeroU64>) -> Result<(), HypervisorError> {
        let parameters = json!({
            "max-bandwidth": bytes_per_s.map_or(UNLIMITED_BYTES_PER_S, NonZeroU64::get),
            "max-postcopy-bandwidth": bytes_per_s.map_or(POST_COPY_UNLIMITED, NonZeroU64::get),
        });
        self.tell("migrate-set-parameters", parameters, ANSWER_DEADLINE).await
    }

    /// Changes how long the VM may be paused, in a transfer in progress or to come.
    pub async fn set_downtime_target(&self, downtime_target: Duration) -> Result<(), HypervisorError> {
        let milliseconds = downtime_target.min(DOWNTIME_LIMIT_MAX).as_millis();
        // It is at most two million.
        let parameters = json!({ "downtime-limit": u64::try_from(milliseconds).unwrap_or(u64::MAX) });
        self.tell("migrate-set-parameters", parameters, ANSWER_DEADLINE).await
    }

    /// Abandons the transfer: the VM continues here, and the stream is closed.
    ///
    /// Returns when QEMU has accepted that; wait for [`MigrationStatus::Cancelled`] or [`MigrationStatus::Failed`] to know that
    /// it is over. Has no effect on a transfer that is over.
    ///
    /// **N.B.** In status *device* QEMU does not answer while the stream is stalled. The caller must break the stream instead:
    /// the status becomes *failed*, and the VM continues by itself.
    pub async fn abandon(&self) -> Result<(), HypervisorError> {
        self.tell("migrate_cancel", json!({}), ANSWER_DEADLINE).await
    }

    async fn ended(&self, status: MigrationStatus) -> HypervisorError {
        let progress = self.migration_within(ANSWER_DEADLINE).await.ok().flatten();
        HypervisorError::MigrationEnded {
            product: PRODUCT,
            status,
            detail: progress.and_then(|progress| progress.error),
        }
    }
}

/// Returns the next reported status; `None` if events may have been missed, so that it must be queried.
async fn next_status(events: &mut Events) -> Option<MigrationStatus> {
    loop {
        match events.next().await {
            Heard::Event(Event { name, data, .. }) if name == EVENT => {
                return Some(MigrationStatus::of(data["status"].as_str()?));
            }
            Heard::Event(_) => {}
            Heard::Missed(_) | Heard::Gone => return None,
        }
    }
}
