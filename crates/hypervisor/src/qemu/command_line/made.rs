//! The devices and drives that a command makes at the VM's start.
//!
//! A comparison with the running QEMU's ([`crate::qemu::Look`]) shows the changes to the VM since.

use std::collections::{BTreeMap, BTreeSet};

use super::parser::{Argument, Values, parse};
use crate::qemu::look::{Leaf, export};

/// Settings of a device that the guest sees, or that name its connections.
const SETTINGS: [&str; 6] = ["serial", "mac", "netdev", "wwn", "chardev", "addr"];
/// Devices that QEMU lists by another name.
const ALIASES: [(&str, &str); 3] = [("ahci", "ich9-ahci"), ("lsi", "lsi53c895a"), ("e1000-82540em", "e1000")];

/// The devices and drives of a command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Made {
    /// The devices that it makes.
    pub devices: Vec<MadeDevice>,
    /// Drives that make a device of their own.
    pub drives: Vec<MadeMedium>,
    /// All its values: a file that is not among them was not named by it.
    pub values: BTreeSet<String>,
    /// Whether it limits the request rate of drives.
    pub limits_drives: bool,
}

/// A device that a command makes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MadeDevice {
    /// Its name, if it has one.
    pub name: Option<String>,
    /// Its kind, by the command's name for it.
    pub kind: String,
    /// Its settings in the command.
    pub settings: BTreeMap<String, String>,
    /// The medium that it uses; `None`: the command does not say.
    pub medium: Option<MadeMedium>,
}

/// The medium of a drive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MadeMedium {
    /// The files or exports at the bottom; empty: there is no medium.
    pub leaves: BTreeSet<Leaf>,
    /// The drivers that the command names on the way.
    pub drivers: BTreeSet<String>,
}

impl Made {
    /// Reads a command with its program.
    pub fn of(command: &[String]) -> Self {
        let arguments = parse(command.get(1..).unwrap_or_default());
        let nodes = nodes(&arguments);
        let mut made = Self::default();
        for argument in &arguments {
            let value = argument.value.as_deref().unwrap_or_default();
            let values = Values::read(value);
            made.values.insert(value.to_owned());
            made.values.extend(values.pairs().into_iter().map(|(_, value)| value));
            match argument.option.as_str() {
                "-device" => made.devices.push(device(&values, &nodes)),
                "-drive" => {
                    let throttles = |key: &str| {
                        key.starts_with("throttling") || key.starts_with("bps") || key.starts_with("iops")
                    };
                    made.limits_drives |= values.pairs().iter().any(|(key, _)| throttles(key));
                    if values.get("if").as_deref() != Some("none") {
                        made.drives.push(medium(&values, &nodes, 0));
                    }
                }
                "-machine" | "-M" => {
                    let firmware =
                        ["pflash0", "pflash1"].iter().filter_map(|key| nodes.get(&values.get(key)?));
                    made.drives.extend(firmware.map(|node| medium(node, &nodes, 0)));
                }
                "" | "-hda" | "-hdb" | "-hdc" | "-hdd" | "-cdrom" | "-fda" | "-fdb" | "-pflash" | "-sd"
                | "-mtdblock" => {
                    made.drives.push(medium(&Values::of(&[("file", value)]), &nodes, 0));
                }
                _ => {}
            }
        }
        made
    }

    /// Returns the settings to query, by the names of the devices.
    pub fn settings(&self) -> Vec<(String, String)> {
        let named = self.devices.iter().filter_map(|device| Some((device.name.clone()?, device)));
        named
            .flat_map(|(name, device)| device.settings.keys().map(move |key| (name.clone(), key.clone())))
            .collect()
    }
}

/// Returns whether QEMU's name of a device matches the command's.
pub fn is_kind(asked: &str, is: &str) -> bool {
    asked.eq_ignore_ascii_case(is)
        || is.strip_prefix(asked).is_some_and(|rest| rest.starts_with('-'))
        || ALIASES.contains(&(asked, is))
}

/// Returns whether QEMU's value of a setting matches the command's: QEMU may write it in another way.
pub fn is_setting(key: &str, asked: &str, is: &str) -> bool {
    if key != "addr" {
        return asked.eq_ignore_ascii_case(is);
    }
    let number = |text: &str, radix| u32::from_str_radix(text.trim_start_matches("0x"), radix).ok();
    let place = |text: &str| {
        let (slot, function) = text.split_once('.').unwrap_or((text, "0"));
        Some((number(slot, 16)?, number(function, 16)?))
    };
    place(asked) == place(is)
}

fn nodes(arguments: &[Argument]) -> BTreeMap<String, Values> {
    let mut nodes = BTreeMap::new();
    for argument in arguments {
        let values = Values::read(argument.value.as_deref().unwrap_or_default());
        let name = match argument.option.as_str() {
            "-blockdev" => values.get("node-name"),
            "-drive" => values.get("id"),
            _ => None,
        };
        if let Some(name) = name {
            nodes.insert(name, values);
        }
    }
    nodes
}

