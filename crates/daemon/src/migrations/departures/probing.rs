//! Checks in a dry run whether blocks would go straight to the other host's store. The check writes probes and removes them.
//!
//! ```text
//!   source: a probe in each of its folders ──► the other host looks for them in its store ──► the probes go
//! ```
//! A migration proves this again, with the image itself ([`crate::migrations::arrivals::shared`]).

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use api::{MigrateVolume, MigrationPlan, SharedTarget};
use block::device::ALIGNMENT;
use lane::shared_storage::{Probe, Secret, Seen};
use migration::journal::{ImageFormat, VolumeRecord};
use migration::wire::{PROBES_MAX, ProbeSeen, Surveyed};
use transport::Session;

use crate::host::{Departures, blocking};
use crate::stores::StoreKind;
use crate::volumes::views::answer;

/// The time that the other host has for its check of stores.
const ANSWER_MAX: Duration = Duration::from_secs(10);

impl Departures {
    /// Returns which of another host's probes are visible here, in the folder of a store.
    pub(crate) async fn see_probes(&self, store: String, secrets: Vec<[u8; 32]>) -> Vec<ProbeSeen> {
        let count = secrets.len();
        let folder = self.stores.get(&store).ok().and_then(|store| match store.kind() {
            StoreKind::Folder { folder, .. } => Some(folder.path().to_owned()),
            StoreKind::Single(_) => None,
        });
        let Some(folder) = folder else { return vec![ProbeSeen::Nothing; count] };
        let look = move || {
            let look = |secret| match Seen::look(&folder, Secret(secret)) {
                Seen::Nothing => ProbeSeen::Nothing,
                Seen::Unlocked => ProbeSeen::Unlocked,
                Seen::Locked => ProbeSeen::Locked,
            };
            secrets.into_iter().map(look).collect()
        };
        answer(&self.looks, look).await.unwrap_or_else(|| vec![ProbeSeen::Nothing; count])
    }

    /// Adds to the plan, for each volume, whether its blocks would go straight to the other host's store.
    pub(crate) async fn plan_sharing(
        self: &Arc<Self>,
        session: &Session,
        records: &[VolumeRecord],
        order: &MigrateVolume,
        surveyed: &Surveyed,
        plan: &mut MigrationPlan,
    ) {
        if order.shared_target == SharedTarget::Never {
            return;
        }
        let leasable = |record: &&VolumeRecord| record.size_bytes.is_multiple_of(u64::from(ALIGNMENT));
        let fit = surveyed.places.iter().filter(|place| {
            let is_file = place.place.starts_with('/') && !place.place.starts_with("/dev/");
            let record = records.iter().find(|record| record.volume == place.volume);
            is_file && place.format == ImageFormat::Raw && record.as_ref().is_some_and(leasable)
        });
        // One offer has one store.
        let fit: Vec<_> = fit.collect();
        let Some(store) = fit.first().map(|place| place.store.clone()) else { return };
        let (probes, problems) = self.put_probes().await;
        plan.warnings.extend(problems);
        let secrets = probes.iter().map(|probe| probe.secret().0).collect();
        let seen = tokio::time::timeout(ANSWER_MAX, self.peers.probe(session, store.clone(), secrets)).await;
        let seen = seen.ok().flatten().unwrap_or_default();
        if seen.contains(&ProbeSeen::Locked) {
            for planned in &mut plan.volumes {
                let record = records.iter().find(|record| record.name == planned.name);
                planned.shared =
                    record.is_some_and(|record| fit.iter().any(|place| place.volume == record.volume));
            }
        } else if let Some((probe, _)) =
            probes.iter().zip(&seen).find(|(_, seen)| **seen == ProbeSeen::Unlocked)
        {
            plan.warnings.push(format!(
                "{} is the folder of the store \"{store}\" there, but that host does not see the locks of this one (a mount \
                 with locks of its own, or a copy): blocks go over the link",
                probe.folder().display()
            ));
        }
        // Dropping probes removes files.
        let removed = blocking(move || {
            drop(probes);
            Ok(())
        });
        // The closure cannot fail.
        let _ = removed.await;
    }

    /// Puts a probe into each folder that the other host may share. Also returns why this failed in folders that
    /// the configuration names as shared.
    async fn put_probes(&self) -> (Vec<Probe>, Vec<String>) {
        let stores = self.stores.iter().filter_map(|store| match store.kind() {
            StoreKind::Folder { folder, .. } => Some(folder.path().to_owned()),
            StoreKind::Single(_) => None,
        });
        let shared: Vec<PathBuf> = self.config.hosts.shared_folders.clone();
        let folders: Vec<PathBuf> = shared.iter().cloned().chain(stores).take(PROBES_MAX).collect();
        let (mut probes, mut problems) = (Vec::new(), Vec::new());
        for folder in folders {
            let is_named = shared.contains(&folder);
            let name = folder.display().to_string();
            // A server that does not answer must not cause a long wait.
            let put = answer(&self.looks, move || Probe::put(&folder)).await;
            match put.unwrap_or_else(|| Err(format!("{name} does not answer"))) {
                Ok(probe) => probes.push(probe),
                Err(problem) if is_named => {
                    problems.push(format!(
                        "{problem}; if it is a store of the other host, blocks go over the link"
                    ));
                }
                Err(_) => {}
            }
        }
        (probes, problems)
    }
}
