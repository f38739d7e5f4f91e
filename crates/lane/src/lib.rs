//! One thread per volume: export, filters, store and the volume's side of a migration.
//!
//! ```text
//!   other threads ── messages ──► thread ──► conductor (one a migration): Source and Target of the core
//!                                   │            │ mirrors, gates
//!                                   ▼            ▼
//!            NBD ──► meter ──► align ──► volume: gate ──► tracker ──► [mirror] ──► store
//!                                                             │  └─────► target store
//!                                                           copy: the strategy of the core, and the mover
//! ```
//!
//! Everything but the thread itself is generic over its surroundings: the executor's driver (whose clock it goes by),
//! the devices, and [`Control`], which keeps the journal. The simulator runs the same conductor, copyings, filters and
//! volumes as the product.

pub mod conductor;
pub mod control;
pub mod copy;
pub mod filter;
mod handle;
mod mover;
mod signal;
mod thread;
pub mod volume;

pub use conductor::{Baton, Conductor, Plan, PlannedVolume, TargetContent, TimeLimits};
pub use control::{Control, ControlFault, LaneFuture, Report};
pub use handle::{LaneHandle, LaneSettings, LaneStatus, MigrationOrder, MigrationTarget, Refused};
pub use thread::{LaneError, start};
pub use volume::Volume;

/// Time between two reports of progress.
pub const REPORT_INTERVAL: std::time::Duration = std::time::Duration::from_millis(100);
