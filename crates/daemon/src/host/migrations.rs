//! Migrations at this host: ordered, checked, begun, received, resumed and promoted.
//!
//! ```text
//!   queue ─► migrate ─┬─► local ──────────────────┐
//!                     └─► leave ─► outgoing ──────┴─► session ◄── incoming ◄── arrive, await_arrival ◄── another host
//! ```

pub(in crate::host) mod ahead;
pub(in crate::host) mod arrive;
pub(in crate::host) mod await_arrival;
pub(in crate::host) mod branches;
pub(in crate::host) mod departed;
pub(in crate::host) mod forwarding;
pub(in crate::host) mod incoming;
pub(in crate::host) mod leave;
pub(in crate::host) mod local;
pub(in crate::host) mod migrate;
pub(in crate::host) mod orders;
pub(in crate::host) mod outgoing;
pub(in crate::host) mod plan;
pub(in crate::host) mod probing;
pub(in crate::host) mod promote;
pub(in crate::host) mod retry;
pub(in crate::host) mod run_hooks;
pub(in crate::host) mod session;
pub(in crate::host) mod settled;
pub(in crate::host) mod shared;
pub(in crate::host) mod strategies;
pub(in crate::host) mod survey;
pub(in crate::host) mod taking_back;
pub(in crate::host) mod together;
