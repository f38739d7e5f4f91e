//! One thread per volume: export, filters, store and the volume's side of a migration.
//!
//! ```text
//!   other threads ── messages ──► thread ──► driver (one a migration): Source and Target of the core
//!                                   │            │ mirrors, gates
//!                                   ▼            ▼
//! NBD ──► meter ──► client session ──► volume: gate ──► align ──► tracker ──► [mirror] ──► flush debt ──► store
//!                                                                                │  └─────► target store
//!                                                                              copy: the strategy of the core, and the mover
//! ```
//!
//! A [`Lane`] is generic over its surroundings: the executor's driver with its clock, the devices, the front ends, and [`Control`],
//! which keeps the journal. Only [`start`] knows threads, files and sockets. The simulator runs the same driver, copyings, filters
//! and volumes as the product.

pub mod capture;
pub mod chronicler;
pub mod clients;
mod cloning;
pub mod control;
mod copies_elsewhere;
pub mod copy;
pub mod driver;
mod duplicate;
mod fault_log;
pub mod fencing;
pub mod filling;
mod front_end;
pub mod growth;
mod handle;
mod mover;
pub mod peer;
mod pulse;
mod recorder;
mod refused;
pub mod reservoir;
pub mod resuming;
mod revert;
pub mod shared_storage;
pub mod stack;
mod status;
mod thread;

pub use block::latency::Latencies;
use block::signal;

pub use chronicler::{Chronicler, Keeper, Keeping, NotDurable};
pub use clients::{ByHost, Clients};
pub use control::{Control, ControlFault, HooksFault, LaneFuture, Recorded, Report, Sample, VmFault};
pub use copies_elsewhere::Learner;
pub use driver::{
    Chunks, CopySettings, GivesWay, IncomingGroup, IncomingVolume, LocalDriver, OutgoingGroup,
    OutgoingVolume, Plan, PlannedVolume, Replica, SendMessage, SourceDriver, SourceHandle,
    SourceParticipantRef, SourceParticipation, SourcePlan, TargetContent, TargetDriver, TargetHandle,
    TargetParticipation, TargetPlan, TimeLimits,
};
pub use duplicate::{Company, CutLine, DuplicateOrder, Duplicated};
pub use fencing::{FencingToken, Presence};
pub use front_end::{
    Access, AllocationContext, ClientCertificates, ClientProcess, CredentialFiles, Credentials,
    CredentialsError, Encryption, FrontEnd, Offer, PassedConnection, PassedSession, ReplyStyle,
};
pub use handle::{
    Aside, CaptureOrder, FillingStoreOrder, IncomingChannels, IncomingOrder, IncomingRole, LaneHandle,
    LaneSettings, LaneStore, Listeners, MigrationOrder, MigrationTarget, NbdListeners, Opening,
    OutgoingChannels, OutgoingOrder, OutgoingRole, Promoted, Rest, ResumedMigration, StoreRole,
};
pub use pulse::Window;
pub use refused::Refused;
pub use revert::Reverted;
pub use shared_storage::{ArrivingStore, DataPath, Leasable, Promise, SharedImage};
pub use stack::{ClientRequests, ClientSession, Home, Volume};
pub use status::LaneStatus;
pub use thread::{Arriving, Departing, Lane, LaneError, LaneSurroundings, start};

/// Time between two reports of progress.
pub const REPORT_INTERVAL: std::time::Duration = std::time::Duration::from_millis(100);
/// Time between two samples of a migration's recording.
pub const SAMPLE_INTERVAL: std::time::Duration = REPORT_INTERVAL;
/// How much of the time before a migration is recorded: enough for a rate to compare with.
pub const RECORDED_BEFORE: std::time::Duration = std::time::Duration::from_secs(3);
/// How much of the time after a migration is recorded with it.
pub const RECORDED_AFTER: std::time::Duration = std::time::Duration::from_secs(3);
