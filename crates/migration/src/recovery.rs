//! The steps for migrations that a crash interrupted, and a host's answers about those that have ended.
//!
//! The journal decides. On one host: before *released* is durable the source owns the volumes. The copying continues if the
//! missing set of the partial target is known ([`crate::stay::copy`]); otherwise the target is deleted. After *released* the
//! target owns the volumes, and only the source's images are left to delete or keep (design §5.10–14).
//!
//! Between hosts a restart ends nothing by itself, because the other side may have continued:
//!
//! ```text
//!   this host was   stage        what it does
//!   source          copying      aborts earlier attempts durably, then continues to copy, or gives up and reports it
//!                   released     sends COMMIT until the target reports the outcome; prints a ticket
//!                   handed back  serves the volumes; has the target delete its images
//!   target          copying      keeps its images, and asks
//!                   prepared     keeps its images for ever, and asks
//!                   owned        serves the volumes: the end is recorded
//!                   handed back  keeps its images until the source orders their deletion
//!                   discarding   deletes its images
//! ```
//! An ended migration has no machine. [`answer_as_source`] and [`answer_as_target`] derive the answer to the other host from
//! the journal alone, however long that host was away.

use std::time::Duration;

use chronicle::{Generation, ReplicaOf, StayId};

use crate::handover::message::{ToSource, ToTarget};
use crate::identity::{Attempt, HostId, MigrationId, VolumeId};
use crate::journal::{
    ImageLocation, MigrationState, Outcome, Promotion, Record, Side, Stage, State, Summary,
};
use crate::planted::{Bug, broken};

/// A step of recovery. Steps run in order, and all of them again after another crash: each can be repeated.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Make these records durable before the next step.
    Commit(Vec<Record>),
    /// Delete the image if it exists: it is a partial target without an owner.
    Discard(ImageLocation),
    /// Delete or keep a source image that its volume has left.
    Retire(ImageLocation, Retirement),
    /// Resume the migration: make its machine by [`crate::Source::resume`] or [`crate::Target::resume`] from the current journal.
    Resume(MigrationId),
}

/// What happens to a source image after its volume has moved away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retirement {
    /// The image is deleted.
    Delete,
    /// The image is kept under another name, so that nothing boots from it by mistake (design §5.17).
    Keep,
}

impl Retirement {
    /// Decides what happens to `image`. An image that existed before Sterna served it is never deleted.
    pub fn of(image: &ImageLocation, keep_source: bool) -> Self {
        if keep_source || image.is_adopted() { Self::Keep } else { Self::Delete }
    }
}

/// Returns the steps, in order, that end or resume every interrupted migration of `state`.
pub fn recover(state: &State) -> Vec<Step> {
    let steps = state.unfinished().flat_map(|(id, migration)| match migration.side {
        Side::OneHost => recover_one(state, id, migration),
        Side::Outgoing { .. } | Side::Incoming { .. } => recover_between(id, migration),
    });
    steps
        .filter(|step| !matches!(step, Step::Discard(image) if state.is_reservoir(image.place.name())))
        .collect()
}

/// Returns this host's answer, as the source of a migration, to `message` of the target's host. `None` if there is no answer,
/// or a machine gives it.
pub fn answer_as_source(
    state: &State,
    peer: HostId,
    migration: MigrationId,
    message: &ToSource,
) -> Option<ToTarget> {
    let (ToSource::Query(attempt) | ToSource::Prepared(attempt)) = message else { return None };
    let has_moved = |recorded: &MigrationState| matches!(recorded.stage, Stage::Ended(Outcome::Moved { .. }));
    if state.is_of_lost_time(migration)
        && !state.migrations.get(&migration).is_some_and(has_moved)
        && !broken(Bug::RestoredDiscards)
    {
        // **N.B.** It may have been released since, and the target may have the only copy: the administrator decides.
        return None;
    }
    let Some(recorded) = state.migrations.get(&migration) else {
        // A forgotten migration has ended. After a move its target would own the volumes and not ask.
        return Some(ToTarget::Discard);
    };
    if !matches!(recorded.side, Side::Outgoing { peer: to, .. } if to == peer) {
        return Some(ToTarget::Discard);
    }
    match &recorded.stage {
        Stage::Ended(Outcome::Moved { .. } | Outcome::TakenBack) => {
            let generation = |moving: &crate::journal::MigratingVolume| {
                let moved = state.moved.get(&moving.volume).filter(|moved| moved.migration == migration)?;
                Some((moving.volume, moved.generation))
            };
            let generations = recorded.volumes.iter().map(generation).collect::<Option<Vec<_>>>()?;
            Some(ToTarget::Commit { attempt: *attempt, generations })
        }
        Stage::Ended(_) => Some(ToTarget::Discard),
        _ => None,
    }
}

