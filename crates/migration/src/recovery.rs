//! What is left to do for migrations that a crash interrupted, when both sides are on one host.
//!
//! The journal decides: before *released* is durable the source owns the volumes and the half-made target goes; from
//! then on the target owns them and only the source's images are left to deal with (design §5.10–14).

use chronicle::Generation;

use crate::identity::{Attempt, MigrationId, VolumeId};
use crate::journal::{FailureCode, ImageLocation, MigrationState, Outcome, Record, Stage, State, Summary};

/// A step of recovery. Steps are done in order, and each again after another crash: all of them can be repeated.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Make these records durable before going on.
    Commit(Vec<Record>),
    /// Delete the image if it is there: it is a half-made target that nobody owns.
    Discard(ImageLocation),
    /// Deal with a source image that has been left.
    Retire(ImageLocation, Retirement),
}

/// What becomes of a source image after its volume has moved away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retirement {
    /// It is deleted.
    Delete,
    /// It is kept under another name, so that nothing boots from it by mistake (design §5.17).
    Fence,
}

impl Retirement {
    /// What is to become of `image`: one that was somebody's before Sterna served it is never deleted.
    pub fn of(image: &ImageLocation, keep_source: bool) -> Self {
        if keep_source || image.is_adopted() { Self::Fence } else { Self::Delete }
    }
}

/// The steps that end every interrupted migration of `state`, in order.
pub fn recover(state: &State) -> Vec<Step> {
    state.unfinished().flat_map(|(id, migration)| recover_one(state, id, migration)).collect()
}

fn recover_one(state: &State, id: MigrationId, migration: &MigrationState) -> Vec<Step> {
    let moved = || Outcome::Moved { left_over: String::new() };
    let discard = migration.volumes.iter().map(|volume| Step::Discard(volume.target.clone()));
    let retire = migration.volumes.iter().map(|volume| {
        Step::Retire(volume.source.clone(), Retirement::of(&volume.source, migration.keep_source))
    });
    let ended = |outcome| {
        Step::Commit(vec![Record::MigrationEnded { migration: id, outcome, summary: Summary::default() }])
    };
    match &migration.stage {
        Stage::Copying | Stage::Prepared(_) => {
            let attempt = match migration.stage {
                Stage::Prepared(attempt) => attempt,
                _ => Attempt::NONE,
            };
            // N.B. aborted durably before anything of the target goes: a second crash must not find it prepared.
            let aborted = Step::Commit(vec![Record::AttemptAborted { migration: id, attempt }]);
            let outcome = Outcome::Failed {
                code: FailureCode::DaemonStopped,
                detail: "the daemon stopped before the handover; the volume stayed at the source".to_owned(),
            };
            std::iter::once(aborted).chain(discard).chain([ended(outcome)]).collect()
        }
        Stage::Released(attempt) => {
            let generations = next_generations(state, migration);
            let owned = Record::Owned { migration: id, attempt: *attempt, generations };
            std::iter::once(Step::Commit(vec![owned])).chain(retire).chain([ended(moved())]).collect()
        }
        Stage::Owned(_) => retire.chain([ended(moved())]).collect(),
        Stage::HandedBack => {
            let detail = "the volume could not be started at the target".to_owned();
            discard.chain([ended(Outcome::HandedBack { detail })]).collect()
        }
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
