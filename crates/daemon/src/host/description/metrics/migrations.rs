//! Metrics of migrations. A running migration has the name of its volume as its label: the first one if several move together.

use std::collections::BTreeMap;

use api::{Migration, MigrationState, Phase};
use migration::strategy::BANDWIDTH_LIMIT;

use crate::metrics::Exposition;
use crate::migrations::ends::{EndSums, Outcomes};
use crate::migrations::history::Tallies;
use crate::migrations::view;

const PHASES: [Phase; 11] = [
    Phase::Queued,
    Phase::Copying,
    Phase::Memory,
    Phase::Closing,
    Phase::Preparing,
    Phase::Releasing,
    Phase::Committing,
    Phase::Filling,
    Phase::Retiring,
    Phase::TakingBack,
    Phase::Discarding,
];

type Figure = fn(&Migration) -> f64;

const FIGURES: [(&str, &str, Figure); 6] = [
    ("sterna_migration_progress_ratio", "How much of a migration under way is done.", |one| one.fraction),
    ("sterna_migration_missing_bytes", "What the target of a migration under way lacks.", |one| {
        // An unknown value is no number.
        one.bytes_missing.map_or(f64::NAN, |bytes| bytes as f64)
    }),
    ("sterna_migration_moved_bytes", "What a migration under way has moved.", |one| one.bytes_moved as f64),
    ("sterna_migration_rate_bytes_per_second", "How fast a migration under way copies.", |one| {
        one.bytes_per_second
    }),
    ("sterna_migration_elapsed_seconds", "For how long a migration has been under way.", |one| one.seconds),
    ("sterna_migration_paused", "Whether a migration under way is paused.", |one| {
        f64::from(u8::from(one.state == MigrationState::Paused))
    }),
];

pub(crate) fn add(told: &mut Exposition, unfinished: &[Migration]) {
    let mut family = told.gauge("sterna_migrations", "Migrations that wait or are under way.");
    for phase in PHASES {
        let count = unfinished.iter().filter(|one| one.phase == phase).count();
        family.count(&[("phase", phase.name())], count as u64);
    }
    // A volume has one migration at a time; another may wait for its turn.
    let running = unfinished.iter().filter(|one| one.phase != Phase::Queued);
    let running: BTreeMap<&str, &Migration> = running.map(|one| (volume(one), one)).collect();
    for (metric, help, figure) in FIGURES {
        let mut family = told.gauge(metric, help);
        for (volume, one) in &running {
            family.add(&[("volume", volume)], figure(one));
        }
    }
    let mut family =
        told.gauge("sterna_migration_waiting", "What a migration under way waits for: its sample is 1.");
    for (volume, one) in &running {
        if let Some(waits) = &one.waiting_for {
            // A series for each limit would be one too many.
            let is_limit = waits.reason.starts_with(view::LIMIT);
            let reason = if is_limit { BANDWIDTH_LIMIT } else { &waits.reason };
            family.flag(&[("volume", volume), ("reason", reason)], true);
        }
    }
}

/// Adds the outcomes of all migrations, and the sums of what they moved and how long they waited.
pub(crate) fn add_sums(told: &mut Exposition, tallies: &Tallies, ends: &EndSums) {
    let sums: [(&str, &str, fn(&Outcomes) -> f64); 2] = [
        ("sterna_migrations_ended_total", "Migrations that have ended.", |of| of.count as f64),
        ("sterna_migrations_ended_seconds_total", "How long ended migrations took.", |of| of.seconds),
    ];
    for (metric, help, sum) in sums {
        let mut family = told.counter(metric, help);
        for ((direction, outcome), of) in &ends.outcomes {
            family.add(&[("direction", direction), ("outcome", outcome)], sum(of));
        }
    }
    told.histogram("sterna_migration_switch_over_seconds", "How long gates were closed at switch-overs.")
        .times(&[], &ends.switch_overs);
    told.histogram("sterna_migration_vm_downtime_seconds", "How long VMs that moved along were paused.")
        .times(&[], &ends.vm_downtimes);
    let mut family = told.counter("sterna_migration_bytes_total", "What migrations did with bytes.");
    family.count(&[("kind", "copied")], tallies.bytes_copied);
    family.count(&[("kind", "mirrored")], tallies.bytes_mirrored);
    family.count(&[("kind", "zero")], tallies.bytes_zero);
    let mut family =
        told.counter("sterna_migration_wait_seconds_total", "How long migrations were stalled, by reason.");
    for (reason, waited) in &tallies.waits {
        family.add(&[("reason", reason)], waited.as_secs_f64());
    }
}

/// Returns the first of a migration's volumes, or the VM that waits for its turn.
fn volume(migration: &Migration) -> &str {
    migration.volume.split(", ").next().unwrap_or_default()
}
