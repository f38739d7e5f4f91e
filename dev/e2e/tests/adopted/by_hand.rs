//! Tests of VMs that were started by hand with plain images: adopted, moved as a whole to another host, and released there with
//! plain images. The guest checks its disk all the time.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use api::{Migration, MigrationState, Vm, VmState, Volume};
use e2e::by_hand::{ByHand, open_files};
use e2e::vm::{self, NAME};
use e2e::{Host, Pair, Program, play_pair, until};

const DISK_BYTES: u64 = 32 << 20;
const FILL_BYTES: u64 = 4 << 20;
/// Requests of the guest before, between and after moves.
const REQUESTS: u64 = 100;
/// QEMU's arguments for a clone's backing file.
const BASE_WORDS: u64 = (4 << 20) / 8;

#[test]
fn a_machine_with_a_raw_image_of_blockdev_moves_whole_and_home_and_is_released_there() {
    play_pair(|pair| {
        let file = ["-blockdev", "file,node-name=f,filename=IMAGE", "-blockdev", "raw,node-name=d,file=f"];
        let machine =
            adopt(pair, "raw", &[&file[..], &["-device", "virtio-blk-pci,drive=d,id=root"]].concat())?;
        move_whole(&machine, &pair.alpha, &pair.beta, &["beta:a"])?;
        ensure!(!machine.image.exists(), "something could start from the original");
        move_whole(&machine, &pair.beta, &pair.alpha, &["alpha:b"])?;
        release(&machine, &pair.alpha, "b", "raw")
    });
}

#[test]
fn a_few_random_rounds_lose_nothing() {
    e2e::play(|host| e2e::adopted_rounds::play(host, 4, 1, |round| println!("{round}")).map(drop));
}

#[test]
fn a_machine_with_a_raw_image_of_drive_as_proxmox_writes_it_moves_whole_and_is_released_there() {
    play_pair(|pair| {
        let drive = "file=IMAGE,if=none,id=drive-scsi0,cache=none,aio=threads,format=raw,detect-zeroes=on";
        let disk = "scsi-hd,bus=scsihw0.0,channel=0,scsi-id=0,lun=0,drive=drive-scsi0,id=scsi0,bootindex=100";
        let bus = "virtio-scsi-pci,id=scsihw0,bus=pci.0,addr=0x5";
        let machine = adopt(pair, "raw", &["-device", bus, "-drive", drive, "-device", disk])?;
        move_whole(&machine, &pair.alpha, &pair.beta, &["beta:a"])?;
        release(&machine, &pair.beta, "a", "raw")
    });
}

#[test]
fn a_machine_with_a_qcow2_image_moves_whole_and_is_released_there() {
    play_pair(|pair| {
        let machine = adopt(pair, "qcow2", &["-drive", "file=IMAGE,if=virtio,format=qcow2"])?;
        move_whole(&machine, &pair.alpha, &pair.beta, &["beta:a", "--format", "qcow2"])?;
        release(&machine, &pair.beta, "a", "qcow2")
    });
}

#[test]
fn a_machine_with_two_disks_moves_whole_and_both_are_plain_files_there() {
    play_pair(|pair| {
        let words =
            ["-drive", "file=FIRST,if=virtio,format=raw", "-drive", "file=SECOND,if=virtio,format=raw"];
        let places = ["FIRST", "SECOND"];
        let machine = ByHand::start_on(&pair.alpha, "raw", DISK_BYTES, FILL_BYTES, &places, &words)?;
        let monitor = machine.monitor.to_str().context("a folder that is not UTF-8")?;
        let vm: Vm = pair.alpha.ask(&["vm", "adopt", NAME, "--qmp", monitor])?;
        ensure!(vm.volumes.len() == 2, "{vm:?}");
        move_whole(&machine, &pair.alpha, &pair.beta, &["beta:a"])?;
        let released: Vm = pair.beta.ask(&["vm", "release", NAME])?;
        ensure!(pair.beta.ask::<Vec<Volume>>(&["volume", "list"])?.is_empty(), "there are volumes");
        let process = released.process.context("it runs")?;
        let open = open_files(process)?;
        let images: Vec<_> =
            pair.beta.images("a")?.iter().map(|name| pair.beta.path("a").join(name)).collect();
        ensure!(images.len() == 2, "{images:?}");
        for image in &images {
            ensure!(open.contains(&image.canonicalize()?), "{open:?}");
        }
        machine.console.work_on(REQUESTS)?;
        machine.console.verify()?;
        machine.console.end();
        until_ended(process)?;
        images.iter().try_for_each(|image| compare(image, "raw").map(drop))
    });
}

