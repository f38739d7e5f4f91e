//! Tests of the strategies that copy everything before the handover, under different loads, up to more than the target can take:
//! between stores, between hosts, with a VM. A moved volume has every write, and a failure has its numbers. After a cancellation
//! in any phase nothing is left, and the next migration succeeds.

use std::num::{NonZeroU32, NonZeroU64};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use api::{GuestLocation, Migration, MigrationState, Phase, Strategy};
use e2e::vm::Work;
use e2e::{Host, Pair, guest, play_pair, play_unstarted, until, vm};
use lab::workload::{Guest, GuestOptions, Mix};

const DISK_BYTES: u64 = 32 << 20;
const FILL_BYTES: u64 = 16 << 20;
/// Rate of a target that is slower than its guest.
const SLOW_BYTES: u64 = 8 << 20;
/// Number of requests after which a guest counts as at work.
const WORK_REQUESTS: u64 = 500;
const STRATEGIES: [Strategy; 2] = [Strategy::Mirror, Strategy::Tracking];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Load {
    /// It has worked before, and is idle.
    Idle,
    /// Half as many requests are in flight.
    Half,
    Sixteen,
    /// All of them are writes, and the target is slow.
    FasterThanTheTarget,
}

impl Load {
    const ALL: [Self; 4] = [Self::Idle, Self::Half, Self::Sixteen, Self::FasterThanTheTarget];

    fn in_flight(self) -> u32 {
        if self == Self::Half { 8 } else { 16 }
    }

    fn work(self) -> anyhow::Result<GuestOptions> {
        let in_flight = NonZeroU32::new(self.in_flight()).context("some are in flight")?;
        let requests_max = (self == Self::Idle).then(|| NonZeroU64::new(WORK_REQUESTS)).flatten();
        let only_writes = Mix { writes: Mix::WHOLE, durable_writes: 0, flushes: 0, trims: 0, zeroes: 0 };
        let mix = if self == Self::FasterThanTheTarget { only_writes } else { Mix::default() };
        Ok(GuestOptions { in_flight, mix, requests_max, ..GuestOptions::default() })
    }

    fn store(self, store: &str) -> String {
        match self {
            Self::FasterThanTheTarget => format!("[stores.{store}.delay]\nbytes_per_second = {SLOW_BYTES}\n"),
            Self::Idle | Self::Half | Self::Sixteen => String::new(),
        }
    }

    fn vm_work(self) -> Work {
        let workers = if self == Self::Idle { 0 } else { self.in_flight() };
        let usual = Work { workers, ..Work::on_disk(FILL_BYTES / 2) };
        match self {
            Self::FasterThanTheTarget => Work { pause: Duration::ZERO, ..usual },
            Self::Idle | Self::Half | Self::Sixteen => usual,
        }
    }

    fn start(self, scene: &Host) -> anyhow::Result<Guest> {
        scene.create_volume(DISK_BYTES)?;
        let guest = guest::start_with(&scene.export()?, FILL_BYTES, self.work()?)?;
        guest::until_worked(&guest, WORK_REQUESTS)?;
        Ok(guest)
    }

    fn end(self, guest: Guest) -> anyhow::Result<()> {
        match self {
            Self::Idle => guest::rest(guest).map(drop),
            Self::Half | Self::Sixteen | Self::FasterThanTheTarget => guest::stop_and_verify(guest).map(drop),
        }
    }
}

fn name(strategy: Strategy) -> &'static str {
    if strategy == Strategy::Tracking { "tracking" } else { "mirror" }
}

fn begin(scene: &Host, what: &str, to: &str, strategy: Strategy) -> anyhow::Result<Migration> {
    let order = ["migrate", what, "--to", to, "--strategy", name(strategy), "--detach"];
    until("the other host can be reached", || Ok(scene.ask(&order).ok()))
}

