//! A volume that becomes larger while its lane serves it: waits for a handover that cannot wait, and lets no migration
//! begin meanwhile. The rest is in [`crate::growth`].

use std::time::Duration;

use futures_util::future::{Either, select};

use super::Lane;
use crate::growth;
use crate::refused::Refused;

/// How long a volume waits for its handover before it grows: longer than one takes whose stores work.
const HANDOVER_WAIT_MAX: Duration = Duration::from_secs(10);

impl Lane {
    /// Makes the volume `size` bytes large.
    pub(super) async fn grow(&self, size: u64) -> Result<(), Refused> {
        let coming = self.migration.coming.borrow().as_ref().map(|(migration, _)| *migration);
        let followed = self.migration.followed.get();
        if let Some(migration) = coming.or(followed).or(self.migration.opening.get()) {
            return Err(Refused::Migrating(migration));
        }
        if self.is_growing.replace(true) {
            return Err(Refused::Growing);
        }
        let result = self.grow_when_possible(size).await;
        self.is_growing.set(false);
        result
    }

    async fn grow_when_possible(&self, size: u64) -> Result<(), Refused> {
        let give_up_at = self.handle.now() + HANDOVER_WAIT_MAX;
        loop {
            let driver = self.migration.driver.borrow().clone();
            let grown = growth::grow(&self.volume, driver.as_ref(), &*self.control, size).await;
            if !matches!(grown, Err(Refused::HandingOver(_))) {
                return grown;
            }
            let is_over = || self.migration.driver.borrow().is_none().then_some(());
            let ended = Box::pin(self.migration.ended.wait_for(is_over));
            if let Either::Right(_) = select(ended, self.handle.sleep_until(give_up_at)).await {
                return grown;
            }
        }
    }
}