fn device(values: &Values, nodes: &BTreeMap<String, Values>) -> MadeDevice {
    let settings = SETTINGS.iter().filter_map(|key| Some(((*key).to_owned(), values.get(key)?)));
    let below = values.get("drive").and_then(|drive| nodes.get(&drive));
    MadeDevice {
        name: values.get("id"),
        kind: values.driver(),
        settings: settings.collect(),
        medium: below.map(|drive| medium(drive, nodes, 0)),
    }
}

fn medium(values: &Values, nodes: &BTreeMap<String, Values>, depth: usize) -> MadeMedium {
    let mut made = MadeMedium::default();
    let pairs = values.pairs();
    let said = |ends: &str| pairs.iter().find(|(key, _)| key == ends || key.ends_with(&format!(".{ends}")));
    let drivers =
        pairs.iter().filter(|(key, _)| key == "driver" || key == "format" || key.ends_with(".driver"));
    made.drivers.extend(drivers.map(|(_, value)| value.clone()));
    made.drivers.insert(values.driver());
    made.drivers.remove("");
    if let Some((_, socket)) = said("server.path") {
        let name = said("export").map(|(_, name)| name.clone()).unwrap_or_default();
        made.leaves.insert(Leaf::Export { socket: socket.into(), name });
    }
    for (key, value) in &pairs {
        let key = key.rsplit('.').next().unwrap_or(key);
        let is_child = matches!(key, "file" | "backing" | "data-file");
        match nodes.get(value).filter(|_| is_child) {
            // A graph has no cycles.
            Some(below) if depth < nodes.len() => {
                let below = medium(below, nodes, depth + 1);
                made.leaves.extend(below.leaves);
                made.drivers.extend(below.drivers);
            }
            _ if key == "filename" || key == "file" && !value.is_empty() => {
                let of = |(socket, name)| Leaf::Export { socket, name };
                made.leaves.insert(export(value).map_or_else(|| Leaf::File(value.clone()), of));
            }
            _ => {}
        }
    }
    made
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(text: &str) -> Made {
        Made::of(&text.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn what_a_device_reads_is_found_over_its_nodes() {
        let made = made(
            "qemu -blockdev driver=nbd,node-name=low,server.type=unix,server.path=/run/v.sock,export=v -blockdev \
             driver=raw,node-name=top,file=low -device virtio-blk-pci,drive=top,id=vdb,addr=0x8,serial=S1 -device \
             virtio-rng-pci -drive if=none,id=cd,file=/iso,media=cdrom -device ide-cd,drive=cd,id=cd0 -device ide-cd,id=cd1",
        );
        let volume = Leaf::Export { socket: "/run/v.sock".into(), name: "v".to_owned() };
        let [disk, rng, cd0, cd1] = made.devices.as_slice() else { panic!("{made:?}") };
        assert_eq!(disk.medium.as_ref().unwrap().leaves, BTreeSet::from([volume]));
        assert_eq!(
            disk.medium.as_ref().unwrap().drivers,
            BTreeSet::from(["nbd".to_owned(), "raw".to_owned()])
        );
        assert_eq!((disk.settings["addr"].as_str(), disk.settings["serial"].as_str()), ("0x8", "S1"));
        assert_eq!((rng.name.as_ref(), rng.kind.as_str()), (None, "virtio-rng-pci"));
        assert_eq!(cd0.medium.as_ref().unwrap().leaves, BTreeSet::from([Leaf::File("/iso".to_owned())]));
        assert_eq!(cd1.medium, None);
    }

    #[test]
    fn an_export_is_one_in_every_spelling() {
        let volume = Leaf::Export { socket: "/run/v.sock".into(), name: "v".to_owned() };
        for text in [
            "qemu -drive if=virtio,format=raw,file=nbd+unix:///v?socket=/run/v.sock",
            "qemu -drive if=virtio,format=raw,file=nbd:unix:/run/v.sock:exportname=v",
            "qemu -drive if=virtio,format=raw,file.driver=nbd,file.server.type=unix,file.server.path=/run/v.sock,file.export=v",
        ] {
            assert_eq!(made(text).drives[0].leaves, BTreeSet::from([volume.clone()]), "{text}");
        }
    }

    #[test]
    fn kinds_and_settings_are_known_by_other_names() {
        assert!(
            is_kind("virtio-blk", "virtio-blk-pci")
                && is_kind("ahci", "ich9-ahci")
                && is_kind("AC97", "ac97")
        );
        assert!(!is_kind("virtio-blk-pci", "virtio-blk") && !is_kind("e1000", "e1000e"));
        assert!(
            is_setting("addr", "0x8", "08.0")
                && is_setting("addr", "2.1", "02.1")
                && !is_setting("addr", "8", "09.0")
        );
        assert!(
            is_setting("mac", "52:54:00:AA:00:01", "52:54:00:aa:00:01") && !is_setting("serial", "S1", "S2")
        );
    }
}
