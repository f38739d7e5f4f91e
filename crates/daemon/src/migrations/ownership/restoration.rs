//! Handles the volumes of a restored journal: asks other hosts, checks images, and serves the volumes that [`Restoration`] or
//! an order of the administrator gives to this host.
//!
//! ```text
//!   hold_restored: names are taken, nothing is served
//!   begin_restoration: Ask ─► other hosts ─► Answered;  Look ─► image ─► Looked;  Confirm ─► journal ─► served
//!   take_restored: an order;  forget_restored: the administrator says that it is not this host's
//! ```

mod words;

use std::collections::BTreeSet;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use api::{PromoteVolume, RemovedVolume};
use block::store::Access;
use chronicle::BranchId;
use futures_util::future::join_all;
use migration::custody::{Owner, Step};
use migration::journal::{ExportAccess, ImageFormat, Place, Record, VolumeRecord};
use migration::restoration::{
    self, ANSWER_MAX, Action, Event, Look, Measured, Order, Restoration, Standing, hosts_to_ask, size_now,
};
use migration::{HostId, VolumeId};
use tokio::sync::Notify;

use self::words::Words;
use crate::error::{RequestError, RestoredError};
use crate::host::{Ownership, blocking};
use crate::hosts::Hosts;
use crate::images::{half_made, opening};
use crate::journal::Journal;
use crate::stores::StoreKind;
use crate::volumes::orders::create::random_bytes;
use crate::volumes::registry::{Claim, Service, Volumes};

/// How often waiting volumes are checked, besides notifications: pairing and removing hosts sends none.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// How long an order waits for hosts that have not answered: longer than the pause before another attempt to reach one.
const SILENT_MAX: Duration = Duration::from_secs(6);
const SILENT_POLL: Duration = Duration::from_millis(200);

/// The decisions about volumes that wait.
pub(crate) struct Restoring {
    journal: Journal,
    volumes: Arc<Volumes>,
    hosts: Arc<Hosts>,
    machine: Mutex<Restoration>,
    /// The origin of the machine's time.
    began: Instant,
    told: Notify,
}

impl Restoring {
    pub(crate) fn new(journal: &Journal, volumes: &Arc<Volumes>, hosts: &Arc<Hosts>) -> Self {
        let (journal, volumes, hosts) = (journal.clone(), Arc::clone(volumes), Arc::clone(hosts));
        Self {
            journal,
            volumes,
            hosts,
            machine: Mutex::default(),
            began: Instant::now(),
            told: Notify::new(),
        }
    }

    /// Claims the names of waiting volumes, so that nothing is served or created under them.
    pub(crate) fn hold(&self) {
        let waiting = self.journal.read(|state| {
            let names = state.in_question().map(|known| (known.record.name.clone(), known.record.volume));
            names.collect::<Vec<_>>()
        });
        for (name, volume) in waiting {
            tracing::warn!(volume = %name, "the journal was restored from a backup: the volume is not served before its owner is \
                known");
            self.volumes.add(&name, volume);
            self.say_standing(&name);
        }
    }

    /// Forgets a volume that is not this host's; its image stays.
    pub(crate) async fn forget(
        &self,
        claim: Claim,
        volume: VolumeId,
        name: String,
    ) -> Result<RemovedVolume, RequestError> {
        let (records, image) = self.journal.read(|state| {
            let image = state.questioned(volume).map(|known| known.record.image.place.name().to_owned());
            (restoration::forget(state, volume), image.unwrap_or_default())
        });
        let records = records.map_err(|_| RestoredError::NotWaiting(name.clone()))?;
        self.journal.commit(records).await?;
        claim.removed();
        self.told.notify_one();
        tracing::info!(volume = %name, image, "a volume of the restored journal was forgotten; its image is kept");
        let (image_fate, kept_because) = (api::ImageFate::Kept, Some(api::KeptBecause::Unknown));
        Ok(RemovedVolume { name, image, image_fate, kept_because, host: None, snapshots: Vec::new() })
    }

    /// Replaces the error for an unknown volume if the volume waits.
    pub(crate) fn or_unconfirmed(&self, name: &str, error: RequestError) -> RequestError {
        match error {
            RequestError::VolumeNotFound(_)
                if self.journal.read(|state| state.questioned_named(name).is_some()) =>
            {
                self.unconfirmed(name).into()
            }
            error => error,
        }
    }

