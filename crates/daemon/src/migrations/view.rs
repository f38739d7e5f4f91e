//! Describes one migration for the API, from the journal and the lane's latest report.

use std::time::Duration;

use api::{
    Deadline, GuestLocation, ImageLocation, LimitedBy, MigrateVolume, Migration, MigrationState, Pace,
    RemainingSeconds, ReplicaUsed, Strategy, SwitchOver, WaitingFor,
};
use migration::journal::{self, FailureCode, Outcome, Place, Side, Stage, Summary};
use migration::progress::{self, Hurry};
use migration::strategy::Round;
use migration::{MigrationId, Phase, Progress, VolumeIndex};

use crate::journal::now_unix_ms;
use crate::migrations::metadata::Metadata;
use crate::migrations::registry::Live;
use crate::vms::moving::{Account, PostCopyState};

pub(crate) fn migration(id: MigrationId, state: &journal::MigrationState, live: Option<&Live>) -> Migration {
    let ended = match (&state.stage, live.and_then(|live| live.ended.as_ref())) {
        (Stage::Ended(outcome), _) => Some((outcome, &state.summary)),
        (_, Some((outcome, summary))) => Some((outcome, summary)),
        _ => None,
    };
    let moving = state.volumes.first();
    let location = |image: Option<&journal::ImageLocation>| image.map_or_else(nowhere, image_location);
    let mut shown = Migration {
        id: id.to_string(),
        volume: state.names.join(", "),
        source: location(moving.map(|moving| &moving.source)),
        target: location(moving.map(|moving| &moving.target)),
        keep_source: state.keep_source,
        seconds: seconds(state, ended.map(|(_, summary)| summary)),
        guest: guest_at(&state.stage),
        started_unix_ms: state.started_unix_ms,
        ended_unix_ms: state.ended_unix_ms,
        change: live.map_or(1, |live| live.change),
        ..begun()
    };
    if let Some(progress) = live.and_then(|live| live.progress.as_ref()) {
        add_progress(&mut shown, progress);
    }
    match ended {
        Some((outcome, _)) if live.is_some_and(|live| live.settling > 0) => {
            shown.ended_unix_ms = None;
            shown.phase = match outcome {
                Outcome::Moved { .. } => api::Phase::Retiring,
                _ => api::Phase::Discarding,
            };
        }
        Some((outcome, summary)) => add_end(&mut shown, state, outcome, summary),
        None => {}
    }
    shown
}

/// How the reason of a wait begins that an ordered limit causes.
pub(crate) const LIMIT: &str = "its limit of ";
/// The note on a migration whose volumes returned while they were incomplete.
const TAKEN_BACK: &str = "its volumes returned before all of their blocks had followed";

/// Describes a waiting migration; its identity is added when it has one.
pub(crate) fn queued(
    volume: &str,
    source: &journal::ImageLocation,
    target_store: &str,
    order: &MigrateVolume,
    ordered_unix_ms: u64,
) -> Migration {
    let source = image_location(source);
    let format = order.format.unwrap_or(source.format);
    Migration {
        name: volume.to_owned(),
        volume: volume.to_owned(),
        // The exact place of its image is chosen in its turn.
        target: ImageLocation { store: Some(target_store.to_owned()), format, ..nowhere() },
        source,
        keep_source: order.keep_source,
        // Older clients do not know the word for a strategy that is not chosen yet.
        strategy: Some(order.strategy).filter(|strategy| *strategy != Strategy::Auto),
        state: MigrationState::Queued,
        phase: api::Phase::Queued,
        started_unix_ms: ordered_unix_ms,
        ..begun()
    }
}

