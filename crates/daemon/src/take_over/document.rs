//! The restart state of a daemon as bytes and a list of descriptors.
//!
//! ```text
//!   mark, 8 bytes ─ length of the list, 8 bytes ─ list, JSON ─ unread data of clients, one after the other
//!   descriptors:    listeners ─ connections, in the order of the list
//! ```
//! The mark is removed before anything is served: a document with another mark has been used, and so have its connections.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;

use lane::{AllocationContext, Offer, PassedConnection, PassedSession, ReplyStyle};
use migration::VolumeId;
use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};

/// The first bytes of a document; the digit is its version.
const MARK: &[u8; 8] = b"STERNAT1";
/// The first bytes of a used document.
const USED: &[u8; 8] = b"STERNAT0";
/// The longest list, in bytes: some 300,000 connections.
const LIST_BYTES_MAX: u64 = 64 << 20;
/// The largest unread data of a connection, in bytes: the largest request, and what is read ahead.
const UNREAD_BYTES_MAX: u64 = 64 << 20;

/// The restart state: what one daemon leaves to the next.
#[derive(Default)]
pub(crate) struct Estate {
    /// When its clients began to wait, in milliseconds since 1970; 0 if unknown.
    pub(crate) since_unix_ms: u64,
    pub(crate) listeners: Vec<PassedListener>,
    pub(crate) clients: Vec<PassedClient>,
}

