//! A real VM in QEMU against a correct server, and against one that loses writes.
//!
//! The tests need QEMU and the guest image (`scripts/install-packages demo`, `scripts/guest-image`).

#![expect(clippy::unwrap_used, reason = "the whole file is tests and their support")]

#[expect(dead_code, reason = "shared with the tests of the thread guest, which use all faults")]
mod support;

use lab::demo::{DemoGuest, Progress, StoppedDemoGuest};
use lab::vm::{GuestImage, StoppedVm, VmOptions, start_vm};
use testbed::nbd_client::Address;

use self::support::{Fault, Server, Style};

const DISK_BYTES: usize = 64 << 20;

/// Boots a VM, lets it do some thousand requests, and stops it.
async fn run(fault: Fault) -> (Server, StoppedVm) {
    let server = Server::start(DISK_BYTES, Style::Simple, fault);
    let image = GuestImage::find(None).unwrap();
    let options = VmOptions { fill_bytes: DISK_BYTES as u64 / 2, ..VmOptions::new(image) };
    let mut progress = Progress::silent();
    let machine = start_vm(&server.address(), options, &mut progress).await.unwrap();
    let first = machine.mark();
    machine.has_done(5000).await.unwrap();
    let last = machine.mark();
    let felt = machine.between(&first, &last);
    assert!(felt.iops > 0.0 && !felt.longest_stall.is_zero(), "{felt:?}");
    let stopped = machine.stop_and_verify(&mut progress).await.unwrap();
    (server, stopped)
}

#[tokio::test]
async fn a_machine_works_on_a_good_disk_and_knows_its_image() {
    let (server, mut stopped) = run(Fault::None).await;
    stopped.verify_image(&server.dump(), &mut Progress::silent()).await.unwrap();
    assert_eq!(stopped.wrong().count, 0, "{:?}", stopped.wrong());

    server.tamper(|disk| disk[12_345] ^= 1);
    stopped.verify_image(&server.dump(), &mut Progress::silent()).await.unwrap();
    assert_eq!(stopped.wrong().count, 1, "one block was changed");
}

#[tokio::test]
async fn a_machine_notices_that_writes_are_lost() {
    let (_server, stopped) = run(Fault::LoseWrite).await;
    assert!(stopped.wrong().count > 0);
    assert!(stopped.wrong().first[0].contains("expected version"), "{:?}", stopped.wrong());
}

#[tokio::test]
async fn a_machine_survives_connections_that_break() {
    let (_server, stopped) = run(Fault::DropConnections { every: 1500 }).await;
    assert_eq!(stopped.wrong().count, 0, "{:?}", stopped.wrong());
}

#[tokio::test]
async fn a_machine_without_a_disk_shows_what_qemu_says() {
    let options = VmOptions::new(GuestImage::find(None).unwrap());
    let nowhere = Address::new("/nonexistent/nbd.sock", "disk");
    let error = start_vm(&nowhere, options, &mut Progress::silent()).await.unwrap_err().to_string();
    assert!(error.contains("ended before it could begin to work") && error.contains("nbd.sock"), "{error}");
}
