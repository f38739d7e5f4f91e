//! The machine of one volume that is being copied: an [`Engine`], with a [`Policy`] for its decisions.

use std::time::Duration;

use chronicle::{BlockSize, LayeredBitmap};

use super::deadline::Deadline;
use super::engine::Engine;
use super::policy::{Chosen, Course, Policy, RoundVerdict};
use super::{Round, Strategy, Tally, TellingId, VolumeAction, VolumeEvent, WriteId};
use crate::handover::source::Costs;
use crate::pacing::{Budget, PacingSettings};
use crate::progress::{Carried, ChunksInFlight, LimitedBy, VolumeProgress, Waiting};

/// The settings of a copying, for any strategy.
#[derive(Clone, Debug)]
pub struct CopyingSettings {
    /// The size of a block.
    pub block_size: BlockSize,
    /// The volume's size in bytes.
    pub size_bytes: u64,
    /// Limits how much is copied at once.
    pub pacing: PacingSettings,
    /// How long a guest's write may be held, or wait for the target (design §5.7).
    pub wait_max: Duration,
    /// How long one request to the target may stay unanswered before the migration fails, even if other requests are answered.
    /// Slow but answered requests are never a reason.
    pub no_progress_max: Duration,
}

/// Brings one volume's replica up to date.
///
/// The caller passes an event or the time, and drains all actions before it passes the next.
pub struct Copying {
    engine: Engine,
    policy: Chosen,
    /// The rounds of earlier daemons, and of a strategy before this one: they are reported, but do not affect decisions.
    earlier_rounds: Vec<Round>,
    /// When it is to end, if that was ordered.
    ends_by: Option<Duration>,
    /// Raises the impact for that; `None`: it does not give way anyway.
    deadline: Option<Deadline>,
}

impl Copying {
    /// Makes a machine that waits for the allocated ranges.
    pub fn new(settings: CopyingSettings, strategy: Strategy) -> Self {
        let policy = Chosen::new(strategy);
        Self {
            engine: Engine::new(settings, policy.terms()),
            policy,
            earlier_rounds: Vec::new(),
            ends_by: None,
            deadline: None,
        }
    }

    /// Makes it ask the pacers of its disks before each chunk.
    #[must_use]
    pub fn paced(mut self, mover: pacer::Mover) -> Self {
        self.engine.set_paced(mover);
        self
    }

    /// Makes it share the limit of a whole migration with the other volumes and the VM.
    #[must_use]
    pub fn sharing(mut self, budget: Budget) -> Self {
        self.engine.share(budget);
        self
    }

    /// Changes what guests of its disks may lose to it; `None`: it does not give way.
    pub fn set_impact(&mut self, now: Duration, impact: Option<pacer::Impact>) {
        self.set_deadline(now, impact);
        self.pace(now, impact);
        self.advance(now);
    }

    /// Returns what guests may lose to chunks at present; `None`: chunks do not give way, as while guests are held for the handover.
    pub fn impact(&self) -> Option<pacer::Impact> {
        self.engine.impact()
    }

    /// Returns what limits the copying; `None`: nothing is copied.
    pub fn limited_by(&self, chunks: ChunksInFlight) -> Option<LimitedBy> {
        self.engine.limited_by(chunks)
    }

    /// Makes it raise the impact as far as it must to end by a time.
    #[must_use]
    pub fn ending_by(
        mut self,
        now: Duration,
        ends_by: Option<Duration>,
        impact: Option<pacer::Impact>,
    ) -> Self {
        self.ends_by = ends_by;
        self.set_deadline(now, impact);
        self
    }

    /// Continues the counts of an earlier daemon.
    #[must_use]
    pub fn carrying(mut self, carried: Carried) -> Self {
        self.engine.carry(&carried);
        self.earlier_rounds = carried.rounds;
        self
    }

