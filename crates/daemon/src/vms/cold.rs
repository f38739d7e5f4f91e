//! Stopped VMs that move with their volumes: their description with all that they are, and what is kept of them on arrival.
//!
//! ```text
//!   here                                                   target
//!   leaving_cold() ── definition, files, TPM state ─────►  keep_cold(): arriving, durable, complete
//!   left(): forgotten                                      arrived(): at home, stopped
//!   stayed(): at home, stopped                             abandon_arrival(): forgotten
//! ```
//! [`migration::vm::cold`] decides which step is next. The steps that are not here are those of other VMs, in `arrival.rs`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use migration::vm::cold::{self, Form, Found, Hypervisor};

use super::arrival::blocking;
use super::catalogue::{Record, Standing};
use super::manifest::{self, Manifest, Reader};
use super::needs::Needs;
use super::{Definition, Life, VmError, Vms, same_files, tpm};
use crate::fail_point::{self, Step as FailPoint};

/// How much of a VM its description has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    /// What the other host must have for it.
    Needs,
    /// Its files and the state of its TPM, too.
    Everything,
    /// The same of a VM that may be running: its TPM as its file is now.
    AsItIs,
}

impl Vms {
    /// Returns how a VM moves in its present state. Errors: [`VmError::Silent`]: that is not known; [`VmError::Suspended`].
    pub(crate) fn form(&self, name: &str) -> Result<Form, VmError> {
        let hypervisor = match self.life(name)? {
            Life::Stopped | Life::Crashed(_) => Hypervisor::Ended,
            Life::Starting => Hypervisor::Unknown,
            Life::Alive(_) => Hypervisor::Exists,
            // N.B. Its memory would stay here, and its disks would move on without it.
            Life::Suspended(_) => return Err(VmError::Suspended(name.to_owned())),
        };
        cold::form(hypervisor).ok_or_else(|| VmError::Silent(name.to_owned()))
    }

    /// Returns whether a VM is moving without a hypervisor.
    pub(crate) fn is_cold(&self, name: &str) -> bool {
        self.entries().get(name).is_some_and(|entry| entry.record.is_cold)
    }

    /// Marks a stopped VM as leaving, so that no other operation changes or starts it. After an error it is at home.
    pub(crate) async fn leaving_cold(self: &Arc<Self>, name: &str) -> Result<(), VmError> {
        let operation = self.operate(name)?;
        if self.form(name)? != Form::Cold {
            return Err(VmError::StartedMeanwhile(name.to_owned()));
        }
        let (vms, leaving) = (Arc::clone(self), name.to_owned());
        let change = |record: &mut Record| (record.standing, record.is_cold) = (Standing::Leaving, true);
        blocking(move || vms.record(&leaving, change)).await?;
        drop(operation);
        Ok(())
    }

    /// Returns the description of a stopped VM for another host. Fails if one of its files cannot be read or is too large.
    pub(crate) async fn describe_cold(
        self: &Arc<Self>,
        name: &str,
        volumes: Vec<(String, u64)>,
        extent: Extent,
    ) -> Result<Vec<u8>, VmError> {
        let known = self.get(name)?;
        let definition = Definition::parse(&known.definition)?;
        let needs = self.needs_of_stopped(&definition, volumes).await;
        let (vms, name) = (Arc::clone(self), name.to_owned());
        blocking(move || {
            let files = vms.files_of_stopped(&name, &definition)?;
            let tpm_state = match extent {
                Extent::AsItIs => vms.tpm_left(&name)?,
                Extent::Needs | Extent::Everything => vms.tpm_of_stopped(&name)?,
            };
            let preferences = known.preferences;
            let whole = Manifest { name, definition: known.definition, files, needs, tpm_state, preferences };
            Ok(match extent {
                Extent::Everything | Extent::AsItIs => whole.encode()?,
                Extent::Needs => Manifest { files: Vec::new(), tpm_state: None, ..whole }.encode()?,
            })
        })
        .await
    }

    /// Returns the needs of a VM without a hypervisor: those that its command shows.
    async fn needs_of_stopped(&self, definition: &Definition, volumes: Vec<(String, u64)>) -> Needs {
        let command = definition.command_anywhere();
        let tpm = if definition.has_tpm() { tpm::version().await.ok() } else { None };
        let needs = Needs::of_command(&command, volumes);
        let user = self.allowed.runs_as.user();
        // Files of which nothing is known are not compared.
        let files = blocking(move || Ok(same_files::fingerprints_of_disks(&command, &user))).await;
        Needs { tpm, files: files.unwrap_or_default(), ..needs }
    }

