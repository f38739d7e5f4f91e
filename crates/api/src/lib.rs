//! Requests and responses of the HTTP API, and a client for it.
//!
//! ```text
//!   sterna, the lab, scripts ──► Client ──► HTTP/1.1 + JSON over a unix socket, or TLS ──► daemon
//!
//!   GET    /metrics                     text
//!   GET    /health                      Health
//!   GET    /ready                       Readiness
//!   GET    /v1/host                     Host
//!   PATCH  /v1/host                     SetHost        -> Host
//!   GET    /v1/evacuation               Evacuation
//!   POST   /v1/evacuation               NewEvacuation  -> Evacuation
//!   POST   /v1/evacuation/plan          NewEvacuation  -> Evacuation
//!   POST   /v1/evacuation/abort         Evacuation
//!   GET    /v1/overview                 Overview
//!   GET    /v1/stores                   [Store]
//!   POST   /v1/stores/{name}/release    Store
//!   GET    /v1/volumes                  [Volume]
//!   POST   /v1/volumes                  NewVolume      -> Volume
//!   GET    /v1/volumes/{name}           Volume
//!   DELETE /v1/volumes/{name}           RemoveVolume   -> RemovedVolume
//!   POST   /v1/volumes/{name}/resize    ResizeVolume   -> Volume
//!   POST   /v1/volumes/{name}/migrate   MigrateVolume  -> Migration
//!   POST   /v1/volumes/{name}/plan      MigrateVolume  -> MigrationPlan
//!   POST   /v1/volumes/{name}/promote   PromoteVolume  -> Volume
//!   POST   /v1/volumes/{name}/yield     YieldVolume    -> [RemovedVolume]
//!   POST   /v1/snapshots                NewSnapshot    -> [Volume]
//!   POST   /v1/reverts                  RevertVolumes  -> [Volume]
//!   GET    /v1/replicas                 [Replica]
//!   DELETE /v1/replicas/{volume}        DropReplica    -> Replica
//!   GET    /v1/divergences              [Divergence]
//!   GET    /v1/divergences/{name}       DivergenceFrom -> DivergencePiece
//!   DELETE /v1/divergences/{name}       Divergence
//!   GET    /v1/standbys                 [Standby]
//!   POST   /v1/standbys                 NewStandby     -> Standby
//!   GET    /v1/standbys/{name}          Standby
//!   PATCH  /v1/standbys/{name}          SetStandby     -> Standby
//!   DELETE /v1/standbys/{name}          RemoveStandby  -> Standby
//!   POST   /v1/standbys/{name}/promote  PromoteStandby -> Standby
//!   POST   /v1/standbys/{name}/reprotect  ReprotectStandby -> Standby
//!   POST   /v1/standbys/{name}/check                   -> Standby
//!   POST   /v1/standbys/{name}/seed     SeedStandby    -> Standby
//!   POST   /v1/standbys/{name}/test     TestStandby    -> Standby
//!   DELETE /v1/standbys/{name}/test     Standby
//!   GET    /v1/vms                      [Vm]
//!   POST   /v1/vms                      NewVm          -> Vm
//!   GET    /v1/vms/{name}               Vm
//!   PATCH  /v1/vms/{name}               SetVm          -> Vm
//!   POST   /v1/vm-starts                               -> Vec<Vm>
//!   DELETE /v1/vms/{name}               RemovedVm
//!   POST   /v1/vms/{name}/start         Vm
//!   POST   /v1/vms/{name}/stop          StopVm         -> Vm
//!   POST   /v1/vms/{name}/suspend       SuspendVm      -> Vm
//!   POST   /v1/vms/{name}/adopt         AdoptVm        -> Vm
//!   POST   /v1/vms/{name}/release       Vm
//!   POST   /v1/vms/{name}/resume        Vm
//!   GET    /v1/migrations               [Migration]
//!   GET    /v1/migrations/{id}          Watch          -> Migration
//!   POST   /v1/migrations/{id}/cancel   Migration
//!   POST   /v1/migrations/{id}/pause    Migration
//!   POST   /v1/migrations/{id}/resume   Migration
//!   POST   /v1/migrations/{id}/retry    Migration
//!   GET    /v1/migrations/{id}/history  MigrationHistory
//!   GET    /v1/identity                 Identity
//!   POST   /v1/identity                 NewIdentity    -> Identity
//!   POST   /v1/invitations              NewInvitation  -> Invitation
//!   GET    /v1/hosts                    [Peer]
//!   POST   /v1/hosts                    JoinHost       -> Peer
//!   GET    /v1/hosts/{name}             Peer
//!   DELETE /v1/hosts/{name}             RemovePeer     -> RemovedPeer
//!   GET    /v1/access                   Access
//!   POST   /v1/access                   NewGrant       -> NewlyGranted
//!   PATCH  /v1/access/{name}            SetGrant       -> Grant
//!   DELETE /v1/access/{name}            Grant
//!   POST   /v1/redemption               RedeemGrant    -> Grant
//!   POST   /v1/page-links               PageLink
//!   GET    /v1/notices                  -> [NoticeDestination]
//!   POST   /v1/notices/test             -> [NoticeDestination]
//! ```
//!
//! The path carries the version. Within a version fields and codes are only added: readers ignore fields that they do
//! not know. An error answer has an [`ErrorBody`]. This crate knows nothing of how a daemon works.

