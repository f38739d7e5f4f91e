//! What a host knows of a volume that another one asks about, and what that means to who asks.
//!
//! ```text
//!   its journal says                          it answers                        to a host whose backup has generation g
//!   a volume of its own                       Here, generation                  not yours
//!   one that it waits for itself (restored)   HereUnconfirmed, generation       people decide
//!   a complete copy that waits                Waits, the generation it'd get    people decide
//!   it went to who asks                       WithYou, generation               an image of yours: people say which
//!   it left, or was here once                 Elsewhere, generation             not yours if above g
//!   a copy that is being made                 Elsewhere, its source's           from a third host: not yours
//!   nothing                                   -                                 confirmed
//! ```
//! The generation of a volume grows with each handover, so a host that has seen a higher one than the backup has knows that the
//! volume went on after it. The answer is a function of its journal; migrations that have ended count as long as they are in it.

use chronicle::Generation;

use crate::identity::{HostId, VolumeId};
use crate::journal::{MigrationState, Outcome, Side, Stage, State};
use crate::planted::{Bug, broken};

/// What a host knows of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Knowledge {
    /// The highest generation of it that the host knows of.
    pub generation: Generation,
    /// Where it is, as far as the host knows.
    pub whereabouts: Whereabouts,
}

/// Where a volume is, to a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whereabouts {
    /// It is that host's.
    Here,
    /// It was that host's when its own journal was saved, which was put back as well.
    HereUnconfirmed,
    /// That host has a complete copy, which waits for the word of its source.
    Waits,
    /// It has gone to the host that asks.
    WithYou,
    /// It has left that host, or is known there by its copy alone.
    Elsewhere,
    /// It is at a host that neither asks nor answers.
    AtAThird,
}

/// What an answer means to the host that asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// Nothing speaks against it.
    Confirms,
    /// It has given it to the host that asks, with the generation that this one has or is to get.
    Gave(Generation),
    /// The volume is another host's.
    HasIt(Generation),
    /// It came to the host that asks after the backup was made.
    CameBack(Generation),
    /// The volume has changed hands since the backup.
    KnowsLater(Generation),
    /// It may be either host's.
    Unsure(Generation),
}

impl Knowledge {
    /// What it means to a host whose backup has the volume with this generation.
    pub fn word(&self, backup: Generation) -> Word {
        match self.whereabouts {
            _ if broken(Bug::RestoredUnheard) => Word::Confirms,
            Whereabouts::Here | Whereabouts::AtAThird => Word::HasIt(self.generation),
            Whereabouts::HereUnconfirmed | Whereabouts::Waits => Word::Unsure(self.generation),
            Whereabouts::WithYou if self.generation == backup => Word::Gave(self.generation),
            Whereabouts::WithYou | Whereabouts::Elsewhere if self.generation <= backup => Word::Confirms,
            Whereabouts::WithYou => Word::CameBack(self.generation),
            Whereabouts::Elsewhere => Word::KnowsLater(self.generation),
        }
    }
}

/// What this host knows of a volume that `asker` asks about; `None`: nothing.
pub fn knowledge(state: &State, asker: HostId, volume: VolumeId) -> Option<Knowledge> {
    let known = |generation, whereabouts| Some(Knowledge { generation, whereabouts });
    if let Some(here) = state.volumes.get(&volume) {
        return known(here.record.generation, Whereabouts::Here);
    }
    if let Some(waiting) = state.restored_volume(volume) {
        return known(waiting.volume.record.generation, Whereabouts::HereUnconfirmed);
    }
    let left = state.moved.get(&volume).map(|moved| Knowledge {
        generation: moved.generation,
        whereabouts: if moved.host == asker { Whereabouts::WithYou } else { Whereabouts::Elsewhere },
    });
    let seen = state.migrations.values().filter_map(|migration| of_migration(migration, asker, volume));
    let is_claim =
        |known: &Knowledge| matches!(known.whereabouts, Whereabouts::Waits | Whereabouts::AtAThird);
    // Of two of one generation the one that says where it is.
    let rank =
        |known: &Knowledge| (is_claim(known), known.generation, known.whereabouts == Whereabouts::WithYou);
    left.into_iter().chain(seen).max_by_key(rank)
}

/// Tells whether this host's word is worth anything about what it does not know: its own journal was never put back.
pub fn knows_all(state: &State) -> bool {
    state.restored.is_none() || broken(Bug::RestoredVouches)
}

/// What a migration says of one of its volumes.
fn of_migration(migration: &MigrationState, asker: HostId, volume: VolumeId) -> Option<Knowledge> {
    let Side::Incoming { peer, volumes, .. } = &migration.side else { return None };
    let source = volumes.iter().find(|record| record.volume == volume)?.generation;
    let at_its_source = match *peer == asker {
        true => Whereabouts::Elsewhere,
        false => Whereabouts::AtAThird,
    };
    let (generation, whereabouts) = match &migration.stage {
        Stage::Copying => (source, at_its_source),
        Stage::Prepared(_) => (source.next(), Whereabouts::Waits),
        // It was here, and is not: it has left, or was removed.
        Stage::Owned(_) | Stage::Released(_) | Stage::Ended(Outcome::Moved { .. }) => {
            (source.next(), Whereabouts::Elsewhere)
        }
        // Its source has it with one generation more than it came with, or will.
        Stage::HandedBack => (source.next().next(), at_its_source),
        Stage::Discarding(Outcome::HandedBack { .. }) | Stage::Ended(Outcome::HandedBack { .. }) => {
            (source.next().next(), Whereabouts::Elsewhere)
        }
        Stage::Discarding(_) | Stage::Ended(_) => (source, Whereabouts::Elsewhere),
    };
    Some(Knowledge { generation, whereabouts })
}
