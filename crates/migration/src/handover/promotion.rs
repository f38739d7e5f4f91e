//! Decides which copies may be promoted without their source's release, and what the journal records (design §5.13, §5.16).
//!
//! ```text
//!   prepared      ──ticket──► owned      the source has released it to this host, and to no other
//!   prepared      ──force───► owned      the source may continue with it: a branch of the history begins
//!   handed back   ──force───► owned      the source has it again, or never learned that it should: a branch as well
//!   copying       ──────────► refused    parts of it are missing
//!   incomplete    ──force───► refused    parts of it are missing, which only the source has
//!   released, at the source ──force───► handed back   as it was when it left: the target may own it, so a branch begins
//! ```
//! The decision uses this host's journal only. It does not matter whether the source can be reached, is paired with this host,
//! or has a lane here.

use chronicle::Generation;

use crate::identity::{Attempt, HostId, MigrationId, VolumeId};
use crate::journal::{MigrationState, Outcome, Promotion, Record, Side, Stage, State, Summary, VolumeRecord};
use crate::planted::{Bug, broken};
use crate::restoration::{Knowledge, Whereabouts};

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
         promote --ticket); if that host is lost for good: sterna host remove --force gives the copy up"
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
        Stage::Prepared(_) | Stage::HandedBack if recorded.is_hollow() && !broken(Bug::HollowForced) => {
            return Err(NotPromotable::Hollow);
        }
        Stage::Prepared(_) => (Waits::ForRelease, 1),
        // **N.B.** One for the arrival, one for the return, and one more than the source has.
        Stage::HandedBack if broken(Bug::HandedBackGenerationReused) => (Waits::ForDiscard, 2),
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

/// Volumes that left this host by a migration past its commit point, which the other host has not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Departed {
    /// The migration by which they left.
    pub migration: MigrationId,
    /// The attempt in which they were released.
    pub attempt: Attempt,
    /// The host that they left for.
    pub host: HostId,
    /// The name of that host, as configured here.
    pub host_name: String,
    /// The volumes as they were here.
    pub volumes: Vec<VolumeRecord>,
    /// The generations that they get if this host takes them back.
    pub generations: Vec<(VolumeId, Generation)>,
    /// What their images here hold.
    pub images: LeftImages,
}

/// What the images hold that volumes have left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeftImages {
    /// The volumes as they left.
    AsTheyLeft,
    /// Blocks of two times: the volumes began to return into the images, and have not come.
    Mixed,
}

/// Returns the departure of the volume of this name that an order at this host can end: the volume then continues here as it
/// was when it left. `None`: there is none, or its volumes are returning into their images, which are mixtures of two times.
pub fn departed_named(state: &State, name: &str) -> Option<Departed> {
    let (_, moved) = state.moved_named(name)?;
    departed(state, moved.migration)
}

/// Returns the departures that an order at this host can end.
pub fn departures(state: &State) -> impl Iterator<Item = Departed> {
    state.unfinished().filter_map(|(id, _)| departed(state, id))
}

/// Returns the departure by this migration, as [`departed_named`] does.
pub fn departed(state: &State, migration: MigrationId) -> Option<Departed> {
    let recorded = state.migrations.get(&migration)?;
    let (Side::Outgoing { peer, peer_name, .. }, Stage::Released(attempt)) =
        (&recorded.side, &recorded.stage)
    else {
        return None;
    };
    if state.taken_back_by(migration).is_some() && !broken(Bug::DepartedWhileReturning) {
        return None;
    }
    let left = recorded.volumes.iter().map(|moving| {
        let moved = state.moved.get(&moving.volume).filter(|moved| moved.migration == migration)?;
        // The order for a volume in question is another one.
        (!state.is_departure_in_question(moving.volume)).then_some(moved)
    });
    let left = left.collect::<Option<Vec<_>>>()?;
    // **N.B.** The target has it with one generation more. It may have been promoted there after a hand-back, with three more.
    let grown = |generation: Generation| match broken(Bug::DepartedGenerationReused) {
        true => generation,
        false => generation.next().next().next(),
    };
    Some(Departed {
        migration,
        attempt: *attempt,
        host: *peer,
        host_name: peer_name.clone(),
        volumes: left.iter().map(|moved| moved.volume.record.clone()).collect(),
        generations: left.iter().map(|m| (m.volume.record.volume, grown(m.generation))).collect(),
        images: match state.has_begun_to_return(migration) && !broken(Bug::MixedImageTakenBack) {
            true => LeftImages::Mixed,
            false => LeftImages::AsTheyLeft,
        },
    })
}

