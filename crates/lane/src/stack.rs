//! The path of a guest's request: one layer over the other, from the client to the store.
//!
//! ```text
//!   meter ─► client session ─► gate ─► align ─► tracker ─► [capture] ─► [mirror] ─► flush debt ─► store
//!   └ for each client ────┘   └ for each volume: Volume ──────────────────────────────────────┘
//!     ClientStacks::of()
//! ```
//! General layers (align, flush debt) are in `block`.

mod capture;
mod client_session;
mod client_stacks;
mod gate;
mod meter;
mod mirror;
mod tracker;
mod volume;

pub use client_session::{ClientRequests, ClientSession};
pub(crate) use client_session::{Origin, Route};
pub use client_stacks::ClientStacks;
pub(crate) use client_stacks::Measures;
pub(crate) use gate::{Access, Again};
pub use gate::{Gate, GateMode};
pub use meter::Counters;
pub(crate) use meter::Meter;
pub use mirror::MirrorFilter;
pub use tracker::Tracker;
pub(crate) use tracker::Untold;
pub use volume::{Home, Volume};
