//! One thread per volume: export, filters, store and the volume's side of a migration.
//!
//! ```text
//!   other threads ── messages ──► thread ──► conductor (one a migration): Source and Target of the core
//!                                   │            │ mirrors, gates
//!                                   ▼            ▼
//! NBD ──► meter ──► entrance ──► volume: gate ──► align ──► tracker ──► [mirror] ──► store
//!                                                             │  └─────► target store
//!                                                           copy: the strategy of the core, and the mover
//! ```
//!
//! Everything but the thread itself is generic over its surroundings: the executor's driver (whose clock it goes by),
//! the devices, and [`Control`], which keeps the journal. The simulator runs the same conductor, copyings, filters and
//! volumes as the product.

pub mod chronicler;
pub mod clients;
pub mod conductor;
pub mod control;
pub mod copy;
mod entrance;
mod fault_log;
pub mod fence;
pub mod filter;
pub mod growth;
mod handle;
mod latency;
pub mod lending;
mod mover;
pub mod peer;
mod pulse;
mod recorder;
pub mod resuming;
mod thread;
pub mod volume;

use block::signal;

pub use chronicler::{Chronicler, Keeper, Keeping, NotDurable};
pub use clients::{ByHost, Clients};
pub use conductor::{
    Baton, ComingTogether, ComingVolume, Conductor, CopySettings, LeavingTogether, LeavingVolume, Plan,
    PlannedVolume, Post, Replica, SourceConductor, SourceFollower, SourceMembership, SourcePlan, TargetBaton,
    TargetConductor, TargetContent, TargetMembership, TargetPlan, TimeLimits,
};
pub use control::{Control, ControlFault, LaneFuture, Recorded, Report, Sample};
pub use entrance::{Entrance, Passage};
pub use fence::{Fence, Presence};
pub use handle::{
    Access, ClientCertificates, ComingOrder, ComingRole, CredentialFiles, Credentials, CredentialsError,
    Encryption, LaneHandle, LaneSettings, LaneStatus, LaneStore, LeavingLines, LeavingOrder, LeavingRole,
    Listeners, MigrationOrder, MigrationTarget, Opening, Promoted, Refused, Rest, StoreRole,
};
pub use latency::Latencies;
pub use lending::{ArrivingStore, Lendable, Promise, SharedImage, Way};
pub use pulse::Window;
pub use thread::{LaneError, start};
pub use volume::{Home, Volume};

/// Time between two reports of progress.
pub const REPORT_INTERVAL: std::time::Duration = std::time::Duration::from_millis(100);
/// Time between two samples of a migration's recording.
pub const SAMPLE_INTERVAL: std::time::Duration = REPORT_INTERVAL;
/// How much of the time before a migration is recorded with it: enough for a rate to compare with.
pub const RECORDED_BEFORE: std::time::Duration = std::time::Duration::from_secs(3);
/// How much of the time after a migration is recorded with it.
pub const RECORDED_AFTER: std::time::Duration = std::time::Duration::from_secs(3);
