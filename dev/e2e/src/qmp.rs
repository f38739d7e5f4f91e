//! A client of QEMU's second monitor. Tests use it like administrators and backup tools, which change a VM without Sterna.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context as _, bail};
use serde_json::{Value, json};
use testbed::DEADLINE;

/// A connection to the monitor.
#[derive(Debug)]
pub struct Qmp(BufReader<UnixStream>);

/// A disk of the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// Path of the device in QEMU's tree.
    pub device: String,
    /// The node that the device uses.
    pub node: String,
    /// The file or URI of the node.
    pub file: String,
    /// The format of the node.
    pub format: String,
}

impl Qmp {
    /// Connects to a monitor.
    ///
    /// # Errors
    /// If no monitor answers.
    pub fn connect(socket: &Path) -> anyhow::Result<Self> {
        let stream =
            UnixStream::connect(socket).with_context(|| format!("connect to {}", socket.display()))?;
        stream.set_read_timeout(Some(DEADLINE))?;
        let mut monitor = Self(BufReader::new(stream));
        monitor.0.read_line(&mut String::new())?;
        monitor.execute("qmp_capabilities", &json!({}))?;
        Ok(monitor)
    }

    /// Executes a command and returns QEMU's result.
    ///
    /// # Errors
    /// If QEMU refuses the command or has exited.
    pub fn execute(&mut self, command: &str, arguments: &Value) -> anyhow::Result<Value> {
        let order = json!({ "execute": command, "arguments": arguments });
        self.0.get_mut().write_all(format!("{order}\n").as_bytes())?;
        loop {
            let mut line = String::new();
            if self.0.read_line(&mut line)? == 0 {
                bail!("QEMU has ended before it answered {command}");
            }
            let mut answer: Value = serde_json::from_str(&line)?;
            if let Some(error) = answer.get("error") {
                bail!("{command}: {}", error["desc"].as_str().unwrap_or("no reason"));
            }
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
        }
    }

    /// Returns the guest's disks.
    ///
    /// # Errors
    /// If QEMU does not answer.
    pub fn disks(&mut self) -> anyhow::Result<Vec<Disk>> {
        let blocks = self.execute("query-block", &json!({}))?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let disks = blocks.as_array().into_iter().flatten().filter(|block| block["qdev"].is_string());
        Ok(disks
            .map(|block| Disk {
                device: text(&block["qdev"]),
                node: text(&block["inserted"]["node-name"]),
                file: text(&block["inserted"]["file"]),
                format: text(&block["inserted"]["drv"]),
            })
            .collect())
    }

    /// Tells whether the processors run, and returns QEMU's name of the state.
    ///
    /// # Errors
    /// If QEMU does not answer.
    pub fn state(&mut self) -> anyhow::Result<(bool, String)> {
        let status = self.execute("query-status", &json!({}))?;
        Ok((status["running"] == true, status["status"].as_str().unwrap_or_default().to_owned()))
    }
}
