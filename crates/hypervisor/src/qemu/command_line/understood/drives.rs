//! Disks: nodes of the block layer, and drives.
//!
//! ```text
//!   nbd    over the socket of a volume, {disk:NAME}, with the export of the same one only
//!   file   a file of the VM's own, {file:NAME}; below /usr, or in a folder of the configuration
//!   raw    over one of these; throttle, too; null-co has no data
//! ```
//! Formats are explicit, never detected. qcow2 is excluded: its header names other files, which QEMU would open.

use super::lexer::{self, Part};
use super::options::Key;
use super::reading::keyed;
use super::value::Class::{Node, Object};
use super::value::Kind::{Disk, Export, File, Name, New, Number, Of, Size, Switch, Words};
use super::value::{self, Value};
use super::{Allowed, NotAllowed, Said};

/// Seconds that a disk may wait for its server: a year.
const WAIT: value::Kind = Number(31_536_000);
const DISCARD: value::Kind = Words(&["ignore", "off", "unmap", "on"]);
const ZEROES: value::Kind = Words(&["off", "on", "unmap"]);
const ERRORS: value::Kind = Words(&["ignore", "stop", "report", "enospc"]);
const READ_ONLY: &str = "read-only";

const OF_NODES: &[Key] = &[
    ("node-name", New(Node)),
    (READ_ONLY, Switch),
    ("auto-read-only", Switch),
    ("force-share", Switch),
    ("cache.direct", Switch),
    ("cache.no-flush", Switch),
    ("discard", DISCARD),
    ("detect-zeroes", ZEROES),
];
const OF_EXPORTS: &[Key] = &[
    ("server.type", Words(&["unix"])),
    ("server.path", Disk),
    ("export", Export),
    ("reconnect-delay", WAIT),
    ("open-timeout", WAIT),
];
const OF_FILES: &[Key] = &[
    ("filename", File),
    ("aio", Words(&["threads", "native", "io_uring"])),
    ("locking", Words(&["on", "off", "auto"])),
];
const OF_FORMATS: &[Key] = &[("file", Of(Node)), ("offset", Size), ("size", Size)];
const OF_THROTTLES: &[Key] = &[("throttle-group", Of(Object)), ("file", Of(Node))];
const OF_NOTHING: &[Key] = &[("size", Size), ("read-zeroes", Switch)];

const OF_DRIVES: &[Key] = &[
    ("if", Words(&["none", "virtio", "ide", "scsi", "sd", "mtd", "floppy", "pflash"])),
    ("bus", Number(255)),
    ("unit", Number(255)),
    ("index", Number(255)),
    ("media", Words(&["disk", "cdrom"])),
    ("id", New(Node)),
    ("node-name", New(Node)),
    ("cache", Words(&["none", "writeback", "unsafe", "directsync", "writethrough"])),
    ("cache.direct", Switch),
    ("cache.no-flush", Switch),
    ("cache.writeback", Switch),
    ("discard", DISCARD),
    ("detect-zeroes", ZEROES),
    ("werror", ERRORS),
    ("rerror", ERRORS),
    (READ_ONLY, Switch),
    ("copy-on-read", Switch),
    ("snapshot", Words(&["off"])),
    ("aio", Words(&["threads", "native", "io_uring"])),
    ("aio-max-batch", Number(1024)),
    ("group", Name),
    ("format", Words(&["raw"])),
    ("file", File),
];
const LIMITS: &str = "bps bps_rd bps_wr bps_max bps_rd_max bps_wr_max bps_max_length iops iops_rd iops_wr iops_max \
    iops_rd_max iops_wr_max iops_size bps-total bps-read bps-write bps-total-max bps-read-max bps-write-max iops-total iops-read \
    iops-write iops-total-max iops-read-max iops-write-max iops-size";

pub(super) fn node(option: &'static str, text: &str, allowed: Allowed<'_>) -> Result<Said, NotAllowed> {
    let parts = cut(option, text)?;
    let mut pairs = Vec::new();
    for (number, part) in parts.into_iter().enumerate() {
        pairs.push(match part {
            Part::Pair(key, value) => (key, value),
            Part::Bare(word) if number == 0 => ("driver".to_owned(), word),
            Part::Bare(word) => {
                return Err(NotAllowed::malformed(option, &word, "is neither a key nor a value"));
            }
        });
    }
    let said = node_below(option, "", &pairs, allowed)?;
    if said.get("node-name").is_none() {
        return Err(NotAllowed::malformed(option, text, "has no node-name"));
    }
    Ok(said)
}

