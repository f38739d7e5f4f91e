//! Hosts as network namespaces, and the links between them: for tests, the demo and the benchmarks.
//!
//! ```text
//!   Hosts ──► Namespace a ◄──────── ShapedLink: veth, tbf ────────► Namespace b ◄── … ──► Namespace c
//!                 ▲                                                     ▲
//!                 └── TUN ◄──► WideAreaLink: a thread with two ◄──► TUN ┘
//!                              Lines (rate, queue, delay, loss)
//!
//!   Lan: a switch, a client beside it, and a tap for a guest on either host
//!   measure: what a TCP connection of the kernel carries over a link, and how long a round trip takes
//! ```
//!
//! TCP on either side is the kernel's own. A link can be re-shaped and cut while it is in use. The two kinds of a cut look
//! different to a program ([`Cut`]). Everything here needs root; [`check()`] returns whether it works, and what to do if not. The
//! caller decides what happens without it.
//!
//! **The kernel removes everything, whatever happens.** A namespace has no name in the file system: a descriptor holds it
//! ([`Namespace::path`]). The kernel removes it with its interfaces and links when the last process that uses it ends, even by
//! `kill -9`. A program that was started in a namespace and outlives this process keeps it.
//!
//! This module knows nothing of disks and daemons. Its calls block for milliseconds.

mod commands;
mod error;
mod hosts;
mod lan;
pub mod measure;
mod namespace;
mod rate;
mod shaped;
mod wide_area;

pub use self::error::NetworkError;
pub use self::hosts::{Addresses, Hosts};
pub use self::lan::Lan;
pub use self::namespace::Namespace;
pub use self::rate::BitRate;
pub use self::shaped::ShapedLink;
pub use self::wide_area::{Carried, Conditions, Order, WideAreaLink};

use std::time::Duration;

/// The ways in which a link fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// The interfaces at both ends go down, as if a cable were pulled: a connecting client learns at once that the network is
    /// unreachable. Existing connections stay, and continue if the link is restored before TCP gives up.
    Down,
    /// Packets disappear and the interfaces stay up, as if a switch on the path had died: neither end is notified.
    BlackHole,
}

/// Makes two hosts with a network for guests, and removes them. If that fails, the error says what is needed.
pub fn check_lan() -> Result<(), NetworkError> {
    let mut hosts = Hosts::create(["a", "b"])?;
    hosts.shaped_link([0, 1], BitRate::megabits(1000))?;
    hosts.lan([0, 1])?;
    Ok(())
}

/// Makes two hosts with a link of each kind between them, and removes them. If that fails, the error says what is needed.
pub fn check() -> Result<(), NetworkError> {
    let mut hosts = Hosts::create(["a", "b"])?;
    let rate = BitRate::megabits(1000);
    hosts.shaped_link([0, 1], rate)?;
    hosts.wide_area_link([0, 1], Conditions::of(rate, Duration::from_millis(10)))?;
    Ok(())
}
