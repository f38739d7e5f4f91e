//! The closed set of devices that are emulated within QEMU, and of their properties.
//!
//! Excluded are devices that open something of the host (`vfio-pci`, `usb-host`, `vhost-…`, `virtio-gpu-gl-pci`,
//! `loader`), properties that name a file (`pcap`, `sdrfile`), and experiments (`x-…`). QEMU itself refuses a property
//! that the device lacks.

use super::options::Key;
use super::value::Class::{Audio, Character, Device, Network, Node, Object, Tpm};
use super::value::Kind::{
    self, Address, FileOrNone, Label, Mac, Name, New, Number, Of, Size, Switch, SwitchOrAuto, Uuid, Words,
};

const NUMBER: Kind = Number(u32::MAX as u64);
const LARGE: Kind = Number(u64::MAX);
const ERRORS: Kind = Words(&["auto", "report", "ignore", "enospc", "stop"]);

/// Disks and their controllers; networks; buses; displays, input and sound; ports; all others.
const DRIVERS: [&str; 6] = [
    "ahci am53c974 dc390 floppy ich9-ahci ide-cd ide-hd isa-fdc isa-ide lsi lsi53c810 lsi53c895a megasas megasas-gen2 \
     mptsas1068 nvme nvme-ns nvme-subsys piix3-ide piix4-ide pvscsi scsi-cd scsi-hd sd-card sdhci-pci usb-bot usb-storage \
     usb-uas virtio-blk virtio-blk-device virtio-blk-pci virtio-blk-pci-non-transitional virtio-blk-pci-transitional \
     virtio-scsi virtio-scsi-device virtio-scsi-pci virtio-scsi-pci-non-transitional virtio-scsi-pci-transitional",
    "e1000 e1000-82544gc e1000-82545em e1000e i82550 i82551 i82557a i82557b i82557c i82558a i82558b i82559a i82559b \
     i82559c i82559er i82562 i82801 igb ne2k_isa ne2k_pci pcnet rtl8139 tulip usb-net virtio-net virtio-net-device \
     virtio-net-pci virtio-net-pci-non-transitional virtio-net-pci-transitional vmxnet3",
    "i82801b11-bridge ich9-usb-ehci1 ich9-usb-ehci2 ich9-usb-uhci1 ich9-usb-uhci2 ich9-usb-uhci3 ich9-usb-uhci4 \
     ich9-usb-uhci5 ich9-usb-uhci6 ioh3420 nec-usb-xhci pci-bridge pci-ohci pcie-pci-bridge pcie-root-port \
     piix3-usb-uhci piix4-usb-uhci pxb pxb-pcie qemu-xhci usb-ehci usb-hub x3130-upstream xio3130-downstream",
    "AC97 ES1370 VGA ati-vga bochs-display cirrus-vga hda-duplex hda-micro hda-output ich9-intel-hda intel-hda \
     isa-cirrus-vga isa-vga qxl qxl-vga ramfb sb16 secondary-vga usb-audio usb-kbd usb-mouse usb-tablet \
     usb-wacom-tablet virtio-gpu-pci virtio-keyboard-pci virtio-mouse-pci virtio-tablet-pci virtio-vga vmmouse \
     vmware-svga",
    "isa-debugcon isa-parallel isa-serial pci-serial pci-serial-2x pci-serial-4x usb-serial virtconsole virtio-serial \
     virtio-serial-device virtio-serial-pci virtio-serial-pci-non-transitional virtio-serial-pci-transitional \
     virtserialport",
    "amd-iommu i6300esb ib700 intel-iommu isa-applesmc pc-dimm pvpanic pvpanic-pci tpm-crb tpm-tis tpm-tis-device \
     virtio-balloon virtio-balloon-pci virtio-balloon-pci-non-transitional virtio-balloon-pci-transitional \
     virtio-iommu-pci virtio-mem-pci virtio-rng virtio-rng-device virtio-rng-pci virtio-rng-pci-non-transitional \
     virtio-rng-pci-transitional vmcoreinfo vmgenid",
];

pub(super) fn is_known(driver: &str) -> bool {
    DRIVERS.iter().flat_map(|drivers| drivers.split(' ')).any(|known| known == driver)
}

pub(super) fn property(name: &str) -> Option<Key> {
    let typed = TYPED.iter().find(|(known, _)| *known == name).copied();
    let listed = LISTED.iter().find_map(|(names, kind)| {
        let known = names.split(' ').find(|known| *known == name)?;
        Some((known, *kind))
    });
    typed.or(listed)
}

