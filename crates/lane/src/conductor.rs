//! Conducts one migration: the source's and the target's machine side by side, and all that they ask for.
//!
//! ```text
//!   notices of the copyings ──►┐
//!   ends of flushes, commits ──┤ events, one at a time ──► Source, Target ──► actions ──► tasks that send events back
//!   messages between the two ──┤
//!   cancel, bandwidth ────────►┘
//! ```
//! Everything that takes time is a task of its own; the loop itself only waits for the next event or deadline. It is
//! written for N volumes; they are on this lane.

mod plan;
mod progress;
mod source_side;
mod target_side;

use std::cell::Cell;
use std::future::Future;
use std::rc::Rc;
use std::time::Duration;

use block::{BlockDevice, BufferPool, Handle};
use futures_channel::mpsc;
use futures_util::StreamExt;
use futures_util::future::{Either, select};
use migration::journal::{Outcome, Record};
use migration::message::{ToSource, ToTarget};
use migration::source::{Costs, SourceEvent, SourceSettings};
use migration::strategy::{Mirror, MirrorSettings, VolumeAction, VolumeEvent};
use migration::target::{FlushResult, TargetEvent};
use migration::{CommitId, MigrationId, Phase, Source, Target, VolumeIndex};
use tracing::{info, warn};

use crate::control::{Control, ControlFault, LaneFuture};
use crate::copy::{CopyTarget, VolumeCopy};
use crate::volume::Volume;

pub use plan::{Plan, PlannedVolume, TargetContent, TimeLimits};

/// Talks to a conductor that runs on the same thread.
#[derive(Clone)]
pub struct Baton {
    migration: MigrationId,
    phase: Rc<Cell<Phase>>,
    events: mpsc::UnboundedSender<Event>,
}

/// Runs one migration.
pub struct Conductor {
    handle: Handle,
    control: Rc<dyn Control>,
    buffers: BufferPool,
    plan: Plan,
    copies: Vec<Rc<VolumeCopy>>,
    /// The source's stores, for a hand-back.
    sources: Vec<Rc<dyn BlockDevice>>,
    source: Source,
    target: Target,
    phase: Rc<Cell<Phase>>,
    sender: mpsc::UnboundedSender<Event>,
    events: mpsc::UnboundedReceiver<Event>,
    report_at: Duration,
    /// What the copyings cost that are over.
    costs: Costs,
    /// Set at the commit point.
    is_released: bool,
    ended: Option<Outcome>,
}

/// What the loop waits for.
#[derive(Clone)]
pub(crate) enum Event {
    Source(SourceEvent),
    Target(TargetEvent),
    /// From the copying of one volume.
    Noticed(VolumeIndex, VolumeAction),
    /// The target's store has lost what was not durable.
    TargetRestarted(VolumeIndex),
    SetBandwidth(Option<u64>),
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

    fn send(&self, event: Event) {
        // A conductor that is gone needs no events.
        let _ = self.events.unbounded_send(event);
    }
}

