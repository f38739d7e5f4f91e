//! The machine of one volume that is being copied: an [`Engine`], and a [`Policy`] that decides for it.

use std::time::Duration;

use chronicle::{BlockSize, LayeredBitmap};

use super::engine::Engine;
use super::policy::{Chosen, Course, Policy, RoundVerdict};
use super::{Round, Strategy, Tally, TellingId, VolumeAction, VolumeEvent, WriteId};
use crate::handover::source::Costs;
use crate::pacing::PacingSettings;
use crate::progress::{Carried, VolumeProgress, Waiting};

/// What a copying is told at its beginning, whatever its strategy.
#[derive(Clone, Debug)]
pub struct CopyingSettings {
    /// Bytes of a block.
    pub block_size: BlockSize,
    /// Size of the volume in bytes.
    pub size_bytes: u64,
    /// How much to copy at once.
    pub pacing: PacingSettings,
    /// How long a guest's write may be held, or wait for the target (design §5.7).
    pub wait_max: Duration,
    /// How long the target may leave a request unanswered before the migration fails, whatever else it answers.
    /// Time that passes while it answers is never a reason.
    pub no_progress_max: Duration,
}

/// Brings one volume's replica up to date.
///
/// It is driven as every machine of the core is: an event or the time goes in, then all actions are taken before anything
/// else is told.
pub struct Copying {
    engine: Engine,
    policy: Chosen,
    /// Rounds of daemons before this one: they are shown, and judge nothing.
    earlier_rounds: Vec<Round>,
}

impl Copying {
    /// Makes a machine that waits to be told what is allocated.
    pub fn new(settings: CopyingSettings, strategy: Strategy) -> Self {
        let policy = Chosen::new(strategy);
        Self { engine: Engine::new(settings, policy.terms()), policy, earlier_rounds: Vec::new() }
    }

    /// Goes on counting where a daemon before this one had come to.
    #[must_use]
    pub fn carrying(mut self, carried: Carried) -> Self {
        self.engine.carry(&carried);
        self.earlier_rounds = carried.rounds;
        self
    }

    /// Takes what happened. An event that does not fit (an answer to something unknown) changes nothing.
    pub fn handle_event(&mut self, now: Duration, event: VolumeEvent) {
        // One that would overtake others that the target holds up takes its turn.
        let takes_turn = self.engine.is_queueing();
        self.engine.handle_event(now, event);
        if let VolumeEvent::WriteArrived { write, .. } = event
            && !takes_turn
        {
            self.decide(now, write);
        }
        self.advance(now);
    }

    /// The target lacks these blocks of the volume, of its block size: the same as [`VolumeEvent::Allocated`] of each run,
    /// of which there may be millions.
    pub fn lacks(&mut self, lacking: &LayeredBitmap) {
        self.engine.lacks(lacking);
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Duration) {
        self.engine.give_up_waiting(now);
        self.advance(now);
    }

    /// The next thing to be done.
    pub fn poll_action(&mut self) -> Option<VolumeAction> {
        self.engine.poll_action()
    }

    /// When `handle_timeout` is to be called, at the latest, and what is waited for.
    pub fn poll_timeout(&self) -> Option<(Duration, &'static str)> {
        // N.B. a policy is asked nothing any more once the copying has stopped, so it would not meet a deadline.
        let of_policy = self.policy.deadline(&self.engine).filter(|_| !self.engine.is_stopped());
        let deadlines = self.engine.deadlines().chain(of_policy);
        deadlines.chain(self.engine.gives_up_at()).min_by_key(|(at, _)| *at)
    }

    /// Changes the rate limit of what is copied.
    pub fn set_bandwidth(&mut self, now: Duration, bytes_per_second: Option<u64>) {
        self.engine.set_bandwidth(bytes_per_second);
        self.advance(now);
    }

    /// Everything that the target lacks if both hosts lose at this instant what is not durable: what is missing, in
    /// flight, not confirmed to be durable there, or being written. `None` while it is not known, and during a try at
    /// the handover: nothing more is asked of the source's store then.
    pub fn lacking(&self) -> Option<LayeredBitmap> {
        self.engine.lacking()
    }

    /// What a telling under way says that the target lacks, in units, and whether that is all of it; `None`: it is not under
    /// way any more.
    pub fn telling(&self, telling: TellingId) -> Option<(LayeredBitmap, bool)> {
        let (blocks, is_base) = self.engine.telling(telling)?;
        let (block_bytes, size_bytes) = (self.engine.block_bytes(), self.engine.size_bytes());
        Some((crate::filling::to_units(blocks, block_bytes, size_bytes), is_base))
    }

    /// What it has cost so far.
    pub fn costs(&self) -> Costs {
        self.engine.costs()
    }

    /// How far it is.
    pub fn progress(&mut self, now: Duration) -> VolumeProgress {
        let waiting = self
            .poll_timeout()
            .map(|(at, reason)| Waiting { reason, remaining: Some(at.saturating_sub(now)) });
        let rounds = self.earlier_rounds.iter().chain(self.policy.rounds()).copied().collect();
        VolumeProgress { rounds, ..self.engine.progress(waiting) }
    }

    /// Blocks missing or in flight, those that late writes touch included.
    pub fn blocks_remaining(&self) -> u64 {
        self.engine.blocks_remaining()
    }

    /// What it has decided so far.
    pub fn tally(&self) -> Tally {
        self.costs().tally
    }

    /// What is waited for as long as it takes: the guest's own disk, which no deadline of a migration binds.
    pub fn waits_for(&self) -> Option<&'static str> {
        self.engine.waits_for()
    }

    /// Tells whether guest writes are admitted no faster than the target takes them.
    pub fn is_throttled(&self) -> bool {
        self.engine.is_throttled()
    }

    /// Tells whether nothing of it is under way, and everything that the target has is durable there: of one that is
    /// paused, or has nothing to copy.
    pub fn is_settled(&self) -> bool {
        self.engine.is_settled()
    }

    /// Tells whether somebody has paused it.
    pub fn is_paused(&self) -> bool {
        self.engine.is_paused()
    }

    /// Goes on with everything that can go on.
    fn advance(&mut self, now: Duration) {
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

    fn begin_chunks(&mut self, now: Duration) {
        while self.engine.may_begin_chunk(now) {
            let Some(run) = self.policy.next_run(&mut self.engine) else { break };
            self.engine.begin_chunk(now, run);
        }
    }

    /// Does with a held write what the policy says.
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
