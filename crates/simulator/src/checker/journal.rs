//! The journal that a restart finds says what was acknowledged, and nothing that was never asked for; recovery ends
//! every migration and leaves no half-made target; phases follow their table.

use std::collections::BTreeSet;

use migration::Phase;
use migration::journal::State;

/// What is wrong with the state that a restart has read; `None` if nothing is.
///
/// `acknowledged` is what callers were told; `possible` are the states with commits that nobody was told of.
pub(crate) fn wrong_state(read: &State, acknowledged: &State, possible: &[State]) -> Option<String> {
    let known = std::iter::once(acknowledged).chain(possible).any(|state| state == read);
    (!known).then(|| format!("the journal says {read:?}, and was told {acknowledged:?}, or {possible:?}"))
}

/// What recovery has left undone; `None` if nothing is.
///
/// `images` are the images that are in the stores; `excused` are those of which somebody was told that they are left.
pub(crate) fn unrecovered(
    state: &State,
    images: &BTreeSet<String>,
    excused: &BTreeSet<String>,
) -> Option<String> {
    if let Some((id, migration)) = state.unfinished().next() {
        return Some(format!("after recovery migration {id} is {:?}", migration.stage));
    }
    let owners: BTreeSet<_> =
        state.volumes.values().map(|volume| volume.record.image.place.name().to_owned()).collect();
    if let Some(lost) = owners.difference(images).next() {
        return Some(format!("{lost} owns a volume and is gone"));
    }
    let left = images.iter().find(|path| !owners.contains(*path) && !excused.contains(*path));
    left.map(|path| format!("{path} is left, and nobody has been told"))
}

/// Joins the phases of one migration.
#[derive(Debug, Default)]
pub(crate) struct PhaseWatch {
    phase: Option<Phase>,
}

impl PhaseWatch {
    /// A migration has entered `next`; says what is wrong with that.
    pub(crate) fn enter(&mut self, next: Phase) -> Option<String> {
        let before = self.phase.replace(next).unwrap_or(Phase::Copying);
        // A machine may say again where it is.
        let right = before == next || before.may_become(next);
        (!right).then(|| format!("a migration went from {before} to {next}"))
    }
}

#[cfg(test)]
mod tests {
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
    fn an_image_that_nobody_owns_is_noticed() {
        let images = BTreeSet::from(["/a/x".to_owned()]);
        assert!(unrecovered(&State::default(), &images, &images).is_none());
        assert!(unrecovered(&State::default(), &images, &BTreeSet::new()).is_some());
    }

    #[test]
    fn a_transition_that_is_not_in_the_table_is_noticed() {
        let mut watch = PhaseWatch::default();
        assert_eq!(watch.enter(Phase::Closing), None);
        assert!(watch.enter(Phase::Committing).is_some());
    }
}
