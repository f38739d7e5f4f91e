//! Lets disks of domains wait for a lost server, where libvirt cannot express that.
//!
//! Older libvirt (for example 9.0) leaves `<reconnect>` out of a definition: QEMU then fails requests as soon as the connection
//! breaks. So the format's node of the disk gets another node below it, of the same export, with `reconnect-delay`. The
//! definition stays correct, but libvirt marks the domain as tainted by a monitor command. The domain's next start undoes this.

use std::path::Path;

use serde_json::{Value, json};

use super::definition::NbdSource;
use super::domain::{Domain, Libvirt};
use super::error::LibvirtError;
use crate::qemu::ExportUse;

const NODE: &str = "sterna-waits-";

impl Libvirt {
    /// Returns whether [`Self::have_disk_wait`] was done for the disk over an export. Removes remains of an earlier one.
    pub async fn has_disk_wait(&self, domain: &Domain, export: &NbdSource) -> Result<bool, LibvirtError> {
        self.drop_waiting_nodes(domain).await?;
        let socket = export.socket.to_string_lossy();
        let waits = |node: &Value| {
            let is_ours = node["node-name"].as_str().is_some_and(|name| name.starts_with(NODE));
            is_ours && node["file"].as_str().is_some_and(|file| file.contains(&*socket))
        };
        Ok(self.nodes(domain).await?.iter().any(waits))
    }

    /// Lets the disk over an export, or its copy, wait for its server for `export.reconnect_s`.
    ///
    /// # Errors
    /// [`LibvirtError`]; it then does not wait.
    pub async fn have_disk_wait(&self, domain: &Domain, export: &NbdSource) -> Result<(), LibvirtError> {
        let nodes = self.nodes(domain).await?;
        let socket = export.socket.to_string_lossy();
        let over = |node: &&Value| {
            node["drv"] == "raw" && node["file"].as_str().is_some_and(|file| file.contains(&*socket))
        };
        let Some(format) = nodes.iter().find(over) else {
            return Err(LibvirtError::Malformed("no node of QEMU that is over the export"));
        };
        let name = (0..).map(|number| format!("{NODE}{number}"));
        let name = name.into_iter().find(|name| nodes.iter().all(|node| node["node-name"] != **name));
        let name = name.unwrap_or_default();
        let cache = json!({ "direct": format["cache"]["direct"], "no-flush": format["cache"]["no-flush"] });
        let added = json!({
            "driver": "nbd", "node-name": name, "server": { "type": "unix", "path": socket }, "export": export.export,
            "reconnect-delay": export.reconnect_s.unwrap_or(0), "cache": cache, "discard": "unmap", "read-only": format["ro"],
        });
        self.execute(domain, "blockdev-add", &added).await?;
        let reopened = json!({ "options": [{
            "node-name": format["node-name"], "driver": "raw", "file": name, "read-only": format["ro"], "cache": cache,
            "discard": "unmap", "detect-zeroes": format["detect_zeroes"],
        }] });
        let reopened = self.execute(domain, "blockdev-reopen", &reopened).await;
        if reopened.is_err() {
            let _ = self.execute(domain, "blockdev-del", &json!({ "node-name": name })).await;
        }
        reopened.map(drop)
    }

    /// Removes the unused nodes that [`Self::have_disk_wait`] has made.
    pub async fn drop_waiting_nodes(&self, domain: &Domain) -> Result<(), LibvirtError> {
        for node in self.nodes(domain).await? {
            if let Some(name) = node["node-name"].as_str().filter(|name| name.starts_with(NODE)) {
                // libvirt refuses this for a node in use.
                let _ = self.execute(domain, "blockdev-del", &json!({ "node-name": name })).await;
            }
        }
        Ok(())
    }

    /// Returns what in the domain's QEMU uses the export at a socket. libvirt's own definition does not
    /// include foreign monitor commands.
    pub async fn export_use(&self, domain: &Domain, socket: &Path) -> Result<ExportUse, LibvirtError> {
        let devices = self.execute(domain, "query-block", &json!({})).await?;
        let Value::Array(devices) = devices else {
            return Err(LibvirtError::Malformed("no list of QEMU's devices"));
        };
        Ok(ExportUse::of(&devices, &self.nodes(domain).await?, socket))
    }

    async fn nodes(&self, domain: &Domain) -> Result<Vec<Value>, LibvirtError> {
        let answer = self.execute(domain, "query-named-block-nodes", &json!({ "flat": true })).await?;
        match answer {
            Value::Array(nodes) => Ok(nodes),
            _ => Err(LibvirtError::Malformed("no list of QEMU's nodes")),
        }
    }

    async fn execute(
        &self,
        domain: &Domain,
        command: &str,
        arguments: &Value,
    ) -> Result<Value, LibvirtError> {
        let command = json!({ "execute": command, "arguments": arguments }).to_string();
        let answer = self.monitor_command(domain, &command).await?;
        read_answer(&answer)
    }
}

fn read_answer(answer: &str) -> Result<Value, LibvirtError> {
    let mut answer: Value = serde_json::from_str(answer)
        .map_err(|_| LibvirtError::Malformed("an answer of QEMU that is no JSON"))?;
    if let Some(message) = answer["error"]["desc"].as_str() {
        return Err(LibvirtError::Refused { code: 0, message: format!("QEMU: {}", words::clean(message)) });
    }
    Ok(answer["return"].take())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_qemu_answers_is_told_from_what_it_refuses() {
        assert_eq!(read_answer(r#"{"return":[1],"id":"libvirt-7"}"#).unwrap(), json!([1]));
        let refused = read_answer(r#"{"id":"x","error":{"class":"GenericError","desc":"no node"}}"#);
        assert_eq!(refused.unwrap_err().to_string(), "libvirt says: QEMU: no node");
        assert!(read_answer("").is_err());
    }
}
