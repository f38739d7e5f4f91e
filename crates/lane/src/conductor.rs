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

use std::cell::Cell;
use std::future::Future;
use std::rc::Rc;
use std::time::Duration;

use block::{BlockDevice, BufferPool, Handle};
use chronicle::Generation;
use futures_channel::mpsc;
use futures_util::StreamExt;
use futures_util::future::{Either, select};
use migration::journal::{ImageLocation, Outcome, Record};
use migration::message::{ToSource, ToTarget};
use migration::recovery::Retirement;
use migration::source::{Costs, SourceAction, SourceEvent, SourceSettings};
use migration::strategy::{Mirror, MirrorSettings, VolumeAction, VolumeEvent};
use migration::target::{FlushResult, TargetAction, TargetEvent};
use migration::{
    CommitId, MigrationId, PacingSettings, Phase, Progress, Source, Target, VolumeId, VolumeIndex, Waiting,
};
use tracing::{error, info, warn};

use crate::REPORT_INTERVAL;
use crate::control::{Control, ControlFault, LaneFuture, Report};
use crate::copy::VolumeCopy;
use crate::volume::Volume;

/// Bytes read from the target's store to see whether it answers, before writes are let through.
const TRIAL_BYTES: u64 = 4096;

/// What is to be migrated, and within which limits.
pub struct Plan {
    /// Identity of the migration; already in the journal as started.
    pub migration: MigrationId,
    /// The volumes; all move, or none.
    pub volumes: Vec<PlannedVolume>,
    /// Whether the source images are kept.
    pub keep_source: bool,
    /// How much is copied at once, for each volume.
    pub pacing: PacingSettings,
    /// Time limits.
    pub limits: TimeLimits,
}

/// One volume of a plan.
pub struct PlannedVolume {
    /// The volume.
    pub volume: Rc<Volume>,
    /// The store it goes to: as large as the volume, and reading as zeroes.
    pub target: Rc<dyn BlockDevice>,
    /// Where its bytes are now.
    pub source_image: ImageLocation,
    /// Where they will be.
    pub target_image: ImageLocation,
}

/// How long things may take.
#[derive(Clone, Copy, Debug)]
pub struct TimeLimits {
    /// How long a guest's write may be held, or wait for the target (design §5.7).
    pub mirror_wait_max: Duration,
    /// How long the gates may be closed before the commit point.
    pub switch_over_max: Duration,
    /// How long a target may leave a request unanswered before the migration fails.
    pub no_progress_max: Duration,
}

impl Default for TimeLimits {
    fn default() -> Self {
        Self {
            mirror_wait_max: Duration::from_secs(1),
            switch_over_max: Duration::from_millis(500),
            no_progress_max: Duration::from_secs(300),
        }
    }
}

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

// What the source's machine asks for.
impl Conductor {
    fn carry_out_source(&mut self, action: SourceAction) {
        match action {
            SourceAction::Enter(phase) => self.enter(phase),
            SourceAction::CloseGate { volume, attempt } => {
                let closed = self.volume(volume).close();
                self.spawn(async move {
                    closed.await;
                    Event::Source(SourceEvent::GateClosed { volume, attempt })
                });
            }
            SourceAction::OpenGate(volume) => self.volume(volume).open(),
            SourceAction::Flush { volume, attempt } => {
                let store = self.volume(volume).store();
                self.spawn(async move {
                    let result = flush(&store).await;
                    Event::Source(SourceEvent::Flushed { volume, attempt, result })
                });
            }
            SourceAction::Commit { commit, records } => self.commit(records, commit, |commit, result| {
                Event::Source(SourceEvent::Committed { commit, result })
            }),
            SourceAction::Send(message) => self.send_to_target(message),
            SourceAction::StopCopying => {
                self.copies.iter().for_each(|copy| copy.stop());
                self.plan.volumes.iter().for_each(|planned| planned.volume.remove_mirror());
            }
            SourceAction::TakeBack(generations) => self.take_back(&generations),
            SourceAction::Retire => self.retire(),
            SourceAction::End { outcome, summary } => {
                let migration = self.plan.migration;
                self.report_progress(self.handle.now());
                self.control.report(Report::Ended { migration, outcome: outcome.clone(), summary });
                self.ended = Some(outcome);
            }
        }
    }

    fn enter(&mut self, phase: Phase) {
        let before = self.phase.replace(phase);
        self.is_released |= phase == Phase::Committing;
        let migration = self.plan.migration;
        if before != phase && !before.may_become(phase) {
            error!(%migration, %before, %phase, "a transition that is not in the table");
        }
        info!(%migration, %phase, attempt = self.source.attempt().0, "phase");
        self.control.entered(migration, phase);
        // The gates are closed in these: a report would only make that longer.
        if !matches!(phase, Phase::Closing | Phase::Preparing | Phase::Releasing | Phase::Committing) {
            self.report_progress(self.handle.now());
        }
    }

    fn take_back(&self, generations: &[(VolumeId, Generation)]) {
        for (planned, source) in self.plan.volumes.iter().zip(&self.sources) {
            let volume = &planned.volume;
            let generation = generations.iter().find(|(id, _)| *id == volume.id());
            let generation = generation.map_or(volume.generation(), |(_, generation)| *generation);
            volume.change_hands(Rc::clone(source), generation);
            volume.open();
        }
    }

