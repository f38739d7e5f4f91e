//! Ends migrations that a crash interrupted and that are not resumed: for the daemon before any volume is served, and for a
//! volume whose lane has ended. `migration::recovery` decides the steps; each can be repeated after another crash.

use lane::ControlFault;
use migration::custody::Owner;
use migration::journal::{MigrationState, Record, State};
use migration::recovery::{Step, recover};
use migration::{CommitFault, MigrationId, VolumeId};
use tokio::task::JoinError;

use crate::custody::Custody;
use crate::journal::Journal;

/// Ends every interrupted migration. If an image cannot be handled, the migration ends all the same, so that its volume can be
/// served. The outcome names what is left over. Errors: [`CommitFault`]: the journal cannot be written; nothing may be served.
pub(crate) async fn run(journal: &Journal, custody: &Custody) -> Result<(), CommitFault> {
    end(journal, custody, |_| true).await.map(drop)
}

/// Ends the interrupted migrations of one volume whose lane has ended unexpectedly; returns which. Fails like [`run`].
pub(crate) async fn run_of(
    journal: &Journal,
    custody: &Custody,
    volume: VolumeId,
) -> Result<Vec<MigrationId>, CommitFault> {
    // The lane's last commit may still be in the queue. This one is queued behind it.
    journal.commit(Vec::new()).await?;
    end(journal, custody, |migration| migration.volumes.iter().any(|moving| moving.volume == volume)).await
}

async fn end(
    journal: &Journal,
    custody: &Custody,
    concerned: impl Fn(&MigrationState) -> bool,
) -> Result<Vec<MigrationId>, CommitFault> {
    let state = journal.read(State::clone);
    let mut ended = Vec::new();
    for (id, migration) in state.unfinished().filter(|(_, migration)| concerned(migration)) {
        tracing::warn!(migration = %id, stage = ?migration.stage, "a migration was interrupted");
        // One at a time, so that a failure of one does not affect the others.
        let mut alone = State { volumes: state.volumes.clone(), ..State::default() };
        alone.migrations.insert(id, migration.clone());
        let mut left_over = Vec::new();
        for step in recover(&alone) {
            match step {
                Step::Commit(mut records) => {
                    for record in &mut records {
                        if let Record::MigrationEnded { outcome, .. } = record {
                            *outcome = outcome.clone().with_left_over(&left_over.join("; "));
                        }
                    }
                    journal.commit(records).await?;
                }
                step => {
                    left_over.extend(carry_out(custody, step, id).await.err().map(|fault| fault.to_string()));
                }
            }
        }
        ended.push(id);
    }
    Ok(ended)
}

async fn carry_out(custody: &Custody, step: Step, migration: MigrationId) -> Result<(), StepFault> {
    let custody = custody.clone();
    let done = tokio::task::spawn_blocking(move || match step {
        Step::Discard(image) => Ok(custody.discard(&image, &Owner::Migration(migration))?),
        Step::Retire(image, retirement) => custody.retire(&image, retirement, migration).map(drop),
        // Its session is made when the volumes are served.
        Step::Commit(_) | Step::Resume(_) => Ok(()),
    });
    Ok(done.await?.inspect_err(|fault| {
        tracing::warn!(%migration, %fault, "an image of an interrupted migration is left over");
    })?)
}

