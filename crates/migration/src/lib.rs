//! The sans-IO core: the copying of a volume, and its handover.
//!
//! ```text
//!                     guest writes                          target's answers
//!                         │                                       │
//!    ┌────────────────────▼─────────────┐        ┌────────────────▼──────┐
//!    │ Copying, one a volume: an engine │        │ Target                │
//!    │   and the strategy's policy      │        │   prepared, owner     │
//!    └────────────┬─────────────────────┘        └────────────▲──────────┘
//!         synchronised│  ▲ gate                               │ PREPARE, COMMIT, …
//!    ┌────────────────▼──┴──────────────────────────────────────────────┐
//!    │ Source: one a migration, over all its volumes: phases, handover  │
//!    └──────────▲───────────────────────────────────────────────────────┘
//!       begun    │ ended
//!    ┌───────────┴──────────────────────────────────────────────────────┐
//!    │ MigrationSession: one at each host: what is durable first,       │
//!    │   what comes before the copying and after the end, restarts      │
//!    └──────────────────────────────────────────────────────────────────┘
//! ```
//!
//! Nothing here reads a clock, a disk or a socket. Every machine has the same shape. `handle_event(now, event)` and
//! `handle_timeout(now)` take events, and `poll_action()` returns the next action. `poll_timeout()` returns the time of the next
//! call, and the reason for it. Events are handled one at a time, and all actions are drained before the next. Machines decide
//! about ranges and never see a byte of payload. Time is a [`std::time::Duration`] since an origin that the caller chooses and
//! keeps.

pub mod authority;
pub mod custody;
pub mod duplication;
pub mod failure;
pub mod filling;
mod handover;
pub mod hooks;
pub mod identity;
pub mod journal;
pub mod orders;
mod pacing;
pub mod planted;
pub mod progress;
pub mod queue;
pub mod recovery;
pub mod restoration;
pub mod retention;
pub mod session;
pub mod shares;
pub mod stay;
pub mod strategy;
pub mod vm;
pub mod wire;

pub use failure::{CommitFault, Failure};
pub use handover::phase::Phase;
pub use handover::source::Source;
pub use handover::target::Target;
pub use handover::{message, named_image, phase, promotion, source, target, ticket};
pub use identity::{Attempt, CommitId, HostId, MigrationId, VolumeId, VolumeIndex};
pub use pacing::{Budget, PacingSettings, Used};
pub use progress::{Carried, Progress, VolumeProgress, Waiting};
pub use stay::StayKey;
