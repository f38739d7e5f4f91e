//! What this host can run: asked of a QEMU without a VM, and of the kernel.
//!
//! ```text
//!   qemu-system-… -machine none ──► version, types of VMs, models of processors ──► ended
//! ```

use std::io;
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hypervisor::HypervisorError;
use hypervisor::qemu::{Qemu, QmpError};
use tokio::process::Command;

use super::needs::Found;
use crate::config::{QemuUser, RunsAs};
use crate::vms::qemu_sockets;

/// How long a QEMU without a VM may take to start and to answer. A client may wait for two of them.
const PROBE_TIMEOUT: Duration = Duration::from_secs(12);
const KVM: &str = "/dev/kvm";
/// The exit code of the program that changes the user, if it does not find the program to execute.
const NOT_FOUND: i32 = 127;
/// The kernel's files about memory and processors.
const MEMORY: &str = "/proc/meminfo";
const PROCESSORS: &str = "/proc/cpuinfo";

/// Why a program has not answered, as part of a message.
enum Unsaid {
    /// It runs, and does not answer. Another process may.
    Silent(String),
    NotRun(String),
}

/// Asks a QEMU what it can run, as the user that QEMU runs as here; `folder` is for its monitor's socket. If it does not answer
/// on a busy host, asks a second process. The error says why there is no answer.
pub(super) async fn probe(
    program: &str,
    uses_kvm: bool,
    folder: &Path,
    runs_as: &RunsAs,
) -> Result<Found, String> {
    probe_twice((program, uses_kvm), folder, runs_as, PROBE_TIMEOUT).await
}

async fn probe_twice(
    program: (&str, bool),
    folder: &Path,
    runs_as: &RunsAs,
    limit: Duration,
) -> Result<Found, String> {
    match probe_once(program, folder, runs_as, limit).await {
        Ok(found) => return Ok(found),
        Err(Unsaid::NotRun(reason)) => return Err(reason),
        Err(Unsaid::Silent(reason)) => tracing::warn!(reason, "it is asked once more"),
    }
    let again = probe_once(program, folder, runs_as, limit).await;
    again.map_err(|(Unsaid::Silent(reason) | Unsaid::NotRun(reason))| reason)
}

async fn probe_once(
    (program, uses_kvm): (&str, bool),
    folder: &Path,
    runs_as: &RunsAs,
    limit: Duration,
) -> Result<Found, Unsaid> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let socket = folder.join(format!("probe-{}-{number}.qmp", std::process::id()));
    let cannot = |error: io::Error| Unsaid::NotRun(format!("{program} cannot be started there: {error}"));
    let user = match runs_as {
        RunsAs::Other(user) => Some(user),
        RunsAs::Daemon | RunsAs::Root => None,
    };
    if let Some(user) = user {
        qemu_sockets::make_folder(&socket, user.user, user.group).map_err(cannot)?;
    }
    let has_kvm = has_kvm(user).await;
    let accelerator = if uses_kvm && has_kvm { "kvm" } else { "tcg" };
    let monitor = format!("unix:{},server=on,wait=off", qemu_sockets::place(&socket).display());
    let words = [
        program,
        "-machine",
        "none",
        "-accel",
        accelerator,
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-S",
        // QEMU checks the kernel's support of post-copy only if it waits for memory.
        "-incoming",
        "defer",
        "-qmp",
        &monitor,
    ];
    let child = command(user, &words)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn();
    let missing = || {
        Unsaid::NotRun(format!(
            "there is no {program} there: install QEMU (Debian: qemu-system-x86), or put it on the daemon's path"
        ))
    };
    let mut child = child.map_err(|error| match (error.kind(), user) {
        (io::ErrorKind::NotFound, None) => missing(),
        _ => cannot(error),
    })?;
    let asked = async {
        tokio::select! {
            asked = tokio::time::timeout(limit, ask(&socket, has_kvm, limit)) => Ok(asked),
            ended = child.wait() => Err(ended),
        }
    };
    let asked = asked.await;
    // Whatever it has answered, it is not needed after this.
    let _ = child.kill().await;
    let _ = std::fs::remove_file(&socket);
    let _ = qemu_sockets::remove_folder(&socket);
    let asked = asked.map_err(|ended| match ended {
        Ok(status) if user.is_some() && status.code() == Some(NOT_FOUND) => missing(),
        Ok(status) => {
            Unsaid::NotRun(format!("{program} there does not report its features: it ended ({status})"))
        }
        Err(error) => cannot(error),
    })?;
    match asked {
        Ok(Ok(found)) => Ok(found),
        Ok(Err(error)) => {
            Err(Unsaid::Silent(format!("{program} there does not report its features: {error}")))
        }
        Err(_) => {
            let seconds = limit.as_secs();
            Err(Unsaid::Silent(format!("{program} there did not answer within {seconds} s")))
        }
    }
}

