//! Deletes kept images when there are too many; `migration::retention` chooses them. Also removes the marks
//! of targets that are complete.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use migration::journal::State;
use migration::retention::{KeptImage, Necessity, RetentionLimits, surplus};

use crate::host::{VolumeOrders, blocking};
use crate::images::inventory::{self, Kept};
use crate::images::{half_made, replicas};
use crate::stores::StoreKind;
use crate::volumes::views::answer;

/// How often the journal is checked for changes.
const LOOK_INTERVAL: Duration = Duration::from_secs(5);

impl VolumeOrders {
    /// Begins to keep the kept images within their limits, until the daemon stops.
    pub(crate) fn begin_retention(self: &Arc<Self>) {
        let host = Arc::clone(self);
        tokio::spawn(async move {
            let (mut seen, mut settled) = (None, None);
            loop {
                let version = host.journal.version();
                if settled.replace(version) != Some(version) {
                    host.settle_marks().await;
                }
                // A journal in question is no basis for deleting anything.
                let is_quiet = host.journal.read(|state| {
                    state.unfinished().next().is_none() && state.in_question().next().is_none()
                });
                if is_quiet && seen.replace(version) != Some(version) {
                    host.give_up_surplus().await;
                }
                tokio::select! {
                    () = tokio::time::sleep(LOOK_INTERVAL) => {}
                    () = host.stopping.begins() => return,
                }
            }
        });
    }

    /// Deletes the marks of complete targets. A store that does not answer keeps them until the next start.
    async fn settle_marks(self: &Arc<Self>) {
        let names: Vec<String> = self.stores.iter().map(|store| store.name().to_owned()).collect();
        for name in names {
            let host = Arc::clone(self);
            let settled = answer(&self.looks, move || match host.stores.get(&name).ok()?.kind() {
                StoreKind::Folder { folder, .. } => {
                    let is_complete =
                        |image: &Path| host.journal.read(|state| half_made::is_complete(image, state));
                    half_made::settle(folder.path(), is_complete).ok()
                }
                StoreKind::Single(_) => None,
            });
            // Failures are tried again when the journal has changed.
            settled.await;
        }
    }

    async fn give_up_surplus(self: &Arc<Self>) {
        let found = self.find_kept().await;
        if found.is_empty() {
            return;
        }
        let host = Arc::clone(self);
        let judged = blocking(move || {
            let state = host.journal.read(State::clone);
            let mut bytes_per_store_max = BTreeMap::new();
            for store in host.stores.iter() {
                if let Ok(Some(space)) = store.space() {
                    let percent = u64::from(host.limits.now().kept.percent_of_store);
                    bytes_per_store_max.insert(store.name().to_owned(), space.total / 100 * percent);
                }
            }
            let images_per_volume_max = host.limits.now().kept.images_per_volume as usize;
            let limits = RetentionLimits { images_per_volume_max, bytes_per_store_max };
            let images: Vec<KeptImage> = found
                .iter()
                .map(|kept| KeptImage {
                    volume: kept.volume.clone(),
                    migration: kept.migration,
                    store: kept.image.store.clone(),
                    allocated_bytes: kept.allocated_bytes.unwrap_or(0),
                    necessity: match host.custody.is_kept(&kept.image.place, kept.migration) {
                        true => necessity(&state, &found, kept, |kept| {
                            inventory::file_of(kept)
                                .is_some_and(|path| replicas::is_untouched(&host.config.data_dir, &path))
                        }),
                        // N.B. a journal of another life gave the same numbers.
                        false => Necessity::Needed,
                    },
                })
                .collect();
            Ok(surplus(&images, &limits).into_iter().map(|at| found[at].clone()).collect::<Vec<_>>())
        });
        for spare in judged.await.unwrap_or_default() {
            match self.drop_spare(&spare).await {
                Ok(()) => tracing::info!(
                    volume = %spare.volume,
                    image = %spare.image.place,
                    "gave up the oldest kept image: limits.kept_images_per_volume or limits.kept_percent_of_store is exceeded"
                ),
                Err(error) => {
                    tracing::debug!(volume = %spare.volume, reason = %error.message(), "cannot give up a kept image yet");
                }
            }
        }
    }
}

/// Returns whether anything relies on a kept image. An image counts as needed unless it is known to be spare.
fn necessity(state: &State, all: &[Kept], kept: &Kept, is_replica: impl Fn(&Kept) -> bool) -> Necessity {
    let is_file_in_store = kept.allocated_bytes.is_some() && !kept.image.is_adopted();
    let left_by = state.migrations.get(&kept.migration).filter(|known| known.has_ended());
    let position = left_by.and_then(|known| known.names.iter().position(|name| *name == kept.volume));
    let volume =
        left_by.zip(position).and_then(|(known, at)| known.volumes.get(at)).map(|moving| moving.volume);
    let Some(volume) = volume.filter(|_| is_file_in_store && !is_replica(kept)) else {
        return Necessity::Needed;
    };
    // A local volume is newer than all kept images of it. Of a volume at another host, the newest copy here may be the last one.
    let is_newest = || {
        let others = all.iter().filter(|other| other.volume == kept.volume);
        others.map(|other| other.migration).max() == Some(kept.migration)
    };
    if state.volumes.contains_key(&volume) || state.moved.contains_key(&volume) && !is_newest() {
        Necessity::Spare
    } else {
        Necessity::Needed
    }
}
