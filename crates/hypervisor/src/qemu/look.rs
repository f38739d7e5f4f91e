//! QEMU's present state: the VM's devices, the media of its drives, and other users of these beside the guest.
//!
//! ```text
//!   qom-list, qom-get      devices by name, their kinds and settings ─┐
//!   query-block            which device has which node               ├─► Look ◄─ compared with its command
//!   the graph of nodes     the nodes below that one, to the leaves     │          (command_line::made)
//!   jobs, exports, bitmaps other users ───────────────────────────────┘
//! ```
//! **N.B.** Unreadable state is an error, and never counts as empty.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde_json::{Value, json};

use super::process::{ANSWER_DEADLINE, Qemu, unexpected};
use crate::{HypervisorError, RunState};

/// QEMU's paths of devices with a name, and of those without.
const NAMED: &str = "/machine/peripheral";
const UNNAMED: &str = "/machine/peripheral-anon";
/// The limit of objects of one kind: no real VM has more.
const THINGS_MAX: usize = 4096;
const DEPTH_MAX: usize = 512;

/// The present state of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Look {
    /// What the VM is doing.
    pub state: RunState,
    /// Its devices, present from the start or added later.
    pub devices: Vec<SeenDevice>,
    /// The disks and drives that the guest sees.
    pub drives: Vec<SeenDrive>,
    /// Other users of its disks beside the guest, for the administrator.
    pub works: Vec<String>,
}

/// A device of the VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeenDevice {
    /// Its name; `None`: it was made without one.
    pub name: Option<String>,
    /// Its kind, by QEMU's full name.
    pub kind: String,
    /// The queried settings, as QEMU reports them.
    pub settings: BTreeMap<String, String>,
}

/// A disk or a drive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SeenDrive {
    /// Its device, by QEMU's name or path.
    pub device: String,
    /// The files or exports at the bottom; empty: there is no medium.
    pub leaves: BTreeSet<Leaf>,
    /// The drivers of the nodes between, and of the leaves.
    pub drivers: BTreeSet<String>,
    /// Whether its request rate was limited.
    pub is_limited: bool,
}

/// The bottom of a drive.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Leaf {
    /// An export at a unix socket.
    Export {
        /// The path of the socket.
        socket: PathBuf,
        /// The name of the export.
        name: String,
    },
    /// A file or a device of the host, as given to QEMU.
    File(String),
    /// Another source, as QEMU writes it.
    Other(String),
}

impl SeenDrive {
    /// Returns the name of its device; `None` if that has none.
    pub fn device_name(&self) -> Option<&str> {
        match self.device.strip_prefix(NAMED) {
            Some(rest) => rest.strip_prefix('/')?.split('/').next(),
            None if self.device.starts_with('/') => None,
            None => Some(&self.device).filter(|name| !name.is_empty()).map(String::as_str),
        }
    }
}

impl Qemu {
    /// Reads the state of the VM. `settings`: the queried settings, by the names of devices.
    pub async fn look(&self, settings: &[(String, String)]) -> Result<Look, HypervisorError> {
        let state = self.status().await?;
        let mut devices = self.devices_below(NAMED).await?;
        for device in &mut devices {
            let Some(name) = &device.name else { continue };
            for (_, setting) in settings.iter().filter(|(of, _)| of == name) {
                let arguments = json!({ "path": format!("{NAMED}/{name}"), "property": setting });
                // A setting that the device does not have cannot have changed.
                if let Ok(value) = self.qmp().execute("qom-get", arguments, ANSWER_DEADLINE).await {
                    device.settings.extend(told(setting, &value).map(|value| (setting.clone(), value)));
                }
            }
        }
        devices.extend(
            self.devices_below(UNNAMED).await?.into_iter().map(|device| SeenDevice { name: None, ..device }),
        );
        let blocks = list(self.ask("query-block").await?, "query-block")?;
        let nodes = list(self.ask("query-named-block-nodes").await?, "query-named-block-nodes")?;
        let graph = Graph::read(&self.ask("x-debug-query-block-graph").await?, &nodes)?;
        let mut works = bitmaps(&blocks, &nodes);
        works.extend(self.jobs().await?);
        let exports = list(self.ask("query-block-exports").await?, "query-block-exports")?;
        works.extend(exports.iter().map(|export| {
            format!("QEMU exports its node {} as {}", text(&export["node-name"]), text(&export["id"]))
        }));
        let drives = blocks.iter().map(|block| drive(block, &graph)).collect::<Result<_, _>>()?;
        Ok(Look { state, devices, drives, works })
    }

