//! Makes the volumes and VMs of a test, and deletes them.
//!
//! ```text
//!   made:     clone in the standby's folder ─► a second name in the store ─► in the journal ─► served ─► VMs added, started
//!   deleted:  VMs ended, forgotten ─► out of the journal, with the image ─► the name in the store, if it is of this clone ─► the clone
//! ```
//! Only what bears an identity of the test's record, or is the same file as its clone, is deleted.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use api::{RemoveVolume, StopVm};
use hypervisor::qemu::command_line::apart::Networks;

use super::Testing;
use crate::error::RequestError;
use crate::host::blocking;
use crate::standbys::book::{TestNetworks, TestRecord, TestVm, TestVolume};
use crate::standbys::copy::{Input, delete_clone, name_clone, text};
use crate::standbys::promotion::{NewVolume, parse_point};
use crate::standbys::{Kept, Standbys};
use crate::vms::VmError;

impl Standbys {
    /// Makes everything of a test. The error says why that is not possible; what was made until then is there.
    pub(super) async fn make_test(
        self: &Arc<Self>,
        kept: &Arc<Kept>,
        testing: &Testing,
    ) -> Result<TestRecord, String> {
        let test = testing.record();
        let point = test.ordered_point.as_deref().and_then(|point| parse_point(kept, point));
        let answered = kept.copy.clone_point(point, Arc::clone(&testing.progress));
        let at = tokio::select! {
            answer = answered => answer.map_err(|_| "its files cannot be used".to_owned())??,
            () = testing.told_to_end() => return Err("it was ended".to_owned()),
        };
        let words = |error: RequestError| error.message();
        let paths = self.paths_of(kept, &test).map_err(words)?;
        let store = self.folder_of(&kept.config.store)?;
        let (id, named) = (kept.config.id.clone(), paths.clone());
        let names = blocking(move || {
            for (index, path) in named.iter().enumerate() {
                name_clone(&store, &id, index, path)
                    .map_err(|error| RequestError::storage("name the clone", path, &error))?;
            }
            Ok(())
        });
        names.await.map_err(words)?;
        for (volume, path) in test.volumes.iter().zip(&paths) {
            let new = new_volume(kept, volume);
            self.add_volume(new, path).await.map_err(words)?;
        }
        for volume in &test.volumes {
            self.volumes.lane(&volume.name).await.map_err(words)?;
        }
        let test = TestRecord { point: Some(text(at)), ..test };
        self.make_test_vms(kept, test).await
    }

    /// Adds the VMs of a test, and starts them.
    async fn make_test_vms(&self, kept: &Kept, test: TestRecord) -> Result<TestRecord, String> {
        let volumes: BTreeMap<String, String> =
            test.volumes.iter().map(|volume| (volume.of.clone(), volume.name.clone())).collect();
        let networks = match test.networks {
            TestNetworks::Apart => Networks::Apart,
            TestNetworks::AsTheyAre => Networks::AsTheyAre,
        };
        let mut vms = Vec::new();
        for TestVm { name, of, .. } in test.vms.clone() {
            let (id, read) = (kept.config.id.clone(), of.clone());
            let description = self.on_book(move |book| book.vm(&id, &read)).await;
            let description = description.map_err(|error| error.message())?;
            let description = description.ok_or_else(|| format!("the VM {of} is not described any more"))?;
            let added = self.vms.keep_second(&description, &name, &volumes, networks).await;
            let consoles = added.map_err(|error| format!("the VM {name} was not added: {error}"))?;
            vms.push(TestVm { name, of, consoles });
        }
        if test.boot_check.is_some() && vms.iter().all(|vm| vm.consoles.is_empty()) {
            return Err("its VM has no serial console: add -serial null to its definition".to_owned());
        }
        for TestVm { name, .. } in &vms {
            let started = Arc::clone(&self.vm_orders).start_vm(name.clone(), api::StartVm::default()).await;
            started.map_err(|error| format!("the VM {name} was not started: {}", error.message()))?;
        }
        Ok(TestRecord { vms, ..test })
    }

    /// Ends and forgets the VMs of a test. A VM of such a name with other volumes is another's.
    async fn clear_test_vms(&self, test: &TestRecord) -> Result<(), RequestError> {
        for TestVm { name, .. } in &test.vms {
            let Ok(known) = self.vms.get(name) else { continue };
            let is_of_test = |volume: &String| test.volumes.iter().any(|known| known.name == *volume);
            if !known.volumes.iter().all(is_of_test) {
                continue;
            }
            let now = StopVm { now: true, wait_s: None };
            match Arc::clone(&self.vm_orders).stop_vm(name.clone(), now).await {
                Ok(_) | Err(RequestError::Vm(VmError::NotRunning(_))) => {}
                Err(error) => return Err(error),
            }
            Arc::clone(&self.vm_orders).remove_vm(name.clone()).await?;
        }
        Ok(())
    }

    /// Deletes everything of a test. After an error some of it may be left.
    pub(super) async fn clear_test(&self, kept: &Kept, test: &TestRecord) -> Result<(), String> {
        let words = |error: RequestError| error.message();
        kept.copy.give(Input::EndClone);
        // Before the volumes: they are the VMs'.
        self.clear_test_vms(test).await.map_err(words)?;
        for volume in test.volumes.iter().filter(|volume| self.has_volume(&volume.volume)) {
            let how = RemoveVolume { force: true, delete_image: true, ..RemoveVolume::default() };
            let removed = Arc::clone(&self.volume_orders).remove_volume(volume.name.clone(), how).await;
            removed.map_err(words)?;
        }
        let paths = self.paths_of(kept, test).map_err(words)?;
        let (store, id) = (self.folder_of(&kept.config.store)?, kept.config.id.clone());
        let deleted = blocking(move || {
            let paths: Vec<&Path> = paths.iter().map(PathBuf::as_path).collect();
            delete_clone(&store, &id, &paths)
                .map_err(|error| RequestError::storage("delete the clone in", &store, &error))
        });
        deleted.await.map_err(words)
    }

    fn paths_of(&self, kept: &Kept, test: &TestRecord) -> Result<Vec<PathBuf>, RequestError> {
        test.volumes.iter().map(|volume| self.path_of(&kept.config.store, &volume.name)).collect()
    }
}

fn new_volume<'a>(kept: &'a Kept, volume: &'a TestVolume) -> NewVolume<'a> {
    NewVolume { store: &kept.config.store, name: &volume.name, identity: &volume.volume }
}
