//! Gives lanes their orders for a migration to another host, when it begins and when a restart resumes it.

use std::sync::Arc;

use block::ZeroMode;
use chronicle::{Generation, ReplicaOf};
use lane::{
    LaneHandle, OutgoingChannels, OutgoingGroup, OutgoingOrder, OutgoingRole, Rest, SharedImage,
    TargetContent,
};
use migration::journal::{FailureCode, MigrationState, Moved, Side, Stage};
use migration::source::Moves;
use migration::vm::cold::Form;
use migration::vm::departure::{Rest as RestOfMemory, SourceHas, rest_after_restart};
use migration::wire::{AcceptedVolume, FormerContent, Held};
use migration::{HostId, MigrationId, StayKey, VolumeId, VolumeIndex};
use transport::Session;

use super::OutgoingMigration;
use crate::error::RequestError;
use crate::hooks::HookSide;
use crate::host::{Departures, blocking};
use crate::migrations::arrivals::shared::Found;
use crate::migrations::departures::leave::{Departing, round_trip, switch_over_max};
use crate::migrations::departures::strategies::{away, choice, choice_again, time_left};
use crate::migrations::metadata::Metadata;
use crate::peers::channel::{Kind, Subject};
use crate::peers::host_id;
use crate::vms::VmError;
use crate::vms::moving::VmMessage;
use crate::vms::moving::channel::VmChannel;
use crate::vms::orders::move_vm::resumed_wishes;
use crate::volumes::registry::Service;

/// A volume that leaves, and its lane's order.
struct Departure {
    name: String,
    volume: VolumeId,
    generation: Generation,
    lane: LaneHandle,
    /// Whether the lane already forwards its clients to the volume's owner.
    leads_on: bool,
    order: OutgoingOrder,
}

impl OutgoingMigration {
    /// Starts the lanes after the volumes have been accepted.
    pub(crate) async fn begin_anew(&mut self, migration: MigrationId) -> Result<(), RequestError> {
        let moves = self.moves();
        let Some(ordered) = &mut self.order else { return Ok(()) };
        let Some(acceptance) = &ordered.acceptance else { return Ok(()) };
        let (host, session, order) = (&self.departures, &ordered.session, &ordered.order);
        match &self.task.vm {
            Some(vm) if self.form == Form::Cold => host.vm_orders.prepare_cold_away(migration, vm, session),
            None if moves == Moves::VolumesAfterHooks => {
                host.migration_hooks.prepare_hooks_away(migration, session);
            }
            _ => {}
        }
        let accepted =
            |volume: VolumeId| acceptance.volumes.iter().find(|accepted| accepted.volume == volume);
        let mut found = Vec::new();
        for Departing { record, .. } in &ordered.volumes {
            let beside = accepted(record.volume).and_then(|accepted| accepted.beside.as_ref());
            found.extend(host.arrivals.find_shared(record.volume, &record.name, beside).await);
        }
        host.arrivals.note_shared(migration, &found).await;
        let peer = host_id(session.peer());
        let budget = host.migrations.budgets.of(migration, order.bandwidth_bytes_per_second);
        let departures = ordered.volumes.iter().map(|Departing { record, lane }| {
            let accepted = accepted(record.volume);
            let order = OutgoingOrder {
                migration,
                to: peer,
                source: record.image.clone(),
                keep_source: order.keep_source,
                budget: budget.clone(),
                pacing: host.runner.pacing(order),
                impact: host.runner.impact(order),
                time_left: time_left(order),
                strategy: away(choice(order), order, moves, session),
                content: accepted.map_or(TargetContent::Unknown, content),
                known: accepted.filter(|_| !order.full).and_then(|accepted| held(accepted, peer)),
                zeroes: zeroes(order.allocation),
                shared: shared_of(&found, record.volume),
                switch_over_max: switch_over_max(session, moves, order),
                round_trip: round_trip(session),
                moves,
                rest: Rest::Resume,
                recorded: None,
            };
            let (name, lane) = (record.name.clone(), lane.clone());
            let (volume, generation) = (record.volume, record.generation);
            Departure { name, volume, generation, lane, leads_on: false, order }
        });
        self.lanes = host.give_orders(session, departures.collect()).await?;
        if let (Some(leaving), Some((_, _, lane))) = (&self.leaving, self.lanes.first()) {
            tokio::spawn(end_if_refused(migration, leaving.refused_meanwhile(), lane.clone()));
        }
        let names: Vec<_> = ordered.volumes.iter().map(|volume| volume.record.name.as_str()).collect();
        let other = &ordered.elsewhere.peer.name;
        tracing::info!(volumes = names.join(", "), %migration, host = %other, "migration begun");
        let warnings = std::mem::take(&mut ordered.warnings);
        if let Some(begun) = host.journal.begun_unix_ms(migration).filter(|_| !warnings.is_empty()) {
            let warn =
                |metadata: &mut Metadata| warnings.into_iter().for_each(|warning| metadata.warn(warning));
            host.metadata_folder.note(migration, begun, warn).await;
        }
        Ok(())
    }

