//! What a VM needs of a host, and which of these needs a host does not meet.
//!
//! ```text
//!   source: its running QEMU ──► Needs ──► description ──► target: Found, of a QEMU without a VM ──► faults, each with what to do
//! ```
//! The check precedes the first copied byte.

use api::MEMORY_STREAMS_MAX;
use hypervisor::qemu::command_line::files;
use hypervisor::qemu::{MachineType, ProcessorModel, Qemu, Version};
use serde::{Deserialize, Serialize};

use super::probe;
use super::same_files::Fingerprint;
use crate::vms::moving::Terms;

/// Processor models that mean the features of the host.
const OF_HOST: [&str; 2] = ["host", "max"];
/// How many missing features a message names.
const FEATURES_TOLD_MAX: usize = 8;
/// How many machine types a message names.
const TYPES_TOLD_MAX: usize = 6;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Needs {
    /// The version of QEMU that runs it: major, minor.
    pub(super) version: Option<(u64, u64)>,
    /// The full name of its machine type.
    pub(super) machine_type: Option<String>,
    pub(super) memory_bytes: Option<u64>,
    /// Its processor model, and which features of it the source lacks too.
    pub(super) processor: Option<Processor>,
    /// The processor features of the source, by the kernel's names; only if the guest has seen all of them.
    pub(super) host_features: Vec<String>,
    pub(super) kvm: bool,
    /// The version of swtpm that keeps its TPM: major, minor.
    pub(super) tpm: Option<(u64, u64)>,
    /// The allocated bytes of its volumes, by name.
    pub(crate) volumes: Vec<(String, u64)>,
    /// The files of the source that its command names and that do not move along.
    pub(super) files: Vec<Fingerprint>,
    /// Whether only these files are to be checked, because everything else is checked with the offer.
    pub(super) only_files: bool,
    /// Whether it is to run at the target before all of its memory has come. Set only for a preflight check, where
    /// the terms are not sent.
    pub(super) post_copy: bool,
    /// Whether it is stopped, and stays so at the target: what its start needs at the moment is not checked.
    pub(super) is_cold: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Processor {
    pub(super) model: String,
    pub(super) unavailable: Vec<String>,
}

#[derive(Clone, Debug)]
pub(super) struct Found {
    pub(super) version: Version,
    pub(super) machine_types: Vec<MachineType>,
    /// Empty: this QEMU does not report them.
    pub(super) processors: Vec<ProcessorModel>,
    pub(super) host_features: Vec<String>,
    pub(super) memory_bytes: Option<u64>,
    pub(super) has_kvm: bool,
    /// Whether its QEMU receives memory over several streams.
    pub(super) has_side_streams: bool,
    /// Why its QEMU cannot run a VM before all of its memory is there; `None`: it can.
    pub(super) post_copy_obstacle: Option<String>,
}

impl Found {
    /// Returns on which of the requested terms memory can come. The error says what is missing, and what to do.
    pub(super) fn agree(&self, wished: Terms) -> Result<Terms, String> {
        if let (true, Some(obstacle)) = (wished.post_copy, &self.post_copy_obstacle) {
            return Err(format!(
                "its memory cannot come by post-copy: {obstacle}; let QEMU there use userfaultfd (sysctl \
                 vm.unprivileged_userfaultfd=1, or a daemon that runs as root), or leave --memory post-copy out"
            ));
        }
        let side_streams =
            if self.has_side_streams { wished.side_streams.min(MEMORY_STREAMS_MAX) } else { 0 };
        Ok(Terms { side_streams, post_copy: wished.post_copy })
    }
}

impl Needs {
    /// Returns the needs of a running VM that was started by this command, and what its volumes hold. Leaves out what QEMU does
    /// not report, and the TPM, of which QEMU knows nothing.
    pub(super) async fn of(qemu: &Qemu, command: &[String], volumes: Vec<(String, u64)>) -> Self {
        let kvm = qemu.uses_kvm().await.unwrap_or(false);
        let model = files::processor_model(command);
        let is_of_host = model.as_deref().is_some_and(|model| OF_HOST.contains(&model));
        let processor = match model {
            Some(model) if !is_of_host => {
                let known = qemu.processor_models().await.unwrap_or_default();
                let known = known.into_iter().find(|known| known.name == model);
                Some(Processor {
                    unavailable: known.map(|known| known.unavailable).unwrap_or_default(),
                    model,
                })
            }
            _ => None,
        };
        Self {
            version: Some((qemu.version().major, qemu.version().minor)),
            machine_type: qemu.machine_type().await.ok(),
            memory_bytes: qemu.memory_bytes().await.ok(),
            processor,
            host_features: if is_of_host && kvm { probe::host_features() } else { Vec::new() },
            kvm,
            tpm: None,
            volumes,
            files: Vec::new(),
            only_files: false,
            post_copy: false,
            is_cold: false,
        }
    }

    /// Returns the needs of a stopped VM with this command, without its TPM.
    pub(super) fn of_command(command: &[String], volumes: Vec<(String, u64)>) -> Self {
        let model = files::processor_model(command).filter(|model| !OF_HOST.contains(&model.as_str()));
        Self {
            machine_type: files::machine_type(command),
            processor: model.map(|model| Processor { model, unavailable: Vec::new() }),
            kvm: files::needs_kvm(command),
            volumes,
            is_cold: true,
            ..Self::default()
        }
    }

    /// The same, of a command that can take this much memory: backends, screens and buffers are not in what the other host says.
    pub(super) fn with_command(self, memory_bytes: u64) -> Self {
        Self { memory_bytes: Some(self.memory_bytes.unwrap_or(0).max(memory_bytes)), ..self }
    }

    /// Returns what is missing, in sentences that say what to do.
    pub(super) fn faults(&self, found: &Found) -> Vec<String> {
        let faults = [
            self.version(found),
            self.machine_type(found),
            self.processor(found),
            self.host_features(found),
            self.kvm(found),
            self.memory(found),
        ];
        faults.into_iter().flatten().collect()
    }

    fn version(&self, found: &Found) -> Option<String> {
        let (major, minor) = self.version?;
        ((found.version.major, found.version.minor) < (major, minor)).then(|| {
            format!(
                "QEMU there is {}, older than the {major}.{minor} that runs the VM: install the same version or a newer one \
                 there",
                found.version
            )
        })
    }

    fn machine_type(&self, found: &Found) -> Option<String> {
        let wanted = self.machine_type.as_ref()?;
        let known = |known: &MachineType| known.name == *wanted || known.alias.as_ref() == Some(wanted);
        if found.machine_types.iter().any(known) {
            return None;
        }
        // Models of the same family could be used instead.
        let family = wanted.rsplit_once('-').map_or(wanted.as_str(), |(family, _)| family);
        let near: Vec<&str> = found
            .machine_types
            .iter()
            .map(|known| known.name.as_str())
            .filter(|name| name.starts_with(family))
            .take(TYPES_TOLD_MAX)
            .collect();
        Some(format!(
            "QEMU there has no machine type {wanted} (it has {}): install a version that has it, or restart the VM once with a \
             type that both have",
            if near.is_empty() { "none like it".to_owned() } else { near.join(", ") }
        ))
    }

    fn processor(&self, found: &Found) -> Option<String> {
        let Processor { model, unavailable } = self.processor.as_ref()?;
        if OF_HOST.contains(&model.as_str()) || found.processors.is_empty() {
            return None;
        }
        let Some(known) = found.processors.iter().find(|known| known.name == *model) else {
            return Some(format!(
                "QEMU there has no processor model {model}: install a version that has it, or restart the VM once with a model \
                 that both have (-cpu)"
            ));
        };
        if self.is_cold {
            // Which of its features the source lacks too is not known.
            return None;
        }
        let missing: Vec<&String> =
            known.unavailable.iter().filter(|feature| !unavailable.contains(feature)).collect();
        lacks(&missing, &format!("of the processor model {model}"))
    }

    fn host_features(&self, found: &Found) -> Option<String> {
        if found.host_features.is_empty() {
            return None;
        }
        let missing: Vec<&String> =
            self.host_features.iter().filter(|feature| !found.host_features.contains(feature)).collect();
        lacks(&missing, "that its guest may use")
    }

    fn kvm(&self, found: &Found) -> Option<String> {
        (self.kvm && !found.has_kvm).then(|| {
            "the kernel there cannot run it (KVM): load kvm_intel or kvm_amd, enable virtualisation in the firmware, and let the \
             daemon's user use /dev/kvm"
                .to_owned()
        })
    }

    fn memory(&self, found: &Found) -> Option<String> {
        let (needed, free) = (self.memory_bytes?, found.memory_bytes?);
        (free < needed).then(|| {
            format!(
                "it can take {} MiB of memory, with what its devices have beside its guest's, and {} MiB are free there: stop \
                 something there, or give the VM less memory",
                needed >> 20,
                free >> 20
            )
        })
    }
}

fn lacks(missing: &[&String], of_what: &str) -> Option<String> {
    let told: Vec<&str> = missing.iter().take(FEATURES_TOLD_MAX).map(|feature| feature.as_str()).collect();
    let more = missing.len().saturating_sub(FEATURES_TOLD_MAX);
    let more = if more == 0 { String::new() } else { format!(" and {more} more") };
    (!missing.is_empty()).then(|| {
        format!(
            "the processors there lack {}{more} {of_what}: restart the VM once with a model that both hosts have (-cpu)",
            told.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found() -> Found {
        let machine_type = |name: &str, alias: Option<&str>| MachineType {
            name: name.to_owned(),
            alias: alias.map(str::to_owned),
        };
        let unavailable = vec!["avx512f".to_owned(), "hle".to_owned()];
        Found {
            version: Version { major: 7, minor: 2, micro: 22, package: String::new() },
            machine_types: vec![machine_type("pc-i440fx-7.2", Some("pc")), machine_type("pc-q35-7.2", None)],
            processors: vec![ProcessorModel { name: "Skylake-Server".to_owned(), unavailable }],
            host_features: vec!["sse4_2".to_owned()],
            memory_bytes: Some(1 << 30),
            has_kvm: false,
            has_side_streams: true,
            post_copy_obstacle: None,
        }
    }

    #[test]
    fn what_is_there_is_enough() {
        let processor = Processor {
            model: "Skylake-Server".to_owned(),
            unavailable: vec!["hle".to_owned(), "avx512f".to_owned()],
        };
        let needs = Needs {
            version: Some((7, 2)),
            machine_type: Some("pc-q35-7.2".to_owned()),
            memory_bytes: Some(1 << 30),
            processor: Some(processor),
            host_features: vec!["sse4_2".to_owned()],
            ..Needs::default()
        };
        assert_eq!(needs.faults(&found()), [""; 0]);
        let greater = needs.with_command(2 << 30).faults(&found());
        assert!(greater.len() == 1 && greater[0].contains("2048 MiB"), "{greater:?}");
        assert_eq!(Needs::default().faults(&found()), [""; 0]);
    }

    #[test]
    fn one_stream_is_enough_and_post_copy_is_had_or_refused() {
        let wished = Terms { side_streams: 200, post_copy: true };
        assert_eq!(found().agree(wished), Ok(Terms { side_streams: MEMORY_STREAMS_MAX, ..wished }));
        let old = Found { has_side_streams: false, ..found() };
        assert_eq!(old.agree(wished).unwrap().side_streams, 0);
        let refuses = Found { post_copy_obstacle: Some("not supported".to_owned()), ..found() };
        let why = refuses.agree(wished).unwrap_err();
        assert!(why.contains("not supported") && why.contains("userfaultfd"), "{why}");
        assert!(refuses.agree(Terms::default()).is_ok());
    }

    #[test]
    fn what_is_missing_is_named_with_what_to_do() {
        let model =
            |model: &str| Some(Processor { model: model.to_owned(), unavailable: vec!["hle".to_owned()] });
        let none = Needs::default;
        let stopped = |command: &str| {
            Needs::of_command(&command.split(' ').map(str::to_owned).collect::<Vec<_>>(), Vec::new())
        };
        let usual = "qemu -cpu Skylake-Server -machine pc-q35-7.2,accel=kvm:tcg -m 1T";
        assert_eq!(stopped(usual).faults(&found()), [""; 0]);
        // The last type counts, and an accelerator without another one is needed.
        assert_eq!(stopped("qemu -M pc-q35-7.2 -machine type=microvm -accel kvm").faults(&found()).len(), 2);
        for (needs, expected) in [
            (Needs { version: Some((10, 0)), ..none() }, "older than the 10.0"),
            (Needs { machine_type: Some("pc-q35-10.0".to_owned()), ..none() }, "(it has pc-q35-7.2)"),
            (Needs { machine_type: Some("microvm".to_owned()), ..none() }, "none like it"),
            (Needs { processor: model("EPYC-Milan"), ..none() }, "no processor model EPYC-Milan"),
            (Needs { processor: model("Skylake-Server"), ..none() }, "lack avx512f of the processor model"),
            (Needs { host_features: vec!["avx2".to_owned()], ..none() }, "lack avx2 that its guest"),
            (Needs { kvm: true, ..none() }, "/dev/kvm"),
            (stopped("qemu -M microvm"), "none like it"),
            (stopped("qemu -cpu EPYC-Milan,+x"), "no processor model EPYC-Milan"),
            (stopped("qemu -enable-kvm"), "/dev/kvm"),
            (
                Needs { memory_bytes: Some(2 << 30), ..none() },
                "2048 MiB of memory, with what its devices have beside its guest's, and 1024 MiB are free",
            ),
        ] {
            let faults = needs.faults(&found());
            assert!(faults.len() == 1 && faults[0].contains(expected), "{expected}: {faults:?}");
        }
    }
}
