//! The source's half of a driver: the copying of each volume, the gates, and the source's machine.
//!
//! ```text
//!   notices of the copyings ──►┐                                     ┌──► orders to the volumes' parts
//!   ends of flushes, commits ──┤ events, one at a time ──► Source ──► actions ──► tasks that send events back
//!   messages of the target ────┤
//!   cancel, bandwidth ─────────┘
//! ```
//! Each operation that takes time is a task. The loop only waits for the next event or deadline.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::Rc;
use std::time::Duration;

use block::{BufferPool, Handle};
use futures_channel::mpsc;
use futures_util::StreamExt;
use futures_util::future::{Either, select};
use migration::journal::{FailureCode, ImageLocation, MigrationState, Outcome, Record};
use migration::message::{ToSource, ToTarget};
use migration::source::{SourceEvent, SourceSettings};
use migration::strategy::{VolumeAction, VolumeEvent};
use migration::{CommitId, MigrationId, Phase, Source, VolumeId, VolumeIndex, VolumeProgress};
use tracing::{info, warn};

use super::participant::SourceParticipant;
use super::source_volume::{SourceOrder, SourceVolume};
use super::{SendMessage, SourcePlan};
use crate::control::Control;
use crate::peer::PriorityBoost;

/// The interface to a source's half on the same thread.
#[derive(Clone)]
pub struct SourceHandle {
    migration: MigrationId,
    phase: Rc<Cell<Phase>>,
    events: mpsc::UnboundedSender<Event>,
    /// Why the link to the target's host was lost last.
    lost: Rc<RefCell<Option<String>>>,
}

/// Runs the source's half of one migration.
pub struct SourceDriver {
    pub(super) handle: Handle,
    pub(super) control: Rc<dyn Control>,
    pub(super) migration: MigrationId,
    pub(super) keep_source: bool,
    pub(super) participants: Vec<SourceParticipant>,
    pub(super) volumes: Vec<VolumeId>,
    pub(super) images: Vec<ImageLocation>,
    /// Volumes that have not yet confirmed the peer's restart: their notices are outdated.
    unaware: Vec<VolumeIndex>,
    pub(super) source: Source,
    pub(super) to_target: SendMessage<ToTarget>,
    pub(super) phase: Rc<Cell<Phase>>,
    pub(super) sender: mpsc::UnboundedSender<Event>,
    lost: Rc<RefCell<Option<String>>>,
    events: mpsc::UnboundedReceiver<Event>,
    pub(super) report_at: Duration,
    pub(super) is_released: bool,
    pub(super) fraction: Cell<f64>,
    pub(super) ended: Option<Outcome>,
}

#[derive(Clone)]
pub(crate) enum Event {
    Source(SourceEvent),
    Noticed(VolumeIndex, VolumeAction),
    /// The target's store has lost data that was not durable.
    TargetRestarted(VolumeIndex),
    /// All targets' stores have lost data that was not durable.
    PeerRestarted,
    /// A volume's copying has learned of that; its later notices are valid.
    RestartHeard(VolumeIndex),
    SetBandwidth(Option<u64>),
    SetImpact(Option<pacer::Impact>),
    Copying(VolumeEvent),
    /// The progress of a volume on another lane.
    Told(VolumeIndex, Box<VolumeProgress>),
    PartGone(VolumeIndex),
    ReportWanted,
}

impl SourceHandle {
    /// Returns the migration that is driven.
    pub fn migration(&self) -> MigrationId {
        self.migration
    }

    /// Returns the migration's present phase.
    pub fn phase(&self) -> Phase {
        self.phase.get()
    }

    /// Ends the migration before its commit point.
    ///
    /// **N.B.** Only once the journal has accepted the cancellation ([`migration::orders::cancel`]): from then on
    /// it accepts no release.
    pub fn cancel(&self) {
        self.send(Event::Source(SourceEvent::Cancel));
    }

