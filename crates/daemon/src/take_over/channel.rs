//! Hands the restart state to the next daemon: over a unix socket in the data folder, which only this user may enter.
//!
//! ```text
//!   next ── "sterna take-over 1\n" ──────────────────────────► this
//!        ◄── A, it begins to end ── D, with descriptors, as often as needed ── E, complete ──
//!        ◄── R, and why not
//! ```
//! The first descriptor is the document. If the stream ends before E, nothing was handed over.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::os::unix::net::UnixStream as StdStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use tokio::io::AsyncReadExt as _;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;

use super::document::{DocumentFault, Estate};
use super::{Refusal, Successor};

const SOCKET: &str = "take-over.sock";
/// The request; its digit is the version.
const REQUEST: &[u8] = b"sterna take-over 1\n";
const REQUEST_WAIT_MAX: Duration = Duration::from_secs(1);
/// How many daemons may ask at a time; one of them is accepted.
const SUCCESSORS_MAX: usize = 4;
/// The number of descriptors in one message; the kernel accepts 253.
const DESCRIPTORS_PER_MESSAGE: usize = 200;
/// The largest number of received descriptors: the default limit of a process.
const DESCRIPTORS_MAX: usize = 1 << 20;
const REASON_BYTES_MAX: u64 = 1 << 10;

const ACCEPTED: u8 = b'A';
const DESCRIPTORS: u8 = b'D';
const END: u8 = b'E';
const REFUSED: u8 = b'R';

/// Why the running daemon cannot be replaced.
#[derive(Debug, thiserror::Error)]
pub enum TakeOverError {
    /// The running daemon refuses to be replaced.
    #[error("{0}")]
    Refused(String),
    /// The running daemon cannot be asked.
    #[error("the daemon cannot be asked at {path}")]
    Io {
        /// The path of the socket.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
}

/// An event of the channel: another daemon asks, or has gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    Asks(Successor),
    Gone(Successor),
}

/// Other daemons that ask to adopt this one's clients.
pub(crate) struct Successors {
    heard: mpsc::Receiver<(Asked, Option<UnixStream>)>,
    waiting: BTreeMap<Successor, UnixStream>,
    listening: tokio::task::JoinHandle<()>,
    folder: PathBuf,
}

impl Successors {
    /// Listens in this daemon's data folder. If that fails, no daemon can ask, which is logged.
    pub(crate) fn listen(folder: &Path) -> Self {
        let (tell, heard) = mpsc::channel(SUCCESSORS_MAX);
        let listening = match bind(folder) {
            Ok(listener) => tokio::spawn(listen(listener, tell)),
            Err(error) => {
                tracing::warn!(%error, "this daemon cannot be taken over: serve --take-over will not work");
                tokio::spawn(async move { tell.closed().await })
            }
        };
        Self { heard, waiting: BTreeMap::new(), listening, folder: folder.to_owned() }
    }

    pub(crate) async fn next(&mut self) -> Asked {
        loop {
            tokio::select! {
                heard = self.heard.recv() => match heard {
                    // N.B. The daemon that asked has gone meanwhile: if this one ended for it, no daemon would be left.
                    Some((Asked::Asks(_), Some(stream))) if has_gone(&stream) => {}
                    Some((Asked::Asks(successor), Some(stream))) => {
                        self.waiting.insert(successor, stream);
                        return Asked::Asks(successor);
                    }
                    Some((asked, _)) => return asked,
                    None => std::future::pending().await,
                },
                gone = gone(&self.waiting) => {
                    self.waiting.remove(&gone);
                    return Asked::Gone(gone);
                }
            }
        }
    }

    /// Tells a daemon that this one begins to end.
    pub(crate) fn accept(&self, successor: Successor) {
        if let Some(stream) = self.waiting.get(&successor) {
            // Its disconnection is a separate event.
            let _ = stream.try_write(&[ACCEPTED]);
        }
    }