#[test]
fn a_linked_clone_is_given_back_as_one_at_home_and_stands_alone_where_its_machine_moves_to() {
    play_pair(|pair| {
        let (base, clone) = (pair.alpha.path("base.raw"), pair.alpha.path("clone.qcow2"));
        let text = |path: &Path| path.to_str().map(str::to_owned).context("a folder that is not UTF-8");
        let content: Vec<u8> =
            (0..BASE_WORDS).flat_map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).collect();
        std::fs::write(&base, &content)?;
        let tool = || Program::qemu_img();
        // It is named relative to the clone, as by Proxmox.
        tool()
            .args(["create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw", &text(&clone)?])
            .run()?
            .success()?;
        let second = format!("file={},if=none,id=drive-scsi1,format=qcow2,cache=none", text(&clone)?);
        let words = [
            "-drive",
            "file=IMAGE,if=virtio,format=raw",
            "-device",
            "virtio-scsi-pci,id=scsihw0",
            "-drive",
            &second,
            "-device",
            "scsi-hd,bus=scsihw0.0,drive=drive-scsi1,id=scsi1",
        ];
        let machine = adopt(pair, "raw", &words)?;
        let released: Vm = pair.alpha.ask(&["vm", "release", NAME])?;
        let open = open_files(released.process.context("it runs")?)?;
        for image in [&machine.image, &base, &clone] {
            ensure!(open.contains(&image.canonicalize()?), "{open:?}");
        }
        machine.console.work_on(REQUESTS)?;
        let monitor = text(&machine.monitor)?;
        let vm: Vm = pair.alpha.ask(&["vm", "adopt", NAME, "--qmp", &monitor])?;
        ensure!(vm.volumes.len() == 2, "{vm:?}");
        let told: api::MigrationPlan = pair.alpha.ask(&["migrate", NAME, "--to", "beta:a", "--dry-run"])?;
        ensure!(told.warnings.iter().any(|text| text.contains("into one new image")), "{told:?}");
        move_whole(&machine, &pair.alpha, &pair.beta, &["beta:a"])?;
        ensure!(std::fs::read(&base)? == content, "what a clone stands on is nobody's to write");
        let released: Vm = pair.beta.ask(&["vm", "release", NAME])?;
        machine.console.work_on(REQUESTS)?;
        machine.console.verify()?;
        machine.console.end();
        until_ended(released.process.context("it runs")?)?;
        let moved = pair.beta.path("a").join(format!("{NAME}-1.qcow2"));
        let flat = pair.beta.path("flat.raw");
        let tool = Program::qemu_img().args(["convert", "-U", "-f", "qcow2", "-O", "raw"]);
        tool.arg(&moved).arg(&flat).succeed()?;
        ensure!(std::fs::read(&flat)? == content, "the clone has what its base had");
        Ok(())
    });
}

#[test]
fn a_machine_is_adopted_as_before_when_its_move_comes_to_nothing() {
    play_pair(|pair| {
        let machine = adopt(pair, "raw", &["-drive", "file=IMAGE,if=virtio,format=raw"])?;
        for killed in [false, true] {
            // It is so slow that it does not end before it is cancelled.
            let slowly = ["migrate", NAME, "--to", "beta:a", "--bandwidth", "1MiB/s", "--detach"];
            let begun: Migration = pair.alpha.ask(&slowly)?;
            machine.console.work_on(REQUESTS)?;
            if killed {
                pair.alpha.kill()?;
                pair.alpha.start()?;
            } else {
                pair.alpha.sterna(["migration", "cancel", &begun.id])?.success()?;
            }
            let ended = pair.alpha.wait_for_migration(&begun.id)?;
            ensure!(ended.state != MigrationState::Moved, "{ended:?}");
            until("it is at one host, and adopted", || {
                let (here, there) = (vm::vms(&pair.alpha)?, vm::vms(&pair.beta)?);
                // A leaving VM has no such message.
                let is_adopted = |vm: &Vm| vm.state == VmState::Running && vm.whole_move.is_some();
                Ok((there.is_empty() && matches!(here.as_slice(), [vm] if is_adopted(vm))).then_some(()))
            })?;
            machine.console.work_on(REQUESTS)?;
        }
        let released: Vm = pair.alpha.ask(&["vm", "release", NAME])?;
        let process = released.process.context("it runs")?;
        ensure!(open_files(process)?.contains(&machine.image.canonicalize()?), "{:?}", open_files(process)?);
        machine.console.work_on(REQUESTS)?;
        machine.console.verify()
    });
}

