//! Tests of copies that give way to guests at the target's host.

use anyhow::ensure;
use api::{LimitedBy, MigrationState, Volume};
use e2e::{guest, play_pair, until};

const DISK_BYTES: u64 = 160 << 20;
/// So much that it takes seconds, unless it does not give way.
const FILL_BYTES: u64 = 128 << 20;

#[test]
fn a_copy_gives_way_to_a_guest_of_the_targets_store() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        // It leaves data behind, and nobody asks at the source while the copy runs.
        guest::stop_and_verify(guest::start(&pair.alpha.export()?, FILL_BYTES)?)?;
        let size = DISK_BYTES.to_string();
        pair.beta.sterna(["volume", "create", "w", "--store", "a", "--size", &size])?.success()?;
        let beside: Volume = pair.beta.ask(&["volume", "show", "w"])?;
        let neighbour = guest::start(&beside.uri.parse()?, FILL_BYTES)?;
        let order = ["migrate", "v", "--to", "beta:a", "--impact", "1%", "--detach"];
        let begun: api::Migration = pair.alpha.ask(&order)?;
        let shown = || pair.alpha.migration(&begun.id);
        until("guests of the target's disk limit it", || {
            let shown = shown()?;
            ensure!(shown.state == MigrationState::Running, "it did not give way: {shown:?}");
            Ok((shown.limited_by == Some(LimitedBy::TargetGuests) && shown.pace.is_some()).then_some(()))
        })?;
        let said = pair.alpha.sterna(["migration", "show", &begun.id])?.success()?;
        ensure!(said.contains("limited by"), "{said}");
        pair.alpha.sterna(["migration", "set", &begun.id, "--impact", "none"])?.success()?;
        let ended = pair.alpha.wait_for_migration(&begun.id)?;
        ensure!(ended.state == MigrationState::Moved && ended.limited_by.is_none(), "{ended:?}");
        let there: Volume = pair.beta.ask(&["volume", "show", "v"])?;
        ensure!(there.store.as_deref() == Some("a"), "{there:?}");
        guest::stop_and_verify(neighbour).map(drop)
    });
}
