//! Tests with limited, refusing and lying servers.

use std::io::Cursor;

use nbd_protocol::negotiation::{BlockSizes, ExportInfo, OptionReplies};
use nbd_protocol::{allocation, info, option, option_reply};
use proptest::prelude::*;

use super::*;

/// A server that sends a script, whatever it receives, and keeps what it receives.
struct Script {
    says: Cursor<Vec<u8>>,
    heard: Vec<u8>,
}

impl Read for Script {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        self.says.read(bytes)
    }
}

impl Write for Script {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.heard.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn greeting(flags: u16) -> Vec<u8> {
    [&b"NBDMAGICIHAVEOPT"[..], &flags.to_be_bytes()].concat()
}

fn reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    OptionReplies::new(&mut bytes, option).reply(kind, &[data]);
    bytes
}

fn acknowledge(option: u32) -> Vec<u8> {
    reply(option, option_reply::ACK, &[])
}

fn export(size: u64, flags: u16) -> Vec<u8> {
    let mut bytes = Vec::new();
    OptionReplies::new(&mut bytes, option::GO).info_export(ExportInfo { size, flags });
    bytes
}

fn context(id: u32, name: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    OptionReplies::new(&mut bytes, option::SET_META_CONTEXT).meta_context(id, name);
    bytes
}

fn talk(says: &[Vec<u8>]) -> (Result<Offer, RemoteError>, Vec<u8>) {
    let mut script = Script { says: Cursor::new(says.concat()), heard: Vec::new() };
    let offer = negotiate(&mut script, &NbdUri::unix("/s", "disk"));
    (offer, script.heard)
}

fn offer(says: &[Vec<u8>]) -> Result<Offer, RemoteError> {
    talk(says).0
}

const STRUCTURED: u32 = option::STRUCTURED_REPLY;
const CONTEXTS: u32 = option::SET_META_CONTEXT;

#[test]
fn a_server_that_can_everything_is_asked_for_everything() {
    let sizes = [512_u32, 4096, 1 << 20].map(u32::to_be_bytes).concat();
    let sizes = [&info::BLOCK_SIZE.to_be_bytes()[..], &sizes].concat();
    let (offer, heard) = talk(&[
        greeting(3),
        acknowledge(STRUCTURED),
        context(1, "qemu:other"),
        context(9, allocation::NAME),
        acknowledge(CONTEXTS),
        export(1 << 20, 0x41),
        reply(option::GO, option_reply::INFO, &[0, 2, b'x']),
        reply(option::GO, option_reply::INFO, &sizes),
        acknowledge(option::GO),
    ]);
    let offer = offer.unwrap();
    assert_eq!((offer.size, offer.flags, offer.allocation, offer.structured), (1 << 20, 0x41, Some(9), true));
    let sizes = BlockSizes { minimum: 512, preferred: 4096, maximum: 1 << 20 };
    assert_eq!(offer.block_sizes, Some(sizes));
    assert_eq!(&heard[..4], [0, 0, 0, 3], "only flags that the server has");
    let go = [&b"IHAVEOPT"[..], &[0, 0, 0, 7, 0, 0, 0, 12, 0, 0, 0, 4], b"disk", &[0, 1, 0, 3]].concat();
    assert!(heard.ends_with(&go), "{heard:?}");
}

#[test]
fn a_server_that_can_little_is_used_all_the_same() {
    let unknown = option_reply::ERR_UNSUP;
    let simple =
        offer(&[greeting(1), reply(STRUCTURED, unknown, b""), export(7, 1), acknowledge(option::GO)]);
    let simple = simple.unwrap();
    assert_eq!(
        (simple.size, simple.structured, simple.allocation, simple.block_sizes),
        (7, false, None, None)
    );
    let says = [greeting(1), acknowledge(STRUCTURED), reply(CONTEXTS, unknown, b""), export(7, 1)];
    let without_contexts = offer(&[&says[..], &[acknowledge(option::GO)]].concat()).unwrap();
    assert_eq!((without_contexts.structured, without_contexts.allocation), (true, None));
    for (flags, padding) in [(1, 124), (3, 0)] {
        let told = [&(1_u64 << 20).to_be_bytes()[..], &[0, 5], &vec![0; padding]].concat();
        let old = [greeting(flags), reply(STRUCTURED, unknown, b""), reply(option::GO, unknown, b""), told];
        let (old, heard) = talk(&old);
        assert_eq!(old.unwrap().flags, 5);
        assert!(heard.ends_with(&[&b"IHAVEOPT"[..], &[0, 0, 0, 1, 0, 0, 0, 4], b"disk"].concat()));
    }
}

