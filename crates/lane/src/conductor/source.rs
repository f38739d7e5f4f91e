//! The source's half of a conductor: the copying of each volume, the gates, and the source's machine.
//!
//! ```text
//!   notices of the copyings ──►┐
//!   ends of flushes, commits ──┤ events, one at a time ──► Source ──► actions ──► tasks that send events back
//!   messages of the target ────┤
//!   cancel, bandwidth ─────────┘
//! ```
//! Everything that takes time is a task of its own; the loop itself only waits for the next event or deadline.

use std::cell::Cell;
use std::future::Future;
use std::rc::Rc;
use std::time::Duration;

use block::{BlockDevice, BufferPool, Handle};
use futures_channel::mpsc;
use futures_util::StreamExt;
use futures_util::future::{Either, select};
use migration::journal::{MigrationState, Outcome, Record};
use migration::message::{ToSource, ToTarget};
use migration::source::{Costs, SourceEvent, SourceSettings};
use migration::strategy::{Mirror, MirrorSettings, VolumeAction, VolumeEvent};
use migration::{CommitId, MigrationId, Phase, Source, VolumeIndex};
use tracing::{info, warn};

use super::{LeavingVolume, Post, SourcePlan};
use crate::control::Control;
use crate::copy::VolumeCopy;
use crate::volume::Volume;

/// Talks to a source's half that runs on the same thread.
#[derive(Clone)]
pub struct Baton {
    migration: MigrationId,
    phase: Rc<Cell<Phase>>,
    events: mpsc::UnboundedSender<Event>,
}

/// Runs the source's half of one migration.
pub struct SourceConductor {
    pub(super) handle: Handle,
    pub(super) control: Rc<dyn Control>,
    pub(super) plan: SourcePlan,
    pub(super) copies: Vec<Rc<VolumeCopy>>,
    /// The source's stores, for a hand-back.
    pub(super) sources: Vec<Rc<dyn BlockDevice>>,
    pub(super) source: Source,
    pub(super) to_target: Post<ToTarget>,
    pub(super) phase: Rc<Cell<Phase>>,
    sender: mpsc::UnboundedSender<Event>,
    events: mpsc::UnboundedReceiver<Event>,
    pub(super) report_at: Duration,
    /// What the copyings cost that are over.
    pub(super) costs: Costs,
    /// Set at the commit point.
    pub(super) is_released: bool,
    pub(super) ended: Option<Outcome>,
}

/// What the loop waits for.
#[derive(Clone)]
pub(crate) enum Event {
    Source(SourceEvent),
    /// From the copying of one volume.
    Noticed(VolumeIndex, VolumeAction),
    /// The target's store has lost what was not durable.
    TargetRestarted(VolumeIndex),
    /// All targets' stores have.
    PeerRestarted,
    SetBandwidth(Option<u64>),
    /// Something that concerns every volume's copying.
    Copying(VolumeEvent),
}

impl Baton {
    /// The migration that is conducted.
    pub fn migration(&self) -> MigrationId {
        self.migration
    }

    /// Where it stands.
    pub fn phase(&self) -> Phase {
        self.phase.get()
    }

    /// Ends the migration before its commit point; returns whether it is early enough for that.
    pub fn cancel(&self) -> bool {
        let early_enough = self.phase().can_be_cancelled();
        if early_enough {
            self.send(Event::Source(SourceEvent::Cancel));
        }
        early_enough
    }

    /// Changes the movers' rate limit.
    pub fn set_bandwidth(&self, bytes_per_second: Option<u64>) {
        self.send(Event::SetBandwidth(bytes_per_second));
    }

    /// Tells that a volume's target store has lost what was not durable there, and works again.
    ///
    /// To be called before anything that is submitted to it from then on has ended.
    pub fn target_restarted(&self, volume: VolumeIndex) {
        self.send(Event::TargetRestarted(volume));
    }

    /// Tells that the target's host cannot be reached: guests are no longer mirrored, and nothing fails by that.
    pub fn link_lost(&self) {
        self.send(Event::Copying(VolumeEvent::LinkLost));
    }

    /// Tells that the target's host can be reached again.
    ///
    /// **N.B.** Whatever was submitted to its stores before has to be answered from then on: as a success only if it
    /// was applied there, as a failure only if it never will be (design §5.7).
    pub fn link_back(&self) {
        self.send(Event::Copying(VolumeEvent::LinkBack));
    }

