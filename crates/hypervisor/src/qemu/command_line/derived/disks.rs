//! Disks and drives: adopted ones get their volumes, small images go along as files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::qemu::disk::RECONNECT_SECONDS;

use super::VolumeDisk;
use super::{Argument, Maker, Unmovable, Values, refuse};
use crate::qemu::command_line::movable::{SYSTEM_FOLDER, is_portable};

/// Keys of `-drive` about the device and its use, independent of the image.
const OF_DRIVES: [&str; 18] = [
    "if",
    "bus",
    "unit",
    "index",
    "media",
    "id",
    "node-name",
    "cache",
    "discard",
    "detect-zeroes",
    "werror",
    "rerror",
    "readonly",
    "read-only",
    "copy-on-read",
    "group",
    "snapshot",
    "aio-max-batch",
];
const OF_DRIVES_BELOW: [&str; 4] = ["cache.", "throttling", "bps", "iops"];

#[derive(Default)]
pub(super) struct Nodes {
    nodes: BTreeMap<String, Values>,
    firmware: BTreeSet<String>,
}

impl Nodes {
    pub(super) fn of(arguments: &[Argument]) -> Self {
        let mut found = Self::default();
        let mut firmware = Vec::new();
        for argument in arguments {
            let values = Values::read(argument.value.as_deref().unwrap_or_default());
            match argument.option.as_str() {
                "-blockdev" => {
                    if let Some(name) = values.get("node-name") {
                        found.nodes.insert(name, values);
                    }
                }
                "-machine" | "-M" => {
                    firmware.extend(["pflash0", "pflash1"].iter().filter_map(|key| values.get(key)));
                }
                _ => {}
            }
        }
        found.firmware = firmware.iter().flat_map(|name| found.below(name)).collect();
        found
    }

    fn below(&self, name: &str) -> BTreeSet<String> {
        let mut below = BTreeSet::from([name.to_owned()]);
        let mut next = vec![name.to_owned()];
        while let Some(values) = next.pop().and_then(|name| self.nodes.get(&name)) {
            for (_, value) in values.pairs().into_iter().filter(|(key, _)| is_child(key)) {
                // A node made with its parent is not referred to by name; and a graph has no cycles.
                if self.nodes.contains_key(&value) && below.insert(value.clone()) {
                    next.push(value);
                }
            }
        }
        below
    }
}

/// Returns the drives or nodes that devices use, by the devices' names.
pub(super) fn uses(arguments: &[Argument]) -> BTreeMap<String, String> {
    let devices = arguments.iter().filter(|argument| argument.option == "-device");
    let values = devices.map(|device| Values::read(device.value.as_deref().unwrap_or_default()));
    values.filter_map(|values| Some((values.get("id")?, values.get("drive")?))).collect()
}