impl Conductor {
    /// Makes a conductor, and puts the mirrors into the volumes' live stacks.
    pub fn new(handle: Handle, control: Rc<dyn Control>, buffers: BufferPool, plan: Plan) -> (Self, Baton) {
        let now = handle.now();
        let (sender, events) = mpsc::unbounded();
        let settings = SourceSettings {
            migration: plan.migration,
            volumes: plan
                .volumes
                .iter()
                .map(|planned| (planned.volume.id(), planned.volume.generation()))
                .collect(),
            switch_over_max: plan.limits.switch_over_max,
        };
        let phase = Rc::new(Cell::new(Phase::Copying));
        let copies = VolumeIndex::all(plan.volumes.len())
            .zip(&plan.volumes)
            .map(|(index, planned)| start_copy(&handle, &buffers, &plan, index, planned, sender.clone()))
            .collect();
        let baton = Baton { migration: plan.migration, phase: Rc::clone(&phase), events: sender.clone() };
        let conductor = Self {
            control,
            buffers,
            copies,
            sources: plan.volumes.iter().map(|planned| planned.volume.store()).collect(),
            source: Source::new(now, settings),
            target: Target::new(plan.migration, plan.volumes.len()),
            phase,
            sender,
            events,
            report_at: now,
            costs: Costs::default(),
            is_released: false,
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
            self.carry_out_all();
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
            Some(Event::Target(event)) => self.target.handle_event(now, event),
            Some(Event::Noticed(volume, action)) => self.noticed(now, volume, action),
            Some(Event::TargetRestarted(volume)) => self.target_restarted(volume),
            Some(Event::SetBandwidth(rate)) => self.copies.iter().for_each(|copy| copy.set_bandwidth(rate)),
            None => {
                self.source.handle_timeout(now);
                self.target.handle_timeout(now);
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
            VolumeAction::Behind => self.source.handle_event(now, SourceEvent::Behind(volume)),
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

    fn carry_out_all(&mut self) {
        loop {
            if let Some(action) = self.source.poll_action() {
                self.carry_out_source(action);
            } else if let Some(action) = self.target.poll_action() {
                self.carry_out_target(action);
            } else {
                return;
            }
        }
    }

    fn next_deadline(&self) -> Duration {
        let machines = [self.source.poll_timeout(), self.target.poll_timeout()];
        machines.into_iter().flatten().map(|(at, _)| at).fold(self.report_at, Duration::min)
    }
}

impl Conductor {
    fn planned(&self, volume: VolumeIndex) -> &PlannedVolume {
        &self.plan.volumes[volume.as_usize()]
    }

    fn volume(&self, volume: VolumeIndex) -> &Rc<Volume> {
        &self.planned(volume).volume
    }

    fn spawn(&self, task: impl Future<Output = Event> + 'static) {
        let sender = self.sender.clone();
        self.handle.spawn(async move {
            let event = task.await;
            // The conductor is gone only when the migration has ended.
            let _ = sender.unbounded_send(event);
        });
    }

    fn commit(
        &self,
        records: Vec<Record>,
        commit: CommitId,
        answer: impl FnOnce(CommitId, Result<(), migration::CommitFault>) -> Event + 'static,
    ) {
        let committed = self.control.commit(records);
        self.spawn(async move { answer(commit, committed.await) });
    }

    fn send_to_target(&self, message: ToTarget) {
        self.deliver(Event::Target(TargetEvent::Received(message)));
    }

    fn send_to_source(&self, message: ToSource) {
        self.deliver(Event::Source(SourceEvent::Received(message)));
    }

    fn deliver(&self, event: Event) {
        match self.control.carry() {
            None => {
                // The receiver is this conductor.
                let _ = self.sender.unbounded_send(event);
            }
            Some(journeys) => {
                for journey in journeys {
                    let event = event.clone();
                    self.spawn(async move {
                        journey.await;
                        event
                    });
                }
            }
        }
    }
}

fn start_copy(
    handle: &Handle,
    buffers: &BufferPool,
    plan: &Plan,
    index: VolumeIndex,
    planned: &PlannedVolume,
    notices: mpsc::UnboundedSender<Event>,
) -> Rc<VolumeCopy> {
    let source = planned.volume.store();
    let settings = MirrorSettings {
        block_size: planned.volume.block_size(),
        size_bytes: source.geometry().size,
        pacing: plan.pacing.clone(),
        wait_max: plan.limits.mirror_wait_max,
        no_progress_max: plan.limits.no_progress_max,
    };
    let strategy = Mirror::new(settings);
    let target = CopyTarget {
        device: Rc::clone(&planned.target),
        content: planned.target_content,
        zeroes: planned.zeroes,
    };
    let copy = VolumeCopy::new(index, handle.clone(), source, target, buffers.clone(), strategy, notices);
    let in_place = planned.volume.insert_mirror(Rc::clone(&copy));
    let begins = Rc::clone(&copy);
    handle.spawn(async move {
        in_place.await;
        begins.begin().await;
    });
    copy
}

async fn flush(store: &Rc<dyn BlockDevice>) -> FlushResult {
    match store.flush().await {
        Ok(()) => FlushResult::Durable,
        Err(error) => {
            warn!(%error, "a flush failed");
            FlushResult::Failed
        }
    }
}

/// Waits for all of `work`, and says what could not be done.
async fn left_over(work: Vec<LaneFuture<Result<(), ControlFault>>>) -> String {
    let mut faults = Vec::new();
    for done in work {
        if let Err(fault) = done.await {
            warn!(%fault, "an image is left over");
            faults.push(fault.to_string());
        }
    }
    faults.join("; ")
}
