//! Waiting for something that another process does: by looking again and again, with a deadline, never by guessing how
//! long it takes.

use std::time::{Duration, Instant};

use anyhow::bail;

/// Longest that anything may take that a test waits for. Nothing comes near it unless it hangs.
pub const DEADLINE: Duration = Duration::from_secs(120);
/// Time between two looks: short against all that is waited for, long against what a look costs.
pub(crate) const INTERVAL: Duration = Duration::from_millis(5);

/// Looks until `look` finds something.
///
/// # Errors
/// That of a look; and if nothing was found within [`DEADLINE`]: the message says what was waited for.
pub fn until<T>(what: &str, mut look: impl FnMut() -> anyhow::Result<Option<T>>) -> anyhow::Result<T> {
    let give_up_at = Instant::now() + DEADLINE;
    loop {
        if let Some(found) = look()? {
            return Ok(found);
        }
        if Instant::now() >= give_up_at {
            bail!("waited {} s in vain: {what}", DEADLINE.as_secs());
        }
        std::thread::sleep(INTERVAL);
    }
}
