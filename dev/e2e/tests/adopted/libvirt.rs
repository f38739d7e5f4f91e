//! Tests of domains of libvirt: adopted while their guest works, moved, and released, with the test's own libvirtd. The guest
//! knows its writes, and libvirt's definition is correct at every step.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use api::{Migration, MigrationState, Vm, VmState, Volume};
use e2e::libvirt::{DOMAIN, Libvirtd};
use e2e::{Host, Program, until, vm};

const DISK_BYTES: u64 = 32 << 20;
const FILL_BYTES: u64 = 4 << 20;
/// Requests of the guest between two steps.
const REQUESTS: u64 = 100;
/// Texts that the definition keeps.
const KEPT: [&str; 2] = ["what stays as it is", "qemu:commandline"];

fn play(test: impl FnOnce(&mut Host, &Libvirtd) -> anyhow::Result<()>) {
    e2e::play(|host| match Libvirtd::start(host)? {
        Some(libvirt) => test(host, &libvirt),
        None => Ok(()),
    });
}

#[test]
fn a_domain_is_adopted_moved_and_released_while_its_guest_works_through_a_daemon_that_is_killed() {
    play(|host, libvirt| {
        let image = image(host, "disk.qcow2", "qcow2")?;
        let console = libvirt.domain(host, &[(&image, "qcow2")], FILL_BYTES)?;
        let adopted = adopt(host, libvirt)?;
        ensure!(adopted.state == VmState::Running && adopted.volumes == [DOMAIN], "{adopted:?}");
        ensure!(adopted.libvirt_domain.as_deref() == Some(DOMAIN), "{adopted:?}");
        ensure!(adopted.hypervisor.is_some_and(|text| text.starts_with("libvirt ")));
        let volume: Volume = host.ask(&["volume", "show", DOMAIN])?;
        let served: [&str; 3] = ["protocol='nbd'", &volume.socket, "type='raw'"];
        let original = text(&image)?;
        libvirt.check_definitions(&[&KEPT[..], &served].concat(), &[&original])?;
        ensure!(!image.exists() && host.path("disk.qcow2.moved-web1").exists(), "{:?}", adopted.message);
        console.work_on(REQUESTS)?;

        let moved: Migration = host.ask(&["migrate", DOMAIN, "--to", "b"])?;
        ensure!(moved.state == MigrationState::Moved, "{moved:?}");
        host.kill()?;
        host.start()?;
        console.work_on(REQUESTS)?;
        ensure!(host.ask::<Vm>(&["vm", "show", DOMAIN])?.message.is_none());
        libvirt.check_definitions(&[&KEPT[..], &served].concat(), &[&original])?;

        let released: Vm = host.ask(&["vm", "release", DOMAIN])?;
        ensure!(released.state == VmState::Running, "{released:?}");
        check_nothing_left(host)?;
        libvirt
            .check_definitions(&[&KEPT[..], &[&original, "type='qcow2'"]].concat(), &["protocol='nbd'"])?;
        console.work_on(REQUESTS)?;
        console.verify()?;
        console.end();
        until_shut_off(libvirt)?;
        let raw = host.path("compared.raw");
        let tool = Program::qemu_img();
        tool.args(["convert", "-f", "qcow2", "-O", "raw", &original]).arg(&raw).succeed()?;
        vm::verify_image(console.options(), console.verdict()?, &raw)
    });
}

