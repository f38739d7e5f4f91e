//! Feeds a remote NBD server's bytes to the client's decoders alone, and to a whole store.

use std::cell::RefCell;
use std::io::Write as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use block::engine::{Engine, EngineChoice, EngineDriver};
use block::store::remote::hostile::{Listener, ReplyStyle, negotiate};
use block::store::remote::{NbdUri, RemoteOptions};
use block::{
    Access, BlockDevice, Buffer, ByteRange, Durability, Executor, RemoteImage, RemoteStore, ZeroMode,
};
use export::nbd::protocol::negotiation::{ExportInfo, OptionReplies, encode_greeting};
use export::nbd::protocol::{allocation, option, option_reply, transmission_flag};
use futures_util::future::{Either, join5, select};

/// Longest time of the requests to a store, far more than they need.
const PATIENCE: Duration = Duration::from_secs(20);
/// The store's own timeouts, short so that many servers can be tried.
const OPTIONS: RemoteOptions = RemoteOptions {
    connect_timeout: Duration::from_millis(20),
    answer_deadline: Duration::from_millis(10),
    connections_max: 2,
};
/// Size of the export of servers that behave well in the negotiation, in bytes.
const DISK_BYTES: u64 = (1 << 20) + 512;
/// Size of a read that is received directly into its buffer.
const LONG_READ: usize = 64 << 10;
/// Longest time that the server waits for a client that does not read.
const WRITE_TIMEOUT: Duration = Duration::from_millis(50);

/// Feeds the bytes as a server's negotiation and as its replies. The first byte decides the options.
pub(crate) fn feed_decoders(bytes: &[u8]) {
    let Some((kind, bytes)) = bytes.split_first() else { return };
    if kind % 4 == 0 {
        if let Err(error) = negotiate(bytes) {
            assert!(!error.to_string().is_empty(), "an error says why: {error:?}");
        }
        return;
    }
    let style = if kind % 4 == 1 { ReplyStyle::Simple } else { ReplyStyle::Chunks };
    let piece = [1, 7, 4096, usize::MAX][usize::from(kind / 4 % 4)];
    let answers = Listener::new(style).hear(bytes, piece);
    assert!(answers <= bytes.len(), "{answers} answers were made of {} bytes", bytes.len());
}

/// Runs a store on a server that sends the bytes on every connection. The first byte decides its beginning and its end.
pub(crate) fn feed_store(bytes: &[u8]) {
    thread_local! {
        static LANE: RefCell<Lane> = RefCell::new(Lane::open());
    }
    let Some((kind, bytes)) = bytes.split_first() else { return };
    let beginning = match kind % 4 {
        0 => Vec::new(),
        1 => greeting(ReplyStyle::Simple),
        _ => greeting(ReplyStyle::Chunks),
    };
    let end = if kind / 4 % 2 == 0 { End::Silence } else { End::HangUp };
    LANE.with_borrow_mut(|lane| lane.work_on(Speech { bytes: [&beginning, bytes].concat(), end }));
}

/// The parts that are reused by the next server.
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

    #[expect(clippy::expect_used, reason = "a process has a socket and a thread more")]
    fn work_on(&mut self, speech: Speech) {
        let uri = NbdUri::unix(server(speech).expect("a server starts"), "disk");
        let image = match RemoteImage::connect_with(&uri, Access::ReadWrite, OPTIONS) {
            Ok(image) => image,
            Err(error) => {
                assert!(!error.to_string().is_empty(), "an error says why: {error:?}");
                return;
            }
        };
        let handle = self.executor.handle();
        let store = Rc::new(RemoteStore::new(image, Rc::clone(&self.engine), handle.clone()));
        self.executor.run(async move {
            let requests = Box::pin(requests(&*store));
            let ended = matches!(select(requests, handle.sleep(PATIENCE)).await, Either::Left(_));
            assert!(ended, "requests go on after {PATIENCE:?}");
        });
    }
}