pub(crate) fn add_metadata(shown: &mut Migration, metadata: &Metadata) {
    let id = |number: u64| MigrationId(number).to_string();
    shown.name.clone_from(&metadata.name);
    if shown.volume.is_empty() {
        // It never began, and its volumes have left.
        shown.volume.clone_from(&metadata.name);
    }
    shown.strategy = metadata.order.as_ref().map(|order| order.strategy.begun());
    shown.strategy_reason.clone_from(&metadata.strategy_reason);
    let limit = metadata.order.as_ref().and_then(|order| order.bandwidth_bytes_per_second);
    if let (Some(waiting), Some(limit)) = (&mut shown.waiting_for, limit)
        && waiting.reason == migration::strategy::BANDWIDTH_LIMIT
    {
        *waiting = WaitingFor { reason: format!("{LIMIT}{}/s", api::Bytes(limit)), remaining_ms: None };
    }
    // Each of these waits is a few milliseconds long, and what limits the copy is said anyway.
    shown.waiting_for.take_if(|waiting| waiting.reason == migration::strategy::GUESTS_FIRST);
    let ordered = metadata.order.as_ref().and_then(|order| order.deadline_unix_ms);
    shown.deadline = ordered.map(|unix_ms| Deadline { unix_ms, ..shown.deadline.unwrap_or_default() });
    shown.forecast = metadata.forecast;
    // The journal has no such figure.
    shown.bytes_cloned = shown.bytes_cloned.max(metadata.copy.bytes_cloned);
    shown.retry_of = metadata.retry_of.map(id);
    shown.retried_as = metadata.retried_as.map(id);
    shown.goes_on = metadata.goes_on;
    shown.replica = metadata.held_bytes.map(|bytes_held| ReplicaUsed {
        bytes_held,
        bytes_spared: bytes_held.saturating_sub(shown.bytes_copied.saturating_add(shown.bytes_zero)),
    });
    shown.shared =
        !metadata.shared.is_empty() && metadata.shared.iter().all(|shared| shared.is_used == Some(true));
    if metadata.is_paused && shown.state == MigrationState::Running && shown.phase == api::Phase::Copying {
        shown.state = MigrationState::Paused;
        (shown.bytes_per_second, shown.remaining_seconds, shown.limited_by) = (0.0, None, None);
    }
    if !metadata.warnings.is_empty() {
        let said = shown.message.iter().chain(&metadata.warnings).map(String::as_str);
        shown.message = Some(said.collect::<Vec<_>>().join("; "));
    }
}

fn pace(paced: pacer::Status) -> Pace {
    let loss = if paced.has_guests { paced.loss } else { 0.0 };
    Pace {
        guests_lose_percent: (loss * 1000.0).round() / 10.0,
        bytes_per_second: paced.bytes_per_second.round(),
    }
}

fn limited_by(limit: progress::LimitedBy) -> LimitedBy {
    match limit {
        progress::LimitedBy::SourceDisk => LimitedBy::SourceDisk,
        progress::LimitedBy::TargetDisk => LimitedBy::TargetDisk,
        progress::LimitedBy::SourceGuests => LimitedBy::SourceGuests,
        progress::LimitedBy::TargetGuests => LimitedBy::TargetGuests,
        progress::LimitedBy::Link => LimitedBy::Link,
        progress::LimitedBy::Bandwidth => LimitedBy::Bandwidth,
        progress::LimitedBy::Measuring => LimitedBy::Measuring,
    }
}

/// The time itself is in the order.
fn deadline(hurry: Hurry) -> Deadline {
    // The largest impact has 90 percent.
    let percent = |impact: pacer::Impact| (impact.part() * 100.0).round() as u8;
    let raised = hurry.is_raised.then(|| hurry.impact.map_or(api::FULL_SPEED_PERCENT, percent));
    Deadline { unix_ms: 0, raised_to_percent: raised, late: hurry.is_late }
}

fn add_progress(shown: &mut Migration, progress: &Progress) {
    shown.phase = phase(progress.phase);
    if progress.phase == Phase::Releasing {
        shown.guest = GuestLocation::Unknown;
    }
    shown.fraction = progress.fraction;
    shown.bytes_missing = progress.bytes_missing;
    shown.bytes_per_second = progress.copy_bytes_per_second;
    shown.pace = progress.paced.map(pace);
    shown.limited_by = progress.limited_by.map(limited_by);
    shown.mirrored_instead = progress.tally.rounds_given_up > 0;
    shown.deadline = progress.hurry.map(deadline);
    shown.remaining_seconds = progress.remaining.map(|(earliest, latest)| RemainingSeconds {
        earliest: earliest.as_secs_f64(),
        latest: latest.as_secs_f64(),
    });
    shown.attempt = progress.attempt;
    shown.waiting_for = progress.waiting.map(|waiting| WaitingFor {
        reason: waiting.reason.to_owned(),
        remaining_ms: waiting
            .remaining
            .map(|remaining| u64::try_from(remaining.as_millis()).unwrap_or(u64::MAX)),
    });
    shown.suspended = progress.suspended.map(str::to_owned);
    shown.rounds = progress.rounds.iter().map(|(volume, told)| round(*volume, told)).collect();
    add_bytes(shown, progress.bytes_copied, progress.bytes_mirrored, progress.bytes_zero);
    shown.bytes_cloned = progress.bytes_cloned;
}

