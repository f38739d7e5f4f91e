//! The daemon's knowledge of migrations. `host/migrations/` carries them out.
//!
//! ```text
//!   registry       the migrations that lanes of this daemon run, and their watchers
//!   view           one migration in the form of the API
//!   queue          which migrations may begin, and which wait
//!   metadata       the orders, beside the journal
//!   ends           counts of outcomes
//!   history        measurements, for reports
//!   shares         what other hosts may use here at a time
//!   volume_hooks   hooks of volumes that move without a VM
//!   recovery       ends migrations that a crash interrupted
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
