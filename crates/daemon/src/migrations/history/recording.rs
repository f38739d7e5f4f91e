//! The growing history of one migration, in the form of the API.
//!
//! ```text
//!   samples: ── before, as they come ──┤├── while it runs: neighbours are merged when there are too many ──┤├── after ──
//! ```

use std::collections::BTreeMap;
use std::time::Duration;

use api::{Decisions, GuestFigures, HistorySample, PhaseEntered, Suspension, Waited};
use lane::{Latencies, Recorded, Sample, Window};
use migration::strategy::{Round, Tally};
use migration::{Phase, VolumeIndex};

use crate::migrations::history::tallies::stood_still_for;
use crate::migrations::view::{phase as api_phase, round};

/// The largest number of samples while a migration runs: a plot has as many points. The lane limits those before and after it.
const SAMPLES_MAX: usize = 600;
/// The largest number of recorded phases: each of ten attempts at the handover has a handful.
const PHASES_MAX: usize = 200;
const SUSPENSIONS_MAX: usize = 100;
/// Shorter samples are joined to the previous one, because their rates say little.
const SAMPLE_MIN: Duration = Duration::from_millis(lane::SAMPLE_INTERVAL.as_millis() as u64 / 2);

#[derive(Clone, Debug)]
pub(crate) struct Facts {
    pub(crate) started_unix_ms: u64,
    pub(crate) size_bytes: u64,
    /// The bandwidth limit in bytes a second; `None`: unlimited.
    pub(crate) bandwidth_bytes_per_second: Option<u64>,
    /// The longest time that a guest's write may be held.
    pub(crate) mirror_wait_max: Duration,
    pub(crate) strategy: api::Strategy,
}

#[derive(Clone, Debug)]
pub(crate) struct Recording {
    facts: Facts,
    before: Vec<Sample>,
    during: Vec<Sample>,
    after: Vec<Sample>,
    /// Up to this length new samples are joined to the last one.
    resolution: Duration,
    phases: Vec<(i64, Phase)>,
    suspensions: Vec<Suspended>,
    waits: BTreeMap<&'static str, Duration>,
    tally: Tally,
    rounds: Vec<(VolumeIndex, Round)>,
    ended_us: Option<i64>,
}

#[derive(Clone, Debug)]
struct Suspended {
    began_us: i64,
    ended_us: Option<i64>,
    reason: &'static str,
}

impl Recording {
    pub(crate) fn new(facts: Facts) -> Self {
        Self {
            facts,
            before: Vec::new(),
            during: Vec::new(),
            after: Vec::new(),
            resolution: Duration::ZERO,
            phases: vec![(0, Phase::Copying)],
            suspensions: Vec::new(),
            waits: BTreeMap::new(),
            tally: Tally::default(),
            rounds: Vec::new(),
            ended_us: None,
        }
    }

    pub(crate) fn started_unix_ms(&self) -> u64 {
        self.facts.started_unix_ms
    }

    pub(crate) fn add(&mut self, recorded: Recorded) {
        for entered in recorded.phases {
            if self.phases.len() < PHASES_MAX
                && self.phases.last().map(|(_, phase)| *phase) != Some(entered.1)
            {
                self.phases.push(entered);
            }
        }
        if self.ended_us.is_none() {
            self.tally = recorded.tally;
            self.rounds = recorded.rounds;
        }
        for sample in recorded.samples {
            if self.ended_us.is_some() {
                self.after.push(sample);
            } else if sample.began_us < 0 {
                self.before.push(sample);
            } else {
                self.add_during(sample);
            }
        }
    }

    /// Marks the last sample as the end of the migration.
    pub(crate) fn end(&mut self) {
        let ended_us = self.during.last().map_or(0, end_us);
        self.ended_us.get_or_insert(ended_us);
        if let Some(open) = self.suspensions.last_mut() {
            open.ended_us.get_or_insert(ended_us);
        }
    }

    fn add_during(&mut self, sample: Sample) {
        if let Some(reason) = stood_still_for(&sample) {
            *self.waits.entry(reason).or_default() += sample.guest.length;
        }
        self.note_suspension(&sample);
        match self.during.last_mut() {
            Some(last) if fits(last, &sample, self.resolution) => join(last, sample),
            _ => self.during.push(sample),
        }
        if self.during.len() > SAMPLES_MAX {
            self.thin();
        }
    }

    fn note_suspension(&mut self, sample: &Sample) {
        let open = self.suspensions.last_mut().filter(|suspension| suspension.ended_us.is_none());
        match (open, sample.suspended) {
            (Some(open), Some(reason)) if open.reason == reason => return,
            (Some(open), _) => open.ended_us = Some(sample.began_us),
            (None, _) => {}
        }
        if let Some(reason) = sample.suspended
            && self.suspensions.len() < SUSPENSIONS_MAX
        {
            self.suspensions.push(Suspended { began_us: sample.began_us, ended_us: None, reason });
        }
    }

    /// Halves the number of samples, and makes later ones twice as long.
    fn thin(&mut self) {
        self.resolution = (self.resolution * 2).max(lane::SAMPLE_INTERVAL * 2);
        let mut thinned: Vec<Sample> = Vec::with_capacity(SAMPLES_MAX);
        for sample in self.during.drain(..) {
            match thinned.last_mut() {
                Some(last) if fits(last, &sample, self.resolution) => join(last, sample),
                _ => thinned.push(sample),
            }
        }
        self.during = thinned;
    }

