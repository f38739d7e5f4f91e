//! What others say, as this program stores, logs and prints it. Pure functions and one machine: no I/O and no clock.
//!
//! ```text
//!   peers, QEMU, libvirt, hooks, file names ──► clean() ──► journal, API, audit log, log
//!                                                             └──► printable() ──► a terminal
//!   lines of the log ──► Limiter ──► written, or counted: "12 more suppressed"
//! ```
//! Text is cleaned where it comes in, so that nothing behind that place has to think of it. It is cleaned once more where it is
//! printed, because a path that was forgotten must not reach a terminal.

mod clean;
mod limiter;

pub use clean::{Cleaned, MESSAGE_CHARS_MAX, clean, clean_all, clean_lines, printable};
pub use limiter::{Budget, Limiter, Suppressed, Verdict};
