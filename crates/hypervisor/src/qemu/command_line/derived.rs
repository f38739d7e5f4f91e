//! A command for another host, derived from that of a running QEMU that another program has started.
//!
//! ```text
//!   its command ──┬─ what the guest sees: as it is, its machine type by its full name
//!                 ├─ adopted disks: over the volumes' exports                            disks
//!                 ├─ small images and firmware's variables: files that go along          disks, files
//!                 ├─ sockets and logs: in the VM's own folder                       backends
//!                 ├─ windows, monitors, logs of QEMU: stay behind, listed by name        backends
//!                 └─ anything that the guest would lose: refused, by name
//! ```
//! Devices attached since the start are not in the command: the running QEMU is asked for them, and they are refused. Options
//! that tie any VM to its host are checked with every command ([`super::movable`]).

mod backends;
mod disks;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::movable::{Obstacles, Unmovable};
use super::parser::{Argument, Values, parse};
use crate::HypervisorError;
use crate::qemu::disk::DiskOptions;
use crate::qemu::launched::Launched;
use crate::qemu::process::Qemu;

/// The prefix of programs that can be found on another host.
const PROGRAM: &str = "qemu-system-";
/// The kernel's suffix for the name of a program that was replaced by another version.
const DELETED: &str = " (deleted)";

/// A running QEMU's report of its VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Running {
    /// The full name of its machine type.
    pub machine_type: String,
    /// The files of its nodes, by QEMU's names.
    pub images: Vec<String>,
    /// Its devices that have names.
    pub named_devices: Vec<String>,
    /// The number of requested devices without names.
    pub unnamed_devices: usize,
}

/// A disk of the VM that a volume replaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeDisk {
    /// The name of the volume.
    pub volume: String,
    /// A number that distinguishes its nodes from those of the VM's other disks.
    pub number: u32,
    /// The guest's device, by QEMU's name.
    pub device: String,
    /// The name from `-drive`; empty with `-blockdev`.
    pub drive: String,
    /// The node that the device reads and writes.
    pub node: String,
    /// The path of its image.
    pub file: PathBuf,
    /// The options of its use.
    pub options: DiskOptions,
}

/// The limits of a derived command.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The limit of bytes in the files that go along.
    pub file_bytes_max: u64,
    /// Returns whether a text may be the name of a path in the VM's own folder.
    pub is_path_name: fn(&str) -> bool,
    /// Returns the size of a file, if the VM's user may read it; otherwise nothing is revealed.
    pub length: fn(&Path, &Launched) -> Option<u64>,
    /// Returns whether the first path leads to the second one, which has no links.
    pub leads_to: fn(&Path, &Path) -> bool,
}

/// The command for another host, with variables for values that differ between hosts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Derived {
    /// The words of the command.
    pub command: Vec<String>,
    /// Volumes by the names of their variables.
    pub disks: BTreeMap<String, String>,
    /// Files that go along, by the names of their variables.
    pub files: BTreeMap<String, PathBuf>,
    /// Parts that do not go along, for the administrator; the guest does not see them.
    pub left_behind: Vec<String>,
}

impl Running {
    /// Asks a running QEMU for the report.
    pub async fn of(qemu: &Qemu) -> Result<Self, HypervisorError> {
        let nodes = qemu.named_nodes().await?;
        Ok(Self {
            machine_type: qemu.machine_type().await?,
            images: nodes.into_iter().map(|node| node.file).collect(),
            named_devices: qemu.named_devices().await?,
            unnamed_devices: qemu.unnamed_devices().await?.len(),
        })
    }
}

