//! A promotion: the images of a standby become volumes of this host.
//!
//! ```text
//!   checks of names ─► the machine: redo complete, *promoted* durable ─► images moved into the store ─► in the journal
//!                  ─► its VMs added ─► noted as complete ─► served ─► VMs started
//! ```
//! A restart completes what is interrupted: the identities of the volumes were drawn when the standby was made.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use chronicle::{BlockSize, Generation};
use migration::journal::{ExportSettings, ImageFormat, ImageLocation, Place, Record, VolumeRecord};
use migration::restoration::{ANSWER_MAX, Knowledge, Whereabouts};
use migration::{HostId, VolumeId};
use standby::receiver::{PromoteOrder, Refusal};
use standby::record::{StandbyRecord, Standing};
use standby::{StandbyId, Watermark};
use tokio::sync::oneshot;

use super::book::{CopiedVolume, Side, Why, parse};
use super::copy::{Input, NotPromoted, text, words_of};
use super::orders::Found;
use super::source::host_of;
use super::views::used_by;
use super::{Kept, Standbys, lock};
use crate::error::{RequestError, StandbyError};
use crate::host::blocking;
use crate::stores::{StoreKind, path_text};

/// The age that is accepted if the order says nothing.
const AGE_MAX: Duration = Duration::from_secs(3600);

impl Standbys {
    /// Promotes a standby that is kept here.
    pub(crate) async fn promote(
        self: Arc<Self>,
        name: String,
        order: api::PromoteStandby,
    ) -> Result<api::Standby, RequestError> {
        let _changing = self.changing.lock().await;
        let found = self.find(&name)?;
        let Found::Kept(kept) = &found else {
            let Found::Source(source) = &found else { return Err(StandbyError::NotFound(name).into()) };
            return Err(StandbyError::NotThere { name, host: self.hosts.name_of(source.host()) }.into());
        };
        let refused = |reason: String| StandbyError::NotPromoted { name: name.clone(), reason };
        // N.B. Before the names: the volumes that have them are the migration's.
        if let Some(migration) = Self::look(kept).await.lent_to.map(migration::MigrationId) {
            let reason = format!("{}; to end that: sterna migration cancel {migration}", used_by(migration));
            return Err(refused(reason).into());
        }
        let names = self.names_of(kept, &name, order.names.clone()).await?;
        self.check_names(kept, &names)?;
        let seconds = order.older_than_ok_seconds;
        let age_max = seconds.map_or(Ok(AGE_MAX), Duration::try_from_secs_f64);
        let age_max = age_max.map_err(|error| RequestError::Invalid(error.to_string()))?;
        let point = order.point.as_deref().map(|point| {
            parse_point(kept, point)
                .ok_or_else(|| refused(format!("\"{point}\" is no name of a recovery point")))
        });
        let host = self.hosts_of(kept);
        if let Some(off) = order.source_is_off.as_ref().filter(|off| !are_same(off, &host)) {
            let reason =
                format!("its volumes are at host \"{host}\", so it does not suffice that \"{off}\" is off");
            return Err(refused(reason).into());
        }
        if kept.whereabouts().hosts().any(|host| self.hosts.silence_of(host).is_none()) {
            return Err(refused(words_of(Refusal::OwnerReachable)).into());
        }
        if let Some(reason) = self.found_elsewhere(kept).await {
            return Err(refused(reason).into());
        }
        kept.copy.give(Input::Lost);
        self.note_names(kept, names).await?;
        let (answer, answered) = oneshot::channel();
        let leave_stopped = order.leave_stopped;
        let owner_is_lost = order.source_is_off.is_some();
        let order = PromoteOrder { owner_is_lost, age_max, point: point.transpose()? };
        kept.copy.give(Input::Promote { order, answer });
        let promoted = answered
            .await
            .map_err(|_| refused("its files cannot be used; see the daemon's log".to_owned()))?;
        let promoted = promoted.map_err(|why| match why {
            NotPromoted::Refused(Refusal::ForceNeeded) => {
                StandbyError::MayBeServed { name: name.clone(), host }
            }
            NotPromoted::Refused(refusal) => refused(words_of(refusal)),
            NotPromoted::Failed(reason) => refused(reason),
        })?;
        tracing::warn!(standby = %name, epoch = promoted.at.epoch.0, "a standby is promoted: its volumes are this host's");
        if let Err(error) = self.end_test_of(kept, Why::Promoted).await {
            tracing::warn!(standby = %name, error = %error.message(), "its test goes on being deleted");
        }
        self.own(kept).await?;
        if !leave_stopped {
            self.start_vms(kept).await?;
        }
        Ok(self.view(&found).await)
    }

