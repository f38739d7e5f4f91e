//! How much memory of the host a command can take: of the machine, of backends, of screens, of buffers.
//!
//! What a device takes if nothing is said is QEMU's default. It is an upper bound: what nobody touches is not taken yet.

use super::value::Value;
use super::{Argument, Body, Understood};

const MIB: u64 = 1 << 20;
/// What a machine has if nothing is said.
const DEFAULT: u64 = 128 * MIB;
/// Screens, and what each takes if nothing is said: its frame buffer, or what its guest may have on the host.
const SCREENS: [(&str, u64); 13] = [
    ("VGA", 16 * MIB),
    ("ati-vga", 16 * MIB),
    ("bochs-display", 16 * MIB),
    ("cirrus-vga", 16 * MIB),
    ("isa-cirrus-vga", 16 * MIB),
    ("isa-vga", 16 * MIB),
    ("qxl", 144 * MIB),
    ("qxl-vga", 144 * MIB),
    ("ramfb", 16 * MIB),
    ("secondary-vga", 16 * MIB),
    ("virtio-gpu-pci", 256 * MIB),
    ("virtio-vga", 272 * MIB),
    ("vmware-svga", 16 * MIB),
];
/// The same, as `-vga` calls them.
const OLD_SCREENS: [(&str, u64); 5] = [
    ("std", 16 * MIB),
    ("cirrus", 16 * MIB),
    ("vmware", 16 * MIB),
    ("qxl", 144 * MIB),
    ("virtio", 272 * MIB),
];
/// Properties of devices that are memory, and their units.
const OF_DEVICES: [(&str, u64); 9] = [
    ("cmb_size_mb", MIB),
    ("max_hostmem", 1),
    ("ram_size", 1),
    ("ram_size_mb", MIB),
    ("romsize", 1),
    ("vgamem_mb", MIB),
    ("vram64_size_mb", MIB),
    ("vram_size", 1),
    ("vram_size_mb", MIB),
];

impl Understood {
    /// Bytes of this host's memory that the VM can take, as far as the command says.
    pub fn memory_bytes(&self) -> u64 {
        let of_arguments = self.arguments.iter().map(of_argument);
        of_arguments.fold(self.of_machine(), u64::saturating_add)
    }

    /// What the machine has, unless a backend is all of it: that is counted as a backend.
    fn of_machine(&self) -> u64 {
        let says = |option: &str, key: &str| {
            self.arguments.iter().any(|argument| argument.option == option && argument.get(key).is_some())
        };
        if says("-machine", "memory-backend") || says("-numa", "memdev") {
            return 0;
        }
        let memory = self.arguments.iter().find(|argument| argument.option == "-m");
        memory.and_then(|memory| size(memory.get("size"), MIB)).unwrap_or(DEFAULT)
    }
}

fn of_argument(argument: &Argument) -> u64 {
    if let Body::Open(open) = &argument.body {
        // Its keys are not known: whatever is called a size may be one.
        let sizes = open.pairs().filter(|(key, _)| *key == "size" || key.ends_with("-size"));
        return sizes.filter_map(|(_, text)| bytes(text, 1)).fold(0, u64::saturating_add);
    }
    let said = |key: &str, unit: u64| size(argument.get(key), unit);
    let driver = argument.get("driver").map(Value::to_string).unwrap_or_default();
    match argument.option() {
        "-object" | "-chardev" => said("size", 1).unwrap_or(0),
        "-accel" => said("tb-size", MIB).unwrap_or(0),
        "-vga" => {
            let name = argument.get("").map(Value::to_string).unwrap_or_default();
            OLD_SCREENS.iter().find(|(known, _)| *known == name).map_or(0, |(_, bytes)| *bytes)
        }
        "-device" => {
            let sizes = OF_DEVICES.iter().filter_map(|(key, unit)| said(key, *unit));
            let sizes = sizes.fold(0, u64::saturating_add);
            let of_screen = SCREENS.iter().find(|(known, _)| *known == driver).map_or(0, |(_, bytes)| *bytes);
            sizes.saturating_add(of_screen)
        }
        _ => 0,
    }
}

