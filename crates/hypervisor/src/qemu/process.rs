//! One running QEMU: what it does, and its being told to run, to stop and to end.

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

/// How long QEMU may take for a command that changes or asks little. It answers within a millisecond, unless its main
/// loop waits for a disk: a read that was held for 8 s has been seen to keep it silent for as long.
pub(super) const ANSWER_DEADLINE: Duration = Duration::from_secs(15);
/// How long pausing and resuming may take: requests that are under way end first, and a disk over NBD whose server is
/// gone fails them only after its `reconnect-delay`, [`RECONNECT_SECONDS`](super::RECONNECT_SECONDS) with most.
pub(super) const DRAIN_DEADLINE: Duration = Duration::from_secs(75);
/// How often a socket that is not there yet is looked for.
const CONNECT_INTERVAL: Duration = Duration::from_millis(10);

/// One running QEMU, by its monitor.
///
/// Dropping it leaves the VM as it is; the monitor then serves the next client. All methods may be called at the
/// same time from several tasks.
#[derive(Debug)]
pub struct Qemu {
    qmp: Qmp,
    socket: PathBuf,
}

impl Qemu {
    /// Connects to a monitor's socket.
    ///
    /// # Errors
    /// If nobody listens there, it is no monitor, or it serves somebody else.
    pub async fn connect(socket: &Path) -> Result<Self, HypervisorError> {
        Ok(Self { qmp: Qmp::connect(socket).await?, socket: socket.to_owned() })
    }

    /// Uses a connection to the monitor that is called `socket`.
    ///
    /// # Errors
    /// As [`Self::connect`].
    pub async fn over(stream: UnixStream, socket: &Path) -> Result<Self, HypervisorError> {
        let qmp = Qmp::over(stream, socket, GREETING_DEADLINE).await?;
        Ok(Self { qmp, socket: socket.to_owned() })
    }

    /// Connects to the monitor of a QEMU that is being started: tries again while there is no socket yet, or one that is closed
    /// at once.
    ///
    /// # Errors
    /// As [`Self::connect`]; that nobody listened until `deadline` was over.
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

    /// The protocol, for what has no method here.
    pub fn qmp(&self) -> &Qmp {
        &self.qmp
    }

    /// The monitor's socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The version that runs.
    pub fn version(&self) -> &Version {
        self.qmp.version()
    }

    /// QEMU's process, as the kernel tells it of the socket.
    pub fn process(&self) -> Option<i32> {
        self.qmp.process()
    }

    /// The user that QEMU ran as when it began to listen.
    pub fn user(&self) -> Option<u32> {
        self.qmp.user()
    }

    /// What happens from now on.
    pub fn events(&self) -> Events {
        self.qmp.events()
    }

    /// What the VM does.
    ///
    /// # Errors
    /// If QEMU does not tell.
    pub async fn status(&self) -> Result<RunState, HypervisorError> {
        let status = self.ask("query-status").await?;
        let name = status["status"].as_str();
        let name = name.ok_or_else(|| unexpected("query-status", "a state"))?;
        Ok(RunState::of(name))
    }

    /// Lets the processors run (`cont`): a VM that was paused, has loaded its memory, or has sent it elsewhere.
    ///
    /// QEMU takes its disks' images back before, if they were given to another process.
    ///
    /// **N.B.** A VM whose memory has gone elsewhere (*postmigrate*) must be resumed only if it never runs there.
    ///
    /// # Errors
    /// If QEMU refuses: the VM is still loading, an image cannot be locked. It does not run then.
    pub async fn resume(&self) -> Result<(), HypervisorError> {
        self.tell("cont", json!({}), DRAIN_DEADLINE).await
    }

    /// Has the VM's network cards tell the network where they are, a few times within a second: switches learn it from
    /// that.
    ///
    /// # Errors
    /// If QEMU does not answer, or knows of no such thing.
    pub async fn announce(&self) -> Result<(), HypervisorError> {
        // Milliseconds; those that QEMU itself uses after a migration.
        let rounds = json!({ "initial": 50, "max": 550, "rounds": 5, "step": 100 });
        self.tell("announce-self", rounds, ANSWER_DEADLINE).await
    }

    /// Pauses the processors, and waits until the disks' requests have ended.
    ///
    /// A VM that waits for memory is told not to run once it has it.
    ///
    /// # Errors
    /// If QEMU does not answer. Requests that are held by a disk's server hold this up too.
    pub async fn stop(&self) -> Result<(), HypervisorError> {
        self.tell("stop", json!({}), DRAIN_DEADLINE).await
    }

    /// Tells the guest that its power button was pressed; it shuts down if it likes to.
    ///
    /// # Errors
    /// If QEMU does not answer.
    pub async fn power_down(&self) -> Result<(), HypervisorError> {
        self.tell("system_powerdown", json!({}), ANSWER_DEADLINE).await
    }

    /// Ends QEMU at once, as if the power had gone. Its process ends a little later.
    ///
    /// # Errors
    /// If QEMU does not answer; that it has gone is no error.
    pub async fn quit(&self) -> Result<(), HypervisorError> {
        match self.tell("quit", json!({}), DRAIN_DEADLINE).await {
            Err(error) if error.is_gone() => Ok(()),
            told => told,
        }
    }

    /// Waits until the monitor has gone, and says how. QEMU's process may end a little later.
    pub async fn closed(&self) -> String {
        self.qmp.closed().await
    }

    /// Asks something that needs no arguments.
    pub(super) async fn ask(&self, command: &str) -> Result<Value, QmpError> {
        self.qmp.execute(command, json!({}), ANSWER_DEADLINE).await
    }

    /// Has something done that returns nothing of interest.
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

/// An answer that does not fit its command.
pub(super) fn unexpected(command: &str, expected: &'static str) -> QmpError {
    QmpError::Unexpected { command: command.to_owned(), expected }
}

/// Whether a QEMU that is being started may yet be reached. One that has ended while it started looks the same: whoever has
/// its process knows.
fn is_not_there_yet(error: &HypervisorError) -> bool {
    error.nobody_listens() || matches!(error, HypervisorError::Gone(_))
}
