//! Shows a VM that the volume of one of its disks has grown: QEMU connects to the volume once more, and notifies the guest.

use std::sync::Arc;

use crate::error::RequestError;
use crate::host::VolumeOrders;
use crate::vms::{Standing, VmError, monitors};

impl VolumeOrders {
    /// Gives the disk of a VM the size that its volume has. If that fails, the guest keeps the former size, and the log says why.
    pub(crate) async fn show_growth(self: &Arc<Self>, volume: &str, size_bytes: u64) {
        let adopted = || Some(self.vms.adoptions().ok()?.find(|adopted| adopted.uses(volume))?.name);
        let Some(vm) = self.vms.user_of(volume).or_else(adopted) else { return };
        match self.grow_disk(&vm, volume, size_bytes).await {
            Ok(()) => tracing::info!(%vm, volume, size_bytes, "the guest was told the new size of its disk"),
            Err(error) => {
                let reason = error.message();
                tracing::warn!(
                    %vm, volume, reason,
                    "the guest keeps the former size of its disk until its VM is stopped and started (docs/nbd.md)"
                );
            }
        }
    }

    async fn grow_disk(
        self: &Arc<Self>,
        vm: &str,
        volume: &str,
        size_bytes: u64,
    ) -> Result<(), RequestError> {
        let failed = |error| RequestError::from(VmError::of(vm)(error));
        let refuse = |why: &str| RequestError::from(VmError::Disk { vm: vm.to_owned(), why: why.to_owned() });
        let _turn = self.vms.turn(vm)?;
        let adopted = self.vms.adoptions()?.get(vm);
        if adopted.as_ref().is_some_and(|adopted| adopted.libvirt.is_some()) {
            return Err(refuse("libvirt changes the sizes of its disks: virsh blockresize"));
        }
        if self.vms.get(vm).is_ok_and(|known| known.standing != Standing::Home) {
            return Err(refuse("it is moving"));
        }
        let qemu = match (self.vms.qemu(vm), &adopted) {
            (Ok(qemu), _) => qemu,
            (Err(_), Some(adopted)) => Arc::new(monitors::connect_to(adopted).await.map_err(failed)?),
            (Err(error), None) => return Err(error.into()),
        };
        let export = self.exports.export_named(volume);
        let disk = qemu.disk_over(&export).await.map_err(failed)?;
        let disk = disk.ok_or_else(|| refuse("QEMU has no disk that is over the volume"))?;
        let kept = adopted.iter().flat_map(|adopted| &adopted.disks).find(|kept| kept.volume == volume);
        let number = kept.map(|kept| kept.number).or_else(|| disk.number());
        let place = || self.vms.get(vm).ok()?.volumes.iter().position(|name| name == volume);
        let number = number.or_else(|| u32::try_from(place()?).ok()).unwrap_or(u32::MAX);
        qemu.grow(&disk, &export, number, size_bytes).await.map_err(failed)
    }
}
