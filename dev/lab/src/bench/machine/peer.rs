//! QEMU's own migration of a VM whose disk both sides can reach: from one process to another of the same command.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context as _, bail};
use serde_json::json;
use testbed::Folder;
use testbed::nbd_client::Address;
use tokio::process::{Child, Command};
use tokio::time::{Duration, sleep, timeout};

use crate::bench::qmp::Qmp;
use crate::bench::tools::SYSTEM_EMULATOR;
use crate::vm::{Vm, VmOptions};

const START_DEADLINE: Duration = Duration::from_secs(60);
const START_PAUSE: Duration = Duration::from_millis(20);
/// How long a migration may take; it normally takes seconds.
const MIGRATE_DEADLINE: Duration = Duration::from_secs(120);
const END_PAUSE: Duration = Duration::from_millis(20);
/// More than any stream carries, as in Sterna's own migrations: QEMU's default is 128 MiB/s.
const UNLIMITED_BYTES_PER_SECOND: u64 = 1 << 40;

pub(super) struct Peer {
    pub(super) machine: Vm,
    folder: PathBuf,
    disk: Address,
    current: Process,
    count: u32,
}

struct Process {
    child: Child,
    qmp: Qmp,
}

impl Peer {
    /// Starts the VM on `disk`; its sockets are in `folder`.
    pub(super) async fn start(folder: &Folder, disk: &Address, options: VmOptions) -> anyhow::Result<Self> {
        let machine = Vm::expect(&folder.path("peer.console"), options)?;
        let current = launch(&machine, disk, &folder.path("peer-0.qmp"), &[]).await?;
        Ok(Self { machine, folder: folder.root().to_owned(), disk: disk.clone(), current, count: 1 })
    }

    /// Moves the VM to a new process and returns its downtime in milliseconds.
    pub(super) async fn migrate(&mut self) -> anyhow::Result<f64> {
        let monitor = self.folder.join(format!("peer-{}.qmp", self.count));
        let mut target = launch(&self.machine, &self.disk, &monitor, &["-incoming", "defer"]).await?;
        let stream = self.folder.join(format!("peer-{}.memory", self.count));
        let uri = format!("unix:{}", stream.display());
        let source = &mut self.current.qmp;
        let moved = async {
            target.qmp.execute("migrate-incoming", json!({ "uri": uri })).await?;
            let parameters = json!({ "max-bandwidth": UNLIMITED_BYTES_PER_SECOND });
            source.execute("migrate-set-parameters", parameters).await?;
            source.execute("migrate", json!({ "uri": uri })).await?;
            let (stopped, runs) = tokio::try_join!(source.when("STOP"), target.qmp.when("RESUME"))?;
            loop {
                let status = source.execute("query-migrate", json!({})).await?;
                match status["status"].as_str() {
                    Some("completed") => break,
                    Some("failed" | "cancelled") | None => bail!("QEMU's migration ended: {status}"),
                    Some(_) => sleep(END_PAUSE).await,
                }
            }
            anyhow::Ok((runs - stopped) * 1000.0)
        };
        let moved = timeout(MIGRATE_DEADLINE, moved).await.context("QEMU's migration has not ended")?;
        let downtime_ms = moved.context("QEMU's own migration")?;
        let mut left = std::mem::replace(&mut self.current, target);
        left.child.kill().await.context("end QEMU at the source")?;
        self.count += 1;
        Ok(downtime_ms)
    }
}

async fn launch(machine: &Vm, disk: &Address, monitor: &Path, more: &[&str]) -> anyhow::Result<Process> {
    let words = machine.command(disk, monitor)?;
    let (program, arguments) = words.split_first().context("a command has a program")?;
    let child = Command::new(program)
        .args(arguments)
        .args(more)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::inherit())
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| SYSTEM_EMULATOR.explain(error))?;
    let connected = timeout(START_DEADLINE, async {
        loop {
            match Qmp::connect(monitor).await {
                Ok(qmp) => return qmp,
                Err(_) => sleep(START_PAUSE).await,
            }
        }
    });
    let qmp = connected.await.context("QEMU has no monitor")?;
    Ok(Process { child, qmp })
}