    /// Resumes the migration after a restart, or after a lane has ended.
    pub(crate) async fn begin_again(&mut self, migration: MigrationId) -> Result<(), RequestError> {
        let begun = self.try_to_begin_again(migration).await;
        begun.inspect_err(|error| {
            if !matches!(error, RequestError::AlreadyMigrating { .. }) {
                self.task.say(error);
            }
        })
    }

    async fn try_to_begin_again(&mut self, migration: MigrationId) -> Result<(), RequestError> {
        let host = Arc::clone(&self.departures);
        let recorded = host.journal.read(|state| state.migrations.get(&migration).cloned());
        let Some(recorded) = recorded else { return Ok(()) };
        let Side::Outgoing { peer, .. } = &recorded.side else { return Ok(()) };
        if let Some(later) = host.journal.read(|state| state.taken_back_by(migration)) {
            let volume = recorded.names.first().cloned().unwrap_or_default();
            return Err(RequestError::AlreadyMigrating { volume, migration: later });
        }
        let session = host.hosts.session_with(*peer)?;
        let is_copying = matches!(recorded.stage, Stage::Copying);
        let moves = match (&self.task.vm, is_copying) {
            (Some(_), true) if self.form == Form::Cold => Moves::VolumesAfterHooks,
            (Some(_), false) if self.form == Form::Cold => Moves::Volumes,
            (Some(_), _) => Moves::Vm,
            // The previous daemon alone knew whether the target has hooks.
            (None, true) => Moves::VolumesAfterHooks,
            (None, false) => Moves::Volumes,
        };
        let mut departures = Vec::new();
        for position in 0..recorded.volumes.len() {
            departures.push(host.departure_again(migration, &recorded, position, &session, moves).await?);
        }
        host.migrations.track_again(migration, departures.iter().map(|departure| departure.volume));
        self.prepare_again(migration, &session, &recorded.stage).await?;
        self.lanes = host.give_orders(&session, departures).await?;
        Ok(())
    }

