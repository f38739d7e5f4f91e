//! A host's knowledge of a volume that another host asks about, and its meaning to that host.
//!
//! ```text
//!   its journal says                          it answers                        to a host whose backup has generation g
//!   a volume of its own                       Here, generation                  not yours
//!   a restored one, itself unconfirmed        HereUnconfirmed, generation       the administrator decides
//!   an incomplete one that it cannot serve    HereUnconfirmed, generation       the administrator decides
//!   a complete copy that waits                Waits, the generation it'd get    the administrator decides
//!   it went to the host that asks             WithYou, generation               an image of yours: the administrator names it
//!   it left, or was here once                 Elsewhere, generation             not yours if above g
//!   a copy that is being made                 Elsewhere, its source's           from a third host: not yours
//!   nothing                                   -                                 confirmed
//! ```
//! The generation of a volume grows with each handover. So a host that has seen a higher one than the backup's knows of a later
//! handover. The answer is a function of its journal; ended migrations count while they are in it.

use chronicle::Generation;

use crate::identity::{HostId, VolumeId};
use crate::journal::{MigrationState, Outcome, Side, Stage, State};
use crate::planted::{Bug, broken};

/// A host's knowledge of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Knowledge {
    /// The highest generation of the volume that the host knows.
    pub generation: Generation,
    /// The volume's place, as far as the host knows.
    pub whereabouts: Whereabouts,
}

/// The place of a volume, as one host sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whereabouts {
    /// The volume is the answering host's.
    Here,
    /// The volume was the answering host's in its own journal, which was restored as well.
    HereUnconfirmed,
    /// The answering host has a complete copy, which waits for its source.
    Waits,
    /// The volume has gone to the asking host.
    WithYou,
    /// The volume has left the answering host, or is known there only by its copy.
    Elsewhere,
    /// The volume is at a third host, which neither asks nor answers.
    AtAThird,
}

/// The meaning of an answer to the asking host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// The answer does not contradict the backup.
    Confirms,
    /// The volume went to the asking host, with the generation that it has or will have.
    Gave(Generation),
    /// The volume is another host's.
    HasIt(Generation),
    /// The volume came to the asking host after the backup.
    CameBack(Generation),
    /// The volume has changed hands since the backup.
    KnowsLater(Generation),
    /// The volume may be either host's.
    Unsure(Generation),
}

impl Knowledge {
    /// Returns the answer of a host that owns a volume, and cannot serve it: it does not know which blocks are missing.
    #[must_use]
    pub fn unsure(self) -> Self {
        match self.whereabouts {
            Whereabouts::Here => Self { whereabouts: Whereabouts::HereUnconfirmed, ..self },
            _ => self,
        }
    }

    /// Returns the meaning to a host whose backup has the volume with this generation.
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

/// Returns this host's knowledge of a volume that `asker` asks about, if any.
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
    // Of two with the same generation, the one that names the volume's place wins.
    let rank =
        |known: &Knowledge| (is_claim(known), known.generation, known.whereabouts == Whereabouts::WithYou);
    left.into_iter().chain(seen).max_by_key(rank)
}

/// Returns whether this host's silence about a volume confirms anything: its own journal was never restored.
pub fn knows_all(state: &State) -> bool {
    state.restored.is_none() || broken(Bug::RestoredVouches)
}

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
        // The volume was here and is not: it has left, or was removed.
        Stage::Owned(_) | Stage::Released(_) | Stage::Ended(Outcome::Moved { .. }) => {
            (source.next(), Whereabouts::Elsewhere)
        }
        // Its source has it, or will, with one generation more than on arrival.
        Stage::HandedBack => (source.next().next(), at_its_source),
        Stage::Discarding(Outcome::HandedBack { .. }) | Stage::Ended(Outcome::HandedBack { .. }) => {
            (source.next().next(), Whereabouts::Elsewhere)
        }
        Stage::Discarding(_) | Stage::Ended(_) => (source, Whereabouts::Elsewhere),
    };
    Some(Knowledge { generation, whereabouts })
}
