//! Volumes that leave for another host before all of them has come there, under a guest at work.

use anyhow::ensure;
use api::{Migration, MigrationState};
use e2e::{guest, play_pair};

const DISK_BYTES: u64 = 64 << 20;
const FILL_BYTES: u64 = 32 << 20;

#[test]
fn three_phases_end_after_the_rounds_that_were_ordered_whatever_a_guest_writes() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let guest = guest::start(&pair.alpha.export()?, FILL_BYTES)?;
        let order = ["migrate", "v", "--to", "beta:a", "--strategy", "three-phase", "--rounds", "2"];
        let ended: Migration = pair.alpha.ask(&[&order[..], &["--bandwidth", "16MiB/s"]].concat())?;
        ensure!(ended.state == MigrationState::Moved, "{ended:?}");
        let shown = pair.alpha.migration(&ended.id)?;
        ensure!((1..=2).contains(&shown.rounds.len()), "{:?}", shown.rounds);
        pair.check_at(&pair.beta, &pair.alpha)?;
        guest::stop_and_verify(guest).map(drop)
    });
}
