//! Which copies may be promoted without their source's word, and what becomes of the journal (design §5.13, §5.16).
//!
//! ```text
//!   prepared      ──ticket──► owned      the source has released it to this host, and to nobody else
//!   prepared      ──force───► owned      the source may go on with it: a branch of the history begins
//!   handed back   ──force───► owned      the source has it again, or never heard so: a branch begins as well
//!   copying       ──────────► refused    parts of it are missing
//!   hollow        ──force───► refused    parts of it are missing, and were to be fetched from the source
//! ```
//! It takes the journal of this host and nothing else: whether the source can be reached, is paired with this host or has a
//! lane here makes no difference.

use chronicle::Generation;

use crate::identity::{Attempt, MigrationId, VolumeId};
use crate::journal::{MigrationState, Outcome, Promotion, Record, Side, Stage, State, Summary};
use crate::planted::{Bug, broken};

/// A copy that is complete and waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Promotable {
    /// The migration that made it.
    pub migration: MigrationId,
    /// The try that is promised; [`Attempt::NONE`] if it was handed back.
    pub attempt: Attempt,
    /// The generations that its volumes get.
    pub generations: Vec<(VolumeId, Generation)>,
    /// Why it waits.
    pub waits: Waits,
}

/// Why a complete copy waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waits {
    /// Its source has not said what became of the handover.
    ForRelease,
    /// It was handed back, and its source has not said that it may go.
    ForDiscard,
}

/// Why there is nothing to promote.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotPromotable {
    /// It does not come from another host.
    #[error("it does not come from another host")]
    NotIncoming,
    /// Parts of it are missing.
    #[error("it is not complete: its source has not finished copying")]
    Incomplete,
    /// It was to be handed over with blocks missing.
    #[error(
        "it lacks blocks that only its source has: it can be taken over with the ticket that the source prints (sterna volume promote --ticket), and with nothing else"
    )]
    Hollow,
    /// It is this host's already.
    #[error("it is this host's already")]
    Owned,
    /// Nothing of it is here.
    #[error("its migration has ended without it")]
    Over,
}

/// Tells whether the copy that a migration has made here may be promoted.
///
/// # Errors
/// [`NotPromotable`]: why not.
pub fn promotable(migration: MigrationId, recorded: &MigrationState) -> Result<Promotable, NotPromotable> {
    let Side::Incoming { volumes, .. } = &recorded.side else { return Err(NotPromotable::NotIncoming) };
    let (waits, growth) = match &recorded.stage {
        // N.B. its source may go on, and what would be fetched from there is of another branch.
        Stage::Prepared(_) | Stage::HandedBack if recorded.is_hollow() => return Err(NotPromotable::Hollow),
        Stage::Prepared(_) => (Waits::ForRelease, 1),
        // N.B. one when the volumes came, one when they went back, and one more than their source has them with.
        Stage::HandedBack => (Waits::ForDiscard, 3),
        Stage::Copying if broken(Bug::IncompletePromoted) => (Waits::ForRelease, 1),
        Stage::Copying => return Err(NotPromotable::Incomplete),
        Stage::Released(_) | Stage::Owned(_) | Stage::Ended(Outcome::Moved { .. }) => {
            return Err(NotPromotable::Owned);
        }
        Stage::Discarding(_) | Stage::Ended(_) => return Err(NotPromotable::Over),
    };
    let grown = |generation: Generation| (0..growth).fold(generation, |grown, _| grown.next());
    let generations = volumes.iter().map(|record| (record.volume, grown(record.generation)));
    Ok(Promotable { migration, attempt: recorded.attempt(), generations: generations.collect(), waits })
}

/// The complete copies that wait here.
pub fn waiting(state: &State) -> impl Iterator<Item = (Promotable, &MigrationState)> {
    state.unfinished().filter_map(|(id, recorded)| Some((promotable(id, recorded).ok()?, recorded)))
}

/// The complete copy of the volume of that name that waits here, and the migration that made it.
pub fn waiting_named<'a>(state: &'a State, name: &str) -> Option<(Promotable, &'a MigrationState)> {
    waiting(state).find(|(_, recorded)| recorded.names.iter().any(|known| known == name))
}

impl Promotable {
    /// The records of a promotion that no machine carries out: the volumes are this host's with them, and the migration has
    /// ended.
    pub fn records(&self, promotion: Promotion) -> Vec<Record> {
        let migration = self.migration;
        let promoted = Record::Promoted {
            migration,
            attempt: self.attempt,
            generations: self.generations.clone(),
            promotion,
        };
        let outcome = Outcome::Moved { left_over: String::new() };
        vec![promoted, Record::MigrationEnded { migration, outcome, summary: Summary::default() }]
    }

    /// What is to be said of a volume whose copy waits, of the host it came from and the command that takes it over.
    pub fn advice(&self, volume: &str, source: &str) -> String {
        let migration = self.migration;
        match self.waits {
            Waits::ForRelease => format!(
                "a complete copy, which waits until the host \"{source}\" says what became of its move ({migration}); if that \
                 host is lost: sterna volume promote {volume} --force, or --ticket if it has printed one"
            ),
            Waits::ForDiscard => format!(
                "a complete copy, which was handed back to the host \"{source}\" ({migration}) and waits until that has it; if \
                 that host is lost: sterna volume promote {volume} --force"
            ),
        }
    }
}
