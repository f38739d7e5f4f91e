//! Tests of volumes that are reverted to a snapshot while other hosts have copies of them: what a revert changes is sent like any write.

use anyhow::ensure;
use api::Standby;
use e2e::{Host, Pair, play_pair, until};
use testbed::nbd_client::{Operation, WriteDurability};

use crate::standbys::{DISK_BYTES, connect, read, until_current, write};

const FILL_BYTES: u64 = 16 << 20;
const CHUNK_BYTES: usize = 1 << 20;
/// Less than a tenth of what a whole copy sends.
const DIFFERENCE_BYTES_MAX: u64 = 1 << 20;

fn begin(alpha: &Host) -> anyhow::Result<()> {
    alpha.create_volume(DISK_BYTES)?;
    let mut client = connect(alpha, "v")?;
    for offset in (0..FILL_BYTES).step_by(CHUNK_BYTES) {
        let data = vec![u8::try_from(offset >> 20)? + 1; CHUNK_BYTES];
        client.perform(Operation::Write { offset, data, durability: WriteDurability::Volatile })?;
    }
    Ok(())
}

/// Takes a snapshot, changes some blocks, and returns once the client has gone.
fn snap_and_change(host: &Host) -> anyhow::Result<()> {
    host.sterna(["volume", "snapshot", "v", "--label", "one"])?.success()?;
    let mut client = connect(host, "v")?;
    for block in [3, 700, 2000] {
        write(&mut client, block * 4096, 99)?;
    }
    Ok(())
}

fn revert(host: &Host) -> anyhow::Result<()> {
    until("the client has gone, and the volume is reverted", || {
        let reverted = host.sterna(["volume", "revert", "v", "one"])?;
        ensure!(reverted.code == 0 || reverted.stderr.contains("in use"), "{reverted:?}");
        Ok((reverted.code == 0).then_some(()))
    })
}

#[test]
fn a_standby_follows_a_revert_and_is_sent_the_difference_only() {
    play_pair(|Pair { alpha, beta, .. }| {
        begin(alpha)?;
        alpha.sterna(["standby", "add", "v", "--to", "beta:a", "--every", "1s"])?.success()?;
        let id = until_current(alpha)?.id;
        snap_and_change(alpha)?;
        let there = beta.path("a").join(".sterna-standbys").join(&id).join("image-0");
        let is_same = || Ok((std::fs::read(alpha.path("a/v.img"))? == std::fs::read(&there)?).then_some(()));
        until("the standby has what was written", is_same)?;
        let sent = |host: &Host| -> anyhow::Result<u64> {
            Ok(host.ask::<Standby>(&["standby", "show", "v"])?.bytes_sent.unwrap_or_default())
        };
        let before = sent(alpha)?;
        revert(alpha)?;
        ensure!(read(&mut connect(alpha, "v")?, 3 * 4096)? != 99);
        until("the standby is reverted, too", is_same)?;
        until_current(alpha)?;
        let again = sent(alpha)?.saturating_sub(before);
        ensure!(again < DIFFERENCE_BYTES_MAX, "{again} bytes were sent");
        alpha.sterna(["standby", "check", "v", "--deep"])?.success().map(drop)
    });
}

#[test]
fn a_volume_that_was_reverted_goes_home_to_its_kept_image_as_it_is() {
    play_pair(|Pair { alpha, beta, .. }| {
        begin(alpha)?;
        alpha.sterna(["migrate", "v", "--to", "beta:a"])?.success()?;
        snap_and_change(beta)?;
        revert(beta)?;
        let there = std::fs::read(beta.path("a/v.img"))?;
        beta.sterna(["migrate", "v", "--to", "alpha:a"])?.success()?;
        let home = std::fs::read(alpha.path("a/v.img"))?;
        ensure!(home == there, "the image at home differs");
        ensure!(read(&mut connect(alpha, "v")?, 3 * 4096)? != 99);
        // The snapshot has stayed, and is of a volume that is elsewhere.
        let left = beta.sterna(["volume", "snapshots"])?;
        ensure!(left.stdout.contains("v@one"), "{left:?}");
        Ok(())
    });
}