#[test]
fn a_refusal_is_told_in_the_servers_words_without_its_control_characters() {
    let refused = |kind, words: &[u8]| {
        offer(&[greeting(3), reply(STRUCTURED, option_reply::ERR_UNSUP, b""), reply(option::GO, kind, words)])
    };
    let error = refused(option_reply::ERR_UNKNOWN, b"no\x1b[2J such disk").unwrap_err();
    assert_eq!(error.to_string(), "the server refuses nbd+unix:///disk?socket=/s: no\\u{1b}[2J such disk");
    let error = refused(option_reply::ERR_UNKNOWN, b"").unwrap_err();
    assert!(error.to_string().ends_with("there is no such export"), "{error}");
    assert!(matches!(refused(option_reply::ERR_TLS_REQD, b""), Err(RemoteError::Tls { .. })));
    let early = offer(&[greeting(3), reply(STRUCTURED, option_reply::ERR_TLS_REQD, b"")]);
    assert!(matches!(early, Err(RemoteError::Tls { .. })));
    let unknown = reply(option::GO, option_reply::ERR_UNSUP, b"");
    let old = offer(&[greeting(3), reply(STRUCTURED, option_reply::ERR_UNSUP, b""), unknown]);
    assert!(matches!(old, Err(RemoteError::Refused { .. })), "an old server just hangs up");
}

#[test]
fn lies_are_named() {
    let check = |what: &str, says: &[Vec<u8>]| {
        let error = offer(says).unwrap_err();
        assert!(matches!(error, RemoteError::Protocol { .. }), "{what}: {error}");
    };
    let none = || reply(STRUCTURED, option_reply::ERR_UNSUP, b"");
    check("it is no NBD server", &[b"HTTP/1.1 400 Bad Request\r\n".to_vec()]);
    check("the old style", &[[&b"NBDMAGIC"[..], &0x0000_4202_8186_1253_u64.to_be_bytes(), &[0; 2]].concat()]);
    check("not fixed", &[greeting(2)]);
    check("another option", &[greeting(3), acknowledge(option::LIST)]);
    check("a wrong opening", &[greeting(3), vec![1; 20]]);
    check("no size", &[greeting(3), none(), acknowledge(option::GO)]);
    check("short", &[greeting(3), none(), reply(option::GO, option_reply::INFO, &[0])]);
    check("short size", &[greeting(3), none(), reply(option::GO, option_reply::INFO, &[0, 0, 1])]);
    check("short sizes", &[greeting(3), none(), reply(option::GO, option_reply::INFO, &[0, 3, 1])]);
    check("another answer", &[greeting(3), none(), reply(option::GO, option_reply::SERVER, &[])]);
    check("endless", &[&[greeting(3), none()][..], &vec![export(1, 1); 40]].concat());
    let contexts = vec![context(1, "x"); 40];
    check("endless contexts", &[&[greeting(3), acknowledge(STRUCTURED)][..], &contexts].concat());
    let mut long = acknowledge(STRUCTURED);
    long[16..20].copy_from_slice(&u32::MAX.to_be_bytes());
    check("too long, and not allocated", &[greeting(3), long]);
}

proptest! {
    #[test]
    fn no_server_makes_us_panic(
        tail in proptest::collection::vec(any::<u8>(), 0..200), option in 0_u32..12, kind in prop_oneof![0_u32..6, any::<u32>()],
    ) {
        let _ = offer(&[greeting(3), tail.clone()]);
        let _ = offer(&[greeting(3), reply(STRUCTURED, kind, &[]), reply(option, kind, &tail)]);
        let _ = offer(&[greeting(3), acknowledge(STRUCTURED), acknowledge(CONTEXTS), reply(option::GO, 3, &tail)]);
        let _ = offer(&[tail]);
    }
}