    /// Returns the names of the hosts that may have the volumes of a standby, with commas between them.
    pub(super) fn hosts_of(&self, kept: &Kept) -> String {
        let leaving_for = kept.noted().leaving_for;
        let name = |host: HostId| match &leaving_for {
            Some(to) if host_of(&to.host) == host && !self.hosts.is_paired(host) => to.name.clone(),
            _ => self.hosts.name_of(host),
        };
        kept.whereabouts().hosts().map(name).collect::<Vec<_>>().join(",")
    }

    /// Asks all hosts that can be reached whether they have one of the volumes of a standby: they may have moved on from the hosts that
    /// are known here. Returns which one has it.
    async fn found_elsewhere(&self, kept: &Kept) -> Option<String> {
        let volumes: Vec<VolumeId> =
            kept.config.volumes.iter().map(|volume| identity(&volume.volume)).collect();
        let known = self.hosts.describe_all().unwrap_or_default().into_iter();
        let asked = known.filter(|peer| peer.connected).map(|peer| {
            let volumes = &volumes;
            async move {
                let host = self.hosts.find(&peer.name)?;
                let session = self.hosts.session_with(HostId(host.id.0)).ok()?;
                let answer = tokio::time::timeout(ANSWER_MAX, self.peers.whose(&session, volumes)).await.ok()??;
                let has = |known: &Knowledge| {
                    matches!(
                        known.whereabouts,
                        Whereabouts::Here | Whereabouts::HereUnconfirmed | Whereabouts::Waits
                    )
                };
                answer.known.values().any(has).then(|| {
                    format!("host \"{0}\" has its volumes, or some of them; to move them here, there: sterna migrate", peer.name)
                })
            }
        });
        let found = futures_util::future::join_all(asked).await;
        found.into_iter().flatten().next()
    }

    /// Completes promotions that a restart has interrupted.
    pub(super) fn finish_promotions(self: &Arc<Self>) {
        let kept: Vec<Arc<Kept>> = lock(&self.copies).values().cloned().collect();
        for kept in kept {
            let record = self
                .book()
                .ok()
                .and_then(|book| book.record::<StandbyRecord>(Side::Copy, &kept.config.id).ok().flatten());
            let is_promoted =
                record.is_some_and(|record| matches!(record.standing, Standing::Promoted { .. }));
            if !is_promoted || kept.noted().is_complete {
                continue;
            }
            let this = Arc::clone(self);
            tokio::spawn(async move {
                let _changing = this.changing.lock().await;
                let (answer, answered) = oneshot::channel();
                let order = PromoteOrder { owner_is_lost: true, age_max: Duration::MAX, point: None };
                kept.copy.give(Input::Promote { order, answer });
                let Ok(Ok(_)) = answered.await else { return };
                if let Err(error) = this.own(&kept).await {
                    tracing::error!(standby = %kept.config.name, error = %error.message(), "a promotion is not complete; try it \
                        again: sterna standby promote");
                } else {
                    tracing::warn!(standby = %kept.config.name, "a promotion that was interrupted is complete; its VMs are \
                        stopped: sterna vm list");
                }
            });
        }
    }