/// Checks that a load that rounds can follow did not fail.
fn check_not_refused(has_moved: bool, load: Load) -> anyhow::Result<()> {
    // On a busy machine rounds may not keep up with sixteen requests.
    ensure!(has_moved || matches!(load, Load::Sixteen | Load::FasterThanTheTarget), "{load:?} was too much");
    Ok(())
}

/// Moves the volume. Returns whether it moved, or failed with its numbers, as only rounds may.
fn moves(scene: &Host, what: &str, to: &str, strategy: Strategy) -> anyhow::Result<bool> {
    let begun = begin(scene, what, to, strategy)?;
    scene.wait_for_migration(&begun.id)?;
    let shown = scene.migration(&begun.id)?;
    ensure!(shown.strategy == Some(strategy), "{shown:?}");
    if strategy == Strategy::Tracking {
        ensure!(shown.bytes_mirrored == 0 && !shown.rounds.is_empty(), "{shown:?}");
    }
    if shown.state == MigrationState::Moved {
        return Ok(true);
    }
    let message = shown.message.as_deref().unwrap_or_default();
    let says_why =
        ["rounds", "MiB a second", "--strategy mirror"].iter().all(|words| message.contains(words));
    ensure!(strategy == Strategy::Tracking && says_why, "{shown:?}");
    ensure!(shown.failure.as_deref() == Some("not-converging"), "{shown:?}");
    ensure!(shown.guest == GuestLocation::Source, "{shown:?}");
    Ok(false)
}

fn between_stores(strategy: Strategy, load: Load) {
    play_unstarted(|scene| {
        scene.configure(&load.store("b"))?;
        scene.start()?;
        let guest = load.start(scene)?;
        let has_moved = moves(scene, "v", "b", strategy)?;
        scene.check_place(if has_moved { "b" } else { "a" })?;
        check_not_refused(has_moved, load)?;
        load.end(guest)
    });
}

fn configure_beta(pair: &mut Pair, more: &str) -> anyhow::Result<()> {
    if more.is_empty() {
        return Ok(());
    }
    pair.beta.stop()?;
    pair.beta.configure(more)?;
    pair.beta.start()
}

fn between_hosts(strategy: Strategy, load: Load) {
    play_pair(|pair| {
        configure_beta(pair, &load.store("a"))?;
        let guest = load.start(&pair.alpha)?;
        let has_moved = moves(&pair.alpha, "v", "beta:a", strategy)?;
        let (owner, other) = if has_moved { (&pair.beta, &pair.alpha) } else { (&pair.alpha, &pair.beta) };
        pair.check_at(owner, other)?;
        check_not_refused(has_moved, load)?;
        load.end(guest)
    });
}

fn with_a_vm(strategy: Strategy, load: Load) {
    play_pair(|pair| {
        configure_beta(pair, &load.store("a"))?;
        pair.alpha.create_volume(DISK_BYTES)?;
        let console = vm::start_busy(&pair.alpha, &["v"], load.vm_work())?;
        let has_moved = moves(&pair.alpha, vm::NAME, "beta:a", strategy)?;
        let (there, elsewhere) =
            if has_moved { (&pair.beta, &pair.alpha) } else { (&pair.alpha, &pair.beta) };
        vm::check_at(there, elsewhere)?;
        check_not_refused(has_moved, load)?;
        if load != Load::Idle {
            console.work_on(100)?;
        }
        console.verify()
    });
}

#[test]
fn between_stores_a_volume_moves_under_every_load_or_is_refused_with_numbers() {
    for strategy in STRATEGIES {
        Load::ALL.into_iter().for_each(|load| between_stores(strategy, load));
    }
}

#[test]
fn between_hosts_a_volume_moves_under_every_load_or_is_refused_with_numbers() {
    for strategy in STRATEGIES {
        Load::ALL.into_iter().for_each(|load| between_hosts(strategy, load));
    }
}

#[test]
fn a_vm_moves_with_its_disk_under_every_load_or_is_refused_with_numbers() {
    for strategy in STRATEGIES {
        Load::ALL.into_iter().for_each(|load| with_a_vm(strategy, load));
    }
}

