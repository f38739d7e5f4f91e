//! Cleans and limits foreign texts for storing, logging and printing. It has no I/O and no clock.
//!
//! ```text
//!   peers, QEMU, libvirt, hooks, file names ──► clean() ──► journal, API, audit log, log
//!                                                             └──► printable() ──► a terminal
//!   lines of the log ──► Limiter ──► written, or counted: "12 more suppressed"
//! ```
//! Text is cleaned where it arrives, so that later code need not do it. It is cleaned again where it is printed, in
//! case one place was forgotten.

mod clean;
mod limiter;

pub use clean::{Cleaned, MESSAGE_CHARS_MAX, clean, clean_all, clean_lines, printable};
pub use limiter::{Budget, Limiter, Suppressed, Verdict};