fn node_below(
    option: &'static str,
    above: &str,
    pairs: &[(String, String)],
    allowed: Allowed<'_>,
) -> Result<Said, NotAllowed> {
    let mut own: Vec<(&str, &str)> = Vec::new();
    for (key, value) in pairs {
        if let Some(key) = key.strip_prefix(above) {
            own.push((key, value));
        }
    }
    let driver = own.iter().find(|(key, _)| *key == "driver").map_or("", |(_, value)| value);
    let keys = match driver {
        "nbd" => OF_EXPORTS,
        "file" => OF_FILES,
        "raw" => OF_FORMATS,
        "throttle" => OF_THROTTLES,
        "null-co" => OF_NOTHING,
        _ => return Err(NotAllowed::option(option, driver, None)),
    };
    let mut said = Said::default();
    said.add(option, &format!("{above}driver"), Value::Word(driver.to_owned()))?;
    let is_child = |key: &str| ["raw", "throttle"].contains(&driver) && key.starts_with("file.");
    for (key, value) in own.iter().filter(|(key, _)| *key != "driver" && !is_child(key)) {
        let known = OF_NODES.iter().chain(keys).find(|(known, _)| known == key);
        let Some((_, kind)) = known else {
            return Err(NotAllowed::option(option, driver, Some((&format!("{above}{key}"), value))));
        };
        said.read(option, &format!("{above}{key}"), *kind, value, allowed)?;
    }
    if own.iter().filter(|(key, _)| *key == "driver").count() > 1 {
        return Err(NotAllowed::malformed(option, "driver", "is said twice"));
    }
    if own.iter().any(|(key, _)| is_child(key)) {
        if said.get(&format!("{above}file")).is_some() {
            return Err(NotAllowed::malformed(option, "file", "is said twice"));
        }
        // N.B. each level is shorter by its prefix, so this ends.
        let child = node_below(option, &format!("{above}file."), pairs, allowed)?;
        said.append(option, child)?;
    }
    check_export(option, above, &said)?;
    check_read_only(option, &format!("{above}filename"), &format!("{above}{READ_ONLY}"), &said)?;
    Ok(said)
}

pub(super) fn drive(option: &'static str, text: &str, allowed: Allowed<'_>) -> Result<Said, NotAllowed> {
    let mut said = Said::default();
    let mut below = Vec::new();
    for part in cut(option, text)? {
        let (key, value) = keyed(option, part, "", |key| drive_key(key).map(|(_, kind)| kind))?;
        let key = if key == "readonly" { READ_ONLY.to_owned() } else { key };
        if key.starts_with("file.") {
            below.push((key, value));
        } else if key == "file" && value.starts_with("nbd+unix:") {
            for (key, place) in
                export_of(&value).ok_or_else(|| NotAllowed::malformed(option, &value, NO_ADDRESS))?
            {
                below.push((format!("file.{key}"), place));
            }
        } else {
            let Some((key, kind)) = drive_key(&key) else {
                return Err(NotAllowed::option(option, "", Some((&key, &value))));
            };
            said.read(option, &key, kind, &value, allowed)?;
        }
    }
    let has_medium = said.get("file").is_some() || below.iter().any(|(key, _)| key == "file.driver");
    if has_medium && said.get("format").is_none() {
        // N.B. QEMU would detect a format in the file, and follow the file's header.
        said.add(option, "format", Value::Word("raw".to_owned()))?;
    }
    if !below.is_empty() {
        if said.get("file").is_some() {
            return Err(NotAllowed::malformed(option, "file", "is said twice"));
        }
        said.append(option, node_below(option, "file.", &below, allowed)?)?;
    }
    check_read_only(option, "file", READ_ONLY, &said)?;
    check_read_only(option, "file.filename", READ_ONLY, &said)?;
    Ok(said)
}

const NO_ADDRESS: &str =
    "is no address of a disk: write nbd+unix:///{export:NAME}?socket={disk:NAME}, with one name";

fn drive_key(key: &str) -> Option<(String, value::Kind)> {
    let key = if key == "readonly" { READ_ONLY } else { key };
    if let Some((key, kind)) = OF_DRIVES.iter().find(|(known, _)| *known == key) {
        return Some(((*key).to_owned(), *kind));
    }
    let limit = key.strip_prefix("throttling.").unwrap_or(key);
    LIMITS.split(' ').any(|known| known == limit).then(|| (key.to_owned(), Number(u64::MAX)))
}

/// Returns the options of a disk for the one allowed form of an address.
fn export_of(address: &str) -> Option<[(&'static str, String); 4]> {
    let (export, disk) = address.strip_prefix("nbd+unix:///")?.split_once("?socket=")?;
    value::place(export).filter(|place| place.kind == "export")?;
    value::place(disk).filter(|place| place.kind == "disk")?;
    let words = [("driver", "nbd"), ("server.type", "unix"), ("server.path", disk), ("export", export)];
    Some(words.map(|(key, value)| (key, value.to_owned())))
}

/// Checks that an export is that of the volume whose socket is used.
fn check_export(option: &str, above: &str, said: &Said) -> Result<(), NotAllowed> {
    let is_export =
        matches!(said.get(&format!("{above}driver")), Some(Value::Word(driver)) if driver == "nbd");
    if !is_export {
        return Ok(());
    }
    let name = |key: &str| match said.get(&format!("{above}{key}")) {
        Some(Value::Place(place)) => Some(&place.name),
        _ => None,
    };
    let is_unix = said.get(&format!("{above}server.type")).is_some();
    if is_unix && name("server.path").is_some() && name("server.path") == name("export") {
        return Ok(());
    }
    Err(NotAllowed::malformed(
        option,
        "nbd",
        "must have server.type=unix, server.path={disk:NAME} and export={export:NAME}, with one name",
    ))
}

fn check_read_only(option: &str, file: &str, read_only: &str, said: &Said) -> Result<(), NotAllowed> {
    let Some(Value::Path(path)) = said.get(file) else { return Ok(()) };
    let is_cdrom = matches!(said.get("media"), Some(Value::Word(media)) if media == "cdrom");
    if is_cdrom || said.get(read_only) == Some(&Value::Switch(true)) {
        return Ok(());
    }
    Err(NotAllowed::malformed(option, path, "is a file of this host, and must be read-only"))
}

fn cut(option: &str, text: &str) -> Result<Vec<Part>, NotAllowed> {
    lexer::cut(text).map_err(|fault| NotAllowed::malformed(option, text, &fault))
}
