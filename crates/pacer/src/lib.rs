//! Slows down whatever copies, so that the guests of a store keep what they had. It has no I/O and no clock.
//!
//! ```text
//!   guests' requests ──► Gauge, one a volume ──samples──► Store ◄──"when may I begin?"── Mover, one a copy
//!                                                           │
//!                           Pacer: pause, measure, pace ◄───┘
//! ```
//! One [`Store`] stands for one disk, whatever the number of volumes on it. All copies from and to the disk ask it before each
//! chunk. It compares the latency of guests' requests beside the copies with their latency without them, which it measures in
//! short common pauses, and changes the rate of all copies. So a disk that becomes slow by itself is not mistaken for one that we
//! slow down.
//!
//! Time is a [`std::time::Duration`] since an origin that all callers share.

mod baseline;
mod bucket;
mod class;
mod gauge;
mod histogram;
mod law;
mod mover;
mod pacer;
pub mod planted;
mod recent;
mod store;

pub use class::{MoverClass, RequestClass};
pub use gauge::{Gauge, Ticket};
pub use law::Impact;
pub use mover::{Limit, Mover, Terms};
pub use pacer::Status;
pub use store::{Store, Stores};
