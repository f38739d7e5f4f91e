//! Tests of two branches of one volume after a forced promotion, on two hosts with contact again.

use anyhow::ensure;
use api::{Volume, VolumeState};
use e2e::{Host, LinkState, Pair, guest, play_pair};
use lab::workload::Content;

const DISK_BYTES: u64 = 32 << 20;
const FILL_BYTES: u64 = 8 << 20;
/// Number of requests after which a guest counts as at work.
const WORK_REQUESTS: u64 = 200;

/// Makes two branches of the volume `v`: `alpha` keeps serving it, and `beta` has promoted the copy, whose content is returned.
fn part(pair: &mut Pair) -> anyhow::Result<Content> {
    pair.alpha.create_volume(DISK_BYTES)?;
    let stopped = guest::stop_and_verify(guest::start(&pair.alpha.export()?, FILL_BYTES)?)?;
    pair.promote_by_force()?;
    pair.alpha.start()?;
    pair.link.set(LinkState::Up);
    pair.alpha.until_idle()?;
    for host in [&pair.alpha, &pair.beta] {
        ensure!(host.volume()?.state == VolumeState::Serving, "each has a branch");
    }
    Ok(stopped.content)
}

/// Checks that moving a branch to the other host is refused with advice.
fn check_refused(from: &Host, to: &str) -> anyhow::Result<()> {
    for more in [&[][..], &["--dry-run"]] {
        let told = from.sterna([&["migrate", "v", "--to", to], more].concat())?;
        let said = format!("{}{}", told.stdout, told.stderr);
        ensure!(told.code != 0, "{said}");
        ensure!(
            said.contains("another branch of the same history") && said.contains("sterna volume remove v"),
            "{said}"
        );
    }
    Ok(())
}

#[test]
fn branches_of_one_history_do_not_come_to_one_host_until_one_of_them_is_removed() {
    play_pair(|pair| {
        let promoted = part(pair)?;
        let guest = guest::start(&pair.alpha.export()?, FILL_BYTES)?;
        guest::until_worked(&guest, WORK_REQUESTS)?;
        check_refused(&pair.alpha, "beta:a")?;
        check_refused(&pair.beta, "alpha:a")?;
        for host in [&pair.alpha, &pair.beta] {
            let volume: Volume = host.volume()?;
            ensure!(volume.state == VolumeState::Serving, "{volume:?}");
        }
        guest::until_worked(&guest, WORK_REQUESTS)?;
        pair.beta.sterna(["volume", "remove", "v", "--keep-image"])?.success()?;
        guest::verify_image(&pair.beta.path("a/v.img"), &promoted)?;
        std::fs::remove_file(pair.beta.path("a/v.img"))?;
        pair.leave()?;
        guest::stop_and_verify(guest).map(drop)
    });
}