    /// Prepares the VM and the hooks before lanes ask for them.
    async fn prepare_again(
        &mut self,
        migration: MigrationId,
        session: &Session,
        stage: &Stage,
    ) -> Result<(), RequestError> {
        let host = Arc::clone(&self.departures);
        let Some(vm) = self.task.vm.clone() else {
            host.migration_hooks.prepare_hooks_away(migration, session);
            return Ok(());
        };
        if !host.vm_orders.vm_is_leaving(&vm) {
            // N.B. The daemon was killed between the records of the migration and of its VM. The volumes do
            // not leave without the VM.
            host.migration_hooks.prepare_hooks_away(migration, session);
            self.stays = format!(
                "this host's daemon was restarted before {vm} began to leave; it continues here; to order the move again: sterna \
                 migration retry {migration}"
            );
            return Ok(());
        }
        if self.form == Form::Cold {
            host.vm_orders.prepare_cold_away(migration, &vm, session);
            return Ok(());
        }
        host.vms.until_found(&vm).await;
        let qemu = match host.vms.qemu(&vm) {
            Ok(qemu) => qemu,
            // The VM is resumed as well: its volumes have an owner, and the VM is there.
            Err(VmError::NotRunning(_)) => {
                if matches!(stage, Stage::Released(_))
                    && rest_after_restart(SourceHas::Nothing) == RestOfMemory::TellLost
                {
                    host.tell_lost(migration, &vm, session).await;
                }
                self.stays = format!(
                    "its QEMU ended while its memory was copied, as when its host goes down; it has not moved: sterna vm show {vm} \
                     says how it ended, and sterna vm start {vm} starts it again here"
                );
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        };
        let other = host.hosts.name_of(host_id(session.peer()));
        let hooks = host.migration_hooks.hook_runner(migration, &vm, HookSide::Source, &other);
        let begun = host.journal.begun_unix_ms(migration);
        let recorded = begun.and_then(|begun| host.metadata_folder.of(migration, begun));
        let ordered = recorded.and_then(|metadata| metadata.order);
        let rate = ordered.and_then(|order| order.bandwidth_bytes_per_second);
        let wishes = resumed_wishes(host.migrations.budgets.of(migration, rate));
        let leaving = host.vm_orders.leaving(migration, &vm, qemu, wishes, session, hooks);
        leaving.resume_post_copy();
        self.vm_leaves(migration, leaving);
        self.stays = format!(
            "this host's daemon was restarted while the memory of {vm} was copied, which broke the copy; the VM continues here; \
             to order the move again: sterna migration retry {migration}"
        );
        Ok(())
    }
}

/// Ends a migration whose VM the other host refuses while the volumes are copied: the rest of the copy would be in vain.
async fn end_if_refused(
    migration: MigrationId,
    refused: impl Future<Output = Option<String>>,
    lane: LaneHandle,
) {
    let Some(reason) = refused.await else { return };
    let detail = format!(
        "{reason}; the VM continues here; to order the move again: sterna migration retry {migration}"
    );
    tracing::warn!(%migration, reason, "the VM cannot go to the other host; its migration ends");
    // If it is too late, it has ended already.
    let _ = lane.fail(migration, FailureCode::VmStayed, detail).await;
}

impl Departures {
    /// Sends to the target that the QEMU of this host has ended. A VM that runs there without all of its memory gets no more of
    /// it. The target knows whether anything is missing, and ends the VM then.
    async fn tell_lost(&self, migration: MigrationId, vm: &str, session: &Session) {
        let streams = self.peers.vm_streams(session, self.peers.own(), migration);
        let reason = "its QEMU at the source has ended, with the rest of its memory";
        VmChannel::without_main(streams).send(&VmMessage::lost(reason));
        tracing::warn!(vm = %vm, %migration, "the QEMU of a VM that has moved has ended here; the target learns that no more \
            memory follows");
        let Some(begun) = self.journal.begun_unix_ms(migration) else { return };
        let ahead = |metadata: &Metadata| {
            metadata.order.as_ref().is_some_and(|order| order.memory == api::Memory::PostCopy)
        };
        let text = format!(
            "the QEMU of {vm} at this host ended before all of its memory may have gone (--memory post-copy): if some was \
             missing, the VM has crashed at the target, and its disks are complete; run there: sterna vm show {vm}, sterna vm \
             start {vm}"
        );
        let warn = |metadata: &mut Metadata| {
            if ahead(metadata) {
                metadata.warn(text);
            }
        };
        self.metadata_folder.note(migration, begun, warn).await;
    }

