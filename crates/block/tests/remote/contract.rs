//! Tests the contract of a device, over every server, and over servers with fewer abilities.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use block::conformance::{Suite, check_read_only};
use block::store::remote::{NbdUri, RemoteOptions};
use block::{
    Access, BlockDevice, Buffer, ByteRange, Durability, ExtentKind, RemoteError, RemoteImage, ZeroMode,
};

use crate::server::{OPTIONS, Server, on_both, store};

fn check(name: &'static str, sizes: &'static [u64], start: impl Fn(u64) -> Server + Clone + 'static) {
    on_both(move |engine, handle| {
        let start = start.clone();
        async move {
            let name = format!("{name} on {}", engine.name());
            let servers = RefCell::new(Vec::new());
            let make_handle = handle.clone();
            let factory = |size| {
                let server = start(size);
                let store = store(server.connect().narrowed_to(size).unwrap(), &engine, &make_handle);
                servers.borrow_mut().push(server);
                store as Rc<dyn BlockDevice>
            };
            Suite::new(&name, handle, factory).sizes(sizes).operations(150).run().await;
        }
    });
}

const SIZES: &[u64] = &[4096, 256 << 10, (256 << 10) + 512];
/// Ends that only a server with a minimum block size of one byte has.
const ODD_SIZES: &[u64] = &[4095, (96 << 10) + 1];

#[test]
fn nbdkit_memory() {
    check("nbdkit memory", SIZES, |size| Server::nbdkit(&["memory", &size.to_string()]));
}

#[test]
fn nbdkit_memory_of_odd_sizes() {
    check("nbdkit memory", ODD_SIZES, |size| Server::nbdkit(&["memory", &size.to_string()]));
}

#[test]
fn qemu_nbd_raw() {
    check("qemu-nbd raw", SIZES, |size| Server::qemu_nbd("raw", size, &["--discard=unmap", "--shared=8"]));
}

/// The possible size is queried on a new connection, which a server with one client refuses.
#[test]
fn server_that_takes_one_client_cannot_say_how_large_it_may_become_and_serves_on() {
    on_both(|engine, handle| async move {
        let server = Server::qemu_nbd("raw", 4096, &[]);
        // The second connection is never answered, however long the wait.
        let impatient = RemoteOptions { connect_timeout: Duration::from_secs(5), ..OPTIONS };
        let store = store(server.connect_with(impatient), &engine, &handle);
        let growth = store.growth().unwrap();
        assert!(growth.capacity().await.is_err());
        let data = Buffer::copy_of(&[7; 4096]);
        store.write(0, data, Durability::Durable).await.unwrap();
        assert_eq!(store.read(0, Buffer::zeroed(4096)).await.unwrap().as_slice(), [7; 4096]);
    });
}

#[test]
fn qemu_nbd_qcow2_with_several_connections() {
    check("qemu-nbd qcow2", &[(256 << 10) + 512], |size| Server::qemu_nbd("qcow2", size, &["--shared=8"]));
}

#[test]
fn qemu_storage_daemon() {
    check("qemu-storage-daemon", &[256 << 10], Server::qemu_storage_daemon);
}

/// Servers with fewer abilities than usual keep the same contract by other means.
#[test]
fn servers_that_can_less_keep_the_contract() {
    for (name, arguments) in [
        ("without zeroing", &["--filter=nozero", "zeromode=none"][..]),
        ("without trim", &["--filter=nozero", "zeromode=emulate"]),
        ("without allocation", &["--filter=noextents"]),
        ("without structured replies", &["--no-sr"]),
        ("without durable writes", &["--filter=fua"]),
        ("without several connections", &["--filter=multi-conn", "multi-conn-mode=disable"]),
        (
            "of short requests",
            &[
                "--filter=blocksize-policy",
                "blocksize-minimum=512",
                "blocksize-preferred=4096",
                "blocksize-maximum=16384",
                "blocksize-error-policy=error",
            ],
        ),
        ("of one request at a time", &["--filter=noparallel"]),
    ] {
        check(name, &[(256 << 10) + 512], move |size| {
            let (filters, settings): (Vec<&str>, Vec<&str>) =
                arguments.iter().partition(|argument| argument.starts_with("--"));
            let size = size.to_string();
            Server::nbdkit(&[&filters[..], &["memory", &size], &settings[..]].concat())
        });
    }
}

#[test]
fn abilities_are_those_of_the_server() {
    let server = Server::nbdkit(&["memory", "1M"]);
    let full = server.connect().abilities();
    assert!(
        full.durable_writes && full.trim && full.write_zeroes && full.structured_replies && full.allocation
    );
    // A further connection is skipped after a second, which a busy server may need.
    let four = (0..20).any(|_| server.connect().abilities().connections == 4);
    assert!(four, "{full:?}");
    let poor = ["--no-sr", "--filter=nozero", "--filter=fua", "--filter=multi-conn"];
    let settings = ["memory", "1M", "multi-conn-mode=disable"];
    let poor = Server::nbdkit(&[&poor[..], &settings].concat()).connect().abilities();
    assert!(!poor.durable_writes && !poor.write_zeroes && !poor.structured_replies && !poor.allocation);
    assert_eq!(poor.connections, 1);
    // It takes one connection and lets others wait: they are skipped.
    let lonely = Server::qemu_nbd("raw", 1 << 20, &["--shared=1"]).connect().abilities();
    assert_eq!(lonely.connections, 1);
}

