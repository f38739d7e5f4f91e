//! Volumes as they are served. `host/volumes/` has the operations on them.
//!
//! ```text
//!   registry       every volume of the host with its lane, or why it has none
//!   lane_control   what a lane asks of the control plane
//!   chronicles     the part of a volume's chronicle that outlasts the daemon
//! ```

pub(crate) mod chronicles;
pub(crate) mod lane_control;
pub(crate) mod registry;
