//! What is left to do for migrations that a crash interrupted, and what a host answers for those that have ended.
//!
//! The journal decides. On one host: before *released* is durable the source owns the volumes, and the copying goes on if what the
//! half-made target lacks is known ([`crate::stay::copy`]); otherwise that goes. From then on the target owns them and only the
//! source's images are left to deal with (design §5.10–14).
//!
//! Between hosts a restart ends nothing by itself, for the other side may have gone on:
//!
//! ```text
//!   this host was   stage        what it does
//!   source          copying      aborts earlier tries durably, then goes on copying, or gives up and says so
//!                   released     says COMMIT until the target says what became of it; prints a ticket
//!                   handed back  serves the volumes; has the target delete its images
//!   target          copying      keeps its images, and asks
//!                   prepared     keeps its images for ever, and asks
//!                   owned        serves the volumes: the end is recorded
//!                   handed back  keeps its images until it is told to delete them
//!                    discarding   deletes its images
//! ```
//! Of a migration that has ended no machine is left. [`answer_as_source`] and [`answer_as_target`] say from the journal
//! alone what the other host is told, however long it has been away.

use std::time::Duration;

use chronicle::{Generation, ReplicaOf, StayId};

use crate::handover::message::{ToSource, ToTarget};
use crate::identity::{HostId, MigrationId, VolumeId};
use crate::journal::{
    ImageLocation, MigrationState, Outcome, Promotion, Record, Side, Stage, State, Summary,
};
use crate::planted::{Bug, broken};

/// A step of recovery. Steps are done in order, and each again after another crash: all of them can be repeated.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Make these records durable before going on.
    Commit(Vec<Record>),
    /// Delete the image if it is there: it is a half-made target that nobody owns.
    Discard(ImageLocation),
    /// Deal with a source image that has been left.
    Retire(ImageLocation, Retirement),
    /// Go on with the migration: make its machine by [`crate::Source::resume`] or [`crate::Target::resume`], from what the
    /// journal says by then.
    Resume(MigrationId),
}

/// What becomes of a source image after its volume has moved away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retirement {
    /// It is deleted.
    Delete,
    /// It is kept under another name, so that nothing boots from it by mistake (design §5.17).
    Keep,
}

impl Retirement {
    /// What is to become of `image`: one that was somebody's before Sterna served it is never deleted.
    pub fn of(image: &ImageLocation, keep_source: bool) -> Self {
        if keep_source || image.is_adopted() { Self::Keep } else { Self::Delete }
    }
}

/// The steps that end every interrupted migration of `state`, or go on with it, in order.
pub fn recover(state: &State) -> Vec<Step> {
    let steps = state.unfinished().flat_map(|(id, migration)| match migration.side {
        Side::OneHost => recover_one(state, id, migration),
        Side::Outgoing { .. } | Side::Incoming { .. } => recover_between(id, migration),
    });
    steps
        .filter(|step| !matches!(step, Step::Discard(image) if state.is_reservoir(image.place.name())))
        .collect()
}

/// What this host, from which the migration went out, answers to `message` of the host that it went to; `None`: nothing,
/// or its machine will.
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
        // N.B. it may have been released since, and what the target has be the only copy: people decide.
        return None;
    }
    let Some(recorded) = state.migrations.get(&migration) else {
        // Forgotten, so it has ended; had it ended by a move, its target would own the volumes and not ask.
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

/// What this host, to which the migration came, answers to `message` of the host that it came from; `None`: nothing, or
/// its machine will.
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
        // Whoever has the volumes is told ([`nothing_kept_of`]).
        (_, ToTarget::NothingKept(_)) => None,
        (Some(Stage::Owned(_) | Stage::Ended(Outcome::Moved { .. })), ToTarget::Commit { attempt, .. }) => {
            Some(ToSource::Active { attempt: *attempt, own: Duration::ZERO })
        }
        // N.B. what is missing of volumes that came before this journal was put back is not known.
        (Some(Stage::Ended(Outcome::Moved { .. })) | None, ToTarget::IsWhole(_))
            if known.map_or(state.restored.is_some(), |(id, _)| state.is_of_lost_time(id)) =>
        {
            None
        }
        // N.B. never before *owned*: until then nothing says what is missing.
        (Some(Stage::Ended(Outcome::Moved { .. })) | None, ToTarget::IsWhole(attempt)) => {
            state.fillings_from(peer, remote).next().is_none().then_some(ToSource::Whole(*attempt))
        }
        (Some(Stage::Owned(_) | Stage::Ended(Outcome::Moved { .. })), _) => {
            let recorded = recorded.filter(|recorded| forced(recorded))?;
            Some(ToSource::TakenByForce { generations: next_of_incoming(recorded) })
        }
        (Some(Stage::Ended(_)), ToTarget::Discard) => Some(ToSource::Discarded { left_over: String::new() }),
        (Some(Stage::Ended(_)) | None, ToTarget::Prepare(_) | ToTarget::PrepareHollow { .. }) => {
            Some(ToSource::Unknown)
        }
        // The journal was put back while the copy waited, and the volumes are this host's since then.
        (Some(Stage::Ended(_)), ToTarget::Commit { attempt, generations })
            if known.is_some_and(|(id, _)| state.is_of_lost_time(id))
                && generations.iter().all(|came| has_come(state, came)) =>
        {
            Some(ToSource::Active { attempt: *attempt, own: Duration::ZERO })
        }
        (Some(_), _) => None,
        // Forgotten long ago, or never begun: nothing of it is here, unless the very volumes are.
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

/// Tells whether a volume has come here, with that generation or a later one.
fn has_come(state: &State, (volume, generation): &(VolumeId, Generation)) -> bool {
    let here = state.volumes.get(volume).map(|here| here.record.generation);
    let gone = state.moved.get(volume).map(|gone| gone.generation);
    here.or(gone).is_some_and(|known| known >= *generation)
}

/// All that this host says to `message`, in that order: [`answer_as_target`], and before it why a migration has ended that
/// the source still goes on with.
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

/// What the sources of volumes would ask that lack nothing here any more once `records` are durable: they are answered as if they had
/// ([`answer_as_target`]), and need not wait until they do. `before`: what is durable without them.
pub fn asked_by_itself(before: &State, records: &[Record]) -> Vec<(HostId, MigrationId, ToTarget)> {
    let concerned = records.iter().filter_map(|record| match record {
        Record::Filled { volume } => match before.volumes.get(volume)?.stay {
            StayId::Arrived(migration) => Some(MigrationId(migration)),
            StayId::Made => None,
        },
        // What was missing may have come before the end was durable.
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

/// The volumes that are here since a migration came from `peer`, where it has the number `remote`, and how the copies of them are called
/// that were left there: of no use once nothing is kept there. Empty if something is missing here, which is there.
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

/// The generations that the volumes of an incoming migration have once they are owned here.
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
    // N.B. all tries of the run that has ended, and between hosts it recorded none of them: an answer to one of that run must
    // not be taken for one to a try of the next (hard case 2).
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
