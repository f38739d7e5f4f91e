//! Connections that one server passes on to another: no byte is lost, and none is repeated.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use std::io::{Read as _, Write as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use export::nbd::protocol::{PAYLOAD_LENGTH_MAX, REQUEST_MAGIC, command};
use export::nbd::{Drained, Limits};
use support::raw_client::{RawClient, RawReply, Style};
use support::{PATIENCE, PassedOn, Running, on_each_engine};

const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;

fn request(kind: u16, cookie: u64, offset: u64, length: usize, data: &[u8]) -> Vec<u8> {
    let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
    bytes.extend(0_u16.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(u32::try_from(length).unwrap().to_be_bytes());
    bytes.extend(data);
    bytes
}

fn pass_on(server: &Running) -> PassedOn {
    server.pass_on(PATIENCE).recv_timeout(PATIENCE).unwrap()
}

fn all_done(passed: &PassedOn) {
    assert_eq!(passed.drained, Drained { connections_cut: 0 });
}

#[test]
fn a_stream_of_requests_is_cut_anywhere_and_each_is_answered_once() {
    const REQUESTS: usize = 3000;
    let lengths = [512_usize, 4096, 777, 70_000, 512, 300_000, 1];
    let place = |number: usize| (number % 60) as u64 * (1 << 20);
    on_each_engine(|choice| {
        let server = Running::start(choice, Limits::STANDARD);
        let client = RawClient::connect(&server, "disk", Style::Simple);
        // N.B. `client` is kept: the connection exists when the last reply has come.
        let (mut sending, mut receiving) =
            (client.stream.try_clone().unwrap(), client.stream.try_clone().unwrap());
        let (credit, granted) = channel::<()>();
        let is_over = AtomicBool::new(false);
        let mut passes = 0;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let mut stream = Vec::new();
                for number in 0..REQUESTS {
                    let length = lengths[number % lengths.len()];
                    let byte = (number % 251) as u8 + 1;
                    stream.extend(request(
                        command::WRITE,
                        number as u64,
                        place(number),
                        length,
                        &vec![byte; length],
                    ));
                    // The lengths of pieces and requests have nothing in common, so pieces end anywhere in requests.
                    while stream.len() > 4999 {
                        sending.write_all(&stream[..4999]).unwrap();
                        stream.drain(..4999);
                    }
                    if number >= 50 {
                        granted.recv().unwrap();
                    }
                }
                sending.write_all(&stream).unwrap();
            });
            let is_over = &is_over;
            scope.spawn(move || {
                let mut seen = vec![false; REQUESTS];
                for _ in 0..REQUESTS {
                    let mut reply = [0; 16];
                    receiving.read_exact(&mut reply).unwrap();
                    assert_eq!(reply[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0]);
                    let cookie = u64::from_be_bytes(reply[8..].try_into().unwrap()) as usize;
                    assert!(!std::mem::replace(&mut seen[cookie], true), "{cookie} was answered twice");
                    // The sender may be done.
                    let _ = credit.send(());
                }
                is_over.store(true, Ordering::SeqCst);
            });
            while !is_over.load(Ordering::SeqCst) {
                let passed = pass_on(&server);
                all_done(&passed);
                assert_eq!(passed.unread.len(), 1);
                passes += 1;
            }
        });
        assert!(passes > 10, "{passes}");
        let written = server.probe.writes();
        assert_eq!(written.len(), REQUESTS, "each was carried out once");
        let mut check = RawClient::connect(&server, "disk", Style::Simple);
        for number in REQUESTS - 60..REQUESTS {
            let length = lengths[number % lengths.len()];
            check.stream.write_all(&request(command::READ, 1, place(number), length, &[])).unwrap();
            assert_eq!(check.reply(), RawReply::Simple(0, 1));
            assert!(check.read_bytes(length).iter().all(|byte| *byte == (number % 251) as u8 + 1));
        }
    });
}

#[test]
fn a_request_is_cut_in_each_of_its_parts() {
    on_each_engine(|choice| {
        let server = Running::start(choice, Limits::STANDARD);
        let large = PAYLOAD_LENGTH_MAX as usize;
        let cases = [
            (request(command::WRITE, 1, 4096, 8192, &[5; 8192]), 0),
            // Received directly into its buffer.
            (request(command::WRITE, 1, 1 << 20, large, &vec![6; large]), 0),
            // Dropped, and then refused.
            (request(command::WRITE, 1, 1 << 40, 1 << 20, &vec![7; 1 << 20]), ENOSPC),
            (request(command::FLUSH, 1, 0, 0, &[]), 0),
            (request(command::READ, 1, 1, large + 1, &[]), EINVAL),
        ];
        for (bytes, error) in cases {
            let end = bytes.len();
            for cut in [1, 4, 20, 27, 28, 29, 28 + 4000, end / 2, end - 1] {
                if cut >= end {
                    continue;
                }
                let mut client = RawClient::connect(&server, "disk", Style::Simple);
                client.stream.write_all(&bytes[..cut]).unwrap();
                // Twice: a request that was passed on unfinished is passed on again.
                let first = pass_on(&server);
                let second = pass_on(&server);
                all_done(&first);
                assert!(second.unread[0] >= first.unread[0], "{first:?} {second:?}");
                client.stream.write_all(&bytes[cut..]).unwrap();
                assert_eq!(client.error_of(1), error, "{cut} of {end} bytes");
                client.stream.write_all(&request(command::DISC, 2, 0, 0, &[])).unwrap();
                assert!(client.is_closed());
                server.wait_for("nobody", <[_]>::is_empty);
            }
        }
    });
}