    /// Ends the migration as failed, before its commit point; returns whether that was possible.
    pub fn fail(&self, code: FailureCode, detail: String) -> bool {
        let early_enough = self.phase().can_be_cancelled();
        if early_enough {
            self.send(Event::Source(SourceEvent::VolumeFailed { code, detail }));
        }
        early_enough
    }

    /// Changes the rate limit of the movers.
    pub fn set_bandwidth(&self, bytes_per_second: Option<u64>) {
        self.send(Event::SetBandwidth(bytes_per_second));
    }

    /// Changes what guests of the disks may lose; `None`: the movers do not give way.
    pub fn set_impact(&self, impact: Option<pacer::Impact>) {
        self.send(Event::SetImpact(impact));
    }

    /// Notes that a volume's target store has lost data that was not durable, and works again.
    ///
    /// Call this before any request that is submitted to it from then on has ended.
    pub fn target_restarted(&self, volume: VolumeIndex) {
        self.send(Event::TargetRestarted(volume));
    }

    /// Notes that the target's host cannot be reached: guest writes are not mirrored, and no request fails.
    pub fn link_lost(&self, reason: &str) {
        *self.lost.borrow_mut() = Some(reason.to_owned());
        self.send(Event::Copying(VolumeEvent::LinkLost));
    }

    /// Notes that the target's host can be reached again.
    ///
    /// **N.B.** Every earlier request to its stores has to be answered from then on: as a success only if it was applied, as a
    /// failure only if it never will be (design §5.7).
    pub fn link_back(&self) {
        self.send(Event::Copying(VolumeEvent::LinkBack));
    }

    /// Pauses the migration: copies nothing, and does not hand over.
    pub fn pause(&self) {
        self.send(Event::Copying(VolumeEvent::Pause));
    }

    /// Resumes a paused migration.
    pub fn resume(&self) {
        self.send(Event::Copying(VolumeEvent::Resume));
    }

    pub(crate) fn report(&self) {
        self.send(Event::ReportWanted);
    }

    /// Notes that the peer has restarted: data that was not durable there is lost, for every volume.
    pub fn peer_restarted(&self) {
        self.send(Event::PeerRestarted);
    }

    /// Delivers a message of the target's half.
    pub fn deliver(&self, message: ToSource) {
        self.send(Event::Source(SourceEvent::Received(message)));
    }

    fn send(&self, event: Event) {
        let _ = self.events.unbounded_send(event);
    }
}

impl SourceDriver {
    /// Makes a source's half, and puts the mirrors into the volumes' live stacks.
    pub fn new(
        handle: Handle,
        control: Rc<dyn Control>,
        buffers: &BufferPool,
        plan: SourcePlan,
        to_target: SendMessage<ToTarget>,
    ) -> (Self, SourceHandle) {
        let source = Source::new(handle.now(), settings(&plan));
        Self::with_vm(handle, control, buffers, plan, to_target, source)
    }

    /// Makes the source's half of a migration between hosts that a restart interrupted. Continues where the journal says; `None`
    /// if nothing is left to do.
    pub fn resume(
        handle: Handle,
        control: Rc<dyn Control>,
        buffers: &BufferPool,
        plan: SourcePlan,
        to_target: SendMessage<ToTarget>,
        recorded: &MigrationState,
    ) -> Option<(Self, SourceHandle)> {
        let source = Source::resume(handle.now(), settings(&plan), recorded)?;
        Some(Self::with_vm(handle, control, buffers, plan, to_target, source))
    }

