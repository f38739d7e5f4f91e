//! Volumes that arrive from another host: reserves room for them and makes their images. The migration's session
//! (`incoming.rs`) decides the order; the next part is in `await_arrival.rs`.
//! A volume that returns to clients which it left here goes to the lane that has forwarded them.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use block::held::ByName;
use block::store::Opened;
use chronicle::{BlockSize, Generation};
use lane::{ArrivingStore, Aside, LaneHandle, TargetContent};
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
use crate::host::{Arrivals, blocking};
use crate::images::replicas::{self, is_replica};
use crate::images::{self, opening};
use crate::migrations::arrivals::taking_back::SetAside;
use crate::migrations::departures::leave::refusal;
use crate::names;
use crate::peers::channel::VOLUMES_MAX;
use crate::volumes::registry::{Claim, Service};
use crate::volumes::serving::reserve::Reserved;

/// How long an offer waits for another operation on the volume.
const BUSY_MAX: Duration = Duration::from_secs(5);
const BUSY_POLL: Duration = Duration::from_millis(50);

/// The image that an earlier residency has left: the migration by which the volume left, and the generation of the image.
type LeftImage = (MigrationId, Generation);

/// A volume for which room is reserved.
pub(crate) struct Expected {
    pub(crate) record: VolumeRecord,
    left_behind: LeftBehind,
    /// Who owned the content before Sterna served it.
    origin: Origin,
    reserved: Reserved,
    claim: Claim,
    /// The lane that forwards the clients, if the volume returns to them.
    home: Option<LaneHandle>,
    /// The image of an earlier residency that the volume reuses as it is; `None`: it gets a new one.
    left: Option<LeftImage>,
}

/// A volume whose image exists.
pub(crate) struct Arriving {
    /// The volume's record, with its image at this host.
    pub(crate) record: VolumeRecord,
    pub(crate) left_behind: LeftBehind,
    /// The image; `None`: its lane already has it open.
    pub(crate) store: Option<ArrivingStore>,
    pub(crate) claim: Claim,
    /// The lane that forwards the clients, if the volume returns to them.
    pub(crate) home: Option<LaneHandle>,
}

impl Arrivals {
    /// Accepts a migration that another host offers; repeats the answer if it has been accepted already. After a [`Refusal`]
    /// nothing of it is left at this host.
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

