//! The shape of a VM: its devices, its drives' media and the jobs on its disks, compared with its description.
//!
//! ```text
//!   known: what its description makes ─┐
//!                                      ├─► differences, by name; none: another host can create it from its description
//!   seen:  what its hypervisor has  ───┘
//! ```
//! **N.B.** At its target a VM is created from its description. A difference would be lost there, or attach another disk.

use std::collections::{BTreeMap, BTreeSet};

/// The shape of a VM, real or described.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// The devices of the VM.
    pub devices: Vec<Device>,
    /// The disks and drives of the VM.
    pub drives: Vec<Drive>,
    /// The nameless devices that may exist besides, because a drive brings its own.
    pub spare_devices: usize,
    /// The jobs that work on its disks beside the guest, or would be lost with them, for the administrator.
    pub works: BTreeSet<String>,
}

/// A device of the VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Device {
    /// The name of the device; `None` if it has none.
    pub name: Option<String>,
    /// The type of the device.
    pub kind: String,
    /// The settings that matter for the comparison.
    pub settings: BTreeMap<String, String>,
}

/// A disk or a drive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Drive {
    /// The device of the drive; `None` if it has no stable name.
    pub device: Option<String>,
    /// The media that are read and written in the end; empty without a medium.
    pub media: BTreeSet<Medium>,
    /// The kinds of layers in between.
    pub through: BTreeSet<String>,
}

/// The medium of a drive.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Medium {
    /// A volume, by its name.
    Volume(String),
    /// Another medium, by its name.
    Other(String),
}

/// A difference between a VM and its description.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum Difference {
    /// A device exists that is not described.
    #[error("the device {0} was added while the VM ran: remove it (device_del), or restart the VM with it")]
    DeviceAdded(String),
    /// A described device does not exist.
    #[error("the device {0} was removed while the VM ran: add it again, or restart the VM without it")]
    DeviceRemoved(String),
    /// Another device has the name.
    #[error(
        "the device {name} was exchanged while the VM ran: it is {is} now, and was {was}; put the old one back, or restart the VM"
    )]
    DeviceExchanged {
        /// The name of the device.
        name: String,
        /// The device in the description.
        was: String,
        /// The device that exists.
        is: String,
    },
    /// A drive has another medium.
    #[error(
        "the disk {device} was exchanged while the VM ran: it is over {is} now, and was over {was}; put the old one back, or \
         restart the VM"
    )]
    DiskExchanged {
        /// The name of the drive's device.
        device: String,
        /// The medium in the description.
        was: String,
        /// The medium that is attached.
        is: String,
    },
    /// A drive exists that is not described, or has a medium that is not.
    #[error(
        "the disk {device} over {is} was added while the VM ran: remove it (device_del), eject it if it is a CD-ROM, or restart the VM with it"
    )]
    DiskAdded {
        /// The name of the drive's device.
        device: String,
        /// The medium that is attached.
        is: String,
    },
    /// A described drive does not exist, or has no medium.
    #[error(
        "the disk {device} over {was} was removed while the VM ran: add it again, or restart the VM without it"
    )]
    DiskRemoved {
        /// The name of the drive's device.
        device: String,
        /// The medium in the description.
        was: String,
    },
    /// A layer was inserted between a drive and its medium.
    #[error(
        "something was put between the disk {device} and {over} while the VM ran ({through}): remove it, or restart the VM"
    )]
    DiskLedThrough {
        /// The name of the drive's device.
        device: String,
        /// The medium that is attached.
        over: String,
        /// The layers in between.
        through: String,
    },
    /// A job works on the VM's disks.
    #[error("{0}: end it first")]
    Work(String),
}

/// Returns the differences, each once; empty if the VM is as described. `is_kind` and `is_setting` decide whether a described
/// value and a real one, under another name, are the same.
pub fn differences(
    known: &Shape,
    seen: &Shape,
    is_kind: impl Fn(&str, &str) -> bool,
    is_setting: impl Fn(&str, &str, &str) -> bool,
) -> BTreeSet<Difference> {
    let mut found = BTreeSet::new();
    named_devices(known, seen, (&is_kind, &is_setting), &mut found);
    unnamed_devices(known, seen, &is_kind, &mut found);
    drives(known, seen, &mut found);
    found.extend(seen.works.difference(&known.works).cloned().map(Difference::Work));
    found
}

