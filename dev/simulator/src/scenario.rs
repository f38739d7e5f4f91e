//! The scenario of a seed: volumes, guests, disks, migrations and planned faults.
//!
//! This file does not depend on planted bugs.

use std::time::Duration;

use chronicle::BlockSize;
use lane::TimeLimits;
use migration::strategy::{Distance, HotBlocks, Otherwise, Recording, Strategy};
use migration::{PacingSettings, Phase};

use crate::coverage::{Table, commits_a_cancellation, impossible};
use crate::disk::DiskSettings;
use crate::faults::{Fault, Planned};
use crate::guest::GuestSettings;
use crate::random::Random;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    pub(crate) operations: u32,
    /// The number of hosts, linked with each other; on one host volumes move between its stores.
    pub(crate) hosts: u8,
    pub(crate) rounds: Rounds,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Rounds {
    #[default]
    Drawn,
    Always,
    Never,
    /// No rounds; volumes that go to other hosts go incomplete.
    LeavesBlocks,
}

impl Rounds {
    fn percent(self) -> u64 {
        match self {
            Self::Drawn => ROUNDS_PERCENT,
            Self::Always => 100,
            Self::Never | Self::LeavesBlocks => 0,
        }
    }
}

impl Options {
    pub(crate) fn table(&self) -> Table {
        Table::of_hosts(self.hosts.into())
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) volumes: Vec<VolumePlan>,
    pub(crate) migrations: Vec<MigrationPlan>,
    pub(crate) limits: TimeLimits,
    pub(crate) faults: Vec<Planned>,
    /// The strategy for other hosts, if in rounds.
    pub(crate) rounds_away: Option<Strategy>,
    /// The longest wait for missing blocks from another host, if guests are then stopped by errors.
    pub(crate) wait_max: Option<Duration>,
}

const ROUNDS_STREAM: u64 = 0x2077_D500_57E9_5000;
const POST_COPY_STREAM: u64 = 0x706f_7374_636f_7079;
const POST_COPY_PERCENT: u64 = 30;
const ROUNDS_PERCENT: u64 = 35;

#[derive(Clone, Debug)]
pub(crate) struct VolumePlan {
    pub(crate) block_size: BlockSize,
    pub(crate) disk: DiskSettings,
    pub(crate) guest: GuestSettings,
    pub(crate) filled_percent: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct MigrationPlan {
    /// The pause before it reserves any place.
    pub(crate) pause: Duration,
    pub(crate) pacing: PacingSettings,
    pub(crate) strategy: Strategy,
    pub(crate) keep_source: bool,
    pub(crate) target_latency: Duration,
    pub(crate) bandwidth_change: Option<(Duration, Option<u64>)>,
}

impl Scenario {
    pub(crate) fn draw(random: &mut Random, options: &Options) -> Self {
        let volumes = random.pick(&[1, 1, 1, 2, 2, 3]);
        let per_guest = options.operations.div_ceil(volumes);
        let pause = random.pick(&[
            Duration::from_micros(100),
            Duration::from_micros(500),
            Duration::from_millis(2),
            Duration::from_millis(8),
        ]);
        let volumes: Vec<_> = (0..volumes).map(|_| VolumePlan::draw(random, per_guest, pause)).collect();
        let count = random.pick(&[1, 1, 1, 2, 2, 3, 4]);
        let migrations: Vec<_> = (0..count).map(|_| MigrationPlan::draw(random, &volumes)).collect();
        let faults = draw_faults(random);
        let limits = TimeLimits {
            mirror_wait_max: Duration::from_secs(1),
            switch_over_max: Duration::from_millis(500),
            no_progress_max: random.pick(&[Duration::from_secs(5), Duration::from_secs(20)]),
        };
        Self { volumes, migrations, limits, faults, rounds_away: None, wait_max: None }
    }

