//! Volumes arrive from another host: there is room for them, and their images are made. In which order is decided by the
//! migration's session (`incoming.rs`); what follows is in `await_arrival.rs`.
//!
//! A volume that comes home to clients whom it left here comes to the lane that has forwarded them.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use block::held::ByName;
use block::store::Opened;
use chronicle::{BlockSize, Generation};
use lane::{ArrivingStore, LaneHandle, TargetContent};
use migration::journal::{
    ExportSettings, ImageLocation, MigratingVolume, MigrationState, Origin, Record, Side, VolumeRecord,
};
use migration::wire::{
    Acceptance, AcceptedVolume, Beside, FormerContent, Held, LeftBehind, Offer, OfferedVolume, Refusal,
    RefusalCode, Sharing,
};
use migration::{CommitFault, HostId, MigrationId, StayKey, VolumeId};
use transport::Session;

use crate::custody::Custody;
use crate::error::{RequestError, with_causes};
use crate::files::descriptors;
use crate::host::migrations::leave::refusal;
use crate::host::migrations::taking_back::SetAside;
use crate::host::volumes::reserve::Reserved;
use crate::host::{Host, blocking};
use crate::images;
use crate::images::opening;
use crate::images::replicas::{self, is_replica};
use crate::names;
use crate::peers::channel::VOLUMES_MAX;
use crate::volumes::registry::{Claim, Service};

/// How long an offer waits for something else that is being done with the volume.
const BUSY_MAX: Duration = Duration::from_secs(5);
/// How often it is looked meanwhile.
const BUSY_POLL: Duration = Duration::from_millis(50);

/// Which image an earlier stay has left: by which departure, and of which generation.
type LeftImage = (MigrationId, Generation);

/// A volume for which there is room.
pub(in crate::host) struct Expected {
    pub(in crate::host) record: VolumeRecord,
    /// Whether the source keeps a replica.
    left_behind: LeftBehind,
    /// Whose its content was before Sterna served it.
    origin: Origin,
    reserved: Reserved,
    claim: Claim,
    /// The lane that forwards its clients, of a volume that comes home to them.
    home: Option<LaneHandle>,
    /// Which image of an earlier stay it comes into, as it is; `None`: into one of its own.
    left: Option<LeftImage>,
}

/// A volume whose image is there.
pub(in crate::host) struct Arriving {
    /// What it is, with its image here.
    pub(in crate::host) record: VolumeRecord,
    /// Whether the source keeps a replica.
    pub(in crate::host) left_behind: LeftBehind,
    /// Its image; `None`: its lane has it open.
    pub(in crate::host) store: Option<ArrivingStore>,
    pub(in crate::host) claim: Claim,
    /// The lane that forwards its clients, of a volume that comes home to them.
    pub(in crate::host) home: Option<LaneHandle>,
}

impl Host {
    /// Takes a migration that another host offers; or says again that it has been taken.
    ///
    /// # Errors
    /// [`Refusal`]: nothing of it is here.
    pub(crate) async fn take_migration(
        self: &Arc<Self>,
        session: &Session,
        peer: HostId,
        remote: MigrationId,
        offer: Offer,
    ) -> Result<Acceptance, Refusal> {
        let known = self.journal.read(|state| Some(state.incoming(peer, remote)?.1.has_ended()));
        match known {
            Some(true) => {
                let detail = "the migration has ended here; begin another one".to_owned();
                Err(Refusal { code: RefusalCode::Over, detail })
            }
            // The answer was lost.
            Some(false) => {
                let volumes = offer
                    .volumes
                    .iter()
                    .map(|offered| accepted(offered.volume, TargetContent::Unknown, None, None));
                Ok(Acceptance { volumes: volumes.collect(), incarnation: 0 })
            }
            None => {
                let volumes = self.begin_incoming(session, remote, offer).await;
                let volumes = volumes.map_err(|error| refusal(&error))?;
                Ok(Acceptance { volumes, incarnation: 0 })
            }
        }
    }

    /// Looks whether what is offered may come, and takes names and places for it.
    ///
    /// # Errors
    /// [`RequestError`]; nothing is taken then.
    pub(in crate::host) async fn make_room_for(
        self: &Arc<Self>,
        peer: HostId,
        offer: &Offer,
    ) -> Result<(Vec<Expected>, Option<SetAside>), RequestError> {
        if !(1..=VOLUMES_MAX).contains(&offer.volumes.len()) {
            let text =
                format!("a migration has one volume to {VOLUMES_MAX}, this one {}", offer.volumes.len());
            return Err(RequestError::Invalid(text));
        }
        if offer.vm.is_some() {
            self.check_may_bring_vms(peer)?;
        }
        blocking(descriptors::require_for_volume).await?;
        if let Some(left_by) = self.takes_back(peer, offer)? {
            self.check_images_left(offer).await?;
            return self.take_images_back((peer, left_by), offer).await;
        }
        if let Some(vm) = &offer.vm {
            self.check_vm_name(&vm.name)?;
        }
        let mut expected = Vec::new();
        for offered in &offer.volumes {
            match self.make_room(offer, offered).await {
                Ok(volume) => expected.push(volume),
                Err(error) => {
                    forget_room(&self.custody, &expected);
                    return Err(error);
                }
            }
        }
        Ok((expected, None))
    }