    /// Handles an event. An event that does not fit (an answer to an unknown number) changes nothing.
    pub fn handle_event(&mut self, now: Duration, event: VolumeEvent) {
        // A write behind others that wait for a slow target queues as well.
        let takes_turn = self.engine.is_queueing();
        self.engine.handle_event(now, event);
        if let VolumeEvent::WriteArrived { write, .. } = event
            && !takes_turn
        {
            self.decide(now, write);
        }
        self.advance(now);
    }

    /// Notes that the target lacks these blocks. Same as [`VolumeEvent::Allocated`] for each run, of which there may be millions.
    pub fn lacks(&mut self, lacking: &LayeredBitmap) {
        self.engine.lacks(lacking);
    }

    /// Handles everything that is due.
    pub fn handle_timeout(&mut self, now: Duration) {
        self.engine.give_up_waiting(now);
        self.advance(now);
    }

    /// Returns the next action for the caller.
    pub fn poll_action(&mut self) -> Option<VolumeAction> {
        self.engine.poll_action()
    }

    /// Returns the latest time to call `handle_timeout`, and the reason for it.
    pub fn poll_timeout(&self) -> Option<(Duration, &'static str)> {
        let look = self.hurries().map(|deadline| (deadline.next_look(), "a look at its deadline"));
        look.into_iter().chain(self.waits_until()).min_by_key(|(at, _)| *at)
    }

    /// Returns the end of the next wait, and what it waits for.
    fn waits_until(&self) -> Option<(Duration, &'static str)> {
        // **N.B.** The policy is not called once the copying has stopped, so it would not meet a deadline.
        let of_policy = self.policy.deadline(&self.engine).filter(|_| !self.engine.is_stopped());
        let deadlines = self.engine.deadlines().chain(of_policy);
        deadlines.chain(self.engine.gives_up_at()).min_by_key(|(at, _)| *at)
    }

    /// Changes the rate limit for copying.
    pub fn set_bandwidth(&mut self, now: Duration, bytes_per_second: Option<u64>) {
        self.engine.set_bandwidth(bytes_per_second);
        self.advance(now);
    }

    /// Returns the target's missing set if both hosts now lose everything that is not durable. It holds blocks that are missing,
    /// in flight, unconfirmed, or being written. `None` while it is not known, and during an attempt at the handover, when
    /// nothing more is asked of the source's store.
    pub fn lacking(&self) -> Option<LayeredBitmap> {
        self.engine.lacking()
    }

    /// Returns the content of a missing-set update under way, in units, and whether it is a complete set. `None` if the update
    /// is not under way.
    pub fn telling(&self, telling: TellingId) -> Option<(LayeredBitmap, bool)> {
        let (blocks, is_base) = self.engine.telling(telling)?;
        let (block_bytes, size_bytes) = (self.engine.block_bytes(), self.engine.size_bytes());
        Some((crate::filling::to_units(blocks, block_bytes, size_bytes), is_base))
    }

    /// Returns the cost so far.
    pub fn costs(&self) -> Costs {
        self.engine.costs()
    }

    /// Returns the progress of the copying.
    pub fn progress(&mut self, now: Duration) -> VolumeProgress {
        let waiting = self
            .waits_until()
            .map(|(at, reason)| Waiting { reason, remaining: Some(at.saturating_sub(now)) });
        let rounds = self.earlier_rounds.iter().chain(self.policy.rounds()).copied().collect();
        let hurry = self.deadline.as_ref().map(Deadline::hurry);
        VolumeProgress { rounds, hurry, ..self.engine.progress(now, waiting) }
    }

    /// Returns the blocks missing or in flight, including those of late writes.
    pub fn blocks_remaining(&self) -> u64 {
        self.engine.blocks_remaining()
    }

    /// Returns the decisions so far.
    pub fn tally(&self) -> Tally {
        self.costs().tally
    }

