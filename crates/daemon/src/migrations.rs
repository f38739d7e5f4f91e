//! Migrations at this host, from an order to the end.
//!
//! ```text
//!   orders         waits, checks, begins, changes, cancels, repeats ──► departures ──► sessions ──► the lane
//!   arrivals       from other hosts ──────────────────────────────────────────────► sessions
//!   departures     to other stores and hosts
//!   attachments    volumes that are offered at hosts which do not have them
//!   sessions       runs one migration, step by step
//!   resumption     after a restart; forwards the clients of volumes that have left
//!   ownership      promotes copies; a journal that was restored
//!   hooks          prepares and runs hooks
//!   registry       the migrations that lanes of this daemon run, and their watchers
//!   view           one migration in the form of the API
//!   queue          which migrations may begin, and which wait
//!   metadata       the orders, beside the journal
//!   budgets        the limit of each migration, for its volumes and its VM together
//!   ends           counts of outcomes
//!   forecasts      what ended migrations have shown, for forecasts; rate_probe: a measurement where none has
//!   history        measurements, for reports
//!   shares         what other hosts may use here at a time
//!   volume_hooks   hooks of volumes that move without a VM
//!   recovery       ends migrations that a crash interrupted
//! ```

pub(crate) mod arrivals;
pub(crate) mod attachments;
pub(crate) mod budgets;
pub(crate) mod departures;
pub(crate) mod ends;
pub(crate) mod forecasts;
pub(crate) mod history;
pub(crate) mod hooks;
pub(crate) mod metadata;
pub(crate) mod orders;
pub(crate) mod ownership;
pub(crate) mod queue;
pub(crate) mod rate_probe;
pub(crate) mod recovery;
pub(crate) mod registry;
pub(crate) mod resumption;
pub(crate) mod sessions;
pub(crate) mod shares;
pub(crate) mod view;
pub(crate) mod volume_hooks;