    fn with_vm(
        handle: Handle,
        control: Rc<dyn Control>,
        buffers: &BufferPool,
        plan: SourcePlan,
        to_target: SendMessage<ToTarget>,
        source: Source,
    ) -> (Self, SourceHandle) {
        let now = handle.now();
        let SourcePlan { migration, volumes: leaving, group, keep_source, copying, .. } = plan;
        let (sender, events) = group.events;
        let phase = Rc::new(Cell::new(source.phase()));
        let copying = (phase.get() == Phase::Copying).then_some(&copying);
        let here = leaving.iter().map(|leaving| (leaving.volume.id(), leaving.source_image.clone()));
        let joined = group.joined.iter().map(|joined| (joined.volume, joined.image.clone()));
        let (volumes, images): (Vec<_>, Vec<_>) = here.chain(joined).unzip();
        let here = VolumeIndex::all(leaving.len()).zip(leaving).map(|(index, leaving)| {
            SourceParticipant::Here(SourceVolume::new(
                &handle,
                buffers,
                copying,
                index,
                leaving,
                sender.clone(),
            ))
        });
        let joined = group.joined.into_iter().map(|joined| SourceParticipant::joined(joined.orders));
        let participants = here.chain(joined).collect();
        let lost = Rc::default();
        let source_handle = SourceHandle {
            migration,
            phase: Rc::clone(&phase),
            events: sender.clone(),
            lost: Rc::clone(&lost),
        };
        let driver = Self {
            control,
            migration,
            keep_source,
            participants,
            volumes,
            images,
            unaware: Vec::new(),
            is_released: phase.get() >= Phase::Committing && phase.get() <= Phase::Retiring,
            fraction: Cell::default(),
            source,
            to_target,
            phase,
            sender,
            lost,
            events,
            report_at: now,
            ended: None,
            handle,
        };
        (driver, source_handle)
    }

    /// Runs the migration to its end; returns the outcome.
    pub async fn run(mut self) -> Outcome {
        info!(migration = %self.migration, "migration begins");
        loop {
            while let Some(action) = self.source.poll_action() {
                self.carry_out(action);
            }
            if let Some(outcome) = self.ended.take() {
                return outcome;
            }
            let deadline = self.next_deadline();
            let next = {
                let sleep = self.handle.sleep_until(deadline);
                match select(self.events.next(), sleep).await {
                    Either::Left((event, _)) => event,
                    Either::Right(_) => None,
                }
            };
            self.step(next);
        }
    }

    fn step(&mut self, event: Option<Event>) {
        let now = self.handle.now();
        self.source.set_costs(self.costs());
        match event {
            Some(Event::Source(event)) => self.source.handle_event(now, event),
            Some(Event::Noticed(volume, action)) => self.noticed(now, volume, action),
            Some(Event::TargetRestarted(volume)) => self.order_copy(volume, VolumeEvent::TargetRestarted),
            Some(Event::PeerRestarted) => self.peer_restarted(now),
            Some(Event::RestartHeard(volume)) => {
                if let Some(at) = self.unaware.iter().position(|unaware| *unaware == volume) {
                    self.unaware.swap_remove(at);
                }
            }
            Some(Event::Copying(event)) => self.order_all(SourceOrder::Copying(event)),
            Some(Event::SetBandwidth(rate)) => self.order_all(SourceOrder::SetBandwidth(rate)),
            Some(Event::SetImpact(impact)) => self.order_all(SourceOrder::SetImpact(impact)),
            Some(Event::Told(volume, progress)) => {
                if let Some(SourceParticipant::Elsewhere { told, .. }) =
                    self.participants.get_mut(volume.as_usize())
                {
                    *told = progress;
                }
            }
            Some(Event::PartGone(volume)) => {
                let detail = format!("the thread of volume {} has ended; see the log", self.name(volume));
                let code = FailureCode::Internal;
                self.source.handle_event(now, SourceEvent::VolumeFailed { code, detail });
            }
            Some(Event::ReportWanted) => self.report_progress(now),
            None => {
                self.source.handle_timeout(now);
                if now >= self.report_at {
                    self.report_progress(now);
                }
            }
        }
    }

