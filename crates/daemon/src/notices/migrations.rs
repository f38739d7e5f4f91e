//! Which migrations have failed since the last look.

use std::collections::BTreeSet;

use api::{Migration, MigrationState, NoticeEvent, NoticeLevel, Part};

use super::watch::{News, Subject};
use crate::host::Description;

/// The migrations that were seen, by their numbers, which rise.
#[derive(Debug, Default)]
pub(super) struct SeenMigrations {
    /// The lowest number that was not given yet; `None`: nothing was seen yet, so what has ended is no news.
    pub(super) next: Option<u64>,
    /// Those that had not ended.
    pub(super) unfinished: BTreeSet<u64>,
}

impl SeenMigrations {
    /// Takes all migrations, and returns those that have ended since the last look.
    fn look(&mut self, unfinished: BTreeSet<u64>, all: impl IntoIterator<Item = u64>) -> Vec<u64> {
        let next = self.next;
        let was_open =
            |number: u64| next.is_some_and(|next| number >= next) || self.unfinished.contains(&number);
        let all: Vec<u64> = all.into_iter().collect();
        let ended =
            all.iter().copied().filter(|number| was_open(*number) && !unfinished.contains(number)).collect();
        self.next = all.iter().chain(&unfinished).map(|number| number + 1).max().max(next).or(Some(0));
        self.unfinished = unfinished;
        ended
    }
}

impl Description {
    /// Returns what is to be told of migrations that have ended, and whether anything was seen that was not before.
    pub(super) fn look_at_migrations(&self, seen: &mut SeenMigrations) -> (Vec<News>, bool) {
        let before = (seen.next, seen.unfinished.clone());
        let (unfinished, all) = self.migration_numbers();
        let ended = seen.look(unfinished, all);
        let failed = ended.into_iter().filter_map(|number| of_failed(&self.migration(number)?));
        (failed.collect(), before != (seen.next, seen.unfinished.clone()))
    }
}

fn of_failed(migration: &Migration) -> Option<News> {
    let how = match migration.state {
        MigrationState::Failed => "has failed",
        MigrationState::HandedBack => "was handed back",
        _ => return None,
    };
    let id = &migration.id;
    let what = if migration.name.is_empty() { &migration.volume } else { &migration.name };
    let why = migration.message.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
    let message = format!("the migration of \"{what}\" {how}{why}; see: sterna migration show {id}");
    let subject = Subject { level: NoticeLevel::Problem, part: Part::Migration, name: Some(id.clone()) };
    Some(News { event: NoticeEvent::Happened, subject, message })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_end_is_seen_once_whenever_it_began() {
        let mut seen = SeenMigrations::default();
        let set = |numbers: &[u64]| numbers.iter().copied().collect::<BTreeSet<u64>>();
        assert_eq!(seen.look(set(&[3]), 1..=3), Vec::<u64>::new(), "what had ended before is no news");
        // One begins and ends between two looks, a later one is still under way.
        assert_eq!(seen.look(set(&[3, 5]), 1..=5), [4]);
        assert_eq!(seen.look(set(&[5]), 1..=5), [3]);
        assert_eq!(seen.look(set(&[]), 1..=5), [5]);
        assert_eq!(seen.look(set(&[]), 1..=5), Vec::<u64>::new());
        // Old ones are forgotten by the journal.
        assert_eq!(seen.look(set(&[]), []), Vec::<u64>::new());
        assert_eq!(seen.look(set(&[]), 5..=6), [6]);
        // The first one of all has the number 0.
        let mut seen = SeenMigrations::default();
        assert_eq!(seen.look(set(&[]), []), Vec::<u64>::new());
        assert_eq!(seen.look(set(&[]), 0..=0), [0]);
    }
}