    /// Returns the reason of a wait without limit, for example the guest's own disk.
    pub fn waits_for(&self) -> Option<&'static str> {
        self.engine.waits_for()
    }

    /// Returns whether guest writes are admitted only at the target's rate.
    pub fn is_throttled(&self) -> bool {
        self.engine.is_throttled()
    }

    /// Returns whether nothing is under way, and the target's data is durable. For a copying that is paused or has no work.
    pub fn is_settled(&self) -> bool {
        self.engine.is_settled()
    }

    /// Returns whether the administrator has paused the copying.
    pub fn is_paused(&self) -> bool {
        self.engine.is_paused()
    }

    /// Returns its deadline while there is anything left to copy.
    fn hurries(&self) -> Option<&Deadline> {
        self.deadline
            .as_ref()
            .filter(|_| !self.engine.is_stopped() && !self.engine.is_paused() && !self.engine.is_copied())
    }

    fn set_deadline(&mut self, now: Duration, impact: Option<pacer::Impact>) {
        self.deadline = self.ends_by.zip(impact).map(|(at, ordered)| Deadline::new(now, at, ordered));
    }

    fn hurry(&mut self, now: Duration) {
        if self.hurries().is_none() {
            return;
        }
        let outlook = self.engine.outlook();
        let changed = self.deadline.as_mut().and_then(|deadline| deadline.look(now, outlook));
        if let Some(impact) = changed {
            self.pace(now, impact);
        }
    }

    fn pace(&mut self, now: Duration, impact: Option<pacer::Impact>) {
        let terms = impact.map(|impact| pacer::Terms { class: pacer::MoverClass::Migration, impact });
        self.engine.paced().set_terms(now, terms);
    }

    fn advance(&mut self, now: Duration) {
        self.hurry(now);
        if !self.engine.is_stopped() {
            self.engine.resume(now);
            self.engine.give_up_if_stuck(now);
        }
        for write in self.engine.take_held() {
            self.decide(now, write);
        }
        if self.engine.is_stopped() {
            return;
        }
        self.policy.judge_convergence(&mut self.engine, now);
        loop {
            self.begin_chunks(now);
            match self.policy.judge_round(&self.engine, now) {
                RoundVerdict::GoOn => break,
                RoundVerdict::Next => self.engine.advance_epoch(),
                RoundVerdict::NextOfAll => {
                    self.engine.advance_epoch();
                    self.engine.take_up();
                }
                RoundVerdict::GiveUp(detail) => return self.engine.give_up(detail),
                RoundVerdict::ChangeTo(strategy) => self.change_to(strategy),
            }
        }
        self.engine.start_chunks(now);
        if self.engine.may_flush() {
            let verdict = self.policy.judge_pass(&self.engine);
            self.engine.flush_if_due(now, verdict);
        }
        if self.policy.may_tell(&self.engine) {
            self.engine.tell_if_due(now);
        }
        let standing = self.policy.standing(&self.engine, now);
        self.engine.say(standing);
    }

    /// Lets another strategy copy what is left. Nothing is being copied at this moment.
    fn change_to(&mut self, strategy: Strategy) {
        self.earlier_rounds.extend_from_slice(self.policy.rounds());
        self.policy = Chosen::new(strategy);
        self.engine.end_rounds(self.policy.terms());
    }

    fn begin_chunks(&mut self, now: Duration) {
        while self.engine.may_begin_chunk(now) {
            let Some(run) = self.policy.next_run(&mut self.engine) else { break };
            self.engine.begin_chunk(now, run);
        }
    }

    fn decide(&mut self, now: Duration, id: WriteId) {
        let Some(write) = self.engine.write(id) else { return };
        match self.policy.course(&self.engine, now, &write) {
            Course::Hold => {}
            Course::Queue { until } => self.engine.queue(now, until),
            Course::Mirror(route) => self.engine.mirror(now, &write, route),
            Course::Send { route, toll } => self.engine.send(now, &write, route, toll),
            Course::Merge { toll } => self.engine.merge(now, &write, toll),
            Course::Overflow { toll } => self.engine.overflow(now, &write, toll),
        }
    }
}
