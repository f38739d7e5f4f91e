//! The measured servers. Each is started for one measurement, and runs alone.

use std::fs::File;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use api::Volume;
use serde_json::{Value, json};
use testbed::{Daemon, Folder, with_tail};
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep, timeout};

use super::folder::BenchFolder;
use super::process::cpu_time;
use super::qmp::Qmp;
use super::runner::Ground;
use super::tools::STORAGE_DAEMON;
use crate::demo::{STORES, start_daemon};

const DEADLINE: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(10);
pub(super) const NAME: &str = "bench";
/// QEMU's switch may have begun this much before it was seen: events arrive late, and clocks are rounded.
pub(super) const SWITCH_SLACK_MS: u64 = 250;

/// A Sterna daemon that serves one image, with a store to move it to.
#[derive(Debug)]
pub(super) struct Sterna {
    pub(super) daemon: Daemon,
    pub(super) folder: Folder,
    pub(super) volume: Volume,
}

impl Sterna {
    /// Starts the daemon with variables of its environment.
    pub(super) async fn start(
        ground: &Ground<'_>,
        image: &Path,
        variables: &[(&str, &str)],
    ) -> anyhow::Result<Self> {
        let folder = Folder::create(ground.folder.root(), STORES)?;
        let mut command = process::Command::new(ground.program);
        command.envs(variables.iter().copied());
        let daemon = start_daemon(command, &folder).await?;
        let volume = daemon.add_volume(NAME, image).await?;
        Ok(Self { daemon, folder, volume })
    }

    pub(super) fn cpu_time(&self) -> anyhow::Result<Duration> {
        cpu_time(self.daemon.process_id())
    }

    /// Stops the daemon, and calls a reader with its log before that is deleted.
    pub(super) async fn stop_and<T>(
        self,
        read_log: impl FnOnce(&Path) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        self.daemon.stop().await?;
        let read = read_log(&self.folder.log());
        self.folder.remove()?;
        read
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CopyMode {
    Background,
    /// A write goes to both images before it is answered.
    WriteBlocking,
}

impl CopyMode {
    fn name(self) -> &'static str {
        match self {
            Self::Background => "background",
            Self::WriteBlocking => "write-blocking",
        }
    }
}

#[derive(Debug)]
pub(super) struct Setup<'a> {
    pub(super) command: Command,
    /// Prefix of its sockets and its log: unique among the running ones.
    pub(super) name: &'a str,
    pub(super) nodes: Vec<Value>,
    pub(super) exported: &'a str,
    /// Address of the export; `None`: a unix socket.
    pub(super) port: Option<(Ipv4Addr, u16)>,
}

/// Returns the nodes of an image, used by io_uring and past the page cache. The upper node is `name`.
pub(super) fn file_nodes(name: &str, path: &Path) -> [Value; 2] {
    let file = json!({
        "driver": "file", "node-name": format!("{name}-file"), "filename": path,
        "aio": "io_uring", "cache": { "direct": true },
    });
    [file, json!({ "driver": "raw", "node-name": name, "file": format!("{name}-file") })]
}

pub(super) fn remote_node(name: &str, (host, port): (Ipv4Addr, u16)) -> Value {
    let server = json!({ "type": "inet", "host": host.to_string(), "port": port.to_string() });
    json!({ "driver": "nbd", "node-name": name, "server": server, "export": NAME })
}

#[derive(Debug)]
pub(super) struct StorageDaemon {
    child: Child,
    qmp: Qmp,
    uri: String,
    log: PathBuf,
}

impl StorageDaemon {
    /// Starts a daemon on images, each with the name of its node; the first is exported.
    pub(super) async fn start(folder: &BenchFolder, images: &[(&str, &Path)]) -> anyhow::Result<Self> {
        let (exported, _) = images.first().context("there is nothing to export")?;
        let nodes = images.iter().flat_map(|(name, path)| file_nodes(name, path)).collect();
        Self::launch(
            folder,
            Setup { command: STORAGE_DAEMON.command(), name: "daemon", nodes, exported, port: None },
        )
        .await
    }

    /// Starts a daemon; if it does not start or answer, the error ends with its log.
    pub(super) async fn launch(folder: &BenchFolder, setup: Setup<'_>) -> anyhow::Result<Self> {
        let Setup { mut command, name, nodes, exported, port } = setup;
        let (socket, control) = (folder.path(&format!("{name}.nbd")), folder.path(&format!("{name}.qmp")));
        // A socket that is left over would be in the way.
        for path in [&socket, &control] {
            let _ = std::fs::remove_file(path);
        }
        let log = folder.path(&format!("{name}.log"));
        let chardev = format!("socket,id=control,path={},server=on,wait=off", escaped(&control));
        command.args(["--chardev", &chardev, "--monitor", "chardev=control"]);
        for node in nodes {
            command.args(["--blockdev", &node.to_string()]);
        }
        let (address, uri) = match port {
            None => {
                let uri = format!("nbd+unix:///{NAME}?socket={}", percent_encoded(&socket));
                (json!({ "type": "unix", "path": socket }), uri)
            }
            Some((host, port)) => (
                json!({ "type": "inet", "host": host.to_string(), "port": port.to_string() }),
                format!("nbd://{host}:{port}/{NAME}"),
            ),
        };
        let server = json!({ "addr": address });
        let export =
            json!({ "type": "nbd", "id": "export", "node-name": exported, "writable": true, "name": NAME });
        command.args(["--nbd-server", &server.to_string(), "--export", &export.to_string()]);
        command.stderr(File::create(&log).context("make the log of qemu-storage-daemon")?);
        let mut child = command.spawn().map_err(|error| STORAGE_DAEMON.explain(error))?;
        match wait_for_monitor(&mut child, &control).await {
            Ok(qmp) => Ok(Self { child, qmp, uri, log }),
            Err(error) => Err(with_log(error, &log)),
        }
    }

