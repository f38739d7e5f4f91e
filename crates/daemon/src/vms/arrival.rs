//! The steps of a VM that leaves for another host or comes from one. Migrations decide when each is taken.
//!
//! ```text
//!   here                                              target
//!   leaving() ── VM description ───────────────────►  prepare_arrival(): QEMU waits for memory
//!      │  memory, disks, the commit                    │
//!   left(): QEMU ended, forgotten                   arrived(): at home there
//!   stayed(): at home                               abandon_arrival(): QEMU ended, forgotten
//! ```
//!
//! Each step can be repeated without effect, because a restarted daemon may not know its progress.

use std::path::Path;
use std::sync::Arc;

use api::Memory;
use block::held;
use hypervisor::Hypervisor;
use hypervisor::qemu::Qemu;
use hypervisor::qemu::command_line::understood::Allowed;
use hypervisor::qemu::command_line::{files, listening};
use migration::vm::cold::Form;

use super::catalogue::{Record, Standing};
use super::definition::Received;
use super::manifest::{self, Manifest, Reader};
use super::needs::Needs;
use super::preferences::Preferences;
use super::{
    Alive, Definition, DefinitionError, Differences, Life, VmError, Vms, launched, probe, same_files, tpm,
    user_of,
};
use crate::files::sockets::SocketFolder;
use crate::vms::moving::{MoveFault, Terms};

/// QEMU's options to wait for a VM's memory, and not to run the VM by itself.
pub(super) const WAITING: [&str; 3] = ["-S", "-incoming", "defer"];

/// The first bytes of a qcow2 image.
const QCOW2_MAGIC: &[u8] = b"QFI\xfb";

/// The extent of the checks of a VM before it comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// Whether the VM could run.
    Everything,
    /// Whether the files that the command names are the same.
    Files,
}

/// A VM whose QEMU waits here for its memory.
pub(crate) struct Arrival {
    pub(crate) name: String,
    pub(crate) vm: Arc<dyn Hypervisor>,
}

impl Vms {
    /// Returns the VM description for another host, of at most [`manifest::MANIFEST_BYTES_MAX`] bytes.
    pub(crate) async fn definition(
        self: &Arc<Self>,
        name: &str,
        volumes: Vec<(String, u64)>,
    ) -> Result<Vec<u8>, VmError> {
        let alive = self.alive(name)?;
        let definition = Definition::parse(&self.get(name)?.definition)?;
        let needs = needs(&definition, &alive.qemu, volumes).await;
        let (vms, name) = (Arc::clone(self), name.to_owned());
        blocking(move || {
            let known = vms.get(&name)?;
            let definition = Definition::parse(&known.definition)?;
            let folder = vms.vm_folder(&name);
            let here =
                definition.files().keys().map(|file| (file.clone(), manifest::file(&folder, file))).collect();
            let files = manifest::read_files(&here, &Reader::Administrator)?;
            let (definition, preferences) = (known.definition, known.preferences);
            Ok(Manifest { name, definition, files, needs, tpm_state: None, preferences }.encode()?)
        })
        .await
    }

    /// Returns a description without files, with which another host checks whether it could run the VM, and how its memory would
    /// go. `text` replaces the definition of a VM that is not in the list. Fails if a file cannot be read or is too large.
    pub(crate) async fn announcement(
        self: &Arc<Self>,
        name: &str,
        text: Option<String>,
        qemu: &Qemu,
        memory: Memory,
        volumes: Vec<(String, u64)>,
    ) -> Result<Vec<u8>, VmError> {
        let (text, is_kept) = match text {
            Some(text) => (text, false),
            None => (self.get(name)?.definition, true),
        };
        let definition = Definition::parse(&text)?;
        let needs = needs(&definition, qemu, volumes).await;
        let needs = Needs { post_copy: memory == Memory::PostCopy, ..needs };
        let reader = match is_kept {
            true => Reader::Administrator,
            false => Reader::User(user_of(&launched(name, qemu).await?)),
        };
        let (folder, name) = (self.vm_folder(name), name.to_owned());
        blocking(move || {
            let files = definition.files();
            let here = files.iter().map(|(file, path)| {
                (file.clone(), if is_kept { manifest::file(&folder, file) } else { path.clone() })
            });
            manifest::read_files(&here.collect(), &reader)?;
            let files = Vec::new();
            let preferences = Preferences::default();
            Ok(Manifest { name, definition: text, files, needs, tpm_state: None, preferences }.encode()?)
        })
        .await
    }

