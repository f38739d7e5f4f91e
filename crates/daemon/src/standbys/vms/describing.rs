//! The source's side: describes the VMs of a standby when they have changed, and has them checked every hour.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use ring::digest::{SHA256, digest};
use tokio::time::sleep;

use crate::error::RequestError;
use crate::journal::now_unix_ms;
use crate::standbys::book::SourceConfig;
use crate::standbys::frames::{Answered, Ask, VmPiece, cleaned};
use crate::standbys::source::Source;
use crate::standbys::{Standbys, lock};
use crate::vms::Standing;

/// Time between two looks at the VMs of a standby.
const LOOK_EVERY: Duration = Duration::from_secs(60);
/// Time before another try if the other host has not answered.
const RETRY: Duration = Duration::from_secs(5);
/// The other host checks again after this time whether it could start a VM.
const CHECK_EVERY: Duration = Duration::from_secs(3600);
/// The same for a VM that it could not start: somebody may have mended that.
const CHECK_PROBLEM_EVERY: Duration = Duration::from_secs(300);
/// The length of a piece in bytes.
const PIECE_BYTES: usize = 512 << 10;

/// What the other host knows.
#[derive(Default)]
struct Told {
    vms: BTreeMap<String, Described>,
    /// The names of which it has heard; `None`: nothing yet.
    names: Option<Vec<String>>,
}

/// A description that the other host has.
struct Described {
    hash: Vec<u8>,
    at: Instant,
    shown: api::StandbyVm,
}

impl Standbys {
    /// Describes the VMs of a standby until it is removed.
    pub(in crate::standbys) async fn describe_vms(self: Arc<Self>, source: Arc<Source>) {
        let mut told = Told::default();
        while lock(&self.sources).get(&source.standby()).is_some_and(|known| Arc::ptr_eq(known, &source)) {
            let pause = match self.describe_all(&source, &mut told).await {
                Ok(()) => LOOK_EVERY,
                Err(error) => {
                    tracing::debug!(standby = %source.config().name, error = %error.message(), "cannot describe its VMs");
                    RETRY
                }
            };
            tokio::select! {
                () = self.stopping.begins() => return,
                () = sleep(pause) => {}
            }
        }
    }

    /// Describes what has changed. Fails if the other host does not answer.
    async fn describe_all(&self, source: &Source, told: &mut Told) -> Result<(), RequestError> {
        let config = source.config();
        // The volumes and their VMs may be on their way to another host.
        if config.volumes.iter().any(|volume| self.volumes.service(&volume.name).is_none()) {
            return Ok(());
        }
        let names = self.vms_of(&config);
        told.vms.retain(|name, _| names.contains(name));
        let known = |name: &String| told.vms.get(name).map(|described| described.shown.clone());
        let new =
            |name: &String| api::StandbyVm { name: name.clone(), described_unix_ms: None, problem: None };
        let shown = names.iter().map(|name| known(name).unwrap_or_else(|| new(name))).collect();
        source.show(|all| all.vms = shown);
        if told.names.as_ref() != Some(&names) {
            let _turn = self.describing.of(source.host()).await;
            self.asker.ask(source.host(), source.standby(), Ask::Vms(names.clone()), Bytes::new()).await?;
            told.names = Some(names.clone());
        }
        for name in names {
            let shown = self.describe(source, &name, told).await?;
            source.show(|all| {
                all.vms.iter_mut().filter(|vm| vm.name == name).for_each(|vm| vm.clone_from(&shown));
            });
        }
        Ok(())
    }

    /// Returns the VMs whose volumes are all in a standby.
    fn vms_of(&self, config: &SourceConfig) -> Vec<String> {
        let has = |name: &String| config.volumes.iter().any(|volume| volume.name == *name);
        let vms = self.vms.list().into_iter().filter(|vm| {
            vm.standing == Standing::Home && !vm.volumes.is_empty() && vm.volumes.iter().all(has)
        });
        vms.map(|vm| vm.name).collect()
    }

    async fn describe(
        &self,
        source: &Source,
        name: &str,
        told: &mut Told,
    ) -> Result<api::StandbyVm, RequestError> {
        let mut shown = api::StandbyVm { name: name.to_owned(), described_unix_ms: None, problem: None };
        let description = match self.vm_orders.describe_as_it_is(name).await {
            Ok(description) => Bytes::from(description),
            Err(error) => {
                shown.described_unix_ms = told.vms.get(name).and_then(|known| known.shown.described_unix_ms);
                shown.problem = Some(format!("what starting it takes cannot be sent: {}", error.message()));
                return Ok(shown);
            }
        };
        let hash = digest(&SHA256, &description);
        if let Some(known) = told.vms.get(name)
            && known.hash == hash.as_ref()
            && known.at.elapsed()
                < if known.shown.problem.is_some() { CHECK_PROBLEM_EVERY } else { CHECK_EVERY }
        {
            return Ok(known.shown.clone());
        }
        shown.problem = self.send(source, name, hash.as_ref(), description).await?.as_deref().map(cleaned);
        shown.described_unix_ms = Some(now_unix_ms());
        let described = Described { hash: hash.as_ref().to_vec(), at: Instant::now(), shown: shown.clone() };
        told.vms.insert(name.to_owned(), described);
        Ok(shown)
    }

    /// Sends a description. Returns why the VM could not be started at the other host.
    async fn send(
        &self,
        source: &Source,
        name: &str,
        hash: &[u8],
        mut description: Bytes,
    ) -> Result<Option<String>, RequestError> {
        let too_long = || RequestError::Internal("a description of a VM is too long".to_owned());
        let bytes = u32::try_from(description.len()).map_err(|_| too_long())?;
        let _turn = self.describing.of(source.host()).await;
        loop {
            let offset = bytes - description.len() as u32;
            let payload = description.split_to(description.len().min(PIECE_BYTES));
            let piece = VmPiece { vm: name.to_owned(), offset, bytes, hash: hash.to_vec() };
            match self.asker.ask(source.host(), source.standby(), Ask::Vm(piece), payload).await? {
                Answered::Vm { problem } => return Ok(problem),
                _ if description.is_empty() => {
                    return Err(RequestError::Internal(
                        "the other host has answered another order".to_owned(),
                    ));
                }
                _ => {}
            }
        }
    }
}
