//! Tests of the preflight check: it reports the effects and obstacles of a migration, and changes nothing.

use std::path::Path;

use anyhow::{Context as _, bail, ensure};
use api::{ErrorCode, Migration, MigrationPlan};
use e2e::file_system::FileSystem;
use e2e::{
    FAR, Host, LinkState, Pair, guest, play, play_pair, play_pair_with_mounts, play_sharing_pair,
    play_with_mounts, share, until, vm,
};
use testbed::own_address;

const DISK_BYTES: u64 = 32 << 20;
const FILL_BYTES: u64 = 4 << 20;
/// Size of a store that is smaller than a disk.
const SMALL_BYTES: u64 = 16 << 20;
/// The file in a store's folder that identifies the store.
const LOCK: &str = ".sterna-lock";

/// Runs a dry run, and checks that its exit code agrees with the plan.
fn plan(scene: &Host, arguments: &[&str]) -> anyhow::Result<MigrationPlan> {
    let words: Vec<&str> = ["migrate"].iter().chain(arguments).chain(&["--dry-run"]).copied().collect();
    let outcome = scene.sterna(words.iter().chain(&["--json"]))?;
    let plan: MigrationPlan = outcome.json()?;
    ensure!(outcome.code == if plan.can_begin { 0 } else { 4 }, "{outcome:?}");
    // The text output has the same.
    let text = scene.sterna(&words)?;
    ensure!(text.code == outcome.code, "{text:?}");
    let told = text.stdout.matches("\n  refused: ").count();
    ensure!(told == plan.refusals.len(), "{}: {:?}", text.stdout, plan.refusals);
    Ok(plan)
}

/// Runs it as [`plan`], for a migration with exactly one obstacle.
fn refused(scene: &Host, arguments: &[&str], code: ErrorCode, words: &str) -> anyhow::Result<()> {
    let plan = plan(scene, arguments)?;
    let found = plan.refusals.iter().any(|refusal| refusal.code == code && refusal.message.contains(words));
    ensure!(found && !plan.can_begin, "{arguments:?}: {words}: {plan:#?}");
    Ok(())
}

fn untouched(scene: &Host, images: &[&str]) -> anyhow::Result<()> {
    let migrations: Vec<Migration> = scene.ask(&["migration", "list"])?;
    ensure!(migrations.is_empty(), "{migrations:?}");
    ensure!(scene.images("a")? == images && scene.images("b")?.is_empty(), "something is left");
    Ok(())
}

#[test]
fn a_plan_says_whether_blocks_go_straight_to_a_store_that_both_hosts_have_and_leaves_nothing_there() {
    play_sharing_pair(
        |alpha, beta| share(alpha, beta),
        |pair| {
            pair.alpha.create_volume(DISK_BYTES)?;
            let is_shared = |more: &[&str]| -> anyhow::Result<bool> {
                let plan = plan(&pair.alpha, &[&["v", "--to", "beta:a"], more].concat())?;
                // The scheduler of this machine's disk is not known.
                let is_expected = |text: &String| text.contains("mq-deadline");
                ensure!(plan.can_begin && plan.warnings.iter().all(is_expected), "{plan:?}");
                let (there, here) = (listing(&pair.beta.path("a"))?, listing(&pair.alpha.path("a"))?);
                ensure!(there == [LOCK], "something is left in the store: {there:?}");
                ensure!(here == [LOCK, "v.img"], "something is left at the source: {here:?}");
                Ok(plan.volumes.first().context("a volume")?.shared)
            };
            ensure!(is_shared(&[])?, "both hosts have the folder");
            ensure!(!is_shared(&["--shared-target", "never"])?, "it is not to be used");
            ensure!(!is_shared(&["--format", "qcow2"])?, "only raw images are leased");
            // The folder is replaced, and then removed.
            std::fs::remove_file(pair.alpha.path(FAR))?;
            std::fs::create_dir(pair.alpha.path(FAR))?;
            ensure!(!is_shared(&[])? && listing(&pair.alpha.path(FAR))?.is_empty(), "it is another one");
            std::fs::remove_dir(pair.alpha.path(FAR))?;
            let told = plan(&pair.alpha, &["v", "--to", "beta:a"])?;
            ensure!(
                told.can_begin && told.warnings.iter().any(|text| text.contains("cannot be written to")),
                "{told:?}"
            );
            let moved: Migration = pair.alpha.ask(&["migrate", "v", "--to", "beta:a"])?;
            ensure!(!moved.shared, "{moved:?}");
            Ok(())
        },
    );
}

