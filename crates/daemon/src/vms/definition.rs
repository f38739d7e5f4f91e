//! The definition of a VM: the command that starts it, with placeholders for what differs between hosts.
//!
//! ```toml
//! command = ["qemu-system-x86_64", "-m", "2048", "-qmp", "unix:{qmp},server=on,wait=off",
//!     "-blockdev", "driver=nbd,node-name=root,server.type=unix,server.path={disk:root},export={export:root},reconnect-delay=60",
//!     "-device", "virtio-blk-pci,drive=root"]
//!
//! [disks]
//! root = "web1-root"                # a volume
//!
//! [files]                           # small files that go with the VM: UEFI variables, a cloud-init image
//! vars = "/var/lib/machines/web1.vars"
//! ```
//!
//! A definition is checked when it is added, so that obstacles to a move are known early.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use hypervisor::qemu::RECONNECT_SECONDS;
use hypervisor::qemu::command_line::apart::{self, Apart, Networks};
use hypervisor::qemu::command_line::movable::{self, Obstacles};
use hypervisor::qemu::command_line::understood::{Allowed, Understood};
use hypervisor::qemu::command_line::{Template, Values, Variable};
use serde::{Deserialize, Serialize};

use super::{VmError, own_sockets};
use crate::names;

/// The longest definition in bytes: a request with one must fit into the API's limit.
pub(super) const DEFINITION_BYTES_MAX: usize = 48 << 10;
/// The longest command in words; QEMU's longest have a few hundred.
const WORDS_MAX: usize = 2000;
/// The number of disks, and of files, of one VM.
const THINGS_MAX: usize = 64;

/// What this host derives from another host's definition, beside the definition itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Received {
    /// The properties of the VM that change at this host, for messages.
    pub(super) changed: Vec<String>,
    /// The memory that the VM can take of this host.
    pub(super) memory_bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Definition {
    text: String,
    command: Vec<Template>,
    /// Volumes by placeholder name.
    disks: BTreeMap<String, String>,
    /// Files by placeholder name, with their paths at the host where the VM was added.
    files: BTreeMap<String, PathBuf>,
    /// The folder of the TPM's initial state, at the host where the VM was added.
    tpm_state: Option<PathBuf>,
}

