//! Volumes: as they are served, and the orders about them.
//!
//! ```text
//!   orders         create, add, import, resize, remove
//!   views          descriptions
//!   serving        gives volumes their lanes
//!   claims         finds volumes, one operation at a time
//!   exports        their sockets and ports
//!   registry       every volume of the host with its lane, or why it has none
//!   lane_control   what a lane asks of the control plane
//!   chronicles     the part of a volume's chronicle that outlasts the daemon
//! ```

pub(crate) mod chronicles;
pub(crate) mod claims;
pub(crate) mod exports;
pub(crate) mod lane_control;
pub(crate) mod orders;
pub(crate) mod registry;
pub(crate) mod serving;
pub(crate) mod views;
