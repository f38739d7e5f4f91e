//! Tests servers that are killed, hang, come back as something else, or lie.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use block::store::remote::{NbdUri, RemoteOptions};
use block::{Access, BlockDevice, Buffer, ByteRange, Durability, IoError, RemoteImage, ZeroMode};
use futures_util::future::{join, join_all};
use rustix::io::Errno;

use crate::server::{OPTIONS, Server, on_both, store};

const BLOCK: usize = 4096;

/// A deadline that tests wait for.
const IMPATIENT: RemoteOptions = RemoteOptions { answer_deadline: Duration::from_millis(300), ..OPTIONS };

fn filled(byte: u8) -> Buffer {
    Buffer::copy_of(&[byte; BLOCK])
}

fn timed_out(result: &Result<impl Sized, IoError>) -> bool {
    matches!(result, Err(IoError::Os { errno: Errno::TIMEDOUT, .. }))
}

/// Repeats a request until it is answered: a server on a busy machine may be later than an impatient store waits.
async fn answered<T>(mut request: impl AsyncFnMut() -> Result<T, IoError>) -> T {
    loop {
        let result = request().await;
        if !timed_out(&result) {
            return result.unwrap();
        }
    }
}

#[test]
fn a_server_that_is_killed_again_and_again_loses_nothing_that_was_answered() {
    on_both(|engine, handle| async move {
        const BLOCKS: u64 = 256;
        // It keeps its tables in memory until it is flushed: answered changes die with it.
        let mut server = Server::qemu_nbd("qcow2", 64 << 20, &["--shared=8", "--cache=writeback"]);
        let store = store(server.connect(), &engine, &handle);
        let offset = |block: u64| block * (256 << 10);
        for round in 1..=4_u8 {
            let writes = async {
                for part in 0..8 {
                    let blocks = part * BLOCKS / 8..(part + 1) * BLOCKS / 8;
                    let writes =
                        blocks.map(|block| store.write(offset(block), filled(round), Durability::Volatile));
                    assert!(join_all(writes).await.iter().all(Result::is_ok));
                }
            };
            let kill = async {
                // The moment differs in each round.
                handle.sleep(Duration::from_millis(u64::from(round) * 3)).await;
                server.kill();
                server.restart();
            };
            join(writes, kill).await;
            // And once with nothing in flight.
            server.kill();
            server.restart();
            for block in 0..BLOCKS {
                let read = store.read(offset(block), Buffer::zeroed(BLOCK)).await.unwrap();
                assert!(read.as_slice() == [round; BLOCK], "round {round}, block {block}");
            }
            if round == 2 {
                store.flush().await.unwrap();
            }
        }
        store.flush().await.unwrap();
        server.kill();
        server.restart();
        let read = store.read(offset(1), Buffer::zeroed(BLOCK)).await.unwrap();
        assert_eq!(read.as_slice(), [4; BLOCK], "flushed is flushed");
    });
}

/// Starts a server that fails a flush, and drops what was not durable, when there is a file `fail`.
fn forgetful_server() -> Server {
    let script = [
        "eval",
        "get_size=echo 65536",
        "can_write=exit 0",
        "can_flush=exit 0",
        "pread=dd if={folder}/seen bs=65536 skip=$4 count=$3 iflag=skip_bytes,count_bytes status=none",
        "pwrite=dd of={folder}/seen bs=65536 seek=$4 oflag=seek_bytes conv=notrunc status=none",
        "flush=if rm {folder}/fail 2>/dev/null; then cp {folder}/durable {folder}/seen; echo EIO lost >&2; exit 1; fi; \
         cp {folder}/seen {folder}/durable",
        "after_fork=truncate -s 65536 {folder}/seen {folder}/durable",
    ];
    Server::nbdkit(&script)
}

