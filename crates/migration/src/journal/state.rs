//! The journal folded into the current state of this host.

use std::collections::BTreeMap;

use chronicle::StayId;
use serde::{Deserialize, Serialize};

use super::attached::{AttachedVolume, GivenAttachment};
use super::filling::{Hollow, VolumeFilling};
use super::image::{Place, Reservation, ReservedContent};
use super::origin::Origin;
use super::record::{Entry, MigratingVolume, Outcome, Record, Summary, VolumeRecord};
use super::restored::Restored;
use super::side::{Branch, Moved, Promotion, Side};
use super::snapshots::SnapshotOf;
use super::stage::Stage;
use crate::authority::is_needed;
use crate::custody::KnownImage;
use crate::identity::{Attempt, HostId, MigrationId, VolumeId};
use crate::planted::{Bug, broken};

/// The most ended migrations that are remembered; older ones are forgotten when a new one starts.
const ENDED_MIGRATIONS_MAX: usize = 1000;

/// All volumes and migrations of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// The volumes that this host serves, by identity.
    pub volumes: BTreeMap<VolumeId, VolumeState>,
    /// The migrations under way, and the latest that have ended.
    pub migrations: BTreeMap<MigrationId, MigrationState>,
    /// The identity of the next migration.
    pub next_migration: u64,
    /// Devices and exports with content that migrations left there.
    pub reservations: BTreeMap<Place, Reservation>,
    /// The volumes that went to other hosts. None of them is in `volumes`.
    pub moved: BTreeMap<VolumeId, Moved>,
    /// The branches of volumes' histories that forced promotions on this host began.
    pub branches: BTreeMap<VolumeId, Vec<Branch>>,
    /// The known origins of volumes' contents. Not in the snapshot, whose format cannot change, but in records behind it.
    #[serde(skip)]
    pub origins: BTreeMap<VolumeId, Origin>,
    /// The volumes of this host that are incomplete after a handover. In records behind the snapshot.
    #[serde(skip)]
    pub fillings: BTreeMap<VolumeId, VolumeFilling>,
    /// The open questions since this journal was restored from a backup; `None` if it never was. In records behind the snapshot.
    #[serde(skip)]
    pub restored: Option<Restored>,
    /// Which image has which name. As above.
    #[serde(skip)]
    pub images: BTreeMap<Place, KnownImage>,
    /// The hosts that may use volumes of this host, or volumes that have left from here. As above.
    #[serde(skip)]
    pub given: BTreeMap<VolumeId, BTreeMap<HostId, GivenAttachment>>,
    /// The volumes of other hosts that are attached here; see [`State::attachment_of`]. As above.
    #[serde(skip)]
    pub attached: BTreeMap<VolumeId, AttachedVolume>,
    /// The volumes that are snapshots. As above.
    #[serde(skip)]
    pub snapshots: BTreeMap<VolumeId, SnapshotOf>,
    /// The volumes that are being reverted, each with its snapshot. As above.
    #[serde(skip)]
    pub reverts: BTreeMap<VolumeId, VolumeId>,
}

/// A volume that this host serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeState {
    /// The volume as it was added, with its current image and generation.
    pub record: VolumeRecord,
    /// The residency of the volume at this host; all its other durable state bears this identity.
    pub stay: StayId,
    /// The time of its addition, in milliseconds since 1970.
    pub added_unix_ms: u64,
    /// The size in bytes after the resize in progress; `None` without one.
    pub resizing_to: Option<u64>,
}

/// A migration and its durable stage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationState {
    /// The volumes that the migration moves.
    pub volumes: Vec<MigratingVolume>,
    /// The names of its volumes, some of which may be gone.
    pub names: Vec<String>,
    /// Whether the source images are kept afterwards.
    pub keep_source: bool,
    /// The durable stage of the migration.
    pub stage: Stage,
    /// The latest attempt known to be aborted.
    pub aborted: Attempt,
    /// The time of its start, in milliseconds since 1970.
    pub started_unix_ms: u64,
    /// The time of its end, in milliseconds since 1970; `None` while it is under way.
    pub ended_unix_ms: Option<u64>,
    /// The cost; all zero until the end.
    pub summary: Summary,
    /// This host's side of the migration.
    pub side: Side,
    /// The basis of its promotion, if it was promoted.
    pub promotion: Option<Promotion>,
    /// The former records of volumes that have returned by it, in case of a hand-back; empty after its end.
    pub returning: Vec<Moved>,
    /// The latest attempt with incomplete volumes, if any. In a record behind the snapshot.
    #[serde(skip)]
    pub hollow: Option<Hollow>,
    /// Whether it is cancelled. In a record behind the snapshot.
    #[serde(skip)]
    pub is_cancelled: bool,
}

