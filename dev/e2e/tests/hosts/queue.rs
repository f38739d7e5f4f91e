//! Tests of queued migrations to another host, with a killed daemon.

use anyhow::ensure;
use api::{Migration, MigrationState};
use e2e::{Pair, play_pair};

/// Size of a disk of which a slow migration copies only the first part during a test.
const DISK_BYTES: usize = 8 << 20;

/// Makes two hosts. Alpha allows one migration at a time, and moves the volume `v` slowly.
fn busy(pair: &mut Pair) -> anyhow::Result<Migration> {
    pair.alpha.configure("[limits]\nmigrations_per_host = 1\n")?;
    pair.alpha.stop()?;
    pair.alpha.start()?;
    let image = pair.alpha.path("image");
    std::fs::write(&image, vec![7; DISK_BYTES])?;
    let image = image.display().to_string();
    for name in ["v", "w"] {
        pair.alpha.sterna(["volume", "create", name, "--store", "a", "--image", &image])?.success()?;
    }
    pair.alpha.ask(&["migrate", "v", "--to", "beta:a", "--bandwidth", "1MiB/s", "--detach"])
}

#[test]
fn what_waits_for_its_turn_to_another_host_outlasts_a_killed_daemon() {
    play_pair(|pair| {
        let first = busy(pair)?;
        let second: Migration = pair.alpha.ask(&["migrate", "w", "--to", "beta:a", "--detach"])?;
        ensure!(
            second.state == MigrationState::Queued && second.target.store.as_deref() == Some("beta:a"),
            "{second:?}"
        );
        pair.alpha.kill()?;
        pair.alpha.start()?;
        // The first one resumes at its rate; then the second one has its turn.
        for id in [&first.id, &second.id] {
            let ended = pair.alpha.wait_for_migration(id)?;
            ensure!(ended.state == MigrationState::Moved, "{ended:?}");
        }
        Ok(())
    });
}

#[test]
fn what_the_other_host_refused_is_done_once_more_when_it_takes_it() {
    play_pair(|pair| {
        let first = busy(pair)?;
        pair.beta.sterna(["volume", "create", "w", "--store", "a", "--size", "1MiB"])?.success()?;
        let second: Migration = pair.alpha.ask(&["migrate", "w", "--to", "beta:a", "--detach"])?;
        pair.alpha.sterna(["migration", "cancel", &first.id])?.success()?;
        let refused = pair.alpha.wait_for_migration(&second.id)?;
        ensure!(refused.state == MigrationState::Failed, "{refused:?}");
        ensure!(
            refused.message.as_ref().is_some_and(|message| message.contains("a volume \"w\" exists")),
            "{refused:?}"
        );
        pair.beta.sterna(["volume", "remove", "w"])?.success()?;
        let moved: Migration = pair.alpha.ask(&["migration", "retry", &second.id])?;
        ensure!(
            moved.state == MigrationState::Moved && moved.retry_of.as_ref() == Some(&second.id),
            "{moved:?}"
        );
        Ok(())
    });
}