    /// Returns at most the latest `most` samples of the running migration.
    pub(crate) fn latest(&self, most: usize) -> Vec<HistorySample> {
        let first = self.during.len().saturating_sub(most);
        self.during[first..].iter().map(describe_sample).collect()
    }

    pub(crate) fn describe(&self) -> api::Recording {
        let samples = self.before.iter().chain(&self.during).chain(&self.after);
        api::Recording {
            size_bytes: self.facts.size_bytes,
            strategy: self.facts.strategy.name().to_owned(),
            rounds: self.rounds.iter().map(|(volume, told)| round(*volume, told)).collect(),
            bandwidth_bytes_per_second: self.facts.bandwidth_bytes_per_second,
            mirror_wait_max_ms: milliseconds(self.facts.mirror_wait_max),
            ended_ms: self.ended_us.map(as_ms),
            samples: samples.map(describe_sample).collect(),
            phases: self
                .phases
                .iter()
                .map(|(at_us, phase)| PhaseEntered { at_ms: as_ms(*at_us), phase: api_phase(*phase) })
                .collect(),
            suspensions: self.suspensions.iter().map(describe_suspension).collect(),
            waits: self.waits.iter().map(|(reason, total)| describe_wait(reason, *total)).collect(),
            decisions: describe_decisions(&self.tally),
            before: figures(&self.before),
            during: figures(&self.during),
            after: figures(&self.after),
        }
    }
}

fn end_us(sample: &Sample) -> i64 {
    sample.began_us.saturating_add(i64::try_from(sample.guest.length.as_micros()).unwrap_or(i64::MAX))
}

fn fits(last: &Sample, next: &Sample, resolution: Duration) -> bool {
    next.guest.length < SAMPLE_MIN || last.guest.length + next.guest.length <= resolution + SAMPLE_MIN
}

fn join(last: &mut Sample, next: Sample) {
    let (sum, guest) = (&mut last.guest, next.guest);
    sum.length += guest.length;
    sum.reads += guest.reads;
    sum.writes += guest.writes;
    sum.flushes += guest.flushes;
    sum.bytes_read += guest.bytes_read;
    sum.bytes_written += guest.bytes_written;
    sum.errors += guest.errors;
    sum.latencies.merge(&guest.latencies);
    last.bytes_copied += next.bytes_copied;
    last.bytes_mirrored += next.bytes_mirrored;
    last.bytes_zero += next.bytes_zero;
    last.bytes_missing = next.bytes_missing;
}

fn describe_sample(sample: &Sample) -> HistorySample {
    let Window { reads, writes, flushes, bytes_read, bytes_written, errors, ref latencies, .. } =
        sample.guest;
    HistorySample {
        at_ms: as_ms(sample.began_us),
        length_ms: milliseconds(sample.guest.length),
        reads,
        writes,
        flushes,
        bytes_read,
        bytes_written,
        errors,
        median_us: latencies.quantile(500).map(micros),
        p99_us: latencies.quantile(990).map(micros),
        worst_us: latencies.longest().map(micros),
        bytes_copied: sample.bytes_copied,
        bytes_mirrored: sample.bytes_mirrored,
        bytes_zero: sample.bytes_zero,
        bytes_missing: sample.bytes_missing,
    }
}

fn figures(samples: &[Sample]) -> Option<GuestFigures> {
    let seconds: f64 = samples.iter().map(|sample| sample.guest.length.as_secs_f64()).sum();
    if seconds <= 0.0 {
        return None;
    }
    let mut latencies = Latencies::default();
    samples.iter().for_each(|sample| latencies.merge(&sample.guest.latencies));
    let sum = |count: fn(&Window) -> u64| samples.iter().map(|sample| count(&sample.guest)).sum::<u64>();
    let requests = sum(|guest| guest.reads + guest.writes + guest.flushes);
    Some(GuestFigures {
        seconds,
        iops: requests as f64 / seconds,
        bytes_per_second: sum(|guest| guest.bytes_read + guest.bytes_written) as f64 / seconds,
        median_us: latencies.quantile(500).map(micros),
        p99_us: latencies.quantile(990).map(micros),
        worst_us: latencies.longest().map(micros),
        errors: sum(|guest| guest.errors),
    })
}

fn describe_suspension(suspended: &Suspended) -> Suspension {
    Suspension {
        at_ms: as_ms(suspended.began_us),
        ended_ms: suspended.ended_us.map(as_ms),
        reason: suspended.reason.to_owned(),
    }
}

fn describe_wait(reason: &str, total: Duration) -> Waited {
    Waited { reason: reason.to_owned(), total_ms: milliseconds(total) }
}

fn describe_decisions(tally: &Tally) -> Decisions {
    Decisions {
        writes_mirrored: tally.writes_mirrored,
        writes_in_part: tally.writes_in_part,
        writes_source_only: tally.writes_source_only,
        writes_held: tally.writes_held,
        held_longest_ms: milliseconds(tally.held_longest),
        writes_answered_late: tally.writes_answered_late,
        chunks_copied: tally.chunks_copied,
        chunks_copied_again: tally.chunks_copied_again,
        target_flushes: tally.target_flushes,
        target_faults: tally.target_faults,
        source_faults: tally.source_faults,
        suspensions: tally.suspensions,
        rounds_given_up: tally.rounds_given_up,
        bytes_followed: tally.bytes_followed,
        bytes_pulled: tally.bytes_pulled,
    }
}

fn as_ms(micros: i64) -> f64 {
    micros as f64 / 1000.0
}

fn milliseconds(duration: Duration) -> f64 {
    // Whole microseconds: more digits would only make the file longer.
    duration.as_micros() as f64 / 1000.0
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
