//! Connections whose clients are correct, incorrect, slow, many, or gone.

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use block::{ByteRange, Durability};
use export::nbd::protocol::{PAYLOAD_LENGTH_MAX, REQUEST_MAGIC, chunk, command, command_flag};
use export::nbd::{Client, ConnectionInfo, ConnectionPhase, Limits};
use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};
use rustix::io::Errno;
use support::raw_client::{RawClient, RawReply, Style};
use support::{PATIENCE, Running, SIZE, on_each_engine};

const EPERM: u32 = 1;
const EIO: u32 = 5;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;

#[test]
fn what_was_written_is_read_back_in_both_styles() {
    on_each_engine(|choice| {
        let server = Running::start(choice, Limits::STANDARD);
        let data: Vec<u8> = (0..10_000_u32).map(|index| (index / 7) as u8 | 1).collect();
        let mut simple = RawClient::connect(&server, "disk", Style::Simple);
        simple.request(command::WRITE, 0, 1, 4095, 10_000, &data);
        assert_eq!(simple.reply(), RawReply::Simple(0, 1));
        simple.request(command::READ, 0, 2, 4095, 10_000, &[]);
        assert_eq!(simple.reply(), RawReply::Simple(0, 2));
        assert_eq!(simple.read_bytes(10_000), data);

        let mut structured = RawClient::connect(&server, "", Style::Structured);
        structured.request(command::READ, 0, 3, 4095, 10_000, &[]);
        let payload = [&4095_u64.to_be_bytes()[..], &data].concat();
        assert_eq!(structured.reply(), RawReply::Chunk(chunk::DONE, chunk::OFFSET_DATA, 3, payload));
        structured.request(command::READ, 0, 4, 1 << 20, 8192, &[]);
        let hole = [&(1_u64 << 20).to_be_bytes()[..], &8192_u32.to_be_bytes()].concat();
        assert_eq!(structured.reply(), RawReply::Chunk(chunk::DONE, chunk::OFFSET_HOLE, 4, hole));
    });
}

