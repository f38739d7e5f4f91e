//! Sees to the volumes of a journal that was put back from a backup: asks other hosts, looks at images, and serves what
//! [`Restoration`] says is this host's, or what somebody orders.
//!
//! ```text
//!   hold_restored: names are taken, nothing is served
//!   begin_restoration: Ask ─► other hosts ─► Answered;  Look ─► image ─► Looked;  Confirm ─► journal ─► served
//!   take_restored: somebody's order;  forget_restored: somebody says that it is not this host's
//! ```

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use api::{PromoteVolume, RemovedVolume};
use chronicle::BranchId;
use migration::journal::{Doubt, ImageFormat, Place, Record, VolumeRecord};
use migration::restoration::{
    self, ANSWER_MAX, Action, Event, Look, Order, Refused, Restoration, Standing, Word,
};
use migration::{HostId, VolumeId};
use tokio::sync::Notify;

use super::{Host, blocking};
use crate::error::{RequestError, RestoredError};
use crate::host::volumes::create::random_bytes;
use crate::images::half_made;
use crate::stores::StoreKind;
use crate::volumes::registry::{Claim, Service};

/// How often what is waited for is looked at besides being told: hosts are paired and removed without a word to it.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// What is decided of volumes that wait.
pub(super) struct Restoring {
    machine: Mutex<Restoration>,
    /// When the time of the machine began.
    began: Instant,
    /// Something has happened.
    told: Notify,
}

impl Default for Restoring {
    fn default() -> Self {
        Self { machine: Mutex::default(), began: Instant::now(), told: Notify::new() }
    }
}