    /// Returns a volume of a resumed migration, with its lane.
    async fn departure_again(
        self: &Arc<Self>,
        migration: MigrationId,
        recorded: &MigrationState,
        position: usize,
        session: &Session,
        moves: Moves,
    ) -> Result<Departure, RequestError> {
        let (moving, name) = (&recorded.volumes[position], &recorded.names[position]);
        let volume = moving.volume;
        let (lane, leads_on) = match recorded.stage {
            Stage::Released(_) => match self.lane_of_left(name, migration, volume).await {
                Some(lane) => (lane, true),
                None => (self.wait_for_owner(volume).await?, false),
            },
            _ => (self.volumes.lane(name).await?, false),
        };
        let metadata = self.metadata_folder.of(migration, recorded.started_unix_ms).unwrap_or_default();
        let ordered = metadata.order.unwrap_or_else(|| api::MigrateVolume::to(String::new()));
        let (here, generation) = self.journal.read(|state| {
            let here = state.volumes.get(&volume).map(|known| known.record.generation);
            let moved = || Some(state.moved.get(&volume)?.volume.record.generation);
            (here, here.or_else(moved).unwrap_or_default())
        });
        let order = OutgoingOrder {
            migration,
            to: host_id(session.peer()),
            source: moving.source.clone(),
            keep_source: recorded.keep_source,
            budget: self.migrations.budgets.of(migration, ordered.bandwidth_bytes_per_second),
            pacing: self.runner.pacing(&ordered),
            impact: self.runner.impact(&ordered),
            time_left: time_left(&ordered),
            strategy: away(choice_again(&ordered, recorded), &ordered, moves, session),
            // If its content is not recorded, the target may hold anything.
            content: TargetContent::Unknown,
            known: here.map(|generation| (ReplicaOf::Migration(migration.0), generation)),
            zeroes: zeroes(ordered.allocation),
            shared: self.arrivals.find_shared_again(migration, volume).await,
            switch_over_max: switch_over_max(session, moves, &ordered),
            round_trip: round_trip(session),
            moves,
            rest: if metadata.is_paused { Rest::Pause } else { Rest::Resume },
            recorded: Some(Box::new(recorded.clone())),
        };
        Ok(Departure { name: name.clone(), volume, generation, lane, leads_on, order })
    }

    /// Returns the lane that still forwards clients of a departed volume, if the driver of its migration was set aside there.
    async fn lane_of_left(&self, name: &str, migration: MigrationId, volume: VolumeId) -> Option<LaneHandle> {
        let has_left = self
            .journal
            .read(|state| state.moved.get(&volume).is_some_and(|left| left.migration == migration));
        match self.volumes.service(name).filter(|_| has_left)? {
            Service::Serving(lane) if lane.status().await.is_ok() => Some(lane),
            _ => None,
        }
    }

    /// Starts a lane for a volume that was released to another host and may still return: its clients wait.
    async fn wait_for_owner(self: &Arc<Self>, volume: VolumeId) -> Result<LaneHandle, RequestError> {
        let moved = self.journal.read(|state| state.moved.get(&volume).cloned());
        let missing = || RequestError::VolumeNotFound(volume.to_string());
        let moved = moved.ok_or_else(missing)?;
        let record = moved.volume.record.clone();
        self.check_left(&moved).await?;
        let store = match self.serving.open_for_resuming(&record).await {
            Ok(opened) => self.serving.with_what_is_missing(&record, opened).await?,
            // The image was deleted or renamed, so the handover is final and only the end was not recorded.
            Err(error) if error.code() == api::ErrorCode::ImageNotFound => {
                self.serving.store_elsewhere(&moved)?
            }
            Err(error) => return Err(error),
        };
        let lane = self.arrivals.start_waiting(&record, moved.volume.stay, store).await?;
        // N.B. An order may have taken it back meanwhile.
        let left_still = self.journal.read(|state| state.moved.contains_key(&volume));
        if !left_still || self.volumes.claim(&record.name).is_err_and(|error| is_busy(&error)) {
            lane.stop(self.limits.now().stop_wait_max).await;
            return Err(RequestError::VolumeBusy(record.name));
        }
        self.volumes.add(&record.name, volume);
        if let Some(attempt) = self.volumes.attempt(&record.name) {
            self.volumes.set(&record.name, &attempt, Service::Serving(lane.clone()));
            self.serving.keep_serving(record.name, attempt, Some(lane.clone()));
        }
        Ok(lane)
    }