mod address;
mod amount;
mod client;
mod divergence;
mod error;
mod evacuation;
mod forecast;
mod grant;
mod health;
mod history;
mod host;
mod migration;
mod notice;
mod overview;
mod pace;
mod page;
mod peer;
mod plan;
mod replica;
mod snapshot;
mod standby;
mod store_content;
mod strategy;
mod vm;
mod volume;

pub use address::{Address, AddressError};
pub use amount::Bytes;
pub use client::{Client, ClientError, Connect, Connecting, Stream};
pub use divergence::{Divergence, DivergenceExtent, DivergenceFrom, DivergencePiece, DivergenceState};
pub use error::{ErrorBody, ErrorCode, ErrorDetail};
pub use evacuation::{
    EvacuatedWorkload, Evacuation, EvacuationState, NewEvacuation, SetHost, WorkloadKind, WorkloadState,
};
pub use forecast::{Expected, Forecast};
pub use grant::{Access, Grant, NewGrant, NewlyGranted, RedeemGrant, Role, RoleError, SetGrant};
pub use health::{Health, Part, Problem, Readiness};
pub use history::{
    Decisions, GuestFigures, HistorySample, MigrationHistory, PhaseEntered, Recording, Suspension, Waited,
};
pub use host::{Host, Store, StoreKind};
pub use migration::{
    Allocation, GuestLocation, ImageLocation, MEMORY_STREAMS_MAX, MachineDowntime, MachineMove, Memory,
    MemoryMove, MigrateVolume, Migration, MigrationState, Named, Phase, QueuePlace, RemainingSeconds,
    ReplicaUsed, SharedTarget, SwitchOver, WaitingFor, Watch,
};
pub use notice::{Notice, NoticeDestination, NoticeEvent, NoticeLevel};
pub use overview::{Activity, ConnectionAtWork, MigrationAtWork, Overview, PeerAtWork, VolumeAtWork};
pub use pace::{Deadline, FULL_SPEED_PERCENT, LimitedBy, Pace, SetMigration};
pub use page::PageLink;
pub use peer::{
    Identity, Invitation, JoinHost, NewIdentity, NewInvitation, Peer, PeerConnection, PeerLink, RemovePeer,
    RemovedPeer, SetPeer,
};
pub use plan::{MigrationPlan, PlannedLink, PlannedMachine, PlannedVolume, RateOrigin};
pub use replica::{DropReplica, Replica};
pub use snapshot::{NewSnapshot, RevertVolumes, SnapshotOf};
pub use standby::{
    BootCheck, BootCheckState, ExportStandby, IfSilent, KeepPoints, NewStandby, PromoteStandby,
    RecoveryPoint, RemoveStandby, ReprotectStandby, SeedImage, SeedStandby, SetStandby, Standby,
    StandbyCheck, StandbyCompared, StandbyExport, StandbyRole, StandbyState, StandbyTest, StandbyTestState,
    StandbyTestVm, StandbyTestVolume, StandbyVm, TestNetworks, TestStandby, YieldVolume,
};
pub use store_content::{FileRole, StoreContent, StoreFile};
pub use strategy::{Round, Strategy};
pub use vm::{
    AdoptVm, AwaitedStart, NewVm, RemovedVm, SetVm, StartVm, StopVm, SuspendVm, Vm, VmStart, VmState,
    WholeMove,
};
pub use volume::{
    AttachVolume, Attachment, ClientsElsewhere, DetachVolume, DetachedVolume, ExportSettings, ImageFate,
    ImageFormat, ImageKind, KeptBecause, MissingRange, NewVolume, PromoteVolume, RemoveVolume, RemovedVolume,
    ResizeVolume, Volume, VolumeCreation, VolumeFilling, VolumeSource, VolumeState, VolumeStatistics,
};

/// Largest body of a request, in bytes. Every valid request is much smaller.
pub const REQUEST_BYTES_MAX: usize = 64 << 10;
/// Largest body of an answer that a client reads, in bytes. It suffices for tens of thousands of migrations.
pub const RESPONSE_BYTES_MAX: usize = 64 << 20;
/// Longest time that a request for a migration waits for a change, in milliseconds. Longer waits are cut, so that
/// a disconnected client is noticed.
pub const WAIT_MAX_MS: u64 = 30_000;
