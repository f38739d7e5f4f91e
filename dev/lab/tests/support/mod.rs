//! An NBD server in memory that breaks its disk or its connections on request.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tempfile::TempDir;
use testbed::nbd_client::Address;

/// The server's faults, at every [`FAULTY_WRITE`]th write unless said otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// Answers a write without doing it.
    LoseWrite,
    /// Does only the first half of a write.
    TearWrite,
    /// Does a write one block further on.
    MisplaceWrite,
    /// Answers trims and write-zeroes without doing them, always.
    IgnoreZeroes,
    /// Restores, some writes later, an earlier content of a block: a stale copy that overwrites newer data.
    RestoreOldBlock,
    /// Answers a write with EIO, and does half of it.
    FailWrite,
    /// Closes the connection at every `n`th request: after doing it, before answering it.
    DropConnections {
        /// The `n` of the requests.
        every: u64,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Style {
    /// Simple replies only; structured ones are refused.
    Simple,
    /// Chunks of at most 4 KiB, holes for zeroes.
    Structured,
}

pub(crate) struct Server {
    folder: PathBuf,
    _temporary: Option<TempDir>,
    disk: Arc<Mutex<Vec<u8>>>,
}

struct Shared {
    disk: Arc<Mutex<Vec<u8>>>,
    fault: Fault,
    writes: AtomicU64,
    requests: AtomicU64,
    old: Mutex<Option<(usize, Vec<u8>)>>,
}

/// Rare enough that the disk is in use between faults, and frequent enough that a fault is seen before the guest overwrites it.
const FAULTY_WRITE: u64 = 200;
/// An old block returns after this many writes.
const RESTORED_LATER: u64 = 20;

impl Server {
    pub(crate) fn start(disk_bytes: usize, style: Style, fault: Fault) -> Self {
        let temporary = tempfile::tempdir().unwrap();
        let server = Self::start_in(temporary.path(), disk_bytes, style, fault);
        Self { _temporary: Some(temporary), ..server }
    }

    /// Serves a disk of zeroes, with its socket in the caller's folder.
    pub(crate) fn start_in(folder: &Path, disk_bytes: usize, style: Style, fault: Fault) -> Self {
        let listener = UnixListener::bind(folder.join("nbd.sock")).unwrap();
        let disk = Arc::new(Mutex::new(vec![0; disk_bytes]));
        let (writes, requests) = (AtomicU64::new(0), AtomicU64::new(0));
        let shared =
            Arc::new(Shared { disk: Arc::clone(&disk), fault, writes, requests, old: Mutex::new(None) });
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = Arc::clone(&shared);
                std::thread::spawn(move || {
                    // A client that leaves ends its connection, not the server.
                    let _ = serve(stream, style, &shared);
                });
            }
        });
        Self { folder: folder.to_owned(), _temporary: None, disk }
    }

    pub(crate) fn address(&self) -> Address {
        Address::new(self.folder.join("nbd.sock"), "disk")
    }

    /// Changes the disk without the guest's knowledge.
    pub(crate) fn tamper(&self, change: impl FnOnce(&mut Vec<u8>)) {
        change(&mut self.disk.lock().unwrap());
    }

    pub(crate) fn dump(&self) -> PathBuf {
        let path = self.folder.join("image");
        std::fs::write(&path, &*self.disk.lock().unwrap()).unwrap();
        path
    }
}

fn serve(mut stream: UnixStream, style: Style, shared: &Shared) -> io::Result<()> {
    let structured = shake_hands(&mut stream, style, shared.disk.lock().unwrap().len() as u64)?;
    loop {
        let header: [u8; 28] = read_array(&mut stream)?;
        let command = u16::from_be_bytes([header[6], header[7]]);
        let cookie: [u8; 8] = header[8..16].try_into().unwrap();
        let offset = u64::from_be_bytes(header[16..24].try_into().unwrap()) as usize;
        let length = u32::from_be_bytes(header[24..28].try_into().unwrap()) as usize;
        let mut error = 0;
        match command {
            1 => {
                let mut data = vec![0; length];
                stream.read_exact(&mut data)?;
                error = write(shared, offset, &data);
            }
            2 => return Ok(()),
            4 | 6 if shared.fault != Fault::IgnoreZeroes => {
                shared.disk.lock().unwrap()[offset..offset + length].fill(0);
            }
            _ => {}
        }
        let requests = shared.requests.fetch_add(1, Ordering::Relaxed) + 1;
        if let Fault::DropConnections { every } = shared.fault
            && requests.is_multiple_of(every)
        {
            return Ok(());
        }
        let mut reply = Vec::new();
        if command == 0 && structured {
            read_in_chunks(&mut reply, cookie, offset, &shared.disk.lock().unwrap()[offset..offset + length]);
        } else {
            reply.extend_from_slice(&0x6744_6698_u32.to_be_bytes());
            reply.extend_from_slice(&u32::to_be_bytes(error));
            reply.extend_from_slice(&cookie);
            if command == 0 {
                reply.extend_from_slice(&shared.disk.lock().unwrap()[offset..offset + length]);
            }
        }
        stream.write_all(&reply)?;
    }
}

