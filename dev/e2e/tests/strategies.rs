//! Tests of volumes that are copied in rounds (`--strategy tracking`) while real clients write: between stores, between hosts,
//! with a VM, without convergence, with cancellations, and with restarts.

use anyhow::{Context as _, ensure};
use api::{Migration, MigrationPlan, MigrationState, Phase, Strategy};
use e2e::{Host, Pair, guest, play, play_pair, until, vm};
use lab::workload::Guest;

const DISK_BYTES: u64 = 32 << 20;
const FILL_BYTES: u64 = 16 << 20;
/// A rate at which the first round takes a while.
const SLOWLY: &str = "6MiB/s";
/// A rate at which a guest writes more in a round than the round copies.
const TOO_SLOWLY: &str = "8MiB/s";
const WORK_REQUESTS: u64 = 2000;

fn start_guest(scene: &Host) -> anyhow::Result<Guest> {
    scene.create_volume(DISK_BYTES)?;
    guest::start(&scene.export()?, FILL_BYTES)
}

/// Moves the volume `v` in rounds, and checks the migration's record.
fn track(scene: &Host, to: &str) -> anyhow::Result<Migration> {
    let ended: Migration = scene.ask(&["migrate", "v", "--to", to, "--strategy", "tracking"])?;
    ensure!(ended.state == MigrationState::Moved, "{ended:?}");
    let shown = scene.migration(&ended.id)?;
    check_tracked(&shown)?;
    Ok(shown)
}

fn check_tracked(shown: &Migration) -> anyhow::Result<()> {
    ensure!(shown.strategy == Some(Strategy::Tracking), "{shown:?}");
    ensure!(shown.bytes_mirrored == 0, "something was mirrored: {shown:?}");
    let copied: u64 = shown.rounds.iter().map(|round| round.bytes).sum();
    ensure!(!shown.rounds.is_empty() && copied <= shown.bytes_copied, "{shown:?}");
    Ok(())
}

fn begin(scene: &Host, to: &str, rate: &str) -> anyhow::Result<Migration> {
    let order = ["migrate", "v", "--to", to, "--strategy", "tracking", "--bandwidth", rate, "--detach"];
    scene.ask(&order)
}

fn cancel(scene: &Host, begun: &Migration) -> anyhow::Result<()> {
    scene.sterna(["migration", "cancel", &begun.id])?.success()?;
    let ended = scene.wait_for_migration(&begun.id)?;
    ensure!(ended.state == MigrationState::Cancelled, "{ended:?}");
    Ok(())
}

/// Waits until `count` rounds have ended.
fn until_rounds(scene: &Host, begun: &Migration, rounds: usize) -> anyhow::Result<()> {
    until("a round ends", || {
        let shown = scene.migration(&begun.id)?;
        ensure!(!shown.state.has_ended(), "{shown:?}");
        Ok((shown.rounds.len() >= rounds).then_some(()))
    })
}

#[test]
fn a_volume_that_nobody_writes_to_takes_one_round() {
    play(|scene| {
        let guest = start_guest(scene)?;
        let stopped = guest::stop_and_verify(guest)?;
        let shown = track(scene, "b")?;
        ensure!(shown.rounds.len() == 1 && shown.rounds[0].dirtied == 0, "{:?}", shown.rounds);
        ensure!(shown.rounds[0].bytes == shown.bytes_copied, "{shown:?}");
        let report = scene.path("report.html");
        let page = report.to_str().context("a path")?;
        scene.sterna(["migration", "report", &shown.id, "--output", page])?.success()?;
        let report = std::fs::read_to_string(&report)?;
        ensure!(report.contains("dirty block tracking"), "the report names the strategy");
        scene.stop()?;
        guest::verify_image(&scene.path("b/v.img"), &stopped.content)
    });
}

#[test]
fn a_volume_in_use_moves_between_stores_in_rounds_and_keeps_every_write() {
    play(|scene| {
        let guest = start_guest(scene)?;
        for to in ["b", "a", "b"] {
            guest::until_worked(&guest, WORK_REQUESTS)?;
            track(scene, to)?;
            scene.check_place(to)?;
        }
        guest::stop_and_verify(guest).map(drop)
    });
}

#[test]
fn a_volume_in_use_goes_to_another_host_in_rounds_and_comes_home() {
    play_pair(|pair| {
        let guest = start_guest(&pair.alpha)?;
        for _ in 0..2 {
            track(&pair.alpha, "beta:a")?;
            pair.check_at(&pair.beta, &pair.alpha)?;
            guest::until_worked(&guest, WORK_REQUESTS)?;
            track(&pair.beta, "alpha:a")?;
            pair.check_at(&pair.alpha, &pair.beta)?;
        }
        guest::stop_and_verify(guest).map(drop)
    });
}

/// Returns a rate at which a round copies less than the guest writes meanwhile, however slow this machine is at present.
fn too_slowly(guest: &Guest) -> anyhow::Result<String> {
    let before = guest.mark();
    guest::until_worked(guest, WORK_REQUESTS)?;
    let requests = guest.between(&before, &guest.mark()).iops;
    // A request writes more than a KiB on average.
    Ok(format!("{}KiB/s", (requests as u64).clamp(1 << 10, 8 << 10)))
}

