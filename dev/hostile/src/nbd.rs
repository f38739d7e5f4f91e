//! Feeds the NBD server's decoders alone, and a whole connection over a disk in memory.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use block::engine::{Engine, EngineChoice, EngineDriver};
use block::{Buffer, BufferPool, Executor, MemoryStore};
use export::nbd::intake::{Admission, Intake, Taken};
use export::nbd::negotiation::{AllocationContext, INPUT_LENGTH_MAX, Negotiation, Step, TlsMode};
use export::nbd::protocol::negotiation::{OptionRequest, decode_option};
use export::nbd::protocol::reply::{HEAD_LENGTH_MAX, decode_extents, encode_extents};
use export::nbd::protocol::{ReplyHead, ReplyStyle, RequestHeader, option};
use export::nbd::transmission::Terms;
use export::nbd::{Access, Export, Exports, Limits, Server};
use futures_util::future::{Either, join, select};

/// Size of the disk, in bytes. It is not a power of two, and small, so that requests reach its end.
const DISK_BYTES: u64 = (1 << 20) + 512;
/// Memory for payloads of the decoders, enough for a short input.
const PAYLOAD_BYTES_MAX: usize = 64 << 10;
/// Longest time until a connection ends after its client has sent everything, far more than it needs.
const PATIENCE: Duration = Duration::from_secs(20);
/// Size of the buffer for replies.
const RECEIVE_BYTES: usize = 64 << 10;

/// Feeds negotiation and requests without a socket, in pieces whose size depends on the first byte.
pub(crate) fn feed_decoders(bytes: &[u8]) {
    let Some((kind, bytes)) = bytes.split_first() else { return };
    check_codec(bytes);
    let tls = [TlsMode::Off, TlsMode::Offered, TlsMode::Required, TlsMode::Off][usize::from(kind % 4)];
    let piece = [1, 7, 64, usize::MAX][usize::from(kind / 4 % 4)];
    let exports = exports();
    let mut machine = Negotiation::with_tls(tls);
    let (mut kept, mut output) = (Vec::new(), Vec::new());
    let mut unread = bytes;
    let agreement = loop {
        let Ok((used, step)) = machine.advance(&kept, &exports, &mut output) else { return };
        kept.drain(..used);
        match step {
            Step::Continue => assert!(used > 0, "a message has bytes"),
            Step::NeedBytes => {
                assert!(kept.len() < INPUT_LENGTH_MAX, "{} bytes are enough", kept.len());
                let (taken, rest) = unread.split_at(unread.len().min(piece));
                if taken.is_empty() {
                    return;
                }
                kept.extend_from_slice(taken);
                unread = rest;
            }
            Step::StartTls => machine.begin_tls(),
            Step::Agreed(agreement) => break agreement,
            Step::Aborted => return,
        }
        // Every option has a short answer, whatever its length.
        output.clear();
    };
    let terms = Terms { offer: agreement.offer, allocation: agreement.allocation };
    kept.extend_from_slice(unread);
    take_requests(&kept, &terms, piece);
    take_requests(bytes, &Terms { allocation: AllocationContext::Chosen, ..terms }, piece);
}

/// Checks that what is decoded is encoded, and decoded again, as the same.
fn check_codec(bytes: &[u8]) {
    for style in [ReplyStyle::Simple, ReplyStyle::Structured, ReplyStyle::Extended] {
        if let Ok(Some((head, length))) = ReplyHead::decode(bytes, style) {
            assert!(length <= HEAD_LENGTH_MAX, "{head:?} takes {length} bytes");
            let again = ReplyHead::decode(head.encode(style, 0).as_slice(), style);
            assert_eq!(again, Ok(Some((head, length))));
        }
        if let Ok(extents) = decode_extents(bytes, style) {
            assert_eq!(decode_extents(&encode_extents(&extents, style), style), Ok(extents));
        }
        let Some(header) = bytes.first_chunk() else { continue };
        if let Ok(request) = RequestHeader::decode(header, style) {
            let mut encoded = request.encode_extended();
            if style != ReplyStyle::Extended {
                encoded[..style.request_length()].copy_from_slice(&request.encode());
            }
            assert_eq!(RequestHeader::decode(&encoded, style), Ok(request));
        }
    }
    if let Ok(OptionRequest::SetMetaContext(request)) = decode_option(option::SET_META_CONTEXT, bytes) {
        let encoded = request.encode();
        assert_eq!(
            decode_option(option::SET_META_CONTEXT, &encoded),
            Ok(OptionRequest::SetMetaContext(request))
        );
    }
}

