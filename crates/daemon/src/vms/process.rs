//! QEMU's process: started so that it outlives the daemon, and identified by the kernel, never by its number alone.

use std::fs::{File, Metadata};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Stdio;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::process::{Child, Command};

/// How many bytes at the end of a log are read for QEMU's last words.
const LAST_WORDS_BYTES_MAX: u64 = 4 << 10;
const LAST_WORDS_LINES_MAX: usize = 6;

/// Starts QEMU in a process group of its own, with its output in a file.
pub(super) fn start(command: &[String], folder: &Path, log: &Path) -> io::Result<Child> {
    start_with(command, folder, log, Stdio::null())
}

/// Does the same as [`start`], with an input for the program.
pub(super) fn start_with(command: &[String], folder: &Path, log: &Path, input: Stdio) -> io::Result<Child> {
    let (program, arguments) = command.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let output = File::create(log)?;
    Command::new(program)
        .args(arguments)
        .current_dir(folder)
        .stdin(input)
        .stdout(output.try_clone()?)
        .stderr(output)
        // Ctrl-C on the daemon's terminal is not for guests.
        .process_group(0)
        .kill_on_drop(false)
        .spawn()
}

/// Returns the last lines of a log, as one line.
pub(super) fn last_words(log: &Path) -> String {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(log)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(LAST_WORDS_BYTES_MAX)))?;
        let mut end = Vec::new();
        file.take(LAST_WORDS_BYTES_MAX).read_to_end(&mut end)?;
        Ok(end)
    };
    let end = read().unwrap_or_default();
    let text = String::from_utf8_lossy(&end);
    match words::clean_lines(&text, LAST_WORDS_LINES_MAX) {
        said if said.is_empty() => format!("it said nothing (its log is {})", log.display()),
        said => said,
    }
}

/// A process that runs or has ended. No other process can be mistaken for it.
#[derive(Debug)]
pub(crate) struct Process {
    id: i32,
    descriptor: AsyncFd<OwnedFd>,
}

impl Process {
    /// Opens a process by its number, which must be known to be its own during this call.
    pub(crate) fn open(id: i32) -> io::Result<Self> {
        let process = Pid::from_raw(id).ok_or(io::ErrorKind::InvalidInput)?;
        let descriptor = pidfd_open(process, PidfdFlags::NONBLOCK)?;
        #[expect(
            deprecated,
            reason = "an owned descriptor is what it wants; what replaces it is unsafe for all others"
        )]
        let descriptor = AsyncFd::with_interest(descriptor, Interest::READABLE)?;
        Ok(Self { id, descriptor })
    }

    /// Finds the running process that writes to this log: [`start`] started it, possibly in an earlier daemon.
    pub(super) fn of_log(log: &Path) -> Option<Self> {
        let same = |one: &Metadata, other: &Metadata| (one.dev(), one.ino()) == (other.dev(), other.ino());
        let log = std::fs::metadata(log).ok()?;
        let processes = std::fs::read_dir("/proc").ok()?.filter_map(|entry| {
            let id: i32 = entry.ok()?.file_name().to_str()?.parse().ok()?;
            // Other users' processes cannot be examined, and are not the daemon's.
            let says = std::fs::metadata(format!("/proc/{id}/fd/1")).ok()?;
            same(&says, &log).then_some(id)
        });
        // N.B. its output still goes to the log after it was opened, which proves that it is the right process.
        processes.filter_map(|id| Some((id, Self::open(id).ok()?))).find_map(|(id, process)| {
            let says = std::fs::metadata(format!("/proc/{id}/fd/1")).ok()?;
            same(&says, &log).then_some(process)
        })
    }

    pub(super) fn id(&self) -> i32 {
        self.id
    }

    pub(crate) async fn ended(&self) {
        // It becomes readable at the end, and stays so.
        if let Err(error) = self.descriptor.readable().await {
            tracing::warn!(process = self.id, %error, "the end of a process cannot be waited for");
        }
    }

    pub(super) fn kill(&self) {
        if let Err(error) = pidfd_send_signal(self.descriptor.get_ref(), Signal::KILL) {
            tracing::debug!(process = self.id, %error, "a process is not killed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_process_is_known_to_its_end_and_its_last_words_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let shell = |script: &str| ["sh", "-c", script].map(str::to_owned);
        let mut child =
            start(&shell("echo one; echo two >&2; exec cat /dev/zero"), folder.path(), &log).unwrap();
        let process = Process::open(i32::try_from(child.id().unwrap()).unwrap()).unwrap();
        assert_eq!(Process::of_log(&log).unwrap().id(), process.id());
        assert!(Process::of_log(&folder.path().join("none")).is_none());
        process.kill();
        process.ended().await;
        process.ended().await;
        assert!(!child.wait().await.unwrap().success());
        assert!(Process::of_log(&log).is_none(), "it has ended");
        // The number is free, and may be another process's.
        process.kill();
        let mut child = start(&shell("echo one; echo two >&2"), folder.path(), &log).unwrap();
        child.wait().await.unwrap();
        assert_eq!(last_words(&log), "one | two");
        assert!(last_words(&folder.path().join("none")).contains("said nothing"));
    }
}
