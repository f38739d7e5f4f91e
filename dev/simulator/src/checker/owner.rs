//! Checks that guests write to at most one store: what the journal permits a daemon with each image.
//!
//! While a commit is in flight, a restart may find it or not. So each request must be permitted with and without it.

use migration::journal::{ImageLocation, MigrationState, Side, Stage, State};

/// The permitted use of an image. Ordered: of two possible permissions, the lesser one is certain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Permission {
    /// No use: it was released, does not own the volume yet, or its state is unknown.
    Forbidden,
    /// It was released incomplete, and its target reads missing blocks here.
    Reservoir,
    /// It is obsolete; late writes do no harm.
    Worthless,
    /// It is being copied to: it may be written and flushed, but serves no guest.
    Target,
    /// It is being copied to, and another host reads its missing blocks here meanwhile.
    Refilled,
    Owner,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
    Flush,
}

impl Permission {
    pub(crate) fn allows(self, access: Access) -> bool {
        match self {
            Self::Forbidden => false,
            Self::Reservoir => access == Access::Read,
            Self::Worthless | Self::Target => access != Access::Read,
            Self::Owner | Self::Refilled => true,
        }
    }
}

pub(crate) fn permission(state: &State, path: &str) -> Permission {
    let is = |image: &ImageLocation| image.place.name() == path;
    let owns = state.volumes.values().any(|volume| is(&volume.record.image));
    let mut target_of_failed = false;
    let reads_here = |migration: &MigrationState| {
        matches!((&migration.side, &migration.stage), (Side::Outgoing { .. }, Stage::Released(_)))
            && migration.hollow_now().is_some()
            && migration.volumes.iter().any(|moving| is(&moving.source))
    };
    let is_reservoir = !owns && state.migrations.values().any(reads_here);
    let lacks = |migration: &MigrationState| {
        !migration.side.has_target()
            && migration.volumes.iter().any(|moving| state.fillings.contains_key(&moving.volume))
    };
    for migration in state.migrations.values().rev() {
        let (source, target) = (
            migration.volumes.iter().any(|moving| is(&moving.source)),
            migration.volumes.iter().any(|moving| is(&moving.target)),
        );
        match &migration.stage {
            Stage::Copying | Stage::Prepared(_) | Stage::HandedBack | Stage::Discarding(_)
                if target && is_reservoir =>
            {
                return Permission::Refilled;
            }
            Stage::Copying | Stage::Prepared(_) if target => return Permission::Target,
            Stage::HandedBack if target && !migration.side.has_source() => target_of_failed = true,
            Stage::Discarding(_) if target => target_of_failed = true,
            // It has come back.
            Stage::Released(_) if source && owns && !migration.side.has_target() => return Permission::Owner,
            Stage::Released(_) if source && migration.hollow_now().is_some() => return Permission::Reservoir,
            // Late fetches of its missing blocks are right if it is handed back, and harmless otherwise.
            Stage::Released(_) if source && lacks(migration) => return Permission::Worthless,
            // Past the commit point, before the volumes have a new owner.
            Stage::Released(_) if source || target => return Permission::Forbidden,
            Stage::Ended(_) if target && !owns => target_of_failed = true,
            _ => {}
        }
    }
    match (owns, target_of_failed) {
        (true, _) => Permission::Owner,
        (false, true) => Permission::Worthless,
        (false, false) => Permission::Forbidden,
    }
}

/// Returns the stage of an incoming migration for which a restart would look for the image at `path`.
pub(crate) fn counts_upon(state: &State, path: &str) -> Option<Stage> {
    let mut incoming =
        state.unfinished().filter(|(_, migration)| matches!(migration.side, Side::Incoming { .. }));
    let comes = |migration: &MigrationState| {
        migration.volumes.iter().any(|moving| moving.target.place.name() == path)
    };
    let (_, migration) = incoming
        .find(|(_, migration)| comes(migration) && !matches!(migration.stage, Stage::Discarding(_)))?;
    Some(migration.stage.clone())
}

