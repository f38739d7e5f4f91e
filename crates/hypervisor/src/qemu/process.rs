//! One running QEMU: its state, and the orders to run, to stop and to end.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio::time::{Instant, sleep};

use super::error::QmpError;
use super::qmp::{Events, GREETING_DEADLINE, Qmp};
use super::version::Version;
use crate::HypervisorError;
use crate::RunState;

/// How long QEMU may take for a small command. It answers within a millisecond, unless its main loop waits for a disk: a read
/// held for 8 s has silenced it for as long.
pub(super) const ANSWER_DEADLINE: Duration = Duration::from_secs(15);
/// How long pausing and resuming may take: requests in flight end first. A disk over NBD whose server is gone fails them only
/// after its `reconnect-delay`, usually [`RECONNECT_SECONDS`](super::RECONNECT_SECONDS).
pub(super) const DRAIN_DEADLINE: Duration = Duration::from_secs(75);
const CONNECT_INTERVAL: Duration = Duration::from_millis(10);

/// One running QEMU, by its monitor.
///
/// Dropping it leaves the VM as it is; the monitor then serves the next client. Several tasks may call the methods at the same
/// time. Every method fails if QEMU refuses the command, has ended, or does not answer in time.
#[derive(Debug)]
pub struct Qemu {
    qmp: Qmp,
    socket: PathBuf,
}

impl Qemu {
    /// Connects to a monitor's socket.
    ///
    /// # Errors
    /// If nothing listens there, it is no monitor, or it serves another client.
    pub async fn connect(socket: &Path) -> Result<Self, HypervisorError> {
        Ok(Self { qmp: Qmp::connect(socket).await?, socket: socket.to_owned() })
    }

    /// Uses an existing connection to the monitor at `socket`.
    pub async fn over(stream: UnixStream, socket: &Path) -> Result<Self, HypervisorError> {
        let qmp = Qmp::over(stream, socket, GREETING_DEADLINE).await?;
        Ok(Self { qmp, socket: socket.to_owned() })
    }

    /// Connects to the monitor of a starting QEMU: tries again while there is no socket yet, or it closes at once.
    ///
    /// # Errors
    /// Those of [`Self::connect`]; an error if nothing listened until `deadline` was over.
    pub async fn connect_within(socket: &Path, deadline: Duration) -> Result<Self, HypervisorError> {
        let begun = Instant::now();
        loop {
            match Self::connect(socket).await {
                Err(error) if is_not_there_yet(&error) && begun.elapsed() < deadline => {}
                connected => return connected,
            }
            sleep(CONNECT_INTERVAL).await;
        }
    }

    /// Returns the protocol, for operations without a method here.
    pub fn qmp(&self) -> &Qmp {
        &self.qmp
    }

    /// Returns the path of the monitor's socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns the version that runs.
    pub fn version(&self) -> &Version {
        self.qmp.version()
    }

    /// Returns QEMU's process, as the kernel reports it for the socket.
    pub fn process(&self) -> Option<i32> {
        self.qmp.process()
    }

    /// Returns the user of QEMU when it began to listen.
    pub fn user(&self) -> Option<u32> {
        self.qmp.user()
    }

    /// Returns the events from now on.
    pub fn events(&self) -> Events {
        self.qmp.events()
    }

    /// Returns the VM's run state.
    pub async fn status(&self) -> Result<RunState, HypervisorError> {
        let status = self.ask("query-status").await?;
        let name = status["status"].as_str();
        let name = name.ok_or_else(|| unexpected("query-status", "a state"))?;
        Ok(RunState::of(name))
    }

    /// Lets the processors run (`cont`): of a VM that was paused, has loaded its memory, or has sent it away.
    ///
    /// QEMU first takes its disks' images back, if another process had them.
    ///
    /// **N.B.** Resume a VM whose memory was sent away (*postmigrate*) only if it never runs at the target.
    ///
    /// # Errors
    /// If QEMU refuses: the VM is still loading, or an image cannot be locked. It then does not run.
    pub async fn resume(&self) -> Result<(), HypervisorError> {
        self.tell("cont", json!({}), DRAIN_DEADLINE).await
    }

    /// Lets the VM's network cards announce their place in the network, a few times within a second: switches learn it from that.
    ///
    /// # Errors
    /// If QEMU does not answer, or has no such command.
    pub async fn announce(&self) -> Result<(), HypervisorError> {
        // Milliseconds; those that QEMU itself uses after a migration.
        let rounds = json!({ "initial": 50, "max": 550, "rounds": 5, "step": 100 });
        self.tell("announce-self", rounds, ANSWER_DEADLINE).await
    }

    /// Pauses the processors, and waits until the disks' requests have ended. A VM that waits for memory will not run
    /// once it has it.
    ///
    /// # Errors
    /// If QEMU does not answer. Requests that a disk's server holds delay this as well.
    pub async fn stop(&self) -> Result<(), HypervisorError> {
        self.tell("stop", json!({}), DRAIN_DEADLINE).await
    }

    /// Presses the guest's power button; the guest may shut down.
    pub async fn power_down(&self) -> Result<(), HypervisorError> {
        self.tell("system_powerdown", json!({}), ANSWER_DEADLINE).await
    }

    /// Ends QEMU at once, like a power cut. Its process ends a little later.
    ///
    /// # Errors
    /// If QEMU does not answer; a QEMU that has gone is no error.
    pub async fn quit(&self) -> Result<(), HypervisorError> {
        match self.tell("quit", json!({}), DRAIN_DEADLINE).await {
            Err(error) if error.is_gone() => Ok(()),
            told => told,
        }
    }

    /// Waits until the monitor has gone, and returns how. QEMU's process may end a little later.
    pub async fn closed(&self) -> String {
        self.qmp.closed().await
    }

    pub(super) async fn ask(&self, command: &str) -> Result<Value, QmpError> {
        self.qmp.execute(command, json!({}), ANSWER_DEADLINE).await
    }

    /// Runs a command whose answer does not matter.
    pub(super) async fn tell(
        &self,
        command: &str,
        arguments: Value,
        deadline: Duration,
    ) -> Result<(), HypervisorError> {
        self.qmp.execute(command, arguments, deadline).await?;
        Ok(())
    }
}

pub(super) fn unexpected(command: &str, expected: &'static str) -> QmpError {
    QmpError::Unexpected { command: command.to_owned(), expected }
}

/// Returns whether a starting QEMU may still become reachable. A QEMU that ended during its start looks the same: the owner
/// of its process knows.
fn is_not_there_yet(error: &HypervisorError) -> bool {
    error.nobody_listens() || matches!(error, HypervisorError::Gone(_))
}