#[test]
fn the_largest_write_arrives_whole_and_a_larger_one_ends_the_connection() {
    on_each_engine(|choice| {
        let server = Running::start(choice, Limits::STANDARD);
        let mut client = RawClient::connect(&server, "disk", Style::Simple);
        let data: Vec<u8> =
            (0..PAYLOAD_LENGTH_MAX).map(|index| (index.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        client.request(command::WRITE, 0, 1, 512, PAYLOAD_LENGTH_MAX, &data);
        assert_eq!(client.error_of(1), 0);
        client.request(command::READ, 0, 2, 512, PAYLOAD_LENGTH_MAX, &[]);
        assert_eq!(client.error_of(2), 0);
        assert!(client.read_bytes(PAYLOAD_LENGTH_MAX as usize) == data);
        client.request(command::WRITE, 0, 3, 0, PAYLOAD_LENGTH_MAX + 1, &[]);
        assert!(client.is_closed());
    });
}

#[test]
fn a_faulty_request_gets_its_error_and_the_connection_lives_on() {
    on_each_engine(|choice| {
        let server = Running::start(choice, Limits::STANDARD);
        for style in [Style::Simple, Style::Structured] {
            let mut client = RawClient::connect(&server, "disk", style);
            client.request(99, 0, 1, 0, 0, &[]);
            assert_eq!(client.error_of(1), EINVAL);
            client.request(command::READ, command_flag::REQ_ONE, 2, 0, 512, &[]);
            assert_eq!(client.error_of(2), EINVAL);
            client.request(command::READ, 0, 3, SIZE, 1, &[]);
            assert_eq!(client.error_of(3), EINVAL);
            client.request(command::WRITE, 0, 4, SIZE - 100, 100_000, &vec![1; 100_000]);
            assert_eq!(client.error_of(4), ENOSPC);
            client.request(command::READ, 0, 5, 0, PAYLOAD_LENGTH_MAX + 1, &[]);
            assert_eq!(client.error_of(5), EINVAL);
            client.request(command::FLUSH, 0, 6, 0, 0, &[]);
            assert_eq!(client.error_of(6), 0);
            let mut frozen = RawClient::connect(&server, "frozen", style);
            frozen.request(command::WRITE, 0, 7, 0, 512, &[1; 512]);
            assert_eq!(frozen.error_of(7), EPERM);
            frozen.request(command::FLUSH, 0, 8, 0, 0, &[]);
            assert_eq!(frozen.error_of(8), 0);
        }
        assert_eq!(server.probe.writes(), [], "nothing faulty reached the device");
    });
}

#[test]
fn a_failing_device_is_told_by_errno() {
    on_each_engine(|choice| {
        let server = Running::start(choice, Limits::STANDARD);
        let mut client = RawClient::connect(&server, "disk", Style::Structured);
        server.probe.fail_with(Errno::IO);
        client.request(command::READ, 0, 1, 0, 512, &[]);
        assert_eq!(client.error_of(1), EIO);
        server.probe.fail_with(Errno::DQUOT);
        client.request(command::WRITE, 0, 2, 0, 512, &[1; 512]);
        assert_eq!(client.error_of(2), ENOSPC);
    });
}

#[test]
fn durability_is_passed_on() {
    on_each_engine(|choice| {
        let server = Running::start(choice, Limits::STANDARD);
        let mut client = RawClient::connect(&server, "disk", Style::Simple);
        client.request(command::WRITE, 0, 1, 0, 512, &[1; 512]);
        assert_eq!(client.error_of(1), 0);
        client.request(command::WRITE, command_flag::FUA, 2, 512, 512, &[1; 512]);
        assert_eq!(client.error_of(2), 0);
        client.request(command::WRITE_ZEROES, command_flag::FUA | command_flag::NO_HOLE, 3, 0, 512, &[]);
        assert_eq!(client.error_of(3), 0);
        assert_eq!(server.probe.flushes(), 0);
        client.request(command::TRIM, command_flag::FUA, 4, 0, 4096, &[]);
        assert_eq!(client.error_of(4), 0);
        assert_eq!(server.probe.flushes(), 1, "a durable discard is followed by a flush");
        let expected = [
            (ByteRange::new(0, 512), Durability::Volatile),
            (ByteRange::new(512, 512), Durability::Durable),
            (ByteRange::new(0, 512), Durability::Durable),
            (ByteRange::new(0, 4096), Durability::Volatile),
        ];
        assert_eq!(server.probe.writes(), expected);
    });
}

#[test]
fn a_disk_that_has_grown_is_used_up_to_its_new_end_by_old_and_new_clients() {
    on_each_engine(|choice| {
        let server = Running::start(choice, Limits::STANDARD);
        let mut client = RawClient::connect(&server, "disk", Style::Simple);
        client.request(command::WRITE, 0, 1, SIZE, 512, &[1; 512]);
        assert_eq!(client.error_of(1), ENOSPC);
        server.probe.grow(SIZE + 4096);
        client.request(command::WRITE, 0, 2, SIZE, 512, &[1; 512]);
        assert_eq!(client.error_of(2), 0);
        client.request(command::WRITE, 0, 3, SIZE + 4096, 512, &[1; 512]);
        assert_eq!(client.error_of(3), ENOSPC);
        let mut new = RawClient::try_connect(&server).unwrap();
        new.stream.write_all(&3_u32.to_be_bytes()).unwrap();
        new.choose_by_name("disk").unwrap();
        assert_eq!(new.read_bytes(8), (SIZE + 4096).to_be_bytes());
    });
}

#[test]
fn a_flush_covers_what_other_connections_have_written() {
    on_each_engine(|choice| {
        let server = Running::start(choice, Limits::STANDARD);
        let mut writers = [(); 3].map(|()| RawClient::connect(&server, "disk", Style::Simple));
        let mut flusher = RawClient::connect(&server, "disk", Style::Structured);
        for (number, writer) in (0..).zip(&mut writers) {
            writer.request(command::WRITE, 0, 1, number * 4096, 4096, &[9; 4096]);
            assert_eq!(writer.error_of(1), 0);
        }
        assert_eq!(server.probe.bytes_volatile(), 3 * 4096);
        flusher.request(command::FLUSH, 0, 1, 0, 0, &[]);
        assert_eq!(flusher.error_of(1), 0);
        assert_eq!(server.probe.bytes_volatile(), 0, "all connections use one device");
        writers[0].request(command::WRITE, command_flag::FUA, 2, 0, 4096, &[9; 4096]);
        assert_eq!(writers[0].error_of(2), 0);
        assert_eq!(server.probe.bytes_volatile(), 0);
    });
}

#[test]
fn garbage_ends_its_own_connection_only() {
    on_each_engine(|choice| {
        let server = Running::start(choice, Limits::STANDARD);
        let mut good = RawClient::connect(&server, "disk", Style::Simple);
        let mut bad = RawClient::connect(&server, "disk", Style::Simple);
        bad.stream.write_all(&[0x55; 100]).unwrap();
        assert!(bad.is_closed());
        let mut bad = RawClient::try_connect(&server).unwrap();
        bad.stream.write_all(&[0x55; 100]).unwrap();
        assert!(bad.is_closed());
        good.request(command::FLUSH, 0, 1, 0, 0, &[]);
        assert_eq!(good.error_of(1), 0);
        server.wait_for("the bad ones to leave", |connections| connections.len() == 1);
    });
}

/// A request that may be valid, with more or less payload than it announces, or any bytes at all.
fn hostile_bytes() -> impl Strategy<Value = Vec<u8>> {
    let request = (0_u16..9, 0_u16..32, any::<u64>(), 0..2 * SIZE, 0_u32..200_000, 0_usize..3).prop_map(
        |(command, flags, cookie, offset, length, payload)| {
            let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
            bytes.extend(flags.to_be_bytes());
            bytes.extend(command.to_be_bytes());
            bytes.extend(cookie.to_be_bytes());
            bytes.extend(offset.to_be_bytes());
            bytes.extend(length.to_be_bytes());
            bytes.resize(bytes.len() + length as usize * payload / 2, 0x55);
            bytes
        },
    );
    let garbage = prop::collection::vec(any::<u8>(), 0..100);
    prop::collection::vec(prop_oneof![8 => request, 1 => garbage], 0..6).prop_map(|all| all.concat())
}

#[test]
fn whatever_a_client_sends_the_server_goes_on() {
    on_each_engine(|choice| {
        let server = Running::start(choice, Limits { requests_in_flight_max: 3, ..Limits::STANDARD });
        let config = ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() };
        let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
        let result = runner.run(&(hostile_bytes(), any::<bool>()), |(bytes, structured)| {
            let style = if structured { Style::Structured } else { Style::Simple };
            let mut client = RawClient::connect(&server, "disk", style);
            // The server may close before it has taken everything.
            let _ = client.stream.set_write_timeout(Some(Duration::from_millis(50)));
            let _ = client.stream.write_all(&bytes);
            Ok(())
        });
        result.unwrap();
        server.wait_for("all of them to leave", <[_]>::is_empty);
        let mut good = RawClient::connect(&server, "disk", Style::Simple);
        good.request(command::FLUSH, 0, 1, 0, 0, &[]);
        assert_eq!(good.error_of(1), 0);
    });
}

#[test]
fn a_client_that_does_not_negotiate_loses_its_place() {
    on_each_engine(|choice| {
        let limits = Limits { negotiation_timeout: Duration::from_millis(30), ..Limits::STANDARD };
        let server = Running::start(choice, limits);
        let mut silent = RawClient::try_connect(&server).unwrap();
        // On a busy machine its time may be over already.
        let _ = silent.stream.write_all(&[0, 0, 0]);
        assert!(silent.is_closed());
    });
}

#[test]
fn connections_beyond_the_limit_are_closed_and_a_place_is_free_again_afterwards() {
    on_each_engine(|choice| {
        let server = Running::start(choice, Limits { connections_max: 2, ..Limits::STANDARD });
        let first = RawClient::connect(&server, "disk", Style::Simple);
        let _second = RawClient::connect(&server, "disk", Style::Simple);
        assert!(RawClient::try_connect(&server).is_none());
        drop(first);
        server.wait_for("a place", |connections| connections.len() == 1);
        assert!(RawClient::try_connect(&server).is_some());
    });
}

#[test]
fn clients_over_tcp_take_no_places_of_the_unix_socket() {
    on_each_engine(|choice| {
        let server = Running::start(choice, Limits { connections_max: 2, ..Limits::STANDARD });
        let _strangers = [0; 2].map(|_| TcpStream::connect(server.address).unwrap());
        server.wait_for("strangers to have all places", |connections| connections.len() == 2);
        let mut one_more = TcpStream::connect(server.address).unwrap();
        assert_eq!(Read::read(&mut one_more, &mut [0]).unwrap_or(0), 0, "it is closed");
        let mut guest = RawClient::connect(&server, "disk", Style::Simple);
        guest.request(command::WRITE, 0, 1, 0, 4096, &[1; 4096]);
        assert_eq!(guest.error_of(1), 0);
    });
}

#[test]
fn requests_beyond_the_limits_wait_in_the_socket_and_all_are_answered() {
    on_each_engine(|choice| {
        let by_count = Limits { requests_in_flight_max: 8, ..Limits::STANDARD };
        let by_size = Limits { payload_in_flight_max: 8 * 8192, ..Limits::STANDARD };
        for limits in [by_count, by_size] {
            let server = Running::start(choice, limits);
            let mut client = RawClient::connect(&server, "disk", Style::Simple);
            server.probe.hold();
            let mut writer = RawClient { stream: client.stream.try_clone().unwrap() };
            let sender = std::thread::spawn(move || {
                for cookie in 0..100 {
                    writer.request(command::WRITE, 0, cookie, cookie * 8192, 8192, &[cookie as u8; 8192]);
                }
            });
            while server.probe.waiting() < 8 {
                std::thread::yield_now();
            }
            assert_eq!(server.connections()[0].phase, ConnectionPhase::Serving("disk".into()));
            server.probe.let_go();
            assert_eq!(succeeded(&mut client, 100), (0..100).collect::<Vec<_>>());
            assert_eq!(server.probe.waiting_max(), 8);
            sender.join().unwrap();
            let answered = |info: &[ConnectionInfo]| info[0].requests_answered == 100;
            server.wait_for("the count of answers", answered);
        }
    });
}

/// Returns the cookies of the next replies, in order of arrival; all of them must be successes.
#[expect(clippy::panic, reason = "a test fails by panicking")]
fn succeeded(client: &mut RawClient, replies: usize) -> Vec<u64> {
    let reply = |_| match client.reply() {
        RawReply::Simple(0, cookie) => cookie,
        other => panic!("{other:?}"),
    };
    let mut cookies: Vec<_> = (0..replies).map(reply).collect();
    cookies.sort_unstable();
    cookies
}

#[test]
fn a_client_that_hoards_the_common_limit_starves_nobody() {
    on_each_engine(|choice| {
        let limits = Limits { payload_in_flight_total_max: 64 << 10, ..Limits::STANDARD };
        let server = Running::start(choice, limits);
        let mut hoarder = RawClient::connect(&server, "disk", Style::Simple);
        // This is the header of a large write whose payload never comes.
        hoarder.request(command::WRITE, 0, 1, 0, 1 << 20, &[0; 10]);
        let mut other = RawClient::connect(&server, "disk", Style::Simple);
        for cookie in 0..10 {
            other.request(command::WRITE, 0, cookie, 0, 8192, &[7; 8192]);
        }
        assert_eq!(succeeded(&mut other, 10), (0..10).collect::<Vec<_>>());
        drop(hoarder);
        server.wait_for("the hoarder to leave", |connections| connections.len() == 1);
        assert_eq!(server.probe.writes().len(), 10, "an incomplete write is not started");
    });
}

#[test]
fn the_writes_of_a_client_that_vanished_are_carried_out_and_its_place_is_freed() {
    on_each_engine(|choice| {
        let server = Running::start(choice, Limits::STANDARD);
        let mut client = RawClient::connect(&server, "disk", Style::Simple);
        let mut witness = RawClient::connect(&server, "disk", Style::Simple);
        server.probe.hold();
        for cookie in 0..4 {
            client.request(command::WRITE, 0, cookie, cookie * 4096, 4096, &[9; 4096]);
        }
        while server.probe.waiting() < 4 {
            std::thread::yield_now();
        }
        drop(client);
        server.wait_for("the end of the stream to be seen", |connections| {
            connections.iter().any(|info| info.phase == ConnectionPhase::Draining("disk".into()))
        });
        assert_eq!(server.probe.writes().len(), 0);
        server.probe.let_go();
        server.wait_for("the connection to end", |connections| connections.len() == 1);
        assert_eq!(server.probe.writes().len(), 4);
        witness.request(command::READ, 0, 1, 3 * 4096, 4096, &[]);
        assert_eq!(witness.error_of(1), 0);
        assert_eq!(witness.read_bytes(4096), [9; 4096]);
    });
}

#[test]
fn a_goodbye_waits_for_the_requests_before_it() {
    on_each_engine(|choice| {
        let server = Running::start(choice, Limits::STANDARD);
        let mut client = RawClient::connect(&server, "disk", Style::Simple);
        server.probe.hold();
        client.request(command::WRITE, 0, 1, 0, 4096, &[9; 4096]);
        client.request(command::DISC, 0, 2, 0, 0, &[]);
        server.wait_for("the goodbye to be seen", |connections| {
            connections[0].phase == ConnectionPhase::Draining("disk".into())
        });
        server.probe.let_go();
        assert_eq!(client.error_of(1), 0);
        assert!(client.is_closed());
    });
}

#[test]
fn a_shutdown_lets_requests_end_and_sends_their_replies() {
    on_each_engine(|choice| {
        let server = Running::start(choice, Limits::STANDARD);
        let mut busy = RawClient::connect(&server, "disk", Style::Simple);
        let mut idle = RawClient::connect(&server, "disk", Style::Simple);
        let mut negotiating = RawClient::try_connect(&server).unwrap();
        server.probe.hold();
        busy.request(command::WRITE, 0, 1, 0, 4096, &[9; 4096]);
        while server.probe.waiting() < 1 {
            std::thread::yield_now();
        }
        let drained = server.shutdown(PATIENCE);
        assert!(idle.is_closed());
        assert!(negotiating.is_closed());
        server.probe.let_go();
        assert_eq!(busy.error_of(1), 0);
        assert!(busy.is_closed());
        assert_eq!(drained.recv_timeout(PATIENCE).unwrap().connections_cut, 0);
        assert_eq!(server.connections(), []);
    });
}

#[test]
fn a_shutdown_cuts_what_is_not_done_at_its_deadline() {
    on_each_engine(|choice| {
        let server = Running::start(choice, Limits::STANDARD);
        let mut client = RawClient::connect(&server, "disk", Style::Simple);
        server.probe.hold();
        client.request(command::WRITE, 0, 1, 0, 4096, &[9; 4096]);
        while server.probe.waiting() < 1 {
            std::thread::yield_now();
        }
        let drained = server.shutdown(Duration::from_millis(20));
        assert_eq!(drained.recv_timeout(PATIENCE).unwrap().connections_cut, 1);
        assert!(client.is_closed());
        assert_eq!(server.connections(), []);
    });
}

#[test]
fn a_client_that_never_reads_its_replies_does_not_keep_its_place() {
    on_each_engine(|choice| {
        let limits = Limits { linger_timeout: Duration::from_millis(30), ..Limits::STANDARD };
        let server = Running::start(choice, limits);
        let mut client = RawClient::connect(&server, "disk", Style::Simple);
        client.request(command::READ, 0, 1, 0, PAYLOAD_LENGTH_MAX, &[]);
        client.request(command::DISC, 0, 2, 0, 0, &[]);
        server.wait_for("the connection to be given up", <[_]>::is_empty);
    });
}

#[test]
fn a_host_gets_so_many_places_over_tcp_and_no_more() {
    on_each_engine(|choice| {
        let limits = Limits { connections_per_host_max: 2, ..Limits::STANDARD };
        let server = Running::start(choice, limits);
        let connect = || {
            let mut stream = TcpStream::connect(server.address).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            let mut greeting = [0; 18];
            stream.read_exact(&mut greeting).map(|()| stream)
        };
        let first = connect().unwrap();
        let _second = connect().unwrap();
        assert!(connect().is_err());
        let host = |info: &ConnectionInfo| info.client == Client::Host(server.address.ip());
        assert_eq!(server.connections().iter().filter(|info| host(info)).count(), 2);
        assert!(RawClient::try_connect(&server).is_some(), "a process of this host is let in");
        drop(first);
        server.wait_for("a place", |connections| connections.iter().filter(|info| host(info)).count() < 2);
        assert!(connect().is_ok());
    });
}

#[test]
fn announced_writes_hold_no_more_memory_than_the_limit_and_stalled_ones_give_way() {
    on_each_engine(|choice| {
        let (allowance, total) = (64 << 10, 8 << 20);
        let limits = Limits {
            connections_max: 100,
            payload_allowance: allowance,
            payload_in_flight_total_max: total,
            stall_timeout: Duration::from_millis(30),
            ..Limits::STANDARD
        };
        let server = Running::start(choice, limits);
        let _hoarders: Vec<_> = (0..12)
            .map(|_| {
                let mut client = RawClient::connect(&server, "disk", Style::Simple);
                client.request(command::WRITE, 0, 1, 0, 4 << 20, &[1; 100]);
                client
            })
            .collect();
        let held = |connections: &[ConnectionInfo]| -> usize {
            connections.iter().map(|info| info.payload_in_flight).sum()
        };
        let mut guest = RawClient::connect(&server, "disk", Style::Simple);
        for cookie in 0..20 {
            assert!(held(&server.connections()) <= total + 13 * allowance);
            guest.request(command::WRITE, 0, cookie, 0, 32 << 10, &vec![2; 32 << 10]);
            assert_eq!(guest.error_of(cookie), 0, "an allowance is there whatever others do");
        }
        // Two at a time hold the whole budget, do nothing with it, and are cut off for those behind them. The last
        // two keep nobody waiting.
        server.wait_for("the stalled to be cut off", |connections| connections.len() == 3);
        let large = vec![3; 4 << 20];
        guest.request(command::WRITE, 0, 100, 0, 4 << 20, &large);
        assert_eq!(guest.error_of(100), 0, "one of the last two, or both, gave way to the guest");
        server.wait_for("it to leave", |connections| connections.len() < 3);
    });
}

#[test]
fn an_idle_client_stays_when_the_time_to_negotiate_is_over() {
    on_each_engine(|choice| {
        let limits = Limits { negotiation_timeout: Duration::from_millis(30), ..Limits::STANDARD };
        let server = Running::start(choice, limits);
        // On a busy machine this client may be too late itself.
        let Some(mut idle) = (0..20).find_map(|_| RawClient::connect_in_time(&server, "disk")) else {
            panic!("no client negotiates within 30 ms")
        };
        // The end of a later connection shows that the time is over.
        let mut silent = RawClient::try_connect(&server).unwrap();
        assert!(silent.is_closed());
        idle.request(command::FLUSH, 0, 1, 0, 0, &[]);
        assert_eq!(idle.error_of(1), 0);
    });
}

#[test]
fn a_flood_of_connections_does_not_touch_those_that_have_a_place() {
    on_each_engine(|choice| {
        let limits = Limits { connections_max: 4, ..Limits::STANDARD };
        let server = Running::start(choice, limits);
        let mut guest = RawClient::connect(&server, "disk", Style::Simple);
        let mut flood = Vec::new();
        for round in 0..300 {
            flood.push(std::os::unix::net::UnixStream::connect(server.socket()).unwrap());
            if round % 100 == 0 {
                guest.request(command::WRITE, 0, round, 0, 4096, &[1; 4096]);
                assert_eq!(guest.error_of(round), 0);
            }
        }
        assert!(server.connections().len() <= 4);
        drop(flood);
        server.wait_for("the flood to be over", |connections| connections.len() == 1);
        let _next = RawClient::connect(&server, "disk", Style::Simple);
    });
}
