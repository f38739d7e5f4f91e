//! Adopted VMs while they are in the list of managed VMs, on their way to another host; and VMs that Sterna releases.
//!
//! ```text
//!   adopted ── take_in() ──► Home ── leaving() ──► Leaving ──┬─ left(): its QEMU ended, adoption forgotten
//!                                                            └─ stayed(), let_go(): adopted as before, its QEMU runs on
//!   Home, started by Sterna ── let_go() ──► its QEMU runs on without Sterna
//! ```
//! Sterna holds the monitor of an adopted VM only for that time: a monitor serves one client at a time.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hypervisor::qemu::Qemu;
use hypervisor::qemu::command_line::sandbox;
use hypervisor::qemu::command_line::script::{self, GivenBack, Surroundings};

use super::arrival::blocking;
use super::catalogue::{Fate, Record, Standing};
use super::manifest::{self, Manifest, Reader};
use super::needs::Needs;
use super::preferences::Preferences;
use super::{Adopted, Definition, Life, VmError, Vms, launched, remove_folder, tpm, user_of};
use crate::journal::now_unix_ms;

/// The script in a VM's folder that starts the VM after its release.
const SCRIPT: &str = "start";
/// The monitor, in the VM's own folder, of a VM that the script has started.
const MONITOR: &str = "sterna.qmp";
/// The mode that lets only the daemon's user run the script.
const SCRIPT_MODE: u32 = 0o700;

impl Vms {
    /// Adds an adopted VM with its derived definition to the list, so that it can leave. After an error it is adopted as before.
    pub(crate) async fn take_in(
        self: &Arc<Self>,
        adopted: &Adopted,
        qemu: Qemu,
        text: String,
    ) -> Result<(), VmError> {
        let name = adopted.name.clone();
        let reader = Reader::User(user_of(&launched(&name, &qemu).await?));
        let alive = self.take(&name, qemu)?;
        let record = Record {
            name: name.clone(),
            definition: text.clone(),
            standing: Standing::Home,
            fate: Fate::Started,
            added_unix_ms: now_unix_ms(),
            monitor: Some(adopted.monitor.clone()),
            user: None,
            stays_paused: false,
            is_cold: false,
            preferences: Preferences::default(),
            settled_boot: None,
        };
        let vms = Arc::clone(self);
        blocking(move || {
            let definition = Definition::parse(&text)?;
            let files = manifest::read_files(definition.files(), &reader)?;
            let manifest = Manifest {
                name: record.name.clone(),
                definition: text,
                files,
                needs: Needs::default(),
                tpm_state: None,
                preferences: Preferences::default(),
            };
            manifest.encode()?;
            vms.enter(&record, definition, &manifest.files, None)
        })
        .await?;
        self.set(&name, None, Life::Alive(alive.clone()));
        self.watch(name, alive.clone(), alive.qemu.events());
        Ok(())
    }

    /// Writes a script that starts a released VM without Sterna, over its plain images, and returns the script's path beside
    /// the VM's files. `None`: it uses a disk in an unknown way.
    pub(crate) async fn write_script(
        self: &Arc<Self>,
        name: &str,
        images: Vec<GivenBack>,
    ) -> Result<Option<PathBuf>, VmError> {
        let known = self.get(name)?;
        let definition = Definition::parse(&known.definition)?;
        // N.B. the same user as the daemon uses, because another host may have written the command.
        let user = self.user_for(name, &definition).await?;
        let (vms, name) = (Arc::clone(self), name.to_owned());
        blocking(move || {
            let folder = vms.vm_folder(&name);
            let own = manifest::own_folder(Path::new(""));
            let (files, monitor) = match user {
                // QEMU finds its files from its working directory, and may make sockets only in its own folder.
                Some(_) => (PathBuf::new(), own.join(MONITOR)),
                None => (folder.clone(), known.monitor.clone()),
            };
            let mut command = definition.command(
                &name,
                (&monitor, &tpm::socket(&monitor)),
                |volume| format!("{}{volume}", script::VOLUME).into(),
                |file| manifest::file(&files, file),
                |own| manifest::own_path(&files, own),
            );
            command.extend(sandbox::words(&definition.command_with_places()));
            let tpm = vms.tpm(&name).map(|_| tpm::command_alone(&files, &tpm::socket(&monitor)));
            let becoming = user.map(|user| user.command(Vec::new())).unwrap_or_default();
            let around = Surroundings { folder: folder.clone(), becoming };
            let Some(text) = script::script(&command, &images, &tpm.unwrap_or_default(), &around) else {
                return Ok(None);
            };
            let path = folder.join(SCRIPT);
            // N.B. the daemon owns the folder: QEMU's user may pass through it, and change nothing in it.
            let written = std::fs::write(&path, text)
                .and_then(|()| std::fs::set_permissions(&path, Permissions::from_mode(SCRIPT_MODE)));
            written.map_err(|error| VmError::io("write", &path, error))?;
            Ok(Some(path))
        })
        .await
    }

    /// Forgets a VM that is to run on without Sterna, in any state. Its files stay if Sterna has started it, because they are
    /// in use. Succeeds for an unknown VM.
    pub(crate) async fn let_go(self: &Arc<Self>, name: &str) -> Result<(), VmError> {
        let (vms, name) = (Arc::clone(self), name.to_owned());
        blocking(move || {
            let Ok(known) = vms.get(&name) else { return Ok(()) };
            vms.forget(&name)?;
            // A QEMU that Sterna has not started uses files of its own.
            if known.log.is_none() {
                remove_folder(&vms.vm_folder(&name));
            }
            Ok(())
        })
        .await
    }

    /// Removes an adopted VM from the list if it is not leaving after all.
    pub(crate) async fn let_go_unless_leaving(self: &Arc<Self>, name: &str) -> Result<(), VmError> {
        match self.get(name) {
            Ok(known) if known.standing == Standing::Home && self.is_somebodys(name) => {
                self.let_go(name).await
            }
            // The task of its migration does it.
            _ => Ok(()),
        }
    }

    /// Returns whether Sterna did not start a VM.
    pub(super) fn is_somebodys(&self, name: &str) -> bool {
        self.entries().get(name).is_some_and(|entry| entry.record.monitor.is_some())
    }
}
