//! A VM that Sterna starts and moves. Its guest works on its disk and checks it. Its console connects to the
//! test, whichever host runs it.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use api::VmState;
use testbed::nbd_client::Address;
use testbed::vm::{DiskModel, Hardware, VmOptions};
use testbed::{Host, until};

pub use testbed::vm::{GuestImage, Verdict, Vm};

/// Name of the VM.
pub const NAME: &str = "web1";
/// Size of a block that the guest checks, in bytes.
const BLOCK_BYTES: u32 = 4096;
const SEED: u64 = 7;
/// Number of requests after which a guest counts as at work.
const REQUESTS: u64 = 50;
/// Pause of a worker between two requests. A thousand requests a second suffice. Without a pause each emulated guest would take a
/// whole processor from other tests.
const PAUSE: Duration = Duration::from_millis(3);

/// QEMU's arguments of a software TPM for [`start_with_words`], which the guest uses and checks.
pub const TPM: [&str; 6] = [
    "-chardev",
    "socket,id=tpm,path={tpm}",
    "-tpmdev",
    "emulator,id=tpm0,chardev=tpm",
    "-device",
    "tpm-tis,tpmdev=tpm0",
];

/// Returns [`TPM`], or nothing if there is no swtpm.
pub fn tpm_words() -> &'static [&'static str] {
    match std::process::Command::new("swtpm").arg("--version").output() {
        Ok(_) => &TPM,
        Err(_) => {
            omission::machine_lacks("swtpm");
            &[]
        }
    }
}

/// The work of the guest.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// Bytes of its disk that it fills at first.
    pub fill_bytes: u64,
    /// Requests in flight; 0: it fills its disk, and is then idle.
    pub workers: u32,
    /// Bytes of its memory that it checks and rewrites at random, about 8 MB a second.
    pub memory_bytes: u64,
    /// Bytes of its memory that it writes as fast as it can, faster than a slow link.
    pub swept_bytes: u64,
    /// Pause of a worker between two requests.
    pub pause: Duration,
}

impl Work {
    /// Returns work on the disk alone.
    pub fn on_disk(fill_bytes: u64) -> Self {
        Self { fill_bytes, workers: 4, memory_bytes: 0, swept_bytes: 0, pause: PAUSE }
    }

    /// Returns the options of a small VM with `disks` disks and this work.
    ///
    /// # Errors
    /// If there is no guest image.
    pub(crate) fn options(self, disks: usize) -> anyhow::Result<VmOptions> {
        let Self { fill_bytes, workers, memory_bytes, swept_bytes, pause } = self;
        let (hardware, block_bytes, seed) = (Hardware::SMALL, BLOCK_BYTES, SEED);
        let usual = VmOptions::new(GuestImage::find(None)?);
        let work = VmOptions { fill_bytes, memory_bytes, swept_bytes, pause, ..usual };
        Ok(VmOptions { hardware, disks, block_bytes, workers, seed, ..work })
    }
}

/// Adds a VM with the volume `v` of `host` as its disk, and starts it.
///
/// # Errors
/// What the daemon says.
pub fn start(host: &Host, fill_bytes: u64) -> anyhow::Result<Vm> {
    start_with(host, &["v"], fill_bytes)
}

/// Adds a VM with these volumes of `host` as its disks, striped as one, and starts it.
///
/// # Errors
/// What the daemon says.
pub fn start_with(host: &Host, volumes: &[&str], fill_bytes: u64) -> anyhow::Result<Vm> {
    start_with_words(host, volumes, fill_bytes, &[])
}

/// Starts it as [`start_with`], with more arguments for QEMU.
///
/// # Errors
/// What the daemon says.
pub fn start_with_words(
    host: &Host,
    volumes: &[&str],
    fill_bytes: u64,
    words: &[&str],
) -> anyhow::Result<Vm> {
    start_with_sections(host, volumes, fill_bytes, words, "")
}

/// Starts it as [`start_with_words`], with `sections` at the end of the definition.
///
/// # Errors
/// What the daemon says.
pub fn start_with_sections(
    host: &Host,
    volumes: &[&str],
    fill_bytes: u64,
    words: &[&str],
    sections: &str,
) -> anyhow::Result<Vm> {
    let vm = Vm::expect(&host.path("console"), Work::on_disk(fill_bytes).options(volumes.len())?)?;
    let definition = vm.definition(volumes, words)? + sections;
    add_and_start(host, vm, &definition)
}

/// Adds a VM with these volumes of `host` as its disks, more arguments for QEMU, and `sections` at the end of the definition. Does
/// not start it.
///
/// # Errors
/// What the daemon says.
pub fn add(host: &Host, volumes: &[&str], words: &[&str], sections: &str) -> anyhow::Result<Vm> {
    let vm = Vm::expect(&host.path("console"), Work::on_disk(0).options(volumes.len())?)?;
    let definition = vm.definition(volumes, words)? + sections;
    add_with(host, &definition)?;
    Ok(vm)
}