#[test]
fn killed_at_each_step_the_next_daemon_goes_on_and_a_domain_that_is_shut_off_gets_the_images_themselves() {
    play(|host, libvirt| {
        let images = [image(host, "one.raw", "raw")?, image(host, "two.raw", "raw")?];
        let pairs = [(images[0].as_path(), "raw"), (images[1].as_path(), "raw")];
        let console = libvirt.domain(host, &pairs, FILL_BYTES)?;
        let socket = libvirt.socket()?;
        let words = ["vm", "adopt", "--libvirt", DOMAIN, "--store", "a", "--libvirt-socket", &socket];
        // There are two volumes, copies and pivots, and the same for the release.
        for pass in 1..=6 {
            let side = if pass % 2 == 0 { "before" } else { "after" };
            kill_at(host, &words, &format!("{side}-exchange@{pass}"))?;
            let vm: Vm = until("the domain is adopted", || settled(host))?.context("it is adopted")?;
            ensure!(vm.volumes == ["web1-0", "web1-1"], "{vm:?}");
            console.work_on(REQUESTS)?;
            if pass == 6 {
                break;
            }
            kill_at(host, &["vm", "release", DOMAIN], &format!("{side}-exchange@{pass}"))?;
            ensure!(until("the domain is released", || settled(host))?.is_none());
            check_nothing_left(host)?;
            console.work_on(REQUESTS)?;
        }
        console.verify()?;
        console.end();
        until_shut_off(libvirt)?;
        ensure!(host.ask::<Vm>(&["vm", "show", DOMAIN])?.state == VmState::Stopped);
        let places = ["web1-0.img", "web1-1.img"].map(|name| host.path("a").join(name));
        host.ask::<Vm>(&["vm", "release", DOMAIN])?;
        ensure!(host.ask::<Vec<Volume>>(&["volume", "list"])?.is_empty());
        let named = [text(&places[0])?, text(&places[1])?];
        libvirt.check_definitions(&[KEPT[0], KEPT[1], &named[0], &named[1]], &["protocol='nbd'"])?;
        // The images are its disks, and it starts from them.
        libvirt.virsh(&["start", DOMAIN])?;
        console.forget();
        Ok(())
    });
}

#[test]
fn what_libvirt_or_others_hold_is_refused_by_name() {
    play(|host, libvirt| {
        let image = image(host, "disk.qcow2", "qcow2")?;
        let _console = libvirt.domain(host, &[(&image, "qcow2")], FILL_BYTES)?;
        let refused = |words: &str| {
            let outcome = host.sterna([
                "vm",
                "adopt",
                "--libvirt",
                DOMAIN,
                "--store",
                "a",
                "--libvirt-socket",
                &libvirt.socket()?,
            ])?;
            ensure!(outcome.stderr.contains(words), "\"{words}\" is not in: {}", outcome.stderr);
            ensure!(host.ask::<Vec<Volume>>(&["volume", "list"])?.is_empty(), "a volume was left");
            ensure!(host.ask::<Vec<Vm>>(&["vm", "list"])?.is_empty(), "a VM was left");
            anyhow::Ok(())
        };
        libvirt.virsh(&["snapshot-create-as", DOMAIN, "before"])?;
        refused("1 snapshots of the domain")?;
        libvirt.virsh(&["snapshot-delete", DOMAIN, "before"])?;
        let copy = text(&host.path("copy.raw"))?;
        let copying = ["blockcopy", DOMAIN, "vda", "--dest", &copy, "--transient-job", "--format", "raw"];
        libvirt.virsh(&copying)?;
        refused("vda: libvirt's copy job works on it")?;
        libvirt.virsh(&["blockjob", DOMAIN, "vda", "--abort"])?;
        libvirt.virsh(&["destroy", DOMAIN])?;
        refused("the domain is shut off")?;
        let unknown = host.sterna([
            "vm",
            "adopt",
            "--libvirt",
            "nobody",
            "--store",
            "a",
            "--libvirt-socket",
            &libvirt.socket()?,
        ])?;
        ensure!(unknown.stderr.contains("Domain not found"), "{}", unknown.stderr);
        libvirt.virsh(&["start", DOMAIN])?;
        adopt(host, libvirt)?;
        let again = host.sterna(["volume", "remove", DOMAIN])?;
        ensure!(again.stderr.contains("sterna vm release"), "{}", again.stderr);
        Ok(())
    });
}