/// Returns the features of this host's processors, by the kernel's names.
pub(super) fn host_features() -> Vec<String> {
    let told = std::fs::read_to_string(PROCESSORS).unwrap_or_default();
    let line = told.lines().find(|line| line.starts_with("flags") || line.starts_with("Features"));
    let features = line.and_then(|line| line.split_once(':')).map(|(_, features)| features);
    features.unwrap_or_default().split_whitespace().map(str::to_owned).collect()
}

async fn has_kvm(user: Option<&QemuUser>) -> bool {
    let Some(user) = user else {
        return std::fs::File::options().read(true).write(true).open(KVM).is_ok();
    };
    let tested = command(Some(user), &["test", "-w", KVM]).stderr(Stdio::null()).kill_on_drop(true).status();
    tested.await.is_ok_and(|status| status.success())
}

fn command(user: Option<&QemuUser>, words: &[&str]) -> Command {
    let words = words.iter().copied().map(str::to_owned).collect();
    let words = user.map_or_else(|| Vec::clone(&words), |user| user.command(words.clone()));
    let (program, arguments) = words.split_first().map_or(("", [].as_slice()), |(first, rest)| (first, rest));
    let mut command = Command::new(program);
    command.args(arguments);
    command
}

async fn ask(socket: &Path, has_kvm: bool, limit: Duration) -> Result<Found, HypervisorError> {
    if let Err(error) = qemu_sockets::take_out_within(socket, limit).await {
        return Err(QmpError::Connect { socket: socket.to_owned(), source: error }.into());
    }
    let qemu = Qemu::connect_within(socket, limit).await?;
    Ok(Found {
        version: qemu.version().clone(),
        machine_types: qemu.machine_types().await?,
        // Some architectures have no models.
        processors: qemu.processor_models().await.unwrap_or_default(),
        host_features: host_features(),
        memory_bytes: free_memory(),
        has_kvm,
        has_side_streams: qemu.knows_side_streams().await?,
        post_copy_obstacle: qemu.post_copy_obstacle().await?,
    })
}

/// Returns the available memory in bytes; `None`: the kernel does not say.
fn free_memory() -> Option<u64> {
    let told = std::fs::read_to_string(MEMORY).ok()?;
    let line = told.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1 << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_host_tells_what_it_could_run() {
        const QEMU: &str = "qemu-system-x86_64";
        if std::process::Command::new(QEMU).arg("--version").output().is_err() {
            return omission::machine_lacks(QEMU);
        }
        let folder = tempfile::tempdir().unwrap();
        let found = probe(QEMU, false, folder.path(), &RunsAs::Daemon).await.unwrap();
        assert!(found.machine_types.iter().any(|known| known.alias.as_deref() == Some("pc")), "{found:?}");
        assert!(found.processors.iter().any(|model| model.name == "qemu64"));
        assert!(found.has_side_streams, "QEMU has it since 4.0");
        // QEMU has answered, whether this kernel allows it or not.
        assert!(
            found.post_copy_obstacle.is_none_or(|obstacle| obstacle.contains("migrate-set-capabilities"))
        );
        assert!(found.memory_bytes.unwrap() > 1 << 20 && !found.host_features.is_empty());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        let missing = probe("qemu-system-none", false, folder.path(), &RunsAs::Daemon).await.unwrap_err();
        assert!(missing.contains("install QEMU"), "{missing}");
    }
    #[tokio::test]
    async fn a_program_that_falls_silent_is_asked_once_more() {
        use std::os::unix::fs::PermissionsExt as _;

        const QEMU: &str = "qemu-system-x86_64";
        if std::process::Command::new(QEMU).arg("--version").output().is_err() {
            return omission::machine_lacks(QEMU);
        }
        let folder = tempfile::tempdir().unwrap();
        let (program, silent) = (folder.path().join("qemu"), folder.path().join("silent"));
        let text = format!(
            "#!/bin/sh\n[ -e {0} ] && rm {0} && exec sleep 600\nexec {QEMU} \"$@\"\n",
            silent.display()
        );
        std::fs::write(&program, text).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        std::fs::write(&silent, "").unwrap();
        let (name, limit) = (program.to_str().unwrap(), Duration::from_secs(6));
        let found = probe_twice((name, false), folder.path(), &RunsAs::Daemon, limit).await.unwrap();
        assert!(!silent.exists() && !found.machine_types.is_empty());
    }
}
