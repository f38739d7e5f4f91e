//! Tells beforehand how long a migration will take, what it will send, and whether it will end, and chooses its strategy by that
//! ([`advise()`]). It has no I/O and no clock.
//!
//! ```text
//!   guests' writes ──► Writing ──► Written ──► Load ──┐
//!   earlier migrations of this way ──► Route: rates ──┼──► the engine of the product, run ahead 50 times ──► Forecast
//!   the order, the volume, the round trip ────────────┘                                                        │
//!                                      Route: how far earlier forecasts were off ◄──── the outcome ◄───────────┘
//! ```
//! The copying that is run ahead is the very machine that copies later ([`migration::strategy::Copying`]). Only the guest, the
//! disks and the link are modelled.

mod advise;
mod ahead;
mod load;
mod random;
mod route;
mod sketch;
mod writing;

pub use advise::{Advice, Facts, advise};
pub use ahead::{Course, Question};
pub use load::Load;
pub use route::{Forecast, Origin, Range, Route, Sample};
pub use writing::{Window, Writing, Written};
