//! The target's side of a migration from another host: carries out the actions of its [session](migration::session).
//!
//! ```text
//!   MakeRoom    names, places and limits (arrive.rs)
//!   Record      started, durably, under a number of its own
//!   MakeImages  or reuses those that an earlier residency has left
//!   Begin       lanes wait with closed gates (await_arrival.rs), and so does what receives the VM, or runs hooks
//! ```

use std::sync::Arc;

use ::host::Work;
use chronicle::StayId;
use futures_channel::mpsc::UnboundedReceiver;
use migration::custody::Owner;
use migration::journal::{FailureCode, ImageLocation, MigrationState, Outcome, Side};
use migration::session::{Answer, Event, MigrationSession, Role, Step, Undo, VmPlace};
use migration::shares::{Amount, brought};
use migration::source::Moves;
use migration::vm::cold::Form;
use migration::wire::{AcceptedVolume, Offer, OfferedStrategy};
use migration::{CommitFault, Failure, HostId, MigrationId};
use tokio::sync::oneshot;

use crate::custody::Custody;
use crate::error::RequestError;
use crate::host::Arrivals;
use crate::migrations::arrivals::arrive::{Arriving, Expected, forget_room};
use crate::migrations::arrivals::await_arrival::{Arrival, Awaited};
use crate::migrations::arrivals::taking_back::SetAside;
use crate::migrations::sessions::{PATIENCE, Task};
use crate::migrations::shares::Part;
use crate::peers::host_id;
use crate::vms::Standing;

pub(crate) struct IncomingMigration {
    arrivals: Arc<Arrivals>,
    task: Task,
    /// How the VM moves, if there is one.
    form: Form,
    peer: HostId,
    remote: MigrationId,
    /// The offer, and its session; `None`: a restart resumes the migration from the journal.
    offered: Option<(transport::Session, Offer)>,
    /// The migration by which the volumes left, if they reuse the images that they left …
    takes_back: Option<MigrationId>,
    /// … and its driver, which is set aside until the new migration is durable.
    set_aside: Option<SetAside>,
    expected: Vec<Expected>,
    /// Volumes whose images exist, and what the source is sent about them.
    arriving: Vec<Arriving>,
    accepted: Vec<AcceptedVolume>,
    awaited: Vec<Awaited>,
    answer: Option<oneshot::Sender<Result<Vec<AcceptedVolume>, RequestError>>>,
    /// The part of the peer's share that the migration uses until it has ended here.
    part: Option<Part>,
}

impl Arrivals {
    /// Accepts an offered migration, and returns when lanes wait for its volumes. After an error nothing is left here.
    pub(crate) async fn begin_incoming(
        self: &Arc<Self>,
        session: &transport::Session,
        remote: MigrationId,
        offer: Offer,
    ) -> Result<Vec<AcceptedVolume>, RequestError> {
        let (answer, answered) = oneshot::channel();
        let form = offer.vm.as_ref().map(|vm| vm.form).unwrap_or_default();
        let vm = offer.vm.as_ref().map(|vm| vm.name.clone());
        let machine = MigrationSession::new(Role::Target, vm.is_some(), PATIENCE).with_form(form);
        let (mut work, wishes) = IncomingMigration::new(self, (host_id(session.peer()), remote), vm, form);
        work.offered = Some((session.clone(), offer));
        work.answer = Some(answer);
        tokio::spawn(self.runner.run_session(machine, work, wishes));
        answered.await.unwrap_or(Err(RequestError::ShuttingDown))
    }

    /// Resumes a migration that a restart interrupted; returns after the first attempt.
    pub(crate) async fn resume_incoming(self: &Arc<Self>, migration: MigrationId, recorded: &MigrationState) {
        let Side::Incoming { peer, remote, .. } = recorded.side else { return };
        let vm = self.vm_orders.vm_of_arrival(&recorded.names);
        let form = vm.as_deref().map(|vm| self.vm_orders.form_of_moving(vm)).unwrap_or_default();
        let machine = MigrationSession::resume(Role::Target, vm.is_some(), PATIENCE).with_form(form);
        let machine = machine.with_orders(recorded);
        let (mut work, wishes) = IncomingMigration::new(self, (peer, remote), vm, form);
        let is_tried = work.task.resumes(migration);
        work.part = Some(self.shares.resume(peer, amount_of(recorded)));
        tokio::spawn(self.runner.run_session(machine, work, wishes));
        // A dropped sender means the same.
        let _ = is_tried.await;
    }
}

impl Work for IncomingMigration {
    fn migration(&self) -> Option<MigrationId> {
        self.task.migration
    }