    fn noticed(&mut self, now: Duration, volume: VolumeIndex, action: VolumeAction) {
        let migration = self.migration;
        self.share_link(volume, &action);
        match action {
            // The notice is about the replica before its host restarted.
            VolumeAction::Synchronised | VolumeAction::Converged if self.unaware.contains(&volume) => {}
            VolumeAction::Synchronised => self.source.handle_event(now, SourceEvent::Synchronised(volume)),
            VolumeAction::Converged => self.source.handle_event(now, SourceEvent::Converged(volume)),
            VolumeAction::Behind => {
                self.source.handle_event(now, SourceEvent::Behind(volume));
                self.order(volume, SourceOrder::BehindWasHeard);
            }
            VolumeAction::Failed { code, detail } => {
                let lost = self.lost.borrow_mut().take().filter(|_| code == FailureCode::TargetHung);
                let lost = lost.map(|reason| format!("; the last connection ended: {reason}"));
                let detail = detail + &lost.unwrap_or_default();
                self.source.handle_event(now, SourceEvent::VolumeFailed { code, detail });
            }
            VolumeAction::Suspended { reason } => {
                warn!(%migration, volume = volume.0, reason, "mirroring is suspended");
                self.source.handle_event(now, SourceEvent::Suspended { volume, reason });
            }
            VolumeAction::Resumed => info!(%migration, volume = volume.0, "mirroring continues"),
            VolumeAction::Told { .. } if self.unaware.contains(&volume) => {}
            VolumeAction::Told { manifest } => {
                self.source.handle_event(now, SourceEvent::Told { volume, manifest });
            }
            // The copying carries these out itself.
            VolumeAction::Admit { .. }
            | VolumeAction::Complete { .. }
            | VolumeAction::Copy { .. }
            | VolumeAction::TellMissing { .. }
            | VolumeAction::FlushTarget { .. } => {}
        }
    }

    /// Gives disks the link before a VM's memory when they fall behind: blocks missing at the VM's stop are downtime.
    fn share_link(&self, volume: VolumeIndex, action: &VolumeAction) {
        let boost = match action {
            VolumeAction::Behind => PriorityBoost::AboveMemory,
            VolumeAction::Converged | VolumeAction::Synchronised => PriorityBoost::Off,
            _ => return,
        };
        if self.phase.get() == Phase::Memory {
            self.order(volume, SourceOrder::ShareLink(boost));
        }
    }

    /// Handles a restart of the target's daemon. The replica of a volume counts as behind until the volume's copying has learned
    /// of the restart and reports again.
    fn peer_restarted(&mut self, now: Duration) {
        for volume in VolumeIndex::all(self.participants.len()) {
            self.source.handle_event(now, SourceEvent::Behind(volume));
            self.unaware.push(volume);
            self.order(volume, SourceOrder::PeerRestarted);
        }
    }

    fn next_deadline(&self) -> Duration {
        self.source.poll_timeout().map_or(self.report_at, |(at, _)| at.min(self.report_at))
    }
}

impl SourceDriver {
    pub(super) fn order(&self, volume: VolumeIndex, order: SourceOrder) {
        if let Some(participant) = self.participants.get(volume.as_usize()) {
            participant.order(order);
        }
    }

    pub(super) fn order_copy(&self, volume: VolumeIndex, event: VolumeEvent) {
        self.order(volume, SourceOrder::Copying(event));
    }

    pub(super) fn order_all(&self, order: SourceOrder) {
        self.participants.iter().for_each(|participant| participant.order(order));
    }

    fn name(&self, volume: VolumeIndex) -> String {
        self.volumes.get(volume.as_usize()).map(VolumeId::to_string).unwrap_or_default()
    }

    pub(super) fn spawn(&self, task: impl Future<Output = SourceEvent> + 'static) {
        let sender = self.sender.clone();
        self.handle.spawn(async move {
            let event = Event::Source(task.await);
            let _ = sender.unbounded_send(event);
        });
    }

    pub(super) fn commit(&self, records: Vec<Record>, commit: CommitId) {
        let committed = self.control.commit(records);
        self.spawn(async move { SourceEvent::Committed { commit, result: committed.await } });
    }
}

fn settings(plan: &SourcePlan) -> SourceSettings {
    let here = plan.volumes.iter().map(|leaving| (leaving.volume.id(), leaving.volume.generation()));
    let joined = plan.group.joined.iter().map(|joined| (joined.volume, joined.generation));
    SourceSettings {
        migration: plan.migration,
        volumes: here.chain(joined).collect(),
        switch_over_max: plan.switch_over_max,
        peer: plan.peer,
        moves: plan.moves,
    }
}
