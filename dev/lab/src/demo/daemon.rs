//! Starts the demo's daemons.

use std::os::unix::process::CommandExt as _;
use std::process::Command;

use testbed::{Daemon, Folder};

/// Starts a daemon by a command that becomes it, in a process group of its own: on Ctrl-C, the demo itself stops the daemon in
/// order. If the daemon does not start or answer, the error ends with its log.
pub(crate) async fn start_daemon(mut command: Command, folder: &Folder) -> anyhow::Result<Daemon> {
    command.process_group(0);
    Daemon::start(command, folder).await
}