/// Sends one request of each kind at the same time, and then a few more.
async fn requests(store: &dyn BlockDevice) {
    let size = store.geometry().size;
    let all = ByteRange::new(0, size);
    let block = || Buffer::zeroed(4096);
    let (short, written, zeroed, described, flushed) = join5(
        store.read(0, block()),
        store.write(4096, block(), Durability::Durable),
        store.write_zeroes(ByteRange::new(8192, 65536), ZeroMode::MayUnmap, Durability::Volatile),
        store.allocation(all),
        store.flush(),
    )
    .await;
    assert!(short.is_ok_and(|data| data.len() == 4096) || size > 0 || written.is_err());
    if let Ok(extents) = described {
        let end = extents.iter().fold(0, |position, extent| {
            assert_eq!(extent.range.offset, position, "extents follow one another");
            extent.range.end()
        });
        assert_eq!(end, size, "extents cover what was asked for");
    }
    let (Ok(()), Ok(())) = (zeroed, flushed) else { return };
    if let Ok(data) = store.read(0, Buffer::zeroed(LONG_READ)).await {
        assert_eq!(data.len(), LONG_READ);
    }
}

/// The bytes of a server, and its end.
struct Speech {
    bytes: Vec<u8>,
    end: End,
}

#[derive(Clone, Copy)]
enum End {
    /// It keeps the connection open and sends nothing more.
    Silence,
    /// It closes the connection.
    HangUp,
}

/// The bytes that the server sends on the next connections.
static SPEECH: Mutex<Option<Arc<Speech>>> = Mutex::new(None);

/// Sets the server's bytes, starts it if necessary, and returns its socket.
fn server(speech: Speech) -> anyhow::Result<&'static PathBuf> {
    static SOCKET: OnceLock<PathBuf> = OnceLock::new();
    *SPEECH.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(speech));
    if let Some(socket) = SOCKET.get() {
        return Ok(socket);
    }
    let folder = tempfile::Builder::new().prefix("sterna-hostile-").tempdir()?.keep();
    let socket = folder.join("server");
    let listener = UnixListener::bind(&socket).context("listen")?;
    std::thread::spawn(move || serve(&listener));
    Ok(SOCKET.get_or_init(|| socket))
}

fn serve(listener: &UnixListener) {
    // The silent connections with the latest bytes.
    let mut silent: Vec<(Arc<Speech>, UnixStream)> = Vec::new();
    for mut stream in listener.incoming().flatten() {
        let Some(speech) = SPEECH.lock().unwrap_or_else(PoisonError::into_inner).clone() else { continue };
        silent.retain(|(said, _)| Arc::ptr_eq(said, &speech));
        let _ = stream.set_write_timeout(Some(WRITE_TIMEOUT));
        // The client may close the connection before everything is sent.
        let _ = stream.write_all(&speech.bytes);
        if let End::Silence = speech.end {
            silent.push((speech, stream));
        }
    }
}

/// Returns the negotiation of a well-behaved server for our client.
fn greeting(style: ReplyStyle) -> Vec<u8> {
    let mut said = Vec::new();
    encode_greeting(&mut said);
    let mut replies = OptionReplies::new(&mut said, option::STRUCTURED_REPLY);
    match style {
        ReplyStyle::Simple => replies.reply(option_reply::ERR_UNSUP, &[]),
        ReplyStyle::Chunks => {
            replies.acknowledge();
            let mut contexts = OptionReplies::new(&mut said, option::SET_META_CONTEXT);
            contexts.meta_context(1, allocation::NAME);
            contexts.acknowledge();
        }
    }
    let flags = transmission_flag::HAS_FLAGS
        | transmission_flag::SEND_FLUSH
        | transmission_flag::SEND_FUA
        | transmission_flag::SEND_TRIM
        | transmission_flag::SEND_WRITE_ZEROES;
    let mut replies = OptionReplies::new(&mut said, option::GO);
    replies.info_export(ExportInfo { size: DISK_BYTES, flags });
    replies.acknowledge();
    said
}