#[test]
fn a_request_that_names_its_contexts_is_cut_in_each_of_its_parts() {
    on_each_engine(|choice| {
        let server = Running::start(choice, Limits::STANDARD);
        for cut in [0, 10, 32, 35, 43] {
            let (mut whole, mut other) = (
                RawClient::connect(&server, "disk", Style::Extended),
                RawClient::connect(&server, "disk", Style::Extended),
            );
            let payload = [&4096_u64.to_be_bytes()[..], &1_u32.to_be_bytes()].concat();
            whole.extended_request(command::BLOCK_STATUS, 1 << 5, 1, 0, 12, &payload);
            let expected = whole.reply();
            let mut bytes = 0x21e4_1c71_u32.to_be_bytes().to_vec();
            bytes.extend((1_u16 << 5).to_be_bytes());
            bytes.extend(command::BLOCK_STATUS.to_be_bytes());
            bytes.extend(1_u64.to_be_bytes());
            bytes.extend(0_u64.to_be_bytes());
            bytes.extend(12_u64.to_be_bytes());
            bytes.extend(&payload);
            other.stream.write_all(&bytes[..cut]).unwrap();
            all_done(&pass_on(&server));
            other.stream.write_all(&bytes[cut..]).unwrap();
            assert_eq!(other.reply(), expected, "cut at {cut}");
        }
    });
}

#[test]
fn requests_in_flight_end_first_and_those_behind_them_are_left_to_the_next_server() {
    on_each_engine(|choice| {
        let limits = Limits { requests_in_flight_max: 1, ..Limits::STANDARD };
        let server = Running::start(choice, limits);
        let mut client = RawClient::connect(&server, "disk", Style::Simple);
        server.probe.hold();
        let write = |cookie| request(command::WRITE, cookie, 0, 512, &[cookie as u8; 512]);
        client.stream.write_all(&[write(1), write(2), write(3)].concat()).unwrap();
        while server.probe.waiting() < 1 {
            std::thread::yield_now();
        }
        let passing = server.pass_on(PATIENCE);
        assert!(passing.try_recv().is_err(), "it waits for the request in flight");
        server.probe.let_go();
        let passed = passing.recv_timeout(PATIENCE).unwrap();
        assert_eq!(passed.unread, [Some(2 * 540)]);
        for cookie in 1..=3 {
            assert_eq!(client.error_of(cookie), 0);
        }
        assert_eq!(server.probe.writes().len(), 3);
    });
}

#[test]
fn who_holds_others_up_has_to_connect_again() {
    on_each_engine(|choice| {
        let server = Running::start(choice, Limits::STANDARD);
        let mut stuck = RawClient::connect(&server, "disk", Style::Simple);
        server.probe.hold();
        stuck.stream.write_all(&request(command::WRITE, 1, 0, 512, &[1; 512])).unwrap();
        while server.probe.waiting() < 1 {
            std::thread::yield_now();
        }
        let mut idle = RawClient::connect(&server, "disk", Style::Simple);
        let passed = server.pass_on(Duration::from_millis(20)).recv_timeout(PATIENCE).unwrap();
        assert_eq!(passed, PassedOn { drained: Drained { connections_cut: 1 }, unread: vec![Some(0)] });
        assert!(stuck.is_closed());
        server.probe.let_go();
        idle.stream.write_all(&request(command::FLUSH, 2, 0, 0, &[])).unwrap();
        assert_eq!(idle.error_of(2), 0);

        // Its replies do not fit into the socket, and it does not read them.
        let mut deaf = RawClient::connect(&server, "disk", Style::Simple);
        deaf.stream.write_all(&request(command::READ, 3, 0, 16 << 20, &[])).unwrap();
        server.wait_for("its reply", |connections| {
            connections.iter().any(|connection| connection.payload_in_flight == 16 << 20)
        });
        let passed = pass_on(&server);
        assert_eq!(passed.unread, [Some(0)], "of the idle one");
        let mut rest = Vec::new();
        deaf.stream.read_to_end(&mut rest).unwrap();
        assert!(rest.len() < 16 << 20, "the reply is not whole, and the connection is at its end");
    });
}

#[test]
fn whoever_is_negotiating_is_done_in_time_or_has_to_connect_again() {
    on_each_engine(|choice| {
        let server = Running::start(choice, Limits::STANDARD);
        let mut silent = RawClient::try_connect(&server).unwrap();
        let passing = server.pass_on(PATIENCE);
        assert!(silent.is_closed());
        assert_eq!(passing.recv_timeout(PATIENCE).unwrap().unread, []);
        // The listeners belong to the next server.
        let mut next = RawClient::connect(&server, "", Style::Structured);
        next.stream.write_all(&request(command::FLUSH, 1, 0, 0, &[])).unwrap();
        assert_eq!(next.reply(), RawReply::Simple(0, 1));
    });
}