    pub(super) fn uri(&self) -> &str {
        &self.uri
    }

    pub(super) fn cpu_time(&self) -> anyhow::Result<Duration> {
        cpu_time(self.process_id()?)
    }

    pub(super) fn process_id(&self) -> anyhow::Result<u32> {
        self.child.id().context("qemu-storage-daemon has ended")
    }

    /// Mirrors the exported image to the image of node `target`; the export then uses that. `switching` is called when everything
    /// has been copied and the change of images begins. `speed` is its limit in bytes a second; 0: none.
    pub(super) async fn mirror(
        &mut self,
        exported: &str,
        target: &str,
        mode: CopyMode,
        speed: u64,
        switching: impl FnOnce(),
    ) -> anyhow::Result<()> {
        let mut switching = Some(switching);
        let order = json!({
            "job-id": "mirror", "device": exported, "target": target, "sync": "full", "copy-mode": mode.name(),
            "speed": speed,
            // Otherwise a failed job disappears together with its reason.
            "auto-dismiss": false,
        });
        self.qmp.execute("blockdev-mirror", order).await?;
        loop {
            let change = self.qmp.next_event("JOB_STATUS_CHANGE").await?;
            match change["status"].as_str() {
                Some("ready") => {
                    if let Some(switching) = switching.take() {
                        switching();
                        self.qmp.execute("job-complete", json!({ "id": "mirror" })).await?;
                    }
                }
                Some("concluded") => break,
                _ => {}
            }
        }
        let jobs = self.qmp.execute("query-jobs", json!({})).await?;
        self.qmp.execute("job-dismiss", json!({ "id": "mirror" })).await?;
        match jobs[0]["error"].as_str() {
            Some(error) => bail!("the mirror of qemu-storage-daemon failed: {error}"),
            None => Ok(()),
        }
    }

    /// Stops the daemon. Fails if it does not end in time, or ends with an error.
    pub(super) async fn stop(mut self) -> anyhow::Result<()> {
        let asked = self.qmp.execute("quit", json!({})).await;
        asked.map_err(|error| with_log(error, &self.log))?;
        match timeout(DEADLINE, self.child.wait()).await {
            Ok(Ok(status)) if status.success() => Ok(()),
            Ok(Ok(status)) => Err(with_log(anyhow!("qemu-storage-daemon ended with {status}"), &self.log)),
            Ok(Err(error)) => Err(error).context("wait for qemu-storage-daemon"),
            // The drop kills the daemon.
            Err(_) => bail!("qemu-storage-daemon did not end within {} s", DEADLINE.as_secs()),
        }
    }
}

/// Waits for the monitor, which answers once the whole command line has been carried out.
async fn wait_for_monitor(child: &mut Child, control: &Path) -> anyhow::Result<Qmp> {
    let give_up_at = Instant::now() + DEADLINE;
    loop {
        if let Some(status) = child.try_wait().context("look after qemu-storage-daemon")? {
            bail!("qemu-storage-daemon ended at once with {status}");
        }
        match timeout(DEADLINE, Qmp::connect(control)).await {
            Ok(Ok(qmp)) => return Ok(qmp),
            Ok(Err(_)) if Instant::now() < give_up_at => sleep(PAUSE).await,
            Ok(Err(error)) => return Err(error).context("qemu-storage-daemon does not answer"),
            Err(_) => bail!("qemu-storage-daemon does not answer"),
        }
    }
}

fn with_log(error: anyhow::Error, log: &Path) -> anyhow::Error {
    let text = std::fs::read(log).unwrap_or_default();
    with_tail(error, "the log of qemu-storage-daemon", &String::from_utf8_lossy(&text))
}

/// Escapes a path for QEMU's `key=value` lists, where a comma is doubled.
fn escaped(path: &Path) -> String {
    path.to_string_lossy().replace(',', ",,")
}

/// Escapes a path for the query of a URI.
fn percent_encoded(path: &Path) -> String {
    use std::fmt::Write as _;
    use std::os::unix::ffi::OsStrExt as _;
    let mut text = String::new();
    for &byte in path.as_os_str().as_bytes() {
        if byte.is_ascii_alphanumeric() || b"/-._~".contains(&byte) {
            text.push(char::from(byte));
        } else {
            let _ = write!(text, "%{byte:02X}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{escaped, percent_encoded};

    #[test]
    fn odd_paths_survive_option_lists_and_uris() {
        let path = Path::new("/odd, folder/a&b");
        assert_eq!(escaped(path), "/odd,, folder/a&b");
        assert_eq!(percent_encoded(path), "/odd%2C%20folder/a%26b");
    }
}