    /// Takes the images that volumes have left, with what is missing at their owner.
    async fn take_images_back(
        self: &Arc<Self>,
        (peer, left_by): (HostId, MigrationId),
        offer: &Offer,
    ) -> Result<(Vec<Expected>, Option<SetAside>), RequestError> {
        let (mut expected, mut lanes) = (Vec::new(), Vec::new());
        for offered in &offer.volumes {
            let name = offered.name.clone();
            let (claim, home) = self.claim_when_free(&name, offered.volume).await?;
            let left = self.left_image(offered.volume);
            // Without a lane it is being opened by its departure just now, after a start.
            let (Some(home), Some((image, left))) = (home, left) else {
                return Err(RequestError::VolumeBusy(name));
            };
            lanes.push((name, home.clone()));
            let reserved = Reserved::of_image(image);
            let record = self.record_of(offered, &reserved, true);
            let (left_behind, origin) = (offered.left_behind, offered.origin);
            let (home, left) = (Some(home), Some(left));
            expected.push(Expected { record, left_behind, origin, reserved, claim, home, left });
        }
        let set_aside = self.set_aside(left_by, &lanes).await?;
        // N.B. it may have ended before its driver was set aside: what it has left is gone then, or about to go.
        if self.takes_back(peer, offer)? != Some(left_by) {
            let name = offer.volumes.first().map(|offered| offered.name.clone()).unwrap_or_default();
            return Err(RequestError::VolumeBusy(name));
        }
        if let Some(vm) = &offer.vm {
            self.let_vm_come_again(left_by, &vm.name).await?;
        }
        Ok((expected, Some(set_aside)))
    }

    /// What will be served here of a volume that comes into this place.
    fn record_of(&self, offered: &OfferedVolume, reserved: &Reserved, has_lane: bool) -> VolumeRecord {
        let former = self
            .journal
            .read(|state| state.moved.get(&offered.volume).map(|moved| moved.volume.record.clone()));
        // The lane that clients were left with records in the blocks with which it began. Otherwise a new stay begins here,
        // and nothing of it has been recorded: no set of blocks goes from host to host.
        let block_size_bytes = match &former {
            Some(former) if has_lane => former.block_size_bytes,
            _ => BlockSize::DEFAULT.into(),
        };
        // A volume that comes home is offered as it was before.
        let export = former.map_or_else(ExportSettings::default, |former| former.export);
        VolumeRecord {
            volume: offered.volume,
            name: offered.name.clone(),
            size_bytes: offered.size_bytes,
            block_size_bytes,
            image: reserved.location.clone(),
            generation: offered.generation,
            export,
        }
    }

    /// Checks that a volume may come, and takes its name and a place for its image.
    async fn make_room(
        self: &Arc<Self>,
        offer: &Offer,
        offered: &OfferedVolume,
    ) -> Result<Expected, RequestError> {
        let name = offered.name.clone();
        names::check(&name).map_err(|reason| RequestError::Name { name: name.clone(), reason })?;
        self.sockets.check(&name).map_err(|error| RequestError::Invalid(with_causes(&error)))?;
        self.refuse_other_branch(offered)?;
        self.wait_until_left(&name, offered.volume).await?;
        let (claim, home) = self.claim_when_free(&name, offered.volume).await?;
        let wanted = self.wanted(offer, offered)?;
        // What of it is allocated, its source finds out while it copies; a store that fills up ends the migration.
        let reserved = self.reserve(wanted, || Ok(0)).await?;
        if let Some((path, file)) = &reserved.file {
            // What it left here, if that is there, says whose it was.
            let former = self.journal.read(|state| {
                let moved = state.moved.get(&offered.volume)?;
                let image = moved.volume.record.image.place.file()?;
                Some(images::fenced_path(Path::new(image), moved.migration))
            });
            let file = file.try_clone().map_err(|error| RequestError::storage("open", path, &error))?;
            if let Some(former) = former {
                blocking(move || {
                    if former.exists() {
                        images::dress(&file, &former);
                    }
                    Ok(())
                })
                .await?;
            }
        }
        let record = self.record_of(offered, &reserved, home.is_some());
        let (left_behind, origin) = (offered.left_behind, offered.origin);
        Ok(Expected { record, left_behind, origin, reserved, claim, home, left: None })
    }

