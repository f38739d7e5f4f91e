//! The NBD server that guests connect to.
//!
//! A guest's disk is a [`block::BlockDevice`]; this crate serves it on a socket. It contains no migration policy: the device
//! behind an export may begin to gate, mirror or pull, and its clients notice nothing.

pub mod nbd;
