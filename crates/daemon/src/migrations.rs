//! What the daemon knows of migrations. What it does about them is in `host/migrations/`.
//!
//! ```text
//!   registry       those that lanes of this daemon run, and who watches them
//!   view           one migration as the API shows it
//!   queue          who may begin, and who waits
//!   metadata       what was ordered, beside the journal
//!   ends           what has become of them, counted
//!   history        what was measured, for reports
//!   shares         what other hosts may have here at a time
//!   volume_hooks   hooks of volumes that move without a VM
//!   recovery       ends what a crash interrupted
//! ```

pub(crate) mod ends;
pub(crate) mod history;
pub(crate) mod metadata;
pub(crate) mod queue;
pub(crate) mod recovery;
pub(crate) mod registry;
pub(crate) mod shares;
pub(crate) mod view;
pub(crate) mod volume_hooks;