    fn retire(&mut self) {
        self.costs = self.costs();
        self.copies.clear();
        self.sources.clear();
        let keep = self.plan.keep_source;
        let images = self.plan.volumes.iter().map(|planned| planned.source_image.clone());
        let work: Vec<_> = images
            .map(|image| {
                let retirement = Retirement::of(&image, keep);
                self.control.retire(image, retirement)
            })
            .collect();
        self.spawn(async move { Event::Source(SourceEvent::Retired { left_over: left_over(work).await }) });
    }
}

// What the target's machine asks for.
impl Conductor {
    fn carry_out_target(&mut self, action: TargetAction) {
        match action {
            TargetAction::Flush { volume, attempt } => {
                let store = Rc::clone(&self.planned(volume).target);
                self.spawn(async move {
                    let result = flush(&store).await;
                    Event::Target(TargetEvent::Flushed { volume, attempt, result })
                });
            }
            TargetAction::Commit { commit, records } => self.commit(records, commit, |commit, result| {
                Event::Target(TargetEvent::Committed { commit, result })
            }),
            TargetAction::Send(message) => self.send_to_source(message),
            TargetAction::Start(volume) => self.start(volume),
            TargetAction::Open(volume) => self.volume(volume).open(),
            TargetAction::Close(volume) => drop(self.volume(volume).close()),
            TargetAction::Discard => {
                let images = self.plan.volumes.iter().map(|planned| planned.target_image.clone());
                let work: Vec<_> = images.map(|image| self.control.discard(image)).collect();
                self.spawn(async move {
                    Event::Target(TargetEvent::Discarded { left_over: left_over(work).await })
                });
            }
        }
    }

    /// Serves a volume from its target store, reads only, and sees whether that answers in time.
    fn start(&self, index: VolumeIndex) {
        let volume = Rc::clone(self.volume(index));
        if let Some(copy) = self.copies.get(index.as_usize()) {
            copy.stop();
        }
        volume.change_hands(Rc::clone(&self.planned(index).target), volume.generation().next());
        let bytes = TRIAL_BYTES.min(volume.store().geometry().size);
        let buffer = self.buffers.take(usize::try_from(bytes).unwrap_or(0));
        let deadline = self.handle.sleep(self.plan.limits.mirror_wait_max);
        self.spawn(async move {
            let detail = match select(Box::pin(volume.try_reading(buffer)), deadline).await {
                Either::Left((Ok(()), _)) => return Event::Target(TargetEvent::Started(index)),
                Either::Left((Err(error), _)) => format!("the target's store does not answer: {error}"),
                Either::Right(_) => "the target's store does not answer in time".to_owned(),
            };
            Event::Target(TargetEvent::StartFailed { volume: index, detail })
        });
    }
}

// Tasks, messages and reports.
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

    fn costs(&self) -> Costs {
        let strategies = self.copies.iter();
        let costs = strategies
            .map(|copy| copy.with_strategy(|strategy| (strategy.copied(), strategy.bytes_mirrored())));
        costs.fold(self.costs, |sum, (copied, bytes_mirrored)| Costs {
            bytes_copied: sum.bytes_copied + copied.bytes_written,
            bytes_mirrored: sum.bytes_mirrored + bytes_mirrored,
            bytes_zero: sum.bytes_zero + copied.bytes_zero,
        })
    }

    fn report_progress(&mut self, now: Duration) {
        self.report_at = now + REPORT_INTERVAL;
        let progress = self.progress(now);
        self.control.report(Report::Progress { migration: self.plan.migration, progress });
    }

    fn progress(&self, now: Duration) -> Progress {
        let phase = self.phase.get();
        let waiting = |waits: Option<(Duration, &'static str)>| {
            waits.map(|(at, reason)| Waiting { reason, remaining: at.saturating_sub(now) })
        };
        let mut progress = Progress {
            phase,
            blocks_synchronised: 0,
            blocks_missing: 0,
            fraction: if self.is_released { 1.0 } else { 0.0 },
            bytes_copied: 0,
            bytes_mirrored: 0,
            bytes_zero: 0,
            copy_bytes_per_second: 0.0,
            remaining: None,
            waiting: waiting(self.source.poll_timeout()),
            suspended: None,
            attempt: self.source.attempt().0,
        };
        let volumes = self.copies.len().max(1) as f64;
        for copy in &self.copies {
            copy.with_strategy(|strategy| {
                progress.blocks_synchronised += strategy.blocks_synchronised();
                progress.blocks_missing += strategy.blocks_remaining();
                if !self.is_released {
                    progress.fraction += strategy.fraction() / volumes;
                    progress.waiting = progress.waiting.or(waiting(strategy.poll_timeout()));
                    progress.remaining = progress.remaining.max(strategy.remaining());
                }
                progress.copy_bytes_per_second += strategy.copy_bytes_per_second();
                progress.suspended = progress.suspended.or(strategy.suspended());
            });
        }
        let costs = self.costs();
        progress.bytes_copied = costs.bytes_copied;
        progress.bytes_mirrored = costs.bytes_mirrored;
        progress.bytes_zero = costs.bytes_zero;
        progress
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
    let target = Rc::clone(&planned.target);
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
