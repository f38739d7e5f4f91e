//! The lab's guest on a scene's volume, which knows the content of every block and checks every read.

use std::path::Path;
use std::time::Duration;

use anyhow::ensure;
use lab::workload::{self, Content, Findings, Guest, GuestOptions, StoppedGuest};
use testbed::nbd_client::{Address, Client, ClientOptions};
use testbed::{DEADLINE, until};

/// Size of the guest's requests in bytes.
pub const BLOCK_BYTES: u32 = 8192;
/// Seed of the guest's writes; any number is fine for a new disk.
const SEED: u64 = 0xe2e;

/// Connects to a disk. A connection that breaks is not made again.
///
/// # Errors
/// If the disk cannot be reached.
pub fn connect(export: &Address) -> anyhow::Result<Client> {
    Ok(Client::connect(export, without_reconnects())?)
}

/// Connects to a disk of zeroes, fills its first bytes, and starts a guest on it.
///
/// # Errors
/// If the disk cannot be reached or filled.
pub fn start(export: &Address, fill_bytes: u64) -> anyhow::Result<Guest> {
    start_with(export, fill_bytes, GuestOptions::default())
}

/// Starts a guest as [`start`], with these options.
///
/// # Errors
/// If the disk cannot be reached or filled.
pub fn start_with(export: &Address, fill_bytes: u64, work: GuestOptions) -> anyhow::Result<Guest> {
    let options = ClientOptions { reconnect_deadline: DEADLINE, ..ClientOptions::default() };
    begin(export, fill_bytes, options, work)
}

/// Starts a guest as [`start`], which stops at the first break of its connection.
///
/// # Errors
/// If the disk cannot be reached or filled.
pub fn start_without_reconnects(export: &Address, fill_bytes: u64) -> anyhow::Result<Guest> {
    begin(export, fill_bytes, without_reconnects(), GuestOptions::default())
}

/// Waits until a guest has made `requests` more requests.
///
/// # Errors
/// If it does not in time.
pub fn until_worked(guest: &Guest, requests: u64) -> anyhow::Result<()> {
    let first = guest.mark();
    until("the guest works", || {
        let done = guest.between(&first, &guest.mark()).completions;
        Ok((done >= requests).then_some(()))
    })
}

/// Waits until a guest has made all of its requests, and compares its whole disk.
///
/// # Errors
/// If any byte was wrong.
pub fn rest(guest: Guest) -> anyhow::Result<StoppedGuest> {
    verify(guest.wait()?)
}

/// Stops a guest and compares its whole disk with the acknowledged writes.
///
/// # Errors
/// If any byte was wrong, or the guest has made no request.
pub fn stop_and_verify(guest: Guest) -> anyhow::Result<StoppedGuest> {
    verify(guest.stop()?)
}

/// Compares an image file, which no daemon serves, with the guest's knowledge.
///
/// # Errors
/// If any byte is wrong.
pub fn verify_image(image: &Path, content: &Content) -> anyhow::Result<()> {
    check(&workload::verify_file(image, content, |_| {})?)
}

fn without_reconnects() -> ClientOptions {
    ClientOptions { reconnect_deadline: Duration::ZERO, ..ClientOptions::default() }
}

fn begin(
    export: &Address,
    fill_bytes: u64,
    options: ClientOptions,
    work: GuestOptions,
) -> anyhow::Result<Guest> {
    let mut client = Client::connect(export, options)?;
    let mut content = Content::new(client.export().size, BLOCK_BYTES, SEED);
    workload::fill(&mut client, &mut content, fill_bytes, |_| {})?;
    Guest::start(client, content, work)
}

fn verify(mut stopped: StoppedGuest) -> anyhow::Result<StoppedGuest> {
    let mut findings = std::mem::take(&mut stopped.findings);
    findings.append(workload::verify_export(&mut stopped.client, &stopped.content, |_| {})?);
    check(&findings)?;
    ensure!(stopped.content.blocks_written() > 0, "the guest wrote nothing");
    Ok(stopped)
}

fn check(findings: &Findings) -> anyhow::Result<()> {
    let first: Vec<String> = findings.first().iter().map(ToString::to_string).collect();
    ensure!(findings.is_empty(), "{} wrong: {first:#?}", findings.count());
    Ok(())
}
