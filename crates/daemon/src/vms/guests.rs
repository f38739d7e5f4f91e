//! VMs that somebody else has started, while they are among ours: on their way to another host, or given back here.
//!
//! ```text
//!   adopted ── take_in() ──► Home ── leaving() ──► Leaving ──┬─ left(): its QEMU ended, no longer adopted
//!                                                            └─ stayed(), let_go(): adopted as before, its QEMU goes on
//!   Home, started by Sterna ── let_go() ──► its QEMU goes on without
//! ```
//! The monitor of an adopted VM is ours only for that time: it serves one client at a time.

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
use super::{Adopted, Definition, Life, VmError, Vms, launched, remove_folder, tpm, user_of};
use crate::journal::now_unix_ms;

/// In the folder of a VM: what starts it once it has been given back.
const SCRIPT: &str = "start";
/// The monitor of a VM that was started by the script, in its own folder.
const MONITOR: &str = "sterna.qmp";
/// Only the user that runs the daemon may start it so.
const SCRIPT_MODE: u32 = 0o700;

impl Vms {
    /// Takes an adopted VM in, with the definition that was derived of it, so that it can leave.
    ///
    /// # Errors
    /// [`VmError`]; it is adopted as before then.
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
        };
        let vms = Arc::clone(self);
        blocking(move || {
            let definition = Definition::parse(&text)?;
            let files = manifest::read_files(definition.files(), &reader)?;
            let manifest = Manifest { name: record.name.clone(), definition: text, files, needs: None };
            manifest.encode()?;
            vms.enter(&record, definition, &manifest.files, None)
        })
        .await?;
        self.set(&name, None, Life::Alive(alive.clone()));
        self.watch(name, alive.clone(), alive.qemu.events());
        Ok(())
    }

    /// Writes down how a VM that Sterna has started is started again without it, over the plain images that it has been
    /// given back, and returns where. It is beside its files; `None`: it has a disk in a way that is not known.
    ///
    /// # Errors
    /// [`VmError`].
    pub(crate) async fn write_script(
        self: &Arc<Self>,
        name: &str,
        images: Vec<GivenBack>,
    ) -> Result<Option<PathBuf>, VmError> {
        let known = self.get(name)?;
        let definition = Definition::parse(&known.definition)?;
        // N.B. as the daemon has started it: who wrote the command may be another host.
        let user = self.user_for(name, &definition).await?;
        let (vms, name) = (Arc::clone(self), name.to_owned());
        blocking(move || {
            let folder = vms.vm_folder(&name);
            let own = manifest::own_folder(Path::new(""));
            let (files, monitor) = match user {
                // It finds its files from where it is started, and may make sockets in its own folder only.
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
            // N.B. the folder is the daemon's: QEMU's user passes through, and changes nothing in it.
            let written = std::fs::write(&path, text)
                .and_then(|()| std::fs::set_permissions(&path, Permissions::from_mode(SCRIPT_MODE)));
            written.map_err(|error| VmError::io("write", &path, error))?;
            Ok(Some(path))
        })
        .await
    }

    /// Forgets a VM that is to go on without Sterna, whatever it does. Its files stay if Sterna has started it: they
    /// are in use. It is no error if the VM is not known.
    ///
    /// # Errors
    /// [`VmError`].
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

    /// Lets a VM go that was taken in and does not leave after all.
    ///
    /// # Errors
    /// [`VmError`].
    pub(crate) async fn let_go_unless_leaving(self: &Arc<Self>, name: &str) -> Result<(), VmError> {
        match self.get(name) {
            Ok(known) if known.standing == Standing::Home && self.is_somebodys(name) => {
                self.let_go(name).await
            }
            // The task that follows its migration lets it go.
            _ => Ok(()),
        }
    }

    /// Whether a VM was started by somebody else.
    pub(super) fn is_somebodys(&self, name: &str) -> bool {
        self.entries().get(name).is_some_and(|entry| entry.record.monitor.is_some())
    }
}
