//! Lists the disks of a VM, and which of them can be switched.

use std::path::PathBuf;

use serde_json::Value;

use super::{DiskOptions, ExportAddress, LocalDisk, StayReason, StayingDisk};
use crate::HypervisorError;
use crate::qemu::process::{Qemu, unexpected};

/// The prefix of QEMU's own names for nodes.
const MADE_UP: char = '#';
/// Formats whose file can be replaced below them.
const FORMATS: [&str; 2] = ["raw", "qcow2"];
const FILES: [&str; 2] = ["file", "host_device"];

impl Qemu {
    /// Returns the disks of the VM; for those that cannot be switched, the reason. Leaves out drives without a medium.
    pub async fn local_disks(&self) -> Result<Vec<Result<LocalDisk, StayingDisk>>, HypervisorError> {
        let devices = self.ask("query-block").await?;
        let nodes = self.ask("query-named-block-nodes").await?;
        let jobs = self.ask("query-block-jobs").await?;
        let devices = devices.as_array().ok_or_else(|| unexpected("query-block", "a list of devices"))?;
        let nodes = nodes.as_array().map(Vec::as_slice).unwrap_or_default();
        let jobs = jobs.as_array().map(Vec::as_slice).unwrap_or_default();
        let disks = devices.iter().filter(|device| device["inserted"].is_object());
        Ok(disks.map(|device| survey(device, nodes, jobs)).collect())
    }

    /// Returns the disk over an export, without its file; `None` if there is none.
    pub async fn disk_over(&self, export: &ExportAddress) -> Result<Option<LocalDisk>, HypervisorError> {
        let devices = self.ask("query-block").await?;
        let nodes = self.ask("query-named-block-nodes").await?;
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        Ok(find_exported(&list(&devices), &list(&nodes), export))
    }
}