    pub(crate) fn refuse(&mut self, successor: Successor, reason: Refusal) {
        if let Some(stream) = self.waiting.remove(&successor) {
            let _ = stream.try_write(format!("R{reason}\n").as_bytes());
        }
    }

    /// Delivers the restart state; after success this process does not touch it. Fails if the other daemon has gone.
    pub(crate) async fn deliver(&mut self, successor: Successor, estate: &Estate) -> io::Result<()> {
        let stream = self.waiting.remove(&successor).ok_or(io::ErrorKind::NotConnected)?;
        let document = estate.write()?;
        let mut descriptors = vec![document.as_fd()];
        descriptors.extend(estate.descriptors());
        for batch in descriptors.chunks(DESCRIPTORS_PER_MESSAGE) {
            loop {
                stream.writable().await?;
                match stream.try_io(tokio::io::Interest::WRITABLE, || send(&stream, DESCRIPTORS, batch)) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    sent => break sent?,
                }
            }
        }
        stream.writable().await?;
        stream.try_write(&[END]).map(drop)
    }
}

impl Drop for Successors {
    fn drop(&mut self) {
        self.listening.abort();
        // N.B. This runs while this daemon still locks the folder: the next one makes its own socket.
        let _ = std::fs::remove_file(self.folder.join(SOCKET));
    }
}

/// Asks the daemon that has a data folder for its restart state; `None`: there is no daemon, or it left nothing. Blocks until
/// that daemon has ended, or is about to.
pub(crate) fn take_over(folder: &Path) -> Result<Option<Estate>, TakeOverError> {
    let failed = |source| TakeOverError::Io { path: folder.join(SOCKET), source };
    let mut stream = match by_short_path(folder, |path| StdStream::connect(path)) {
        Ok(stream) => stream,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
            tracing::info!("there is no daemon to take over from");
            return Ok(None);
        }
        Err(error) => return Err(failed(error)),
    };
    stream.write_all(REQUEST).map_err(failed)?;
    match receive(&mut stream) {
        Ok(Some(estate)) => Ok(Some(estate)),
        Ok(None) => {
            tracing::warn!("the daemon has ended without handing over its clients: they connect again");
            Ok(None)
        }
        Err(Fault::Refused(reason)) => Err(TakeOverError::Refused(reason)),
        Err(Fault::Document(reason)) => {
            tracing::warn!(%reason, "cannot use the restart state of the daemon; its clients connect again");
            Ok(None)
        }
        Err(Fault::Io(error)) => Err(failed(error)),
    }
}

#[derive(Debug)]
enum Fault {
    Refused(String),
    Document(DocumentFault),
    Io(io::Error),
}

/// Receives the whole restart state; `None` if the stream ends too early.
fn receive(stream: &mut StdStream) -> Result<Option<Estate>, Fault> {
    let mut descriptors = Vec::new();
    loop {
        let mut tag = [0];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_PER_MESSAGE))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received =
            recvmsg(&*stream, &mut [IoSliceMut::new(&mut tag)], &mut ancillary, RecvFlags::CMSG_CLOEXEC);
        let received = match received {
            Err(rustix::io::Errno::INTR) => continue,
            Err(rustix::io::Errno::CONNRESET) => return Ok(None),
            received => received.map_err(|errno| Fault::Io(errno.into()))?,
        };
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(some) = message {
                descriptors.extend(some);
            }
        }
        if received.bytes == 0 || descriptors.len() > DESCRIPTORS_MAX {
            return Ok(None);
        }
        match tag[0] {
            ACCEPTED => tracing::info!("the daemon is ending; its clients are taken over"),
            DESCRIPTORS => {}
            END => break,
            REFUSED => {
                let mut reason = String::new();
                stream.take(REASON_BYTES_MAX).read_to_string(&mut reason).map_err(Fault::Io)?;
                return Err(Fault::Refused(reason.trim_end().to_owned()));
            }
            _ => return Ok(None),
        }
    }
    if descriptors.is_empty() {
        return Ok(None);
    }
    let document = descriptors.remove(0);
    Estate::read(document, descriptors).map(Some).map_err(Fault::Document)
}