/// Moves it so slowly, with such a short downtime, that it does not converge. Checks that it stays, and the message.
fn given_up(scene: &Host, guest: &Guest, to: &str) -> anyhow::Result<()> {
    let rate = too_slowly(guest)?;
    // The last round has no bandwidth limit, so a fast disk copies it within the usual downtime.
    let order = ["migrate", "v", "--to", to, "--strategy", "tracking", "--detach"];
    let begun: Migration =
        scene.ask(&[&order[..], &["--bandwidth", &rate, "--max-downtime", "4"]].concat())?;
    let ended = scene.wait_for_migration(&begun.id)?;
    ensure!(ended.state == MigrationState::Failed, "{ended:?}");
    ensure!(ended.failure.as_deref() == Some("not-converging"), "{ended:?}");
    let message = ended.message.as_deref().unwrap_or_default();
    for said in ["after", "rounds", "MiB a second", "--strategy mirror", "--max-downtime"] {
        ensure!(message.contains(said), "{said}: {message}");
    }
    ensure!(ended.rounds.len() >= 3 && ended.attempt == 0, "{ended:?}");
    println!("{message}");
    Ok(())
}

/// Moves it as slowly, and lets a mirror follow the rounds.
fn mirrored_instead(scene: &Host, guest: &Guest, to: &str) -> anyhow::Result<()> {
    let rate = too_slowly(guest)?;
    let order = ["migrate", "v", "--to", to, "--strategy", "tracking", "--or-mirror", "--detach"];
    let begun: Migration =
        scene.ask(&[&order[..], &["--bandwidth", &rate, "--max-downtime", "4"]].concat())?;
    until("the rounds are given up", || Ok(scene.migration(&begun.id)?.mirrored_instead.then_some(())))?;
    let shown = scene.sterna(["migration", "show", &begun.id])?;
    ensure!(shown.stdout.contains("a mirror goes on"), "{shown:?}");
    scene.sterna(["migration", "set", &begun.id, "--bandwidth", "none"])?.success()?;
    let ended = scene.wait_for_migration(&begun.id)?;
    ensure!(ended.state == MigrationState::Moved && ended.rounds.len() >= 3, "{ended:?}");
    Ok(())
}

#[test]
fn rounds_that_do_not_converge_are_followed_by_a_mirror_if_that_is_ordered() {
    play(|scene| {
        let guest = start_guest(scene)?;
        mirrored_instead(scene, &guest, "b")?;
        scene.check_place("b")?;
        guest::stop_and_verify(guest).map(drop)
    });
}

#[test]
fn rounds_to_another_host_that_do_not_converge_are_followed_by_a_mirror_if_that_is_ordered() {
    play_pair(|pair| {
        let guest = start_guest(&pair.alpha)?;
        mirrored_instead(&pair.alpha, &guest, "beta:a")?;
        pair.check_at(&pair.beta, &pair.alpha)?;
        guest::stop_and_verify(guest).map(drop)
    });
}

#[test]
fn a_guest_that_writes_faster_than_is_copied_stays_and_mirroring_moves_it() {
    play(|scene| {
        let guest = start_guest(scene)?;
        given_up(scene, &guest, "b")?;
        scene.check_place("a")?;
        scene.migrate("b")?;
        guest::stop_and_verify(guest).map(drop)
    });
}

#[test]
fn a_guest_that_writes_faster_than_is_copied_stays_at_its_host_and_mirroring_moves_it() {
    play_pair(|pair| {
        let guest = start_guest(&pair.alpha)?;
        given_up(&pair.alpha, &guest, "beta:a")?;
        pair.check_at(&pair.alpha, &pair.beta)?;
        pair.leave()?;
        guest::stop_and_verify(guest).map(drop)
    });
}

#[test]
fn who_allows_a_long_downtime_gets_there_although_the_guest_writes_faster_than_is_copied() {
    play(|scene| {
        let guest = start_guest(scene)?;
        let order = [
            "migrate",
            "v",
            "--to",
            "b",
            "--strategy",
            "tracking",
            "--bandwidth",
            TOO_SLOWLY,
            "--max-downtime",
            "30000",
        ];
        let ended: Migration = scene.ask(&order)?;
        ensure!(ended.state == MigrationState::Moved, "{ended:?}");
        check_tracked(&ended)?;
        guest::stop_and_verify(guest).map(drop)
    });
}

#[test]
fn a_copying_in_rounds_that_is_cancelled_leaves_nothing_and_the_next_one_succeeds() {
    play(|scene| {
        let guest = start_guest(scene)?;
        for rounds in [0, 1] {
            let begun = begin(scene, "b", TOO_SLOWLY)?;
            until_rounds(scene, &begun, rounds)?;
            cancel(scene, &begun)?;
            scene.check_place("a")?;
        }
        track(scene, "b")?;
        guest::stop_and_verify(guest).map(drop)
    });
}