/// Why a definition is invalid, or why its VM cannot move.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DefinitionError {
    /// The text is not TOML, or has unknown keys.
    #[error("it cannot be read: {0}")]
    Toml(Box<toml::de::Error>),
    #[error("{0}")]
    Bounds(String),
    #[error(
        "there is no placeholder {place}; there are {{qmp}}, {{name}}, {{tpm}}, {{path:NAME}}, and {{disk:NAME}}, \
         {{export:NAME}} and {{file:NAME}} with the names in [disks] and [files]"
    )]
    UnknownPlace { place: String },
    #[error("[{section}] has {name}, but no word of the command has {{{kind}:{name}}}")]
    Unused { section: &'static str, kind: &'static str, name: String },
    #[error(
        "there is [tpm], but no word of the command has {{tpm}}: add \"-chardev\", \"socket,id=tpm,path={{tpm}}\", \"-tpmdev\", \
         \"emulator,id=tpm0,chardev=tpm\", \"-device\", \"tpm-crb,tpmdev=tpm0\""
    )]
    UnusedTpm,
    /// QEMU could not be controlled.
    #[error("no word of the command has {{qmp}}: add \"-qmp\", \"unix:{{qmp}},server=on,wait=off\"")]
    NoMonitor,
    /// The guest would see errors when the daemon is restarted.
    #[error(
        "the disk {name} has no reconnect-delay: add reconnect-delay=60 to its word, so that a restart of the daemon only pauses \
         the VM"
    )]
    NoReconnect { name: String },
    #[error("the file {name} must have an absolute path")]
    RelativePath { name: String },
    #[error(transparent)]
    Unmovable(#[from] Obstacles),
    #[error(transparent)]
    Shared(#[from] apart::Shared),
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Written {
    command: Vec<String>,
    #[serde(default)]
    disks: BTreeMap<String, String>,
    #[serde(default)]
    files: BTreeMap<String, PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tpm: Option<WrittenTpm>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct WrittenTpm {
    state: Option<PathBuf>,
}

impl Definition {
    pub(crate) fn parse(text: &str) -> Result<Self, DefinitionError> {
        let bounds = |what: &str| Err(DefinitionError::Bounds(what.to_owned()));
        if text.len() > DEFINITION_BYTES_MAX {
            return bounds("it is larger than 48 KiB");
        }
        let written: Written =
            toml::from_str(text).map_err(|error| DefinitionError::Toml(Box::new(error)))?;
        let Written { command, disks, files, tpm } = written;
        if command.first().is_none_or(String::is_empty) {
            return bounds("command must begin with the program, such as \"qemu-system-x86_64\"");
        }
        if command.len() > WORDS_MAX || disks.len() > THINGS_MAX || files.len() > THINGS_MAX {
            return bounds("it has more than 2000 words, 64 disks or 64 files");
        }
        if command.iter().any(|word| word.contains('\0')) {
            return bounds("a word of the command contains a zero byte");
        }
        for name in disks.keys().chain(files.keys()) {
            names::check(name)
                .map_err(|reason| DefinitionError::Bounds(format!("{name:?} is no name: {reason}")))?;
        }
        if let Some(name) = files.iter().find_map(|(name, path)| path.is_relative().then_some(name)) {
            return Err(DefinitionError::RelativePath { name: name.clone() });
        }
        let is_described = tpm.is_some();
        let tpm_state = tpm.and_then(|tpm| tpm.state);
        if tpm_state.as_ref().is_some_and(|path| path.is_relative()) {
            return Err(DefinitionError::RelativePath { name: "state of [tpm]".to_owned() });
        }
        movable::check(&command)?;
        let command = command.iter().map(|word| Template::parse(word)).collect();
        let definition = Self { text: text.to_owned(), command, disks, files, tpm_state };
        definition.check_places()?;
        if is_described && !definition.has_tpm() {
            return Err(DefinitionError::UnusedTpm);
        }
        Ok(definition)
    }

    /// Reads a definition from another host, and writes the command anew from what was parsed. Also returns what of the VM
    /// changes at this host. **N.B.** Every definition of another host comes in by this function, before anything of this host is
    /// read. Fails if the definition is invalid or names something forbidden.
    pub(super) fn of_peer(text: &str, allowed: Allowed<'_>) -> Result<(Self, Received), VmError> {
        let received = Self::parse(text)?;
        let understood = Understood::read(&received.command_with_places(), allowed)?;
        // The initial state of a TPM is of use only to the host that added the VM.
        let (disks, files) = (received.disks, received.files);
        let written = Written { command: understood.write(), disks, files, tpm: None };
        let text = toml::to_string(&written)
            .map_err(|error| DefinitionError::Bounds(format!("it cannot be rewritten: {error}")))?;
        let received =
            Received { changed: understood.warnings().to_vec(), memory_bytes: understood.memory_bytes() };
        Ok((Self::parse(&text)?, received))
    }

    /// Returns everything that keeps a definition of another host from coming in; empty if [`Self::of_peer`] accepts it.
    pub(super) fn refusals_of_peer(text: &str, allowed: Allowed<'_>) -> Vec<String> {
        match Self::parse(text) {
            Ok(received) => {
                let refusals = Understood::refusals(&received.command_with_places(), allowed);
                refusals.iter().map(ToString::to_string).collect()
            }
            Err(error) => vec![error.to_string()],
        }
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Returns the names of its volumes, each once.
    pub(crate) fn volumes(&self) -> Vec<String> {
        let mut volumes: Vec<String> = self.disks.values().cloned().collect();
        volumes.sort();
        volumes.dedup();
        volumes
    }

    /// Returns the files that move with it, by placeholder name.
    pub(super) fn files(&self) -> &BTreeMap<String, PathBuf> {
        &self.files
    }

    /// Returns the names of the paths at which its QEMU listens.
    pub(super) fn own_sockets(&self) -> Vec<String> {
        let is_socket = |word: &&Template| own_sockets::is_socket(&word.fill(|_| String::new()));
        let places = self.command.iter().filter(is_socket).flat_map(Template::variables);
        places.filter(|place| place.kind == "path").map(|place| place.name.clone()).collect()
    }

    /// Returns the names of the paths at which its QEMU may write logs: those at which it does not listen.
    pub(super) fn logs(&self) -> Vec<String> {
        let sockets = self.own_sockets();
        let places = self.command.iter().flat_map(Template::variables);
        let logs = places.filter(|place| place.kind == "path" && !sockets.contains(&place.name));
        let mut logs: Vec<String> = logs.map(|place| place.name.clone()).collect();
        logs.sort();
        logs.dedup();
        logs
    }

    pub(super) fn has_tpm(&self) -> bool {
        self.command.iter().flat_map(Template::variables).any(|place| place.kind == "tpm")
    }

    /// Returns the folder of its TPM's initial state, at the host where the VM was added; `None`: the TPM begins empty.
    pub(super) fn tpm_state(&self) -> Option<&Path> {
        self.tpm_state.as_deref()
    }

    /// Returns the words of the command, with the sockets of its monitor and of its TPM.
    pub(super) fn command(
        &self,
        vm: &str,
        (monitor, tpm): (&Path, &Path),
        socket: impl Fn(&str) -> PathBuf,
        file: impl Fn(&str) -> PathBuf,
        own_path: impl Fn(&str) -> PathBuf,
    ) -> Vec<String> {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let volume = |name: &str| self.disks.get(name).cloned().unwrap_or_default();
        let value = |place: &Variable| match place.kind.as_str() {
            "qmp" => text(monitor),
            "tpm" => text(tpm),
            "name" => vm.to_owned(),
            "disk" => text(&socket(&volume(&place.name))),
            "export" => volume(&place.name),
            "path" => text(&own_path(&place.name)),
            // Every other placeholder was refused.
            _ => text(&file(&place.name)),
        };
        self.command.iter().map(|word| word.fill(value)).collect()
    }

    /// Returns the command with relative paths in place of all that differs between hosts.
    pub(super) fn command_anywhere(&self) -> Vec<String> {
        let sockets = (Path::new("monitor"), Path::new("tpm"));
        self.command("", sockets, |volume| volume.into(), |file| file.into(), |path| path.into())
    }

    /// Returns the definition of a second instance, which reaches nothing outside unless `networks` says so, and the names of the
    /// logs of its consoles. Its volumes have the names that `volumes` has for these.
    pub(super) fn apart(
        &self,
        volumes: &BTreeMap<String, String>,
        networks: Networks,
    ) -> Result<(Self, Vec<String>), DefinitionError> {
        let Apart { command, consoles } = apart::apart(&self.command_with_places(), networks)?;
        Ok((self.with(command, volumes)?, consoles))
    }

    /// Returns the definition with volumes of other names: those that `volumes` has for theirs.
    pub(super) fn renamed(&self, volumes: &BTreeMap<String, String>) -> Result<Self, DefinitionError> {
        self.with(self.command_with_places(), volumes)
    }

    /// Returns the definition with other words, and with other names of volumes.
    fn with(
        &self,
        command: Vec<String>,
        volumes: &BTreeMap<String, String>,
    ) -> Result<Self, DefinitionError> {
        let named = |(place, volume): (&String, &String)| {
            (place.clone(), volumes.get(volume).unwrap_or(volume).clone())
        };
        let disks = self.disks.iter().map(named).collect();
        let written = Written { command, disks, files: self.files.clone(), tpm: None };
        let text = toml::to_string(&written)
            .map_err(|error| DefinitionError::Bounds(format!("it cannot be rewritten: {error}")))?;
        Self::parse(&text)
    }

    pub(super) fn command_with_places(&self) -> Vec<String> {
        self.command.iter().map(|word| word.fill(ToString::to_string)).collect()
    }

    /// Returns the disks whose requests do not wait long enough for a daemon that is away for 45 s, with
    /// the seconds that they wait.
    pub(crate) fn short_waits(&self) -> Vec<(String, u32)> {
        let mut found = Vec::new();
        for word in &self.command {
            let Some(disk) = word.variables().find(|place| place.kind == "disk") else { continue };
            let text = word.fill(|_| String::new());
            let said =
                Values::read(&text).pairs().into_iter().find(|(key, _)| key.ends_with("reconnect-delay"));
            let seconds = said.and_then(|(_, seconds)| seconds.parse().ok());
            found.extend(
                seconds
                    .filter(|seconds| *seconds < RECONNECT_SECONDS)
                    .map(|seconds| (disk.name.clone(), seconds)),
            );
        }
        found
    }

    fn check_places(&self) -> Result<(), DefinitionError> {
        let places = || self.command.iter().flat_map(Template::variables);
        for place in places() {
            let is_known = match (place.kind.as_str(), place.name.as_str()) {
                ("qmp" | "name" | "tpm", "") => true,
                ("disk" | "export", name) => self.disks.contains_key(name),
                ("file", name) => self.files.contains_key(name),
                ("path", name) => names::check(name).is_ok(),
                _ => false,
            };
            if !is_known {
                return Err(DefinitionError::UnknownPlace { place: place.to_string() });
            }
        }
        let has = |kind: &str, name: &str| places().any(|place| place.kind == kind && place.name == name);
        if !has("qmp", "") {
            return Err(DefinitionError::NoMonitor);
        }
        let unused =
            |section, kind, name: &String| DefinitionError::Unused { section, kind, name: name.clone() };
        if let Some(name) = self.disks.keys().find(|name| !has("disk", name)) {
            return Err(unused("disks", "disk", name));
        }
        if let Some(name) = self.files.keys().find(|name| !has("file", name)) {
            return Err(unused("files", "file", name));
        }
        for word in &self.command {
            let reconnects = word.fill(|_| String::new()).contains("reconnect-delay");
            if let Some(place) = word.variables().find(|place| place.kind == "disk" && !reconnects) {
                return Err(DefinitionError::NoReconnect { name: place.name.clone() });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
        command = ["qemu-system-x86_64", "-name", "{name}", "-qmp", "unix:{qmp},server=on,wait=off",
            "-blockdev", "driver=nbd,server.path={disk:root},export={export:root},reconnect-delay=60",
            "-drive", "if=pflash,format=raw,file={file:vars}", "-serial", "unix:{path:serial},server=on,wait=off",
            "-chardev", "socket,id=t,path={tpm}", "-tpmdev", "emulator,id=tpm0,chardev=t"]
        [disks]
        root = "web1-root"
        [files]
        vars = "/srv/web1.vars"
        [tpm]
        state = "/srv/web1.tpm"
    "#;

    #[test]
    fn a_definition_becomes_a_command() {
        let definition = Definition::parse(GOOD).unwrap();
        let command = definition.command(
            "web1",
            (Path::new("/run/web1.qmp"), Path::new("/run/web1.tpm")),
            |volume| format!("/run/{volume}.sock").into(),
            |file| format!("/data/{file}").into(),
            |name| format!("/own/{name}").into(),
        );
        let expected = [
            "qemu-system-x86_64",
            "-name",
            "web1",
            "-qmp",
            "unix:/run/web1.qmp,server=on,wait=off",
            "-blockdev",
            "driver=nbd,server.path=/run/web1-root.sock,export=web1-root,reconnect-delay=60",
            "-drive",
            "if=pflash,format=raw,file=/data/vars",
            "-serial",
            "unix:/own/serial,server=on,wait=off",
            "-chardev",
            "socket,id=t,path=/run/web1.tpm",
            "-tpmdev",
            "emulator,id=tpm0,chardev=t",
        ];
        assert_eq!(command, expected);
        assert_eq!(definition.volumes(), ["web1-root"]);
        assert_eq!(definition.text(), GOOD);
        assert!(definition.has_tpm() && definition.tpm_state() == Some(Path::new("/srv/web1.tpm")));
    }

    #[test]
    fn a_second_instance_has_other_volumes_and_a_console_in_its_folder() {
        let definition = Definition::parse(GOOD).unwrap();
        let names = BTreeMap::from([("web1-root".to_owned(), "try".to_owned())]);
        let (second, consoles) = definition.apart(&names, Networks::Apart).unwrap();
        assert_eq!(
            (second.volumes(), consoles.as_slice()),
            (vec!["try".to_owned()], &["test-console-0".to_owned()][..])
        );
        assert!(second.has_tpm() && second.tpm_state().is_none() && second.files() == definition.files());
        let command = second.command_with_places().join(" ");
        assert!(command.contains("-serial file:{path:test-console-0}"), "{command}");
        let renamed = definition.renamed(&names).unwrap();
        assert_eq!(renamed.volumes(), ["try"]);
        assert_eq!(renamed.command_with_places(), definition.command_with_places());
        assert_eq!(definition.renamed(&BTreeMap::new()).unwrap().volumes(), ["web1-root"]);
    }

    #[test]
    fn what_cannot_be_meant_is_refused_by_name() {
        for (from, to, expected) in [
            ("{disk:root}", "{disk:rot}", "there is no placeholder {disk:rot}"),
            ("{name}", "{nmae}", "there is no placeholder {nmae}"),
            ("{path:serial}", "{path:.}", "there is no placeholder {path:.}"),
            ("unix:{qmp}", "unix:/q", "no word of the command has {qmp}"),
            ("{file:vars}", "{file:vars},readonly=on\", \"{nothing}", "there is no placeholder {nothing}"),
            ("server.path={disk:root},", "", "[disks] has root"),
            (",reconnect-delay=60", "", "the disk root has no reconnect-delay"),
            ("/srv/web1.vars", "web1.vars", "absolute"),
            ("[files]", "[flies]", "cannot be read"),
            ("vars = ", "\"../vars\" = ", "is no name"),
            ("/srv/web1.tpm", "web1.tpm", "absolute"),
            ("emulator,id=tpm0", "passthrough,id=tpm0", "a chip of this host"),
            ("path={tpm}", "path=/run/swtpm", "that Sterna did not start"),
            (
                "\"-chardev\", \"socket,id=t,path={tpm}\", \"-tpmdev\", \"emulator,id=tpm0,chardev=t\"",
                "",
                "there is [tpm], but",
            ),
        ] {
            let text = GOOD.replacen(from, to, 1);
            assert_ne!(text, GOOD);
            let error = Definition::parse(&text).unwrap_err().to_string();
            assert!(error.contains(expected), "{to}: {error}");
        }
        assert!(Definition::parse("command = []").is_err());
        assert!(Definition::parse(&" ".repeat(DEFINITION_BYTES_MAX + 1)).is_err());
    }

    #[test]
    fn a_disk_that_waits_too_short_a_time_is_named() {
        let shorter = GOOD.replace("reconnect-delay=60", "reconnect-delay=30");
        assert_eq!(Definition::parse(GOOD).unwrap().short_waits(), []);
        assert_eq!(Definition::parse(&shorter).unwrap().short_waits(), [("root".to_owned(), 30)]);
    }

    #[test]
    fn a_definition_of_another_host_is_written_anew() {
        let good = GOOD
            .replace("driver=nbd,", "driver=nbd,node-name=root,server.type=unix,")
            .replace("server=on,wait=off", "server,nowait");
        let (definition, received) = Definition::of_peer(&good, Allowed::default()).unwrap();
        let warnings = received.changed;
        let command = definition.command_with_places().join(" ");
        assert!(
            command.contains("-qmp unix:{qmp},server=on,wait=off -blockdev nbd,node-name=root,"),
            "{command}"
        );
        assert!(
            command.contains("-drive if=pflash,format=raw,file={file:vars}") && !command.contains("nowait")
        );
        assert!(warnings[0].contains("-net user"), "QEMU would make one: {warnings:?}");
        assert_eq!((definition.volumes(), definition.tpm_state()), (vec!["web1-root".to_owned()], None));
        let again = Definition::of_peer(definition.text(), Allowed::default()).unwrap();
        assert_eq!((again.0, again.1.changed.len()), (definition, 0));
        for (from, to) in [
            ("qemu-system-x86_64", "/usr/bin/qemu-system-x86_64"),
            ("{file:vars}", "{file:vars},format=qcow2"),
            ("export={export:root}", "export=other"),
            ("unix:{qmp}", "unix:{qmp},path=/x"),
        ] {
            let other = good.replacen(from, to, 1);
            assert_ne!(other, good);
            assert!(Definition::of_peer(&other, Allowed::default()).is_err(), "{to}");
        }
    }
}
