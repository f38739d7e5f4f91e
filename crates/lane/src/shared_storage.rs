//! The path of blocks to the target: over the link, or directly into its image if the source's host can open that.
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
//! **A host that may write to the image has it locked**, on the file description of its writes, so the lock ends with the last of
//! them (design §5.9). A target promises nothing before it has the lock, and keeps it until its source has aborted the attempt.
//! So from *prepared* on the source cannot reach the image, and no other host writes to a promoted image, not even after a forced
//! promotion. The lock of one host has to count at the other; if it does not, blocks go over the link. Network file systems show
//! one client another's writes only if it opens the image after the other has closed it, as is done here.
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
