//! The guest against servers that break their disks or their connections: it must report every broken disk,
//! and survive every broken connection.

#![expect(clippy::unwrap_used, reason = "the whole file is tests and their support")]

mod support;

use std::num::NonZeroU64;
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use lab::workload::{
    Content, Finding, Findings, Guest, GuestOptions, Mix, StoppedGuest, fill, verify_export, verify_file,
};
use testbed::nbd_client::{Client, ClientError, ClientOptions, Operation, ReplyStyle};

use self::support::{Fault, Server, Style};

const DISK_BYTES: usize = 4 << 20;
const BLOCK_BYTES: u32 = 8192;

/// Many zeroes, so that they matter on a small disk.
const MIX: Mix = Mix { writes: 30_000, durable_writes: 500, flushes: 500, trims: 500, zeroes: 500 };

fn start(style: Style, fault: Fault) -> (Server, Client) {
    let server = Server::start(DISK_BYTES, style, fault);
    let client = Client::connect(&server.address(), ClientOptions::default()).unwrap();
    (server, client)
}

/// Lets a guest do this many requests.
fn work(client: Client, content: Content, requests: u64) -> StoppedGuest {
    let options =
        GuestOptions { mix: MIX, requests_max: NonZeroU64::new(requests), ..GuestOptions::default() };
    Guest::start(client, content, options).unwrap().wait().unwrap()
}

/// Fills half the disk, works, and verifies all of it; returns the guest's findings, and those of the final check.
fn run(style: Style, fault: Fault) -> (Findings, Findings, StoppedGuest) {
    let (server, mut client) = start(style, fault);
    let mut content = Content::new(DISK_BYTES as u64, BLOCK_BYTES, 42);
    fill(&mut client, &mut content, DISK_BYTES as u64 / 2, |_| ()).unwrap();
    let mut stopped = work(client, content, 6000);
    let at_end = verify_export(&mut stopped.client, &stopped.content, |_| ()).unwrap();
    let in_file = verify_file(&server.dump(), &stopped.content, |_| ()).unwrap();
    assert_eq!(at_end.count(), in_file.count(), "the export and its image must tell the same");
    (stopped.findings.clone(), at_end, stopped)
}

/// Checks that the guest, or the final check, finds the fault.
fn check_is_caught(fault: Fault) {
    let (findings, at_end, _) = run(Style::Simple, fault);
    assert!(!findings.is_empty() || !at_end.is_empty(), "{fault:?} went unnoticed");
}

#[test]
fn a_good_disk_gives_no_findings_and_all_requests_are_recorded() {
    for style in [Style::Simple, Style::Structured] {
        let (findings, at_end, stopped) = run(style, Fault::None);
        assert!(findings.is_empty() && at_end.is_empty(), "{style:?}: {findings:?} {at_end:?}");
        assert_eq!(stopped.recorder.completions(), 6000);
        assert!(stopped.content.blocks_written() > 128, "writes beyond what was filled");
    }
}

#[test]
fn planted_corruption_is_caught() {
    for fault in [
        Fault::LoseWrite,
        Fault::TearWrite,
        Fault::MisplaceWrite,
        Fault::RestoreOldBlock,
        Fault::IgnoreZeroes,
    ] {
        check_is_caught(fault);
    }
}

#[test]
fn a_failed_write_is_a_finding_and_its_block_may_hold_anything() {
    let (findings, at_end, _) = run(Style::Structured, Fault::FailWrite);
    let is_failed_write =
        |finding: &Finding| matches!(finding, Finding::Failed { operation: "write", errno: 5, .. });
    assert!(!findings.is_empty() && findings.first().iter().all(is_failed_write), "{findings:?}");
    assert!(at_end.is_empty(), "{at_end:?}");
}

#[test]
fn swapped_blocks_are_caught_and_named() {
    let (server, mut client) = start(Style::Structured, Fault::None);
    let mut content = Content::new(DISK_BYTES as u64, BLOCK_BYTES, 42);
    fill(&mut client, &mut content, DISK_BYTES as u64, |_| ()).unwrap();
    server.tamper(|disk| {
        let (first, second) = disk.split_at_mut(BLOCK_BYTES as usize);
        first.swap_with_slice(&mut second[..BLOCK_BYTES as usize]);
    });
    let findings = verify_export(&mut client, &content, |_| ()).unwrap();
    assert_eq!(findings.count(), 2);
    assert!(
        findings.first()[0]
            .to_string()
            .starts_with("block 0: expected version 1, found from byte 16 on version 1 of block 1")
    );
}

