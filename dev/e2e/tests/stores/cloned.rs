//! Tests of migrations within one file system whose files can share blocks: chunks are cloned, while a guest writes.

use std::num::NonZeroU64;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use api::{Migration, MigrationPlan, MigrationState};
use e2e::{Host, guest, play_with_mounts, until};
use lab::workload::GuestOptions;
use testbed::Program;
use testbed::file_system::{FileSystem, Sharing};

const DISK_BYTES: u64 = 64 << 20;
const FILL_BYTES: u64 = 48 << 20;
/// Bytes that a busy guest uses.
const WORKED_BYTES: u64 = 4 << 20;
/// A rate at which a guest writes to chunks before, while and after they are cloned, also on a busy machine.
const SLOWLY: &str = "16MiB/s";
/// A size that ends within a block of every file system.
const ODD_BYTES: u64 = (9 << 20) + 512;

/// Plays a scene on each of the file systems, with two stores `x` and `y` in one of them.
pub(crate) fn play_on_each(scene: fn(&mut Host) -> anyhow::Result<()>) {
    for kind in Sharing::EACH {
        if !matches!(kind.is_known(), Ok(true)) {
            omission::kernel_lacks(kind.name());
            continue;
        }
        play_with_mounts(|host| {
            let folder = host.path("disk");
            std::fs::create_dir(&folder)?;
            host.keep(FileSystem::sharing(kind, &folder, Sharing::BYTES_MIN)?)?;
            for name in ["x", "y"] {
                std::fs::create_dir(folder.join(name))?;
                host.configure(&format!("[stores.{name}]\npath = '{}'\n", folder.join(name).display()))?;
            }
            host.start()?;
            println!("on {}", kind.name());
            scene(host)
        });
    }
}

fn create(host: &Host, more: &[&str]) -> anyhow::Result<()> {
    host.sterna([&["volume", "create", "v", "--store", "x"], more].concat())?.success().map(drop)
}

fn image(host: &Host, store: &str) -> PathBuf {
    host.path("disk").join(store).join("v.img")
}

fn worked() -> GuestOptions {
    GuestOptions { working_set_bytes: NonZeroU64::new(WORKED_BYTES), ..GuestOptions::default() }
}

/// Returns the bytes of extents that a file shares with others.
fn shared_bytes(file: &Path) -> anyhow::Result<u64> {
    rustix::fs::fsync(std::fs::File::open(file)?)?;
    let map = Program::of_package("filefrag", "e2fsprogs").args(["-v", "-b4096"]).arg(file).succeed()?;
    let shared = map.lines().filter(|line| line.contains("shared"));
    // "   0:        0..   16383:      72960..     89343:  16384:             shared"
    let blocks = shared.map(|line| {
        let length = line.split(':').nth(3).context("an extent has a length")?;
        length.trim().parse::<u64>().context("a length is a number")
    });
    Ok(blocks.sum::<anyhow::Result<u64>>()? * 4096)
}

fn plan(host: &Host, order: &[&str]) -> anyhow::Result<MigrationPlan> {
    host.ask(&[&["migrate", "v"], order, &["--dry-run"]].concat())
}

/// Checks that a dry run says that it would copy, and why.
fn copied_because(host: &Host, order: &[&str], words: &str) -> anyhow::Result<()> {
    let plan = plan(host, order)?;
    let volume = plan.volumes.first().context("a volume")?;
    ensure!(!volume.cloned, "{plan:?}");
    let why = volume.copied_because.as_deref().unwrap_or_default();
    ensure!(why.contains(words), "{why:?} has not {words:?}");
    let text = host.sterna([&["migrate", "v"], order, &["--dry-run"]].concat())?.success()?;
    ensure!(text.contains("is copied, because") && text.contains(words), "{text}");
    Ok(())
}

#[test]
fn a_volume_is_cloned_while_its_guest_writes_and_shares_its_blocks() {
    play_on_each(|host| {
        create(host, &["--size", &DISK_BYTES.to_string()])?;
        let busy = guest::start_with(&host.export()?, FILL_BYTES, worked())?;
        let expected = plan(host, &["--to", "y"])?;
        let volume = expected.volumes.first().context("a volume")?;
        ensure!(volume.cloned && expected.bytes_max == 0, "{expected:?}");
        let order = ["migrate", "v", "--to", "y", "--keep-source", "--bandwidth", SLOWLY, "--detach"];
        let begun: Migration = host.ask(&order)?;
        guest::until_worked(&busy, 200)?;
        let ended = host.wait_for_migration(&begun.id)?;
        ensure!(ended.state == MigrationState::Moved, "{ended:?}");
        ensure!(ended.bytes_cloned >= FILL_BYTES / 2 && ended.bytes_copied == 0, "{ended:?}");
        guest::until_worked(&busy, 50)?;
        let stopped = guest::stop_and_verify(busy)?;
        let text = host.sterna(["migration", "show", &ended.id])?.success()?;
        ensure!(text.contains("share their blocks"), "{text}");
        host.stop()?;
        let moved = image(host, "y");
        guest::verify_image(&moved, &stopped.content)?;
        // What the guest has not written since is in both images, and thin as before.
        let shared = shared_bytes(&moved)?;
        ensure!(shared >= FILL_BYTES / 2, "{shared} bytes are shared");
        let allocated = std::fs::metadata(&moved)?.blocks() * 512;
        ensure!(allocated < FILL_BYTES + (4 << 20), "{allocated} bytes are allocated");
        // The figure is there after a restart, too.
        host.start()?;
        let again = host.migration(&ended.id)?;
        ensure!(again.bytes_cloned == ended.bytes_cloned, "{ended:?}, {again:?}");
        Ok(())
    });
}