/// Derives a command for another host from that of a running QEMU, whose `disks` are volumes.
///
/// # Errors
/// [`Obstacles`]: everything that keeps the whole VM from moving.
pub fn derive(
    disks: &[VolumeDisk],
    process: &Launched,
    running: &Running,
    limits: Limits,
) -> Result<Derived, Obstacles> {
    let arguments = parse(process.command.get(1..).unwrap_or_default());
    let maker = Maker::new((disks, process, running, limits), &arguments);
    let mut maker = maker.map_err(|unmovable| Obstacles(vec![unmovable]))?;
    let mut found = Vec::new();
    for argument in &arguments {
        found.extend(maker.take(argument).err());
    }
    // Disks of options that are refused are not found either.
    let is_complete = found.is_empty();
    found.extend(maker.check_devices());
    if is_complete {
        found.extend(maker.check_disks());
    }
    Obstacles::check(found)?;
    Ok(maker.finish())
}

struct Maker<'a> {
    disks: &'a [VolumeDisk],
    process: &'a Launched,
    running: &'a Running,
    limits: Limits,
    derived: Derived,
    found: BTreeSet<u32>,
    nodes: disks::Nodes,
    /// The drives or nodes that devices use by the command, by the devices' names.
    uses: BTreeMap<String, String>,
    of_monitors: BTreeSet<String>,
    /// How many places in the VM's own folder are used.
    own_places: usize,
    has_display: bool,
    has_accelerator: bool,
    had_monitor: bool,
    device_names: BTreeSet<String>,
    devices_without_name: usize,
}