#[test]
fn a_wrong_image_file_is_caught() {
    let (server, mut client) = start(Style::Structured, Fault::None);
    let mut content = Content::new(DISK_BYTES as u64, BLOCK_BYTES, 42);
    fill(&mut client, &mut content, DISK_BYTES as u64 / 2, |_| ()).unwrap();
    let image = server.dump();
    let file = std::fs::File::options().write(true).open(&image).unwrap();
    assert!(verify_file(&image, &content, |_| ()).unwrap().is_empty());
    file.write_all_at(&[1], DISK_BYTES as u64 - 1).unwrap();
    assert_eq!(verify_file(&image, &content, |_| ()).unwrap().count(), 1);
    file.set_len(DISK_BYTES as u64 - 1).unwrap();
    assert!(verify_file(&image, &content, |_| ()).is_err(), "an image that is too short");
}

#[test]
fn broken_connections_are_replaced_and_what_was_in_flight_is_sent_again() {
    for style in [Style::Simple, Style::Structured] {
        let (findings, at_end, stopped) = run(style, Fault::DropConnections { every: 500 });
        assert!(findings.is_empty() && at_end.is_empty(), "{style:?}: {findings:?} {at_end:?}");
        assert!(stopped.client.reconnects() >= 10, "{} reconnects", stopped.client.reconnects());
        assert_eq!(stopped.recorder.completions(), 6000, "every request completes exactly once");
    }
}

#[test]
fn a_server_that_stays_away_is_an_error_after_the_deadline() {
    let server = Server::start(DISK_BYTES, Style::Simple, Fault::DropConnections { every: 1 });
    let options = ClientOptions { reconnect_deadline: Duration::ZERO, ..ClientOptions::default() };
    let mut client = Client::connect(&server.address(), options).unwrap();
    let error = client.perform(Operation::Flush).unwrap_err();
    assert!(matches!(error, ClientError::Reconnect { .. }), "{error:?}");
}

#[test]
fn a_guest_that_loses_its_disk_says_why() {
    let server = Server::start(DISK_BYTES, Style::Simple, Fault::DropConnections { every: 100 });
    let options = ClientOptions { reconnect_deadline: Duration::ZERO, ..ClientOptions::default() };
    let client = Client::connect(&server.address(), options).unwrap();
    let content = Content::new(DISK_BYTES as u64, BLOCK_BYTES, 42);
    let guest = Guest::start(client, content, GuestOptions::default()).unwrap();
    let error = format!("{:#}", guest.wait().unwrap_err());
    // The rest is the error of the connection, which depends on the side that was sending.
    assert!(error.starts_with("the guest lost its disk: no new connection within 0 s: "), "{error}");
}

#[test]
fn requests_outside_the_export_are_not_sent() {
    let (_server, mut client) = start(Style::Simple, Fault::None);
    for (offset, length) in [(DISK_BYTES as u64 - 1, 2), (u64::MAX, 1), (0, 0)] {
        let error = client.perform(Operation::Read { offset, buffer: vec![0; length] }).unwrap_err();
        assert!(matches!(error, ClientError::Request { .. }), "{error:?}");
    }
}

#[test]
fn a_client_that_asks_for_simple_replies_gets_them() {
    let server = Server::start(DISK_BYTES, Style::Structured, Fault::None);
    server.tamper(|disk| disk[..4].copy_from_slice(b"data"));
    for replies in [ReplyStyle::Simple, ReplyStyle::Structured] {
        let options = ClientOptions { replies, ..ClientOptions::default() };
        let mut client = Client::connect(&server.address(), options).unwrap();
        let read = client.perform(Operation::Read { offset: 0, buffer: vec![9; 1 << 20] }).unwrap();
        let Operation::Read { buffer, .. } = read else { panic!("a read comes back as a read") };
        assert_eq!(&buffer[..5], b"data\0");
        assert!(buffer[5..].iter().all(|byte| *byte == 0), "{replies:?}");
    }
}