fn take_requests(bytes: &[u8], terms: &Terms, piece: usize) {
    let (mut intake, pool) = (Intake::default(), BufferPool::new());
    for mut input in bytes.chunks(piece.min(bytes.len().max(1))) {
        loop {
            let admit =
                |length| if length <= PAYLOAD_BYTES_MAX { Admission::Granted } else { Admission::Refused };
            match intake.take(&mut input, terms, &pool, admit) {
                Ok(Taken::NeedBytes) => break,
                Ok(Taken::Request { .. } | Taken::Refused { .. }) => {}
                Ok(Taken::NoRoom) | Err(_) => return,
            }
        }
        assert!(input.is_empty(), "what asks for more has used what there was");
    }
}

/// Serves a client that sends the bytes, reads everything, and leaves.
pub(crate) fn feed_connection(bytes: &[u8]) {
    thread_local! {
        static LANE: RefCell<Lane> = RefCell::new(Lane::open());
    }
    LANE.with_borrow_mut(|lane| lane.serve(bytes));
}

/// The parts that are reused by the next connection, because making a ring is slow.
struct Lane {
    executor: Executor<EngineDriver>,
    engine: Rc<dyn Engine>,
}

impl Lane {
    #[expect(clippy::expect_used, reason = "threads can always be had")]
    fn open() -> Self {
        let (driver, engine) = block::engine::open(EngineChoice::Auto).expect("an engine");
        Self { executor: Executor::new(driver), engine }
    }

    #[expect(clippy::expect_used, reason = "a process has two descriptors more")]
    fn serve(&mut self, bytes: &[u8]) {
        let handle = self.executor.handle();
        let server = Server::new(handle.clone(), Rc::clone(&self.engine), exports(), Limits::STANDARD);
        let (theirs, ours) = UnixStream::pair().expect("a socket pair");
        server.serve_connection(OwnedFd::from(theirs));
        let socket = Arc::new(OwnedFd::from(ours));
        let talks = talk(Rc::clone(&self.engine), socket, Buffer::copy_of(bytes));
        self.executor.run(async move {
            let ends = Box::pin(async {
                talks.await;
                server.shutdown(PATIENCE).await
            });
            match select(ends, handle.sleep(PATIENCE)).await {
                Either::Left((drained, _)) => {
                    assert_eq!(drained.connections_cut, 0, "a connection ends with its client");
                }
                Either::Right(_) => {
                    assert!(server.connections().is_empty(), "it goes on: {:?}", server.connections());
                }
            }
        });
    }
}

/// Sends everything, and reads until the server has closed.
async fn talk(engine: Rc<dyn Engine>, socket: Arc<OwnedFd>, bytes: Buffer) {
    let says = async {
        // The server may close the connection before everything is sent.
        let _ = engine.send(&socket, vec![bytes]).await;
        let _ = say_no_more(&socket);
    };
    let hears = async {
        loop {
            let room = Buffer::zeroed(RECEIVE_BYTES);
            match engine.receive(&socket, room).await {
                Ok((_, count)) if count > 0 => {}
                _ => return,
            }
        }
    };
    join(says, hears).await;
}

/// Ends the sending side of the connection.
fn say_no_more(socket: &OwnedFd) -> std::io::Result<()> {
    UnixStream::from(socket.try_clone()?).shutdown(std::net::Shutdown::Write)
}

fn exports() -> Exports {
    let disk = Export {
        name: "disk".to_owned(),
        description: "one disk".to_owned(),
        device: Rc::new(MemoryStore::new(DISK_BYTES)),
        connect: None,
        access: Access::ReadWrite,
    };
    let frozen = Export {
        name: "frozen".to_owned(),
        description: String::new(),
        device: Rc::clone(&disk.device),
        connect: None,
        access: Access::ReadOnly,
    };
    Exports::new([disk, frozen])
}
