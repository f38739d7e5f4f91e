//! Tests a remote NBD server as a store, against real servers and a lying one.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test that cannot prepare its scene has failed")]

mod contract;
mod recovery;
mod server;
