//! The limits of the migrations that run, each shared by the lanes of its volumes and by its VM.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use migration::{Budget, MigrationId};

#[derive(Debug, Default)]
pub(crate) struct Budgets(Mutex<BTreeMap<MigrationId, Budget>>);

impl Budgets {
    /// Returns the budget of a migration. The first caller makes it, with the rate of the order.
    pub(crate) fn of(&self, migration: MigrationId, bytes_per_second: Option<u64>) -> Budget {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|_, budget| budget.is_in_use());
        known.entry(migration).or_insert_with(|| Budget::of(bytes_per_second)).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_one_for_all_of_a_migration_and_goes_with_it() {
        let (budgets, migration) = (Budgets::default(), MigrationId(7));
        let (disk, memory) = (budgets.of(migration, Some(5)), budgets.of(migration, None));
        memory.set_rate(Some(9));
        assert_eq!((disk.rate(), budgets.of(MigrationId(8), Some(1)).rate()), (Some(9), Some(1)));
        drop((disk, memory));
        assert_eq!(budgets.of(migration, None).rate(), None);
    }
}