/// Starts it as [`start_with`], with this work.
///
/// # Errors
/// What the daemon says.
pub fn start_busy(host: &Host, volumes: &[&str], work: Work) -> anyhow::Result<Vm> {
    let vm = Vm::expect(&host.path("console"), work.options(volumes.len())?)?;
    let definition = vm.definition(volumes, &[])?;
    add_and_start(host, vm, &definition)
}

/// Starts it as [`start_with_words`], with the volume `v` and with `sections` at the end of the definition. QEMU may run as any
/// user, because all of its files are readable for everyone.
///
/// # Errors
/// What the daemon says.
pub fn start_for_anybody(host: &Host, fill_bytes: u64, words: &[&str], sections: &str) -> anyhow::Result<Vm> {
    let mut options = Work::on_disk(fill_bytes).options(1)?;
    let GuestImage { kernel, initramfs } = &mut options.image;
    for (file, name) in [(kernel, "kernel"), (initramfs, "initramfs")] {
        let copy = host.path(name);
        std::fs::copy(&*file, &copy).context("copy the guest")?;
        std::fs::set_permissions(&copy, std::fs::Permissions::from_mode(0o644))?;
        *file = copy;
    }
    let vm = Vm::expect(&host.path("console"), options)?;
    let definition = vm.definition(&["v"], words)? + sections;
    add_and_start(host, vm, &definition)
}

/// Boots a VM on an export without a daemon, and waits until its guest works.
///
/// # Errors
/// If there is no QEMU or no guest image, or the guest does not begin to work.
pub fn launch(export: &Address, fill_bytes: u64, disk: DiskModel) -> anyhow::Result<Vm> {
    let options = VmOptions { fill_bytes, disk, pause: PAUSE, ..VmOptions::new(GuestImage::find(None)?) };
    let vm = Vm::launch(export, options)?;
    vm.work_on(1)?;
    Ok(vm)
}

fn add_with(host: &Host, definition: &str) -> anyhow::Result<()> {
    let file = host.path("vm.toml");
    std::fs::write(&file, definition).context("write the definition")?;
    let file = file.to_str().context("a folder that is not UTF-8")?;
    host.sterna(["vm", "add", NAME, "--definition", file])?.success().map(drop)
}

fn add_and_start(host: &Host, vm: Vm, definition: &str) -> anyhow::Result<Vm> {
    add_with(host, definition)?;
    host.sterna(["vm", "start", NAME])?.success()?;
    if vm.options().workers > 0 {
        vm.work_on(1)?;
    } else {
        until("the idle guest has filled its disk", || Ok((!vm.console().ticks().is_empty()).then_some(())))?;
    }
    Ok(vm)
}

/// Compares an image, which is not being written, with a guest's verdict.
///
/// # Errors
/// If any byte differs from the written one.
pub fn verify_image(vm: &VmOptions, verdict: Verdict, image: &Path) -> anyhow::Result<()> {
    let Verdict { blocks, seed, digest, .. } = verdict;
    let wrong = lab::workload::verify_digest(image, blocks, vm.block_bytes, seed, digest, |_| {})?;
    ensure!(wrong.is_empty(), "{wrong:#?}");
    Ok(())
}

/// Returns the VMs of a host.
///
/// # Errors
/// What the daemon says.
pub fn vms(host: &Host) -> anyhow::Result<Vec<api::Vm>> {
    host.ask(&["vm", "list"])
}

/// Waits until the VM runs at `there`, and `elsewhere` knows of none.
///
/// # Errors
/// If that does not happen in time.
pub fn check_at(there: &Host, elsewhere: &Host) -> anyhow::Result<()> {
    until("the VM is at one host only", || {
        let (found, other) = (vms(there)?, vms(elsewhere)?);
        let runs = matches!(found.as_slice(), [vm] if vm.state == VmState::Running);
        Ok((runs && other.is_empty()).then_some(()))
    })
}

/// Waits until the VM runs at `there` alone, as [`check_at`], and checks that its guest works.
///
/// # Errors
/// If that does not happen in time.
pub fn check_works_at(there: &Host, elsewhere: &Host, vm: &Vm) -> anyhow::Result<()> {
    check_at(there, elsewhere)?;
    vm.work_on(REQUESTS)
}

/// Waits until a host has a QEMU of the VM, and returns its process.
///
/// # Errors
/// If that does not happen in time.
pub fn process(host: &Host) -> anyhow::Result<u32> {
    until("the VM's QEMU is there", || Ok(vms(host)?.first().and_then(|vm| vm.process)))
}

/// Kills the QEMU process.
pub fn kill(process: u32) {
    // QEMU may have ended.
    let _ = testbed::signal(process, rustix::process::Signal::KILL);
}