/// Returns the differences as a sentence.
pub fn sentence(found: &BTreeSet<Difference>) -> String {
    found.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

fn by_name(shape: &Shape) -> BTreeMap<&str, &Device> {
    shape.devices.iter().filter_map(|device| Some((device.name.as_deref()?, device))).collect()
}

fn named_devices(
    known: &Shape,
    seen: &Shape,
    (is_kind, is_setting): (impl Fn(&str, &str) -> bool, impl Fn(&str, &str, &str) -> bool),
    found: &mut BTreeSet<Difference>,
) {
    let (was, is) = (by_name(known), by_name(seen));
    for name in is.keys().filter(|name| !was.contains_key(*name)) {
        found.insert(Difference::DeviceAdded((*name).to_owned()));
    }
    for (name, device) in was {
        let Some(there) = is.get(name) else {
            found.insert(Difference::DeviceRemoved(name.to_owned()));
            continue;
        };
        let exchanged = |was: &str, is: &str| Difference::DeviceExchanged {
            name: name.to_owned(),
            was: was.to_owned(),
            is: is.to_owned(),
        };
        if !is_kind(&device.kind, &there.kind) {
            found.insert(exchanged(&device.kind, &there.kind));
        }
        for (key, asked) in &device.settings {
            // A setting that is not reported cannot have been changed.
            if let Some(told) = there.settings.get(key).filter(|told| !is_setting(key, asked, told)) {
                found.insert(exchanged(&format!("{key}={asked}"), &format!("{key}={told}")));
            }
        }
    }
}

fn unnamed_devices(
    known: &Shape,
    seen: &Shape,
    is_kind: impl Fn(&str, &str) -> bool,
    found: &mut BTreeSet<Difference>,
) {
    let unnamed = |shape: &Shape| {
        let kinds = shape.devices.iter().filter(|device| device.name.is_none());
        kinds.map(|device| device.kind.clone()).collect::<Vec<_>>()
    };
    let mut there = unnamed(seen);
    for asked in unnamed(known) {
        match there.iter().position(|kind| is_kind(&asked, kind)) {
            Some(position) => drop(there.swap_remove(position)),
            None => drop(found.insert(Difference::DeviceRemoved(format!("{asked} without a name")))),
        }
    }
    for kind in there.iter().skip(known.spare_devices) {
        found.insert(Difference::DeviceAdded(format!("{kind} without a name")));
    }
}

fn drives(known: &Shape, seen: &Shape, found: &mut BTreeSet<Difference>) {
    let mut was: Vec<&Drive> = known.drives.iter().collect();
    let mut left = Vec::new();
    for drive in &seen.drives {
        let same = was.iter().position(|known| known.device.is_some() && known.device == drive.device);
        match same {
            Some(position) => judge(was.swap_remove(position), drive, found),
            None => left.push(drive),
        }
    }
    // Nameless drives are identified by their media.
    was.retain(|drive| !drive.media.is_empty());
    left.retain(|drive| !drive.media.is_empty());
    left.retain(|drive| {
        let same = |known: &&Drive| known.device.is_none() && known.media == drive.media;
        match was.iter().position(same) {
            Some(position) => judge(was.swap_remove(position), drive, found),
            None => return true,
        }
        false
    });
    // An overlay keeps the described medium below it. This is reported as one difference, not as a removed and an added drive.
    for drive in left {
        let device = shown(drive);
        let below = was.iter().position(|known| {
            known.device.is_none() && drive.device.is_none() && drive.media.is_superset(&known.media)
        });
        let is = names(&drive.media);
        found.insert(match below {
            Some(position) => {
                Difference::DiskExchanged { device, was: names(&was.swap_remove(position).media), is }
            }
            None => Difference::DiskAdded { device, is },
        });
    }
    for drive in was {
        found.insert(Difference::DiskRemoved { device: shown(drive), was: names(&drive.media) });
    }
}

/// Compares a drive with the described drive of the same name.
fn judge(known: &Drive, seen: &Drive, found: &mut BTreeSet<Difference>) {
    let device = shown(seen);
    let (was, is) = (names(&known.media), names(&seen.media));
    let between: BTreeSet<_> = seen.through.difference(&known.through).cloned().collect();
    if known.media != seen.media {
        found.insert(match (known.media.is_empty(), seen.media.is_empty()) {
            (true, _) => Difference::DiskAdded { device, is },
            (_, true) => Difference::DiskRemoved { device, was },
            _ => Difference::DiskExchanged { device, was, is },
        });
    } else if !between.is_empty() {
        let through = between.into_iter().collect::<Vec<_>>().join(", ");
        found.insert(Difference::DiskLedThrough { device, over: is, through });
    }
}

fn shown(drive: &Drive) -> String {
    drive.device.clone().unwrap_or_else(|| "without a name".to_owned())
}

fn names(media: &BTreeSet<Medium>) -> String {
    let name = |medium: &Medium| match medium {
        Medium::Volume(name) => format!("the volume {name}"),
        Medium::Other(name) => name.clone(),
    };
    match media.is_empty() {
        true => "nothing".to_owned(),
        false => media.iter().map(name).collect::<Vec<_>>().join(" and "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(name: &str) -> BTreeSet<Medium> {
        BTreeSet::from([Medium::Volume(name.to_owned())])
    }

    fn drive(device: Option<&str>, media: BTreeSet<Medium>) -> Drive {
        let through = BTreeSet::from(["nbd".to_owned()]);
        Drive { device: device.map(str::to_owned), media, through }
    }

    fn device(name: Option<&str>, kind: &str) -> Device {
        Device { name: name.map(str::to_owned), kind: kind.to_owned(), ..Device::default() }
    }

    fn known() -> Shape {
        Shape {
            devices: vec![device(Some("vdb"), "blk"), device(None, "blk"), device(Some("nic"), "net")],
            drives: vec![drive(Some("vdb"), volume("x")), drive(None, volume("root"))],
            ..Shape::default()
        }
    }

    fn found(change: impl FnOnce(&mut Shape)) -> Vec<Difference> {
        let mut seen = known();
        change(&mut seen);
        let is_same = |one: &str, other: &str| one == other;
        differences(&known(), &seen, is_same, |_, one, other| one == other).into_iter().collect()
    }

    #[test]
    fn what_is_as_it_was_has_no_differences() {
        assert_eq!(found(|_| {}), []);
        assert_eq!(found(|seen| seen.drives.push(drive(Some("cd0"), BTreeSet::new()))), []);
        assert_eq!(found(|seen| seen.drives.reverse()), []);
    }

    #[test]
    fn each_thing_that_may_be_done_to_a_vm_is_named() {
        let exchanged = found(|seen| seen.drives[0].media = volume("y"));
        assert!(
            matches!(&exchanged[..], [Difference::DiskExchanged { device, .. }] if device == "vdb"),
            "{exchanged:?}"
        );
        let removed = found(|seen| {
            seen.drives.remove(0);
            seen.devices.remove(0);
        });
        assert!(removed.contains(&Difference::DeviceRemoved("vdb".to_owned())), "{removed:?}");
        let added = found(|seen| {
            seen.devices.push(device(Some("hot"), "blk"));
            seen.drives.push(drive(Some("hot"), volume("y")));
        });
        assert!(added.contains(&Difference::DeviceAdded("hot".to_owned())), "{added:?}");
        let overlay = found(|seen| {
            seen.drives[1].media.insert(Medium::Other("/ov".to_owned()));
        });
        assert!(matches!(&overlay[..], [Difference::DiskExchanged { .. }]), "{overlay:?}");
        let filter = found(|seen| {
            seen.drives[0].through.insert("throttle".to_owned());
        });
        assert!(matches!(&filter[..], [Difference::DiskLedThrough { .. }]), "{filter:?}");
        let works = found(|seen| {
            seen.works.insert("a job".to_owned());
        });
        assert_eq!(works, [Difference::Work("a job".to_owned())]);
        let kind = found(|seen| seen.devices[2].kind = "other".to_owned());
        assert!(matches!(&kind[..], [Difference::DeviceExchanged { .. }]), "{kind:?}");
        let unnamed = found(|seen| seen.devices.push(device(None, "rng")));
        assert_eq!(unnamed, [Difference::DeviceAdded("rng without a name".to_owned())]);
        let medium = found(|seen| seen.drives.push(drive(Some("cd0"), volume("z"))));
        assert!(matches!(&medium[..], [Difference::DiskAdded { .. }]), "{medium:?}");
    }
}
