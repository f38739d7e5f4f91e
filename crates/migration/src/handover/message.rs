//! The messages between the two sides of a handover. They are the same on one host as between two.
//!
//! ```text
//!   source                                                      target
//!     │ ── Prepare(n) ──────────────────────────────────────────► │ flushes, promises durably
//!     │ ◄────────────────────────────────────────── Prepared(n) ─ │ from here on only the source can abort
//!     │ flushes; Released(n) durable: the commit point            │
//!     │ ── Commit(n) ───────────────────────────────────────────► │ Owned(n) durable, opens
//!     │ ◄──────────────────────────────────────────── Active(n) ─ │
//!     │ retires its images                                        │
//!   incomplete volumes (`crate::filling`), after the last missing-set update:
//!     │ ── PrepareHollow(n, manifests) ─────────────────────────► │ compares, flushes, promises durably
//!     │    … Prepared, Commit, Active as above …                  │ fetches the missing blocks
//!     │ ── IsWhole(n) ──────────────────────────────────────────► │ asked from time to time
//!     │ ◄───────────────────────────────────── Lacks(n, units) ── │ incomplete: so many units are missing
//!     │ ◄───────────────────────────────────────────── Whole(n) ─ │ complete, durably: also sent without a question
//!     │ ◄─────────────────────────────────────────── GivenUp(n) ─ │ never complete: the missing blocks were given up there
//!     │ ── NothingKept(n) ──────────────────────────────────────► │ deletes its record for an incremental return
//!
//!     │ ── Abort(n) ────────────────────────────────────────────► │ waits for the next attempt
//!     │ ◄───────────────────────────────────────────── Query(n) ─ │ prepared, and has received nothing for long
//!     │ ◄──────────────────────────────────────── HandedBack(n) ─ │ could not start, wrote nothing
//!     │ ── Cancelled ───────────────────────────────────────────► │ between hosts, by an order here; Discard follows
//!     │ ── Discard ─────────────────────────────────────────────► │ deletes its images
//!     │ ◄─────────────────────────────────────────── Discarded ── │
//!
//!   between hosts, from a host without such a migration under way (`crate::recovery`):
//!     │ ◄─────────────────────────────────────────── Cancelled ── │ by an order there; Discarded or Unknown follows
//!     │ ◄────────────────────────────────────────── Unknown ───── │ the target's host does not know the migration
//!     │ ◄──────────────────────────────── TakenByForce ────────── │ the target's copy was promoted there
//! ```
//! The loss of any message is harmless: a side that waits for an answer repeats its message, and a repeated message is answered
//! again.

use std::time::Duration;

use chronicle::Generation;

use crate::filling::Manifest;
use crate::identity::{Attempt, VolumeId};

/// A message from the source to the target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToTarget {
    /// Flush the stores and promise to wait.
    Prepare(Attempt),
    /// The source will not release in this attempt.
    Abort(Attempt),
    /// The target now owns the volumes.
    Commit {
        /// The attempt that is committed.
        attempt: Attempt,
        /// The generations of the volumes from now on.
        generations: Vec<(VolumeId, Generation)>,
    },
    /// The migration is over, and the target's images are not needed.
    Discard,
    /// Like `Prepare`, but blocks are missing; the manifests identify them.
    PrepareHollow {
        /// The attempt that is prepared.
        attempt: Attempt,
        /// One manifest for each volume, in their order.
        manifests: Vec<Manifest>,
    },
    /// Asks whether volumes that were handed over incomplete are complete by now.
    IsWhole(Attempt),
    /// The source has kept no image to which volumes that were incomplete, and are complete now, could return. There is no
    /// answer: a target that misses this message keeps a record that no one uses.
    NothingKept(Attempt),
    /// The administrator of the source's host has cancelled the migration. `Discard` follows. There is no answer: a target that
    /// misses this message, or does not know it, ends in the same way without the reason.
    Cancelled,
}

/// A message from the target to the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToSource {
    /// Everything is durable here, and stays until the source announces the outcome of the attempt.
    Prepared(Attempt),
    /// Asks for the outcome of this attempt.
    Query(Attempt),
    /// The volumes are in use at the target.
    Active {
        /// The attempt that was committed.
        attempt: Attempt,
        /// How long it took to make the ownership durable.
        own: Duration,
    },
    /// The volumes could not be started and are the source's again.
    HandedBack {
        /// The attempt that was committed.
        attempt: Attempt,
        /// The generations of the volumes from now on.
        generations: Vec<(VolumeId, Generation)>,
        /// Why the volumes could not be started.
        detail: String,
    },
    /// The target's images are deleted.
    Discarded {
        /// The images that could not be deleted, as text for the administrator; empty if all are gone.
        left_over: String,
    },
    /// The target's host does not know this migration, or only one that ended without the volumes.
    Unknown,
    /// The administrator of the target's host has cancelled the migration. `Discarded` or `Unknown` follows, for sources that
    /// do not know this message.
    Cancelled,
    /// The administrator has promoted the target's copy by force, without the source's release.
    TakenByForce {
        /// The generations that the volumes have at the target.
        generations: Vec<(VolumeId, Generation)>,
    },
    /// The volumes of this attempt are complete: the source's images are not needed.
    Whole(Attempt),
    /// The volumes of this attempt still lack blocks.
    Lacks {
        /// The attempt that was committed.
        attempt: Attempt,
        /// The missing units of all volumes, in units of a filling; at least one.
        units: u64,
    },
    /// The blocks that volumes of this attempt lack were given up there, durably: nothing more is read from the source's images.
    GivenUp(Attempt),
}