#[test]
fn what_a_server_drops_when_it_fails_to_flush_is_written_again() {
    on_both(|engine, handle| async move {
        let server = forgetful_server();
        let folder = server.path().to_owned();
        let store = store(server.connect(), &engine, &handle);
        store.write(0, filled(1), Durability::Volatile).await.unwrap();
        store.flush().await.unwrap();
        store.write(BLOCK as u64, filled(2), Durability::Volatile).await.unwrap();
        std::fs::write(folder.join("fail"), "").unwrap();
        assert!(store.flush().await.is_err(), "it is told");
        store.write(2 * BLOCK as u64, filled(3), Durability::Volatile).await.unwrap();
        answered(async || store.flush().await).await;
        let durable = std::fs::read(folder.join("durable")).unwrap();
        assert_eq!(
            [durable[0], durable[BLOCK], durable[2 * BLOCK]],
            [1, 2, 3],
            "the second flush vouches for it"
        );
    });
}

#[test]
fn what_is_written_again_undoes_nothing_that_came_later() {
    on_both(|engine, handle| async move {
        let mut server = Server::qemu_nbd("qcow2", 8 << 20, &[]);
        let store = store(server.connect(), &engine, &handle);
        let range = ByteRange::new(0, BLOCK as u64);
        store.write(0, filled(1), Durability::Volatile).await.unwrap();
        store.write(0, filled(2), Durability::Durable).await.unwrap();
        store.write(1 << 20, filled(3), Durability::Volatile).await.unwrap();
        let zeroed = ByteRange::new(1 << 20, BLOCK as u64);
        store.write_zeroes(zeroed, ZeroMode::MayUnmap, Durability::Durable).await.unwrap();
        server.kill();
        server.restart();
        let read = store.read(range.offset, Buffer::zeroed(BLOCK)).await.unwrap();
        assert_eq!(read.as_slice(), [2; BLOCK], "the durable write is the last");
        assert!(store.read(1 << 20, Buffer::zeroed(BLOCK)).await.unwrap().is_zero());
    });
}

#[test]
fn requests_to_a_server_that_hangs_fail_in_time_and_then_they_work_again() {
    on_both(|engine, handle| async move {
        let server = Server::nbdkit(&["memory", "1M"]);
        let store = store(server.connect_with(IMPATIENT), &engine, &handle);
        answered(async || store.write(0, filled(1), Durability::Volatile).await).await;
        server.hang();
        let (written, read) =
            join(store.write(0, filled(2), Durability::Volatile), store.read(0, Buffer::zeroed(BLOCK))).await;
        assert!(timed_out(&written) && timed_out(&read) && timed_out(&store.flush().await));
        // The old write may still be in flight: the new one waits for it.
        let last = answered(async || store.write(0, filled(3), Durability::Volatile).await);
        let go_on = async { server.go_on() };
        join(last, go_on).await;
        for _ in 0..20 {
            let read = answered(async || store.read(0, Buffer::zeroed(BLOCK)).await).await;
            assert_eq!(read.as_slice(), [3; BLOCK]);
        }
    });
}

#[test]
fn a_write_that_was_given_up_and_lands_late_lands_before_those_that_came_after_it() {
    let patient = RemoteOptions { answer_deadline: Duration::from_millis(1500), ..OPTIONS };
    on_both(move |engine, handle| async move {
        // Its first write waits for an order to continue, whatever comes after it; the others start a program or two.
        let server = Server::nbdkit(&[
            "eval",
            "thread_model=echo parallel",
            "get_size=truncate -s 64K {folder}/data; echo 65536",
            "pread=dd if={folder}/data iflag=skip_bytes,count_bytes skip=$4 count=$3 status=none",
            "pwrite=mkdir {folder}/first 2>/dev/null && landed={folder}/landed && \
             while [ -d {folder} ] && [ ! -e {folder}/go ]; do sleep 0.02; done; \
             dd of={folder}/data oflag=seek_bytes seek=$4 conv=notrunc status=none && touch ${landed:-{folder}/data}",
            "flush=true",
        ]);
        let store = store(server.connect_with(patient), &engine, &handle);
        assert!(timed_out(&store.write(0, filled(1), Durability::Volatile).await));
        // Other ranges do not wait for it.
        answered(async || store.write(BLOCK as u64, filled(2), Durability::Volatile).await).await;
        assert!(timed_out(&store.write(0, filled(3), Durability::Volatile).await));
        std::fs::write(server.path().join("go"), "").unwrap();
        answered(async || store.write(0, filled(3), Durability::Volatile).await).await;
        let read = answered(async || store.read(0, Buffer::zeroed(BLOCK)).await).await;
        assert_eq!(read.as_slice(), [3; BLOCK]);
        while !server.path().join("landed").exists() {
            // It polls at intervals only.
            handle.sleep(Duration::from_millis(5)).await;
        }
        let read = answered(async || store.read(0, Buffer::zeroed(BLOCK)).await).await;
        assert_eq!(read.as_slice(), [3; BLOCK], "the first write has landed late");
    });
}