impl Departed {
    /// Returns the records that make the volumes this host's again and end the migration.
    pub fn records(&self, promotion: Promotion) -> Vec<Record> {
        let (migration, attempt) = (self.migration, self.attempt);
        let promoted =
            Record::Promoted { migration, attempt, generations: self.generations.clone(), promotion };
        let detail = format!(
            "taken back here by order, as it was when it left; if host \"{}\" has it as well, that is a branch of its own",
            self.host_name
        );
        let outcome = Outcome::HandedBack { detail };
        vec![promoted, Record::MigrationEnded { migration, outcome, summary: Summary::default() }]
    }

    /// Returns the advice for a departure that does not end: what it waits for, and the command that ends it.
    pub fn advice(&self) -> String {
        let (migration, host, order) = (self.migration, &self.host_name, self.order());
        let what = match self.images {
            LeftImages::AsTheyLeft => "what it was when it left",
            LeftImages::Mixed => {
                "an image with blocks of two times, because the volume began to return into it and has not come"
            }
        };
        format!(
            "it left for host \"{host}\" by {migration}, which only that host ends; if that host is lost for good, or has lost the \
             volume: {order} serves here {what}"
        )
    }

    /// Returns the command that ends the departure.
    pub fn order(&self) -> String {
        let name = self.volumes.first().map(|first| first.name.as_str()).unwrap_or_default();
        match self.images {
            LeftImages::AsTheyLeft => format!("sterna volume promote {name} --force"),
            LeftImages::Mixed => format!("sterna volume promote {name} --force --without-missing"),
        }
    }
}

/// Returns whether the host that volumes left for answers that it has one of them. Then they are not taken back, even by force:
/// that host can give them up, or move them back. `there` is its answer; `None` if it is silent.
pub fn is_owned_there(there: Option<Option<Knowledge>>) -> bool {
    let has_it = |known: Knowledge| matches!(known.whereabouts, Whereabouts::Here | Whereabouts::AtAThird);
    there.flatten().is_some_and(has_it) && !broken(Bug::OwnedThereTakenBack)
}

/// How the administrator ordered a removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// The administrator gave no word about what was written here.
    Plain,
    /// The administrator gives up the writes of this host.
    Forced,
}

/// The reason why an incomplete volume that cannot be served is not removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotRemovable {
    /// The writes of this host would be lost, and nobody has said so.
    #[error("what was written here would be lost")]
    Unforced,
    /// The host that has its missing blocks answers, and has not taken it back.
    #[error("that host has not taken it back, so no host would serve it")]
    NotTakenBack,
}

/// Decides whether a volume that came incomplete, and cannot be served, may be removed here. `there` is the answer of the host
/// that has the missing blocks: the outer `None` if it is silent, the inner one if it does not know the volume.
///
/// # Errors
/// [`NotRemovable`] holds the reason.
pub fn removable(
    generation: Generation,
    there: Option<Option<Knowledge>>,
    removal: Removal,
) -> Result<(), NotRemovable> {
    let has_it = |known: Knowledge| known.whereabouts == Whereabouts::Here && known.generation > generation;
    match (removal, there) {
        (Removal::Plain, _) => Err(NotRemovable::Unforced),
        // The removal keeps the missing blocks there, so a silent host loses nothing.
        (Removal::Forced, None) => Ok(()),
        (Removal::Forced, Some(_)) if broken(Bug::RemovedNotTakenBack) => Ok(()),
        (Removal::Forced, Some(known)) if known.is_some_and(has_it) => Ok(()),
        (Removal::Forced, Some(_)) => Err(NotRemovable::NotTakenBack),
    }
}