    /// Lets the migration rest: nothing is copied, and it is not handed over.
    pub fn pause(&self) {
        self.send(Event::Copying(VolumeEvent::Pause));
    }

    /// Goes on with a migration that rests.
    pub fn resume(&self) {
        self.send(Event::Copying(VolumeEvent::Resume));
    }

    /// Tells that the peer has restarted: what was not durable there is lost, for every volume.
    pub fn peer_restarted(&self) {
        self.send(Event::PeerRestarted);
    }

    /// Delivers what the target's half says.
    pub fn deliver(&self, message: ToSource) {
        self.send(Event::Source(SourceEvent::Received(message)));
    }

    fn send(&self, event: Event) {
        // A conductor that is gone needs no events.
        let _ = self.events.unbounded_send(event);
    }
}

impl SourceConductor {
    /// Makes a source's half, and puts the mirrors into the volumes' live stacks.
    pub fn new(
        handle: Handle,
        control: Rc<dyn Control>,
        buffers: &BufferPool,
        plan: SourcePlan,
        to_target: Post<ToTarget>,
    ) -> (Self, Baton) {
        let source = Source::new(handle.now(), settings(&plan));
        Self::with_machine(handle, control, buffers, plan, to_target, source)
    }

    /// Makes the source's half of a migration between hosts that a restart interrupted, which goes on where the journal
    /// says; `None`: nothing is left for it to do.
    pub fn resume(
        handle: Handle,
        control: Rc<dyn Control>,
        buffers: &BufferPool,
        plan: SourcePlan,
        to_target: Post<ToTarget>,
        recorded: &MigrationState,
    ) -> Option<(Self, Baton)> {
        let source = Source::resume(handle.now(), settings(&plan), recorded)?;
        Some(Self::with_machine(handle, control, buffers, plan, to_target, source))
    }

    fn with_machine(
        handle: Handle,
        control: Rc<dyn Control>,
        buffers: &BufferPool,
        plan: SourcePlan,
        to_target: Post<ToTarget>,
        source: Source,
    ) -> (Self, Baton) {
        let now = handle.now();
        let (sender, events) = mpsc::unbounded();
        let phase = Rc::new(Cell::new(source.phase()));
        let is_copying = phase.get() == Phase::Copying;
        let copies = VolumeIndex::all(plan.volumes.len())
            .zip(plan.volumes.iter().filter(|_| is_copying))
            .map(|(index, leaving)| start_copy(&handle, buffers, &plan, index, leaving, sender.clone()))
            .collect();
        let baton = Baton { migration: plan.migration, phase: Rc::clone(&phase), events: sender.clone() };
        let conductor = Self {
            control,
            copies,
            sources: plan.volumes.iter().map(|leaving| leaving.volume.store()).collect(),
            is_released: phase.get() >= Phase::Committing && phase.get() <= Phase::Retiring,
            source,
            to_target,
            phase,
            sender,
            events,
            report_at: now,
            costs: Costs::default(),
            ended: None,
            plan,
            handle,
        };
        (conductor, baton)
    }

