//! The source's side of a migration to another host: carries out the actions of its [session](migration::session).
//!
//! ```text
//!   Record      started, durably, under a number of its own
//!   Offer       what is offered; what the target has of it
//!   LetVmLeave  from here on no other operation starts, stops or removes the VM
//!   ExamineVm   the target says whether it can run the VM
//!   Begin       hooks, images that both hosts have, and the lanes' orders: the first volume's drives (lane.rs)
//! ```

mod begin;

use std::sync::Arc;

use ::host::Work;
use api::{MigrateVolume, Migration};
use futures_channel::mpsc::UnboundedReceiver;
use hypervisor::Hypervisor;
use lane::LaneHandle;
use migration::journal::{FailureCode, MigrationState, Outcome, Stage};
use migration::message::ToTarget;
use migration::session::{Answer, Event, MigrationSession, Role, Step, Undo, VmPlace};
use migration::source::Moves;
use migration::vm::cold::{Form, Purpose};
use migration::wire::{Acceptance, OfferedVm};
use migration::{CommitFault, Failure, MigrationId, VolumeId};
use tokio::sync::oneshot;

use self::begin::held;
use crate::error::RequestError;
use crate::hooks::HookSide;
use crate::host::Departures;
use crate::migrations::departures::leave::{Departing, offer};
use crate::migrations::sessions::{PATIENCE, Task};
use crate::peers::host_id;
use crate::vms::Standing;
use crate::vms::moving::{MoveFault, OutgoingVm};
use crate::vms::orders::move_vm::{Company, memory_lost};
use crate::volumes::claims::Elsewhere;

/// Whether hooks run before volumes change hands.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hooks {
    None,
    /// At least one host has hooks, or may have them.
    Some,
}

pub(crate) struct OutgoingMigration {
    departures: Arc<Departures>,
    task: Task,
    /// The order; `None`: a restart resumes the migration from the journal.
    order: Option<Ordered>,
    /// How the VM moves, if there is one.
    form: Form,
    /// The VM that is leaving, registered for the code that pauses VMs.
    leaving: Option<Arc<OutgoingVm>>,
    /// The lanes of the volumes, the first volume's first; empty until they have their orders.
    lanes: Vec<(String, VolumeId, LaneHandle)>,
    /// Why the VM stays, if a restart resumes the migration of its volumes.
    stays: String,
    answer: Option<oneshot::Sender<Result<Migration, RequestError>>>,
}

/// An order, and how far it has been carried out.
pub(crate) struct Ordered {
    pub(crate) elsewhere: Elsewhere,
    pub(crate) session: transport::Session,
    pub(crate) order: MigrateVolume,
    pub(crate) volumes: Vec<Departing>,
    pub(crate) company: Option<Company>,
    pub(crate) hooks: Hooks,
    pub(crate) warnings: Vec<String>,
    pub(crate) acceptance: Option<Acceptance>,
    /// The VM's hypervisor, once it is leaving.
    qemu: Option<Arc<dyn Hypervisor>>,
}

impl Departures {
    /// Begins a migration that has passed its checks; returns when its volumes are accepted and being copied. After an error
    /// the volumes stay at this host, and nothing is left at the target.
    pub(crate) async fn begin_outgoing(
        self: &Arc<Self>,
        (elsewhere, session): (Elsewhere, transport::Session),
        order: MigrateVolume,
        volumes: Vec<Departing>,
        company: Option<Company>,
        (hooks, warnings): (Hooks, Vec<String>),
    ) -> Result<Migration, RequestError> {
        let (answer, answered) = oneshot::channel();
        let vm = company.as_ref().map(|company| company.name.clone());
        let form = company.as_ref().map(|company| company.travels.form()).unwrap_or_default();
        let machine = MigrationSession::new(Role::Source, vm.is_some(), PATIENCE).with_form(form);
        let ordered = Ordered {
            elsewhere,
            session,
            order,
            volumes,
            company,
            hooks,
            warnings,
            acceptance: None,
            qemu: None,
        };
        let (mut work, wishes) = OutgoingMigration::new(self, Some(ordered), vm, form);
        work.answer = Some(answer);
        tokio::spawn(self.runner.run_session(machine, work, wishes));
        answered.await.unwrap_or(Err(RequestError::ShuttingDown))
    }

    /// Resumes a migration that a restart interrupted; returns after the first attempt.
    pub(crate) async fn resume_outgoing(self: &Arc<Self>, migration: MigrationId, recorded: &MigrationState) {
        let is_copying = recorded.stage == Stage::Copying;
        let stays = || self.vm_orders.vm_at_home(&recorded.names).filter(|_| is_copying);
        let vm = self.vm_orders.vm_of_departure(&recorded.names).or_else(stays);
        let form = vm.as_deref().map(|vm| self.vm_orders.form_of_moving(vm)).unwrap_or_default();
        let machine = MigrationSession::resume(Role::Source, vm.is_some(), PATIENCE).with_form(form);
        let machine = machine.with_orders(recorded);
        let (mut work, wishes) = OutgoingMigration::new(self, None, vm, form);
        let is_tried = work.task.resumes(migration);
        tokio::spawn(self.runner.run_session(machine, work, wishes));
        // A dropped sender means the same.
        let _ = is_tried.await;
    }
}

