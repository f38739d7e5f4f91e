//! Feeds any bytes to whatever of Sterna reads bytes that others chose. A target returns, or it has found a defect.
//!
//! ```text
//!   fuzz/fuzz_targets   libFuzzer looks for bytes that lead somewhere new ──┐
//!                                                                           ├──► targets ──► the product's own code
//!   tests/corpora.rs    what it has found is tried by every `cargo test` ───┘
//! ```
//! A target panics where a promise is broken: a decoder that panics, a connection that does not end, an answer that is
//! none. It allocates no more than the product does.

mod commands;
mod config;
mod http;
mod journal;
mod nbd;
mod pasted;
mod qcow2;
mod remote;
mod transport;

/// Something that is fed with any bytes.
#[derive(Clone, Copy)]
pub struct Target {
    /// Its name: of the program in `fuzz/fuzz_targets`, and of its folder in `fuzz/corpus`.
    pub name: &'static str,
    /// Feeds it.
    pub feed: fn(&[u8]),
}

/// All targets.
pub const TARGETS: [Target; 11] = [
    Target { name: "nbd_decoders", feed: nbd::feed_decoders },
    Target { name: "nbd_connection", feed: nbd::feed_connection },
    Target { name: "http_api", feed: http::feed },
    Target { name: "config", feed: config::feed },
    Target { name: "journal", feed: journal::feed },
    Target { name: "remote_decoders", feed: remote::feed_decoders },
    Target { name: "remote_store", feed: remote::feed_store },
    Target { name: "qcow2_image", feed: qcow2::feed },
    Target { name: "transport_frames", feed: transport::feed_frames },
    Target { name: "pasted_texts", feed: pasted::feed },
    Target { name: "vm_commands", feed: commands::feed },
];

/// Feeds the target of this name.
///
/// # Panics
/// If there is none, or it has found a defect.
#[expect(clippy::panic, reason = "whoever fuzzes wants to stop here")]
pub fn feed(name: &str, bytes: &[u8]) {
    match TARGETS.iter().find(|target| target.name == name) {
        Some(target) => (target.feed)(bytes),
        None => panic!("there is no target {name}"),
    }
}