impl Maker<'_> {
    /// Returns the drive or node that the device of a disk uses by the command; `None`: the command does not name the device.
    /// A VM that was adopted and released before has other nodes and files since, and the same devices.
    fn used_by(&self, disk: &VolumeDisk) -> Option<&String> {
        let device = disk.device.strip_prefix("/machine/peripheral/").unwrap_or(&disk.device);
        self.uses.get(device.split('/').next()?)
    }

    pub(super) fn drive(&mut self, option: &str, value: &str) -> Result<(), Unmovable> {
        let mut values = match option {
            "-drive" => Values::read(value),
            "-pflash" => Values::of(&[("if", "pflash"), ("format", "raw"), ("file", value)]),
            "-sd" => Values::of(&[("if", "sd"), ("file", value)]),
            "-mtdblock" => Values::of(&[("if", "mtd"), ("file", value)]),
            "-fda" => Values::of(&[("if", "floppy"), ("index", "0"), ("file", value)]),
            "-fdb" => Values::of(&[("if", "floppy"), ("index", "1"), ("file", value)]),
            "-cdrom" => Values::of(&[("index", "2"), ("media", "cdrom"), ("file", value)]),
            "-hdb" => Values::of(&[("index", "1"), ("media", "disk"), ("file", value)]),
            "-hdc" => Values::of(&[("index", "2"), ("media", "disk"), ("file", value)]),
            "-hdd" => Values::of(&[("index", "3"), ("media", "disk"), ("file", value)]),
            _ => Values::of(&[("index", "0"), ("media", "disk"), ("file", value)]),
        };
        let (key, path) = match path_of(&values) {
            Some(said) if !is_elsewhere(&said.1) => said,
            // A drive without a medium, or over the network.
            _ => {
                self.say("-drive", &values.write());
                return Ok(());
            }
        };
        let id = values.get("id");
        let disks = self.disks;
        let is_of = |disk: &&VolumeDisk| match &id {
            Some(id) if self.used_by(disk) == Some(id) => true,
            Some(id) if !disk.drive.is_empty() => disk.drive == *id,
            _ => self.is_at(&path, &disk.file),
        };
        if let Some(disk) = disks.iter().find(is_of) {
            self.found.insert(disk.number);
            values.retain(|key, _| {
                OF_DRIVES.contains(&key) || OF_DRIVES_BELOW.iter().any(|begin| key.starts_with(begin))
            });
            if values.get("discard").is_none() {
                values.set("discard", "unmap");
            }
            values.set("format", "raw");
            values.set("file.driver", "nbd");
            for (key, value) in self.export_of(disk) {
                values.set(&format!("file.{key}"), &value);
            }
            self.say("-drive", &values.write());
            return Ok(());
        }
        let is_removable =
            values.get("media").as_deref() == Some("cdrom") || values.get("if").as_deref() == Some("floppy");
        let is_firmware = values.get("if").as_deref() == Some("pflash");
        let is_read_only = is_removable || values.is_on("readonly") || values.is_on("read-only");
        if is_removable && !self.is_in_use(&path) {
            self.leave(format!("the medium {path}, which is ejected"));
            values.retain(|known, _| known != key && known != "format");
        } else if is_read_only && path.starts_with(SYSTEM_FOLDER) {
            // The same packages have it on the other host, which checks that.
            values.set("readonly", "on");
        } else if is_read_only || is_firmware {
            let place = self.file("-drive", &path)?;
            values.set(&key, &place);
        } else {
            return Err(not_adopted("-drive", &path));
        }
        self.say("-drive", &values.write());
        Ok(())
    }

    pub(super) fn blockdev(&mut self, value: &str) -> Result<(), Unmovable> {
        let mut values = Values::read(value);
        let name = values.get("node-name").unwrap_or_default();
        let disks = self.disks;
        let node = |disk: &VolumeDisk| self.used_by(disk).unwrap_or(&disk.node).clone();
        if let Some(disk) = disks.iter().find(|disk| node(disk) == name) {
            self.found.insert(disk.number);
            self.nodes_of(disk, &name);
            return Ok(());
        }
        if disks.iter().any(|disk| self.nodes.below(&node(disk)).contains(&name)) {
            return Ok(());
        }
        let (key, path) = match path_of(&values) {
            Some(said) if !is_elsewhere(&said.1) => said,
            _ => {
                self.say("-blockdev", value);
                return Ok(());
            }
        };
        let is_read_only = values.is_on("read-only");
        if is_read_only && path.starts_with(SYSTEM_FOLDER) {
            self.say("-blockdev", value);
            return Ok(());
        }
        if !is_read_only && !self.nodes.firmware.contains(&name) {
            return Err(not_adopted("-blockdev", &path));
        }
        let place = self.file("-blockdev", &path)?;
        values.set(&key, &place);
        self.say("-blockdev", &values.write());
        Ok(())
    }

    /// Adds the nodes of an adopted disk, as QEMU has them while Sterna serves it. The command calls the upper one `node`.
    fn nodes_of(&mut self, disk: &VolumeDisk, node: &str) {
        let export = format!("sterna-nbd-{}", disk.number);
        let mut nodes =
            [Values::of(&[("driver", "nbd"), ("node-name", &export)]), Values::of(&[("driver", "raw")])];
        for (key, value) in self.export_of(disk) {
            nodes[0].set(key, &value);
        }
        nodes[1].set("node-name", node);
        nodes[1].set("file", &export);
        nodes[1].set("detect-zeroes", &disk.options.detect_zeroes);
        for values in &mut nodes {
            let on = |flag| if flag { "on" } else { "off" };
            values.set("read-only", on(disk.options.is_read_only));
            values.set("cache.direct", on(disk.options.cache_direct));
            values.set("cache.no-flush", on(disk.options.cache_no_flush));
            values.set("discard", "unmap");
            self.say("-blockdev", &values.write());
        }
    }

    /// Returns the options that connect a node to the export of an adopted disk's volume; enters the volume's place.
    fn export_of(&mut self, disk: &VolumeDisk) -> [(&'static str, String); 4] {
        let name = format!("disk{}", disk.number);
        let export = [
            ("server.type", "unix".to_owned()),
            ("server.path", format!("{{disk:{name}}}")),
            ("export", format!("{{export:{name}}}")),
            ("reconnect-delay", RECONNECT_SECONDS.to_string()),
        ];
        self.derived.disks.insert(name, disk.volume.clone());
        export
    }

    fn is_at(&self, path: &str, file: &Path) -> bool {
        let path = Path::new(path);
        // QEMU has closed it since, and may have changed its folder.
        path == file
            || path.is_relative() && file.ends_with(path.strip_prefix(".").unwrap_or(path))
            || self
                .process
                .resolve(path)
                .is_some_and(|found| found == file || (self.limits.leads_to)(&found, file))
    }

    fn is_in_use(&self, path: &str) -> bool {
        self.running.images.iter().any(|image| image == path)
    }
}

fn path_of(values: &Values) -> Option<(String, String)> {
    let driver = values.driver();
    let is_path = |key: &str| {
        // In a node, `file` may be the name of another node.
        key == "filename" || key.ends_with(".filename") || (key == "file" && driver.is_empty())
    };
    values.pairs().into_iter().find(|(key, value)| is_path(key) && !value.is_empty())
}

fn is_elsewhere(path: &str) -> bool {
    is_portable(path) || path.contains("://") || path.starts_with("json:")
}

fn is_child(key: &str) -> bool {
    ["file", "backing", "data-file"].iter().any(|child| key == *child || key.ends_with(&format!(".{child}")))
}

fn not_adopted(option: &str, path: &str) -> Unmovable {
    refuse(
        format!("{option} {path}"),
        "is a disk that was not adopted: release the VM, and adopt it with all its disks",
    )
}
