//! The filters that take part in a migration. What any stack may have (align, fault, delay) is in `block`.

mod gate;
mod meter;
mod mirror;
mod tracker;

pub(crate) use gate::{Access, Again};
pub use gate::{Gate, GateMode};
pub use meter::Counters;
pub(crate) use meter::Meter;
pub use mirror::MirrorFilter;
pub use tracker::Tracker;
