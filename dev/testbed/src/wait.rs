//! Waits for events of other processes by polling with a deadline.

use std::time::{Duration, Instant};

use anyhow::bail;

/// Longest wait of a test. Only a hang takes this long.
pub const DEADLINE: Duration = Duration::from_secs(120);
/// Time between two checks, short compared with the waits, and long compared with a check.
pub(crate) const INTERVAL: Duration = Duration::from_millis(5);

/// Calls `look` until it returns a value.
///
/// # Errors
/// Those of `look`, and if there is no value within [`DEADLINE`]; the message has `what`.
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