impl Work for OutgoingMigration {
    fn migration(&self) -> Option<MigrationId> {
        self.task.migration
    }

    async fn record(&mut self) -> Result<(), CommitFault> {
        let Some(ordered) = &self.order else { return Ok(()) };
        let host = Arc::clone(&self.departures);
        let recorded = host.record_leaving(&ordered.volumes, &ordered.elsewhere, &ordered.order).await;
        let records = ordered.volumes.iter().map(|volume| &volume.record);
        if let Ok(migration) = recorded {
            let bytes = records.clone().map(|record| record.size_bytes).sum();
            host.runner.begin_history(migration, bytes, &ordered.order);
        }
        self.task.recorded(recorded, records.map(|record| record.volume).collect())
    }

    async fn perform(&mut self, step: Step) -> Result<(), Failure> {
        let done = match step {
            Step::Offer => self.offer().await,
            Step::LetVmLeave => self.let_vm_leave().await,
            Step::ExamineVm => self.examine_vm().await,
            Step::Begin => self.begin().await,
            Step::MakeRoom | Step::MakeImages | Step::Record => Ok(()),
        };
        self.task.done(done, FailureCode::HostRefused)
    }

    async fn undo(&mut self, undo: Undo) -> String {
        if let (Undo::Offer, Some(ordered), Some(migration)) = (undo, &self.order, self.task.migration) {
            self.departures.peers.give_up_offer(host_id(ordered.session.peer()), migration);
            // What the target has reserved is of no use. If this message is lost, the target asks and is answered.
            self.departures.peers.tell_target(&ordered.session, migration, ToTarget::Discard);
        }
        String::new()
    }

    async fn driver_ends(&mut self) -> Option<Outcome> {
        self.task.driver_ends(self.lanes.iter().map(|(_, _, lane)| lane.clone()).collect()).await
    }

    async fn cancel(&mut self) {
        if let (Some((_, _, lane)), Some(migration)) = (self.lanes.first(), self.task.migration) {
            // If it is too late, the requester learns that from the lane.
            let _ = lane.cancel(migration).await;
        }
    }

    /// Has the driver end the migration: the memory that the target had is lost with the daemon that received it.
    async fn keep_vm(&mut self) {
        let (Some(migration), Some(vm), Some((_, _, lane))) =
            (self.task.migration, &self.task.vm, self.lanes.first())
        else {
            return;
        };
        let reason = self.stays.clone();
        tracing::warn!(%migration, vm = %vm, reason, "a VM was moving when this daemon stopped; it stays here");
        // If it is too late, nothing is lost.
        let _ = lane.fail(migration, FailureCode::VmStayed, reason).await;
    }

    fn ends_without_driver(&mut self, outcome: &Outcome) {
        let Some(migration) = self.task.migration else { return };
        if self.task.error.is_none() {
            self.task.error = self.order.as_ref().map(|ordered| match outcome {
                Outcome::Failed { detail, .. } => RequestError::HostUnreachable {
                    host: ordered.elsewhere.peer.name.clone(),
                    reason: detail.clone(),
                },
                _ => RequestError::CancelledBeforehand(migration),
            });
        }
    }

    /// Forwards clients of volumes that have left, until the last of them has gone.
    async fn place_volumes(&mut self, outcome: Outcome) {
        if matches!(outcome, Outcome::Moved { .. }) {
            for (name, volume, lane) in self.lanes.iter().cloned() {
                tokio::spawn(Arc::clone(&self.departures).see_departure(name, volume, lane));
            }
        }
    }

    async fn note(&mut self, place: VmPlace) -> Result<(), String> {
        self.task.note(Standing::Leaving, place).await
    }

    fn answer(&mut self, answer: Answer) {
        if let Some(waiting) = self.answer.take() {
            // The requester may be gone.
            let _ = waiting.send(self.task.answer(answer));
        }
    }

    async fn conclude(&mut self, outcome: Outcome) {
        let Some(migration) = self.task.migration else { return };
        let host = &self.departures;
        let has_moved = matches!(outcome, Outcome::Moved { .. } | Outcome::TakenBack);
        if let (Some(vm), Some(leaving)) = (&self.task.vm, &self.leaving) {
            tracing::info!(vm = %vm, %migration, ?outcome, "the VM's migration has ended");
            if let (false, Some(reason)) = (has_moved, leaving.memory_lost()) {
                host.vms.lose(vm, Some(leaving.vm()), memory_lost(vm, &reason)).await;
            }
        }
        if self.order.is_some() && self.lanes.is_empty() {
            // Nothing was copied.
            host.histories.forget(migration);
        }
        self.task.conclude(&outcome);
    }
}