#[derive(Debug, thiserror::Error)]
enum StepFault {
    #[error(transparent)]
    Image(#[from] ControlFault),
    #[error(transparent)]
    Task(#[from] JoinError),
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;

    use chronicle::Generation;
    use migration::journal::{
        ExportSettings, FailureCode, ImageLocation, MigratingVolume, Outcome, Record, Side, Stage, State,
        VolumeRecord,
    };
    use migration::{Attempt, MigrationId, VolumeId};

    use crate::custody::Custody;
    use crate::files::lock::FolderLock;
    use crate::journal::Journal;
    use crate::stores::Stores;

    const VOLUME: VolumeId = VolumeId([7; 16]);
    const MIGRATION: MigrationId = MigrationId(0);
    const ATTEMPT: Attempt = Attempt(1);

    fn image(folder: &Path, name: &str) -> ImageLocation {
        ImageLocation::raw_file(name, folder.join(name).display().to_string())
    }

    /// Returns the records of a migration until its ownership is durable.
    fn records(folder: &Path, target: &str) -> Vec<Record> {
        let (source, target) = (image(folder, "source"), image(folder, target));
        let generations = vec![(VOLUME, Generation(1))];
        let volume = VolumeRecord {
            volume: VOLUME,
            name: "v".into(),
            size_bytes: 1 << 20,
            block_size_bytes: 65536,
            image: source.clone(),
            generation: Generation(0),
            export: ExportSettings::default(),
        };
        let volumes = vec![MigratingVolume { volume: VOLUME, source, target }];
        vec![
            Record::VolumeAdded(volume),
            Record::MigrationStarted {
                migration: MIGRATION,
                volumes,
                keep_source: false,
                side: Side::OneHost,
            },
            Record::TargetPrepared { migration: MIGRATION, attempt: ATTEMPT },
            Record::Released { migration: MIGRATION, attempt: ATTEMPT, generations: generations.clone() },
            Record::Owned { migration: MIGRATION, attempt: ATTEMPT, generations },
        ]
    }

    /// Crashes after these records and recovers twice; returns which images are left, the volume's image and the stage.
    async fn recovered(target: &str, count: usize, more: Option<Record>) -> (bool, bool, String, Stage) {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("source"), b"s").unwrap();
        if !target.contains('/') {
            std::fs::write(folder.path().join(target), b"t").unwrap();
        }
        let journal = Journal::open(folder.path(), FolderLock::acquire(folder.path()).unwrap()).unwrap();
        for record in records(folder.path(), target).into_iter().take(count).chain(more) {
            journal.commit(vec![record]).await.unwrap();
        }
        for _ in 0..2 {
            let custody = Custody::new(journal.clone(), &Stores::new(&BTreeMap::new()));
            super::run(&journal, &custody).await.unwrap();
        }
        let state = journal.read(State::clone);
        let stage = state.migrations[&MIGRATION].stage.clone();
        let there = |name: &str| folder.path().join(name).exists();
        let served = state.volumes[&VOLUME].record.image.store.clone();
        (there("source"), there(target), served, stage)
    }

    /// Does the same for a migration that ends by it.
    async fn check(target: &str, count: usize, more: Option<Record>) -> (bool, bool, String, Outcome) {
        let (source, target, served, stage) = recovered(target, count, more).await;
        let Stage::Ended(outcome) = stage else { panic!("{stage:?}") };
        (source, target, served, outcome)
    }

    fn discarding() -> Record {
        let outcome = Outcome::Failed { code: FailureCode::DaemonStopped, detail: "unmarked".to_owned() };
        Record::Discarding { migration: MIGRATION, outcome }
    }

    #[tokio::test]
    async fn before_the_commit_point_both_stay_until_it_is_known_whether_the_copying_goes_on() {
        for count in 2..=3 {
            let (source, target, served, stage) = recovered("target", count, None).await;
            assert_eq!((source, target, served.as_str(), stage), (true, true, "source", Stage::Copying));
        }
    }

    #[tokio::test]
    async fn a_target_that_is_given_up_goes() {
        for count in 2..=3 {
            let (source, target, served, outcome) = check("target", count, Some(discarding())).await;
            assert_eq!((source, target, served.as_str()), (true, false, "source"));
            assert!(matches!(outcome, Outcome::Failed { code: FailureCode::DaemonStopped, .. }));
        }
    }

    #[tokio::test]
    async fn after_the_commit_point_the_target_stays_and_the_source_goes() {
        for count in 4..=5 {
            let (source, target, served, outcome) = check("target", count, None).await;
            assert_eq!((source, target, served.as_str()), (false, true, "target"));
            assert_eq!(outcome, Outcome::Moved { left_over: String::new() });
        }
    }

    #[tokio::test]
    async fn target_that_cannot_be_deleted_is_named_in_the_outcome() {
        let (source, _, served, outcome) = check("unmounted/target", 2, Some(discarding())).await;
        assert_eq!((source, served.as_str()), (true, "source"));
        let Outcome::Failed { detail, .. } = outcome else { panic!("{outcome:?}") };
        assert!(detail.contains("; left over: cannot delete "), "{detail}");
    }
}