    /// Reduces a description so that the other host compares only the files that the command names.
    pub(crate) fn files_alone(bytes: &[u8]) -> Result<Vec<u8>, VmError> {
        let manifest = Manifest::decode(bytes)?;
        let needs = Needs { only_files: true, ..manifest.needs };
        Ok(Manifest { files: Vec::new(), needs, tpm_state: None, ..manifest }.encode()?)
    }

    /// Returns everything that is forbidden, or cannot be parsed, in a VM description. Reads nothing of this host.
    pub(crate) fn refusals_announced(&self, bytes: &[u8]) -> Vec<String> {
        let manifest = match Manifest::decode(bytes) {
            Ok(manifest) => manifest,
            Err(error) => return vec![error.to_string()],
        };
        let refusals = self.refusals_for_peers(&manifest.definition);
        if !refusals.is_empty() {
            return refusals;
        }
        self.understand(&manifest).err().map(|error| error.to_string()).into_iter().collect()
    }

    /// Returns what of a definition a host refuses that has this host's settings, `allow` and `folders` of `[machines]`.
    pub(crate) fn refusals_for_peers(&self, definition: &str) -> Vec<String> {
        let allowed = Allowed { options: &self.allowed.allow, folders: &self.allowed.folders };
        Definition::refusals_of_peer(definition, allowed)
    }

    /// Returns the differences of an arriving VM: what changes at this host, and which files that its command names differ
    /// here. Also returns whether [`Self::examine`] is to check everything else. Fails, before it reads anything of this host,
    /// if the description is malformed or names something forbidden.
    pub(crate) async fn compare_files(&self, bytes: &[u8]) -> Result<(Differences, Scope), VmError> {
        let manifest = Manifest::decode(bytes)?;
        let (definition, Received { changed, .. }) = self.understand(&manifest)?;
        let needs = manifest.needs;
        let scope = if needs.only_files { Scope::Files } else { Scope::Everything };
        let (command, user) = (definition.command_anywhere(), self.allowed.runs_as.user());
        let compared = move || Ok(same_files::differences(&command, &needs.files, &user));
        let mut differences = blocking(compared).await?;
        differences.warnings.extend(changed);
        differences.faults.extend(self.long_sockets(&manifest.name, &definition));
        Ok((differences, scope))
    }

    /// Returns the name and the volumes in a VM description.
    pub(crate) fn announced(bytes: &[u8]) -> Result<(String, Vec<String>), VmError> {
        let manifest = Manifest::decode(bytes)?;
        let definition = Definition::parse(&manifest.definition)?;
        Ok((manifest.name, definition.volumes()))
    }

    /// Checks whether this host has what a described VM needs. Returns what its volumes hold, and on which of the requested
    /// terms its memory can come. The error says what is missing, and what to do about it.
    pub(crate) async fn examine(
        &self,
        bytes: &[u8],
        wished: Terms,
    ) -> Result<(Vec<(String, u64)>, Terms), MoveFault> {
        let manifest = Manifest::decode(bytes).map_err(VmError::from)?;
        let (definition, received) = self.understand(&manifest)?;
        let command = definition.command_anywhere();
        let needs = manifest.needs;
        let is_cold = needs.is_cold;
        let needs = if is_cold { needs } else { needs.with_command(received.memory_bytes) };
        self.make_monitors_folder()?;
        let program = command.first().map_or("", String::as_str);
        let found = probe::probe(program, needs.kvm, &self.monitors, &self.allowed.runs_as).await;
        let found = found.map_err(MoveFault::Unfit)?;
        let mut faults = needs.faults(&found);
        if definition.has_tpm() {
            faults.extend(tpm::fault(needs.tpm).await);
        }
        // A file that QEMU's user cannot reach counts as missing, so that the answer reveals no more of this host.
        let user = self.allowed.runs_as.user();
        let is_there = |path: &Path| held::find(path).is_ok_and(|found| found.is_reached_by(&user));
        faults.extend(files::missing(&command, is_there).into_iter().map(|file| {
            format!("{file}: that file does not exist there; put it there, or leave it out of the VM")
        }));
        if !is_cold {
            let listens = blocking(move || Ok(listening::taken(&command)));
            faults.extend(listens.await?);
        }
        match found.agree(Terms { post_copy: wished.post_copy || needs.post_copy, ..wished }) {
            Ok(terms) if faults.is_empty() => Ok((needs.volumes, terms)),
            agreed => {
                faults.extend(agreed.err());
                Err(MoveFault::Unfit(faults.join("; ")))
            }
        }
    }

    /// Marks a VM as leaving, so that no other operation changes it. Returns its QEMU. After an error it is at home.
    pub(crate) async fn leaving(self: &Arc<Self>, name: &str) -> Result<Arc<Qemu>, VmError> {
        let operation = self.operate(name)?;
        let alive = self.alive(name)?;
        self.stand(name, Standing::Leaving).await?;
        drop(operation);
        Ok(alive.qemu)
    }