impl<'a> Maker<'a> {
    fn new(
        (disks, process, running, limits): (&'a [VolumeDisk], &'a Launched, &'a Running, Limits),
        arguments: &[Argument],
    ) -> Result<Self, Unmovable> {
        let program = program(&process.program)?;
        // The type is given once, by the name that means the same everywhere.
        let command = vec![program, "-machine".to_owned(), running.machine_type.clone()];
        Ok(Self {
            disks,
            process,
            running,
            limits,
            derived: Derived { command, ..Derived::default() },
            found: BTreeSet::new(),
            nodes: disks::Nodes::of(arguments),
            uses: disks::uses(arguments),
            of_monitors: backends::of_monitors(arguments),
            own_places: 0,
            has_display: false,
            has_accelerator: false,
            had_monitor: false,
            device_names: BTreeSet::new(),
            devices_without_name: 0,
        })
    }

    fn take(&mut self, argument: &Argument) -> Result<(), Unmovable> {
        let option = argument.option.as_str();
        let value = argument.value.as_deref().unwrap_or_default();
        match option {
            // Sterna gives these options itself, or they were for the start only.
            "-S" | "-daemonize" | "-incoming" | "-loadvm" | "-pidfile" | "-preconfig" | "-qtest" | "-id" => {}
            "-qmp" | "-qmp-pretty" | "-mon" => {}
            "-monitor" => self.had_monitor = true,
            "-machine" | "-M" => self.machine_options(value),
            "-accel" | "-enable-kvm" => {
                self.has_accelerator = true;
                self.keep(argument);
            }
            "-device" => {
                match Values::read(value).get("id") {
                    Some(id) => drop(self.device_names.insert(id)),
                    None => self.devices_without_name += 1,
                }
                self.keep(argument);
            }
            "" | "-hda" | "-hdb" | "-hdc" | "-hdd" | "-cdrom" | "-fda" | "-fdb" | "-pflash" | "-sd"
            | "-mtdblock" | "-drive" => {
                // Some of them make a device.
                self.devices_without_name += 1;
                self.drive(option, value)?;
            }
            "-blockdev" => self.blockdev(value)?,
            _ => self.backend(argument)?,
        }
        Ok(())
    }

    fn finish(mut self) -> Derived {
        if !self.has_accelerator && self.process.command.first().is_some_and(|name| name.ends_with("kvm")) {
            // QEMU does the same for this name.
            self.say("-accel", "kvm");
            self.say("-accel", "tcg");
        }
        if !self.has_display {
            self.say("-display", "none");
        }
        if self.had_monitor {
            self.say("-monitor", "none");
        }
        self.say("-qmp", "unix:{qmp},server=on,wait=off");
        self.derived
    }

    /// Takes the options of a machine without its type, which may be an alias with another meaning in another QEMU.
    fn machine_options(&mut self, value: &str) {
        let mut values = Values::read(value);
        // A word without a key is the type; only the first may be one.
        values.retain(|key, _| !key.is_empty() && key != "type");
        self.has_accelerator |= values.get("accel").is_some();
        if values != Values::of(&[]) {
            self.say("-machine", &values.write());
        }
    }

    /// Returns the disks that no option of the command makes.
    fn check_disks(&self) -> impl Iterator<Item = Unmovable> {
        let missing = self.disks.iter().filter(|disk| !self.found.contains(&disk.number));
        missing.map(|disk| {
            refuse(
                format!("the disk {}", disk.device),
                "is not found in the command that the VM was started with: it was attached later, or its image has had another name \
                 since; restart the VM with its present disks",
            )
        })
    }

    /// Returns the devices that were added and removed since the start.
    fn check_devices(&self) -> Vec<Unmovable> {
        let has: BTreeSet<&String> = self.running.named_devices.iter().collect();
        let asked: BTreeSet<&String> = self.device_names.iter().collect();
        let added = has.difference(&asked).map(|added| {
            refuse(
                format!("the device {added}"),
                "was added while the VM ran: remove it (device_del), or restart the VM with it",
            )
        });
        let removed = asked.difference(&has).map(|removed| {
            refuse(
                format!("the device {removed}"),
                "was removed while the VM ran: add it again, or restart the VM without it",
            )
        });
        let mut found: Vec<Unmovable> = added.chain(removed).collect();
        if self.running.unnamed_devices > self.devices_without_name {
            found.push(refuse(
                "a device without a name".to_owned(),
                "was added while the VM ran: restart the VM with it",
            ));
        }
        found
    }

    fn keep(&mut self, argument: &Argument) {
        self.derived.command.push(argument.option.clone());
        self.derived.command.extend(argument.value.clone());
    }

    fn say(&mut self, option: &str, value: &str) {
        self.derived.command.extend([option.to_owned(), value.to_owned()]);
    }

    fn leave(&mut self, what: impl Into<String>) {
        self.derived.left_behind.push(what.into());
    }

    fn own_place(&mut self, wanted: &str) -> String {
        let number = self.own_places;
        self.own_places += 1;
        let is_name = (self.limits.is_path_name)(wanted);
        if is_name { format!("{{path:{wanted}}}") } else { format!("{{path:own{number}}}") }
    }

    fn file(&mut self, what: &str, path: &str) -> Result<String, Unmovable> {
        let found = self.process.resolve(Path::new(path));
        let found = found.ok_or_else(|| {
            refuse(format!("{what} {path}"), "is a relative path, and its base folder is unknown")
        })?;
        let length = (self.limits.length)(&found, self.process).unwrap_or(0);
        if length > self.limits.file_bytes_max {
            return Err(refuse(
                format!("{what} {path}"),
                "is too large a file to move along: eject it if it is a CD-ROM (QMP: eject), or make a volume of it with sterna \
                 vm adopt --disk",
            ));
        }
        let known =
            self.derived.files.iter().find(|(_, known)| **known == found).map(|(name, _)| name.clone());
        let name = known.unwrap_or_else(|| format!("file{}", self.derived.files.len()));
        let place = format!("{{file:{name}}}");
        self.derived.files.insert(name, found);
        Ok(place)
    }
}

fn refuse(what: String, reason: &'static str) -> Unmovable {
    Unmovable { what, reason }
}

fn program(file: &Path) -> Result<String, Unmovable> {
    let name = file.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let name = name.strip_suffix(DELETED).unwrap_or(name);
    if name.starts_with(PROGRAM) {
        return Ok(name.to_owned());
    }
    Err(refuse(
        format!("the program {}", file.display()),
        "is not named qemu-system-…, and other hosts run no other program: start the VM by that name",
    ))
}