/// Phases of the cancellation, and whether it must succeed there.
const CANCELLED_IN: [(Phase, bool); 6] = [
    (Phase::Copying, true),
    (Phase::Closing, false),
    (Phase::Preparing, false),
    (Phase::Releasing, false),
    (Phase::Committing, false),
    (Phase::Retiring, false),
];

/// Cancels a migration to `to` in a phase, or just after it. Returns whether it has moved nevertheless.
fn cancelled_in(scene: &Host, to: &str, strategy: Strategy, phase: Phase) -> anyhow::Result<bool> {
    let begun = begin(scene, "v", to, strategy)?;
    until("the phase is entered, or gone by", || {
        let shown = scene.migration(&begun.id)?;
        let is_there = shown.phase as u8 >= phase as u8 || shown.state.has_ended();
        Ok(is_there.then_some(()))
    })?;
    // After the commit point a cancellation is refused with a message.
    let cancelled = scene.sterna(["migration", "cancel", &begun.id])?;
    let ended = scene.wait_for_migration(&begun.id)?;
    ensure!(matches!(ended.state, MigrationState::Cancelled | MigrationState::Moved), "{ended:?}");
    ensure!(cancelled.code != 0 || ended.state == MigrationState::Cancelled, "{cancelled:?} {ended:?}");
    Ok(ended.state == MigrationState::Moved)
}

/// Delays that make phases long enough: requests that the closing gate waits for, and the flush before *prepared*.
fn slowed(source: &str, target: &str) -> String {
    format!("[stores.{source}.delay]\nwrite_us = 100000\n[stores.{target}.delay]\nflush_us = 150000\n")
}

#[test]
fn whatever_phase_a_move_between_stores_is_cancelled_in_nothing_is_left_and_the_next_one_succeeds() {
    for strategy in STRATEGIES {
        play_unstarted(|scene| {
            scene.configure(&slowed("a", "b"))?;
            scene.start()?;
            let guest = Load::Half.start(scene)?;
            for (phase, in_time) in CANCELLED_IN {
                let has_moved = cancelled_in(scene, "b", strategy, phase)?;
                scene.check_place(if has_moved { "b" } else { "a" })?;
                ensure!(!(in_time && has_moved), "it was too late in {phase:?}");
                let next = if has_moved { "a" } else { "b" };
                // Rounds do not converge on such a slow store.
                let strategy = if has_moved { Strategy::Mirror } else { strategy };
                ensure!(moves(scene, "v", next, strategy)?, "the next one was refused");
                scene.check_place(next)?;
                if !has_moved {
                    ensure!(moves(scene, "v", "a", Strategy::Mirror)?, "the way back was refused");
                }
            }
            Load::Half.end(guest)
        });
    }
}

#[test]
fn whatever_phase_a_move_between_hosts_is_cancelled_in_nothing_is_left_and_the_next_one_succeeds() {
    for strategy in STRATEGIES {
        play_pair(|pair| {
            configure_beta(pair, "[stores.a.delay]\nflush_us = 150000\n")?;
            let guest = Load::Half.start(&pair.alpha)?;
            for (phase, in_time) in CANCELLED_IN {
                let has_moved = cancelled_in(&pair.alpha, "beta:a", strategy, phase)?;
                ensure!(!(in_time && has_moved), "it was too late in {phase:?}");
                if !has_moved {
                    pair.check_at(&pair.alpha, &pair.beta)?;
                    ensure!(moves(&pair.alpha, "v", "beta:a", strategy)?, "the next one was refused");
                }
                pair.check_at(&pair.beta, &pair.alpha)?;
                ensure!(moves(&pair.beta, "v", "alpha:a", strategy)?, "the way home was refused");
                pair.check_at(&pair.alpha, &pair.beta)?;
            }
            Load::Half.end(guest)
        });
    }
}