#[test]
fn while_there_is_no_server_requests_fail_in_time_and_then_they_work_again() {
    on_both(|engine, handle| async move {
        let mut server = Server::nbdkit(&["memory", "1M"]);
        let store = store(server.connect_with(IMPATIENT), &engine, &handle);
        answered(async || store.write(0, filled(1), Durability::Volatile).await).await;
        server.kill();
        assert!(timed_out(&store.read(0, Buffer::zeroed(BLOCK)).await));
        assert!(timed_out(&store.write(0, filled(2), Durability::Durable).await));
        assert!(timed_out(&store.flush().await));
        server.restart();
        // It may still be waiting for its next attempt.
        let read = answered(async || store.read(0, Buffer::zeroed(BLOCK)).await).await;
        assert_eq!(read.as_slice(), [1; BLOCK], "what was given up was not sent");
    });
}

#[test]
fn a_server_that_comes_back_as_something_else_is_not_used() {
    on_both(|engine, handle| async move {
        let mut server = Server::nbdkit(&["memory", "1M"]);
        let store = store(server.connect_with(IMPATIENT), &engine, &handle);
        answered(async || store.write(0, filled(1), Durability::Volatile).await).await;
        server.kill();
        server.change_argument("1M", "512K");
        server.restart();
        assert!(timed_out(&store.read(0, Buffer::zeroed(BLOCK)).await));
        assert!(timed_out(&store.write(0, filled(1), Durability::Volatile).await));
        server.kill();
        server.change_argument("512K", "1M");
        server.restart();
        let read = answered(async || store.read(0, Buffer::zeroed(BLOCK)).await).await;
        assert_eq!(read.as_slice(), [1; BLOCK]);
    });
}

#[test]
fn a_guest_that_never_flushes_does_not_fill_our_memory() {
    on_both(|engine, handle| async move {
        let server = Server::nbdkit(&["--filter=log", "memory", "16M", "logfile={folder}/log"]);
        let store = store(server.connect(), &engine, &handle);
        let data = Buffer::copy_of(&vec![1; 1 << 20]);
        for round in 0..10 {
            let writes = (0..16).map(|part| store.write(part << 20, data.clone(), Durability::Volatile));
            assert!(join_all(writes).await.iter().all(Result::is_ok), "round {round}");
        }
        let log = std::fs::read_to_string(server.path().join("log")).unwrap();
        let flushes = log.lines().filter(|line| line.contains("Flush") && !line.contains("return")).count();
        assert!((1..=6).contains(&flushes), "{flushes} flushes for 160 MiB");
    });
}

/// Negotiates correctly with the next client. `None`: it went away.
fn negotiate(listener: &UnixListener) -> Option<UnixStream> {
    let (mut stream, _) = listener.accept().unwrap();
    let number = |value: u32| value.to_be_bytes();
    let reply = |option: u32, kind: u32, data: &[u8]| {
        let magic = 0x0003_e889_0455_65a9_u64.to_be_bytes();
        [&magic[..], &number(option), &number(kind), &number(data.len() as u32), data].concat()
    };
    let export = [&[0, 0][..], &(1_u64 << 20).to_be_bytes(), &0x016d_u16.to_be_bytes()].concat();
    let context = [&number(1)[..], b"base:allocation"].concat();
    let says = [
        b"NBDMAGICIHAVEOPT\x00\x03".to_vec(),
        reply(8, 1, &[]),
        reply(10, 4, &context),
        reply(10, 1, &[]),
        reply(7, 3, &export),
        reply(7, 1, &[]),
    ];
    stream.write_all(&says.concat()).ok()?;
    // Everything before requests: flags, and three options of 16, 43 and 24 bytes.
    stream.read_exact(&mut [0; 4 + 16 + 43 + 24]).ok()?;
    Some(stream)
}