    /// Returns why a waiting volume is not served.
    pub(crate) fn unconfirmed(&self, name: &str) -> RestoredError {
        RestoredError::Unconfirmed { volume: name.to_owned(), standing: self.standing(name) }
    }

    pub(crate) fn say_standing(&self, name: &str) {
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

    /// Returns what a volume waits for, and what can be done about it.
    pub(crate) fn standing(&self, name: &str) -> String {
        let found = self.journal.read(|state| {
            let (volume, _) = state.questioned_named(name)?;
            let doubt = state.restored_volume(volume).and_then(|waiting| waiting.doubt.clone());
            let hosts = state.restored.as_ref().map(|restored| restored.more.hosts.clone());
            Some((volume, doubt, state.moved.get(&volume).cloned(), hosts.unwrap_or_default()))
        });
        let Some((volume, doubt, moved, named)) = found else { return String::new() };
        let standing = self.lock().standing(volume);
        let name_of = |host: HostId| {
            let named = named.iter().find(|named| named.id == host);
            match self.hosts.is_paired(host) {
                true => format!("\"{}\"", self.hosts.name_of(host)),
                false => {
                    named.map_or_else(|| host.to_string(), |named| format!("\"{}\" ({host})", named.name))
                }
            }
        };
        let words = Words {
            volume: name,
            doubt: doubt.as_ref(),
            moved: moved.as_ref(),
            named: &named,
            name_of: &name_of,
        };
        words.of(standing.as_ref())
    }

    fn tell(&self, event: Event) {
        let now = self.began.elapsed();
        self.lock().handle_event(now, event);
        self.told.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, Restoration> {
        self.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ownership {
    /// Begins to ask other hosts, until nothing waits or the daemon stops.
    pub(crate) fn begin_restoration(self: &Arc<Self>) {
        if self.journal.read(|state| state.in_question().next().is_none()) {
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
                () = host.stopping.begins() => {}
            }
        });
    }

    /// Carries out the machine's actions; returns whether anything waits.
    fn see_to_restored(self: &Arc<Self>) -> bool {
        let waiting = self.journal.read(Event::waiting);
        let is_over = matches!(&waiting, Event::Waiting(claims) if claims.is_empty());
        let paired = self.hosts.paired();
        let hosts = self.journal.read(|state| hosts_to_ask(state, paired));
        let now = self.restoring.began.elapsed();
        let mut machine = self.restoring.lock();
        machine.handle_event(now, Event::Hosts(hosts));
        machine.handle_event(now, waiting);
        machine.handle_timeout(now);
        let actions: Vec<Action> = std::iter::from_fn(|| machine.poll_action()).collect();
        drop(machine);
        actions.iter().for_each(|action| self.carry_out_restoration(action));
        let names: Vec<String> =
            self.journal.read(|state| state.in_question().map(|known| known.record.name.clone()).collect());
        names.iter().for_each(|name| self.restoring.say_standing(name));
        !is_over
    }

    fn carry_out_restoration(self: &Arc<Self>, action: &Action) {
        let host = Arc::clone(self);
        match *action {
            Action::Ask(peer) => drop(tokio::spawn(async move { host.ask_whose(peer).await })),
            Action::Look(volume) => drop(tokio::spawn(async move { host.look_anew(volume).await })),
            Action::Confirm(volume) => drop(tokio::spawn(async move {
                let confirmed = host.confirm(volume).await;
                if let Err(error) = confirmed {
                    tracing::warn!(%volume, error = %error.message(), "cannot serve a volume yet that other hosts have \
                        confirmed");
                    host.restoring.tell(Event::NotRecorded(volume));
                }
            })),
        }
    }

    /// Asks one host what it knows of all waiting volumes.
    async fn ask_whose(&self, peer: HostId) {
        let Ok(session) = self.hosts.session_with(peer) else { return };
        if !session.status().is_connected {
            return;
        }
        let volumes: Vec<VolumeId> =
            self.journal.read(|state| state.in_question().map(|known| known.record.volume).collect());
        let asked = tokio::time::timeout(ANSWER_MAX, self.peers.whose(&session, &volumes)).await;
        if let Ok(Some(answer)) = asked {
            self.restoring.tell(Event::Answered(peer, answer));
        }
    }

    /// Examines the image of a waiting volume and informs the machine. Returns what is then known of the volume.
    async fn look_anew(self: &Arc<Self>, volume: VolumeId) -> Option<Standing> {
        let record = self.journal.read(|state| Some(state.questioned(volume)?.record.clone()));
        let host = Arc::clone(self);
        let looked = tokio::task::spawn_blocking(move || {
            record.map_or(Look::Missing, |record| host.look_at_restored(&record))
        });
        self.restoring.tell(Event::Looked(volume, looked.await.unwrap_or(Look::Missing)));
        self.restoring.lock().standing(volume)
    }

    /// Examines the image of a waiting volume, and looks for another image that it may have moved to. Blocks.
    fn look_at_restored(&self, record: &VolumeRecord) -> Look {
        match &record.image.place {
            Place::File(path) if !Path::new(path).is_file() => return Look::Missing,
            Place::File(path) if half_made::is_marked(Path::new(path)) => return Look::HalfMade,
            Place::Device(path) if !is_block_device(Path::new(path)) => return Look::Missing,
            // Opening the export shows whether the server answers.
            Place::File(_) | Place::Device(_) | Place::Nbd(_) => {}
        }
        let known: BTreeSet<Place> = self.journal.read(|state| {
            let others = state.claimed_records().filter(|other| other.volume != record.volume);
            others.map(|other| other.image.place.clone()).collect()
        });
        let is_other = |place: &Place| *place != record.image.place && !known.contains(place);
        let mut unseen = None;
        for store in self.stores.iter() {
            match store.kind() {
                StoreKind::Folder { folder, .. } => {
                    let images = [ImageFormat::Raw, ImageFormat::Qcow2]
                        .map(|format| folder.image_path(&record.name, format));
                    let is_rival = |image: &PathBuf| {
                        is_other(&Place::File(image.display().to_string()))
                            && image.is_file()
                            && !half_made::is_marked(image)
                    };
                    if let Some(rival) = images.into_iter().find(is_rival) {
                        return Look::Rival(rival.display().to_string());
                    }
                }
                StoreKind::Single(place) => {
                    unseen = unseen.or_else(|| is_other(place).then(|| place.to_string()));
                }
            }
        }
        unseen.map_or(Look::Fit, Look::NotAlone)
    }

    /// Carries out what all other hosts have confirmed: serves a volume, or records that it is still at another host.
    async fn confirm(self: &Arc<Self>, volume: VolumeId) -> Result<(), RequestError> {
        let Some(name) = self.journal.read(|state| Some(state.questioned(volume)?.record.name.clone()))
        else {
            return Ok(());
        };
        let (claim, _) = self.volumes.claim(&name)?;
        let Some(standing) = self.look_anew(volume).await else { return Ok(()) };
        let records = self.journal.read(|state| restoration::confirm(state, volume, &standing));
        let records = records.map_err(|reason| self.refused(&name, reason))?;
        if let [.., Record::DepartureConfirmed { .. }] = records[..] {
            self.journal.commit(records).await?;
            claim.removed();
            tracing::info!(volume = %name, "another host has confirmed that it has a volume that left this host");
            self.resumption.resume_confirmed(volume).await;
            self.resumption.lead_to_departed(volume).await;
            self.restoring.told.notify_one();
            return Ok(());
        }
        tracing::info!(volume = %name, "all other hosts have confirmed that a volume of the restored journal is this host's");
        self.reinstate(claim, volume, &name, records, None).await
    }

    async fn reinstate(
        self: &Arc<Self>,
        claim: Claim,
        volume: VolumeId,
        name: &str,
        mut records: Vec<Record>,
        said: Option<u64>,
    ) -> Result<(), RequestError> {
        self.check_claims(volume).await?;
        let size_bytes = self.size_by_now(volume, name, said).await?;
        records.push(Record::Resized { volume, size_bytes });
        self.journal.commit(records).await?;
        claim.created(volume);
        drop(claim);
        self.serving.serve_in_background(name);
        self.restoring.told.notify_one();
        // A VM that was moving when the backup was made is here once its last volume is.
        let host = Arc::clone(self);
        tokio::spawn(async move { host.vm_orders.settle_vms().await });
        Ok(())
    }

    /// Checks that nothing else uses the image of a waiting volume; fails with [`RequestError::Claimed`].
    async fn check_claims(&self, volume: VolumeId) -> Result<(), RequestError> {
        let image = self.journal.read(|state| Some(state.questioned(volume)?.record.image.clone()));
        let (Some(image), custody) = (image, self.custody.clone()) else { return Ok(()) };
        blocking(move || Ok(custody.check(Step::Restore, &Owner::Volume(volume), &image)?)).await
    }

    /// Returns the present size of a volume: it may have grown since the backup was made.
    async fn size_by_now(
        &self,
        volume: VolumeId,
        name: &str,
        said: Option<u64>,
    ) -> Result<u64, RequestError> {
        let found = self.journal.read(|state| {
            let is_known =
                state.restored.as_ref().is_some_and(|restored| restored.more.sized.contains(&volume));
            Some((state.questioned(volume)?.record.clone(), is_known))
        });
        let (record, is_known) = found.ok_or_else(|| RestoredError::NotWaiting(name.to_owned()))?;
        let recorded = record.size_bytes;
        let measured = blocking(move || {
            let access = match record.export.access {
                ExportAccess::ReadWrite => Access::ReadWrite,
                ExportAccess::ReadOnly => Access::ReadOnly,
            };
            // N.B. The image is opened, not only examined: that proves that no other program has it locked.
            let size = opening::open_whole(&record.image, access, opening::at_once)?.size();
            Ok(match record.image.place.outlasts_its_volume() {
                true => Measured::Room(size),
                false => Measured::Volume(size),
            })
        });
        let size = size_now(recorded, is_known, measured.await?, said);
        Ok(size.map_err(|reason| RestoredError::Size { volume: name.to_owned(), reason })?)
    }

    /// Serves a volume by an administrator's order. After a [`RestoredError`] nothing has changed.
    pub(crate) async fn take_restored(
        self: Arc<Self>,
        name: String,
        order: &PromoteVolume,
    ) -> Result<api::Volume, RequestError> {
        let found = self.journal.read(|state| state.questioned_named(&name).map(|(volume, _)| volume));
        let volume = found.ok_or_else(|| RestoredError::NotWaiting(name.clone()))?;
        let (claim, _) = self.volumes.claim(&name)?;
        self.hear_the_silent(volume).await;
        // N.B. The volume is examined at the moment of the order, because earlier observations may be outdated.
        let standing = self.look_anew(volume).await;
        let standing = standing.ok_or_else(|| RestoredError::NotWaiting(name.clone()))?;
        let how = if order.force { Order::Force } else { Order::Known };
        let branch = BranchId(random_bytes());
        let records = self.journal.read(|state| restoration::order(state, volume, &standing, how, branch));
        let records = records.map_err(|reason| self.refused(&name, reason))?;
        tracing::warn!(volume = %name, ?standing, ?how, "by order, this host owns a volume of the restored journal");
        self.reinstate(claim, volume, &name, records, order.size_bytes).await?;
        self.volumes.lane(&name).await?;
        self.views.describe_volume(&name).await
    }

    /// Gives the hosts that have not answered about a volume the time to do so. **N.B.** A host that is up must not count as silent
    /// because of the pause between two attempts to reach it.
    async fn hear_the_silent(&self, volume: VolumeId) {
        let until = Instant::now() + SILENT_MAX;
        while Instant::now() < until {
            let standing = self.restoring.lock().standing(volume);
            let Some(restoration::Words::Unheard(hosts)) = standing.map(|standing| standing.words) else {
                return;
            };
            join_all(hosts.iter().map(|host| self.ask_whose(*host))).await;
            tokio::time::sleep(SILENT_POLL).await;
        }
    }

    fn refused(&self, name: &str, reason: restoration::Refused) -> RestoredError {
        match reason {
            restoration::Refused::NotWaiting => RestoredError::NotWaiting(name.to_owned()),
            reason => RestoredError::Refused {
                volume: name.to_owned(),
                reason,
                standing: self.restoring.standing(name),
            },
        }
    }
}

fn is_block_device(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device())
}
