//! Decides which copies may be promoted without their source's release, and what the journal records (design §5.13, §5.16).
//!
//! ```text
//!   prepared      ──ticket──► owned      the source has released it to this host, and to no other
//!   prepared      ──force───► owned      the source may continue with it: a branch of the history begins
//!   handed back   ──force───► owned      the source has it again, or never learned that it should: a branch as well
//!   copying       ──────────► refused    parts of it are missing
//!   incomplete    ──force───► refused    parts of it are missing, which only the source has
//! ```
//! The decision uses this host's journal only. It does not matter whether the source can be reached, is paired with this host,
//! or has a lane here.

use chronicle::Generation;

use crate::identity::{Attempt, MigrationId, VolumeId};
use crate::journal::{MigrationState, Outcome, Promotion, Record, Side, Stage, State, Summary};
use crate::planted::{Bug, broken};

/// A complete copy that waits for its source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Promotable {
    /// The migration that made the copy.
    pub migration: MigrationId,
    /// The attempt that is prepared; [`Attempt::NONE`] if the copy was handed back.
    pub attempt: Attempt,
    /// The generations that its volumes will have.
    pub generations: Vec<(VolumeId, Generation)>,
    /// The reason why the copy waits.
    pub waits: Waits,
}

/// The reason why a complete copy waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waits {
    /// The source has not announced the outcome of the handover.
    ForRelease,
    /// The copy was handed back, and the source has not ordered its deletion.
    ForDiscard,
}

/// The reason why a copy cannot be promoted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotPromotable {
    /// The migration does not come from another host.
    #[error("it did not come from another host")]
    NotIncoming,
    /// The copy lacks parts of the volumes.
    #[error("it is not complete: its source has not finished copying")]
    Incomplete,
    /// The copy was to be handed over incomplete.
    #[error(
        "it lacks blocks that only its source has: it can be promoted only with the ticket that the source prints (sterna volume \
         promote --ticket)"
    )]
    Hollow,
    /// The volumes are this host's already.
    #[error("it is this host's already")]
    Owned,
    /// Nothing of the copy is here.
    #[error("its migration has ended without a handover")]
    Over,
}

/// Returns the promotion that is possible for a migration's copy at this host.
///
/// # Errors
/// [`NotPromotable`]: the reason why there is none.
pub fn promotable(migration: MigrationId, recorded: &MigrationState) -> Result<Promotable, NotPromotable> {
    let Side::Incoming { volumes, .. } = &recorded.side else { return Err(NotPromotable::NotIncoming) };
    let (waits, growth) = match &recorded.stage {
        // **N.B.** The source may keep the volume, and its blocks would then belong to another branch.
        Stage::Prepared(_) | Stage::HandedBack if recorded.is_hollow() => return Err(NotPromotable::Hollow),
        Stage::Prepared(_) => (Waits::ForRelease, 1),
        // **N.B.** One for the arrival, one for the return, and one more than the source has.
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

/// Returns the complete copies that wait at this host.
pub fn waiting(state: &State) -> impl Iterator<Item = (Promotable, &MigrationState)> {
    state.unfinished().filter_map(|(id, recorded)| Some((promotable(id, recorded).ok()?, recorded)))
}

/// Returns the waiting copy with the volume of this name, and the migration that made it.
pub fn waiting_named<'a>(state: &'a State, name: &str) -> Option<(Promotable, &'a MigrationState)> {
    waiting(state).find(|(_, recorded)| recorded.names.iter().any(|known| known == name))
}

impl Promotable {
    /// Returns the records of a promotion that no machine carries out. They make the volumes this host's and end the migration.
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

    /// Returns the advice for a waiting copy: its state, its source host and the command to take it over.
    pub fn advice(&self, volume: &str, source: &str) -> String {
        let migration = self.migration;
        match self.waits {
            Waits::ForRelease => format!(
                "a complete copy, which waits for host \"{source}\" to report the outcome of {migration}; if that host is lost: \
                 sterna volume promote {volume} --force, or --ticket if it has printed one"
            ),
            Waits::ForDiscard => format!(
                "a complete copy, which was handed back to host \"{source}\" ({migration}) and waits for its confirmation; if \
                 that host is lost: sterna volume promote {volume} --force"
            ),
        }
    }
}