/// Does a write, or what the fault makes of it; returns the error code for the answer.
fn write(shared: &Shared, offset: usize, data: &[u8]) -> u32 {
    let mut disk = shared.disk.lock().unwrap();
    let writes = shared.writes.fetch_add(1, Ordering::Relaxed) + 1;
    let strikes = writes.is_multiple_of(FAULTY_WRITE);
    let whole = offset..offset + data.len();
    let half = data.len() / 2;
    match shared.fault {
        Fault::LoseWrite if strikes => {}
        Fault::RestoreOldBlock => {
            if strikes {
                *shared.old.lock().unwrap() = Some((offset, disk[whole.clone()].to_vec()));
            }
            disk[whole].copy_from_slice(data);
            if writes % FAULTY_WRITE == RESTORED_LATER
                && let Some((offset, old)) = shared.old.lock().unwrap().take()
            {
                disk[offset..offset + old.len()].copy_from_slice(&old);
            }
        }
        Fault::TearWrite | Fault::FailWrite if strikes => {
            disk[offset..offset + half].copy_from_slice(&data[..half]);
            return if shared.fault == Fault::FailWrite { 5 } else { 0 };
        }
        Fault::MisplaceWrite if strikes => {
            let elsewhere = (offset + data.len()) % disk.len();
            disk[elsewhere..elsewhere + data.len()].copy_from_slice(data);
        }
        _ => disk[whole].copy_from_slice(data),
    }
    0
}

fn read_in_chunks(reply: &mut Vec<u8>, cookie: [u8; 8], offset: usize, data: &[u8]) {
    const CHUNK_BYTES: usize = 4096;
    let mut chunk = |flags: u16, kind: u16, payload: &[&[u8]]| {
        let length: usize = payload.iter().map(|part| part.len()).sum();
        reply.extend_from_slice(&0x668e_33ef_u32.to_be_bytes());
        reply.extend_from_slice(&flags.to_be_bytes());
        reply.extend_from_slice(&kind.to_be_bytes());
        reply.extend_from_slice(&cookie);
        reply.extend_from_slice(&(length as u32).to_be_bytes());
        payload.iter().for_each(|part| reply.extend_from_slice(part));
    };
    // In reverse order, which the protocol allows.
    for (index, bytes) in data.chunks(CHUNK_BYTES).enumerate().rev() {
        let at = ((offset + index * CHUNK_BYTES) as u64).to_be_bytes();
        if bytes.iter().all(|byte| *byte == 0) {
            chunk(0, 2, &[&at, &(bytes.len() as u32).to_be_bytes()]);
        } else {
            chunk(0, 1, &[&at, bytes]);
        }
    }
    chunk(1, 0, &[]);
}

/// Does the server's side of the handshake; returns whether replies are structured.
fn shake_hands(stream: &mut UnixStream, style: Style, disk_bytes: u64) -> io::Result<bool> {
    stream.write_all(b"NBDMAGICIHAVEOPT\x00\x03")?;
    let _flags: [u8; 4] = read_array(stream)?;
    let mut structured = false;
    loop {
        let _magic: [u8; 8] = read_array(stream)?;
        let option = u32::from_be_bytes(read_array(stream)?);
        let length = u32::from_be_bytes(read_array(stream)?);
        let mut payload = vec![0; length as usize];
        stream.read_exact(&mut payload)?;
        let mut answer = |kind: u32, payload: &[u8]| {
            let mut bytes = 0x0003_e889_0455_65a9_u64.to_be_bytes().to_vec();
            bytes.extend_from_slice(&option.to_be_bytes());
            bytes.extend_from_slice(&kind.to_be_bytes());
            bytes.extend_from_slice(&(payload.len() as u32).to_be_bytes());
            bytes.extend_from_slice(payload);
            stream.write_all(&bytes)
        };
        match option {
            8 if style == Style::Structured => {
                structured = true;
                answer(1, b"")?;
            }
            7 => {
                // Flush, FUA, trim, write-zeroes.
                let flags: u16 = 1 | 1 << 2 | 1 << 3 | 1 << 5 | 1 << 6;
                answer(3, &[&[0, 0][..], &disk_bytes.to_be_bytes(), &flags.to_be_bytes()].concat())?;
                answer(1, b"")?;
                return Ok(structured);
            }
            _ => answer(1 << 31 | 1, b"")?,
        }
    }
}

fn read_array<const N: usize>(stream: &mut UnixStream) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}
