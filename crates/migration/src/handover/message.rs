//! What the two sides of a handover tell each other; the same words on one host as between two.
//!
//! ```text
//!   source                                                      target
//!     │ ── Prepare(n) ──────────────────────────────────────────► │ flushes, promises durably
//!     │ ◄────────────────────────────────────────── Prepared(n) ─ │ from here on only the source can abort
//!     │ flushes; Released(n) durable: the commit point            │
//!     │ ── Commit(n) ───────────────────────────────────────────► │ Owned(n) durable, opens
//!     │ ◄──────────────────────────────────────────── Active(n) ─ │
//!     │ retires its images                                        │
//!   with blocks missing (`crate::filling`): what is missing was told before
//!     │ ── PrepareHollow(n, manifests) ─────────────────────────► │ compares, flushes, promises durably
//!     │    … Prepared, Commit, Active as above …                  │ fetches what it lacks
//!     │ ── IsWhole(n) ──────────────────────────────────────────► │ asked now and then
//!     │ ◄───────────────────────────────────── Lacks(n, units) ── │ it is not, and by how much
//!     │ ◄───────────────────────────────────────────── Whole(n) ─ │ nothing is missing any more, durably: said unasked, too
//!     │ ── NothingKept(n) ──────────────────────────────────────► │ forgets what it has recorded for a way back
//!
//!     │ ── Abort(n) ────────────────────────────────────────────► │ waits for the next try
//!     │ ◄───────────────────────────────────────────── Query(n) ─ │ prepared, and has heard nothing for long
//!     │ ◄──────────────────────────────────────── HandedBack(n) ─ │ could not start, wrote nothing
//!     │ ── Discard ─────────────────────────────────────────────► │ deletes its images
//!     │ ◄─────────────────────────────────────────── Discarded ── │
//!
//!   between hosts, from a host that has no such migration under way (`crate::recovery`):
//!     │ ◄─────────────────────────────────────────── Cancelled ── │ by somebody there; Discarded or Unknown follows
//!     │ ◄────────────────────────────────────────── Unknown ───── │ the target's host knows nothing of it
//!     │ ◄──────────────────────────────── TakenByForce ────────── │ somebody promoted the target's copy
//! ```
//! Losing any of them is harmless: who waits for an answer repeats what it said, and whoever hears something twice
//! answers twice.

use std::time::Duration;

use chronicle::Generation;

use crate::filling::Manifest;
use crate::identity::{Attempt, VolumeId};

/// From the source to the target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToTarget {
    /// Flush what you have and promise to wait.
    Prepare(Attempt),
    /// The source will not release in this try.
    Abort(Attempt),
    /// The volumes are yours.
    Commit {
        /// In this try.
        attempt: Attempt,
        /// The generations that they have from now on.
        generations: Vec<(VolumeId, Generation)>,
    },
    /// The migration is over, and the target's images are of no use.
    Discard,
    /// As *prepare*, but blocks are missing: those that were told of each volume, which these identify.
    PrepareHollow {
        /// In this try.
        attempt: Attempt,
        /// One for each volume, in their order.
        manifests: Vec<Manifest>,
    },
    /// The volumes that were handed over with blocks missing: do you have all of them?
    IsWhole(Attempt),
    /// Of the volumes that were handed over with blocks missing, and have everything, no image is kept here that they could come back to.
    /// Nobody answers: whoever does not hear it remembers for nobody.
    NothingKept(Attempt),
}

/// From the target to the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToSource {
    /// Everything is durable here, and will be kept until the source says what became of the try.
    Prepared(Attempt),
    /// What became of this try?
    Query(Attempt),
    /// The volumes are in use at the target.
    Active {
        /// In this try.
        attempt: Attempt,
        /// How long it took to make the ownership durable.
        own: Duration,
    },
    /// The volumes could not be started and are the source's again.
    HandedBack {
        /// In this try.
        attempt: Attempt,
        /// The generations that they have from now on.
        generations: Vec<(VolumeId, Generation)>,
        /// Why.
        detail: String,
    },
    /// The images are gone.
    Discarded {
        /// What could not be deleted, for people; empty if all is gone.
        left_over: String,
    },
    /// The target's host has no such migration, or only one that has ended without the volumes.
    Unknown,
    /// Somebody at the target's host has cancelled it. Besides one of the two before, which follows: a source that does not
    /// know this word is served by that.
    Cancelled,
    /// Somebody has promoted the target's copy by force, without hearing from the source.
    TakenByForce {
        /// The generations that the volumes have there.
        generations: Vec<(VolumeId, Generation)>,
    },
    /// Nothing is missing any more of volumes that were handed over in this try: the source's images are needed no longer.
    Whole(Attempt),
    /// Of volumes that were handed over in this try something is missing still.
    Lacks {
        /// In this try.
        attempt: Attempt,
        /// How much of all of them, in units of a filling; at least one.
        units: u64,
    },
}