pub(crate) fn round(volume: VolumeIndex, round: &Round) -> api::Round {
    let Round { blocks, bytes, took, dirtied, put_off } = *round;
    api::Round { volume: volume.0, blocks, bytes, seconds: took.as_secs_f64(), dirtied, put_off }
}

fn add_end(shown: &mut Migration, state: &journal::MigrationState, outcome: &Outcome, summary: &Summary) {
    shown.phase = api::Phase::Ended;
    shown.bytes_per_second = 0.0;
    (shown.remaining_seconds, shown.waiting_for, shown.suspended) = (None, None, None);
    (shown.pace, shown.limited_by) = (None, None);
    // A migration that recovery ended has no summary, so the last report is kept.
    if *summary != Summary::default() {
        add_bytes(shown, summary.bytes_copied, summary.bytes_mirrored, summary.bytes_zero);
        shown.attempt = summary.attempts;
    }
    (shown.state, shown.guest) = match outcome {
        Outcome::Moved { .. } | Outcome::TakenBack => (MigrationState::Moved, GuestLocation::Target),
        Outcome::Cancelled | Outcome::CancelledThere => (MigrationState::Cancelled, GuestLocation::Source),
        // After the commit point a migration is completed or handed back, but does not fail.
        Outcome::Failed { .. } => (MigrationState::Failed, GuestLocation::Source),
        Outcome::HandedBack { .. } => (MigrationState::HandedBack, GuestLocation::Source),
    };
    shown.message = match outcome {
        Outcome::Moved { left_over } if left_over.is_empty() => stays(shown),
        Outcome::Moved { left_over } => Some(format!("left over: {left_over}")),
        Outcome::Cancelled => None,
        Outcome::CancelledThere => Some(cancelled_there(state)),
        Outcome::TakenBack => Some(TAKEN_BACK.to_owned()),
        Outcome::Failed { code: FailureCode::TargetFull, .. } => Some(format!(
            "the store {} is full: make room there, then run: sterna migration retry {}",
            shown.target.store.as_deref().unwrap_or(&shown.target.image),
            shown.id
        )),
        Outcome::Failed { code: FailureCode::GivenUp, detail } => Some(given_up(state, detail)),
        Outcome::Failed { detail, .. } | Outcome::HandedBack { detail } => Some(detail.clone()),
    };
    if let Outcome::Failed { code, .. } = outcome {
        shown.failure = Some(failure_name(*code).to_owned());
    }
    if shown.state == MigrationState::Moved && *outcome != Outcome::TakenBack {
        (shown.fraction, shown.bytes_missing) = (1.0, Some(0));
        shown.switch_over = (summary.gate_closed_us > 0).then(|| switch_over(summary));
    }
}

/// Adds where the reason is recorded, and which order repeats the migration.
fn given_up(state: &journal::MigrationState, detail: &str) -> String {
    match &state.side {
        Side::Incoming { peer_name, remote, .. } => format!(
            "{detail}; at host {peer_name}, sterna migration show {remote} has the reason, and sterna migration retry {remote} moves it \
             again"
        ),
        Side::OneHost | Side::Outgoing { .. } => detail.to_owned(),
    }
}

fn cancelled_there(state: &journal::MigrationState) -> String {
    match &state.side {
        Side::Outgoing { peer_name, .. } | Side::Incoming { peer_name, .. } => {
            format!("an administrator cancelled it at the other host, \"{peer_name}\"")
        }
        Side::OneHost => "an administrator cancelled it at the other host".to_owned(),
    }
}