    /// Waits a little for the end of a migration by which the volume has left: until then its image is where it was.
    ///
    /// # Errors
    /// [`RequestError::AlreadyMigrating`].
    async fn wait_until_left(&self, name: &str, volume: VolumeId) -> Result<(), RequestError> {
        let deadline = Instant::now() + BUSY_MAX;
        loop {
            let changed = self.volumes.changed();
            match self.leaving_migration(volume) {
                None => return Ok(()),
                Some(migration) if Instant::now() >= deadline => {
                    return Err(RequestError::AlreadyMigrating { volume: name.to_owned(), migration });
                }
                Some(_) => drop(tokio::time::timeout(BUSY_POLL, changed).await),
            }
        }
    }

    /// The migration by which a volume leaves for another host, and which has not ended here.
    pub(in crate::host) fn leaving_migration(&self, volume: VolumeId) -> Option<MigrationId> {
        self.journal.read(|state| {
            let leaves = |known: &MigrationState| {
                matches!(known.side, Side::Outgoing { .. })
                    && known.volumes.iter().any(|moving| moving.volume == volume)
            };
            state.unfinished().find(|(_, known)| leaves(known)).map(|(migration, _)| migration)
        })
    }

    /// As [`Host::claim_arrival`], a little later if something else is being done with the volume: what is left of it
    /// from an earlier stay may just be going.
    pub(in crate::host) async fn claim_when_free(
        self: &Arc<Self>,
        name: &str,
        volume: VolumeId,
    ) -> Result<(Claim, Option<LaneHandle>), RequestError> {
        let deadline = Instant::now() + BUSY_MAX;
        loop {
            let changed = self.volumes.changed();
            match self.claim_arrival(name, volume) {
                Err(RequestError::VolumeBusy(_) | RequestError::VolumeArriving { .. })
                    if Instant::now() < deadline =>
                {
                    let _ = tokio::time::timeout(BUSY_POLL, changed).await;
                }
                result => return result,
            }
        }
    }

    /// Takes the volume's name: a new one, or that of the very volume, whose clients were left here.
    pub(in crate::host) fn claim_arrival(
        self: &Arc<Self>,
        name: &str,
        volume: VolumeId,
    ) -> Result<(Claim, Option<LaneHandle>), RequestError> {
        match self.volumes.service(name) {
            None => Ok((self.volumes.claim_new(name)?.0, None)),
            Some(service) => {
                let (claim, known) = self.volumes.claim(name)?;
                let is_away = self.journal.read(|state| state.moved.contains_key(&volume));
                match service {
                    Service::Serving(lane) if known == volume && is_away => Ok((claim, Some(lane))),
                    _ => Err(RequestError::VolumeExists(name.to_owned())),
                }
            }
        }
    }

    /// Makes durable that volumes come, under a number that no other migration has.
    ///
    /// # Errors
    /// [`CommitFault`].
    pub(in crate::host) async fn record_arrival(
        &self,
        peer: HostId,
        remote: MigrationId,
        expected: &[Expected],
    ) -> Result<MigrationId, CommitFault> {
        let starting = self.starting_migration.lock().await;
        let migration = self.next_identity(None);
        let peer_name = self.hosts.name_of(peer);
        let moving = |Expected { record, reserved, .. }: &Expected| MigratingVolume {
            volume: record.volume,
            source: ImageLocation::raw_file(peer_name.clone(), String::new()),
            target: reserved.location.clone(),
        };
        let volumes = expected.iter().map(moving).collect();
        let records = expected.iter().map(|volume| volume.record.clone()).collect();
        let side = Side::Incoming { peer, peer_name, remote, volumes: records };
        let started = Record::MigrationStarted { migration, volumes, keep_source: false, side };
        let told = expected.iter().filter(|volume| volume.origin != Origin::Unknown);
        let told = told.map(|Expected { record, origin, .. }| Record::OriginKnown {
            volume: record.volume,
            origin: *origin,
        });
        // N.B. in one commit: a volume that arrives is never one of which it has been forgotten.
        let recorded = self.journal.commit(std::iter::once(started).chain(told).collect()).await;
        drop(starting);
        recorded.map(|()| migration)
    }