#[test]
fn a_clone_that_is_interrupted_goes_on_and_loses_nothing() {
    play_on_each(|host| {
        create(host, &["--size", &DISK_BYTES.to_string()])?;
        let busy = guest::start_with(&host.export()?, FILL_BYTES, worked())?;
        let begun: Migration = host.ask(&["migrate", "v", "--to", "y", "--bandwidth", SLOWLY, "--detach"])?;
        // After a second at the least, what is missing was recorded once.
        for part in 3..5 {
            until("some of it is cloned", || {
                let shown = host.migration(&begun.id)?;
                Ok((shown.bytes_cloned >= part * FILL_BYTES / 6 || shown.state.has_ended()).then_some(()))
            })?;
            host.kill()?;
            host.start()?;
            guest::until_worked(&busy, 50)?;
        }
        let ended = host.wait_for_migration(&begun.id)?;
        let store = if ended.state == MigrationState::Moved { "y" } else { "x" };
        println!("{:?}: {} MiB were cloned", ended.state, ended.bytes_cloned >> 20);
        ensure!(store == "y", "{ended:?}");
        let stopped = guest::stop_and_verify(busy)?;
        host.stop()?;
        guest::verify_image(&image(host, store), &stopped.content)
    });
}

#[test]
fn a_volume_of_any_size_is_made_from_an_image_and_moved_by_clones() {
    play_on_each(|host| {
        let given = host.path("disk").join("given.raw");
        let bytes: Vec<u8> = (0..ODD_BYTES).map(|at| (at / 4096 % 251) as u8 ^ (at % 7) as u8).collect();
        std::fs::write(&given, &bytes)?;
        // Not synced: what is cloned is what a read returns.
        create(host, &["--image", &given.display().to_string(), "--size", &ODD_BYTES.to_string()])?;
        let shared = shared_bytes(&image(host, "x"))?;
        ensure!(shared >= ODD_BYTES / 2, "{shared} bytes are shared with the given image");
        let moved: Migration = host.ask(&["migrate", "v", "--to", "y"])?;
        ensure!(moved.state == MigrationState::Moved && moved.bytes_cloned >= ODD_BYTES / 2, "{moved:?}");
        host.stop()?;
        ensure!(std::fs::read(image(host, "y"))? == bytes, "the moved image has other bytes");
        ensure!(std::fs::read(&given)? == bytes, "the given image has other bytes");
        Ok(())
    });
}

#[test]
fn what_cannot_be_cloned_is_copied_and_the_dry_run_says_why() {
    play_on_each(|host| {
        create(host, &["--size", &DISK_BYTES.to_string()])?;
        let busy = guest::start_with(&host.export()?, FILL_BYTES, worked())?;
        copied_because(host, &["--to", "b"], "different file systems")?;
        copied_because(host, &["--to", "y", "--format", "qcow2"], "only raw images")?;
        copied_because(host, &["--to", "y", "--thick"], "--thick")?;
        let moved: Migration = host.ask(&["migrate", "v", "--to", "b"])?;
        ensure!(moved.state == MigrationState::Moved && moved.bytes_cloned == 0, "{moved:?}");
        ensure!(moved.bytes_copied >= FILL_BYTES / 2, "{moved:?}");
        let stopped = guest::stop_and_verify(busy)?;
        host.stop()?;
        guest::verify_image(&host.path("b/v.img"), &stopped.content)
    });
}

/// btrfs refuses clones between files of which one is copied on write, and the other is not.
#[test]
fn an_image_that_is_not_copied_on_write_is_copied() {
    if !Sharing::Btrfs.is_known().unwrap() {
        return omission::kernel_lacks("btrfs");
    }
    play_on_each(|host| {
        let folder = host.path("disk").join("x");
        let marks = Program::of_package("chattr", "e2fsprogs").arg("+C").arg(&folder);
        if marks.run()?.code != 0 {
            // XFS has no such attribute.
            return Ok(());
        }
        create(host, &["--size", &DISK_BYTES.to_string()])?;
        let busy = guest::start_with(&host.export()?, FILL_BYTES, worked())?;
        copied_because(host, &["--to", "y"], "NOCOW")?;
        let moved: Migration = host.ask(&["migrate", "v", "--to", "y"])?;
        ensure!(moved.state == MigrationState::Moved && moved.bytes_copied >= FILL_BYTES / 2, "{moved:?}");
        let stopped = guest::stop_and_verify(busy)?;
        host.stop()?;
        guest::verify_image(&image(host, "y"), &stopped.content)
    });
}