    /// Marks a VM that was leaving as staying. Does not resume it.
    pub(crate) async fn stayed(self: &Arc<Self>, name: &str) -> Result<(), VmError> {
        if self.is_somebodys(name) {
            return self.let_go(name).await;
        }
        let (vms, name) = (Arc::clone(self), name.to_owned());
        let change = |record: &mut Record| (record.standing, record.is_cold) = (Standing::Home, false);
        blocking(move || vms.record(&name, change)).await
    }

    /// Records that a VM runs at its target: ends its QEMU here and forgets the VM with its files.
    /// **N.B.** Only after the target has said that the VM runs there: it cannot run here afterwards.
    pub(crate) async fn left(self: &Arc<Self>, name: &str) -> Result<(), VmError> {
        self.holds.forget(name).await;
        // First, because `forget` below removes the record of who started it.
        if self.is_somebodys(name) {
            let (vms, name) = (Arc::clone(self), name.to_owned());
            blocking(move || Ok(vms.adoptions()?.remove(&name).map(drop)?)).await?;
        }
        self.give_up(name, Standing::Leaving).await
    }

    /// Makes a VM from another host's description, and starts its QEMU, which waits for memory on these terms. The sockets of
    /// its volumes must exist. After an error nothing of it is left here.
    pub(crate) async fn prepare_arrival(
        self: &Arc<Self>,
        bytes: &[u8],
        terms: Terms,
        sockets: &SocketFolder,
    ) -> Result<Arrival, VmError> {
        let manifest = Manifest::decode(bytes)?;
        // N.B. checked again: the description of the earlier check may have been another one. Only what was parsed is kept.
        let (definition, _) = self.understand(&manifest)?;
        let Manifest { name, files, preferences, .. } = manifest;
        let record = Record::arriving(&name, definition.text(), Form::Live, preferences);
        let vms = Arc::clone(self);
        blocking(move || vms.enter(&record, definition, &files, None)).await?;
        match self.launch_waiting(&name, terms, sockets).await {
            Ok(vm) => Ok(Arrival { name, vm }),
            Err(error) => {
                self.give_up(&name, Standing::Arriving).await?;
                Err(error)
            }
        }
    }

    async fn launch_waiting(
        self: &Arc<Self>,
        name: &str,
        terms: Terms,
        sockets: &SocketFolder,
    ) -> Result<Arc<Qemu>, VmError> {
        let lifeline = if terms.post_copy { Some(self.make_lifeline(name)?) } else { None };
        let lifeline = lifeline.iter().flatten().map(String::as_str);
        let more: Vec<&str> = WAITING.into_iter().chain(lifeline).collect();
        let Alive { qemu, .. } = self.launch(name, sockets, &more).await?;
        if terms.post_copy {
            // N.B. The lifeline is made at the start: when it is needed, QEMU's main thread may not answer.
            self.agree_on_lifeline(name).await?;
        }
        Ok(qemu)
    }

    /// Marks a VM that has arrived as this host's. Does not resume it.
    pub(crate) async fn arrived(self: &Arc<Self>, name: &str) -> Result<(), VmError> {
        let (vms, name) = (Arc::clone(self), name.to_owned());
        let change = |record: &mut Record| {
            (record.standing, record.stays_paused, record.is_cold) = (Standing::Home, false, false);
        };
        blocking(move || vms.record(&name, change)).await
    }

    /// Makes durable that an arriving VM was paused by its user, and stays paused.
    /// **N.B.** Before the source learns that the VM is loaded: it may then forget the VM.
    pub(crate) async fn note_paused(self: &Arc<Self>, name: &str) -> Result<(), VmError> {
        let (vms, name) = (Arc::clone(self), name.to_owned());
        blocking(move || vms.record(&name, |record| record.stays_paused = true)).await
    }

    pub(crate) fn stays_paused(&self, name: &str) -> bool {
        self.entries().get(name).is_some_and(|entry| entry.record.stays_paused)
    }

    /// Writes the files of an arriving VM again: its guest has changed them since they were first sent. Its QEMU has them open,
    /// and has not used them yet. Fails if they are not the VM's, or cannot be written.
    pub(crate) async fn renew_files(self: &Arc<Self>, name: &str, bytes: Vec<u8>) -> Result<(), VmError> {
        let (vms, name) = (Arc::clone(self), name.to_owned());
        blocking(move || {
            let Manifest { name: of, files, .. } = Manifest::decode(&bytes)?;
            let definition = Definition::parse(&vms.get(&name)?.definition)?;
            let is_its = of == name && files.iter().all(|(file, _)| definition.files().contains_key(file));
            if !is_its {
                return Err(VmError::Unusable("files arrived that are not the VM's".to_owned()));
            }
            let folder = vms.vm_folder(&name);
            let renewed = manifest::renew_files(&folder, &files);
            renewed.map_err(|error| VmError::io("write the files of", &folder, error))
        })
        .await
    }