    /// Checks whether the offered volumes may come, and reserves names and places for them. After an error nothing is reserved.
    pub(crate) async fn make_room_for(
        self: &Arc<Self>,
        peer: HostId,
        offer: &Offer,
    ) -> Result<(Vec<Expected>, Option<SetAside>), RequestError> {
        if !(1..=VOLUMES_MAX).contains(&offer.volumes.len()) {
            let text =
                format!("a migration has one volume to {VOLUMES_MAX}, this one {}", offer.volumes.len());
            return Err(RequestError::Invalid(text));
        }
        self.draining.refuse_new()?;
        if offer.vm.is_some() {
            self.vm_orders.check_may_bring_vms(peer)?;
        }
        blocking(descriptors::require_for_volume).await?;
        if let Some(left_by) = self.takes_back(peer, offer)? {
            self.check_images_left(offer).await?;
            return self.take_images_back((peer, left_by), offer).await;
        }
        if let Some(vm) = &offer.vm {
            self.vm_orders.check_vm_name(&vm.name)?;
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

    /// Claims the images that volumes have left here and returns to, with the blocks that their owner lacks.
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
            // Without a lane, the image is just being opened by the departed migration after a start.
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
        let set_aside = self.set_aside(left_by, Aside::Filling, &lanes).await?;
        // N.B. the departed migration may have ended before its driver was set aside. Then its image may be gone.
        if self.takes_back(peer, offer)? != Some(left_by) {
            let name = offer.volumes.first().map(|offered| offered.name.clone()).unwrap_or_default();
            return Err(RequestError::VolumeBusy(name));
        }
        if let Some(vm) = &offer.vm {
            self.let_vm_come_again(left_by, &vm.name).await?;
        }
        Ok((expected, Some(set_aside)))
    }

    fn record_of(&self, offered: &OfferedVolume, reserved: &Reserved, has_lane: bool) -> VolumeRecord {
        let former = self
            .journal
            .read(|state| state.moved.get(&offered.volume).map(|moved| moved.volume.record.clone()));
        // The lane that forwards the clients keeps the block size with which it began. Otherwise a new residency begins here
        // with no records: sets of blocks are not sent between hosts.
        let block_size_bytes = match &former {
            Some(former) if has_lane => former.block_size_bytes,
            _ => BlockSize::DEFAULT.into(),
        };
        // A returning volume is exported as before.
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

    /// Checks that a volume may come, and reserves its name and a place for its image.
    pub(crate) async fn make_room(
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
        // The source finds out what is allocated while it copies. A full store ends the migration.
        let reserved = self.serving.reserve(wanted, || Ok(0)).await?;
        if let Some((path, file)) = &reserved.file {
            // If the volume left an image here, that image says who owned its content.
            let former = self.journal.read(|state| {
                let moved = state.moved.get(&offered.volume)?;
                let image = moved.volume.record.image.place.file()?;
                Some(images::kept_path(state, Path::new(image), moved.migration))
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

    /// Waits a little for the end of the migration by which the volume has left: until then its image has its old name.
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

    pub(crate) fn leaving_migration(&self, volume: VolumeId) -> Option<MigrationId> {
        self.journal.read(|state| {
            let leaves = |known: &MigrationState| {
                matches!(known.side, Side::Outgoing { .. })
                    && known.volumes.iter().any(|moving| moving.volume == volume)
            };
            state.unfinished().find(|(_, known)| leaves(known)).map(|(migration, _)| migration)
        })
    }

    /// Does the same as [`Self::claim_arrival`], with retries while another operation holds the volume.
    pub(crate) async fn claim_when_free(
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

    /// Claims the volume's name: a new one, or that of this very volume, whose clients were left here.
    pub(crate) fn claim_arrival(
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

    /// Makes durable that volumes come, under a new migration number.
    pub(crate) async fn record_arrival(
        &self,
        peer: HostId,
        remote: MigrationId,
        expected: &[Expected],
    ) -> Result<MigrationId, CommitFault> {
        let starting = self.runner.starting_migration.lock().await;
        let migration = self.runner.next_identity(None);
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
        // N.B. in one commit, so that an arriving volume is never marked as forgotten.
        let recorded = self.journal.commit(std::iter::once(started).chain(told).collect()).await;
        drop(starting);
        recorded.map(|()| migration)
    }

    /// Makes the images of arriving volumes, and returns what each image contains.
    pub(crate) async fn make_images(
        &self,
        expected: Vec<Expected>,
        sharing: Sharing,
    ) -> Result<(Vec<AcceptedVolume>, Vec<Arriving>), RequestError> {
        let (mut answer, mut arriving) = (Vec::new(), Vec::new());
        self.ask_for_standbys(&expected).await;
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

    /// Records durably that the image which a volume has left will be written again, before anything is written.
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

    /// Makes a volume's image, or reuses the one that an earlier residency has left. Returns its content and its generation.
    pub(crate) async fn make_image(
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
        let custody = self.custody.clone();
        let make = move || opening::make_target(&custody, &image, file.as_ref(), size, allocation, None);
        let target = blocking(make).await?;
        Ok((self.stores.impair(&reserved.location, target.store), target.content, None))
    }

    /// Turns the replica of an earlier residency into the target, if there is an untouched one, and returns which replica that
    /// was. **N.B.** after an error the target's file may hold anything and is of no use.
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
        let Some(migration) = self.migration_into(&record.image) else { return Ok(None) };
        let (path, record) = (path.clone(), record.clone());
        let (data_dir, custody) = (self.config.data_dir.clone(), self.custody.clone());
        blocking(move || {
            let (volume, size) = (record.volume.to_string(), record.size_bytes);
            let failed =
                |error: std::io::Error| RequestError::storage("reuse the replica for", &path, &error);
            let take = |kept: &Path| custody.take_back(kept, &path, &file, migration);
            let Some(facts) = replicas::take(&data_dir, &volume, size, &path, take).map_err(failed)? else {
                return Ok(None);
            };
            let opened = opening::open(&custody, &record, None, &ByName, opening::at_once)?;
            Ok(Some((opened, (MigrationId(facts.departure), Generation(facts.generation)))))
        })
        .await
    }

    /// Lets arriving volumes begin with their standbys at this host.
    async fn ask_for_standbys(&self, expected: &[Expected]) {
        let target = |volume: &Expected| {
            let (path, _) = volume.reserved.file.as_ref()?;
            let may_reuse = volume.left.is_none()
                && volume.reserved.allocation != opening::Allocation::Thick
                && is_replica(&volume.record.image);
            may_reuse.then(|| (volume.record.volume, path.clone()))
        };
        let targets: Vec<_> = expected.iter().filter_map(target).collect();
        let migration = expected.first().and_then(|volume| self.migration_into(&volume.record.image));
        if let Some(migration) = migration
            && let Some(peer) = self.source_of(migration)
        {
            self.standbys.lend_to_migration(peer, migration, &targets).await;
        }
    }

    /// Returns the host that an arrival comes from.
    fn source_of(&self, migration: MigrationId) -> Option<HostId> {
        self.journal.read(|state| {
            let known = state.unfinished().find(|(id, _)| *id == migration)?.1;
            match &known.side {
                Side::Incoming { peer, .. } => Some(*peer),
                _ => None,
            }
        })
    }

    fn migration_into(&self, image: &ImageLocation) -> Option<MigrationId> {
        self.journal.read(|state| {
            let fills = |known: &MigrationState| known.volumes.iter().any(|moving| moving.target == *image);
            state.unfinished().find(|(_, known)| fills(known)).map(|(id, _)| id)
        })
    }
}

/// Releases what was reserved for volumes that will not come: empty files that are in no journal.
pub(crate) fn forget_room(custody: &Custody, expected: &[Expected]) {
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