#[test]
fn what_is_allocated_is_told_and_a_discard_gives_it_back() {
    on_both(|engine, handle| async move {
        let server = Server::qemu_nbd("qcow2", 8 << 20, &["--discard=unmap"]);
        let store = store(server.connect(), &engine, &handle);
        let kinds = |range| {
            let store = Rc::clone(&store);
            async move {
                let extents = store.allocation(range).await.unwrap();
                extents.iter().map(|extent| (extent.range.length, extent.kind)).collect::<Vec<_>>()
            }
        };
        let whole = ByteRange::new(0, 8 << 20);
        assert_eq!(kinds(whole).await, [(8 << 20, ExtentKind::Hole)]);
        let data = Buffer::copy_of(&vec![1; 1 << 20]);
        store.write(1 << 20, data, Durability::Durable).await.unwrap();
        let expected =
            [(1 << 20, ExtentKind::Hole), (1 << 20, ExtentKind::Data), (6 << 20, ExtentKind::Hole)];
        assert_eq!(kinds(whole).await, expected);
        assert_eq!(kinds(ByteRange::new((2 << 20) - 4096, 8192)).await.len(), 2);
        store.discard(ByteRange::new(1 << 20, 1 << 20)).await.unwrap();
        assert_eq!(kinds(whole).await, [(8 << 20, ExtentKind::Hole)]);
    });
}

#[test]
fn a_read_only_export_is_read_and_refused_for_writing() {
    on_both(|engine, handle| async move {
        let server = Server::nbdkit(&["--read-only", "pattern", "1M"]);
        let refused = RemoteImage::connect(&server.uri(), Access::ReadWrite);
        assert!(matches!(refused, Err(RemoteError::ReadOnly { .. })));
        let image = RemoteImage::connect(&server.uri(), Access::ReadOnly).unwrap();
        let store = store(image, &engine, &handle);
        let read = store.read(4096, Buffer::zeroed(4096)).await.unwrap();
        assert_eq!(read.as_slice()[..8], 4096_u64.to_be_bytes());
        assert_eq!(store.flush().await, Ok(()));
        check_read_only("read-only export", store).await;
    });
}

#[test]
fn what_cannot_be_used_says_why() {
    let blocks =
        ["--filter=blocksize-policy", "memory", "1M", "blocksize-minimum=8192", "blocksize-preferred=8192"];
    let server = Server::nbdkit(&[&blocks[..], &["blocksize-maximum=1M"]].concat());
    let refused = RemoteImage::connect(&server.uri(), Access::ReadWrite);
    assert!(matches!(refused, Err(RemoteError::BlockTooLarge { minimum: 8192, .. })), "{refused:?}");
    let server =
        Server::nbdkit(&["eval", "get_size=echo 1M", "pread=head -c $3 /dev/zero", "pwrite=cat >/dev/null"]);
    let refused = RemoteImage::connect(&server.uri(), Access::ReadWrite);
    assert!(matches!(refused, Err(RemoteError::NoFlush { .. })), "{refused:?}");
    RemoteImage::connect(&server.uri(), Access::ReadOnly).unwrap();
    let server = Server::qemu_nbd("raw", 1 << 20, &["--export-name=disk"]);
    let refused = RemoteImage::connect(&server.uri(), Access::ReadWrite);
    assert!(matches!(refused, Err(RemoteError::Refused { .. })), "{refused:?}");
    let named = NbdUri { export: "disk".to_owned(), ..server.uri() };
    let image = RemoteImage::connect(&named, Access::ReadWrite).unwrap();
    assert!(matches!(image.narrowed_to(2 << 20), Err(RemoteError::TooSmall { .. })));
    let secure = NbdUri { security: nbd_protocol::Security::Tls, ..server.uri() };
    assert!(matches!(RemoteImage::connect(&secure, Access::ReadWrite), Err(RemoteError::Tls { .. })));
    let nowhere = NbdUri::unix("/nonexistent/socket", "");
    let refused = RemoteImage::connect(&nowhere, Access::ReadWrite);
    assert!(matches!(refused, Err(RemoteError::Unreachable { .. })), "{refused:?}");
}

#[test]
fn an_export_is_reached_over_tcp() {
    on_both(|engine, handle| async move {
        // The system gives a free port to the listener, and the listener to the server.
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        let port_text = port.to_string();
        let _server = Server::start_at(
            NbdUri::tcp("127.0.0.1", port, ""),
            &[
                "nbdkit",
                "--foreground",
                "--exit-with-parent",
                "--port",
                &port_text,
                "--ipaddr",
                "127.0.0.1",
                "memory",
                "1M",
            ],
        );
        let image = RemoteImage::connect(&NbdUri::tcp("localhost", port, ""), Access::ReadWrite).unwrap();
        let store = store(image, &engine, &handle);
        let data = Buffer::copy_of(&vec![7; 300_000 / 4096 * 4096]);
        store.write(4096, data.clone(), Durability::Durable).await.unwrap();
        let read = store.read(4096, Buffer::zeroed(data.len())).await.unwrap();
        assert_eq!(read.as_slice(), data.as_slice());
    });
}

#[test]
fn the_servers_errors_are_passed_on() {
    on_both(|engine, handle| async move {
        let arguments =
            ["--filter=error", "memory", "1M", "error-rate=100%", "error-pwrite=ENOSPC", "error-zero=EIO"];
        let server = Server::nbdkit(&arguments);
        let store = store(server.connect(), &engine, &handle);
        let written = store.write(0, Buffer::zeroed(4096), Durability::Volatile).await.unwrap_err();
        assert!(written.is_no_space(), "{written}");
        let zeroed =
            store.write_zeroes(ByteRange::new(0, 4096), ZeroMode::MayUnmap, Durability::Volatile).await;
        assert!(zeroed.is_err());
    });
}
