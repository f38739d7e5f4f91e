//! The program `virsh` at one libvirt.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::process::Stdio;
use std::time::Duration;

use hypervisor::libvirt::parse_uuid;
use rustix::fs::{MemfdFlags, memfd_create};
use tokio::process::{Child, Command};

use super::error::LibvirtError;
use super::steps::DomainState;

/// The most bytes of virsh's output that are read.
const OUTPUT_MAX: usize = 16 << 20;
/// The longest wait for an answer.
const ANSWER_MAX: Duration = Duration::from_secs(30);
/// The most lines of virsh's output in an error, if none is marked.
const LINES_MAX: usize = 3;

/// One libvirt, by its URI.
#[derive(Debug)]
pub(super) struct Virsh {
    pub(super) uri: String,
}

impl Virsh {
    /// Returns the output of a command.
    pub(super) async fn ask(&self, words: &[&str]) -> Result<String, LibvirtError> {
        let mut command = self.command(words);
        let Ok(output) = tokio::time::timeout(ANSWER_MAX, command.kill_on_drop(true).output()).await else {
            return Err(self.failed(words, format!("no answer within {} s", ANSWER_MAX.as_secs())));
        };
        let output = output.map_err(LibvirtError::NoVirsh)?;
        if output.status.success() {
            let stdout = output.stdout.get(..OUTPUT_MAX.min(output.stdout.len())).unwrap_or_default();
            return Ok(String::from_utf8_lossy(stdout).into_owned());
        }
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        if said.contains("failed to execute virsh") {
            return Err(LibvirtError::NoVirsh(io::Error::from(io::ErrorKind::NotFound)));
        }
        Err(self.failed(words, errors_of(&said)))
    }

    fn failed(&self, words: &[&str], why: String) -> LibvirtError {
        let command = words.first().copied().unwrap_or_default().to_owned();
        LibvirtError::Virsh { uri: self.uri.clone(), command, words: why }
    }

    /// Returns the identity of libvirt's host.
    pub(super) async fn host(&self) -> Result<String, LibvirtError> {
        let capabilities = self.ask(&["capabilities"]).await?;
        let uuid = capabilities.split_once("<uuid>").and_then(|(_, rest)| rest.split_once("</uuid>"));
        Ok(uuid.map(|(uuid, _)| uuid.trim().to_owned()).unwrap_or_default())
    }

    /// Returns the name of a domain.
    pub(super) async fn name(&self, uuid: &str) -> Result<String, LibvirtError> {
        Ok(self.ask(&["domname", uuid]).await?.trim().to_owned())
    }

    /// Returns the UUID of a domain that is named by its name or UUID; `None`: there is none.
    pub(super) async fn uuid(&self, domain: &str) -> Result<Option<String>, LibvirtError> {
        let uuids = self.ask(&["list", "--all", "--uuid"]).await?;
        let wanted = parse_uuid(domain);
        if let Some(uuid) = uuids.lines().find(|line| wanted.is_some() && parse_uuid(line.trim()) == wanted) {
            return Ok(Some(uuid.trim().to_owned()));
        }
        if !has_line(&self.ask(&["list", "--all", "--name"]).await?, domain) {
            return Ok(None);
        }
        let uuid = self.ask(&["domuuid", "--", domain]).await?;
        Ok(Some(uuid.trim().to_owned()).filter(|uuid| parse_uuid(uuid).is_some()))
    }

    /// Returns the state of a domain.
    pub(super) async fn state(&self, uuid: &str) -> Result<DomainState, LibvirtError> {
        if !has_line(&self.ask(&["list", "--all", "--uuid"]).await?, uuid) {
            return Ok(DomainState::Absent);
        }
        match self.ask(&["domstate", uuid]).await?.trim() {
            "running" | "idle" => Ok(DomainState::Running),
            "paused" => Ok(DomainState::Paused),
            "shut off" => Ok(DomainState::Off),
            state => Err(LibvirtError::State {
                domain: uuid.to_owned(),
                state: words::clean(state),
                uri: self.uri.clone(),
            }),
        }
    }