fn size(value: Option<&Value>, unit: u64) -> Option<u64> {
    bytes(&value?.to_string(), unit)
}

/// A size as QEMU reads it; `unit`: of a number without one.
fn bytes(text: &str, unit: u64) -> Option<u64> {
    let digits = text.trim_end_matches(|sign: char| sign.is_ascii_alphabetic());
    let shift = match text.get(digits.len()..)?.to_ascii_lowercase().as_str() {
        "" => return number(digits, unit),
        "b" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        "p" => 50,
        "e" => 60,
        _ => return None,
    };
    number(digits, 1 << shift)
}

/// A number with or without a part behind a dot, of a unit; what is too large for any host is that.
fn number(digits: &str, unit: u64) -> Option<u64> {
    if let Some(digits) = digits.strip_prefix("0x") {
        return Some(u64::from_str_radix(digits, 16).ok()?.saturating_mul(unit));
    }
    let (whole, part) = digits.split_once('.').unwrap_or((digits, ""));
    let whole = whole.parse::<u64>().ok()?.saturating_mul(unit);
    // Rounded up to the unit: nobody asks for parts of a byte.
    let part = if part.bytes().all(|digit| digit == b'0') { 0 } else { unit };
    Some(whole.saturating_add(part))
}

#[cfg(test)]
mod tests {
    use super::super::Allowed;
    use super::*;

    #[test]
    fn sizes_are_read_as_qemu_reads_them() {
        for (text, unit, expected) in [
            ("64", MIB, Some(64 * MIB)),
            ("64k", MIB, Some(64 << 10)),
            ("64", 1, Some(64)),
            ("1.5G", MIB, Some(2 << 30)),
            ("1.0G", MIB, Some(1 << 30)),
            ("0x10", 1, Some(16)),
            ("99999999999999E", 1, Some(u64::MAX)),
            ("", 1, None),
            ("5x", 1, None),
        ] {
            assert_eq!(bytes(text, unit), expected, "{text}");
        }
    }

    #[test]
    fn all_memory_of_a_command_is_counted() {
        let options = ["-object memory-backend-file".to_owned()];
        let allowed = Allowed { options: &options, folders: &["/dev/shm".into()] };
        for (words, expected) in [
            ("", 128),
            ("-m 64", 64),
            ("-m size=64,slots=2,maxmem=2G", 64),
            ("-m 1G", 1024),
            ("-m 64 -object memory-backend-ram,id=m,size=700M", 764),
            ("-m 64 -object memory-backend-memfd,id=m,size=64M -machine memory-backend=m", 64),
            ("-m 64 -object memory-backend-ram,id=m,size=64M -numa node,memdev=m", 64),
            (
                "-m 64,slots=1,maxmem=1G -object memory-backend-ram,id=m,size=500M -device pc-dimm,memdev=m",
                564,
            ),
            (
                "-m 64 -object memory-backend-file,id=m,size=300M,mem-path=/dev/shm/x,share=on -device pc-dimm,memdev=m",
                364,
            ),
            ("-m 64 -vga qxl -device VGA,vgamem_mb=256", 64 + 144 + 16 + 256),
            ("-m 64 -device qxl,ram_size_mb=900,vram_size=1073741824", 64 + 144 + 900 + 1024),
            ("-m 64 -device virtio-gpu-pci,max_hostmem=2G", 64 + 256 + 2048),
            ("-m 64 -chardev ringbuf,id=r,size=512M", 576),
            ("-m 64 -accel tcg,tb-size=300", 364),
            ("-m 64 -device e1000,romsize=1073741824", 64 + 1024),
        ] {
            let command =
                format!("qemu-system-x86_64 -nodefaults -qmp unix:{{qmp}},server=on,wait=off {words}");
            let command: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
            let understood =
                Understood::read(&command, allowed).unwrap_or_else(|error| panic!("{words}: {error}"));
            assert_eq!(understood.memory_bytes(), expected * MIB, "{words}");
        }
    }
}