fn find_exported(devices: &[Value], nodes: &[Value], export: &ExportAddress) -> Option<LocalDisk> {
    let address = format!("nbd+unix:///{}?socket={}", export.export, export.socket.display());
    let is_over = |node: &Value| node["file"] == address.as_str();
    let device = devices.iter().find(|device| is_over(&device["inserted"]))?;
    let (inserted, node) = (&device["inserted"], text(&device["inserted"]["node-name"]));
    let below =
        nodes.iter().find(|below| below["drv"] == "nbd" && is_over(below) && below["node-name"] != *node);
    Some(LocalDisk {
        device: text(&device["qdev"]),
        drive: text(&device["device"]),
        is_named: !node.starts_with(MADE_UP),
        node,
        format: text(&inserted["drv"]),
        file_node: below.map(|below| text(&below["node-name"])),
        file: PathBuf::new(),
        backing: Vec::new(),
        size_bytes: inserted["image"]["virtual-size"].as_u64().unwrap_or(0),
        options: options(inserted),
    })
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn options(inserted: &Value) -> DiskOptions {
    let flag = |value: &Value| value.as_bool().unwrap_or(false);
    DiskOptions {
        is_read_only: flag(&inserted["ro"]),
        cache_direct: flag(&inserted["cache"]["direct"]),
        cache_no_flush: flag(&inserted["cache"]["no-flush"]),
        detect_zeroes: inserted["detect_zeroes"].as_str().unwrap_or("off").to_owned(),
    }
}

fn survey(device: &Value, nodes: &[Value], jobs: &[Value]) -> Result<LocalDisk, StayingDisk> {
    let inserted = &device["inserted"];
    let (drive, path, node) = (text(&device["device"]), text(&device["qdev"]), text(&inserted["node-name"]));
    let name = [&path, &drive, &node].into_iter().find(|name| !name.is_empty()).cloned().unwrap_or_default();
    let stay = |reason| Err(StayingDisk { device: name.clone(), file: text(&inserted["file"]), reason });
    if path.is_empty() {
        return stay(StayReason::NoDevice);
    }
    let is_of_this = |job: &&Value| [&drive, &node].contains(&&text(&job["device"]));
    // A job without a device may work on any of them.
    if let Some(job) = jobs.iter().find(|job| is_of_this(job) || text(&job["device"]).starts_with(MADE_UP)) {
        return stay(StayReason::Job(text(&job["device"])));
    }
    let bitmaps = inserted["dirty-bitmaps"].as_array().map(Vec::as_slice).unwrap_or_default();
    let names = bitmaps.iter().map(|bitmap| text(&bitmap["name"]));
    if !bitmaps.is_empty() && names.clone().all(|name| name.is_empty()) {
        // A job that copies the disk has a bitmap without a name.
        let job = jobs.first().map(|job| text(&job["device"]));
        return stay(StayReason::Job(job.unwrap_or_else(|| "without a name".to_owned())));
    }
    if !bitmaps.is_empty() {
        return stay(StayReason::Bitmaps(names.collect()));
    }
    let format = text(&inserted["drv"]);
    if !FORMATS.contains(&format.as_str()) {
        return stay(StayReason::Driver(format));
    }
    if inserted["encrypted"] == true {
        return stay(StayReason::Encrypted);
    }
    if !is_as_headers_say(&inserted["image"], inserted["backing_file_depth"].as_u64().unwrap_or(0)) {
        return stay(StayReason::Backing);
    }
    let file = text(&inserted["file"]);
    // QEMU writes options that a path cannot express as JSON; other addresses are URIs.
    if !file.starts_with('/') && (file.starts_with("json:") || file.contains("://") || file.is_empty()) {
        return stay(StayReason::NotAFile(file));
    }
    let below = nodes
        .iter()
        .find(|below| FILES.contains(&text(&below["drv"]).as_str()) && text(&below["file"]) == file);
    if below.is_none() {
        return stay(StayReason::NotAFile(file));
    }
    Ok(LocalDisk {
        device: path,
        drive,
        is_named: !node.starts_with(MADE_UP),
        node,
        format,
        file_node: below.map(|below| text(&below["node-name"])),
        file: PathBuf::from(file),
        backing: backing_files(&inserted["image"]),
        size_bytes: inserted["image"]["virtual-size"].as_u64().unwrap_or(0),
        options: options(inserted),
    })
}

fn backing_files(top: &Value) -> Vec<PathBuf> {
    let chain = std::iter::successors(Some(&top["backing-image"]), |image| Some(&image["backing-image"]));
    let names = chain.map_while(|image| image["filename"].as_str());
    names.map(PathBuf::from).collect()
}

/// Returns whether an image and its backing files name the next file and its format themselves: another program then finds the
/// same chain. `depth`: the number of backing files.
fn is_as_headers_say(top: &Value, depth: u64) -> bool {
    let (mut image, mut found) = (top, 0);
    while let below @ Value::Object(_) = &image["backing-image"] {
        let is_named = image["full-backing-filename"] == below["filename"];
        let is_typed = image["backing-filename-format"] == below["format"];
        if !is_named || !is_typed || !FORMATS.contains(&text(&below["format"]).as_str()) {
            return false;
        }
        (image, found) = (below, found + 1);
    }
    // QEMU may have opened the last one without the file that its header names.
    found == depth && image["full-backing-filename"].is_null()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn device(change: impl FnOnce(&mut Value)) -> Value {
        let mut device = json!({
            "device": "drive0", "qdev": "/machine/peripheral/d0",
            "inserted": {
                "node-name": "#block123", "drv": "raw", "file": "/srv/disk.raw", "ro": false, "detect_zeroes": "unmap",
                "cache": {"direct": true, "no-flush": false, "writeback": true},
            },
        });
        change(&mut device);
        device
    }

    fn surveyed(device: &Value, jobs: &[Value]) -> Result<LocalDisk, StayReason> {
        let nodes = [json!({"node-name": "#block77", "drv": "file", "file": "/srv/disk.raw"})];
        survey(device, &nodes, jobs).map_err(|staying| staying.reason)
    }

    #[test]
    fn a_plain_disk_is_described_with_its_options() {
        let disk = surveyed(&device(|_| ()), &[]).unwrap();
        assert!(!disk.is_named && disk.options.cache_direct);
        assert_eq!(disk.file_node.as_deref(), Some("#block77"));
        assert_eq!(disk.options.detect_zeroes, "unmap");
    }

    #[test]
    fn what_is_in_the_way_is_named() {
        let job = json!({"device": "drive0", "type": "mirror"});
        assert_eq!(surveyed(&device(|_| ()), &[job]), Err(StayReason::Job("drive0".to_owned())));
        let mirrored = device(|device| device["inserted"]["dirty-bitmaps"] = json!([{"granularity": 65536}]));
        let job = json!({"device": "backup-of-drive0", "type": "mirror"});
        assert_eq!(surveyed(&mirrored, &[job]), Err(StayReason::Job("backup-of-drive0".to_owned())));
        let bitmaps = device(|device| device["inserted"]["dirty-bitmaps"] = json!([{"name": "nightly"}]));
        assert_eq!(surveyed(&bitmaps, &[]), Err(StayReason::Bitmaps(vec!["nightly".to_owned()])));
        let filter = device(|device| device["inserted"]["drv"] = "throttle".into());
        assert_eq!(surveyed(&filter, &[]), Err(StayReason::Driver("throttle".to_owned())));
        for file in ["json:{\"driver\":\"raw\"}", "nbd://host/x", "", "/srv/other.raw"] {
            let elsewhere = device(|device| device["inserted"]["file"] = file.into());
            assert_eq!(surveyed(&elsewhere, &[]), Err(StayReason::NotAFile(file.to_owned())));
        }
        let secret = device(|device| device["inserted"]["encrypted"] = true.into());
        assert_eq!(surveyed(&secret, &[]), Err(StayReason::Encrypted));
        let chain = |change: fn(&mut Value)| {
            device(|device| {
                device["inserted"]["backing_file_depth"] = 2.into();
                device["inserted"]["image"] = json!({
                    "full-backing-filename": "/srv/middle", "backing-filename-format": "qcow2",
                    "backing-image": {
                        "filename": "/srv/middle", "format": "qcow2", "full-backing-filename": "/srv/base",
                        "backing-filename-format": "raw", "backing-image": { "filename": "/srv/base", "format": "raw" },
                    },
                });
                change(&mut device["inserted"]["image"]);
            })
        };
        assert!(surveyed(&chain(|_| {}), &[]).is_ok());
        let others: [fn(&mut Value); 5] = [
            |image| image["full-backing-filename"] = "/srv/other".into(),
            |image| image["backing-filename-format"] = Value::Null,
            |image| image["backing-image"]["backing-image"]["format"] = "vmdk".into(),
            |image| image["backing-image"]["backing-image"] = Value::Null,
            |image| image["backing-image"]["backing-image"]["full-backing-filename"] = "/srv/more".into(),
        ];
        for other in others {
            assert_eq!(surveyed(&chain(other), &[]), Err(StayReason::Backing));
        }
        let nobodys = device(|device| device["qdev"] = Value::Null);
        assert_eq!(surveyed(&nobodys, &[]), Err(StayReason::NoDevice));
    }
}
