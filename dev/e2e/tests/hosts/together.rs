//! Tests of several volumes in one migration without a VM: all of them move, or none.

use anyhow::{Context as _, ensure};
use api::{Migration, MigrationPlan, MigrationState, Volume};
use e2e::{Host, Pair, guest, play_pair, until};
use lab::workload::Guest;

const DISK_BYTES: &str = "16MiB";
const FILL_BYTES: u64 = 4 << 20;
/// A rate at which a migration takes a while.
const SLOWLY: &str = "4MiB/s";
/// Number of requests after which a guest counts as at work.
const WORK_REQUESTS: u64 = 200;

/// Makes volumes at alpha, each with a guest that works on it.
fn start(pair: &Pair, names: &[&str]) -> anyhow::Result<Vec<Guest>> {
    let guests = names.iter().map(|name| {
        pair.alpha.sterna(["volume", "create", name, "--size", DISK_BYTES, "--store", "a"])?.success()?;
        let volume: Volume = pair.alpha.ask(&["volume", "show", name])?;
        guest::start(&volume.uri.parse()?, FILL_BYTES)
    });
    guests.collect()
}

fn begin(from: &Host, names: &[&str], to: &str, more: &[&str]) -> anyhow::Result<Migration> {
    from.ask(&[&["migrate"], names, &["--to", to, "--detach"], more].concat())
}

fn work(guests: &[Guest]) -> anyhow::Result<()> {
    guests.iter().try_for_each(|guest| guest::until_worked(guest, WORK_REQUESTS))
}

fn verify(guests: Vec<Guest>) -> anyhow::Result<()> {
    guests.into_iter().try_for_each(|guest| guest::stop_and_verify(guest).map(drop))
}

#[test]
fn two_volumes_and_three_go_to_another_host_as_one_and_come_home() {
    play_pair(|pair| {
        let names = ["data", "log", "root"];
        let guests = start(pair, &names)?;
        for count in [2, 3] {
            let names = &names[..count];
            for (from, to) in [(&pair.alpha, "beta:a"), (&pair.beta, "alpha:a")] {
                let moved: Migration = from.ask(&[&["migrate"], names, &["--to", to]].concat())?;
                ensure!(moved.state == MigrationState::Moved, "{moved:?}");
                ensure!(moved.volume == names.join(", "), "{moved:?}");
                work(&guests)?;
            }
        }
        let migrations: Vec<Migration> = pair.alpha.ask(&["migration", "list"])?;
        ensure!(migrations.len() == 4, "{migrations:?}");
        verify(guests)
    });
}

#[test]
fn what_keeps_one_volume_keeps_all_of_them() {
    play_pair(|pair| {
        let names = ["data", "log", "root"];
        let guests = start(pair, &names)?;
        let refused = |words: &[&str], code: i32, expected: &str| -> anyhow::Result<()> {
            let outcome = pair.alpha.sterna(["migrate"].iter().chain(words))?;
            ensure!(outcome.code == code && outcome.stderr.contains(expected), "{words:?}: {outcome:?}");
            Ok(())
        };
        refused(&["data", "log", "--to", "b"], 2, "one by one")?;
        refused(&["data", "log", "data", "--to", "beta:a"], 2, "named twice")?;
        refused(&["data", "gone", "--to", "beta:a"], 3, "no volume \"gone\"")?;
        pair.beta.sterna(["volume", "create", "root", "--size", "1MiB", "--store", "b"])?.success()?;
        refused(&["data", "log", "root", "--to", "beta:a"], 4, "\"root\" exists")?;
        let outcome =
            pair.alpha.sterna(["migrate", "data", "root", "--to", "beta:a", "--dry-run", "--json"])?;
        let plan: MigrationPlan = outcome.json()?;
        ensure!(outcome.code == 4 && plan.volumes.len() == 2, "{plan:?}");
        ensure!(plan.volumes[0].target.is_some() && plan.volumes[1].target.is_none(), "{plan:?}");
        pair.beta.sterna(["volume", "remove", "root"])?.success()?;
        ensure!(pair.beta.images("a")?.is_empty() && pair.beta.images("b")?.is_empty(), "something is left");
        // It is cancelled when parts of all volumes have arrived, and then repeated.
        let begun = begin(&pair.alpha, &names, "beta:a", &["--bandwidth", SLOWLY])?;
        until("something is copied", || {
            Ok((pair.alpha.migration(&begun.id)?.bytes_copied > FILL_BYTES).then_some(()))
        })?;
        pair.alpha.sterna(["migration", "cancel", &begun.id])?.success()?;
        let ended = pair.alpha.wait_for_migration(&begun.id)?;
        ensure!(ended.state == MigrationState::Cancelled, "{ended:?}");
        ensure!(pair.settled(names.len())?, "they stay");
        until("nothing is left there", || Ok(pair.beta.images("a")?.is_empty().then_some(())))?;
        let retried: Migration = pair.alpha.ask(&["migration", "retry", &begun.id])?;
        ensure!(retried.state == MigrationState::Moved && retried.volume == names.join(", "), "{retried:?}");
        ensure!(!pair.settled(names.len())?, "they are there");
        work(&guests)?;
        verify(guests)
    });
}

#[test]
fn killed_while_they_are_copied_and_at_the_handover_all_are_at_one_host() {
    play_pair(|pair| {
        let names = ["data", "log"];
        let guests = start(pair, &names)?;
        for kills_source in [true, false] {
            let begun = begin(&pair.alpha, &names, "beta:a", &["--bandwidth", SLOWLY])?;
            until("something is copied", || {
                Ok((pair.alpha.migration(&begun.id)?.bytes_copied > FILL_BYTES / 2).then_some(()))
            })?;
            let killed = if kills_source { &mut pair.alpha } else { &mut pair.beta };
            killed.kill()?;
            killed.start()?;
            // The migration resumes.
            let ended = pair.alpha.wait_for_migration(&begun.id)?;
            ensure!(ended.state == MigrationState::Moved, "{ended:?}");
            ensure!(!pair.settled(names.len())?, "they are there");
            work(&guests)?;
            let home: Migration =
                pair.beta.ask(&[&["migrate"], &names[..], &["--to", "alpha:a"]].concat())?;
            ensure!(home.state == MigrationState::Moved, "{home:?}");
            ensure!(pair.settled(names.len())?, "they are home");
        }
        let mut is_at_alpha = true;
        for (kills_source, step) in [
            (false, "after-prepared"),
            (true, "before-released"),
            (true, "after-released"),
            (false, "before-owned"),
        ] {
            let kills_alpha = is_at_alpha == kills_source;
            let killed = if kills_alpha { &mut pair.alpha } else { &mut pair.beta };
            killed.stop()?;
            killed.start_with(&[("STERNA_FAIL_POINT", step)])?;
            let (source, to) = if is_at_alpha { (&pair.alpha, "beta:a") } else { (&pair.beta, "alpha:a") };
            until("it begins", || Ok(begin(source, &names, to, &[]).ok()))?;
            let killed = if kills_alpha { &mut pair.alpha } else { &mut pair.beta };
            ensure!(killed.wait_for_end()? == 137, "{step}: it was not killed");
            killed.start()?;
            is_at_alpha = pair.settled(names.len()).with_context(|| format!("killed {step}"))?;
        }
        // These clients were at alpha, and reconnect there.
        if !is_at_alpha {
            let home: Migration =
                pair.beta.ask(&[&["migrate"], &names[..], &["--to", "alpha:a"]].concat())?;
            ensure!(home.state == MigrationState::Moved, "{home:?}");
        }
        work(&guests)?;
        verify(guests)
    });
}