    async fn record(&mut self) -> Result<(), CommitFault> {
        let recorded = self.arrivals.record_arrival(self.peer, self.remote, &self.expected).await;
        drop(self.set_aside.take());
        let volumes = self.expected.iter().map(|volume| volume.record.volume).collect();
        self.task.recorded(recorded, volumes)
    }

    async fn perform(&mut self, step: Step) -> Result<(), Failure> {
        let done = match step {
            Step::MakeRoom => self.make_room().await,
            Step::MakeImages => self.make_images().await,
            Step::Begin => self.begin().await,
            Step::Record | Step::Offer | Step::LetVmLeave | Step::ExamineVm => Ok(()),
        };
        self.task.done(done, FailureCode::TargetFaulty)
    }

    /// Releases what was reserved for volumes that do not come. Returns a message about files that could not be deleted.
    async fn undo(&mut self, undo: Undo) -> String {
        self.arriving.clear();
        match undo {
            Undo::Room => {
                forget_room(&self.arrivals.custody, &self.expected);
                String::new()
            }
            Undo::Images => {
                let Some(migration) = self.task.migration else { return String::new() };
                let recorded = self.arrivals.journal.read(|state| state.migrations.get(&migration).cloned());
                let journal = &self.arrivals.journal;
                let targets =
                    recorded.into_iter().flat_map(|known| known.volumes).map(|moving| moving.target);
                let is_read =
                    |target: &ImageLocation| journal.read(|state| state.is_reservoir(target.place.name()));
                let targets = targets.filter(|target| !is_read(target)).collect();
                discard(&self.arrivals.custody, migration, targets).await
            }
            Undo::Offer => String::new(),
        }
    }

    async fn driver_ends(&mut self) -> Option<Outcome> {
        self.task.driver_ends(self.awaited.iter().map(|volume| volume.lane.clone()).collect()).await
    }

    async fn cancel(&mut self) {
        if let (Some(awaited), Some(migration)) = (self.awaited.first(), self.task.migration) {
            // If it is too late, the requester learns that from the lane.
            let _ = awaited.lane.cancel(migration).await;
        }
    }

    async fn let_go(&mut self) {
        let awaited = std::mem::take(&mut self.awaited);
        self.arrivals.let_go_of(awaited).await;
    }

    async fn place_volumes(&mut self, outcome: Outcome) {
        let Some(migration) = self.task.migration else { return };
        for awaited in std::mem::take(&mut self.awaited) {
            self.arrivals.place_arrival(migration, awaited, &outcome).await;
        }
        self.expected.clear();
        if let Some(left_by) = self.takes_back {
            self.arrivals.look_again(left_by);
        }
    }

    async fn note(&mut self, place: VmPlace) -> Result<(), String> {
        self.task.note(Standing::Arriving, place).await
    }

    fn answer(&mut self, answer: Answer) {
        let Some(waiting) = self.answer.take() else { return };
        let answer = match (answer, self.task.error.take()) {
            (Answer::Refused, error) => {
                Err(error.unwrap_or_else(|| RequestError::Internal("it failed".to_owned())))
            }
            (Answer::Begun, _) => Ok(std::mem::take(&mut self.accepted)),
        };
        // The remote host that offered may be gone.
        let _ = waiting.send(answer);
    }

    async fn conclude(&mut self, outcome: Outcome) {
        self.task.conclude(&outcome);
    }
}

impl IncomingMigration {
    fn new(
        host: &Arc<Arrivals>,
        (peer, remote): (HostId, MigrationId),
        vm: Option<String>,
        form: Form,
    ) -> (Self, UnboundedReceiver<Event>) {
        let (task, wishes) = Task::new(&host.runner, vm);
        let work = Self {
            arrivals: Arc::clone(host),
            task,
            form,
            peer,
            remote,
            offered: None,
            takes_back: None,
            set_aside: None,
            expected: Vec::new(),
            arriving: Vec::new(),
            accepted: Vec::new(),
            awaited: Vec::new(),
            answer: None,
            part: None,
        };
        (work, wishes)
    }

    async fn make_room(&mut self) -> Result<(), RequestError> {
        if let Some((_, offer)) = &self.offered {
            // N.B. before any check: from here on the room that is found free is reserved for this offer.
            self.part = Some(self.arrivals.take_part(self.peer, offer)?);
            (self.expected, self.set_aside) = self.arrivals.make_room_for(self.peer, offer).await?;
        }
        Ok(())
    }

    async fn make_images(&mut self) -> Result<(), RequestError> {
        let Some((_, offer)) = &self.offered else { return Ok(()) };
        let expected = std::mem::take(&mut self.expected);
        (self.accepted, self.arriving) = self.arrivals.make_images(expected, offer.sharing).await?;
        Ok(())
    }

