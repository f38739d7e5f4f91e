//! VMs that leave for another host, and that come from one: the steps, for whoever decides when they are taken.
//!
//! ```text
//!   here                                              there
//!   leaving() ── manifest ─────────────────────────►  prepare_arrival(): QEMU waits for memory
//!      │  memory, disks, the commit                    │
//!   left(): QEMU ended, forgotten                   arrived(): at home there
//!   stayed(): at home                               abandon_arrival(): QEMU ended, forgotten
//! ```
//!
//! A step that is taken twice changes nothing the second time: a restarted daemon may not know how far it was.

use std::path::Path;
use std::sync::Arc;

use api::Memory;
use block::held;
use hypervisor::Hypervisor;
use hypervisor::qemu::Qemu;
use hypervisor::qemu::command_line::understood::Allowed;
use hypervisor::qemu::command_line::{files, listening};

use super::catalogue::{Fate, Record, Standing};
use super::manifest::{self, Manifest, Reader};
use super::needs::Needs;
use super::{
    Alive, Definition, DefinitionError, Differences, Life, VmError, Vms, launched, probe, same_files, tpm,
    user_of,
};
use crate::files::sockets::SocketFolder;
use crate::journal::now_unix_ms;
use crate::vms::moving::{MoveFault, Terms};

/// What makes QEMU wait for a VM's memory, and not run it by itself.
const WAITING: [&str; 3] = ["-S", "-incoming", "defer"];

/// What a qcow2 image begins with.
const QCOW2_MAGIC: &[u8] = b"QFI\xfb";

/// What is to be looked at of a VM that may come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// Whether it could run.
    Everything,
    /// Whether the files that it finds here are the same.
    Files,
}

/// A VM whose QEMU waits here for its memory.
pub(crate) struct Arrival {
    pub(crate) name: String,
    pub(crate) vm: Arc<dyn Hypervisor>,
}

impl Vms {
    /// What another host must be given to run a VM whose volumes hold so many bytes, at most
    /// [`manifest::MANIFEST_BYTES_MAX`] bytes.
    ///
    /// # Errors
    /// [`VmError`].
    pub(crate) async fn definition(
        self: &Arc<Self>,
        name: &str,
        volumes: Vec<(String, u64)>,
    ) -> Result<Vec<u8>, VmError> {
        let needs = match self.alive(name) {
            Ok(alive) => {
                let definition = Definition::parse(&self.get(name)?.definition)?;
                Some(needs(&definition, &alive.qemu, volumes).await)
            }
            // It does not run: what it would need nobody knows.
            Err(_) => None,
        };
        let (vms, name) = (Arc::clone(self), name.to_owned());
        blocking(move || {
            let known = vms.get(&name)?;
            let definition = Definition::parse(&known.definition)?;
            let folder = vms.vm_folder(&name);
            let here =
                definition.files().keys().map(|file| (file.clone(), manifest::file(&folder, file))).collect();
            let files = manifest::read_files(&here, &Reader::Administrator)?;
            Ok(Manifest { name, definition: known.definition, files, needs }.encode()?)
        })
        .await
    }