    /// Runs the migration to its end.
    pub async fn run(mut self) -> Outcome {
        info!(migration = %self.plan.migration, "migration begins");
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

    /// Takes one event, or, if there was none in time, does what is due.
    fn step(&mut self, event: Option<Event>) {
        let now = self.handle.now();
        self.source.set_costs(self.costs());
        match event {
            Some(Event::Source(event)) => self.source.handle_event(now, event),
            Some(Event::Noticed(volume, action)) => self.noticed(now, volume, action),
            Some(Event::TargetRestarted(volume)) => self.target_restarted(volume),
            Some(Event::PeerRestarted) => {
                VolumeIndex::all(self.copies.len()).for_each(|volume| self.target_restarted(volume));
            }
            Some(Event::Copying(event)) => self.copies.iter().for_each(|copy| copy.event(event)),
            Some(Event::SetBandwidth(rate)) => self.copies.iter().for_each(|copy| copy.set_bandwidth(rate)),
            None => {
                self.source.handle_timeout(now);
                if now >= self.report_at {
                    self.report_progress(now);
                }
            }
        }
    }

    fn noticed(&mut self, now: Duration, volume: VolumeIndex, action: VolumeAction) {
        let migration = self.plan.migration;
        match action {
            VolumeAction::Synchronised => self.source.handle_event(now, SourceEvent::Synchronised(volume)),
            VolumeAction::NearEnough => self.source.handle_event(now, SourceEvent::NearEnough(volume)),
            VolumeAction::Behind => {
                self.source.handle_event(now, SourceEvent::Behind(volume));
                if let Some(copy) = self.copies.get(volume.as_usize()) {
                    copy.behind_was_heard();
                }
            }
            VolumeAction::Failed { code, detail } => {
                self.source.handle_event(now, SourceEvent::VolumeFailed { code, detail });
            }
            VolumeAction::Suspended { reason } => {
                warn!(%migration, volume = volume.0, reason, "mirroring is suspended");
            }
            VolumeAction::Resumed => info!(%migration, volume = volume.0, "mirroring goes on"),
            // The copying carries these out itself.
            VolumeAction::Admit { .. }
            | VolumeAction::Complete { .. }
            | VolumeAction::Copy { .. }
            | VolumeAction::FlushTarget { .. } => {}
        }
    }

    fn target_restarted(&self, volume: VolumeIndex) {
        // N.B. from the release on nothing may be copied any more, and nothing need be: the target's promise was
        // that all it has is durable.
        if self.phase.get() < Phase::Releasing
            && let Some(copy) = self.copies.get(volume.as_usize())
        {
            copy.event(VolumeEvent::TargetRestarted);
        }
    }

    fn next_deadline(&self) -> Duration {
        self.source.poll_timeout().map_or(self.report_at, |(at, _)| at.min(self.report_at))
    }
}

impl SourceConductor {
    pub(super) fn volume(&self, volume: VolumeIndex) -> &Rc<Volume> {
        &self.plan.volumes[volume.as_usize()].volume
    }

    pub(super) fn spawn(&self, task: impl Future<Output = SourceEvent> + 'static) {
        let sender = self.sender.clone();
        self.handle.spawn(async move {
            let event = Event::Source(task.await);
            // The conductor is gone only when the migration has ended.
            let _ = sender.unbounded_send(event);
        });
    }

    pub(super) fn commit(&self, records: Vec<Record>, commit: CommitId) {
        let committed = self.control.commit(records);
        self.spawn(async move { SourceEvent::Committed { commit, result: committed.await } });
    }
}

fn settings(plan: &SourcePlan) -> SourceSettings {
    let volumes = plan.volumes.iter().map(|leaving| &leaving.volume);
    SourceSettings {
        migration: plan.migration,
        volumes: volumes.map(|volume| (volume.id(), volume.generation())).collect(),
        switch_over_max: plan.limits.switch_over_max,
        peer: plan.peer,
        moves: plan.moves,
    }
}

fn start_copy(
    handle: &Handle,
    buffers: &BufferPool,
    plan: &SourcePlan,
    index: VolumeIndex,
    leaving: &LeavingVolume,
    notices: mpsc::UnboundedSender<Event>,
) -> Rc<VolumeCopy> {
    let source = leaving.volume.store();
    let settings = MirrorSettings {
        block_size: leaving.volume.block_size(),
        size_bytes: source.geometry().size,
        pacing: plan.pacing.clone(),
        wait_max: plan.limits.mirror_wait_max,
        no_progress_max: plan.limits.no_progress_max,
        acknowledgement: plan.acknowledgement,
    };
    let strategy = Mirror::new(settings);
    let replica = leaving.replica.clone();
    let copy = VolumeCopy::new(index, handle.clone(), source, replica, buffers.clone(), strategy, notices);
    let in_place = leaving.volume.insert_mirror(Rc::clone(&copy));
    let begins = Rc::clone(&copy);
    let (chronicler, known) = (Rc::clone(leaving.volume.chronicler()), leaving.replica.known);
    handle.spawn(async move {
        in_place.await;
        // Not before: what passed the mirror by is in the chronicle when it has ended.
        match known.and_then(|(of, generation)| chronicler.lacking(of, generation)) {
            Some(lacking) => begins.begin_with(&lacking),
            None => begins.begin().await,
        }
    });
    copy
}