    /// Returns the names that the volumes get which do not keep theirs. A promotion that was interrupted keeps its own.
    async fn names_of(
        &self,
        kept: &Kept,
        name: &str,
        ordered: BTreeMap<String, String>,
    ) -> Result<BTreeMap<String, String>, RequestError> {
        if self.is_promoted(kept).await? {
            let noted = kept.noted().names;
            if ordered.is_empty() || ordered == noted {
                return Ok(noted);
            }
            let reason = "it was promoted before, and its volumes have their names".to_owned();
            return Err(StandbyError::NotPromoted { name: name.to_owned(), reason }.into());
        }
        let has = |volume: &String| kept.config.volumes.iter().any(|known| known.name == *volume);
        match ordered.iter().find(|(volume, _)| !has(volume)) {
            None => Ok(ordered),
            Some((_, new)) => Err(RequestError::Invalid(format!(
                "which volume is to be \"{new}\" is not said: --name OLD=NEW, with OLD one of the standby's volumes"
            ))),
        }
    }

    /// Checks that the volumes can have these names here.
    fn check_names(&self, kept: &Kept, names: &BTreeMap<String, String>) -> Result<(), RequestError> {
        let mut taken = BTreeSet::new();
        for volume in kept.config.volumes.iter().filter(|volume| !self.is_made(volume)) {
            let name = names.get(&volume.name).unwrap_or(&volume.name);
            crate::names::check(name).map_err(|reason| RequestError::Name { name: name.clone(), reason })?;
            self.require_free(&kept.config.store, name)?;
            if !taken.insert(name) {
                return Err(RequestError::Invalid(format!("two volumes would be \"{name}\"")));
            }
        }
        Ok(())
    }

    /// Makes durable which names the volumes get, before they are this host's: a restart completes the promotion with them.
    async fn note_names(&self, kept: &Kept, names: BTreeMap<String, String>) -> Result<(), RequestError> {
        self.note(kept, |noted| noted.names = names).await
    }

    /// Checks that a volume can have this name here, and its image in this store.
    pub(super) fn require_free(&self, store: &str, name: &str) -> Result<(), RequestError> {
        if self.volumes.service(name).is_some() {
            return Err(RequestError::VolumeExists(name.to_owned()));
        }
        let path = self.path_of(store, name)?;
        if path.exists() {
            return Err(RequestError::TargetExists { path });
        }
        let checked = self.sockets.check(name);
        checked.map_err(|error| RequestError::Invalid(crate::error::with_causes(&error)))
    }

    /// Makes the images volumes of this host, and serves them. What was done before is left as it is.
    async fn own(self: &Arc<Self>, kept: &Arc<Kept>) -> Result<(), RequestError> {
        let mut paths = Vec::new();
        for volume in &kept.config.volumes {
            paths.push(self.path_of(&kept.config.store, &kept.name_here(&volume.name))?);
        }
        let (answer, answered) = oneshot::channel();
        kept.copy.give(Input::Release { to: paths.clone(), answer });
        let moved = answered.await.map_err(|_| RequestError::Internal("a keeper has ended".to_owned()))?;
        moved.map_err(|error| RequestError::storage("move the images into", &paths[0], &error))?;
        for (volume, path) in kept.config.volumes.iter().zip(&paths) {
            if !self.is_made(volume) {
                let name = &kept.name_here(&volume.name);
                let (store, identity) = (&kept.config.store, &volume.promoted);
                self.refer_to_former(&kept.present(), store, identity, path).await;
                self.add_volume(NewVolume { store, name, identity }, path).await?;
            }
        }
        self.make_vms(kept).await?;
        self.note_complete(kept).await?;
        for volume in &kept.config.volumes {
            self.volumes.lane(&kept.name_here(&volume.name)).await?;
        }
        Ok(())
    }

    /// Makes durable that all volumes are made: a later start leaves them to their administrators.
    async fn note_complete(&self, kept: &Kept) -> Result<(), RequestError> {
        self.note(kept, |noted| noted.is_complete = true).await
    }