    /// Ends the QEMU of a VM that does not come, and deletes everything of the VM here.
    pub(crate) async fn abandon_arrival(self: &Arc<Self>, name: &str) -> Result<(), VmError> {
        self.give_up(name, Standing::Arriving).await
    }

    /// Makes the TPM state durable that has come with a VM, if there is one.
    /// **N.B.** Before the source may release the VM: the state there is deleted with it.
    pub(crate) async fn keep_tpm(&self, name: &str) -> Result<(), VmError> {
        let Some((folder, _)) = self.tpm(name) else { return Ok(()) };
        blocking(move || {
            tpm::sync(&folder).map_err(|error| VmError::io("make the TPM durable in", &folder, error))
        })
        .await
    }

    /// Returns why the TPM of a VM cannot move; `None`: it can, or there is none.
    pub(crate) fn tpm_obstacle(&self, name: &str) -> Option<&'static str> {
        let (folder, _) = self.tpm(name)?;
        (!tpm::runs(&folder)).then_some(
            "its TPM (swtpm) has ended, and what it kept in memory is lost: stop the VM and start it again",
        )
    }

    pub(crate) fn qemu(&self, name: &str) -> Result<Arc<Qemu>, VmError> {
        Ok(self.alive(name)?.qemu)
    }

    /// Parses another host's VM description. Also returns what of the VM changes at this host, and its memory. Fails if
    /// the description names something forbidden.
    pub(super) fn understand(&self, manifest: &Manifest) -> Result<(Definition, Received), VmError> {
        let allowed = Allowed { options: &self.allowed.allow, folders: &self.allowed.folders };
        let (definition, received) = Definition::of_peer(&manifest.definition, allowed)?;
        // Its drives are read as raw bytes here; QEMU at the other host may have detected a format.
        let image = manifest.files.iter().find(|(_, content)| content.starts_with(QCOW2_MAGIC));
        if let Some((name, _)) = image {
            let text = format!(
                "the file {name} is a qcow2 image, whose header may name other files: convert it (qemu-img convert -O raw)"
            );
            return Err(DefinitionError::Bounds(text).into());
        }
        Ok((definition, received))
    }

    async fn stand(self: &Arc<Self>, name: &str, standing: Standing) -> Result<(), VmError> {
        let (vms, name) = (Arc::clone(self), name.to_owned());
        blocking(move || vms.record(&name, |record| record.standing = standing)).await
    }

    /// Ends and forgets a VM with this standing. Succeeds if the VM is gone already.
    async fn give_up(self: &Arc<Self>, name: &str, standing: Standing) -> Result<(), VmError> {
        let found = match self.get(name) {
            Err(VmError::NotFound(_)) => return Ok(()),
            known => known?.standing,
        };
        if found != standing {
            return Err(VmError::Busy { vm: name.to_owned(), why: "is not on its way" });
        }
        if let (Life::Starting, Standing::Arriving) = (self.life(name)?, standing) {
            // It waits for its disks, and will not answer before they exist. If QEMU has ended already, that is fine.
            let _ = self.kill_silent(name).await;
        }
        self.until_found(name).await;
        match (self.life(name)?, standing) {
            // Nothing of it is needed here, and the disks for an orderly end are gone already.
            (Life::Alive(alive), Standing::Arriving) => self.put_down(name, &alive).await,
            (Life::Alive(alive), _) => self.cut_off(name, &alive).await,
            _ => {}
        }
        let (vms, name) = (Arc::clone(self), name.to_owned());
        blocking(move || vms.erase(&name)).await
    }
}

async fn needs(definition: &Definition, qemu: &Qemu, volumes: Vec<(String, u64)>) -> Needs {
    let command = definition.command_anywhere();
    let needs = Needs::of(qemu, &command, volumes).await;
    let tpm = if definition.has_tpm() { tpm::version().await.ok() } else { None };
    // What QEMU does not report is not checked.
    let files = match launched("", qemu).await {
        Ok(process) => {
            let user = user_of(&process);
            blocking(move || Ok(same_files::fingerprints(&command, &user))).await.unwrap_or_default()
        }
        Err(_) => Vec::new(),
    };
    Needs { tpm, files, ..needs }
}

/// Runs work that may block on a helper thread.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, VmError> + Send + 'static,
) -> Result<T, VmError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(VmError::Unusable(error.to_string())))
}