/// Returns this host's answer, as the target of a migration, to `message` of the source's host. `None` if there is no answer,
/// or a machine gives it.
pub fn answer_as_target(
    state: &State,
    peer: HostId,
    remote: MigrationId,
    message: &ToTarget,
) -> Option<ToSource> {
    let known = state.incoming(peer, remote);
    let recorded = known.map(|(_, recorded)| recorded);
    let stage = recorded.map(|recorded| &recorded.stage);
    match (stage, message) {
        // Handled where the volumes are ([`nothing_kept_of`]).
        (_, ToTarget::NothingKept(_)) | (None, ToTarget::Cancelled) => None,
        (Some(Stage::Owned(_) | Stage::Ended(Outcome::Moved { .. })), ToTarget::Commit { attempt, .. }) => {
            Some(ToSource::Active { attempt: *attempt, own: Duration::ZERO })
        }
        // **N.B.** The missing blocks of volumes that came before this journal was restored are not known.
        (Some(Stage::Ended(Outcome::Moved { .. })) | None, ToTarget::IsWhole(_))
            if known.map_or(state.restored.is_some(), |(id, _)| state.is_of_lost_time(id)) =>
        {
            None
        }
        // **N.B.** Never before *owned*: until then no record says what is missing.
        (Some(Stage::Ended(Outcome::Moved { .. })) | None, ToTarget::IsWhole(attempt)) => {
            word_about_missing(state, peer, remote, *attempt)
        }
        (Some(Stage::Owned(_) | Stage::Ended(Outcome::Moved { .. })), _) => {
            let recorded = recorded.filter(|recorded| forced(recorded))?;
            Some(ToSource::TakenByForce { generations: next_of_incoming(recorded) })
        }
        (Some(Stage::Ended(_)), ToTarget::Discard) => Some(ToSource::Discarded { left_over: String::new() }),
        (Some(Stage::Ended(_)) | None, ToTarget::Prepare(_) | ToTarget::PrepareHollow { .. }) => {
            Some(ToSource::Unknown)
        }
        // The journal was restored while the copy waited, and the volumes have become this host's since.
        (Some(Stage::Ended(_)), ToTarget::Commit { attempt, generations })
            if known.is_some_and(|(id, _)| state.is_of_lost_time(id))
                && generations.iter().all(|came| has_come(state, came)) =>
        {
            Some(ToSource::Active { attempt: *attempt, own: Duration::ZERO })
        }
        (Some(_), _) => None,
        // Forgotten long ago, or never begun: nothing of it is here, except perhaps the volumes themselves.
        (None, ToTarget::Discard) => Some(ToSource::Discarded { left_over: String::new() }),
        (None, ToTarget::Commit { attempt, generations }) => {
            let active = ToSource::Active { attempt: *attempt, own: Duration::ZERO };
            Some(if generations.iter().all(|came| has_come(state, came)) {
                active
            } else {
                ToSource::Unknown
            })
        }
        (None, ToTarget::Abort(_)) => None,
    }
}

/// Returns whether the volumes of a migration are complete, or will never be; `None` while blocks are still to come.
fn word_about_missing(
    state: &State,
    peer: HostId,
    remote: MigrationId,
    attempt: Attempt,
) -> Option<ToSource> {
    let mut lacking = state.fillings_from(peer, remote).map(|(_, filling)| filling.is_given_up).peekable();
    if lacking.peek().is_none() {
        return Some(ToSource::Whole(attempt));
    }
    // **N.B.** Of several volumes that came together, each must be done with the source's images.
    let word = if broken(Bug::GivenUpIsWhole) { ToSource::Whole } else { ToSource::GivenUp };
    lacking.all(|is_given_up| is_given_up).then_some(word(attempt))
}

fn has_come(state: &State, (volume, generation): &(VolumeId, Generation)) -> bool {
    let here = state.volumes.get(volume).map(|here| here.record.generation);
    let gone = state.moved.get(volume).map(|gone| gone.generation);
    here.or(gone).is_some_and(|known| known >= *generation)
}

/// Returns all answers to `message` in order: the reason of an end that the source does not know, then [`answer_as_target`].
pub fn answers_as_target(
    state: &State,
    peer: HostId,
    remote: MigrationId,
    message: &ToTarget,
) -> Vec<ToSource> {
    let Some(answer) = answer_as_target(state, peer, remote, message) else { return Vec::new() };
    let stage = state.incoming(peer, remote).map(|(_, recorded)| &recorded.stage);
    match (&answer, stage) {
        (ToSource::Unknown, Some(Stage::Ended(Outcome::Cancelled))) => vec![ToSource::Cancelled, answer],
        _ => vec![answer],
    }
}

/// Returns the questions of sources whose volumes are complete here once `records` are durable. They are answered unasked
/// ([`answer_as_target`]), so that the sources need not wait. `before` is the state without `records`.
pub fn asked_by_itself(before: &State, records: &[Record]) -> Vec<(HostId, MigrationId, ToTarget)> {
    let concerned = records.iter().filter_map(|record| match record {
        Record::Filled { volume } => match before.volumes.get(volume)?.stay {
            StayId::Arrived(migration) => Some(MigrationId(migration)),
            StayId::Made => None,
        },
        // The last block may have come before the end was durable.
        Record::MigrationEnded { migration, .. } => Some(*migration),
        _ => None,
    });
    let questions = concerned.filter_map(|migration| {
        let recorded = before.migrations.get(&migration)?;
        let Side::Incoming { peer, remote, .. } = &recorded.side else { return None };
        Some((*peer, *remote, ToTarget::IsWhole(recorded.hollow.as_ref()?.attempt)))
    });
    questions.collect()
}