#[test]
fn a_release_that_would_break_something_is_refused_by_name_and_nothing_changes() {
    play(|host, libvirt| {
        let image = image(host, "disk.qcow2", "qcow2")?;
        let link = host.path("link.qcow2");
        std::os::unix::fs::symlink(&image, &link)?;
        let console = libvirt.domain(host, &[(&link, "qcow2")], FILL_BYTES)?;
        adopt(host, libvirt)?;
        // The link's target is renamed, not the link.
        ensure!(host.path("disk.qcow2.moved-web1").exists() && link.is_symlink());
        let served = host.path("a").join("web1.img");
        let refused = |words: &str| {
            let before = std::fs::metadata(&served)?.ino();
            let outcome = host.sterna(["vm", "release", DOMAIN])?;
            ensure!(outcome.code != 0 && outcome.stderr.contains(words), "\"{words}\": {outcome:?}");
            ensure!(std::fs::metadata(&served)?.ino() == before && !image.exists());
            ensure!(host.ask::<Vec<Volume>>(&["volume", "list"])?.len() == 1, "the volume is gone");
            anyhow::Ok(())
        };
        let overlay = format!("vda,snapshot=external,file={}", text(&host.path("overlay.qcow2"))?);
        libvirt.virsh(&[
            "snapshot-create-as",
            DOMAIN,
            "--disk-only",
            "--no-metadata",
            "--diskspec",
            &overlay,
        ])?;
        refused("virsh blockcommit web1 vda --active --pivot")?;
        console.work_on(REQUESTS)?;
        libvirt.virsh(&["blockcommit", DOMAIN, "vda", "--active", "--pivot"])?;
        // A foreign file at the disk's old place stays.
        std::fs::write(&image, "somebody's")?;
        let taken = host.sterna(["vm", "release", DOMAIN])?;
        ensure!(taken.stderr.contains("there is a file already"), "{taken:?}");
        ensure!(std::fs::read_to_string(&image)? == "somebody's");
        std::fs::remove_file(&image)?;
        libvirt.virsh(&["managedsave", DOMAIN])?;
        refused("virsh managedsave-remove web1")?;
        libvirt.virsh(&["managedsave-remove", DOMAIN])?;
        host.sterna(["migrate", DOMAIN, "--to", "b", "--bandwidth", "1MiB/s", "--detach"])?.success()?;
        refused("is being migrated")?;
        host.sterna(["migration", "cancel", "m0"])?.success()?;
        host.until_idle()?;
        let released: Vm = host.ask(&["vm", "release", DOMAIN])?;
        ensure!(released.message.is_some_and(|message| message.contains(&*served.to_string_lossy())));
        ensure!(served.exists(), "the image is the disk");
        libvirt.check_definitions(&[&text(&served)?], &["protocol='nbd'"])
    });
}

#[test]
fn a_few_random_rounds_lose_nothing() {
    e2e::play(|host| e2e::domain_rounds::play(host, 4, 3, |round| println!("{round}")).map(drop));
}