/// A record that does not follow from earlier ones: the journal is damaged, or there is a defect.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Inconsistent {
    /// A record names a volume that does not exist.
    #[error("a record names volume {0}, which is unknown")]
    UnknownVolume(VolumeId),
    /// A record names a migration that does not exist.
    #[error("a record names migration {0}, which is unknown")]
    UnknownMigration(MigrationId),
    /// A record is about a restored journal, and this one never was restored.
    #[error("a record is about a restored journal, and this one was never restored")]
    NotRestored,
    /// A record does not fit the stage of the migration.
    #[error("migration {migration} is {stage:?}: a record of {record} does not fit")]
    OutOfOrder {
        /// The migration of the record.
        migration: MigrationId,
        /// The current stage of the migration.
        stage: Stage,
        /// The name of the rejected record.
        record: &'static str,
    },
    /// A handover and a cancellation exclude each other, and the other one came first. This is not a defect.
    #[error("{0} is cancelled, or handed over")]
    Overtaken(MigrationId),
}

impl State {
    /// Applies the records of `entry`.
    ///
    /// # Errors
    /// [`Inconsistent`]; the state then reflects the records before the bad one.
    pub fn apply(&mut self, entry: &Entry) -> Result<(), Inconsistent> {
        entry.records.iter().try_for_each(|record| self.apply_record(entry.at_unix_ms, record))
    }

    /// Returns the volume of this name.
    pub fn volume_named(&self, name: &str) -> Option<(VolumeId, &VolumeState)> {
        self.volumes.iter().find(|(_, volume)| volume.record.name == name).map(|(id, volume)| (*id, volume))
    }

    /// Returns the migrations that have not ended.
    pub fn unfinished(&self) -> impl Iterator<Item = (MigrationId, &MigrationState)> {
        self.migrations.iter().filter(|(_, state)| !state.has_ended()).map(|(id, state)| (*id, state))
    }

    /// Returns the migration that comes from `peer` and has the number `remote` there.
    pub fn incoming(&self, peer: HostId, remote: MigrationId) -> Option<(MigrationId, &MigrationState)> {
        let comes = |state: &MigrationState| matches!(&state.side, Side::Incoming { peer: from, remote: number, .. } if (*from, *number) == (peer, remote));
        self.migrations.iter().rev().find(|(_, state)| comes(state)).map(|(id, state)| (*id, state))
    }

    /// Returns the migration `id` of this host, if it goes to `peer`.
    pub fn outgoing(&self, peer: HostId, id: MigrationId) -> Option<&MigrationState> {
        let goes =
            |state: &&MigrationState| matches!(&state.side, Side::Outgoing { peer: to, .. } if *to == peer);
        self.migrations.get(&id).filter(goes)
    }

    /// Returns the volume of this name that went to another host.
    pub fn moved_named(&self, name: &str) -> Option<(VolumeId, &Moved)> {
        let named = |moved: &Moved| moved.volume.record.name == name;
        self.moved.iter().find(|(_, moved)| named(moved)).map(|(id, moved)| (*id, moved))
    }

