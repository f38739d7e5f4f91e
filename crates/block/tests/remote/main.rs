//! A remote NBD server as a store, against real servers and against one that lies.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test that cannot prepare its scene has failed")]

mod contract;
mod recovery;
mod server;