#[test]
fn a_copying_in_rounds_that_is_cancelled_leaves_nothing_at_the_other_host_and_the_next_one_succeeds() {
    play_pair(|pair| {
        let guest = start_guest(&pair.alpha)?;
        for rounds in [0, 1] {
            let begun = begin(&pair.alpha, "beta:a", TOO_SLOWLY)?;
            until_rounds(&pair.alpha, &begun, rounds)?;
            cancel(&pair.alpha, &begun)?;
            pair.check_at(&pair.alpha, &pair.beta)?;
        }
        track(&pair.alpha, "beta:a")?;
        guest::stop_and_verify(guest).map(drop)
    });
}

#[test]
fn a_copying_in_rounds_goes_on_as_such_after_either_host_was_killed() {
    play_pair(|pair| {
        let guest = start_guest(&pair.alpha)?;
        let stopped = guest::stop_and_verify(guest)?;
        let begun = begin(&pair.alpha, "beta:a", SLOWLY)?;
        let copied = |pair: &Pair, bytes: u64| {
            until("a part is copied", || {
                Ok((pair.alpha.migration(&begun.id)?.bytes_copied >= bytes).then_some(()))
            })
        };
        copied(pair, FILL_BYTES / 4)?;
        pair.beta.kill()?;
        pair.beta.start()?;
        copied(pair, FILL_BYTES / 2)?;
        pair.alpha.kill()?;
        pair.alpha.start()?;
        let ended = pair.alpha.wait_for_migration(&begun.id)?;
        ensure!(ended.state == MigrationState::Moved, "{ended:?}");
        check_tracked(&pair.alpha.migration(&begun.id)?)?;
        pair.check_at(&pair.beta, &pair.alpha)?;
        pair.beta.stop()?;
        guest::verify_image(&pair.beta.path("a/v.img"), &stopped.content)
    });
}

#[test]
fn a_machine_goes_to_another_host_with_a_disk_that_is_copied_in_rounds() {
    play_pair(|pair| {
        pair.alpha.create_volume(2 * DISK_BYTES)?;
        let console = vm::start(&pair.alpha, FILL_BYTES)?;
        console.work_on(100)?;
        let order = ["migrate", vm::NAME, "--to", "beta:a", "--strategy", "tracking"];
        let moved: Migration = pair.alpha.ask(&order)?;
        ensure!(moved.state == MigrationState::Moved, "{moved:?}");
        check_tracked(&pair.alpha.migration(&moved.id)?)?;
        ensure!(moved.phase == Phase::Ended, "{moved:?}");
        vm::check_at(&pair.beta, &pair.alpha)?;
        console.work_on(100)?;
        console.verify()
    });
}

#[test]
fn an_option_of_tracking_is_refused_without_it() {
    play(|scene| {
        scene.create_volume(DISK_BYTES)?;
        let refused = scene.sterna(["migrate", "v", "--to", "b", "--no-incremental"])?;
        ensure!(refused.code != 0 && refused.stderr.contains("tracking"), "{refused:?}");
        let full = scene.ask::<Migration>(&[
            "migrate",
            "v",
            "--to",
            "b",
            "--strategy",
            "tracking",
            "--no-incremental",
        ])?;
        check_tracked_or_empty(&full)
    });
}

#[test]
fn a_strategy_is_chosen_with_a_reason_and_a_retry_chooses_anew_unless_it_was_ordered() {
    play(|scene| {
        scene.create_volume(DISK_BYTES)?;
        guest::stop_and_verify(guest::start(&scene.export()?, FILL_BYTES)?)?;
        let planned: MigrationPlan = scene.ask(&["migrate", "v", "--to", "b", "--dry-run"])?;
        ensure!(planned.strategy == Strategy::Mirror && !planned.strategy_reason.is_empty(), "{planned:?}");
        let slowly = ["migrate", "v", "--to", "b", "--bandwidth", "16KiB/s", "--detach"];
        let ordered = [slowly.as_slice(), &["--strategy", "mirror"]].concat();
        for (order, is_chosen) in [(slowly.as_slice(), true), (ordered.as_slice(), false)] {
            let begun: Migration = scene.ask(order)?;
            cancel(scene, &begun)?;
            let again: Migration = scene.ask(&["migration", "retry", &begun.id, "--detach"])?;
            cancel(scene, &again)?;
            for id in [&begun.id, &again.id] {
                let shown = scene.migration(id)?;
                ensure!(shown.strategy == Some(Strategy::Mirror), "{shown:?}");
                ensure!(shown.strategy_reason.is_empty() != is_chosen, "{shown:?}");
            }
            let said = scene.sterna(["migration", "show", &begun.id])?.success()?;
            ensure!(said.contains("between stores of one host") == is_chosen, "{said}");
        }
        Ok(())
    });
}

/// An empty volume may take no chunk at all.
fn check_tracked_or_empty(shown: &Migration) -> anyhow::Result<()> {
    ensure!(shown.state == MigrationState::Moved && shown.strategy == Some(Strategy::Tracking), "{shown:?}");
    Ok(())
}
