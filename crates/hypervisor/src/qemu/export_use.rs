//! The users of an export in a QEMU: the disks over it, and every node that is a connection to it, or above one.
//!
//! ```text
//!   device            device              device
//!     │                 │                   │
//!   raw, plain        qcow2 overlay       a filter
//!     │                 │ backing           │
//!   nbd ─► export     nbd ─► export       raw, nbd ─► export
//! ```
//! Only the first one counts as a disk over the export. The others were made by another program, for an unknown purpose.

use std::path::Path;

use serde_json::Value;

use super::process::{Qemu, unexpected};
use crate::HypervisorError;

/// Drivers of a top node that pass each request on unchanged.
const PLAIN: [&str; 2] = ["raw", "nbd"];
/// Filters that libvirt puts over a disk by itself, and moves with the disk.
const FILTERS_OF_LIBVIRT: [&str; 2] = ["copy-on-read", "throttle"];
const NODE_OF_LIBVIRT: &str = "libvirt-";

/// The users of an export.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExportUse {
    /// The devices whose disks reach it.
    pub disks: Vec<UsingDisk>,
    /// The nodes that are a connection to it, or above one.
    pub nodes: Vec<String>,
}

/// A disk that reaches an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsingDisk {
    /// The device: its identity or its path among QEMU's objects; else its name.
    pub device: String,
    /// The top node of the disk.
    pub node: String,
    /// The driver of that node.
    pub driver: String,
    /// Whether the disk is exactly that export.
    pub is_plain: bool,
}

impl ExportUse {
    /// Finds the users in QEMU's devices and nodes; the socket identifies the export.
    pub(crate) fn of(devices: &[Value], nodes: &[Value], socket: &Path) -> Self {
        let socket = socket.to_string_lossy();
        // QEMU writes an address as a URI, or as JSON within JSON.
        let reaches = |value: &Value| strings_of(value).any(|text| text.contains(&*socket));
        let using = devices.iter().filter(|device| reaches(&device["inserted"]));
        let using_nodes = nodes.iter().filter(|node| reaches(node));
        Self {
            disks: using.map(using_disk).collect(),
            nodes: using_nodes.map(|node| text(&node["node-name"])).collect(),
        }
    }

    /// Returns the only disk, if it is exactly the export.
    ///
    /// # Errors
    /// The actual users, for the administrator.
    pub fn only_disk(&self) -> Result<&UsingDisk, String> {
        match self.disks.as_slice() {
            [disk] if disk.is_plain => Ok(disk),
            [disk] => Err(format!(
                "its uppermost node {} is driven by {}, which stands on the volume",
                disk.node, disk.driver
            )),
            [] => Err("no disk of its QEMU is over the volume".to_owned()),
            several => Err(format!("{} disks of its QEMU are over the volume", several.len())),
        }
    }
}

impl Qemu {
    /// Returns the users of the export at a socket.
    pub async fn export_use(&self, socket: &Path) -> Result<ExportUse, HypervisorError> {
        const COMMANDS: [&str; 2] = ["query-block", "query-named-block-nodes"];
        let [devices, nodes] = [self.ask(COMMANDS[0]).await?, self.ask(COMMANDS[1]).await?];
        let list =
            |value: &Value, command| value.as_array().cloned().ok_or_else(|| unexpected(command, "a list"));
        Ok(ExportUse::of(&list(&devices, COMMANDS[0])?, &list(&nodes, COMMANDS[1])?, socket))
    }
}

fn using_disk(device: &Value) -> UsingDisk {
    let (node, driver) = (text(&device["inserted"]["node-name"]), text(&device["inserted"]["drv"]));
    let names = [text(&device["qdev"]), text(&device["device"]), node.clone()];
    let stands_alone = device["inserted"]["backing_file_depth"].as_u64().unwrap_or(0) == 0;
    let is_libvirts = node.starts_with(NODE_OF_LIBVIRT) && FILTERS_OF_LIBVIRT.contains(&driver.as_str());
    let is_plain = stands_alone && (PLAIN.contains(&driver.as_str()) || is_libvirts);
    let device = names.into_iter().find(|name| !name.is_empty()).unwrap_or_default();
    UsingDisk { device, node, driver, is_plain }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn strings_of(value: &Value) -> Box<dyn Iterator<Item = &str> + '_> {
    match value {
        Value::String(text) => Box::new(std::iter::once(text.as_str())),
        Value::Array(values) => Box::new(values.iter().flat_map(strings_of)),
        Value::Object(fields) => Box::new(fields.values().flat_map(strings_of)),
        _ => Box::new(std::iter::empty()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const ADDRESS: &str = "nbd+unix:///web1?socket=/run/v/web1.sock";

    fn used(inserted: &Value) -> ExportUse {
        let devices = [json!({ "device": "", "qdev": "/machine/d0", "inserted": inserted })];
        let other = json!({ "node-name": "other", "file": "nbd+unix:///web2?socket=/run/v/web2.sock" });
        let nodes = [json!({ "node-name": "nbd0", "file": ADDRESS }), other];
        ExportUse::of(&devices, &nodes, Path::new("/run/v/web1.sock"))
    }

    #[test]
    fn a_disk_is_over_an_export_only_if_nothing_is_in_between() {
        let plain = used(&json!({ "node-name": "disk", "drv": "raw", "file": ADDRESS }));
        assert_eq!(plain.only_disk().unwrap().device, "/machine/d0");
        assert_eq!(plain.nodes, ["nbd0"]);
        let cor = json!({ "node-name": "libvirt-1-CoR", "drv": "copy-on-read", "file": ADDRESS });
        assert!(used(&cor).only_disk().is_ok());
        let written = format!("json:{{\"driver\": \"throttle\", \"file\": \"{ADDRESS}\"}}");
        let others = [
            json!({ "node-name": "ov", "drv": "qcow2", "file": "/ov", "backing_file": ADDRESS, "backing_file_depth": 1 }),
            json!({ "node-name": "ov", "drv": "raw", "file": "/ov", "image": { "backing-image": { "filename": ADDRESS } },
                    "backing_file_depth": 1 }),
            json!({ "node-name": "t", "drv": "throttle", "file": written }),
            json!({ "node-name": "x", "drv": "something-new", "file": ADDRESS }),
        ];
        for other in others {
            let found = used(&other);
            assert!(found.only_disk().unwrap_err().contains("stands on the volume"), "{found:?}");
        }
    }

    #[test]
    fn a_node_that_no_disk_is_over_still_uses_the_export() {
        let found = used(&json!({ "node-name": "disk", "drv": "raw", "file": "/srv/disk.raw" }));
        assert_eq!((found.disks.len(), found.nodes.len()), (0, 1));
        assert!(found.only_disk().is_err());
    }
}