    async fn begin(&mut self) -> Result<(), RequestError> {
        let Some(migration) = self.task.migration else { return Ok(()) };
        self.takes_back = self.arrivals.journal.read(|state| state.takes_back(migration));
        self.task.hold_back_the_end();
        let arriving = std::mem::take(&mut self.arriving);
        if let (Some((session, _)), false) = (self.offered.clone(), arriving.is_empty()) {
            return self.let_come(&session, migration, arriving, None).await;
        }
        let begun = self.begin_again(migration).await;
        begun.inspect_err(|error| self.task.say(error))
    }

    /// Resumes the migration after a restart, or after a lane has ended.
    async fn begin_again(&mut self, migration: MigrationId) -> Result<(), RequestError> {
        let recorded = self.arrivals.journal.read(|state| state.migrations.get(&migration).cloned());
        let Some(recorded) = recorded else { return Ok(()) };
        let session = self.arrivals.hosts.session_with(self.peer)?;
        self.arrivals.migrations.track_again(migration, recorded.volumes.iter().map(|moving| moving.volume));
        let arriving = self.arrivals.reopen_arrivals(&recorded).await?;
        self.let_come(&session, migration, arriving, Some(recorded)).await
    }

    async fn let_come(
        &mut self,
        session: &transport::Session,
        migration: MigrationId,
        arriving: Vec<Arriving>,
        recorded: Option<MigrationState>,
    ) -> Result<(), RequestError> {
        let host = Arc::clone(&self.arrivals);
        let names = arriving.iter().map(|volume| volume.record.name.clone()).collect();
        let mut awaited = host.await_volumes(StayId::Arrived(migration.0), arriving).await?;
        let numbers = (migration, self.remote);
        match &self.task.vm {
            Some(vm) if self.form == Form::Cold => host.vm_orders.expect_cold_vm(session, numbers, vm, names),
            Some(vm) => {
                let expected = host.vm_orders.expected(vm, recorded.as_ref().map(|known| &known.stage)).await;
                host.vm_orders.expect_vm(session, numbers, vm, names, expected);
            }
            None => {
                host.migration_hooks.prepare_hooks_in(migration, self.remote, session);
            }
        }
        let moves = match &self.task.vm {
            Some(_) if self.form == Form::Live => Moves::Vm,
            _ => Moves::Volumes,
        };
        // A restart does not know the strategy.
        let leaves_blocks =
            self.offered.as_ref().is_none_or(|(_, offer)| offer.strategy == OfferedStrategy::PostCopy);
        let may_lack = leaves_blocks && self.takes_back.is_none();
        let recorded = recorded.map(Box::new);
        let arrival = Arrival { migration, remote: self.remote, recorded, moves, may_lack };
        if let Err(error) = host.let_come(session, &arrival, &mut awaited).await {
            host.stop_waiting(awaited).await;
            return Err(error);
        }
        self.awaited = awaited;
        Ok(())
    }
}

impl Arrivals {
    /// Takes what an offer needs from its host's share, or fails with [`RequestError::ShareUsedUp`].
    fn take_part(&self, peer: HostId, offer: &Offer) -> Result<Part, RequestError> {
        let here = self.journal.read(|state| brought(state, peer));
        let bytes = offer.volumes.iter().fold(0u64, |sum, offered| sum.saturating_add(offered.size_bytes));
        let amount = Amount { volumes: u32::try_from(offer.volumes.len()).unwrap_or(u32::MAX), bytes };
        self.shares.take(peer, amount, here).map_err(RequestError::ShareUsedUp)
    }
}

/// Returns what a recorded arrival uses of its host's share.
fn amount_of(recorded: &MigrationState) -> Amount {
    let Side::Incoming { volumes, .. } = &recorded.side else { return Amount::default() };
    let bytes = volumes.iter().fold(0u64, |sum, record| sum.saturating_add(record.size_bytes));
    Amount { volumes: u32::try_from(volumes.len()).unwrap_or(u32::MAX), bytes }
}

/// Deletes images for which *prepared* was not sent. Returns a message about those that could not be deleted.
async fn discard(custody: &Custody, migration: MigrationId, targets: Vec<ImageLocation>) -> String {
    let (custody, owner) = (custody.clone(), Owner::Migration(migration));
    let discarded = tokio::task::spawn_blocking(move || {
        let faults = targets.iter().filter_map(|target| custody.discard(target, &owner).err());
        faults.map(|fault| fault.to_string()).collect::<Vec<_>>().join("; ")
    });
    discarded.await.unwrap_or_default()
}