    fn apply_record(&mut self, at_unix_ms: u64, record: &Record) -> Result<(), Inconsistent> {
        match record {
            Record::Snapshot(state) => self.clone_from(state),
            Record::VolumeAdded(record) => {
                let volume = VolumeState {
                    record: record.clone(),
                    stay: StayId::Made,
                    added_unix_ms: at_unix_ms,
                    resizing_to: None,
                };
                self.reservations.remove(&record.image.place);
                self.use_images([&record.image.place]);
                self.moved.remove(&record.volume);
                let origin = if record.image.is_adopted() { Origin::Given } else { Origin::Made };
                self.volumes.insert(record.volume, volume);
                self.origins.insert(record.volume, origin);
            }
            Record::VolumeRemoved { volume } => {
                self.volumes.remove(volume).ok_or(Inconsistent::UnknownVolume(*volume))?;
                // **N.B.** A volume whose missing blocks were given up is never reported complete: their only copy is at its
                // former host.
                let is_kept =
                    |filling: &VolumeFilling| filling.is_given_up && !broken(Bug::RemovedForgetsGivenUp);
                self.fillings.retain(|known, filling| known != volume || is_kept(filling));
                self.given.remove(volume);
                self.forget_snapshot(*volume);
                self.forget_origins();
                self.forget_images();
            }
            Record::MigrationStarted { migration, volumes, keep_source, side } => {
                self.start(at_unix_ms, *migration, volumes, *keep_source, side);
            }
            Record::TargetPrepared { migration, .. } => self.advance(*migration, "prepared", record)?,
            Record::AttemptAborted { migration, attempt } => {
                let state = self.migration(*migration)?;
                state.aborted = state.aborted.max(*attempt);
                self.advance(*migration, "aborted", record)?;
            }
            Record::Discarding { migration, .. } => self.advance(*migration, "discarding", record)?,
            Record::Released { migration, generations, .. } => {
                self.advance(*migration, "released", record)?;
                self.volumes_leave(at_unix_ms, *migration, generations)?;
            }
            Record::Owned { migration, attempt, generations } => {
                let is_first = !self.migration(*migration)?.has_arrived();
                self.advance(*migration, "owned", record)?;
                self.volumes_arrive(at_unix_ms, *migration, generations)?;
                if is_first {
                    self.begin_fillings(*migration, *attempt);
                }
            }
            Record::Promoted { migration, attempt, generations, promotion } => {
                let is_first = !self.migration(*migration)?.has_arrived();
                self.advance(*migration, "promoted", record)?;
                self.open_branches(*migration, promotion)?;
                if matches!(self.migration(*migration)?.side, Side::Outgoing { .. }) {
                    return self.volumes_return(*migration, generations);
                }
                self.volumes_arrive(at_unix_ms, *migration, generations)?;
                if is_first && !broken(Bug::TicketForgetsMissing) {
                    self.begin_fillings(*migration, *attempt);
                }
            }
            Record::Hollow { migration, hollow } => {
                self.migration(*migration)?.hollow = Some(hollow.clone());
            }
            Record::FillingKnown { volume, filling } => {
                self.fillings.insert(*volume, (**filling).clone());
            }
            Record::Filled { volume } => {
                self.fillings.remove(volume);
                self.forget_hollows();
            }
            Record::MissingGivenUp { volume } => {
                if let Some(filling) = self.fillings.get_mut(volume) {
                    filling.is_given_up = true;
                }
            }
            Record::HandedBack { migration, generations } => {
                self.advance(*migration, "handed back", record)?;
                if !broken(Bug::FillingOutlivesHandBack) {
                    self.end_fillings(*migration);
                }
                self.volumes_return(*migration, generations)?;
            }
            Record::MigrationEnded { migration, outcome, summary } => {
                self.advance(*migration, "ended", record)?;
                if matches!(outcome, Outcome::Moved { .. }) {
                    self.end_reservoirs(at_unix_ms, *migration);
                }
                let state = self.migration(*migration)?;
                state.ended_unix_ms = Some(at_unix_ms);
                state.summary = *summary;
                state.returning.clear();
                state.is_cancelled = false;
                self.forget_hollows();
                self.forget_origins();
                self.forget_images();
            }
            Record::MovedForgotten { volume } => {
                self.forget_moved(*volume)?;
                self.given.remove(volume);
                self.forget_attached();
                self.forget_origins();
            }
            Record::OriginKnown { volume, origin } => self.learn_origin(*volume, *origin),
            Record::Restored(restored) => self.restored = Some((**restored).clone()),
            Record::Reinstated { volume, generation, stay, branch } => {
                self.reinstate(*volume, *generation, *stay, *branch)?;
            }
            Record::RestoredForgotten { volume } => self.forget_restored(*volume)?,
            Record::RestoredMore(more) => self.learn_more_of_restored(more)?,
            Record::DepartureConfirmed { volume } => self.confirm_departure(*volume)?,
            Record::ResizeBegun { volume, size_bytes } => {
                self.volume(*volume)?.resizing_to = Some(*size_bytes);
            }
            Record::Resized { volume, size_bytes } => {
                let state = self.volume(*volume)?;
                state.record.size_bytes = *size_bytes;
                state.resizing_to = None;
            }
            Record::ReservationLifted { place } => {
                self.reservations.remove(place);
            }
            Record::CancelOrdered { migration } => {
                self.advance(*migration, "cancelled", record)?;
                self.migration(*migration)?.is_cancelled = true;
            }
            Record::GrewElsewhere { volume, size_bytes } => self.grew_elsewhere(*volume, *size_bytes),
            Record::ImageKnown { place, known } => {
                self.images.insert(place.clone(), known.clone());
            }
            Record::ImageForgotten { place } => {
                self.images.remove(place);
            }
            Record::AttachmentGiven { volume, given } => self.give_attachment(*volume, given),
            Record::AttachmentEnded { volume, host } => self.end_attachment(*volume, *host),
            Record::Attached(attached) => self.attach(at_unix_ms, attached),
            Record::Detached { volume } => self.detach(*volume)?,
            Record::SnapshotKnown { volume, taken } => {
                self.snapshots.insert(*volume, (**taken).clone());
            }
            Record::RevertBegun { reverts } => self.begin_reverts(reverts),
            Record::Reverted { volume } => {
                self.reverts.remove(volume);
            }
        }
        Ok(())
    }