    /// Returns whether a standby was promoted, by its record, which is durable before the promotion takes effect.
    pub(super) async fn is_promoted(&self, kept: &Kept) -> Result<bool, RequestError> {
        let id = kept.config.id.clone();
        let record = self.on_book(move |book| book.record::<StandbyRecord>(Side::Copy, &id)).await?;
        Ok(record.is_some_and(|record| matches!(record.standing, Standing::Promoted { .. })))
    }

    /// Returns whether a promotion has made all volumes of a standby.
    pub(super) fn is_whole(&self, kept: &Kept) -> bool {
        kept.noted().is_complete || kept.config.volumes.iter().all(|volume| self.is_made(volume))
    }

    /// Makes an image that is in its place a volume of this host.
    pub(super) async fn add_volume(
        self: &Arc<Self>,
        new: NewVolume<'_>,
        path: &Path,
    ) -> Result<(), RequestError> {
        let (claim, _) = self.volumes.claim_new(new.name)?;
        let place = Place::File(path_text(path)?);
        let image =
            ImageLocation { store: new.store.to_owned(), place: place.clone(), format: ImageFormat::Raw };
        let (custody, opened, found) = (self.custody.clone(), path.to_owned(), place.clone());
        let (known, size_bytes) = blocking(move || {
            let file = std::fs::File::open(&opened)
                .map_err(|error| RequestError::storage("open", &opened, &error))?;
            let looked = |error| RequestError::storage("look at", &opened, &error);
            let known = custody.record_of(&found, &file).map_err(looked)?;
            Ok((known, file.metadata().map_err(looked)?.len()))
        })
        .await?;
        let record = VolumeRecord {
            volume: identity(new.identity),
            name: new.name.to_owned(),
            size_bytes,
            block_size_bytes: BlockSize::DEFAULT.into(),
            image,
            generation: Generation(0),
            export: ExportSettings::default(),
        };
        let added = vec![Record::VolumeAdded(record.clone())].into_iter().chain(known).collect();
        self.journal.commit(added).await?;
        claim.created(record.volume);
        drop(claim);
        self.serving.serve_in_background(new.name);
        Ok(())
    }

    /// Returns whether a promotion has made this volume already.
    pub(super) fn is_made(&self, volume: &CopiedVolume) -> bool {
        self.has_volume(&volume.promoted)
    }

    /// Returns whether this host has the volume of this identity, 32 hexadecimal digits.
    pub(super) fn has_volume(&self, volume: &str) -> bool {
        self.journal.read(|state| state.volumes.contains_key(&identity(volume)))
    }

    pub(super) fn path_of(&self, store: &str, name: &str) -> Result<PathBuf, RequestError> {
        match self.stores.get(store)?.kind() {
            StoreKind::Folder { folder, .. } => Ok(folder.image_path(name, ImageFormat::Raw)),
            StoreKind::Single(_) => Err(RequestError::Internal("a standby is in no folder".to_owned())),
        }
    }
}

/// Returns whether two lists with commas name the same hosts.
fn are_same(one: &str, other: &str) -> bool {
    let names = |list: &str| list.split(',').map(|name| name.trim().to_owned()).collect::<BTreeSet<_>>();
    names(one) == names(other)
}

/// A volume that an image becomes.
pub(super) struct NewVolume<'a> {
    pub(super) store: &'a str,
    pub(super) name: &'a str,
    /// Its identity, 32 hexadecimal digits.
    pub(super) identity: &'a str,
}

pub(super) fn identity(volume: &str) -> VolumeId {
    let number = u128::from_str_radix(volume, 16).unwrap_or_default();
    VolumeId(number.to_be_bytes())
}

/// Returns the watermark that [`text`] names.
pub(super) fn parse_point(kept: &Kept, point: &str) -> Option<Watermark> {
    let (life, epoch) = point.split_once('-')?;
    let standby: StandbyId = parse(&kept.config.id)?;
    let life = standby::LifeId(u128::from_str_radix(life, 16).ok()?);
    let at = Watermark { standby, life, epoch: chronicle::Epoch(epoch.parse().ok()?) };
    (text(at) == point).then_some(at)
}