#[test]
fn a_guest_is_told_that_its_volume_has_grown() {
    e2e::play(|scene| {
        let file = ["-blockdev", "file,node-name=f,filename=IMAGE", "-blockdev", "raw,node-name=d,file=f"];
        let words = [&file[..], &["-device", "virtio-blk-pci,drive=d,id=root"]].concat();
        let machine = ByHand::start(scene, "raw", DISK_BYTES, FILL_BYTES, &words)?;
        let monitor = machine.monitor.to_str().context("a folder that is not UTF-8")?;
        scene.sterna(["vm", "adopt", NAME, "--qmp", monitor])?.success()?;
        // Each growth replaces the node of the one before.
        for mib in [48, 64, 80] {
            scene.sterna(["volume", "resize", NAME, &format!("{mib}MiB")])?.success()?;
            let size = size_in_qemu(&machine.monitor)?;
            ensure!(size == mib << 20, "QEMU has {size} bytes");
            machine.console.work_on(REQUESTS)?;
        }
        scene.sterna(["vm", "release", NAME])?.success()?;
        machine.console.work_on(REQUESTS)?;
        machine.console.verify()
    });
}

/// Returns the size of the VM's disk, from QEMU.
fn size_in_qemu(monitor: &Path) -> anyhow::Result<u64> {
    let stream = UnixStream::connect(monitor)?;
    let mut said = BufReader::new(&stream).lines();
    said.next().context("a greeting")??;
    for command in ["qmp_capabilities", "query-block"] {
        (&stream).write_all(format!("{{\"execute\": \"{command}\"}}\n").as_bytes())?;
        while let Some(line) = said.next().transpose()? {
            let answer: serde_json::Value = serde_json::from_str(&line)?;
            let Some(answer) = answer.get("return") else { continue };
            if let Some(devices) = answer.as_array() {
                let device = devices
                    .iter()
                    .find(|device| device["qdev"].as_str().is_some_and(|path| path.contains("root")));
                let size = device.and_then(|device| device["inserted"]["image"]["virtual-size"].as_u64());
                return size.context("a disk with a size");
            }
            break;
        }
    }
    anyhow::bail!("QEMU has ended")
}

/// Starts a VM by hand, and adopts it while it works.
fn adopt(pair: &Pair, format: &str, words: &[&str]) -> anyhow::Result<ByHand> {
    let machine = ByHand::start(&pair.alpha, format, DISK_BYTES, FILL_BYTES, words)?;
    let monitor = machine.monitor.to_str().context("a folder that is not UTF-8")?;
    let vm: Vm = pair.alpha.ask(&["vm", "adopt", NAME, "--qmp", monitor])?;
    let whole = vm.whole_move.context("it says what a move would make of it")?;
    ensure!(whole.obstacle.is_none() && whole.left_behind.is_empty(), "{whole:?}");
    machine.console.work_on(REQUESTS)?;
    Ok(machine)
}

fn move_whole(machine: &ByHand, from: &Host, to: &Host, words: &[&str]) -> anyhow::Result<()> {
    let moved: Migration = from.ask(&[&["migrate", NAME, "--to"], words].concat())?;
    ensure!(moved.state == MigrationState::Moved, "{moved:?}");
    vm::check_at(to, from)?;
    machine.console.work_on(REQUESTS)
}

/// Releases the VM, lets it work, and compares the image with the guest's knowledge.
fn release(machine: &ByHand, scene: &Host, store: &str, format: &str) -> anyhow::Result<()> {
    let released: Vm = scene.ask(&["vm", "release", NAME])?;
    ensure!(released.state == VmState::Running, "{released:?}");
    ensure!(vm::vms(scene)?.is_empty() && scene.ask::<Vec<Volume>>(&["volume", "list"])?.is_empty());
    let [image] = scene.images(store)?.try_into().map_err(|names| anyhow::anyhow!("{names:?}"))?;
    let image = scene.path(store).join(image);
    let process = released.process.context("it runs")?;
    ensure!(open_files(process)?.contains(&image.canonicalize()?), "{:?}", open_files(process)?);
    machine.console.work_on(REQUESTS)?;
    machine.console.verify()?;
    machine.console.end();
    until_ended(process)?;
    let image = compare(&image, format)?;
    vm::verify_image(machine.console.options(), machine.console.verdict()?, &image)
}

/// Shuts the guest down, so that QEMU writes its cache.
fn until_ended(process: u32) -> anyhow::Result<()> {
    until("QEMU has ended", || Ok(open_files(process).map_or(true, |files| files.is_empty()).then_some(())))
}

/// Checks an image with QEMU's tools, and returns a raw copy.
fn compare(image: &Path, format: &str) -> anyhow::Result<PathBuf> {
    let path = image.to_str().context("a folder that is not UTF-8")?;
    let tool = || Program::qemu_img();
    let raw = image.with_extension("compared");
    tool().args(["convert", "-f", format, "-O", "raw", path]).arg(&raw).run()?.success()?;
    tool().args(["compare", "-f", format, "-F", "raw", path]).arg(&raw).run()?.success()?;
    if format == "qcow2" {
        tool().args(["check", "-f", format, path]).run()?.success()?;
    }
    Ok(raw)
}