fn listing(folder: &Path) -> anyhow::Result<Vec<String>> {
    let entries = std::fs::read_dir(folder).context("list a folder")?;
    let mut names = Vec::new();
    for entry in entries {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

#[test]
fn a_disk_whose_scheduler_has_guests_wait_is_told_of_unless_the_copy_is_limited() {
    play_with_mounts(|scene| {
        let mounted = FileSystem::plain(&scene.path("b"), 2 * DISK_BYTES)?;
        let kernel = mounted.scheduler()?;
        scene.keep(mounted)?;
        scene.start()?;
        scene.create_volume(DISK_BYTES)?;
        let told = |scheduler: &str, more: &[&str]| -> anyhow::Result<(bool, bool)> {
            std::fs::write(&kernel, scheduler).context("tell the kernel")?;
            let disk = |text: &str| text.contains("to the disk loop") && text.contains("mq-deadline");
            let plan = plan(scene, &[&["v", "--to", "b"], more].concat())?;
            let text = scene.sterna(["store", "list"])?.stdout;
            ensure!(text.contains("\nb: ") == disk(&text), "of the store that it is: {text}");
            Ok((plan.warnings.iter().any(|text| disk(text)), disk(&text)))
        };
        ensure!(told("mq-deadline", &[])? == (true, true), "guests may wait");
        ensure!(told("mq-deadline", &["--bandwidth", "10MiB/s"])? == (false, true), "not behind that copy");
        ensure!(told("none", &[])? == (false, false), "nobody waits");
        Ok(())
    });
}

#[test]
fn a_plan_within_one_host_says_where_the_image_would_be_and_leaves_nothing() {
    play(|scene| {
        scene.create_volume(DISK_BYTES)?;
        let guest = guest::start(&scene.export()?, FILL_BYTES)?;
        let before = listing(&scene.path("data"))?;
        let possible = plan(scene, &["v", "--to", "b", "--bandwidth", "1MiB/s"])?;
        ensure!(possible.can_begin && possible.host.is_none() && possible.queue.is_none(), "{possible:?}");
        let volume = possible.volumes.first().context("a volume")?;
        ensure!(volume.held_bytes >= FILL_BYTES && volume.size_bytes == DISK_BYTES, "{volume:?}");
        let target = volume.target.as_ref().context("a target")?;
        ensure!(target.image == scene.path("b").join("v.img").display().to_string(), "{target:?}");
        ensure!(possible.forecast.is_some_and(|forecast| forecast.seconds.middle >= 4.0), "{possible:?}");
        refused(scene, &["v", "--to", "a"], ErrorCode::SameStore, "already")?;
        refused(scene, &["v", "--to", "b", "--serve-here"], ErrorCode::InvalidRequest, "--serve-here")?;
        refused(scene, &["v", "--to", "b", "--keep-chain"], ErrorCode::InvalidRequest, "not qcow2")?;
        for memory in [["--memory", "post-copy"], ["--memory-streams", "2"]] {
            let order = [&["v", "--to", "b"][..], &memory].concat();
            refused(scene, &order, ErrorCode::InvalidRequest, "has no memory")?;
        }
        std::fs::write(scene.path("b").join("v.img"), "somebody's")?;
        refused(scene, &["v", "--to", "b"], ErrorCode::TargetExists, "move it away")?;
        std::fs::remove_file(scene.path("b").join("v.img"))?;
        ensure!(scene.sterna(["migrate", "w", "--to", "b", "--dry-run"])?.code == 3, "no such volume");
        ensure!(scene.sterna(["migrate", "v", "--to", "c", "--dry-run"])?.code == 3, "no such store");
        untouched(scene, &["v.img"])?;
        ensure!(listing(&scene.path("data"))? == before, "something is left in the data folder");
        // The migration does what the plan says. Meanwhile a plan is refused.
        let begun = scene.begin_to_migrate("b", Some("1MiB/s"))?;
        refused(scene, &["v", "--to", "b"], ErrorCode::AlreadyMigrating, &begun.id)?;
        scene.sterna(["migration", "cancel", &begun.id])?.success()?;
        scene.wait_for_migration(&begun.id)?;
        guest::stop_and_verify(guest).map(drop)
    });
}

#[test]
fn a_plan_for_another_host_has_what_both_sides_see() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let guest = guest::start(&pair.alpha.export()?, FILL_BYTES)?;
        let possible = plan(&pair.alpha, &["v", "--to", "beta:a", "--bandwidth", "1MiB/s"])?;
        ensure!(possible.can_begin && possible.host.as_deref() == Some("beta"), "{possible:?}");
        let volume = possible.volumes.first().context("a volume")?;
        let target = volume.target.as_ref().context("a target")?;
        ensure!(target.image == pair.beta.path("a").join("v.img").display().to_string(), "{target:?}");
        ensure!(target.store.as_deref() == Some("beta:a") && volume.free_bytes.is_some(), "{volume:?}");
        ensure!(!possible.links.is_empty() && possible.forecast.is_some(), "{possible:?}");
        let clients = possible.warnings.iter().any(|warning| warning.contains("connected here"));
        ensure!(clients, "{possible:?}");
        let check =
            |to: &str, words: &str| refused(&pair.alpha, &["v", "--to", to], ErrorCode::HostRefused, words);
        check("beta:c", "there is no store \"c\"")?;
        check("beta", "it has several stores")?;
        pair.beta.sterna(["volume", "create", "v", "--size", "1MiB", "--store", "b"])?.success()?;
        check("beta:a", "a volume \"v\" exists")?;
        // The migration itself is refused as well, before anything is begun.
        let outcome = pair.alpha.sterna(["migrate", "v", "--to", "beta:a"])?;
        ensure!(outcome.code == 4 && outcome.stderr.contains("a volume \"v\" exists"), "{outcome:?}");
        untouched(&pair.alpha, &["v.img"])?;
        pair.beta.sterna(["volume", "remove", "v"])?.success()?;
        untouched(&pair.beta, &[])?;
        pair.leave()?;
        guest::stop_and_verify(guest).map(drop)
    });
}

