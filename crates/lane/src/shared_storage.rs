//! How blocks reach the target: over the link, or straight into its image where the source's host can open that, too.
//!
//! ```text
//!   source's host                                              target's host
//!   mover, mirror ──► ReplicaStore ─┬─ link ──► PeerStore ════► Service ──► LeasedImage ──► image
//!                                   └─ shared ► image, opened and locked here  (leased: nobody has it open there)
//!
//!                      ── Lease: my answer lies beside it ─────► reads it, closes the image
//!   opens it, locks it,
//!   sees the token again ── LeaseIsHeld ──────────────────────► tries to lock it, and must not get it
//!   writes …
//!   the gate is closed, all is written: flushes, closes it
//!                      ── Prepare ────────────────────────────► opens it, locks it, flushes, promises
//!                      ── Abort, and then Lease again ─────────► closes it
//! ```
//! **Whoever may write to the image has it locked**, on the description that its writes go through, so the lock ends with
//! the last of them (design §5.9). A target promises nothing before it has the lock, and keeps it until its source has
//! taken the try back: from *prepared* on the source has no way to the image, and what is promoted, also by force, is not
//! written by anybody else. That the lock reaches from one host to the other is part of the proof: where it does not, blocks
//! go over the link. That the target opens the image after the source has closed it is also what network file systems want
//! before one client sees what another has written.
//!
//! Only raw images in folders are leased, and only where the source's host writes past its cache.

mod held_lease;
mod leased_image;
mod probe;
mod token;

pub use held_lease::{DataPath, HeldLease, ReplicaStore};
pub use leased_image::{ArrivingStore, Leasable, LeasedImage, Promise};
pub use probe::{Probe, Seen};
pub use token::{Secret, SharedImage, image_of, remove};

#[cfg(test)]
mod tests;