    fn files_of_stopped(
        &self,
        name: &str,
        definition: &Definition,
    ) -> Result<Vec<(String, Vec<u8>)>, VmError> {
        let folder = self.vm_folder(name);
        let here = definition.files().keys().map(|file| (file.clone(), manifest::file(&folder, file)));
        Ok(manifest::read_files(&here.collect(), &Reader::Administrator)?)
    }

    /// Returns the state of a stopped VM's TPM; `None`: it has no TPM, or its TPM has never run.
    fn tpm_of_stopped(&self, name: &str) -> Result<Option<Vec<u8>>, VmError> {
        let Some((folder, _)) = self.tpm(name) else { return Ok(None) };
        if tpm::runs(&folder) {
            return Err(VmError::TpmRuns(name.to_owned()));
        }
        self.tpm_left(name)
    }

    /// Returns the durable state of a VM's TPM, which replaces its file as a whole.
    fn tpm_left(&self, name: &str) -> Result<Option<Vec<u8>>, VmError> {
        let Some((folder, _)) = self.tpm(name) else { return Ok(None) };
        tpm::left_state(&folder).map_err(|error| VmError::io("read", &tpm::state(&folder), error))
    }

    /// Returns what is here under the name of a described VM.
    pub(crate) async fn what_is_kept(self: &Arc<Self>, bytes: &[u8]) -> Result<Found, VmError> {
        let manifest = Manifest::decode(bytes)?;
        let known = match self.get(&manifest.name) {
            Err(VmError::NotFound(_)) => return Ok(Found::Nothing),
            known => known?,
        };
        let (definition, _) = self.understand(&manifest)?;
        if known.standing != Standing::Arriving || !self.is_cold(&known.name) {
            return Ok(Found::Another);
        }
        let vms = Arc::clone(self);
        blocking(move || {
            let kept = || {
                let files = vms.files_of_stopped(&known.name, &definition)?;
                Ok::<_, VmError>((files, vms.tpm_of_stopped(&known.name)?))
            };
            let mut sent = manifest.files;
            sent.sort();
            // What cannot be read is kept anew.
            let is_same = known.definition == definition.text()
                && kept().is_ok_and(|kept| kept == (sent, manifest.tpm_state));
            Ok(if is_same { Found::Same } else { Found::Earlier })
        })
        .await
    }

    /// Keeps a stopped VM of another host durably, as arriving. After an error nothing of it is left here.
    pub(crate) async fn keep_cold(self: &Arc<Self>, bytes: &[u8]) -> Result<(), VmError> {
        fail_point::before(FailPoint::Keep);
        let manifest = Manifest::decode(bytes)?;
        // N.B. Only what was parsed is kept.
        let (definition, _) = self.understand(&manifest)?;
        self.keep_as(manifest, definition, Standing::Arriving).await?;
        fail_point::after(FailPoint::Keep);
        Ok(())
    }

    /// Makes a VM of a lost host one of this host, stopped. Its volumes have the names that `volumes` has for theirs. After an error
    /// nothing of it is left here.
    pub(crate) async fn keep_promoted(
        self: &Arc<Self>,
        bytes: &[u8],
        volumes: &BTreeMap<String, String>,
    ) -> Result<(), VmError> {
        let manifest = Manifest::decode(bytes)?;
        // N.B. Only what was parsed is kept.
        let (definition, _) = self.understand(&manifest)?;
        let definition = definition.renamed(volumes)?;
        self.keep_as(manifest, definition, Standing::Home).await
    }

    /// Makes a VM one of this host, stopped, with what its description has besides this definition.
    pub(super) async fn keep_whole(
        self: &Arc<Self>,
        manifest: Manifest,
        definition: Definition,
    ) -> Result<(), VmError> {
        self.keep_as(manifest, definition, Standing::Home).await
    }

    async fn keep_as(
        self: &Arc<Self>,
        manifest: Manifest,
        definition: Definition,
        standing: Standing,
    ) -> Result<(), VmError> {
        let Manifest { name, files, tpm_state, preferences, .. } = manifest;
        let sent: BTreeSet<_> = files.iter().map(|(file, _)| file).collect();
        let is_complete = sent.len() == files.len() && sent.into_iter().eq(definition.files().keys());
        if !is_complete || (tpm_state.is_some() && !definition.has_tpm()) {
            return Err(VmError::Unusable("files arrived that are not the VM's".to_owned()));
        }
        let is_cold = standing == Standing::Arriving;
        let record = Record {
            standing,
            is_cold,
            ..Record::arriving(&name, definition.text(), Form::Cold, preferences)
        };
        let vms = Arc::clone(self);
        blocking(move || vms.enter(&record, definition, &files, tpm_state.as_deref())).await
    }
}
