//! One thread per volume: export, filters, store and the volume's side of a migration.

pub mod control;
mod handle;

pub use control::{Control, ControlFault, LaneFuture, Report};
pub use handle::{LaneSettings, LaneStatus, MigrationOrder, Refused};

/// Time between two reports of progress.
pub const REPORT_INTERVAL: std::time::Duration = std::time::Duration::from_millis(100);