    async fn jobs(&self) -> Result<Vec<String>, HypervisorError> {
        let block_jobs = list(self.ask("query-block-jobs").await?, "query-block-jobs")?;
        let jobs = list(self.ask("query-jobs").await?, "query-jobs")?;
        let mut found = BTreeMap::new();
        for job in &jobs {
            found.insert(text(&job["id"]), (text(&job["type"]), text(&job["status"])));
        }
        for job in &block_jobs {
            found.insert(text(&job["device"]), (text(&job["type"]), text(&job["status"])));
        }
        let unfinished = found.into_iter().filter(|(_, (_, status))| status != "concluded");
        Ok(unfinished
            .map(|(id, (kind, _))| format!("QEMU's job \"{id}\" ({kind}) works on its disks"))
            .collect())
    }

    async fn devices_below(&self, path: &str) -> Result<Vec<SeenDevice>, HypervisorError> {
        let answer = self.qmp().execute("qom-list", json!({ "path": path }), ANSWER_DEADLINE).await?;
        let properties = list(answer, "qom-list")?;
        let children = properties.iter().filter_map(|property| {
            let kind = property["type"].as_str()?.strip_prefix("child<")?.strip_suffix('>')?;
            Some((property["name"].as_str()?, kind))
        });
        Ok(children
            .map(|(name, kind)| SeenDevice {
                name: Some(name.to_owned()),
                kind: kind.to_owned(),
                settings: BTreeMap::new(),
            })
            .collect())
    }
}

struct Graph {
    nodes: BTreeMap<String, Node>,
}

struct Node {
    driver: String,
    file: String,
    below: Vec<String>,
}

impl Graph {
    fn read(graph: &Value, nodes: &[Value]) -> Result<Self, HypervisorError> {
        let odd = || unexpected("x-debug-query-block-graph", "a graph of nodes");
        let (Some(vertices), Some(edges)) = (graph["nodes"].as_array(), graph["edges"].as_array()) else {
            return Err(odd().into());
        };
        if vertices.len() > THINGS_MAX || edges.len() > THINGS_MAX {
            return Err(odd().into());
        }
        let mut names = BTreeMap::new();
        for vertex in vertices {
            let (id, name) = (vertex["id"].as_u64(), vertex["name"].as_str());
            let (Some(id), Some(name), Some(kind)) = (id, name, vertex["type"].as_str()) else {
                return Err(odd().into());
            };
            if kind == "block-driver" {
                names.insert(id, name);
            }
        }
        let mut below = BTreeMap::<&str, Vec<String>>::new();
        for edge in edges {
            let (Some(parent), Some(child)) = (edge["parent"].as_u64(), edge["child"].as_u64()) else {
                return Err(odd().into());
            };
            // Devices and jobs are no nodes: they are above nodes only.
            if let Some(parent) = names.get(&parent) {
                let child = names.get(&child).ok_or_else(odd)?;
                below.entry(parent).or_default().push((*child).to_owned());
            }
        }
        let mut found = BTreeMap::new();
        for name in names.values() {
            let node = nodes.iter().find(|node| node["node-name"] == **name).ok_or_else(odd)?;
            let (driver, file) = (text(&node["drv"]), text(&node["file"]));
            let below = below.remove(name).unwrap_or_default();
            found.insert((*name).to_owned(), Node { driver, file, below });
        }
        Ok(Self { nodes: found })
    }