/// Returns what remains of the old image, and under which name.
fn stays(shown: &Migration) -> Option<String> {
    if shown.source.kind == api::ImageKind::File {
        // Images that were served in place are kept as well. The other host's image has no path here.
        let is_kept = shown.keep_source || shown.source.store.is_none();
        return (is_kept && !shown.source.image.is_empty()).then(|| {
            format!(
                "the old image is kept as {}.moved-{} (sterna replica list): do not start anything from it",
                shown.source.image, shown.id
            )
        });
    }
    let kept = if shown.keep_source { "kept" } else { "old" };
    Some(format!(
        "{} still holds the {kept} copy; it is fenced: do not start anything from it",
        shown.source.image
    ))
}

fn add_bytes(shown: &mut Migration, copied: u64, mirrored: u64, zero: u64) {
    (shown.bytes_copied, shown.bytes_mirrored, shown.bytes_zero) = (copied, mirrored, zero);
    shown.bytes_moved = copied.saturating_add(mirrored);
}

fn seconds(state: &journal::MigrationState, summary: Option<&Summary>) -> f64 {
    match summary {
        Some(summary) if summary.total_us > 0 => Duration::from_micros(summary.total_us).as_secs_f64(),
        _ => {
            let until = state.ended_unix_ms.unwrap_or_else(now_unix_ms);
            // A wall clock that was set back must not cause a negative time.
            Duration::from_millis(until.saturating_sub(state.started_unix_ms)).as_secs_f64()
        }
    }
}

fn switch_over(summary: &Summary) -> SwitchOver {
    let milliseconds = |microseconds: u64| microseconds as f64 / 1000.0;
    SwitchOver {
        gate_closed_ms: milliseconds(summary.gate_closed_us),
        drain_ms: milliseconds(summary.drain_us),
        prepare_ms: milliseconds(summary.prepare_us),
        release_ms: milliseconds(summary.release_us),
        own_ms: milliseconds(summary.own_us),
        start_ms: milliseconds(summary.start_us),
    }
}

fn guest_at(stage: &Stage) -> GuestLocation {
    match stage {
        Stage::Copying | Stage::Prepared(_) | Stage::HandedBack | Stage::Discarding(_) => {
            GuestLocation::Source
        }
        Stage::Released(_) | Stage::Owned(_) | Stage::Ended(Outcome::Moved { .. } | Outcome::TakenBack) => {
            GuestLocation::Target
        }
        Stage::Ended(_) => GuestLocation::Source,
    }
}

/// Converts the place of an image for the API.
pub(crate) fn image_location(image: &journal::ImageLocation) -> ImageLocation {
    let store = (!image.is_adopted()).then(|| image.store.clone());
    let kind = match image.place {
        Place::File(_) => api::ImageKind::File,
        Place::Device(_) => api::ImageKind::Device,
        Place::Nbd(_) => api::ImageKind::Nbd,
    };
    let format = api_format(image.format);
    ImageLocation { store, image: image.place.name().to_owned(), kind, format }
}

pub(crate) fn api_format(format: journal::ImageFormat) -> api::ImageFormat {
    match format {
        journal::ImageFormat::Raw => api::ImageFormat::Raw,
        journal::ImageFormat::Qcow2 => api::ImageFormat::Qcow2,
    }
}

pub(crate) fn image_format(format: api::ImageFormat) -> journal::ImageFormat {
    match format {
        api::ImageFormat::Raw => journal::ImageFormat::Raw,
        api::ImageFormat::Qcow2 => journal::ImageFormat::Qcow2,
    }
}

/// Converts the state of a VM that moves along for the API.
pub(crate) fn machine(account: &Account) -> api::MachineMove {
    let memory = account.memory.as_ref().map(|memory| api::MemoryMove {
        total_bytes: memory.total_bytes,
        remaining_bytes: memory.remaining_bytes,
        sent_bytes: memory.transferred_bytes,
        rounds: memory.rounds,
        dirty_bytes_per_second: memory.dirty_bytes_per_s,
        bytes_per_second: memory.bandwidth_bytes_per_s,
        throttle_percent: memory.throttle_percent,
        streams: account.streams.max(1),
        post_copy: account.post_copy.is_some(),
    });
    let milliseconds = |duration: Duration| duration.as_secs_f64() * 1000.0;
    let downtime = account.downtime().map(|(loading, handing_over)| api::MachineDowntime {
        total_ms: milliseconds(loading + handing_over),
        memory_ms: milliseconds(loading),
        handover_ms: milliseconds(handing_over),
    });
    api::MachineMove { memory, downtime }
}

