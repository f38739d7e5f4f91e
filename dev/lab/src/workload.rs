//! The demo's guest: it knows the content of every block of its disk and checks every read completely.
//!
//! ```text
//!   fill ─► Guest (random requests, marks) ─► stop ─► verify_export ─► verify_file
//!              │ every completion                │
//!              └► Recorder                       └► Content: what the disk must hold
//! ```
//!
//! Rates are measured: the guest sends requests as fast as they are answered.

mod content;
mod disruption;
mod guest;
pub mod pattern;
pub mod random;
mod record;
mod sweep;

pub use self::content::{Content, Finding, Findings};
pub use self::disruption::{Baseline, Window};
pub use self::guest::{Guest, GuestOptions, Mix, RANGE_BLOCKS_MAX, StoppedGuest};
pub use self::record::{Mark, Recorder, STEP, Step, Summary, per_second};
pub use self::sweep::{fill, verify_digest, verify_export, verify_file};