pub(crate) struct PassedListener {
    pub(crate) volume: String,
    pub(crate) place: ListenerPlace,
    pub(crate) socket: OwnedFd,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ListenerPlace {
    /// The volume's path, with this file.
    Path {
        device: u64,
        inode: u64,
    },
    Port,
}

pub(crate) struct PassedClient {
    pub(crate) volume: VolumeId,
    pub(crate) connection: PassedConnection,
}

/// Why a document cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DocumentFault {
    #[error("it has been used before")]
    Used,
    #[error("it is of another version of the daemon")]
    Version,
    #[error("it is incomplete")]
    Truncated,
    #[error("it lists {listed} descriptors, and {found} are there")]
    Descriptors { listed: usize, found: usize },
    #[error("its list cannot be read")]
    List(#[from] serde_json::Error),
    #[error("it cannot be read")]
    Io(#[from] io::Error),
}

#[derive(Serialize, Deserialize)]
struct List {
    since_unix_ms: u64,
    listeners: Vec<ListedListener>,
    clients: Vec<ListedClient>,
}

#[derive(Serialize, Deserialize)]
struct ListedListener {
    volume: String,
    place: ListenerPlace,
}

#[derive(Serialize, Deserialize)]
struct ListedClient {
    volume: [u8; 16],
    session: Option<ListedSession>,
}

#[derive(Serialize, Deserialize)]
struct ListedSession {
    export: String,
    size: u64,
    flags: u16,
    block_size_minimum: u32,
    block_size_preferred: u32,
    block_size_maximum: u32,
    replies: ListedReplies,
    allocation: bool,
    unread_bytes: u64,
    requests_answered: u64,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
enum ListedReplies {
    Simple,
    Structured,
    Extended,
}

impl Estate {
    /// Returns the descriptors, in the order of the list.
    pub(crate) fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let listeners = self.listeners.iter().map(|listener| listener.socket.as_fd());
        listeners.chain(self.clients.iter().map(|client| client.connection.socket.as_fd())).collect()
    }

    /// Writes everything except the descriptors to a file in memory.
    pub(crate) fn write(&self) -> io::Result<OwnedFd> {
        self.write_with(&self.listeners)
    }

    /// Does the same without the listeners.
    pub(crate) fn write_clients(&self) -> io::Result<OwnedFd> {
        self.write_with(&[])
    }

    fn write_with(&self, listeners: &[PassedListener]) -> io::Result<OwnedFd> {
        let listed = |listener: &PassedListener| {
            let PassedListener { volume, place, .. } = listener;
            ListedListener { volume: volume.clone(), place: *place }
        };
        let list = List {
            since_unix_ms: self.since_unix_ms,
            listeners: listeners.iter().map(listed).collect(),
            clients: self.clients.iter().map(ListedClient::of).collect(),
        };
        let list = serde_json::to_vec(&list)?;
        let mut file = File::from(memfd_create("sterna-take-over", MemfdFlags::CLOEXEC)?);
        file.write_all(MARK)?;
        file.write_all(&(list.len() as u64).to_le_bytes())?;
        file.write_all(&list)?;
        for session in self.clients.iter().filter_map(|client| client.connection.session.as_ref()) {
            file.write_all(&session.unread)?;
        }
        Ok(file.into())
    }

    /// Reads the document of [`Self::write`], and marks it as used, so that it is not read again. `descriptors` are those of
    /// [`Self::descriptors`], in the same order. After a [`DocumentFault`] the descriptors are closed.
    pub(crate) fn read(document: OwnedFd, descriptors: Vec<OwnedFd>) -> Result<Self, DocumentFault> {
        let file = File::from(document);
        let mut mark = [0; MARK.len()];
        read_exactly_at(&file, &mut mark, 0)?;
        if &mark != MARK {
            return Err(if &mark == USED { DocumentFault::Used } else { DocumentFault::Version });
        }
        // N.B. from here on the holder of the descriptors may use the connections, and only once.
        file.write_all_at(USED, 0)?;
        let mut length = [0; 8];
        read_exactly_at(&file, &mut length, MARK.len() as u64)?;
        let length = u64::from_le_bytes(length);
        let rest = file.metadata()?.len().saturating_sub(MARK.len() as u64 + 8);
        if length > LIST_BYTES_MAX.min(rest) {
            return Err(DocumentFault::Truncated);
        }
        let mut bytes = vec![0; length as usize];
        let start = MARK.len() as u64 + 8;
        read_exactly_at(&file, &mut bytes, start)?;
        let list: List = serde_json::from_slice(&bytes)?;
        let (listed, found) = (list.listeners.len() + list.clients.len(), descriptors.len());
        if listed != found {
            return Err(DocumentFault::Descriptors { listed, found });
        }
        let mut descriptors = descriptors.into_iter();
        let listeners = list.listeners.into_iter().zip(&mut descriptors);
        let listeners = listeners
            .map(|(ListedListener { volume, place }, socket)| PassedListener { volume, place, socket })
            .collect();
        let mut unread_at = start + length;
        let mut clients = Vec::new();
        for (listed, socket) in list.clients.into_iter().zip(descriptors) {
            let session = match listed.session {
                Some(session) => Some(session.with_unread(&file, &mut unread_at)?),
                None => None,
            };
            let connection = PassedConnection { socket, session };
            clients.push(PassedClient { volume: VolumeId(listed.volume), connection });
        }
        Ok(Self { since_unix_ms: list.since_unix_ms, listeners, clients })
    }
}

impl ListedClient {
    fn of(client: &PassedClient) -> Self {
        let session = client.connection.session.as_ref().map(|session| {
            let offer = &session.offer;
            ListedSession {
                export: session.export.clone(),
                size: offer.size,
                flags: offer.flags,
                block_size_minimum: offer.block_size_minimum,
                block_size_preferred: offer.block_size_preferred,
                block_size_maximum: offer.block_size_maximum,
                replies: match offer.replies {
                    ReplyStyle::Simple => ListedReplies::Simple,
                    ReplyStyle::Structured => ListedReplies::Structured,
                    ReplyStyle::Extended => ListedReplies::Extended,
                },
                allocation: session.allocation == AllocationContext::Chosen,
                unread_bytes: session.unread.len() as u64,
                requests_answered: session.requests_answered,
            }
        });
        Self { volume: client.volume.0, session }
    }
}

impl ListedSession {
    fn with_unread(self, file: &File, at: &mut u64) -> Result<PassedSession, DocumentFault> {
        if self.unread_bytes > UNREAD_BYTES_MAX
            || self.unread_bytes > file.metadata()?.len().saturating_sub(*at)
        {
            return Err(DocumentFault::Truncated);
        }
        let mut unread = vec![0; self.unread_bytes as usize];
        read_exactly_at(file, &mut unread, *at)?;
        *at += self.unread_bytes;
        let replies = match self.replies {
            ListedReplies::Simple => ReplyStyle::Simple,
            ListedReplies::Structured => ReplyStyle::Structured,
            ListedReplies::Extended => ReplyStyle::Extended,
        };
        let offer = Offer {
            size: self.size,
            flags: self.flags,
            block_size_minimum: self.block_size_minimum,
            block_size_preferred: self.block_size_preferred,
            block_size_maximum: self.block_size_maximum,
            replies,
        };
        let allocation =
            if self.allocation { AllocationContext::Chosen } else { AllocationContext::NotChosen };
        let Self { export, requests_answered, .. } = self;
        Ok(PassedSession { export, offer, allocation, unread, requests_answered })
    }
}

fn read_exactly_at(file: &File, bytes: &mut [u8], at: u64) -> Result<(), DocumentFault> {
    file.read_exact_at(bytes, at).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => DocumentFault::Truncated,
        _ => DocumentFault::Io(error),
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    fn estate(folder: &std::path::Path) -> Estate {
        let listener = UnixListener::bind(folder.join("v.sock")).unwrap();
        let connection = |session| {
            let (socket, _) = UnixStream::pair().unwrap();
            let connection = PassedConnection { socket: socket.into(), session };
            PassedClient { volume: VolumeId([7; 16]), connection }
        };
        let session = |length| PassedSession {
            export: "v".to_owned(),
            offer: Offer {
                size: 1 << 40,
                flags: 0x1ff,
                block_size_minimum: 1,
                block_size_preferred: 4096,
                block_size_maximum: 32 << 20,
                replies: ReplyStyle::Structured,
            },
            allocation: AllocationContext::Chosen,
            unread: (0..length).map(|index| index as u8).collect(),
            requests_answered: 9,
        };
        Estate {
            since_unix_ms: 5,
            listeners: vec![PassedListener {
                volume: "v".to_owned(),
                place: ListenerPlace::Path { device: 1, inode: 2 },
                socket: listener.into(),
            }],
            clients: vec![connection(Some(session(3))), connection(None), connection(Some(session(70_000)))],
        }
    }

    fn clones(estate: &Estate) -> Vec<OwnedFd> {
        estate.descriptors().into_iter().map(|descriptor| descriptor.try_clone_to_owned().unwrap()).collect()
    }

    #[test]
    fn what_is_left_is_found_again_and_once() {
        let folder = tempfile::tempdir().unwrap();
        let left = estate(folder.path());
        let document = left.write().unwrap();
        let kept = document.try_clone().unwrap();
        let found = Estate::read(document, clones(&left)).unwrap();
        assert_eq!((found.since_unix_ms, found.listeners[0].place), (5, left.listeners[0].place));
        for (left, found) in left.clients.iter().zip(&found.clients) {
            assert_eq!(left.volume, found.volume);
            assert_eq!(left.connection.session, found.connection.session);
        }
        assert!(matches!(Estate::read(kept, clones(&left)), Err(DocumentFault::Used)));
    }

    #[test]
    fn what_is_not_whole_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let left = estate(folder.path());
        let mut whole = Vec::new();
        File::from(left.write().unwrap()).read_to_end_at(&mut whole);
        let read = |bytes: &[u8], descriptors: Vec<OwnedFd>| {
            let mut file = File::from(memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
            file.write_all(bytes).unwrap();
            Estate::read(file.into(), descriptors)
        };
        for length in 0..whole.len().min(2000) {
            assert!(read(&whole[..length], clones(&left)).is_err(), "{length} bytes");
        }
        assert!(read(&whole[..whole.len() - 1], clones(&left)).is_err());
        let mut descriptors = clones(&left);
        descriptors.pop();
        assert!(matches!(read(&whole, descriptors), Err(DocumentFault::Descriptors { listed: 4, found: 3 })));
        let mut other = whole.clone();
        other[7] = b'9';
        assert!(matches!(read(&other, clones(&left)), Err(DocumentFault::Version)));
        // A length beyond the file's end allocates no memory.
        let mut long = whole.clone();
        long[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(matches!(read(&long, clones(&left)), Err(DocumentFault::Truncated)));
        assert!(read(&whole, clones(&left)).is_ok());
    }

    trait ReadToEndAt {
        fn read_to_end_at(self, bytes: &mut Vec<u8>);
    }

    impl ReadToEndAt for File {
        fn read_to_end_at(mut self, bytes: &mut Vec<u8>) {
            use std::io::{Read as _, Seek as _};
            self.rewind().unwrap();
            self.read_to_end(bytes).unwrap();
        }
    }
}
