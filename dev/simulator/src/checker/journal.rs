//! Checks the journal that a restart finds: it holds all acknowledged records, and none that was never ordered. Also checks that
//! migrations within a host leave nothing behind, and that phases follow their table.

use std::collections::BTreeSet;

use migration::Phase;
use migration::journal::{Side, Stage, State};

/// Returns what is wrong with the state that a restart has read.
///
/// `acknowledged` is the acknowledged state; `possible` are the states with unacknowledged commits.
pub(crate) fn wrong_state(read: &State, acknowledged: &State, possible: &[State]) -> Option<String> {
    let known = std::iter::once(acknowledged).chain(possible).any(|state| state == read);
    (!known).then(|| format!("the journal says {read:?}, and was told {acknowledged:?}, or {possible:?}"))
}

/// Returns what migrations between stores of a host have left undone.
///
/// `images` are the images in the stores; `excused` are those that were reported as left over.
pub(crate) fn left_over(
    state: &State,
    images: &BTreeSet<&str>,
    excused: &BTreeSet<String>,
) -> Option<String> {
    let locals = || state.migrations.iter().filter(|(_, migration)| migration.side == Side::OneHost);
    if let Some((id, migration)) = locals().find(|(_, known)| !matches!(known.stage, Stage::Ended(_))) {
        return Some(format!("migration {id} is {:?}, and nobody sees to it", migration.stage));
    }
    let owners: BTreeSet<_> = state.volumes.values().map(|volume| volume.record.image.place.name()).collect();
    if let Some(lost) = owners.difference(images).next() {
        return Some(format!("{lost} owns a volume and is gone"));
    }
    // Images that have left the host since then belong to another migration.
    let gone: BTreeSet<_> =
        state.moved.values().map(|moved| moved.volume.record.image.place.name()).collect();
    let touched = locals().flat_map(|(_, migration)| &migration.volumes);
    let mut paths = touched.flat_map(|moving| [moving.source.place.name(), moving.target.place.name()]);
    let is_left = |path: &&str| {
        images.contains(path) && !owners.contains(path) && !gone.contains(path) && !excused.contains(*path)
    };
    paths.find(is_left).map(|path| format!("{path} is left, and nobody has been told"))
}

#[derive(Debug, Default)]
pub(crate) struct PhaseWatch {
    phase: Option<Phase>,
}

impl PhaseWatch {
    pub(crate) fn enter(&mut self, next: Phase) -> Option<String> {
        let before = self.phase.replace(next).unwrap_or(Phase::Copying);
        // A machine may repeat its present phase.
        let right = before == next || before.may_become(next);
        (!right).then(|| format!("a migration went from {before} to {next}"))
    }
}

#[cfg(test)]
mod tests {
    use chronicle::Generation;
    use migration::journal::{
        Entry, ExportSettings, ImageLocation, MigratingVolume, Outcome, Record, Summary, VolumeRecord,
    };
    use migration::{MigrationId, VolumeId};

    use super::*;

    #[test]
    fn a_lost_commit_is_noticed() {
        let (old, mut new) = (State::default(), State::default());
        new.next_migration = 1;
        assert!(wrong_state(&new, &new, &[]).is_none());
        assert!(wrong_state(&new, &old, std::slice::from_ref(&new)).is_none());
        assert!(wrong_state(&old, &new, &[]).is_some());
    }

    #[test]
    fn what_a_migration_between_stores_leaves_is_noticed() {
        let state = one_that_was_cancelled();
        let found = |images: &[&str], excused: &[&str]| {
            let excused = excused.iter().map(|path| (*path).to_owned()).collect();
            left_over(&state, &images.iter().copied().collect(), &excused)
        };
        assert_eq!(found(&["/a/source"], &[]), None);
        assert!(found(&["/a/source", "/b/target"], &[]).is_some_and(|found| found.contains("is left")));
        assert_eq!(found(&["/a/source", "/b/target"], &["/b/target"]), None);
        assert!(found(&["/b/target"], &["/b/target"]).is_some_and(|found| found.contains("is gone")));
    }

    fn one_that_was_cancelled() -> State {
        let (volume, migration) = (VolumeId([1; 16]), MigrationId(0));
        let source = ImageLocation::raw_file("a", "/a/source");
        let target = ImageLocation::raw_file("b", "/b/target");
        let added = Record::VolumeAdded(VolumeRecord {
            volume,
            name: "v".into(),
            size_bytes: 4096,
            block_size_bytes: 4096,
            image: source.clone(),
            generation: Generation(1),
            export: ExportSettings::default(),
        });
        let volumes = vec![MigratingVolume { volume, source, target }];
        let started =
            Record::MigrationStarted { migration, volumes, keep_source: false, side: Side::OneHost };
        let (outcome, summary) = (Outcome::Cancelled, Summary::default());
        let ended = Record::MigrationEnded { migration, outcome, summary };
        let mut state = State::default();
        state.apply(&Entry { at_unix_ms: 0, records: vec![added, started, ended] }).unwrap();
        state
    }

    #[test]
    fn a_transition_that_is_not_in_the_table_is_noticed() {
        let mut watch = PhaseWatch::default();
        assert_eq!(watch.enter(Phase::Closing), None);
        assert!(watch.enter(Phase::Committing).is_some());
    }
}
