//! Volumes as they are served. What is done with them is in `host/volumes/`.
//!
//! ```text
//!   registry       every volume of the host with its lane, or why it has none
//!   lane_control   what a lane asks of the control plane
//!   chronicles     what of a volume's chronicle outlasts the daemon
//! ```

pub(crate) mod chronicles;
pub(crate) mod lane_control;
pub(crate) mod registry;