const TYPED: &[Key] = &[
    ("id", New(Device)),
    ("drive", Of(Node)),
    ("netdev", Of(Network)),
    ("chardev", Of(Character)),
    ("iothread", Of(Object)),
    ("memdev", Of(Object)),
    ("rng", Of(Object)),
    ("tpmdev", Of(Tpm)),
    ("audiodev", Of(Audio)),
    ("subsys", Of(Device)),
    ("primary-bus", Name),
    ("bus", Name),
    ("addr", Address),
    ("mac", Mac),
    ("guid", Uuid),
    ("romfile", FileOrNone),
    ("rerror", ERRORS),
    ("werror", ERRORS),
    ("duplex", Words(&["half", "full"])),
    ("tx", Words(&["timer", "bh"])),
    ("aw-bits", Number(64)),
    ("mode", Name),
    ("port", Name),
    ("wwn", LARGE),
    ("port_wwn", LARGE),
];

const LISTED: &[(&str, Kind)] = &[
    (SWITCHES, Switch),
    (
        "account-failed account-invalid backend_defaults disable-legacy disable-modern intremap eim msi \
         unplugged-inaccessible write-cache",
        SwitchOrAuto,
    ),
    (
        "acpi-index aer_log_max aer_max_queued aerl baudbase bootindex bus_nr bus-reserve cad chassis chassis_nr channel \
         cmb_size_mb cmd_per_lun cyls events head heads host_mtu index iobase ioport irq lcyls lheads lsecs lun \
         max-discard-sectors max-write-zeroes-sectors max_ioqpairs max_outputs max_ports max_sectors mdts msix_qsize node \
         nr nsid num-queues num_queues numa_node p2 p3 period port_index queue-size ram_size ram_size_mb refresh_rate \
         revision rombar romsize rotation_rate rsc_interval rx_queue_size scsi-id scsi_version secs sectors_per_track slot \
         speed surfaces tx_queue_size unit usb_version vectors vgamem_mb virtqueue_size vram64_size_mb vram_size_mb vsl \
         xmax xres ymax yres guest-stats-polling-interval",
        NUMBER,
    ),
    ("max-bytes max_io_size max_unmap_size memaddr vram_size", LARGE),
    (
        "block-size discard_granularity io-reserve logical_block_size max_hostmem mem-reserve min_io_size opt_io_size \
         physical_block_size pref32-reserve pref64-reserve requested-size size",
        Size,
    ),
    ("device_id model name nqn osk product serial vendor ver display", Label),
];

const SWITCHES: &str = "aer any_layout ats attached autonegotiation big-endian-framebuffer blob caching-mode \
    config-wce csum ctrl_guest_offloads ctrl_mac_addr ctrl_rx ctrl_rx_extra ctrl_vlan ctrl_vq deflate-on-oom \
    device-iotlb disable-acs discard dma-drain dma-translation dpofua edid emergency-write event_idx \
    extra_mac_registers failover free-page-hint free-page-reporting global-vmstate gso guest_announce guest_csum \
    guest_ecn guest_rsc_ext guest_tso4 guest_tso6 guest_ufo hash host_ecn host_tso4 host_tso6 host_ufo hotplug \
    indirect_desc init-vet ioeventfd iommu_platform migrate-extra migrate_tso_props mitigation mixer mmio \
    modern-pio-notify mq mrg_rxbuf msix msos-desc multifunction notify_on_empty old_msi_addr packed page-per-vq \
    page-poison param_change pcihp ppi prealloc qemu-extended-regs queue_reset removable report-discard-granularity \
    request-merging rss scsi seg-max-adjust seg_max_adjust share-rw shpc snoop-control split status streams \
    use-disabled-flag use-intel-id use-started use-timer virtio-pci-bus-master-bug-migration wakeup write-zeroes";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_that_reach_the_host_and_properties_that_are_files_are_none_of_the_set() {
        for driver in [
            "vfio-pci",
            "usb-host",
            "vhost-vsock-pci",
            "loader",
            "virtio-9p-pci",
            "u2f-passthru",
            "ivshmem-plain",
            "",
        ] {
            assert!(!is_known(driver), "{driver}");
        }
        for name in [
            "pcap",
            "sdrfile",
            "frudatafile",
            "file",
            "host",
            "evdev",
            "filename",
            "x-txburst",
            "realized",
            "",
        ] {
            assert_eq!(property(name), None, "{name}");
        }
        assert!(is_known("virtio-blk-pci") && property("mac") == Some(("mac", Mac)));
    }

    #[test]
    fn a_property_has_one_type() {
        let listed: Vec<&str> = LISTED.iter().flat_map(|(names, _)| names.split(' ')).collect();
        let mut all: Vec<&str> = TYPED.iter().map(|(name, _)| *name).chain(listed).collect();
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }
}
