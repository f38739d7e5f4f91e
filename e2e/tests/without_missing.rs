//! A volume that was handed over before all of it had come, and whose former host is lost.

use anyhow::{Context as _, ensure};
use api::{Migration, Volume, VolumeFilling, VolumeState};
use e2e::{Host, guest, play_pair, until};
use testbed::nbd_client::{Address, Client, ClientOptions, Operation, WriteDurability};

const DISK_BYTES: u64 = 64 << 20;
const FILL_BYTES: u64 = 48 << 20;

fn filling(host: &Host) -> anyhow::Result<Option<VolumeFilling>> {
    Ok(host.volume()?.filling)
}

fn read(export: &Address, offset: u64) -> anyhow::Result<()> {
    let mut client = Client::connect(export, ClientOptions::default())?;
    client.perform(Operation::Read { offset, buffer: vec![0; 4096] })?;
    Ok(())
}

#[test]
fn what_a_lost_host_had_is_given_up_by_order_and_only_that() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        drop(guest::stop_and_verify(guest::start(&pair.alpha.export()?, FILL_BYTES)?)?.client);
        let begun: Migration = pair.alpha.ask(&[
            "migrate",
            "v",
            "--to",
            "beta:a",
            "--strategy",
            "post-copy",
            "--bandwidth",
            "1MiB/s",
            "--detach",
        ])?;
        let of_beta = "the volume works at beta, and lacks something";
        until(of_beta, || Ok(pair.beta.volume().ok().and_then(|volume| volume.filling)))?;
        let refused = pair.beta.sterna(["volume", "promote", "v", "--without-missing"])?;
        ensure!(refused.code != 0 && refused.stderr.contains("which answers"), "{refused:?}");
        let waits: Migration = pair.beta.ask(&["migrate", "v", "--to", "alpha:a", "--detach"])?;
        ensure!(waits.queue.is_some_and(|place| place.reason.contains("alpha")), "{begun:?}");
        pair.beta.sterna(["migration", "cancel", &waits.id])?.success()?;

        pair.alpha.kill()?;
        until("beta knows that alpha is away", || {
            Ok(filling(&pair.beta)?.filter(|filling| filling.waits_for.is_some()))
        })?;
        let promoted: Volume = pair.beta.ask(&["volume", "promote", "v", "--without-missing"])?;
        let lost = promoted.filling.context("something is lost")?;
        let last = *lost.ranges.last().context("where that is, is told")?;
        ensure!(lost.is_given_up && lost.bytes_missing > 0 && last.length_bytes >= 8192, "{lost:?}");
        let export = pair.beta.export()?;
        ensure!(read(&export, last.offset_bytes).is_err(), "what is lost cannot be read");
        if let Some(first) = lost.ranges.first().filter(|first| first.offset_bytes > 0) {
            read(&export, first.offset_bytes - 4096)?;
        }
        let refused = pair.beta.sterna(["volume", "resize", "v", "128MiB"])?;
        ensure!(refused.code != 0 && refused.stderr.contains("fstrim"), "{refused:?}");

        pair.beta.kill()?;
        pair.beta.start()?;
        until("the volume is served again", || {
            Ok(pair.beta.volume().ok().filter(|volume| volume.state == VolumeState::Serving))
        })?;
        let lost = filling(&pair.beta)?.context("it is lost still")?;
        ensure!(lost.is_given_up && read(&export, last.offset_bytes).is_err(), "{lost:?}");
        let mut client = Client::connect(&export, ClientOptions::default())?;
        for range in &lost.ranges {
            for offset in (range.offset_bytes..range.offset_bytes + range.length_bytes).step_by(1 << 20) {
                let length = (range.offset_bytes + range.length_bytes - offset).min(1 << 20);
                let data = vec![7; usize::try_from(length)?];
                client.perform(Operation::Write { offset, data, durability: WriteDurability::Volatile })?;
            }
        }
        client.perform(Operation::Flush)?;
        read(&export, last.offset_bytes)?;
        until("nothing is missing any more", || Ok(filling(&pair.beta)?.is_none().then_some(())))?;
        pair.beta.sterna(["volume", "resize", "v", "128MiB"])?.success()?;
        Ok(())
    });
}