#[test]
fn a_store_that_is_too_full_is_named_before_a_byte_moves() {
    play_pair_with_mounts(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        let guest = guest::start(&pair.alpha.export()?, 3 * SMALL_BYTES / 2)?;
        pair.beta.stop()?;
        let small = FileSystem::plain(&pair.beta.path("b"), SMALL_BYTES)?;
        pair.beta.keep(small)?;
        pair.beta.start()?;
        refused(&pair.alpha, &["v", "--to", "beta:b"], ErrorCode::HostRefused, "are needed")?;
        let outcome = pair.alpha.sterna(["migrate", "v", "--to", "beta:b"])?;
        ensure!(outcome.code == 4 && outcome.stderr.contains("are needed"), "{outcome:?}");
        untouched(&pair.alpha, &["v.img"])?;
        guest::stop_and_verify(guest).map(drop)
    });
}

#[test]
fn a_plan_of_a_machine_names_ports_in_use_and_a_stand_that_cannot_be_that_short() {
    play_pair(|pair| {
        pair.alpha.create_volume(DISK_BYTES)?;
        // Both hosts are this machine, so ports of the source's VM are in use at the target.
        let debugger = format!("tcp:{}", own_address()?);
        let words = ["-gdb", debugger.as_str()];
        let console = vm::start_with_words(&pair.alpha, &["v"], FILL_BYTES, &words)?;
        let to = ["web1", "--to", "beta:a"];
        refused(&pair.alpha, &to, ErrorCode::HostRefused, &format!("-gdb {debugger}: port"))?;
        // The migration itself is refused as well.
        let outcome = pair.alpha.sterna(["migrate", "web1", "--to", "beta:a"])?;
        ensure!(outcome.code == 4 && outcome.stderr.contains("is in use there"), "{outcome:?}");
        console.work_on(50)?;
        // A move to another store of the same host moves only the disks of a VM.
        let disks = pair.alpha.sterna(["migrate", "web1", "--to", "b", "--dry-run", "--json"])?;
        let disks: Vec<MigrationPlan> = disks.json()?;
        let [disk] = &disks[..] else { bail!("{disks:?}") };
        ensure!(disk.can_begin && disk.machine.is_none() && disk.volumes.len() == 1, "{disk:?}");
        let planned = plan(&pair.alpha, &to)?;
        let machine = planned.machine.as_ref().context("a VM")?;
        ensure!(machine.memory_bytes.is_some_and(|bytes| planned.bytes_max > bytes), "{planned:?}");
        ensure!(machine.max_downtime_ms == Some(300) && machine.least_downtime_ms.is_some(), "{machine:?}");
        let followed = plan(&pair.alpha, &["web1", "--to", "beta:a", "--memory", "post-copy"])?;
        ensure!(followed.warnings.iter().any(|warning| warning.contains("loses its memory")), "{followed:?}");
        pair.link.set(LinkState::Late);
        until("the round trip is known to be long", || {
            let planned = plan(&pair.alpha, &["web1", "--to", "beta:a", "--max-downtime", "60000"])?;
            let least = planned.machine.and_then(|machine| machine.least_downtime_ms);
            Ok(least.is_some_and(|least| least > 400.0).then_some(()))
        })?;
        let words = "cannot be moved within --max-downtime 300";
        refused(&pair.alpha, &to, ErrorCode::VmUnsuitable, words)?;
        let outcome = pair.alpha.sterna(["migrate", "web1", "--to", "beta:a"])?;
        ensure!(outcome.code == 4 && outcome.stderr.contains(words), "{outcome:?}");
        pair.link.set(LinkState::Up);
        check_stayed(pair, &console)
    });
}

fn check_stayed(pair: &Pair, console: &vm::Vm) -> anyhow::Result<()> {
    until("nothing is at the other host", || Ok(pair.beta.images("a")?.is_empty().then_some(())))?;
    ensure!(vm::vms(&pair.beta)?.is_empty(), "a VM is at beta");
    console.work_on(50)?;
    console.verify()
}
