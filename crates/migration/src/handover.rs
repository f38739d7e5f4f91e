//! The handover of volumes: the machines of both sides, and their messages.
//!
//! ```text
//!   Source ── PREPARE ──► Target        phases until the commit point: either side may still give up
//!     │ ◄── PREPARED ───────┘           (a target that has promised may not, but by a promotion)
//!     ▼ *released* is durable
//!   Handover ── COMMIT ──► Target       from here on no side can abort
//! ```

pub mod message;
pub mod named_image;
pub mod phase;
pub mod promotion;
pub(crate) mod released;
pub mod source;
pub mod target;
pub mod ticket;
