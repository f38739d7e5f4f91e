//! The closed set of options, of their keys, and of the types of their values.
//!
//! An option, a key or a word that is not listed is refused. Listed ones reach nothing of the host except what their kind says.

use super::value::Class::{Audio, Character, Network, Node, Object, Tpm};
use super::value::Kind::{
    self, Address, File, Keyboard, Line, Mac, Machine, Name, New, Number, Of, Range, Size, Socket, Subnet,
    Switch, SwitchOrAuto, Text, Uuid, Words,
};

pub(super) type Key = (&'static str, Kind);

#[derive(Clone, Copy, Debug)]
pub(super) enum Shape {
    Flag,
    Alone(Kind),
    /// Keys; the first one may be without its name if `implied` is set.
    Keys {
        implied: &'static str,
        keys: &'static [Key],
    },
    Forms {
        first: &'static str,
        naming: Naming,
        forms: &'static [Form],
    },
    Device,
    Drive,
    Node,
    Processor,
    Property,
    Port,
    Monitor,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Naming {
    Implied,
    Named,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Form {
    pub(super) words: &'static [&'static str],
    pub(super) keys: &'static [Key],
}

/// Options that QEMU merges if they are repeated: they are merged here as well, and each key occurs once.
pub(super) const MERGED: &[&str] = &[
    "-machine",
    "-m",
    "-smp",
    "-boot",
    "-name",
    "-rtc",
    "-overcommit",
    "-msg",
    "-icount",
    "-action",
    "-compat",
];
pub(super) const REPEATED: &[&str] = &[
    "-accel",
    "-acpitable",
    "-audiodev",
    "-blockdev",
    "-chardev",
    "-device",
    "-drive",
    "-fw_cfg",
    "-global",
    "-net",
    "-netdev",
    "-nic",
    "-numa",
    "-object",
    "-parallel",
    "-serial",
    "-smbios",
    "-tpmdev",
];

const NUMBER: Kind = Number(u32::MAX as u64);
const LARGE: Kind = Number(u64::MAX);

/// Returns the shape of an option's value; `None`: it is outside of the closed set.
pub(super) fn shape(option: &str) -> Option<(&'static str, Shape)> {
    let option = if option == "-M" { "-machine" } else { option };
    OPTIONS.iter().find(|(name, _)| *name == option).copied()
}

const OPTIONS: &[(&str, Shape)] = &[
    ("-accel", Shape::Forms { first: "accel", naming: Naming::Implied, forms: ACCELERATORS }),
    ("-acpitable", Shape::Keys { implied: "", keys: TABLE }),
    ("-action", Shape::Keys { implied: "", keys: ACTIONS }),
    ("-append", Shape::Alone(Line)),
    ("-audiodev", Shape::Forms { first: "driver", naming: Naming::Implied, forms: SOUND }),
    ("-bios", Shape::Alone(File)),
    ("-blockdev", Shape::Node),
    ("-boot", Shape::Keys { implied: "order", keys: BOOT }),
    ("-chardev", Shape::Forms { first: "backend", naming: Naming::Implied, forms: CHARACTER_DEVICES }),
    ("-compat", Shape::Keys { implied: "", keys: COMPATIBILITY }),
    ("-cpu", Shape::Processor),
    ("-debugcon", Shape::Port),
    ("-device", Shape::Device),
    ("-display", Shape::Alone(Words(&["none"]))),
    ("-drive", Shape::Drive),
    ("-dtb", Shape::Alone(File)),
    ("-enable-kvm", Shape::Flag),
    ("-fw_cfg", Shape::Keys { implied: "name", keys: FIRMWARE_ENTRY }),
    ("-global", Shape::Property),
    ("-icount", Shape::Keys { implied: "shift", keys: INSTRUCTIONS }),
    ("-initrd", Shape::Alone(File)),
    ("-k", Shape::Alone(Keyboard)),
    ("-kernel", Shape::Alone(File)),
    (
        "-m",
        Shape::Keys { implied: "size", keys: &[("size", Size), ("slots", Number(256)), ("maxmem", Size)] },
    ),
    ("-machine", Shape::Keys { implied: "type", keys: MACHINE }),
    ("-mem-prealloc", Shape::Flag),
    ("-monitor", Shape::Alone(Words(&["none"]))),
    ("-msg", Shape::Keys { implied: "", keys: &[("timestamp", Switch), ("guest-name", Switch)] }),
    (
        "-name",
        Shape::Keys {
            implied: "guest",
            keys: &[("guest", Text), ("process", Text), ("debug-threads", Switch)],
        },
    ),
    ("-net", Shape::Forms { first: "type", naming: Naming::Implied, forms: OLD_NETWORKS }),
    ("-netdev", Shape::Forms { first: "type", naming: Naming::Implied, forms: NETWORKS }),
    ("-nic", Shape::Forms { first: "type", naming: Naming::Implied, forms: CARDS }),
    ("-no-acpi", Shape::Flag),
    ("-no-fd-bootchk", Shape::Flag),
    ("-no-hpet", Shape::Flag),
    ("-no-reboot", Shape::Flag),
    ("-no-shutdown", Shape::Flag),
    ("-no-user-config", Shape::Flag),
    ("-nodefaults", Shape::Flag),
    ("-nographic", Shape::Flag),
    ("-numa", Shape::Forms { first: "type", naming: Naming::Implied, forms: MEMORY_NODES }),
    ("-object", Shape::Forms { first: "qom-type", naming: Naming::Implied, forms: OBJECTS }),
    ("-overcommit", Shape::Keys { implied: "", keys: &[("mem-lock", Switch), ("cpu-pm", Switch)] }),
    ("-parallel", Shape::Port),
    ("-qmp", Shape::Monitor),
    ("-rtc", Shape::Keys { implied: "", keys: CLOCK }),
    ("-serial", Shape::Port),
    ("-smbios", Shape::Forms { first: "type", naming: Naming::Named, forms: TABLES }),
    ("-smp", Shape::Keys { implied: "cpus", keys: PROCESSORS }),
    ("-tpmdev", Shape::Forms { first: "type", naming: Naming::Implied, forms: TPMS }),
    ("-usb", Shape::Flag),
    ("-uuid", Shape::Alone(Uuid)),
    ("-vga", Shape::Alone(Words(&["none", "std", "cirrus", "vmware", "qxl", "virtio"]))),
    ("-vnc", Shape::Alone(Words(&["none"]))),
    ("-watchdog-action", Shape::Alone(Words(WATCHDOG))),
    ("-only-migratable", Shape::Flag),
];

const MACHINE: &[Key] = &[
    ("type", Machine),
    ("accel", Words(&["kvm", "tcg", "kvm:tcg", "tcg:kvm"])),
    ("acpi", SwitchOrAuto),
    ("default-bus-bypass-iommu", Switch),
    ("dump-guest-core", Switch),
    ("fd-bootchk", Switch),
    ("gic-version", Words(&["2", "3", "4", "max", "host"])),
    ("graphics", Switch),
    ("highmem", Switch),
    ("hmat", Switch),
    ("hpet", Switch),
    ("i8042", Switch),
    ("its", Switch),
    ("kernel-irqchip", Words(&["on", "off", "split"])),
    ("kernel_irqchip", Words(&["on", "off", "split"])),
    ("max-ram-below-4g", Size),
    ("mem-merge", Switch),
    ("memory-backend", Of(Object)),
    ("pcspk-audiodev", Of(Audio)),
    ("pflash0", Of(Node)),
    ("pflash1", Of(Node)),
    ("pic", SwitchOrAuto),
    ("pit", SwitchOrAuto),
    ("sata", Switch),
    ("secure", Switch),
    ("smbios-entry-point-type", Words(&["32", "64", "auto"])),
    ("smbus", Switch),
    ("smm", SwitchOrAuto),
    ("suppress-vmdesc", Switch),
    ("usb", Switch),
    ("vmport", SwitchOrAuto),
    ("virtualization", Switch),
    ("rtc", SwitchOrAuto),
];
const ACCELERATORS: &[Form] = &[
    Form {
        words: &["kvm"],
        keys: &[("kernel-irqchip", Words(&["on", "off", "split"])), ("dirty-ring-size", NUMBER)],
    },
    Form {
        words: &["tcg"],
        keys: &[("thread", Words(&["single", "multi"])), ("tb-size", NUMBER), ("split-wx", Switch)],
    },
];
const PROCESSORS: &[Key] = &[
    ("cpus", Number(4096)),
    ("maxcpus", Number(4096)),
    ("drawers", Number(4096)),
    ("books", Number(4096)),
    ("sockets", Number(4096)),
    ("dies", Number(4096)),
    ("clusters", Number(4096)),
    ("modules", Number(4096)),
    ("cores", Number(4096)),
    ("threads", Number(4096)),
];
const MEMORY_NODES: &[Form] = &[
    Form {
        words: &["node"],
        keys: &[
            ("nodeid", Number(255)),
            ("cpus", Range),
            ("mem", Size),
            ("memdev", Of(Object)),
            ("initiator", Number(255)),
        ],
    },
    Form { words: &["dist"], keys: &[("src", Number(255)), ("dst", Number(255)), ("val", Number(255))] },
    Form {
        words: &["cpu"],
        keys: &[
            ("node-id", NUMBER),
            ("socket-id", NUMBER),
            ("die-id", NUMBER),
            ("cluster-id", NUMBER),
            ("core-id", NUMBER),
            ("thread-id", NUMBER),
        ],
    },
];
const BOOT: &[Key] = &[
    ("order", Name),
    ("once", Name),
    ("menu", Switch),
    ("splash", File),
    ("splash-time", NUMBER),
    ("reboot-timeout", NUMBER),
    ("strict", Switch),
];
const CLOCK: &[Key] = &[
    ("base", Words(&["utc", "localtime"])),
    ("clock", Words(&["host", "rt", "vm"])),
    ("driftfix", Words(&["none", "slew"])),
];
const INSTRUCTIONS: &[Key] = &[("shift", Name), ("align", Switch), ("sleep", Switch)];
const WATCHDOG: &[&str] = &["reset", "shutdown", "poweroff", "pause", "debug", "none", "inject-nmi"];
const ACTIONS: &[Key] = &[
    ("reboot", Words(&["reset", "shutdown"])),
    ("shutdown", Words(&["poweroff", "pause"])),
    ("panic", Words(&["pause", "shutdown", "exit-failure", "none"])),
    ("watchdog", Words(WATCHDOG)),
];
const COMPATIBILITY: &[Key] =
    &[("deprecated-input", Words(&["accept", "reject"])), ("deprecated-output", Words(&["accept", "hide"]))];
/// **N.B.** QEMU takes a list of files between colons here.
const TABLE: &[Key] = &[
    ("sig", Name),
    ("rev", Number(255)),
    ("oem_id", Name),
    ("oem_table_id", Name),
    ("oem_rev", NUMBER),
    ("asl_compiler_id", Name),
    ("asl_compiler_rev", NUMBER),
    ("data", File),
    ("file", File),
];
const FIRMWARE_ENTRY: &[Key] = &[("name", Text), ("string", Text), ("file", File)];
/// Tables for the guest. **N.B.** `file` and `path` would name files, and are excluded.
const TABLES: &[Form] = &[
    Form {
        words: &["0"],
        keys: &[("vendor", Text), ("version", Text), ("date", Text), ("release", Text), ("uefi", Switch)],
    },
    Form {
        words: &["1"],
        keys: &[
            ("manufacturer", Text),
            ("product", Text),
            ("version", Text),
            ("serial", Text),
            ("uuid", Uuid),
            ("sku", Text),
            ("family", Text),
        ],
    },
    Form { words: &["2"], keys: BOARD },
    Form { words: &["3"], keys: BOARD },
    Form {
        words: &["4"],
        keys: &[
            ("sock_pfx", Text),
            ("manufacturer", Text),
            ("version", Text),
            ("serial", Text),
            ("asset", Text),
            ("part", Text),
            ("max-speed", Number(65535)),
            ("current-speed", Number(65535)),
            ("processor-id", LARGE),
            ("processor-family", Number(65535)),
        ],
    },
    Form {
        words: &["8"],
        keys: &[
            ("internal_reference", Text),
            ("external_reference", Text),
            ("connector_type", Number(255)),
            ("port_type", Number(255)),
        ],
    },
    Form { words: &["11"], keys: &[("value", Text)] },
    Form {
        words: &["17"],
        keys: &[
            ("loc_pfx", Text),
            ("bank", Text),
            ("manufacturer", Text),
            ("serial", Text),
            ("asset", Text),
            ("part", Text),
            ("speed", Number(65535)),
        ],
    },
];
const BOARD: &[Key] = &[
    ("manufacturer", Text),
    ("product", Text),
    ("version", Text),
    ("serial", Text),
    ("asset", Text),
    ("location", Text),
    ("sku", Text),
];
const SOUND: &[Form] = &[Form { words: &["none"], keys: &[("id", New(Audio)), ("timer-period", NUMBER)] }];
const TPMS: &[Form] = &[Form { words: &["emulator"], keys: &[("id", New(Tpm)), ("chardev", Of(Character))] }];
/// **N.B.** `logfile` is excluded: it would be a file that is written.
const CHARACTER_DEVICES: &[Form] = &[
    Form { words: &["null"], keys: &[("id", New(Character)), ("mux", Switch)] },
    Form { words: &["ringbuf"], keys: &[("id", New(Character)), ("size", Size), ("mux", Switch)] },
    Form {
        words: &["socket"],
        keys: &[
            ("id", New(Character)),
            ("path", Socket),
            ("server", Switch),
            ("wait", Switch),
            ("reconnect", Number(3600)),
            ("mux", Switch),
        ],
    },
];
/// **N.B.** Keys are excluded by which QEMU's own network listens, connects, runs programs or serves files.
const NETWORKS: &[Form] = &[
    Form {
        words: &["user"],
        keys: &[
            ("id", New(Network)),
            ("restrict", Switch),
            ("net", Subnet),
            ("dhcpstart", Subnet),
            ("hostname", Name),
            ("domainname", Name),
            ("ipv4", Switch),
            ("ipv6", Switch),
        ],
    },
    Form { words: &["tap"], keys: TAP },
    Form { words: &["hubport"], keys: &[("id", New(Network)), ("hubid", NUMBER), ("netdev", Of(Network))] },
];
const OLD_NETWORKS: &[Form] = &[
    Form { words: &["nic"], keys: &[("model", Name), ("macaddr", Mac)] },
    Form { words: &["user"], keys: &[("restrict", Switch)] },
];
const TAP: &[Key] = &[
    ("id", New(Network)),
    ("ifname", Name),
    ("script", Words(&["no"])),
    ("downscript", Words(&["no"])),
    ("vhost", Switch),
    ("queues", Number(256)),
    ("sndbuf", Size),
    ("vnet_hdr", Switch),
    ("poll-us", NUMBER),
];
const CARDS: &[Form] = &[
    Form { words: &["none"], keys: &[] },
    Form {
        words: &["user"],
        keys: &[
            ("id", New(Network)),
            ("model", Name),
            ("mac", Mac),
            ("addr", Address),
            ("restrict", Switch),
            ("net", Subnet),
            ("dhcpstart", Subnet),
            ("hostname", Name),
            ("domainname", Name),
            ("ipv4", Switch),
            ("ipv6", Switch),
        ],
    },
    Form {
        words: &["tap"],
        keys: &[
            ("id", New(Network)),
            ("model", Name),
            ("mac", Mac),
            ("addr", Address),
            ("ifname", Name),
            ("script", Words(&["no"])),
            ("downscript", Words(&["no"])),
            ("vhost", Switch),
            ("queues", Number(256)),
            ("vnet_hdr", Switch),
        ],
    },
];
const OBJECTS: &[Form] = &[
    Form {
        words: &["iothread"],
        keys: &[
            ("id", New(Object)),
            ("poll-max-ns", LARGE),
            ("poll-grow", LARGE),
            ("poll-shrink", LARGE),
            ("aio-max-batch", LARGE),
            ("thread-pool-min", Number(1024)),
            ("thread-pool-max", Number(1024)),
        ],
    },
    Form {
        words: &["memory-backend-ram"],
        keys: &[
            ("id", New(Object)),
            ("size", Size),
            ("share", Switch),
            ("prealloc", Switch),
            ("prealloc-threads", Number(1024)),
            ("merge", Switch),
            ("dump", Switch),
            ("reserve", Switch),
            ("host-nodes", Range),
            ("policy", POLICY),
        ],
    },
    Form {
        words: &["memory-backend-memfd"],
        keys: &[
            ("id", New(Object)),
            ("size", Size),
            ("share", Switch),
            ("prealloc", Switch),
            ("prealloc-threads", Number(1024)),
            ("merge", Switch),
            ("dump", Switch),
            ("reserve", Switch),
            ("host-nodes", Range),
            ("policy", POLICY),
            ("seal", Switch),
            ("hugetlb", Switch),
            ("hugetlbsize", Size),
        ],
    },
    Form { words: &["rng-builtin"], keys: &[("id", New(Object))] },
    Form {
        words: &["rng-random"],
        keys: &[("id", New(Object)), ("filename", Words(&["/dev/urandom", "/dev/random"]))],
    },
    Form {
        words: &["secret"],
        keys: &[("id", New(Object)), ("data", Text), ("file", File), ("format", Words(&["raw", "base64"]))],
    },
];
const POLICY: Kind = Words(&["default", "preferred", "bind", "interleave"]);

const AT_ERRORS: Kind = Words(&["auto", "report", "ignore", "enospc", "stop"]);

/// Properties of all devices of a kind that a command may set.
pub(super) const PROPERTIES: &[(&str, &str, Kind)] = &[
    ("ICH9-LPC", "disable_s3", Number(1)),
    ("ICH9-LPC", "disable_s4", Number(1)),
    ("ICH9-LPC", "noreboot", Switch),
    ("ICH9-LPC", "acpi-pci-hotplug-with-bridge-support", Switch),
    ("PIIX4_PM", "disable_s3", Number(1)),
    ("PIIX4_PM", "disable_s4", Number(1)),
    ("PIIX4_PM", "acpi-pci-hotplug-with-bridge-support", Switch),
    ("PIIX4_PM", "acpi-root-pci-hotplug", Switch),
    ("virtio-blk-device", "rerror", AT_ERRORS),
    ("virtio-blk-device", "werror", AT_ERRORS),
    ("scsi-hd", "rerror", AT_ERRORS),
    ("scsi-hd", "werror", AT_ERRORS),
    ("cfi.pflash01", "secure", Switch),
    ("kvm-pit", "lost_tick_policy", Words(&["discard", "delay", "slew", "merge"])),
    ("mc146818rtc", "lost_tick_policy", Words(&["discard", "slew"])),
    ("isa-debugcon", "iobase", Number(65535)),
    ("mch", "extended-tseg-mbytes", Number(4096)),
    ("q35-pcihost", "pci-hole64-size", Size),
    ("i440FX-pcihost", "pci-hole64-size", Size),
    ("kvm-apic", "vapic", Switch),
    ("migration", "send-configuration", Switch),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_repeat_or_merge_are_of_the_closed_set() {
        for option in MERGED.iter().chain(REPEATED) {
            assert!(shape(option).is_some(), "{option}");
        }
        for (option, _) in OPTIONS {
            assert_eq!(OPTIONS.iter().filter(|(other, _)| other == option).count(), 1, "{option}");
        }
    }
}