impl Restoring {
    fn tell(&self, event: Event) {
        let now = self.began.elapsed();
        self.lock().handle_event(now, event);
        self.told.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, Restoration> {
        self.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Host {
    /// Takes the names of what waits: nothing is served under them, and nothing else is called so.
    pub(in crate::host) fn hold_restored(&self) {
        let waiting = self.journal.read(|state| {
            let names = state
                .restored_volumes()
                .map(|(volume, waiting)| (waiting.volume.record.name.clone(), volume));
            names.collect::<Vec<_>>()
        });
        for (name, volume) in waiting {
            tracing::warn!(volume = %name, "the journal was put back from a backup: the volume is not served before it is known whose it is");
            self.volumes.add(&name, volume);
            self.say_standing(&name);
        }
    }

    /// Asks other hosts, until nothing waits any more or the daemon stops.
    pub(crate) fn begin_restoration(self: &Arc<Self>) {
        if self.journal.read(|state| state.restored_volumes().next().is_none()) {
            return;
        }
        let host = Arc::clone(self);
        tokio::spawn(async move {
            let see = async {
                while host.see_to_restored() {
                    let told = host.restoring.told.notified();
                    let _ = tokio::time::timeout(LOOK_INTERVAL, told).await;
                }
            };
            tokio::select! {
                () = see => {}
                () = host.stopping() => {}
            }
        });
    }

    /// Does what is to be done now; says whether anything waits.
    fn see_to_restored(self: &Arc<Self>) -> bool {
        let waiting = self.journal.read(Event::waiting);
        let is_over = matches!(&waiting, Event::Waiting(claims) if claims.is_empty());
        // N.B. a list that cannot be read is not an empty one: nobody would be asked.
        if let Some(hosts) = self.hosts.paired() {
            let now = self.restoring.began.elapsed();
            let mut machine = self.restoring.lock();
            machine.handle_event(now, Event::Hosts(hosts));
            machine.handle_event(now, waiting);
            machine.handle_timeout(now);
            let actions: Vec<Action> = std::iter::from_fn(|| machine.poll_action()).collect();
            drop(machine);
            actions.iter().for_each(|action| self.carry_out_restoration(action));
        }
        let names: Vec<String> = self.journal.read(|state| {
            state.restored_volumes().map(|(_, waiting)| waiting.volume.record.name.clone()).collect()
        });
        names.iter().for_each(|name| self.say_standing(name));
        !is_over
    }

    fn carry_out_restoration(self: &Arc<Self>, action: &Action) {
        let host = Arc::clone(self);
        match *action {
            Action::Ask(peer) => drop(tokio::spawn(async move { host.ask_whose(peer).await })),
            Action::Look(volume) => drop(tokio::task::spawn_blocking(move || {
                let record =
                    host.journal.read(|state| Some(state.restored_volume(volume)?.volume.record.clone()));
                let look = record.map_or(Look::Missing, |record| host.look_at_restored(&record));
                host.restoring.tell(Event::Looked(volume, look));
            })),
            Action::Confirm(volume) => drop(tokio::spawn(async move {
                let confirmed = host.confirm(volume).await;
                if let Err(error) = confirmed {
                    tracing::warn!(%volume, error = %error.message(), "a volume that other hosts have confirmed is not served yet");
                    host.restoring.tell(Event::NotRecorded(volume));
                }
            })),
        }
    }

    /// Asks one host what it knows of all that waits.
    async fn ask_whose(&self, peer: HostId) {
        let Ok(session) = self.hosts.session_with(peer) else { return };
        if !session.status().is_connected {
            return;
        }
        let volumes: Vec<VolumeId> =
            self.journal.read(|state| state.restored_volumes().map(|(volume, _)| volume).collect());
        let asked = tokio::time::timeout(ANSWER_MAX, self.peers.whose(&session, &volumes)).await;
        if let Ok(Some(answer)) = asked {
            self.restoring.tell(Event::Answered(peer, answer));
        }
    }

    /// Looks at the image of a volume that waits, and for another one that it may have moved to; sleeps.
    fn look_at_restored(&self, record: &VolumeRecord) -> Look {
        let Some(path) = record.image.place.file().map(Path::new) else { return Look::Fit };
        if !path.is_file() {
            return Look::Missing;
        }
        if half_made::is_marked(path) {
            return Look::HalfMade;
        }
        let known: BTreeSet<PathBuf> = self.journal.read(|state| {
            let others = state.claimed_records().filter(|other| other.volume != record.volume);
            others.filter_map(|other| other.image.place.file().map(PathBuf::from)).collect()
        });
        let folders = self.stores.iter().filter_map(|store| match store.kind() {
            StoreKind::Folder { folder, .. } => Some(folder),
            StoreKind::Single(_) => None,
        });
        let images = folders.flat_map(|folder| {
            [ImageFormat::Raw, ImageFormat::Qcow2].map(|format| folder.image_path(&record.name, format))
        });
        let is_rival = |image: &PathBuf| {
            image != path && image.is_file() && !known.contains(image) && !half_made::is_marked(image)
        };
        images.into_iter().find(is_rival).map_or(Look::Fit, |image| Look::Rival(image.display().to_string()))
    }

    /// Serves a volume that all other hosts have confirmed.
    async fn confirm(self: &Arc<Self>, volume: VolumeId) -> Result<(), RequestError> {
        let Some(name) =
            self.journal.read(|state| Some(state.restored_volume(volume)?.volume.record.name.clone()))
        else {
            return Ok(());
        };
        let (claim, _) = self.volumes.claim(&name)?;
        let records = self.journal.read(|state| restoration::reinstate(state, volume));
        let records = records.map_err(|_| RestoredError::NotWaiting(name.clone()))?;
        tracing::info!(volume = %name, "all other hosts have confirmed that a volume of the journal that was put back is this host's");
        self.reinstate(claim, volume, &name, records).await
    }

    async fn reinstate(
        self: &Arc<Self>,
        claim: Claim,
        volume: VolumeId,
        name: &str,
        mut records: Vec<Record>,
    ) -> Result<(), RequestError> {
        records.extend(self.grown(volume).await?);
        self.journal.commit(records).await?;
        claim.created(volume);
        drop(claim);
        self.serve_in_background(name);
        self.restoring.told.notify_one();
        // A VM that was on its way when the backup was made is here with its last volume.
        let host = Arc::clone(self);
        tokio::spawn(async move { host.settle_vms().await });
        Ok(())
    }

    /// The size that a volume has by now: its image may have grown since the backup was made.
    async fn grown(&self, volume: VolumeId) -> Result<Option<Record>, RequestError> {
        let record = self.journal.read(|state| Some(state.restored_volume(volume)?.volume.record.clone()));
        let Some(record) = record else { return Ok(None) };
        let (Place::File(path), ImageFormat::Raw) = (record.image.place, record.image.format) else {
            return Ok(None);
        };
        blocking(move || {
            let size_bytes = std::fs::metadata(&path).map(|found| found.len());
            let size_bytes =
                size_bytes.map_err(|error| RequestError::storage("look at", Path::new(&path), &error))?;
            let has_grown = size_bytes > record.size_bytes && size_bytes.is_multiple_of(512);
            Ok(has_grown.then_some(Record::Resized { volume, size_bytes }))
        })
        .await
    }

    /// Serves a volume by somebody's order.
    ///
    /// # Errors
    /// [`RestoredError`]: nothing has changed.
    pub(in crate::host) async fn take_restored(
        self: Arc<Self>,
        name: String,
        order: &PromoteVolume,
    ) -> Result<api::Volume, RequestError> {
        let found = self.journal.read(|state| state.restored_named(&name).map(|(volume, _)| volume));
        let volume = found.ok_or_else(|| RestoredError::NotWaiting(name.clone()))?;
        let (claim, _) = self.volumes.claim(&name)?;
        let standing = self.restoring.lock().standing(volume).unwrap_or(Standing::Unheard(Vec::new()));
        let how = if order.force { Order::Force } else { Order::Known };
        let branch = BranchId(random_bytes());
        let records = self.journal.read(|state| restoration::order(state, volume, &standing, how, branch));
        let records = records.map_err(|reason| match reason {
            Refused::NotWaiting => RestoredError::NotWaiting(name.clone()),
            reason => RestoredError::Refused { volume: name.clone(), reason, standing: self.standing(&name) },
        })?;
        tracing::warn!(volume = %name, ?standing, ?how, "a volume of the journal that was put back is this host's by order");
        self.reinstate(claim, volume, &name, records).await?;
        self.volumes.lane(&name).await?;
        self.describe_volume(&name).await
    }

    /// Forgets a volume that is not this host's; its image stays.
    pub(in crate::host) async fn forget_restored(
        &self,
        claim: Claim,
        volume: VolumeId,
        name: String,
    ) -> Result<RemovedVolume, RequestError> {
        let (records, image) = self.journal.read(|state| {
            let image = state
                .restored_volume(volume)
                .map(|waiting| waiting.volume.record.image.place.name().to_owned());
            (restoration::forget(state, volume), image.unwrap_or_default())
        });
        let records = records.map_err(|_| RestoredError::NotWaiting(name.clone()))?;
        self.journal.commit(records).await?;
        claim.removed();
        self.restoring.told.notify_one();
        tracing::info!(volume = %name, image, "a volume of the journal that was put back is forgotten; its image stays");
        let (image_fate, kept_because) = (api::ImageFate::Kept, Some(api::KeptBecause::Unknown));
        Ok(RemovedVolume { name, image, image_fate, kept_because, host: None })
    }

    /// Says of a volume that is not found among those of this host whether it waits.
    pub(in crate::host) fn or_unconfirmed(&self, name: &str, error: RequestError) -> RequestError {
        match error {
            RequestError::VolumeNotFound(_)
                if self.journal.read(|state| state.restored_named(name).is_some()) =>
            {
                self.unconfirmed(name).into()
            }
            error => error,
        }
    }

    /// Why a volume that waits is not served.
    pub(in crate::host) fn unconfirmed(&self, name: &str) -> RestoredError {
        RestoredError::Unconfirmed { volume: name.to_owned(), standing: self.standing(name) }
    }

    fn say_standing(&self, name: &str) {
        let Some(attempt) = self.volumes.attempt(name) else { return };
        let standing = self.standing(name);
        match self.volumes.service(name) {
            Some(Service::Unconfirmed(said)) if said == standing => {}
            Some(Service::Unconfirmed(_) | Service::Starting) => {
                self.volumes.set(name, &attempt, Service::Unconfirmed(standing));
            }
            _ => {}
        }
    }

    /// What a volume waits for, in words, and what can be done about it.
    fn standing(&self, name: &str) -> String {
        let found = self.journal.read(|state| {
            let (volume, waiting) = state.restored_named(name)?;
            Some((volume, waiting.doubt.clone()))
        });
        let Some((volume, doubt)) = found else { return String::new() };
        let standing = self.restoring.lock().standing(volume);
        let (waits_for, then) = self.in_words(name, standing.as_ref(), doubt.as_ref());
        format!("the journal was put back from a backup, and {waits_for}; {then}")
    }

    fn in_words(&self, name: &str, standing: Option<&Standing>, doubt: Option<&Doubt>) -> (String, String) {
        let list = |hosts: &[HostId]| {
            let names: Vec<String> =
                hosts.iter().map(|host| format!("\"{}\"", self.hosts.name_of(*host))).collect();
            names.join(", ")
        };
        let known = format!("if you know that no other host has it: sterna volume promote {name} --restored");
        let forced = format!(
            "to forget it here: sterna volume remove {name}; to go on with the image that is here all the same, which loses what was \
             written elsewhere, or makes two volumes of one: sterna volume promote {name} --restored --force"
        );
        if let Some(Doubt::Hollow { peer_name }) = doubt {
            let waits_for = format!(
                "it lacked blocks then that host \"{peer_name}\" had: which ones it lacks is not known any more"
            );
            return (waits_for, format!("to forget it here, its image stays: sterna volume remove {name}"));
        }
        match standing {
            None if self.hosts.paired().is_none() => {
                ("the list of other hosts cannot be read".to_owned(), known)
            }
            None => ("other hosts are being asked whose it is".to_owned(), known),
            Some(Standing::Unheard(hosts)) => {
                (format!("these hosts have not said whose it is: {}", list(hosts)), known)
            }
            Some(Standing::Unreliable(hosts)) => {
                let waits_for =
                    format!("these hosts do not know of it, and were put back themselves: {}", list(hosts));
                (waits_for, known)
            }
            Some(Standing::Contradicted(words)) => {
                let words = words.iter().map(|(host, word)| {
                    let host = self.hosts.name_of(*host);
                    match word {
                        Word::HasIt(generation) => format!(
                            "host \"{host}\" knows that another host has it, with generation {}",
                            generation.0
                        ),
                        Word::KnowsLater(generation) => {
                            format!("host \"{host}\" has seen it with generation {}", generation.0)
                        }
                        Word::Unsure(generation) => {
                            format!("host \"{host}\" may have it as well, with generation {}", generation.0)
                        }
                        Word::CameBack(_) | Word::Confirms => format!("host \"{host}\" has it not"),
                    }
                });
                (words.collect::<Vec<_>>().join(", "), forced)
            }
            Some(Standing::InDoubt { generation: Some(generation) }) => {
                let waits_for = format!(
                    "it has come here again since, with generation {}, perhaps to another image",
                    generation.0
                );
                (waits_for, format!("if its image is the right one: sterna volume promote {name} --restored"))
            }
            Some(Standing::InDoubt { generation: None } | Standing::Confirmed) => match doubt {
                Some(Doubt::Lasting) => {
                    let waits_for = "its device or export keeps an old copy when a volume leaves it, so nobody can say whether this is one";
                    (waits_for.to_owned(), known)
                }
                Some(Doubt::Copy { peer_name, .. }) => {
                    (format!("it was a copy that waited for the word of host \"{peer_name}\""), known)
                }
                Some(Doubt::BetweenStores { other }) => {
                    let other = &other.place;
                    (format!("it was being moved, so its image may be {other} as well"), known)
                }
                Some(Doubt::Hollow { .. }) | None => ("all other hosts have confirmed it".to_owned(), known),
            },
            Some(Standing::NoImage) => {
                let then = format!("if it has left, forget it here: sterna volume remove {name}");
                ("its image is not there: it has left, or its store is not mounted".to_owned(), then)
            }
            Some(Standing::HalfMade) => {
                ("its image is marked as one that a migration has not completed".to_owned(), forced)
            }
            Some(Standing::Rival { image }) => {
                (format!("there is another image of it, which may be the later one: {image}"), forced)
            }
        }
    }
}