    fn below(&self, top: &str) -> Result<(BTreeSet<Leaf>, BTreeSet<String>), HypervisorError> {
        let (mut leaves, mut drivers) = (BTreeSet::new(), BTreeSet::new());
        let (mut next, mut seen) = (vec![top.to_owned()], BTreeSet::new());
        while let Some(name) = next.pop() {
            if seen.len() > DEPTH_MAX {
                return Err(unexpected("x-debug-query-block-graph", "a graph of nodes").into());
            }
            if !seen.insert(name.clone()) {
                continue;
            }
            let node = self.nodes.get(&name);
            let node = node.ok_or_else(|| unexpected("query-named-block-nodes", "all nodes of the graph"))?;
            drivers.insert(node.driver.clone());
            match node.below.as_slice() {
                [] => drop(leaves.insert(leaf(&node.driver, &node.file))),
                below => next.extend(below.iter().cloned()),
            }
        }
        Ok((leaves, drivers))
    }
}

fn leaf(driver: &str, file: &str) -> Leaf {
    match driver {
        "nbd" => match export(file) {
            Some((socket, name)) => Leaf::Export { socket, name },
            None => Leaf::Other(file.to_owned()),
        },
        "file" | "host_device" | "host_cdrom" => Leaf::File(file_name(file)),
        _ => Leaf::Other(format!("{driver} {file}").trim_end().to_owned()),
    }
}

fn told(setting: &str, value: &Value) -> Option<String> {
    match (setting, value.as_u64()) {
        // A place on a bus: eight functions in each slot.
        ("addr", Some(place)) => Some(format!("{:x}.{}", place / 8, place % 8)),
        (_, Some(number)) => Some(number.to_string()),
        _ => value.as_str().map(str::to_owned),
    }
}

/// Returns the path of a file, which QEMU writes as JSON where a path cannot express all.
fn file_name(file: &str) -> String {
    let options = file.strip_prefix("json:").and_then(|json| serde_json::from_str::<Value>(json).ok());
    options
        .and_then(|options| options["filename"].as_str().map(str::to_owned))
        .unwrap_or_else(|| file.to_owned())
}

pub(crate) fn export(file: &str) -> Option<(PathBuf, String)> {
    if let Some(rest) = file.strip_prefix("nbd+unix://") {
        let (name, query) = rest.trim_start_matches('/').split_once("?socket=")?;
        return Some((PathBuf::from(query), name.to_owned()));
    }
    if let Some(rest) = file.strip_prefix("nbd:unix:") {
        let (socket, name) = rest.split_once(":exportname=").unwrap_or((rest, ""));
        return Some((PathBuf::from(socket), name.to_owned()));
    }
    let options: Value = serde_json::from_str(file.strip_prefix("json:")?).ok()?;
    let path = options["server.path"].as_str().or_else(|| options["server"]["path"].as_str())?;
    Some((PathBuf::from(path), text(&options["export"])))
}

fn drive(block: &Value, graph: &Graph) -> Result<SeenDrive, HypervisorError> {
    let device = block["qdev"].as_str().or_else(|| block["device"].as_str()).unwrap_or_default().to_owned();
    let Some(inserted) = block.get("inserted") else {
        return Ok(SeenDrive { device, ..SeenDrive::default() });
    };
    let (leaves, drivers) = graph.below(&text(&inserted["node-name"]))?;
    let limits = ["bps", "bps_rd", "bps_wr", "iops", "iops_rd", "iops_wr"];
    let is_limited = limits.iter().any(|limit| inserted[*limit].as_u64().is_none_or(|value| value > 0));
    Ok(SeenDrive { device, leaves, drivers, is_limited })
}

/// Returns bitmaps that record writes. A job's own bitmap has no name, and is reported with the job.
fn bitmaps(blocks: &[Value], nodes: &[Value]) -> Vec<String> {
    let inserted = blocks.iter().map(|block| &block["inserted"]);
    let mut found = BTreeSet::new();
    for node in inserted.chain(nodes) {
        for bitmap in node["dirty-bitmaps"].as_array().map(Vec::as_slice).unwrap_or_default() {
            if let Some(name) = bitmap["name"].as_str() {
                let node = text(&node["node-name"]);
                found.insert(format!(
                    "its node {node} has a backup tool's bitmap \"{name}\", which would be lost"
                ));
            }
        }
    }
    found.into_iter().collect()
}

fn list(answer: Value, command: &str) -> Result<Vec<Value>, HypervisorError> {
    match answer {
        Value::Array(list) if list.len() <= THINGS_MAX => Ok(list),
        _ => Err(unexpected(command, "a list").into()),
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests;