    /// What another host is told of a VM to look whether it could run it: as [`Self::definition`], of a definition that
    /// is not kept here if `text` says one, and without its files, which are only looked at; and which way its memory would go.
    ///
    /// # Errors
    /// [`VmError`]: a file of it cannot be read, or they are too large.
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
        let needs = Some(Needs { post_copy: memory == Memory::PostCopy, ..needs });
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
            Ok(Manifest { name, definition: text, files: Vec::new(), needs }.encode()?)
        })
        .await
    }

    /// What another host is told of a VM, of which it is given these bytes later, to look at its files only: whether they
    /// are the same there.
    ///
    /// # Errors
    /// [`VmError`]: the bytes are none.
    pub(crate) fn files_alone(bytes: &[u8]) -> Result<Vec<u8>, VmError> {
        let manifest = Manifest::decode(bytes)?;
        let needs = manifest.needs.map(|needs| Needs { only_files: true, ..needs });
        Ok(Manifest { files: Vec::new(), needs, ..manifest }.encode()?)
    }

    /// Looks whether the VM is understood that came as these bytes. It looks at nothing of this host.
    ///
    /// # Errors
    /// [`VmError`]: the bytes are none, or name what they may not.
    pub(crate) fn check_announced(&self, bytes: &[u8]) -> Result<(), VmError> {
        self.understand(&Manifest::decode(bytes)?).map(drop)
    }

    /// What of a VM that came as these bytes will not be here as it was there, and what of the files that its command names is
    /// another one here; and whether all else is to be looked at, too ([`Self::examine`]).
    ///
    /// # Errors
    /// [`VmError`]: the bytes are none, or name what they may not. Nothing of this host was looked at then.
    pub(crate) async fn compare_files(&self, bytes: &[u8]) -> Result<(Differences, Scope), VmError> {
        let manifest = Manifest::decode(bytes)?;
        let (definition, changed) = self.understand(&manifest)?;
        let needs = manifest.needs.unwrap_or_default();
        let scope = if needs.only_files { Scope::Files } else { Scope::Everything };
        let (command, user) = (definition.command_anywhere(), self.allowed.runs_as.user());
        let compared = move || Ok(same_files::differences(&command, &needs.files, &user));
        let mut differences = blocking(compared).await?;
        differences.warnings.extend(changed);
        Ok((differences, scope))
    }

    /// The volumes of a VM that came as these bytes, and its name.
    ///
    /// # Errors
    /// [`VmError`]: the bytes are none.
    pub(crate) fn announced(bytes: &[u8]) -> Result<(String, Vec<String>), VmError> {
        let manifest = Manifest::decode(bytes)?;
        let definition = Definition::parse(&manifest.definition)?;
        Ok((manifest.name, definition.volumes()))
    }

    /// Looks whether this host has what a VM needs that is to come as these bytes; returns what its volumes hold, and on
    /// which of the wished terms its memory can come.
    ///
    /// # Errors
    /// What is missing, and what to do about it.
    pub(crate) async fn examine(
        &self,
        bytes: &[u8],
        wished: Terms,
    ) -> Result<(Vec<(String, u64)>, Terms), MoveFault> {
        let manifest = Manifest::decode(bytes).map_err(VmError::from)?;
        let (definition, _) = self.understand(&manifest)?;
        let command = definition.command_anywhere();
        let needs = manifest.needs.unwrap_or_default();
        self.make_monitors_folder()?;
        let program = command.first().map_or("", String::as_str);
        let found = probe::probe(program, needs.kvm, &self.monitors, &self.allowed.runs_as).await;
        let found = found.map_err(MoveFault::Unfit)?;
        let mut faults = needs.faults(&found);
        if definition.has_tpm() {
            faults.extend(tpm::fault(needs.tpm).await);
        }
        // What QEMU's user cannot find is not there for it: no more is told of this host.
        let user = self.allowed.runs_as.user();
        let is_there = |path: &Path| held::find(path).is_ok_and(|found| found.is_reached_by(&user));
        faults.extend(
            files::missing(&command, is_there).into_iter().map(|file| {
                format!("{file}: that file is not there; put it there, or leave it out of the VM")
            }),
        );
        let listens = blocking(move || Ok(listening::taken(&command)));
        faults.extend(listens.await?);
        match found.agree(Terms { post_copy: wished.post_copy || needs.post_copy, ..wished }) {
            Ok(terms) if faults.is_empty() => Ok((needs.volumes, terms)),
            agreed => {
                faults.extend(agreed.err());
                Err(MoveFault::Unfit(faults.join("; ")))
            }
        }
    }

    /// Says that a VM begins to leave: nobody else starts, stops or removes it. Returns its QEMU.
    ///
    /// # Errors
    /// [`VmError`]; it is at home as before then.
    pub(crate) async fn leaving(self: &Arc<Self>, name: &str) -> Result<Arc<Qemu>, VmError> {
        let operation = self.operate(name)?;
        let alive = self.alive(name)?;
        self.stand(name, Standing::Leaving).await?;
        drop(operation);
        Ok(alive.qemu)
    }

    /// Says that a VM stays here after all. It is not resumed by this.
    ///
    /// # Errors
    /// [`VmError`].
    pub(crate) async fn stayed(self: &Arc<Self>, name: &str) -> Result<(), VmError> {
        if self.is_somebodys(name) {
            return self.let_go(name).await;
        }
        self.stand(name, Standing::Home).await
    }

    /// Says that a VM runs elsewhere: its QEMU here is ended, and it is forgotten with its files.
    ///
    /// **N.B.** Only after the other host has said that it runs there: nothing here can go on with it from then on.
    ///
    /// # Errors
    /// [`VmError`].
    pub(crate) async fn left(self: &Arc<Self>, name: &str) -> Result<(), VmError> {
        self.holds.forget(name).await;
        // First: whose it was is known by what is given up.
        if self.is_somebodys(name) {
            let (vms, name) = (Arc::clone(self), name.to_owned());
            blocking(move || Ok(vms.adoptions()?.remove(&name).map(drop)?)).await?;
        }
        self.give_up(name, Standing::Leaving).await
    }

    /// Makes a VM of what another host has sent, and starts its QEMU, which waits for memory that comes on these terms.
    ///
    /// Its volumes must have their sockets by then.
    ///
    /// # Errors
    /// [`VmError`]; nothing is left of it here then.
    pub(crate) async fn prepare_arrival(
        self: &Arc<Self>,
        bytes: &[u8],
        terms: Terms,
        sockets: &SocketFolder,
    ) -> Result<Arrival, VmError> {
        let manifest = Manifest::decode(bytes)?;
        // N.B. also here: what was looked at before may have been another one. What is kept is what was understood.
        let (definition, _) = self.understand(&manifest)?;
        let Manifest { name, files, .. } = manifest;
        let record = Record {
            name: name.clone(),
            definition: definition.text().to_owned(),
            standing: Standing::Arriving,
            fate: Fate::Stopped,
            added_unix_ms: now_unix_ms(),
            monitor: None,
            user: None,
            stays_paused: false,
        };
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
            // N.B. when it is needed its main thread may not answer any more.
            self.agree_on_lifeline(name).await?;
        }
        Ok(qemu)
    }

    /// Says that a VM that came is this host's from now on. It is not resumed by this.
    ///
    /// # Errors
    /// [`VmError`].
    pub(crate) async fn arrived(self: &Arc<Self>, name: &str) -> Result<(), VmError> {
        let (vms, name) = (Arc::clone(self), name.to_owned());
        blocking(move || {
            vms.record(&name, |record| (record.standing, record.stays_paused) = (Standing::Home, false))
        })
        .await
    }

    /// Makes durable that a VM that comes was paused by somebody else, and is to stay so.
    ///
    /// **N.B.** Before anybody hears that it is loaded: its source may forget it then.
    ///
    /// # Errors
    /// [`VmError`].
    pub(crate) async fn note_paused(self: &Arc<Self>, name: &str) -> Result<(), VmError> {
        let (vms, name) = (Arc::clone(self), name.to_owned());
        blocking(move || vms.record(&name, |record| record.stays_paused = true)).await
    }

    /// Whether a VM that comes is to stay paused.
    pub(crate) fn stays_paused(&self, name: &str) -> bool {
        self.entries().get(name).is_some_and(|entry| entry.record.stays_paused)
    }

    /// Writes the files of a VM once more that comes: its guest has changed them since they were sent first. Its QEMU has them open,
    /// and has not used them yet.
    ///
    /// # Errors
    /// [`VmError`]: they are not the VM's, or cannot be written.
    pub(crate) async fn renew_files(self: &Arc<Self>, name: &str, bytes: Vec<u8>) -> Result<(), VmError> {
        let (vms, name) = (Arc::clone(self), name.to_owned());
        blocking(move || {
            let Manifest { name: of, files, .. } = Manifest::decode(&bytes)?;
            let definition = Definition::parse(&vms.get(&name)?.definition)?;
            let is_its = of == name && files.iter().all(|(file, _)| definition.files().contains_key(file));
            if !is_its {
                return Err(VmError::Unusable("files came that are not the VM's".to_owned()));
            }
            let folder = vms.vm_folder(&name);
            let renewed = manifest::renew_files(&folder, &files);
            renewed.map_err(|error| VmError::io("write the files of", &folder, error))
        })
        .await
    }

    /// Says that a VM does not come: its QEMU is ended, and nothing is left of it here.
    ///
    /// # Errors
    /// [`VmError`].
    pub(crate) async fn abandon_arrival(self: &Arc<Self>, name: &str) -> Result<(), VmError> {
        self.give_up(name, Standing::Arriving).await
    }

    /// Makes the state of the TPM durable that has come with a VM, if it has one.
    ///
    /// **N.B.** Before its source may release it: there it goes with the VM.
    ///
    /// # Errors
    /// [`VmError`].
    pub(crate) async fn keep_tpm(&self, name: &str) -> Result<(), VmError> {
        let Some((folder, _)) = self.tpm(name) else { return Ok(()) };
        blocking(move || {
            tpm::sync(&folder).map_err(|error| VmError::io("make the TPM durable in", &folder, error))
        })
        .await
    }

    /// Why the TPM of a VM could not go with it; `None`: it can, or there is none.
    pub(crate) fn tpm_obstacle(&self, name: &str) -> Option<&'static str> {
        let (folder, _) = self.tpm(name)?;
        (!tpm::runs(&folder)).then_some(
            "its TPM (swtpm) has ended, and what it kept in memory is lost: stop the VM and start it again",
        )
    }

    /// The QEMU of a VM, whatever its standing.
    ///
    /// # Errors
    /// [`VmError::NotFound`], [`VmError::NotRunning`].
    pub(crate) fn qemu(&self, name: &str) -> Result<Arc<Qemu>, VmError> {
        Ok(self.alive(name)?.qemu)
    }

    /// What is understood of a VM that another host has described, and what of it will not be here as it was there.
    ///
    /// # Errors
    /// [`VmError`]: it names what it may not.
    fn understand(&self, manifest: &Manifest) -> Result<(Definition, Vec<String>), VmError> {
        let allowed = Allowed { options: &self.allowed.allow, folders: &self.allowed.folders };
        let (definition, changed) = Definition::of_peer(&manifest.definition, allowed)?;
        // Its drives are read as plain bytes; at the other host QEMU may have looked for a format.
        let image = manifest.files.iter().find(|(_, content)| content.starts_with(QCOW2_MAGIC));
        if let Some((name, _)) = image {
            let text = format!(
                "the file {name} is a qcow2 image, whose header may name other files: convert it (qemu-img convert -O raw)"
            );
            return Err(DefinitionError::Bounds(text).into());
        }
        Ok((definition, changed))
    }

    async fn stand(self: &Arc<Self>, name: &str, standing: Standing) -> Result<(), VmError> {
        let (vms, name) = (Arc::clone(self), name.to_owned());
        blocking(move || vms.record(&name, |record| record.standing = standing)).await
    }

    /// Ends and forgets a VM that has the standing. It is no error if the VM is gone already.
    async fn give_up(self: &Arc<Self>, name: &str, standing: Standing) -> Result<(), VmError> {
        let found = match self.get(name) {
            Err(VmError::NotFound(_)) => return Ok(()),
            known => known?.standing,
        };
        if found != standing {
            return Err(VmError::Busy { vm: name.to_owned(), why: "is not on its way" });
        }
        if let (Life::Starting, Standing::Arriving) = (self.life(name)?, standing) {
            // It waits for its disks, and will not answer before they are there. A QEMU that has ended is as good.
            let _ = self.kill_silent(name).await;
        }
        self.until_found(name).await;
        match (self.life(name)?, standing) {
            // Nothing of it is of worth here, and the disks that it would end in order with are gone already.
            (Life::Alive(alive), Standing::Arriving) => self.put_down(name, &alive).await,
            (Life::Alive(alive), _) => self.cut_off(name, &alive).await,
            _ => {}
        }
        let (vms, name) = (Arc::clone(self), name.to_owned());
        blocking(move || vms.erase(&name)).await
    }
}

/// What a VM of this definition needs, that runs here.
async fn needs(definition: &Definition, qemu: &Qemu, volumes: Vec<(String, u64)>) -> Needs {
    let command = definition.command_anywhere();
    let needs = Needs::of(qemu, &command, volumes).await;
    let tpm = if definition.has_tpm() { tpm::version().await.ok() } else { None };
    // What cannot be said is not looked at.
    let files = match launched("", qemu).await {
        Ok(process) => {
            let user = user_of(&process);
            blocking(move || Ok(same_files::fingerprints(&command, &user))).await.unwrap_or_default()
        }
        Err(_) => Vec::new(),
    };
    Needs { tpm, files, ..needs }
}

/// Runs work that may sleep on a helper thread.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, VmError> + Send + 'static,
) -> Result<T, VmError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(VmError::Unusable(error.to_string())))
}