fn send(stream: &UnixStream, tag: u8, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_PER_MESSAGE))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    sendmsg(stream, &[IoSlice::new(&[tag])], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Returns whether the other end is closed, although the request that it sent could still be read.
fn has_gone(stream: &UnixStream) -> bool {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    match rustix::net::recv(stream, &mut [0], flags) {
        Ok((count, _)) => count == 0,
        Err(errno) => errno != rustix::io::Errno::AGAIN,
    }
}

async fn gone(waiting: &BTreeMap<Successor, UnixStream>) -> Successor {
    if waiting.is_empty() {
        return std::future::pending().await;
    }
    let looks = waiting.iter().map(|(successor, stream)| {
        Box::pin(async move {
            loop {
                // Data after the request is ignored.
                let is_open = stream.readable().await.is_ok()
                    && match stream.try_read(&mut [0; 64]) {
                        Ok(count) => count > 0,
                        Err(error) => error.kind() == io::ErrorKind::WouldBlock,
                    };
                if !is_open {
                    return *successor;
                }
            }
        })
    });
    futures_util::future::select_all(looks).await.0
}

async fn listen(listener: UnixListener, tell: mpsc::Sender<(Asked, Option<UnixStream>)>) {
    let mut asked = 0;
    loop {
        let Ok((mut stream, _)) = listener.accept().await else {
            tokio::time::sleep(REQUEST_WAIT_MAX).await;
            continue;
        };
        let mut request = [0; REQUEST.len()];
        let read = tokio::time::timeout(REQUEST_WAIT_MAX, stream.read_exact(&mut request)).await;
        if !matches!(read, Ok(Ok(_))) || request != REQUEST {
            let _ = stream.try_write(b"Rthe daemon is of another version; stop it, and start the new one\n");
            continue;
        }
        asked += 1;
        if tell.send((Asked::Asks(Successor(asked)), Some(stream))).await.is_err() {
            return;
        }
    }
}

fn bind(folder: &Path) -> io::Result<UnixListener> {
    match std::fs::remove_file(folder.join(SOCKET)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    by_short_path(folder, |path| UnixListener::bind(path))
}

/// Calls `work` with a short path of the folder, because a data folder's own may be too long for a socket.
fn by_short_path<T>(folder: &Path, work: impl FnOnce(&Path) -> io::Result<T>) -> io::Result<T> {
    let folder = File::open(folder)?;
    work(&PathBuf::from(format!("/proc/self/fd/{}/{SOCKET}", folder.as_raw_fd())))
}

#[cfg(test)]
mod tests {
    use lane::PassedConnection;
    use migration::VolumeId;

    use super::super::PassedClient;
    use super::*;

    const CLIENTS: u8 = 201;

    fn estate() -> (Estate, Vec<StdStream>) {
        let (mut clients, mut ends) = (Vec::new(), Vec::new());
        for number in 0..CLIENTS {
            let (ours, theirs) = StdStream::pair().unwrap();
            ends.push(ours);
            let connection = PassedConnection { socket: theirs.into(), session: None };
            clients.push(PassedClient { volume: VolumeId([number; 16]), connection });
        }
        (Estate { since_unix_ms: 1, listeners: Vec::new(), clients }, ends)
    }

    fn asks(folder: &Path) -> tokio::task::JoinHandle<Result<Option<Estate>, TakeOverError>> {
        let folder = folder.to_owned();
        tokio::task::spawn_blocking(move || take_over(&folder))
    }

    #[tokio::test]
    async fn whoever_asks_gets_everything_in_order() {
        // A path that is too long for a socket.
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("x".repeat(120));
        std::fs::create_dir(&folder).unwrap();
        let mut successors = Successors::listen(&folder);
        let asking = asks(&folder);
        let Asked::Asks(successor) = successors.next().await else { panic!("it asks") };
        successors.accept(successor);
        let (estate, ends) = estate();
        successors.deliver(successor, &estate).await.unwrap();
        drop(estate);
        let taken = asking.await.unwrap().unwrap().unwrap();
        for (number, (client, end)) in taken.clients.iter().zip(ends).enumerate() {
            assert_eq!(client.volume, VolumeId([number as u8; 16]));
            StdStream::from(client.connection.socket.try_clone().unwrap())
                .write_all(&[number as u8])
                .unwrap();
            let mut byte = [0];
            (&end).read_exact(&mut byte).unwrap();
            assert_eq!(byte, [number as u8]);
        }
        assert_eq!(taken.clients.len(), usize::from(CLIENTS));
        drop(successors);
        assert!(asks(&folder).await.unwrap().unwrap().is_none(), "nobody is there any more");
    }

    #[tokio::test]
    async fn whoever_is_refused_is_told_why_and_whoever_goes_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let mut successors = Successors::listen(folder.path());
        let asking = asks(folder.path());
        let Asked::Asks(successor) = successors.next().await else { panic!("it asks") };
        successors.refuse(successor, Refusal::Managed);
        let Err(TakeOverError::Refused(reason)) = asking.await.unwrap() else { panic!("it is refused") };
        assert_eq!(reason, Refusal::Managed.to_string());

        let mut stream = StdStream::connect(folder.path().join(SOCKET)).unwrap();
        stream.write_all(REQUEST).unwrap();
        let Asked::Asks(second) = successors.next().await else { panic!("it asks") };
        drop(stream);
        assert_eq!(successors.next().await, Asked::Gone(second));
        assert!(successors.deliver(second, &estate().0).await.is_err());
    }

    #[tokio::test]
    async fn a_request_that_is_heard_after_its_daemon_has_gone_does_not_count() {
        let folder = tempfile::tempdir().unwrap();
        let mut successors = Successors::listen(folder.path());
        let mut early = StdStream::connect(folder.path().join(SOCKET)).unwrap();
        early.write_all(REQUEST).unwrap();
        // It has gone before it is accepted.
        drop(early);
        let late = asks(folder.path());
        let Asked::Asks(successor) = successors.next().await else { panic!("the late one asks") };
        successors.refuse(successor, Refusal::Managed);
        assert!(
            matches!(late.await.unwrap(), Err(TakeOverError::Refused(_))),
            "the early one was heard instead"
        );
    }

    #[tokio::test]
    async fn a_daemon_that_dies_before_the_end_has_left_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let mut successors = Successors::listen(folder.path());
        let asking = asks(folder.path());
        let Asked::Asks(successor) = successors.next().await else { panic!("it asks") };
        let (estate, mut ends) = estate();
        let document = estate.write().unwrap();
        let stream = successors.waiting.remove(&successor).unwrap();
        stream.writable().await.unwrap();
        send(&stream, DESCRIPTORS, &[document.as_fd(), estate.descriptors()[0]]).unwrap();
        drop((stream, estate));
        assert!(asking.await.unwrap().unwrap().is_none());
        assert_eq!(ends[0].read(&mut [0]).unwrap(), 0, "its client sees the end");
    }

    #[tokio::test]
    async fn what_is_no_request_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let mut successors = Successors::listen(folder.path());
        let mut stream = StdStream::connect(folder.path().join(SOCKET)).unwrap();
        stream.write_all(b"sterna take-over 9\n").unwrap();
        let answered = tokio::task::spawn_blocking(move || receive(&mut stream));
        let Err(Fault::Refused(reason)) = answered.await.unwrap() else { panic!("it is refused") };
        assert!(reason.contains("another version"), "{reason}");
        let asking = asks(folder.path());
        assert!(matches!(successors.next().await, Asked::Asks(_)), "others are heard");
        drop(successors);
        assert!(asking.await.unwrap().unwrap().is_none());
    }
}
