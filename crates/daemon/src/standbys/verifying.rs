//! Has everything compared with the standbys of this host's volumes, as often as the configuration says. Which is next is decided by
//! [`standby::verification`].

use std::sync::Arc;
use std::time::Duration;

use lane::capture::BLOCK_BYTES;
use standby::owner::State;
use standby::verification::{Candidate, Comparison, next};
use tokio::time::sleep;

use super::source::Source;
use super::{Standbys, lock};
use crate::journal::now_unix_ms;

/// Time between two looks.
const LOOK_EVERY: Duration = Duration::from_secs(5);
const DAY_MS: u64 = 86_400_000;

impl Standbys {
    /// Begins comparisons until the daemon stops.
    pub(super) async fn verify(self: Arc<Self>, every: Duration) {
        let every_ms = milliseconds(every);
        loop {
            tokio::select! {
                () = self.stopping.begins() => return,
                () = sleep(LOOK_EVERY) => {}
            }
            let sources: Vec<Arc<Source>> = lock(&self.sources).values().cloned().collect();
            let candidates: Vec<Candidate> = sources.iter().map(|source| self.candidate(source)).collect();
            let due = next(every_ms, now_unix_ms(), &candidates).and_then(|position| sources.get(position));
            if let Some(source) = due {
                tracing::info!(standby = %source.config().name, "everything is compared with a standby");
                source.check(false);
            }
        }
    }

    fn candidate(&self, source: &Source) -> Candidate {
        let shown = source.shown();
        let state = shown.group.as_ref().and_then(|group| group.look(standby::Replication::state));
        let is_connected = self.hosts.silence_of(source.host()).is_none();
        let is_ready = shown.compared.is_some()
            && state == Some(State::Current)
            && is_connected
            && !self.is_exporting(source);
        Candidate { compared: shown.compared.unwrap_or_default(), is_ready }
    }

    /// Returns what the comparisons of a standby have found, or why there was none for long.
    pub(super) fn doubts(&self, source: &Source) -> Vec<String> {
        let Some(compared) = source.shown().compared else { return Vec::new() };
        let now_ms = now_unix_ms();
        let differed = compared.whole.filter(|whole| whole.differing > 0).map(|whole| {
            let (bytes, store) = (whole.differing * BLOCK_BYTES, source.config().store);
            format!(
                "{bytes} bytes differed when it was last compared, and were sent again: look at the disk of the store \"{store}\" of host \"{}\"; \
                 this ends with a comparison that finds no difference (standby check --deep)",
                self.hosts.name_of(source.host())
            )
        });
        let failed = compared.last.as_ref().filter(|last| last.is_failed);
        let failed = failed
            .and_then(|last| last.interrupted.as_ref())
            .map(|reason| format!("it could not be compared: {reason}; again: standby check --deep"));
        let every_ms = self.verify.map(milliseconds);
        let is_overdue = every_ms.is_some_and(|every_ms| compared.is_overdue(every_ms, now_ms));
        let overdue = compared.whole.filter(|_| is_overdue).map(|whole| {
            let days = now_ms.saturating_sub(whole.ended_ms) / DAY_MS;
            format!("it was last compared {days} days ago (standby.verify in the configuration); at once: standby check --deep")
        });
        differed.into_iter().chain(failed).chain(overdue).collect()
    }
}

/// Describes a comparison.
pub(super) fn check_of(comparison: Comparison) -> api::StandbyCheck {
    let Comparison { begun_ms, ended_ms, interrupted, is_failed, is_ordered, .. } = comparison;
    api::StandbyCheck {
        begun_unix_ms: begun_ms,
        ended_unix_ms: ended_ms,
        interrupted,
        failed: is_failed,
        ordered: is_ordered,
        bytes_total: comparison.total.saturating_mul(BLOCK_BYTES),
        bytes_done: comparison.done.saturating_mul(BLOCK_BYTES),
        bytes_left_out: comparison.left_out.saturating_mul(BLOCK_BYTES),
        bytes_differing: comparison.differing.saturating_mul(BLOCK_BYTES),
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