    /// Returns whether a domain stays defined when it is shut off.
    pub(super) async fn is_persistent(&self, uuid: &str) -> Result<bool, LibvirtError> {
        Ok(has_line(&self.ask(&["list", "--all", "--persistent", "--uuid"]).await?, uuid))
    }

    /// Begins a command that does not end with this program: libvirt loses a migration whose virsh ends.
    pub(super) fn begin(&self, words: &[&str]) -> Result<Begun, LibvirtError> {
        let said = memory_file().map_err(LibvirtError::NoVirsh)?;
        let [out, error] = [said.try_clone(), said.try_clone()];
        let mut command = self.command(words);
        command.stdout(Stdio::from(out.map_err(LibvirtError::NoVirsh)?));
        command.stderr(Stdio::from(error.map_err(LibvirtError::NoVirsh)?));
        let child = command.spawn().map_err(LibvirtError::NoVirsh)?;
        Ok(Begun { child, said })
    }

    /// A session of its own: neither Ctrl-C nor the end of the terminal ends it, and ssh fails instead of asking for a password.
    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new("setsid");
        command.args(["virsh", "-c", &self.uri]).args(words).env("LC_ALL", "C").stdin(Stdio::null());
        command
    }
}

/// A command of virsh under way. Its output goes to a file, because a pipe without a reader would end it.
pub(super) struct Begun {
    child: Child,
    said: File,
}

impl Begun {
    /// Waits for its end, and returns whether it has succeeded.
    pub(super) async fn ended(&mut self) -> io::Result<bool> {
        Ok(self.child.wait().await?.success())
    }

    /// Returns the errors that it has printed so far.
    pub(super) fn errors(&self) -> String {
        errors_of(&self.output())
    }

    /// Returns the part of the migration that is done, in percent, as virsh has said it last.
    pub(super) fn percent(&self) -> Option<String> {
        let output = self.output();
        let last = output.rsplit_once('[')?.1;
        let percent = last.split_once('%')?.0.trim();
        percent.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.').then(|| percent.to_owned())
    }

    fn output(&self) -> String {
        let mut bytes = vec![0; 64 << 10];
        let from = self.said.metadata().map_or(0, |metadata| metadata.len().saturating_sub(64 << 10));
        let length = self.said.read_at(&mut bytes, from).unwrap_or_default();
        String::from_utf8_lossy(bytes.get(..length).unwrap_or_default()).into_owned()
    }
}

/// A text as a file that virsh can open by a path while this lives.
pub(super) struct TextFile(File);

impl TextFile {
    pub(super) fn of(text: &str) -> io::Result<Self> {
        let file = memory_file()?;
        file.write_all_at(text.as_bytes(), 0)?;
        Ok(Self(file))
    }

    pub(super) fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }
}

fn memory_file() -> io::Result<File> {
    Ok(File::from(memfd_create("sterna-virsh", MemfdFlags::CLOEXEC)?))
}

fn has_line(lines: &str, wanted: &str) -> bool {
    lines.lines().any(|line| line.trim() == wanted)
}

/// Returns the errors in virsh's output in one line. An error may stand behind the progress in the same line.
fn errors_of(output: &str) -> String {
    let marked = output.split(['\n', '\r']).filter_map(|line| Some(line.split_once("error: ")?.1.trim()));
    let errors: Vec<_> = marked.map(words::clean).collect();
    if errors.is_empty() { words::clean_lines(output, LINES_MAX) } else { words::clean(&errors.join(": ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_the_lines_that_virsh_marks() {
        let output = "Migration: [ 12 %]\rerror: failed to connect\n\nerror: end of file\x1b[2J\n";
        assert!(errors_of(output).starts_with("failed to connect: end of file"));
        assert!(!errors_of(output).contains('\x1b'));
        assert_eq!(errors_of("Permission denied"), "Permission denied");
        assert_eq!(errors_of("\rMigration: [ 30 %]error: gone\n"), "gone");
    }
}