impl OutgoingMigration {
    fn new(
        host: &Arc<Departures>,
        order: Option<Ordered>,
        vm: Option<String>,
        form: Form,
    ) -> (Self, UnboundedReceiver<Event>) {
        let (task, wishes) = Task::new(&host.runner, vm);
        let (leaving, lanes, stays) = (None, Vec::new(), String::new());
        let departures = Arc::clone(host);
        let work = Self { departures, task, order, form, leaving, lanes, stays, answer: None };
        (work, wishes)
    }

    /// Returns what moves, and whether hooks run before the volumes change hands.
    fn moves(&self) -> Moves {
        match (&self.task.vm, self.order.as_ref().map(|ordered| ordered.hooks)) {
            (Some(_), _) if self.form == Form::Cold => Moves::VolumesAfterHooks,
            (Some(_), _) => Moves::Vm,
            (None, Some(Hooks::None)) => Moves::Volumes,
            (None, Some(Hooks::Some) | None) => Moves::VolumesAfterHooks,
        }
    }

    /// Offers the volumes to the target host.
    async fn offer(&mut self) -> Result<(), RequestError> {
        let (Some(ordered), Some(migration)) = (&mut self.order, self.task.migration) else { return Ok(()) };
        let (session, order) = (&ordered.session, &ordered.order);
        let vm = self.task.vm.as_ref().map(|name| OfferedVm { name: name.clone(), form: self.form });
        let records: Vec<_> = ordered.volumes.iter().map(|volume| volume.record.clone()).collect();
        let mut offer = offer(&records, &ordered.elsewhere.store, order, vm);
        self.departures.tell_origins(&mut offer);
        let acceptance = self.departures.peers.offer(session, migration, offer).await.map_err(|refusal| {
            RequestError::HostRefused { host: ordered.elsewhere.peer.name.clone(), refusal }
        })?;
        let peer = host_id(session.peer());
        if !order.full && acceptance.volumes.iter().any(|accepted| held(accepted, peer).is_some()) {
            self.departures.runner.note_held(migration, records).await;
        }
        ordered.acceptance = Some(acceptance);
        Ok(())
    }

    /// Keeps every other operation from starting, stopping or removing the VM, also after a restart of this daemon.
    async fn let_vm_leave(&mut self) -> Result<(), RequestError> {
        let (Some(ordered), Some(vm)) = (&mut self.order, &self.task.vm) else { return Ok(()) };
        match self.form {
            Form::Live => ordered.qemu = Some(self.departures.vms.leaving(vm).await?),
            Form::Cold => self.departures.vms.leaving_cold(vm).await?,
        }
        Ok(())
    }

    /// Asks the target host whether it can run the VM, before anything is copied.
    async fn examine_vm(&mut self) -> Result<(), RequestError> {
        let (Some(ordered), Some(vm), Some(migration)) =
            (&mut self.order, &self.task.vm, self.task.migration)
        else {
            return Ok(());
        };
        let (host, session) = (&ordered.elsewhere.peer.name, &ordered.session);
        let refused = |reason: MoveFault| RequestError::VmRefused {
            vm: vm.clone(),
            host: host.clone(),
            reason: reason.to_string(),
        };
        if self.form == Form::Cold {
            let asked = self.departures.vm_orders.ask_to_keep(session, migration, vm, Purpose::Copying);
            return asked.await.map_err(refused);
        }
        let (Some(qemu), Some(company)) = (ordered.qemu.take(), ordered.company.take()) else {
            return Ok(());
        };
        let hooks = self.departures.migration_hooks.hook_runner(migration, vm, HookSide::Source, host);
        let rate = ordered.order.bandwidth_bytes_per_second;
        let budget = self.departures.migrations.budgets.of(migration, rate);
        let wishes = company.travels.wishes(&*qemu, session, budget).await;
        let leaving = self.departures.vm_orders.leaving(migration, vm, qemu, wishes, session, hooks);
        leaving.check(company.manifest).await.map_err(refused)?;
        self.vm_leaves(migration, leaving);
        Ok(())
    }

    /// Registers the VM, so that it is paused when the lanes ask for it.
    fn vm_leaves(&mut self, migration: MigrationId, leaving: Arc<OutgoingVm>) {
        self.departures.moving.leaves(migration, Arc::clone(&leaving));
        self.leaving = Some(leaving);
    }

    async fn begin(&mut self) -> Result<(), RequestError> {
        let Some(migration) = self.task.migration else { return Ok(()) };
        self.task.hold_back_the_end();
        match self.order.is_some() && self.lanes.is_empty() {
            true => self.begin_anew(migration).await,
            false => self.begin_again(migration).await,
        }
    }
}