/// Returns the volumes that came by the migration from `peer` with the number `remote`, each with its copy left there. These
/// copies are useless once nothing is kept there. Empty while one of these volumes lacks blocks.
pub fn nothing_kept_of(state: &State, peer: HostId, remote: MigrationId) -> Vec<(VolumeId, ReplicaOf)> {
    let Some((migration, _)) = state.incoming(peer, remote) else { return Vec::new() };
    if state.fillings_from(peer, remote).next().is_some() {
        return Vec::new();
    }
    let came = StayId::Arrived(migration.0);
    let copy = ReplicaOf::Host { host: peer.0, departure: remote.0 };
    let here = state.volumes.iter().filter(|(_, known)| known.stay == came);
    here.map(|(volume, _)| (*volume, copy)).collect()
}

/// Returns the generations of an incoming migration's volumes once they are owned here.
pub fn next_of_incoming(recorded: &MigrationState) -> Vec<(VolumeId, Generation)> {
    match &recorded.side {
        Side::Incoming { volumes, .. } => {
            volumes.iter().map(|record| (record.volume, record.generation.next())).collect()
        }
        Side::OneHost | Side::Outgoing { .. } => Vec::new(),
    }
}

fn forced(recorded: &MigrationState) -> bool {
    matches!(recorded.promotion, Some(Promotion::Force { .. }))
}

fn recover_between(id: MigrationId, migration: &MigrationState) -> Vec<Step> {
    match (&migration.side, &migration.stage) {
        (_, Stage::Ended(_)) => Vec::new(),
        (Side::Outgoing { .. }, Stage::HandedBack) if broken(Bug::HandedBackNotResumed) => Vec::new(),
        (Side::Outgoing { .. }, Stage::Copying) => go_on_copying(id, migration),
        (Side::Incoming { .. }, Stage::Owned(_)) => {
            vec![ended(id, Outcome::Moved { left_over: String::new() })]
        }
        (Side::Incoming { .. }, Stage::Discarding(outcome)) => {
            let discard = migration.volumes.iter().map(|volume| Step::Discard(volume.target.clone()));
            discard.chain([ended(id, outcome.clone())]).collect()
        }
        _ => vec![Step::Resume(id)],
    }
}

fn go_on_copying(id: MigrationId, migration: &MigrationState) -> Vec<Step> {
    // **N.B.** Covers all attempts of the ended run; between hosts it recorded none of them. An answer to one of that run must
    // not be taken for an answer to one of the next (hard case 2).
    let attempt = match broken(Bug::TryNotCounted) {
        true => migration.aborted.max(migration.attempt()),
        false => migration.aborted.next().last_of_run(),
    };
    vec![Step::Commit(vec![Record::AttemptAborted { migration: id, attempt }]), Step::Resume(id)]
}

fn ended(migration: MigrationId, outcome: Outcome) -> Step {
    Step::Commit(vec![Record::MigrationEnded { migration, outcome, summary: Summary::default() }])
}

fn recover_one(state: &State, id: MigrationId, migration: &MigrationState) -> Vec<Step> {
    let moved = || Outcome::Moved { left_over: String::new() };
    let discard = migration.volumes.iter().map(|volume| Step::Discard(volume.target.clone()));
    let retire = migration.volumes.iter().map(|volume| {
        Step::Retire(volume.source.clone(), Retirement::of(&volume.source, migration.keep_source))
    });
    match &migration.stage {
        Stage::Copying | Stage::Prepared(_) => go_on_copying(id, migration),
        Stage::Released(attempt) => {
            let generations = next_generations(state, migration);
            let owned = Record::Owned { migration: id, attempt: *attempt, generations };
            std::iter::once(Step::Commit(vec![owned])).chain(retire).chain([ended(id, moved())]).collect()
        }
        Stage::Owned(_) => retire.chain([ended(id, moved())]).collect(),
        Stage::HandedBack => {
            let detail = "the volume could not be started at the target".to_owned();
            discard.chain([ended(id, Outcome::HandedBack { detail })]).collect()
        }
        Stage::Discarding(outcome) if broken(Bug::EndedBeforeDiscarded) => {
            std::iter::once(ended(id, outcome.clone())).chain(discard).collect()
        }
        Stage::Discarding(outcome) => discard.chain([ended(id, outcome.clone())]).collect(),
        Stage::Ended(_) => Vec::new(),
    }
}

fn next_generations(state: &State, migration: &MigrationState) -> Vec<(VolumeId, Generation)> {
    let volumes = migration.volumes.iter();
    volumes
        .filter_map(|moving| {
            let volume = state.volumes.get(&moving.volume)?;
            Some((moving.volume, Generation(volume.record.generation.0 + 1)))
        })
        .collect()
}
