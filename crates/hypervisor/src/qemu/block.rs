//! QEMU's report of a VM's disks: the devices that the guest sees, and the nodes below.

use serde_json::Value;

use super::process::{Qemu, unexpected};
use crate::HypervisorError;

/// A disk or drive that the guest sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockDevice {
    /// The name from `-drive`; empty with `-blockdev`.
    pub name: String,
    /// The device's identity or its path among QEMU's objects; `None` if QEMU reports none.
    pub device: Option<String>,
    /// The node that it reads and writes; `None` for a drive without a medium.
    pub node: Option<BlockNode>,
    /// The effect of a disk's error on the VM: `ok`, `failed` or `nospace`; `None` if QEMU reports none.
    pub io_status: Option<String>,
}

/// One node of the graph below a device: a format, a filter, a file, a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockNode {
    /// Its name. QEMU generates one, beginning with `#`, where none was given.
    pub name: String,
    /// Its driver: `raw`, `qcow2`, `file`, `nbd`.
    pub driver: String,
    /// The file or address, as QEMU writes it.
    pub file: String,
    /// Whether it cannot be written through.
    pub is_read_only: bool,
    /// Whether it was given to another process, as at the end of a migration.
    pub is_inactive: bool,
    /// Bytes that the guest sees; `None` if QEMU reports none.
    pub size_bytes: Option<u64>,
    /// Names of bitmaps that record writes for backups.
    pub bitmaps: Vec<String>,
}

impl BlockNode {
    /// Returns whether it has no data (`null-co`): writes to it are lost.
    ///
    /// QEMU writes it as an address, or as JSON with the options that an address cannot express.
    pub fn is_over_nothing(&self) -> bool {
        self.file.starts_with("null-co:")
            || self.file.starts_with("json:") && self.file.contains("\"null-co\"")
    }
}

impl Qemu {
    /// Returns the devices, in QEMU's order.
    pub async fn query_block(&self) -> Result<Vec<BlockDevice>, HypervisorError> {
        const COMMAND: &str = "query-block";
        let answer = self.ask(COMMAND).await?;
        let devices = answer.as_array().map(|devices| devices.iter().map(read_device).collect());
        let devices: Option<Option<Vec<_>>> = devices;
        Ok(devices.flatten().ok_or_else(|| unexpected(COMMAND, "a list of devices"))?)
    }

    /// Returns all named nodes, in QEMU's order.
    pub async fn named_nodes(&self) -> Result<Vec<BlockNode>, HypervisorError> {
        const COMMAND: &str = "query-named-block-nodes";
        let answer = self.ask(COMMAND).await?;
        let nodes = answer.as_array().map(|nodes| nodes.iter().map(read_node).collect());
        let nodes: Option<Option<Vec<_>>> = nodes;
        Ok(nodes.flatten().ok_or_else(|| unexpected(COMMAND, "a list of nodes"))?)
    }
}

fn read_device(device: &Value) -> Option<BlockDevice> {
    let node = match device.get("inserted") {
        Some(node) => Some(read_node(node)?),
        None => None,
    };
    let text = |name: &str| device[name].as_str().map(str::to_owned);
    Some(BlockDevice {
        name: text("device")?,
        device: text("qdev").filter(|device| !device.is_empty()),
        node,
        io_status: text("io-status"),
    })
}

fn read_node(node: &Value) -> Option<BlockNode> {
    let text = |name: &str| node[name].as_str().map(str::to_owned);
    let bitmaps = node["dirty-bitmaps"].as_array().map(Vec::as_slice).unwrap_or_default();
    let bitmaps = bitmaps.iter().filter_map(|bitmap| bitmap["name"].as_str().map(str::to_owned));
    Some(BlockNode {
        name: text("node-name").unwrap_or_default(),
        driver: text("drv")?,
        file: text("file").unwrap_or_default(),
        is_read_only: node["ro"].as_bool().unwrap_or(false),
        is_inactive: node["active"].as_bool().is_some_and(|is_active| !is_active),
        size_bytes: node["image"]["virtual-size"].as_u64(),
        bitmaps: bitmaps.collect(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn nothing_is_known_in_either_spelling() {
        let over = |file: &str| {
            let node = json!({ "drv": "raw", "file": file });
            read_node(&node).unwrap().is_over_nothing()
        };
        let options = r#"json:{"driver": "raw", "file": {"read-zeroes": true, "driver": "null-co"}}"#;
        assert!(over("null-co://") && over(options));
        assert!(!over("/srv/null-co:") && !over("/srv/\"null-co\"") && !over("nbd+unix:///m?socket=/run/m"));
    }

    #[test]
    fn drives_with_and_without_a_medium_are_read() {
        let disk = json!({
            "device": "", "qdev": "/machine/peripheral-anon/device[0]/virtio-backend", "io-status": "ok", "type": "unknown",
            "inserted": {
                "node-name": "d0", "drv": "raw", "file": "disk.img", "ro": false, "image": {"virtual-size": 4096},
                "dirty-bitmaps": [{"name": "backup", "granularity": 65536}, {"granularity": 1}],
            },
        });
        let disk = read_device(&disk).unwrap();
        assert_eq!(disk.device.as_deref(), Some("/machine/peripheral-anon/device[0]/virtio-backend"));
        let node = disk.node.unwrap();
        assert_eq!((node.name.as_str(), node.size_bytes), ("d0", Some(4096)));
        assert_eq!(node.bitmaps, ["backup"]);
        let drive = read_device(&json!({"device": "ide1-cd0", "qdev": "", "removable": true})).unwrap();
        assert_eq!((drive.node, drive.device), (None, None));
        assert_eq!(read_device(&json!({"device": "x", "inserted": {}})), None);
    }
}
