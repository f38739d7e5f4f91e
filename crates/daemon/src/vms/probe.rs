//! What this host could run: asked of a QEMU without a machine, and of the kernel.
//!
//! ```text
//!   qemu-system-… -machine none ──► version, types of machines, models of processors ──► ended
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
use super::words::{self, Values};
use crate::config::{QemuUser, RunsAs};
use crate::qemu_sockets;

/// How long a QEMU without a machine may take to start and to answer.
const PROBE_MAX: Duration = Duration::from_secs(20);
/// Where the kernel offers to run guests.
const KVM: &str = "/dev/kvm";
/// How the program ends that changes the user, if it does not find the one that it is to become.
const NOT_FOUND: i32 = 127;
/// Where the kernel tells of memory and processors.
const MEMORY: &str = "/proc/meminfo";
const PROCESSORS: &str = "/proc/cpuinfo";

/// Asks a program what it could make, as whom QEMU runs as here; `folder` is for its monitor's socket.
///
/// # Errors
/// Why it does not answer, in words for people.
pub(super) async fn probe(
    program: &str,
    uses_kvm: bool,
    folder: &Path,
    runs_as: &RunsAs,
) -> Result<Found, String> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let socket = folder.join(format!("probe-{}-{number}.qmp", std::process::id()));
    let cannot = |error: io::Error| format!("{program} cannot be started there: {error}");
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
        // Only one that waits for memory looks whether the kernel lets it run before all of that has come.
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
        format!(
            "there is no {program} there: install QEMU (Debian: qemu-system-x86), or put it on the daemon's path"
        )
    };
    let mut child = child.map_err(|error| match (error.kind(), user) {
        (io::ErrorKind::NotFound, None) => missing(),
        _ => cannot(error),
    })?;
    let asked = async {
        tokio::select! {
            asked = tokio::time::timeout(PROBE_MAX, ask(&socket, has_kvm)) => Ok(asked),
            ended = child.wait() => Err(ended),
        }
    };
    let asked = asked.await;
    // Whatever it has said, it is not needed any more.
    let _ = child.kill().await;
    let _ = std::fs::remove_file(&socket);
    let _ = qemu_sockets::remove_folder(&socket);
    let asked = asked.map_err(|ended| match ended {
        Ok(status) if user.is_some() && status.code() == Some(NOT_FOUND) => missing(),
        Ok(status) => format!("{program} there does not say what it can: it ended ({status})"),
        Err(error) => cannot(error),
    })?;
    match asked {
        Ok(Ok(found)) => Ok(found),
        Ok(Err(error)) => Err(format!("{program} there does not say what it can: {error}")),
        Err(_) => Err(format!("{program} there did not answer within {} s", PROBE_MAX.as_secs())),
    }
}

/// The model of processor that a command asks for; `None`: that of the machine's type.
pub(super) fn processor_model(command: &[String]) -> Option<String> {
    let mut arguments = words::read(command.get(1..).unwrap_or_default()).into_iter().rev();
    let value = arguments.find(|argument| argument.option == "-cpu")?.value?;
    Some(Values::read(&value).driver())
}

/// What this host's processors have, by the kernel's names.
pub(super) fn host_features() -> Vec<String> {
    let told = std::fs::read_to_string(PROCESSORS).unwrap_or_default();
    let line = told.lines().find(|line| line.starts_with("flags") || line.starts_with("Features"));
    let features = line.and_then(|line| line.split_once(':')).map(|(_, features)| features);
    features.unwrap_or_default().split_whitespace().map(str::to_owned).collect()
}

/// The files of this host that a command needs and does not bring along, and that are not there.
pub(super) fn missing_files(command: &[String]) -> Vec<String> {
    let mut missing = Vec::new();
    for argument in words::read(command.get(1..).unwrap_or_default()) {
        let value = argument.value.unwrap_or_default();
        let paths = match argument.option.as_str() {
            "-kernel" | "-initrd" | "-dtb" | "-bios" | "-mem-path" | "-L" | "-cdrom" | "-pflash" => {
                vec![value]
            }
            "-drive" | "-blockdev" => said(&value, &["file", "filename", "file.filename"]),
            "-netdev" | "-nic" | "-net" => said(&value, &["script", "downscript", "helper"]),
            "-object" => said(&value, &["mem-path", "filename", "file", "dir"]),
            "-device" => said(&value, &["romfile"]),
            "-fw_cfg" | "-smbios" | "-acpitable" => said(&value, &["file"]),
            // A socket that it connects to; one that it serves it makes.
            "-chardev" => match Values::read(&value) {
                values if values.driver() == "socket" && !values.is_on("server") => said(&value, &["path"]),
                _ => Vec::new(),
            },
            _ => Vec::new(),
        };
        let absent = paths.into_iter().filter(|path| path.starts_with('/') && !Path::new(path).exists());
        missing.extend(absent.map(|path| format!("{} {path}", argument.option)));
    }
    missing
}

fn said(value: &str, keys: &[&str]) -> Vec<String> {
    let values = Values::read(value);
    keys.iter().filter_map(|key| values.get(key)).collect()
}

/// Whether QEMU may use KVM, as whom it runs as.
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

async fn ask(socket: &Path, has_kvm: bool) -> Result<Found, HypervisorError> {
    if let Err(error) = qemu_sockets::take_out_within(socket, PROBE_MAX).await {
        return Err(QmpError::Connect { socket: socket.to_owned(), source: error }.into());
    }
    let qemu = Qemu::connect_within(socket, PROBE_MAX).await?;
    Ok(Found {
        version: qemu.version().clone(),
        machine_types: qemu.machine_types().await?,
        // Not every architecture has models.
        processors: qemu.processor_models().await.unwrap_or_default(),
        host_features: host_features(),
        memory_bytes: free_memory(),
        has_kvm,
        has_side_streams: qemu.knows_side_streams().await?,
        post_copy_obstacle: qemu.post_copy_obstacle().await?,
    })
}

/// Bytes of memory that can be had; `None`: the kernel does not tell.
fn free_memory() -> Option<u64> {
    let told = std::fs::read_to_string(MEMORY).ok()?;
    let line = told.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1 << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn the_model_of_a_command_is_the_one_that_is_said_last() {
        assert_eq!(
            processor_model(&words("qemu -cpu qemu64 -m 32 -cpu host,+x2apic")),
            Some("host".to_owned())
        );
        assert_eq!(processor_model(&words("qemu -m 32")), None);
    }

    #[test]
    fn files_that_are_not_there_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let there = folder.path().join("kernel");
        std::fs::write(&there, "").unwrap();
        let command = format!(
            "qemu -kernel {} -initrd /no/initrd -netdev tap,id=n,script=/no/up,downscript=no -chardev \
             socket,id=a,path=/no/socket -chardev socket,id=b,path=/no/served,server=on -drive if=pflash,file=/no/code",
            there.display()
        );
        let expected = ["-initrd /no/initrd", "-netdev /no/up", "-chardev /no/socket", "-drive /no/code"];
        assert_eq!(missing_files(&words(&command)), expected);
    }

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
        // Whether this kernel allows it or not, QEMU has said so.
        assert!(
            found.post_copy_obstacle.is_none_or(|obstacle| obstacle.contains("migrate-set-capabilities"))
        );
        assert!(found.memory_bytes.unwrap() > 1 << 20 && !found.host_features.is_empty());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        let missing = probe("qemu-system-none", false, folder.path(), &RunsAs::Daemon).await.unwrap_err();
        assert!(missing.contains("install QEMU"), "{missing}");
    }
}
