//! The lab's machine in QEMU on a scene's volume: it writes and checks its disk from inside.

use std::path::Path;

use anyhow::ensure;
use lab::demo::{DemoGuest as _, Progress, StoppedDemoGuest as _};
use lab::vm::{DiskModel, GuestImage, MachineOptions, StoppedMachine};
use testbed::nbd_client::Address;
use tokio::runtime::Runtime;

use testbed::program::target_folder;

/// A machine at work, for tests that are written straight on.
#[derive(Debug)]
pub struct Machine {
    runtime: Runtime,
    machine: lab::vm::Machine,
    /// Requests that the machine has been seen to have done.
    requests: u64,
}

impl Machine {
    /// Boots a machine on a volume, and waits until it has filled the first bytes of its disk and works.
    ///
    /// # Errors
    /// If there is no QEMU or no guest image, or the machine does not begin to work.
    pub fn start(export: &Address, fill_bytes: u64, disk: DiskModel) -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let options = MachineOptions { fill_bytes, disk, ..MachineOptions::new(guest_image()?) };
        let mut progress = Progress::silent();
        let machine = runtime.block_on(lab::vm::Machine::start(export, options, &mut progress))?;
        Ok(Self { runtime, machine, requests: 0 })
    }

    /// Waits until the machine has done so many requests more.
    ///
    /// # Errors
    /// If it ends or stops working.
    pub fn work_on(&mut self, requests: u64) -> anyhow::Result<()> {
        self.requests += requests;
        self.runtime.block_on(self.machine.wait_for_requests(self.requests))
    }

    /// Lets the machine compare its whole disk, and powers it off.
    ///
    /// # Errors
    /// If the machine found anything wrong.
    pub fn stop_and_verify(self) -> anyhow::Result<VerifiedMachine> {
        let Self { runtime, machine, .. } = self;
        let stopped = runtime.block_on(machine.stop_and_verify(&mut Progress::silent()))?;
        check(&stopped)?;
        Ok(VerifiedMachine { runtime, stopped })
    }
}

/// A machine that has found nothing wrong and is powered off.
#[derive(Debug)]
pub struct VerifiedMachine {
    runtime: Runtime,
    stopped: StoppedMachine,
}

impl VerifiedMachine {
    /// Compares an image file, which nobody may be serving, with what the machine knows.
    ///
    /// # Errors
    /// If anything is wrong.
    pub fn verify_image(mut self, image: &Path) -> anyhow::Result<()> {
        self.runtime.block_on(self.stopped.verify_image(image, &mut Progress::silent()))?;
        check(&self.stopped)
    }
}

fn check(stopped: &StoppedMachine) -> anyhow::Result<()> {
    let wrong = stopped.wrong();
    ensure!(wrong.count == 0, "{} wrong: {:#?}", wrong.count, wrong.first);
    Ok(())
}

/// The image in cargo's target folder, unless the environment names another one.
///
/// # Errors
/// If it is not there; the message says how it is built.
pub fn guest_image() -> anyhow::Result<GuestImage> {
    match std::env::var_os("STERNA_GUEST_IMAGE") {
        Some(_) => GuestImage::find(None),
        None => GuestImage::find(Some(&target_folder()?.join("guest-image"))),
    }
}