/// Adds that the VM runs at the target, and that the rest of its memory is still coming.
pub(crate) fn add_rest(shown: &mut Migration, account: &Account) {
    if account.post_copy == Some(PostCopyState::OnItsWay) && shown.phase == api::Phase::Retiring {
        let reason = "the rest of the VM's memory, without which the VM can stall at the target";
        shown.waiting_for = Some(WaitingFor { reason: reason.to_owned(), remaining_ms: None });
    }
}

/// Adds why a migration cannot continue at the moment.
pub(crate) fn add_obstacle(shown: &mut Migration, obstacle: Option<String>) {
    if let Some(reason) = obstacle.filter(|_| shown.state == MigrationState::Running) {
        shown.waiting_for = Some(WaitingFor { reason, remaining_ms: None });
    }
}

fn begun() -> Migration {
    Migration {
        id: String::new(),
        name: String::new(),
        volume: String::new(),
        source: nowhere(),
        target: nowhere(),
        keep_source: false,
        strategy: None,
        strategy_reason: String::new(),
        mirrored_instead: false,
        rounds: Vec::new(),
        state: MigrationState::Running,
        phase: api::Phase::Copying,
        fraction: 0.0,
        bytes_copied: 0,
        bytes_mirrored: 0,
        bytes_zero: 0,
        bytes_cloned: 0,
        bytes_moved: 0,
        bytes_missing: None,
        bytes_per_second: 0.0,
        seconds: 0.0,
        remaining_seconds: None,
        attempt: 0,
        waiting_for: None,
        suspended: None,
        pace: None,
        limited_by: None,
        deadline: None,
        forecast: None,
        ticket: None,
        queue: None,
        shared: false,
        replica: None,
        retry_of: None,
        retried_as: None,
        goes_on: false,
        machine: None,
        switch_over: None,
        failure: None,
        message: None,
        guest: GuestLocation::Source,
        started_unix_ms: 0,
        ended_unix_ms: None,
        change: 1,
    }
}

fn nowhere() -> ImageLocation {
    ImageLocation {
        store: None,
        image: String::new(),
        kind: api::ImageKind::File,
        format: api::ImageFormat::Raw,
    }
}

pub(crate) fn phase(phase: Phase) -> api::Phase {
    match phase {
        Phase::Copying => api::Phase::Copying,
        Phase::Memory => api::Phase::Memory,
        Phase::Closing => api::Phase::Closing,
        Phase::Preparing => api::Phase::Preparing,
        Phase::Releasing => api::Phase::Releasing,
        Phase::Committing => api::Phase::Committing,
        Phase::Filling => api::Phase::Filling,
        Phase::Retiring => api::Phase::Retiring,
        Phase::TakingBack => api::Phase::TakingBack,
        Phase::Discarding => api::Phase::Discarding,
        Phase::Ended => api::Phase::Ended,
    }
}

pub(crate) fn failure_name(code: FailureCode) -> &'static str {
    match code {
        FailureCode::TargetFull => "target-full",
        FailureCode::TargetFaulty => "target-faulty",
        FailureCode::TargetHung => "target-hung",
        FailureCode::SourceUnreadable => "source-unreadable",
        FailureCode::HandoverRefused => "handover-refused",
        FailureCode::DaemonStopped => "daemon-stopped",
        FailureCode::Internal => "internal",
        FailureCode::HostRefused => "host-refused",
        FailureCode::PromotedElsewhere => "promoted-elsewhere",
        FailureCode::GivenUp => "given-up",
        FailureCode::VmStayed => "machine-stayed",
        FailureCode::NotBegun => "not-begun",
        FailureCode::HookFailed => "hook-failed",
        FailureCode::NotConverging => "not-converging",
    }
}
