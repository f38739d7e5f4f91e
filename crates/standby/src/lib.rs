//! Keeps a copy of a group of volumes at another host that is seconds old. It has no I/O and no clock.
//!
//! ```text
//!   the owner's host                                       the standby's host
//!   guests' writes ─► Replication ─ Begin, Extent, Seal ─► Standby ─► spool, durable ─► sealed ─► applied ─► image flushed
//!        cut every interval  ◄──── Answer, Ready, Acknowledged ────      spool unlinked ◄─ watermark durable ◄─┘
//! ```
//! Both machines take events and the time, and give actions and deadlines. Their callers carry the actions out and report each
//! result as an event.
//!
//! Blocks are those of the chronicle. Time is a [`std::time::Duration`] since an origin of the caller. The paper is \[XNBD\]:
//! its pre-caching is replication without cuts and recovery points (decision 0099).

pub mod asking;
mod content;
mod identity;
mod outbox;
pub mod owner;
pub mod planted;
pub mod receiver;
pub mod record;
pub mod reprotection;
pub mod retention;
pub mod spread;
pub mod verification;
pub mod whereabouts;
pub mod wire;

pub use content::Place;
pub use identity::{LifeId, StandbyId, VolumeIndex, Watermark};
pub use owner::Replication;
pub use receiver::Standby;