    /// Checks that the image from which the target reads missing blocks is unchanged.
    async fn check_left(&self, moved: &Moved) -> Result<(), RequestError> {
        let record = &moved.volume.record;
        let is_read = self.journal.read(|state| {
            state.is_reservoir(record.image.place.name()) && state.taken_back_by(moved.migration).is_none()
        });
        if !is_read {
            return Ok(());
        }
        let key = StayKey { volume: record.volume, stay: moved.volume.stay };
        let (chronicles, image) = (self.chronicles.clone(), record.image.clone());
        let checked = blocking(move || Ok(chronicles.check_left(key, &image))).await?;
        checked.map_err(|distrust| {
            let detail = format!(
                "host \"{}\" lacks parts of volume \"{}\" that are in it, and nothing is read from it: {distrust}; put \
                 the image back, or, if this one is its copy: sterna volume promote {} --exchanged; if the blocks cannot be \
                 restored, give them up at that host: sterna volume promote {} --without-missing",
                moved.host_name, record.name, record.name, record.name
            );
            RequestError::ImageUnsuitable { path: record.image.place.name().into(), detail }
        })
    }

    /// Gives lanes their orders and the channels to the other host, and returns the lanes. The first volume's lane drives the
    /// migration, the others take part. Errors: [`RequestError::VolumeUnavailable`]; no lane has begun or resumed then.
    async fn give_orders(
        &self,
        session: &Session,
        departures: Vec<Departure>,
    ) -> Result<Vec<(String, VolumeId, LaneHandle)>, RequestError> {
        let mut together = OutgoingGroup::default();
        let mut departures = departures.into_iter();
        let Some(first) = departures.next() else { return Ok(Vec::new()) };
        let mut leaving = vec![(first.name.clone(), first.volume, first.lane.clone())];
        for departure in departures {
            let Departure { volume, generation, .. } = departure;
            let participation = together.add(volume, generation, departure.order.source.clone());
            leaving.push((departure.name.clone(), volume, departure.lane.clone()));
            let index = participation.index();
            self.let_leave(session, index, departure, OutgoingRole::Joins(participation)).await?;
        }
        self.let_leave(session, VolumeIndex(0), first, OutgoingRole::Drives(together)).await?;
        Ok(leaving)
    }

    async fn let_leave(
        &self,
        session: &Session,
        volume: VolumeIndex,
        departure: Departure,
        role: OutgoingRole,
    ) -> Result<(), RequestError> {
        let migration = departure.order.migration;
        let line = |kind| {
            let subject = Subject { kind, source: self.peers.own(), migration, volume };
            self.peers.line(session, subject)
        };
        let owner = (!departure.leads_on).then(|| line(Kind::Forwarding));
        let lines = OutgoingChannels { replica: line(Kind::Migration), owner };
        let left = departure.lane.leave(departure.order, lines, role).await;
        left.map_err(|refused| RequestError::VolumeUnavailable {
            volume: departure.name,
            reason: refused.to_string(),
        })
    }
}

fn is_busy(error: &RequestError) -> bool {
    matches!(error, RequestError::VolumeBusy(_))
}

fn shared_of(found: &[Found], volume: VolumeId) -> Option<SharedImage> {
    found.iter().find(|found| found.volume == volume).map(|found| found.image.clone())
}

/// Returns the replica that the other host has turned into the target.
pub(crate) fn held(accepted: &AcceptedVolume, host: HostId) -> Option<(ReplicaOf, Generation)> {
    match accepted.held {
        Held::Copy { departure, generation } => {
            Some((ReplicaOf::Host { host: host.0, departure: departure.0 }, generation))
        }
        Held::Nothing => None,
    }
}

/// Returns what the target holds where the volume has not been copied yet.
fn content(accepted: &AcceptedVolume) -> TargetContent {
    match accepted.elsewhere {
        FormerContent::Zero => TargetContent::Zero,
        FormerContent::Unknown => TargetContent::Unknown,
    }
}

/// Returns how zeroes are written at the target: those of a thin image become holes.
fn zeroes(allocation: api::Allocation) -> ZeroMode {
    match allocation {
        api::Allocation::Thin => ZeroMode::MayUnmap,
        api::Allocation::Thick => ZeroMode::KeepAllocated,
    }
}
