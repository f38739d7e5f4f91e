//! Endpoints over real TCP on loopback: tests the guarantees of sessions from outside.

#![expect(clippy::unwrap_used, clippy::panic, reason = "the whole file is tests and their support")]

mod cuts;
mod flow;
mod invitation;
mod session;
mod strangers;
mod support;
