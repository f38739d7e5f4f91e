//! Carries out the sessions of migrations at one host, for the daemon and for the simulator.
//!
//! ```text
//!   MigrationSession ── Action ──► run() ──► Work: room, images, lanes      Journal: stages, ends      Clock
//!         ▲                          │
//!         └────────── Event ─────────┘ ◄── orders of users, the driver's end, deadlines, the stop of the host
//! ```
//!
//! What a session needs of the world is behind the traits [`Work`], [`Journal`] and [`Clock`]. The daemon implements them with files,
//! sockets and lanes, and the simulator in virtual time.

mod ports;
mod session;
mod work;

pub use ports::{Clock, Journal, Surroundings};
pub use session::run;
pub use work::Work;