    fn start(
        &mut self,
        at: u64,
        migration: MigrationId,
        volumes: &[MigratingVolume],
        keep_source: bool,
        side: &Side,
    ) {
        let name = |moving: &MigratingVolume| match side {
            Side::Incoming { volumes, .. } => {
                volumes.iter().find(|record| record.volume == moving.volume).map(|record| record.name.clone())
            }
            Side::OneHost | Side::Outgoing { .. } => {
                self.volumes.get(&moving.volume).map(|volume| volume.record.name.clone())
            }
        };
        let state = MigrationState {
            names: volumes.iter().map(|moving| name(moving).unwrap_or_default()).collect(),
            volumes: volumes.to_vec(),
            keep_source,
            stage: Stage::Copying,
            aborted: Attempt::NONE,
            started_unix_ms: at,
            ended_unix_ms: None,
            summary: Summary::default(),
            side: side.clone(),
            promotion: None,
            returning: Vec::new(),
            hollow: None,
            is_cancelled: false,
        };
        // From here on the place may hold a partial copy, and its earlier content is gone.
        self.reserve_targets(migration, &state, ReservedContent::HalfMade);
        self.use_images(volumes.iter().map(|moving| &moving.target.place));
        self.migrations.insert(migration, state);
        self.next_migration = self.next_migration.max(migration.0 + 1);
        self.forget_ended();
    }

    /// Forgets the oldest of many ended migrations, except those that still say who may use a volume.
    fn forget_ended(&mut self) {
        if self.migrations.len() <= ENDED_MIGRATIONS_MAX {
            return;
        }
        // **N.B.** All are checked before any is removed. The migration that ends another's permission is younger, and never
        // goes first.
        let is_over = |(id, state): &(&MigrationId, &MigrationState)| {
            state.has_ended() && !is_needed(self, **id, state)
        };
        let ended: Vec<_> = self.migrations.iter().filter(is_over).map(|(id, _)| *id).collect();
        for id in ended.iter().take(ended.len().saturating_sub(ENDED_MIGRATIONS_MAX)) {
            self.migrations.remove(id);
        }
    }

    fn advance(
        &mut self,
        migration: MigrationId,
        name: &'static str,
        record: &Record,
    ) -> Result<(), Inconsistent> {
        let state = self.migration(migration)?;
        if state.is_overtaken(record) {
            return Err(Inconsistent::Overtaken(migration));
        }
        match state.stage.after(&state.side, record) {
            Some(stage) => state.stage = stage,
            None => {
                let stage = state.stage.clone();
                return Err(Inconsistent::OutOfOrder { migration, stage, record: name });
            }
        }
        Ok(())
    }

    pub(super) fn volume(&mut self, volume: VolumeId) -> Result<&mut VolumeState, Inconsistent> {
        self.volumes.get_mut(&volume).ok_or(Inconsistent::UnknownVolume(volume))
    }

    pub(super) fn migration(&mut self, migration: MigrationId) -> Result<&mut MigrationState, Inconsistent> {
        self.migrations.get_mut(&migration).ok_or(Inconsistent::UnknownMigration(migration))
    }
}

impl MigrationState {
    /// Returns whether nothing is left to do.
    pub fn has_ended(&self) -> bool {
        matches!(self.stage, Stage::Ended(_))
    }

    /// Returns whether an order to cancel it would be accepted at this stage.
    pub fn may_be_cancelled(&self) -> bool {
        self.stage.can_be_cancelled(&self.side)
    }

    /// Returns whether a record would hand over a cancelled migration, or cancel one that may be handed over.
    fn is_overtaken(&self, record: &Record) -> bool {
        match record {
            Record::CancelOrdered { .. } => !self.may_be_cancelled(),
            Record::Released { .. } => self.is_cancelled && !broken(Bug::CancelOvertaken),
            // On one host the promise has no effect without the release.
            Record::TargetPrepared { .. } => {
                self.is_cancelled
                    && matches!(self.side, Side::Incoming { .. })
                    && !broken(Bug::CancelOvertaken)
            }
            // An incomplete promise was given up meanwhile.
            Record::Owned { .. } | Record::Promoted { .. } | Record::AttemptAborted { .. } => {
                matches!((&self.side, &self.stage), (Side::Incoming { .. }, Stage::Discarding(_)))
            }
            _ => false,
        }
    }

    /// Returns whether the volumes are at the target, this host, for good. Only follow-up work may be left, and no message or
    /// command changes the result.
    pub fn has_arrived(&self) -> bool {
        self.side.has_target() && matches!(self.stage, Stage::Owned(_) | Stage::Ended(Outcome::Moved { .. }))
    }
}
