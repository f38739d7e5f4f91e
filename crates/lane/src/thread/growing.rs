//! Growth of a volume while its lane serves it: waits for a handover in progress, and lets no migration begin meanwhile. The
//! rest is in [`crate::growth`].

use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::{Either, select};
use migration::journal::Record;
use tracing::{info, warn};

use super::Lane;
use crate::growth;
use crate::refused::Refused;
use crate::stack::Home;

/// The longest wait for a handover: longer than one takes whose stores work.
const HANDOVER_WAIT_MAX: Duration = Duration::from_secs(10);
/// The longest wait for hosts that forward clients: a disconnected one learns the size later.
const FOLLOWED_WITHIN: Duration = Duration::from_secs(1);
/// Pause before the journal is asked again to record the owner's size.
const RECORD_RETRY: Duration = Duration::from_millis(500);

impl Lane {
    /// Offers clients the size that the volume has at its owner, while another host owns it.
    pub(super) async fn follow_growth(self: Rc<Self>) {
        loop {
            let Home::Elsewhere(owner) = self.volume.home() else {
                self.volume.leaves().await;
                continue;
            };
            let Some(size) = self.volume.while_at(&owner, owner.grows()).await else { continue };
            // N.B. Recorded before clients see it: the offered size must survive a restart.
            let (volume, size_bytes) = (self.volume.id(), size);
            while let Err(fault) =
                self.control.commit(vec![Record::GrewElsewhere { volume, size_bytes }]).await
            {
                warn!(%fault, "cannot record the volume's size at its owner; trying again");
                self.handle.sleep(RECORD_RETRY).await;
            }
            info!(volume = %self.settings.name, to = size, "the volume has grown at its owner");
            self.volume.grew_elsewhere(&owner, size);
        }
    }

    pub(super) async fn grow(&self, size: u64) -> Result<(), Refused> {
        let coming = self.migration.coming.borrow().as_ref().map(|(migration, _)| *migration);
        let followed = self.migration.followed.get();
        if let Some(migration) = coming.or(followed).or(self.migration.opening.get()) {
            return Err(Refused::Migrating(migration));
        }
        if self.is_duplicating.get() {
            return Err(Refused::Duplicating);
        }
        if self.is_growing.replace(true) {
            return Err(Refused::Growing);
        }
        let result = self.grow_when_possible(size).await;
        self.is_growing.set(false);
        if result.is_ok() {
            // Clients that connect from now on, to any host, get the new size.
            select(pin!(self.volume.is_known_everywhere()), self.handle.sleep(FOLLOWED_WITHIN)).await;
        }
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