#[test]
fn a_domain_goes_to_another_host_its_disk_first_and_its_memory_by_virsh() {
    e2e::play_pair(|pair| {
        let Some(here) = Libvirtd::start(&pair.alpha)? else { return Ok(()) };
        let Some(there) = Libvirtd::start(&pair.beta)? else { return Ok(()) };
        let image = image(&pair.alpha, "disk.raw", "raw")?;
        let console = here.domain(&pair.alpha, &[(&image, "raw")], FILL_BYTES)?;
        adopt(&pair.alpha, &here)?;
        let whole = pair.alpha.sterna(["migrate", DOMAIN, "--to", "beta:a"])?;
        ensure!(whole.stderr.contains("virsh migrate"), "{}", whole.stderr);

        let volume = format!("volume:{DOMAIN}");
        let moved: Migration = pair.alpha.ask(&["migrate", &volume, "--to", "beta:a", "--serve-here"])?;
        ensure!(moved.state == MigrationState::Moved, "{moved:?}");
        console.work_on(REQUESTS)?;

        let of = |host: &Host| {
            let volumes: Vec<Volume> = host.ask(&["volume", "list"])?;
            anyhow::Ok(volumes.into_iter().next().context("there is a volume")?.socket)
        };
        let definition = here.virsh(&["dumpxml", DOMAIN, "--migratable"])?;
        let definition = definition.replace(&of(&pair.alpha)?, &of(&pair.beta)?);
        let file = pair.alpha.path("there.xml");
        std::fs::write(&file, definition)?;
        let file = text(&file)?;
        let to = format!("qemu+unix:///system?socket={}", there.socket()?);
        let words = [
            "migrate",
            "--live",
            "--persistent",
            "--undefinesource",
            "--xml",
            &file,
            "--persistent-xml",
            &file,
        ];
        here.virsh(&[&words[..], &[DOMAIN, &to, "--migrateuri", "tcp://127.0.0.1"]].concat())?;
        console.work_on(REQUESTS)?;

        pair.alpha.ask::<Vm>(&["vm", "release", DOMAIN])?;
        pair.alpha.sterna(["volume", "remove", DOMAIN])?.success()?;
        check_nothing_left(&pair.alpha)?;
        let adopted = adopt(&pair.beta, &there)?;
        ensure!(adopted.state == VmState::Running && adopted.volumes == [DOMAIN], "{adopted:?}");
        ensure!(pair.beta.images("a")?.len() == 1, "nothing was copied");
        console.work_on(REQUESTS)?;
        pair.beta.ask::<Vm>(&["vm", "release", DOMAIN])?;
        console.work_on(REQUESTS)?;
        console.verify()
    });
}

pub(crate) fn adopt(host: &Host, libvirt: &Libvirtd) -> anyhow::Result<Vm> {
    let socket = libvirt.socket()?;
    host.ask(&["vm", "adopt", "--libvirt", DOMAIN, "--store", "a", "--libvirt-socket", &socket])
}

/// Gives an order to a daemon that kills itself at a step, and starts another daemon.
fn kill_at(host: &mut Host, words: &[&str], point: &str) -> anyhow::Result<()> {
    host.stop()?;
    host.start_with(&[("STERNA_FAIL_POINT", point)])?;
    let outcome = host.sterna(words)?;
    ensure!(outcome.code != 0, "{point} of {words:?} was not passed: {}", outcome.stdout);
    host.wait_for_end()?;
    host.start()
}

/// Waits until no operation is under way, and returns the VM if it exists.
fn settled(host: &Host) -> anyhow::Result<Option<Option<Vm>>> {
    let vms: Vec<Vm> = host.ask(&["vm", "list"])?;
    let is_under_way = |vm: &Vm| vm.message.as_ref().is_some_and(|message| message.contains("libvirt"));
    Ok((!vms.iter().any(is_under_way)).then(|| vms.into_iter().next()))
}

fn check_nothing_left(host: &Host) -> anyhow::Result<()> {
    ensure!(host.ask::<Vec<Vm>>(&["vm", "list"])?.is_empty(), "a VM is left");
    ensure!(host.ask::<Vec<Volume>>(&["volume", "list"])?.is_empty(), "a volume is left");
    for store in ["a", "b"] {
        let images = host.images(store)?;
        ensure!(images.is_empty(), "{images:?} are left in {store}");
    }
    Ok(())
}

fn until_shut_off(libvirt: &Libvirtd) -> anyhow::Result<()> {
    until("the domain is shut off", || {
        Ok((libvirt.virsh(&["domstate", DOMAIN])?.trim() == "shut off").then_some(()))
    })
}

fn image(host: &Host, name: &str, format: &str) -> anyhow::Result<PathBuf> {
    let image = host.path(name);
    let tool = Program::qemu_img();
    tool.args(["create", "-q", "-f", format, &text(&image)?, &DISK_BYTES.to_string()]).succeed()?;
    Ok(image)
}

fn text(path: &Path) -> anyhow::Result<String> {
    path.to_str().map(str::to_owned).context("a folder that is not UTF-8")
}