    /// Makes the images of volumes that come; also says what of each is there.
    ///
    /// # Errors
    /// [`RequestError`].
    pub(in crate::host) async fn make_images(
        &self,
        expected: Vec<Expected>,
        sharing: Sharing,
    ) -> Result<(Vec<AcceptedVolume>, Vec<Arriving>), RequestError> {
        let (mut answer, mut arriving) = (Vec::new(), Vec::new());
        for Expected { record, left_behind, reserved, claim, home, left, .. } in expected {
            if left.is_some() {
                self.note_taken_back(record.volume).await?;
                answer.push(accepted(record.volume, TargetContent::Unknown, left, None));
                arriving.push(Arriving { record, left_behind, store: None, claim, home });
                continue;
            }
            let (store, content, replica) = self.make_image(&record, &reserved).await?;
            let (store, beside) = self.offer_lease(&record, store, sharing).await;
            answer.push(accepted(record.volume, content, replica, beside));
            arriving.push(Arriving { record, left_behind, store: Some(store), claim, home });
        }
        Ok((answer, arriving))
    }

    /// Notes durably that the image that a volume has left is written to again, before anything is.
    async fn note_taken_back(&self, volume: VolumeId) -> Result<(), RequestError> {
        let Some(moved) = self.journal.read(|state| state.moved.get(&volume).cloned()) else { return Ok(()) };
        let key = StayKey { volume, stay: moved.volume.stay };
        let chronicles = self.chronicles.clone();
        blocking(move || {
            chronicles.note_image(key, &moved.volume.record.image);
            Ok(())
        })
        .await
    }

    /// Makes a volume's image, or takes the one that an earlier stay has left; says what it holds, and of which generation.
    async fn make_image(
        &self,
        record: &VolumeRecord,
        reserved: &Reserved,
    ) -> Result<(Opened, TargetContent, Option<LeftImage>), RequestError> {
        if let Some((store, left)) = self.take_replica(record, reserved).await? {
            let store = self.stores.impair(&reserved.location, store);
            return Ok((store, TargetContent::Unknown, Some(left)));
        }
        let file = match &reserved.file {
            None => None,
            Some((path, file)) => {
                Some(file.try_clone().map_err(|error| RequestError::storage("open", path, &error))?)
            }
        };
        let (image, size, allocation) = (reserved.location.clone(), record.size_bytes, reserved.allocation);
        let target =
            blocking(move || opening::make_target(&image, file.as_ref(), size, allocation, None)).await?;
        Ok((self.stores.impair(&reserved.location, target.store), target.content, None))
    }

    /// Makes the replica that an earlier stay of the volume left the target, if there is one that nobody has touched;
    /// also tells which it is.
    ///
    /// # Errors
    /// [`RequestError`]. **N.B.** the target's file may hold anything then, and is of no use.
    async fn take_replica(
        &self,
        record: &VolumeRecord,
        reserved: &Reserved,
    ) -> Result<Option<(Opened, LeftImage)>, RequestError> {
        if reserved.allocation == opening::Allocation::Thick || !is_replica(&record.image) {
            return Ok(None);
        }
        let Some((path, file)) = &reserved.file else { return Ok(None) };
        let file = file.try_clone().map_err(|error| RequestError::storage("open", path, &error))?;
        let (path, record) = (path.clone(), record.clone());
        let Some(migration) = self.migration_into(&record.image) else { return Ok(None) };
        let (data_dir, custody) = (self.config.data_dir.clone(), self.custody.clone());
        blocking(move || {
            let (volume, size) = (record.volume.to_string(), record.size_bytes);
            let failed = |error: std::io::Error| RequestError::storage("take the replica for", &path, &error);
            let take = |kept: &Path| custody.take_back(kept, &path, &file, migration);
            let Some(facts) = replicas::take(&data_dir, &volume, size, &path, take).map_err(failed)? else {
                return Ok(None);
            };
            let opened = opening::open(&record, None, &ByName, opening::at_once)?;
            Ok(Some((opened, (MigrationId(facts.departure), Generation(facts.generation)))))
        })
        .await
    }

    /// The migration that fills an image.
    fn migration_into(&self, image: &ImageLocation) -> Option<MigrationId> {
        self.journal.read(|state| {
            let fills = |known: &MigrationState| known.volumes.iter().any(|moving| moving.target == *image);
            state.unfinished().find(|(_, known)| fills(known)).map(|(id, _)| id)
        })
    }
}

/// Takes back what was taken for volumes that will not come: files that are empty, and in no journal.
pub(in crate::host) fn forget_room(custody: &Custody, expected: &[Expected]) {
    for (path, made) in expected.iter().filter_map(|volume| volume.reserved.file.as_ref()) {
        custody.unreserve(path, made);
    }
}

fn accepted(
    volume: VolumeId,
    content: TargetContent,
    replica: Option<LeftImage>,
    beside: Option<Beside>,
) -> AcceptedVolume {
    let elsewhere = match content {
        TargetContent::Zero => FormerContent::Zero,
        TargetContent::Unknown | TargetContent::Backing => FormerContent::Unknown,
    };
    let held = match replica {
        None => Held::Nothing,
        Some((departure, generation)) => Held::Copy { departure, generation },
    };
    AcceptedVolume { volume, held, elsewhere, beside }
}
