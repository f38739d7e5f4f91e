//! The clock of both engines, with one origin for the process, so that times of different lanes can be compared.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Returns the time since an origin that all lanes of the process share.
pub fn now() -> Duration {
    static ORIGIN: OnceLock<Instant> = OnceLock::new();
    ORIGIN.get_or_init(Instant::now).elapsed()
}
