//! Makes a volume larger while it is used, even during a migration.
//!
//! ```text
//!   no handover ─► room? ─► begun, durably ─► target, then source: room, unseen ─► resized, durably ─► shown to all
//!   meanwhile        │            │                 │ one of them cannot
//!                    └── refused ─┴───── undo ◄─────┘
//! ```
//! **N.B.** The target is ready before the source shows the new size, so no guest can write where the target has no space. A
//! crash before *resized* may leave images larger than the volume. The next start brings them to the size in the journal.

use std::rc::Rc;

use block::{BlockDevice, IoError};
use migration::journal::Record;
use migration::{CommitFault, Phase};
use tracing::{info, warn};

use crate::control::Control;
use crate::copy::VolumeCopy;
use crate::driver::SourceHandle;
use crate::handle::StoreRole;
use crate::refused::Refused;
use crate::stack::Volume;

/// Makes `volume` `size` bytes large; `driver` is its migration's, if it is being migrated.
///
/// Run it to its end, and begin no migration meanwhile. Guests continue. The present size is a success.
///
/// # Errors
/// [`Refused`]; the volume then keeps its size. [`Refused::HandingOver`]: the handover cannot wait; call again once
/// the migration has ended.
pub async fn grow(
    volume: &Volume,
    driver: Option<&SourceHandle>,
    control: &dyn Control,
    size: u64,
) -> Result<(), Refused> {
    let former = volume.size();
    if size <= former {
        return if size == former { Ok(()) } else { Err(Refused::Shrinks { size_bytes: former }) };
    }
    let copy = hold_back(volume, driver).await?;
    let growing = Growing { volume, copy, control, former, size };
    let result = growing.carry_out().await;
    if let Some(copy) = &growing.copy {
        copy.growth_ended(former, volume.size());
    }
    result
}

async fn hold_back(
    volume: &Volume,
    driver: Option<&SourceHandle>,
) -> Result<Option<Rc<VolumeCopy>>, Refused> {
    let check = || match driver {
        Some(driver)
            if matches!(driver.phase(), Phase::Releasing | Phase::Committing | Phase::TakingBack) =>
        {
            Err(Refused::HandingOver(driver.migration()))
        }
        _ => Ok(()),
    };
    check()?;
    let Some(copy) = volume.copy() else { return Ok(None) };
    copy.hold_back().await;
    if let Err(refused) = check() {
        let size = volume.size();
        copy.growth_ended(size, size);
        return Err(refused);
    }
    Ok(Some(copy))
}

struct Growing<'a> {
    volume: &'a Volume,
    copy: Option<Rc<VolumeCopy>>,
    control: &'a dyn Control,
    former: u64,
    size: u64,
}

impl Growing<'_> {
    async fn carry_out(&self) -> Result<(), Refused> {
        for (role, store) in self.stores() {
            check_room(role, &store, self.size).await?;
        }
        let (volume, size_bytes) = (self.volume.id(), self.size);
        let begun = self.control.commit(vec![Record::ResizeBegun { volume, size_bytes }]);
        begun.await.map_err(Refused::NotRecorded)?;
        if let Err(refused) = self.prepare().await {
            self.undo().await;
            return Err(refused);
        }
        match self.control.commit(vec![Record::Resized { volume, size_bytes }]).await {
            Ok(()) => {
                self.show();
                info!(%volume, from = self.former, to = self.size, "the volume has grown");
                Ok(())
            }
            Err(CommitFault::NotWritten) => {
                self.undo().await;
                Err(Refused::NotRecorded(CommitFault::NotWritten))
            }
            // The images keep the size that the journal may hold.
            Err(fault) => Err(Refused::NotRecorded(fault)),
        }
    }

    /// Returns the stores that need room, in the order in which they get it.
    fn stores(&self) -> Vec<(StoreRole, Rc<dyn BlockDevice>)> {
        let target = self.target().map(|copy| (StoreRole::Target, Rc::clone(copy.target())));
        target.into_iter().chain([(StoreRole::Owner, self.volume.store())]).collect()
    }

    fn target(&self) -> Option<&Rc<VolumeCopy>> {
        let now = self.volume.copy()?;
        self.copy.as_ref().filter(|copy| Rc::ptr_eq(copy, &now))
    }

    async fn prepare(&self) -> Result<(), Refused> {
        for (store, device) in self.stores() {
            let prepared = match device.growth() {
                Some(growth) => growth.prepare(self.size).await,
                None => Err(IoError::Unsupported),
            };
            match prepared {
                Err(error) if store == StoreRole::Owner || self.target().is_some() => {
                    return Err(Refused::NotGrown { store, error });
                }
                // A fault of the target of an abandoned migration does not matter.
                _ => {}
            }
        }
        Ok(())
    }

    /// Shows the new size everywhere at one instant: no other task runs in between.
    fn show(&self) {
        if let Some(growth) = self.target().and_then(|copy| copy.target().growth()) {
            growth.show(self.size);
        }
        self.volume.show_growth(self.size);
    }

    async fn undo(&self) {
        for (role, store) in self.stores() {
            let Some(growth) = store.growth() else { continue };
            if let Err(error) = growth.undo().await
                && role == StoreRole::Owner
            {
                warn!(%error, "the image stays larger than its volume until the next start");
                return;
            }
        }
        let undone = Record::Resized { volume: self.volume.id(), size_bytes: self.former };
        if let Err(fault) = self.control.commit(vec![undone]).await {
            warn!(%fault, "cannot record that the volume has not grown; the next start tries again");
        }
    }
}

async fn check_room(store: StoreRole, device: &Rc<dyn BlockDevice>, size: u64) -> Result<(), Refused> {
    let growth = device.growth().ok_or(Refused::NotGrown { store, error: IoError::Unsupported })?;
    match growth.capacity().await {
        Ok(Some(capacity_bytes)) if capacity_bytes < size => Err(Refused::NoRoom { store, capacity_bytes }),
        Ok(_) => Ok(()),
        Err(error) => Err(Refused::NotGrown { store, error }),
    }
}
