//! The model of the VM's disk: its bus and its sector size.

use anyhow::ensure;

use super::console::SeenDisk;

/// The model of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskModel {
    /// The bus of the disk.
    pub bus: Bus,
    /// Bytes of a logical and of a physical sector: 512 or 4096. The volume's size is a multiple of it.
    pub sector_bytes: u32,
}

/// A bus on which VMs find disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bus {
    /// A disk that is a PCI device by itself.
    VirtioBlk,
    /// A SCSI disk behind a host adapter.
    VirtioScsi,
}

impl DiskModel {
    /// The model of most VMs.
    pub const USUAL: Self = Self { bus: Bus::VirtioBlk, sector_bytes: 512 };

    /// Returns QEMU's devices that attach its block device `node`.
    pub(super) fn devices(self, node: &str) -> Vec<String> {
        let bytes = self.sector_bytes;
        let disk = format!("drive={node},logical_block_size={bytes},physical_block_size={bytes}");
        match self.bus {
            Bus::VirtioBlk => vec![format!("virtio-blk-pci,{disk}")],
            Bus::VirtioScsi => vec!["virtio-scsi-pci".to_owned(), format!("scsi-hd,{disk}")],
        }
    }

    /// Checks that the VM has found such a disk.
    pub(super) fn check(self, seen: &SeenDisk) -> anyhow::Result<()> {
        let name = match self.bus {
            Bus::VirtioBlk => "/dev/vd",
            Bus::VirtioScsi => "/dev/sd",
        };
        let is_so = seen.device.starts_with(name) && seen.sector_bytes == u64::from(self.sector_bytes);
        ensure!(is_so, "the VM has found another disk than {self:?}: {seen:?}");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_that_finds_another_disk_is_noticed() {
        let seen = |device: &str, sector_bytes| SeenDisk { device: device.to_owned(), sector_bytes };
        let scsi = DiskModel { bus: Bus::VirtioScsi, sector_bytes: 4096 };
        scsi.check(&seen("/dev/sda", 4096)).unwrap();
        scsi.check(&seen("/dev/vda", 4096)).unwrap_err();
        scsi.check(&seen("/dev/sda", 512)).unwrap_err();
        DiskModel::USUAL.check(&seen("/dev/vda", 512)).unwrap();
    }
}