/// Returns what is wrong with the change of the volumes' generations from `before` to `after`.
///
/// A generation grows by one, and exactly when a volume's image changes.
pub(crate) fn wrong_generation(before: &State, after: &State) -> Option<String> {
    after.volumes.iter().find_map(|(id, now)| {
        let then = before.volumes.get(id)?;
        let (old, new) = (then.record.generation.0, now.record.generation.0);
        let moved = then.record.image != now.record.image;
        let right = if moved { new == old + 1 } else { new == old };
        (!right).then(|| {
            let (from, to) = (then.record.image.place.name(), now.record.image.place.name());
            format!("generation {old} at {from} became {new} at {to}")
        })
    })
}

#[cfg(test)]
mod tests {
    use chronicle::Generation;
    use migration::journal::{Entry, ExportSettings, MigratingVolume, Outcome, Record, Side, VolumeRecord};
    use migration::{Attempt, MigrationId, VolumeId};

    use super::*;

    const VOLUME: VolumeId = VolumeId([1; 16]);
    const MIGRATION: MigrationId = MigrationId(0);

    fn image(path: &str) -> ImageLocation {
        ImageLocation::raw_file("a", path)
    }

    fn state_after(records: &[Record]) -> State {
        let mut state = State::default();
        let volume = VolumeRecord {
            volume: VOLUME,
            name: "v".into(),
            size_bytes: 4096,
            block_size_bytes: 4096,
            image: image("/source"),
            generation: Generation(1),
            export: ExportSettings::default(),
        };
        let moving = MigratingVolume { volume: VOLUME, source: image("/source"), target: image("/target") };
        let started = Record::MigrationStarted {
            migration: MIGRATION,
            volumes: vec![moving],
            keep_source: false,
            side: Side::OneHost,
        };
        let mut all = vec![Record::VolumeAdded(volume), started];
        all.extend_from_slice(records);
        state.apply(&Entry { at_unix_ms: 0, records: all }).unwrap();
        state
    }

    fn permissions(records: &[Record]) -> (Permission, Permission) {
        let state = state_after(records);
        (permission(&state, "/source"), permission(&state, "/target"))
    }

    #[test]
    fn each_stage_has_one_owner_or_none() {
        let (migration, attempt) = (MIGRATION, Attempt(1));
        let generations = vec![(VOLUME, Generation(2))];
        let prepared = Record::TargetPrepared { migration, attempt };
        let released = Record::Released { migration, attempt, generations: generations.clone() };
        let owned = Record::Owned { migration, attempt, generations };
        let handed_back = Record::HandedBack { migration, generations: vec![(VOLUME, Generation(3))] };
        let mut records = vec![prepared, released, owned, handed_back];
        assert_eq!(permissions(&records), (Permission::Owner, Permission::Forbidden));
        records.pop();
        assert_eq!(permissions(&records), (Permission::Forbidden, Permission::Owner));
        records.pop();
        assert_eq!(permissions(&records), (Permission::Forbidden, Permission::Forbidden));
        records.pop();
        assert_eq!(permissions(&records), (Permission::Owner, Permission::Target));
        let summary = migration::journal::Summary::default();
        let ended = Record::MigrationEnded { migration, outcome: Outcome::Cancelled, summary };
        assert_eq!(permissions(&[ended]), (Permission::Owner, Permission::Worthless));
    }

    #[test]
    fn a_target_serves_nobody() {
        assert!(!Permission::Target.allows(Access::Read));
        assert!(Permission::Target.allows(Access::Write));
        assert!(!Permission::Forbidden.allows(Access::Flush));
    }

    #[test]
    fn a_generation_that_skips_or_stays_is_noticed() {
        let (migration, attempt) = (MIGRATION, Attempt(1));
        let prepared = Record::TargetPrepared { migration, attempt };
        let to = |generation| {
            let generations = vec![(VOLUME, Generation(generation))];
            let released = Record::Released { migration, attempt, generations: generations.clone() };
            state_after(&[prepared.clone(), released, Record::Owned { migration, attempt, generations }])
        };
        let before = state_after(&[]);
        assert_eq!(wrong_generation(&before, &to(2)), None);
        assert!(wrong_generation(&before, &to(3)).is_some());
        assert!(wrong_generation(&before, &to(1)).is_some());
    }
}
