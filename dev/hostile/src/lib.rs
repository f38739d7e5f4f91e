//! Feeds arbitrary bytes to every parser of foreign bytes. A target returns, or it has found a defect.
//!
//! ```text
//!   dev/fuzz/fuzz_targets   libFuzzer looks for bytes that lead somewhere new ──┐
//!                                                                           ├──► targets ──► the product's own code
//!   tests/corpora.rs    what it has found is tried by every `cargo test` ───┘
//! ```
//! A target panics if a rule is broken: a decoder panics, a connection does not end, an answer is invalid. It allocates
//! no more than the product.

mod commands;
mod config;
mod http;
mod journal;
mod nbd;
mod pasted;
mod qcow2;
mod remote;
mod transport;

/// A target of fuzzing.
#[derive(Clone, Copy)]
pub struct Target {
    /// Name of its program in `dev/fuzz/fuzz_targets`, and of its folder in `dev/fuzz/corpus`.
    pub name: &'static str,
    /// The function that feeds the target.
    pub feed: fn(&[u8]),
}

/// All targets of fuzzing.
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
/// If there is no such target, or it has found a defect.
#[expect(clippy::panic, reason = "whoever fuzzes wants to stop here")]
pub fn feed(name: &str, bytes: &[u8]) {
    match TARGETS.iter().find(|target| target.name == name) {
        Some(target) => (target.feed)(bytes),
        None => panic!("there is no target {name}"),
    }
}
