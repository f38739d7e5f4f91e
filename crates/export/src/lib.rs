//! What a guest talks to: the NBD server.
//!
//! A guest's disk is a [`block::BlockDevice`]; this crate puts it on a socket. It holds no policy of migrations: the
//! device behind an export may change its ways (gate, mirror, pull), its clients notice nothing.

pub mod nbd;