/// A server that negotiates correctly, and then sends random bytes.
fn lie(listener: &UnixListener, seed: u64) {
    let mut state = seed;
    let mut random = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 33
    };
    loop {
        let Some(mut stream) = negotiate(listener) else { continue };
        for _ in 0..random() % 20 {
            let mut bytes: Vec<u8> = (0..random() % 100).map(|_| random() as u8).collect();
            if random() % 4 != 0 {
                let magic: u32 = if random() % 2 == 0 { 0x6744_6698 } else { 0x668e_33ef };
                let (flags, kind) = (random() as u16 & 1, [0_u16, 1, 2, 5, 0x8001, 6][random() as usize % 6]);
                let cookie = (random() % 3) << 32 | (random() % 3);
                let header = [
                    &magic.to_be_bytes()[..],
                    &flags.to_be_bytes(),
                    &kind.to_be_bytes(),
                    &cookie.to_be_bytes(),
                ];
                let length = random() as u32 % 64;
                bytes = [header.concat(), length.to_be_bytes().to_vec(), bytes].concat();
            }
            if stream.write_all(&bytes).is_err() {
                break;
            }
        }
        let _ = stream.read(&mut [0; 4096]);
    }
}

#[test]
fn whatever_a_server_sends_requests_fail_in_time_and_nothing_panics() {
    let hasty = RemoteOptions { answer_deadline: Duration::from_millis(50), ..OPTIONS };
    on_both(move |engine, handle| async move {
        for seed in 0..4 {
            let folder = tempfile::tempdir().unwrap();
            let socket = folder.path().join("socket");
            let listener = UnixListener::bind(&socket).unwrap();
            // It ends with the process of the test.
            std::thread::spawn(move || lie(&listener, seed));
            let uri = NbdUri::unix(&socket, "");
            let image = RemoteImage::connect_with(&uri, Access::ReadWrite, hasty).unwrap();
            let store = store(image, &engine, &handle);
            let requests = (0..8_u64).map(|number| {
                let store = Rc::clone(&store);
                let offset = number * BLOCK as u64;
                async move {
                    let range = ByteRange::new(offset, BLOCK as u64);
                    let _ = store.read(offset, Buffer::zeroed(BLOCK)).await;
                    let _ = store.write(offset, filled(1), Durability::Durable).await;
                    let _ = store.allocation(range).await;
                    let _ = store.discard(range).await;
                    let _ = store.flush().await;
                }
            });
            join_all(requests).await;
        }
    });
}

#[test]
fn a_server_that_hangs_up_at_every_request_is_not_dialled_without_end() {
    let options = RemoteOptions { answer_deadline: Duration::from_secs(2), connections_max: 1, ..OPTIONS };
    on_both(move |engine, handle| async move {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let listener = UnixListener::bind(&socket).unwrap();
        let dialled = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&dialled);
        // It ends with the process of the test.
        std::thread::spawn(move || {
            loop {
                count.fetch_add(1, Ordering::Relaxed);
                let _ = negotiate(&listener).map(|mut stream| stream.read(&mut [0; 28]));
            }
        });
        let image =
            RemoteImage::connect_with(&NbdUri::unix(&socket, ""), Access::ReadWrite, options).unwrap();
        let store = store(image, &engine, &handle);
        assert!(timed_out(&store.read(0, Buffer::zeroed(BLOCK)).await));
        // 0, 20, 40, 80, 160, 320, 640 and 1,000 ms later, and once at first.
        let dialled = dialled.load(Ordering::Relaxed);
        assert!((3..=12).contains(&dialled), "dialled {dialled} times in two seconds");
    });
}