    /// Lets some migrations copy in rounds. The separate stream keeps all other draws as they are.
    pub(crate) fn draw_rounds(&mut self, seed: u64, rounds: Rounds) {
        let mut random = Random::new(seed ^ ROUNDS_STREAM);
        for migration in &mut self.migrations {
            if random.percent(rounds.percent()) {
                let (shortest, longest) = (Duration::from_millis(2), Duration::from_millis(100));
                migration.strategy = draw_rounds(&mut random, shortest, longest);
            }
        }
        self.rounds_away = random
            .percent(rounds.percent())
            .then(|| draw_rounds(&mut random, Duration::from_millis(100), Duration::from_millis(400)));
        let leaves_blocks = match rounds {
            Rounds::Drawn => Random::new(seed ^ POST_COPY_STREAM).percent(POST_COPY_PERCENT),
            Rounds::LeavesBlocks => true,
            Rounds::Always | Rounds::Never => false,
        };
        if leaves_blocks {
            let mut random = Random::new(seed ^ POST_COPY_STREAM << 1);
            self.rounds_away = Some(Strategy::PostCopy { rounds_max: random.pick(&[0, 0, 1, 2, 4]) });
            let (shortest, longest) = (Duration::from_millis(20), Duration::from_millis(500));
            self.wait_max = random.percent(50).then(|| random.duration(shortest, longest));
            for volume in &mut self.volumes {
                volume.guest.is_stopped_by_errors = self.wait_max.is_some();
            }
        }
    }
}

impl VolumePlan {
    fn draw(random: &mut Random, operations: u32, pause: Duration) -> Self {
        let block_bytes: u64 = random.pick(&[4 << 10, 4 << 10, 4 << 10, 8 << 10, 16 << 10, 64 << 10]);
        let blocks = random.pick(&[16, 16, 32, 32, 48, 64, 100, 200]);
        // Small, so that a simulation spends its time on requests, not on content; often not a whole block.
        let mut size_bytes = (block_bytes * blocks).min(1 << 20);
        if random.percent(30) {
            size_bytes -= 4096 * random.below(block_bytes / 4096);
        }
        if random.percent(15) {
            // A last piece smaller than the requests' alignment.
            size_bytes -= 512 * random.below(8);
        }
        let latency = random.duration(Duration::from_micros(20), Duration::from_micros(400));
        let guest = GuestSettings {
            size_bytes,
            depth: random.between(1, 17) as u32,
            operations,
            pause,
            grain_bytes: random.pick(&[512, 512, 1024, 4096, 4096]),
            hot_percent: random.pick(&[0, 30, 60, 90, 97]),
            hot_offset: random.below(size_bytes / 4096) * 4096,
            hot_for: random.pick(&[None, Some(20), Some(60)]),
            change_percent: random.pick(&[30, 60, 60, 90]),
            is_stopped_by_errors: false,
        };
        Self {
            block_size: BlockSize::new(block_bytes as u32).unwrap_or(BlockSize::DEFAULT),
            disk: DiskSettings {
                size_bytes,
                sector_bytes: random.pick(&[512, 512, 4096]),
                latency,
                tail_percent: random.pick(&[0, 2, 10, 30]),
            },
            guest,
            filled_percent: random.pick(&[0, 20, 50, 90, 100]),
        }
    }
}

impl MigrationPlan {
    fn draw(random: &mut Random, volumes: &[VolumePlan]) -> Self {
        let largest = volumes.iter().map(|volume| volume.disk.size_bytes).max().unwrap_or(1 << 20);
        // A rate at which it takes between 20 ms and 2 s.
        let mut rate = || {
            let seconds = random.duration(Duration::from_millis(20), Duration::from_secs(2)).as_secs_f64();
            Some((largest as f64 / seconds) as u64)
        };
        let bytes_per_second = rate();
        let changed = rate();
        let bytes_per_second = if random.percent(40) { bytes_per_second } else { None };
        let changed = if random.percent(50) { changed } else { None };
        Self {
            pause: random.duration(Duration::from_micros(10), Duration::from_millis(20)),
            pacing: PacingSettings {
                depth: random.between(1, 9) as usize,
                chunk_bytes: random.pick(&[4 << 10, 8 << 10, 32 << 10, 128 << 10, 256 << 10]),
                bytes_per_second,
            },
            strategy: draw_strategy(random),
            keep_source: random.percent(20),
            target_latency: random.duration(Duration::from_micros(20), Duration::from_millis(2)),
            bandwidth_change: random
                .percent(15)
                .then(|| (random.duration(Duration::from_micros(100), Duration::from_millis(100)), changed)),
        }
    }
}

fn draw_rounds(random: &mut Random, shortest: Duration, longest: Duration) -> Strategy {
    let recording = random.pick(&[Recording::Incremental, Recording::Incremental, Recording::Full]);
    let hot = draw_hot(random);
    let distance = random.pick(&[Distance::Near, Distance::Far]);
    let drain_max = random.duration(shortest, longest);
    let otherwise = random.pick(&[
        Otherwise::Fail,
        Otherwise::Mirror,
        Otherwise::AsynchronousMirror { buffer_bytes_max: 32 << 10, drain_max },
    ]);
    Strategy::Tracking { recording, hot, distance, drain_max, otherwise }
}

pub(crate) fn draw_hot(random: &mut Random) -> HotBlocks {
    random.pick(&[HotBlocks::PutOff, HotBlocks::PutOff, HotBlocks::AsOthers])
}

/// Guests may go without waiting for the target on one host as well.
fn draw_strategy(random: &mut Random) -> Strategy {
    if random.percent(60) {
        return Strategy::Mirror;
    }
    Strategy::AsynchronousMirror {
        buffer_bytes_max: random.pick(&[4 << 10, 32 << 10, 128 << 10, 1 << 20]),
        drain_max: random.duration(Duration::from_millis(2), Duration::from_millis(100)),
        hot: draw_hot(random),
    }
}

fn draw_faults(random: &mut Random) -> Vec<Planned> {
    // One in eight simulations has no faults: they show best what is wrong without.
    let count = random.pick(&[0, 1, 1, 2, 2, 3, 4, 5]);
    let mut faults = Vec::new();
    for _ in 0..count {
        let fault = draw_fault(random);
        way_there(random, &fault, &mut faults);
        plan_with_order(fault, &mut faults);
        if random.percent(25) {
            // Two at once: one request fails while another hangs.
            let other = Planned { fault: random.pick(&Fault::OF_ONE_HOST), percent: 50, ..fault };
            if impossible(Table::OneHost, other.fault, other.phase).is_none() {
                plan_with_order(other, &mut faults);
            }
        }
    }
    faults
}

/// Adds a fault, and the cancellation without which it could not strike.
fn plan_with_order(fault: Planned, faults: &mut Vec<Planned>) {
    faults.push(fault);
    if commits_a_cancellation(fault.fault, fault.phase) {
        faults.push(Planned { fault: Fault::Cancel, ..fault });
    }
}

fn draw_fault(random: &mut Random) -> Planned {
    let fault = random.pick(&Fault::OF_ONE_HOST);
    let phase = draw_phase(random, fault);
    let first_entry_commits = !matches!(fault, Fault::JournalError | Fault::JournalSlow);
    let skip = match phase {
        // Records are committed while copying only by an abandoned attempt.
        Phase::Copying if !first_entry_commits => 1,
        // A migration gets there once.
        Phase::TakingBack => 0,
        _ => random.pick(&[0, 0, 0, 0, 1, 2]),
    };
    // Copying lasts; the other phases are very short.
    let delay = match phase {
        _ if random.percent(40) => Duration::ZERO,
        Phase::Copying => random.duration(Duration::from_micros(10), Duration::from_millis(50)),
        // The target answers when it has flushed.
        Phase::Preparing if fault == Fault::MessageMishap => {
            random.duration(Duration::from_micros(50), Duration::from_millis(20))
        }
        _ => random.duration(Duration::from_micros(1), Duration::from_millis(1)),
    };
    Planned {
        fault,
        phase,
        skip,
        delay,
        window: random.duration(Duration::from_micros(100), Duration::from_secs(2)),
        strikes_max: random.pick(&[1, 1, 2, 5, 1000]),
        percent: random.pick(&[20, 50, 100, 100]),
    }
}

fn draw_phase(random: &mut Random, fault: Fault) -> Phase {
    loop {
        let phase = random.pick(&Phase::ALL);
        if impossible(Table::OneHost, fault, phase).is_none() {
            return phase;
        }
    }
}

/// Adds the faults that lead into phases which a smooth migration does not enter, or leaves too soon.
fn way_there(random: &mut Random, to: &Planned, faults: &mut Vec<Planned>) {
    let at_once = |fault, phase, strikes_max| Planned {
        fault,
        phase,
        skip: 0,
        delay: Duration::ZERO,
        window: Duration::from_secs(2),
        strikes_max,
        percent: 100,
    };
    let is_journals = matches!(to.fault, Fault::JournalError | Fault::JournalSlow);
    match to.phase {
        Phase::TakingBack => {
            // When one trial fails, others may still be in progress, and meet this fault.
            let strikes_others =
                matches!(to.fault, Fault::TargetError | Fault::TargetHang | Fault::TargetSlow);
            let failing = if strikes_others { 1 } else { random.pick(&[1, 3]) };
            faults.push(at_once(Fault::HandBack, Phase::Committing, failing));
            if strikes_others {
                faults.push(at_once(Fault::TargetSlow, Phase::Committing, 3));
            }
            if random.percent(50) && !is_journals {
                faults.push(at_once(Fault::JournalSlow, Phase::TakingBack, 1));
            }
        }
        Phase::Discarding => {
            let copying = random.duration(Duration::from_micros(10), Duration::from_millis(20));
            let (fault, phase, delay) = random.pick(&[
                (Fault::HandBack, Phase::Committing, Duration::ZERO),
                (Fault::Cancel, Phase::Copying, copying),
                (Fault::Cancel, Phase::Preparing, Duration::ZERO),
                (Fault::TargetFull, Phase::Copying, copying),
            ]);
            faults.push(Planned { delay, ..at_once(fault, phase, 3) });
        }
        // Copying after an abandoned attempt.
        Phase::Copying if to.skip > 0 || is_journals => {
            let fault = random.pick(&[Fault::SourceError, Fault::TargetError, Fault::TargetRestart]);
            faults.push(at_once(fault, Phase::Preparing, 1));
        }
        // During an attempt, only blocks lost by a restarted target are copied.
        Phase::Preparing if to.fault == Fault::TargetFull => {
            faults.push(at_once(Fault::TargetRestart, Phase::Preparing, 1));
        }
        // Earlier messages arrive then.
        Phase::Retiring if to.fault == Fault::MessageMishap => {
            faults.push(at_once(Fault::MessageMishap, Phase::Committing, 5));
        }
        Phase::Releasing if random.percent(30) && !is_journals => {
            faults.push(at_once(Fault::JournalSlow, Phase::Releasing, 1));
        }
        _ => {}
    }
}
