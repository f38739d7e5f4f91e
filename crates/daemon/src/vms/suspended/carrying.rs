//! Carries a VM's memory from its QEMU to a file, and back.
//!
//! ```text
//!   QEMU ──► socket ──► pieces, counted, with a checksum ──► file, synced in between
//!   QEMU ◄── socket ◄── pieces, compared with both ◄──────── file
//! ```

use std::fs::File;
use std::io::{self, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hypervisor::{Hypervisor as _, MigrationStatus};
use tokio::time::{Instant, timeout};

use super::Saved;
use crate::stores::Space;
use crate::vms::moving::SocketFile;
use crate::vms::{Alive, VmError, Vms, process, qemu_sockets};

/// How many bytes are carried at once.
const PIECE_BYTES: usize = 1 << 20;
/// After how many bytes the file is synced: at the end little is left to sync while the guest waits, and its pages do not fill the
/// host's memory.
const SYNC_BYTES: u64 = 64 << 20;
/// The space that is left to others: the folder may be the data folder, whose records must always be written.
const RESERVE_BYTES: u64 = 64 << 20;
/// More than the state of any VM's devices.
const DEVICES_BYTES: u64 = 32 << 20;
/// How long QEMU may take to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// How long QEMU may take to load a file.
const LOAD_TIMEOUT: Duration = Duration::from_secs(3600);

/// What was written of a VM's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Written {
    pub(crate) bytes: u64,
    pub(crate) checksum: u32,
}

impl Vms {
    /// Fails if the folder certainly lacks space for the memory of a VM. May block.
    pub(in crate::vms) fn check_memory_fits(
        &self,
        name: &str,
        process: i32,
        memory_bytes: u64,
    ) -> Result<(), VmError> {
        self.make_memories_folder()?;
        let folder = &self.memories;
        let space = crate::stores::space_at(folder).map_err(|error| VmError::io("examine", folder, error))?;
        let needed = bytes_needed(process, memory_bytes);
        match refusal(space, needed) {
            None => Ok(()),
            Some(why) => {
                let why = format!(
                    "{why} in {}; free some, or name a folder of another disk (machines.suspended), or stop the VM",
                    folder.display()
                );
                Err(VmError::NotSuspended { vm: name.to_owned(), why })
            }
        }
    }

    /// Writes the memory of a paused VM to its file, durably, but under another name. After an error QEMU may still be about to end
    /// the transfer.
    pub(in crate::vms) async fn write_memory(
        self: &Arc<Self>,
        name: &str,
        alive: &Alive,
        limit: Duration,
    ) -> Result<Written, VmError> {
        let begun = Instant::now();
        let left = || limit.saturating_sub(begun.elapsed());
        let failed = |error| VmError::io("write", &self.memory_file(name), error);
        let late = || VmError::GoesOn {
            vm: name.to_owned(),
            why: format!(
                "its memory was not written within {} s; give it more time (--timeout SECONDS), or name a folder of a \
                 faster disk (machines.suspended)",
                limit.as_secs()
            ),
        };
        let (vms, of) = (Arc::clone(self), name.to_owned());
        let file = super::blocking(move || vms.make_memory_file(&of)).await?;
        let stream = self.accept_memory(name, alive).await?;
        let breaker = stream.try_clone().map_err(failed)?;
        let mut copying = tokio::task::spawn_blocking(move || receive(&stream, &file));
        let completes = alive.qemu.await_status(&[MigrationStatus::Completed], limit);
        tokio::pin!(completes);
        let written = async {
            let copied = |copied: Result<io::Result<Written>, tokio::task::JoinError>| {
                copied.unwrap_or_else(|error| Err(io::Error::other(error))).map_err(failed)
            };
            tokio::select! {
                done = &mut copying => {
                    let written = copied(done)?;
                    completes.await.map_err(VmError::of(name))?;
                    Ok(written)
                }
                completed = &mut completes => {
                    completed.map_err(VmError::of(name))?;
                    copied((&mut copying).await)
                }
            }
        };
        let written = timeout(left(), written).await.unwrap_or_else(|_| Err(late()));
        if written.is_err() {
            // Its thread ends with the stream, and QEMU resumes nothing by itself: the VM was paused by an order.
            let _ = breaker.shutdown(Shutdown::Both);
            let _ = alive.qemu.abandon().await;
        }
        written
    }

    /// Makes QEMU begin to send the memory of a paused VM, and returns the stream.
    async fn accept_memory(&self, name: &str, alive: &Alive) -> Result<UnixStream, VmError> {
        let path = alive.qemu.memory_socket();
        let failed = |error| VmError::io("listen at", &path, error);
        let user = qemu_sockets::user_of_process(alive.process_id());
        let (listener, _file) = qemu_sockets::listen_beside(&path, user).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let listener = tokio::net::UnixListener::from_std(listener).map_err(failed)?;
        alive.qemu.save_memory(&path).await.map_err(VmError::of(name))?;
        let accepted = timeout(CONNECT_TIMEOUT, listener.accept()).await;
        let (stream, _) = accepted.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())).map_err(failed)?;
        blocking_stream(stream).map_err(failed)
    }

    /// Lets a QEMU that waits for its memory load it from its file. It does not run afterwards. The error says why it has not loaded,
    /// and what to do.
    pub(in crate::vms) async fn load_memory(
        &self,
        name: &str,
        alive: &Alive,
        saved: &Saved,
    ) -> Result<(), String> {
        let stream = expect(alive).await?;
        let breaker = stream.try_clone().map_err(|error| error.to_string())?;
        let of = saved.clone();
        let sending = tokio::task::spawn_blocking(move || send(&of.open()?, &stream));
        let loaded = alive.qemu.await_loaded(LOAD_TIMEOUT).await;
        if loaded.is_err() {
            // QEMU may not read on.
            let _ = breaker.shutdown(Shutdown::Both);
        }
        let sent = sending.await.unwrap_or_else(|error| Err(io::Error::other(error)));
        let sent =
            sent.map_err(|error| format!("the file {} cannot be read: {error}", saved.file.display()))?;
        let is_damaged = sent != (Written { bytes: saved.bytes, checksum: saved.checksum });
        if is_damaged {
            return Err(format!(
                "the file {} is not as it was written: its disk has damaged it, or somebody has changed it; restore the file, if there \
                 is a copy",
                saved.file.display()
            ));
        }
        match loaded {
            Ok(()) => Ok(()),
            Err(error) => {
                let is_over =
                    timeout(CONNECT_TIMEOUT, alive.process.ended()).await.is_ok() && error.is_gone();
                let why = if is_over { process::last_words(&self.log(name)) } else { error.to_string() };
                Err(format!(
                    "QEMU {} cannot load the memory that {} has written to {}: {why}; the file stays: start the VM with that QEMU \
                     again, and with the same devices",
                    alive.qemu.version(),
                    saved.hypervisor,
                    saved.file.display()
                ))
            }
        }
    }
}

/// Makes a QEMU listen for its memory, and connects to it.
async fn expect(alive: &Alive) -> Result<UnixStream, String> {
    let socket = alive.qemu.memory_socket();
    // Also deletes what an earlier attempt has left.
    drop(SocketFile(socket.clone()));
    let _file = SocketFile(socket.clone());
    alive.qemu.expect_saved_memory(&qemu_sockets::place(&socket)).await.map_err(|error| error.to_string())?;
    let connect = async {
        qemu_sockets::take_out(&socket)?;
        blocking_stream(tokio::net::UnixStream::connect(&socket).await?)
    };
    connect.await.map_err(|error| format!("cannot use QEMU's socket {}: {error}", socket.display()))
}

fn blocking_stream(stream: tokio::net::UnixStream) -> io::Result<UnixStream> {
    let stream = stream.into_std()?;
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Writes what comes from a stream to a file, to its end, durably.
fn receive(mut stream: &UnixStream, mut file: &File) -> io::Result<Written> {
    let mut piece = vec![0; PIECE_BYTES];
    let mut written = Written { bytes: 0, checksum: 0 };
    let mut unsynced = 0;
    while let Some(piece) = next_piece(&mut stream, &mut piece)? {
        file.write_all(piece)?;
        written = written.and(piece);
        unsynced += piece.len() as u64;
        if unsynced >= SYNC_BYTES {
            file.sync_data()?;
            unsynced = 0;
            let told = rustix::fs::fstatvfs(file)?;
            if told.f_bavail.saturating_mul(told.f_frsize) < RESERVE_BYTES {
                let text = format!("the last {} MiB of its disk are left to others", RESERVE_BYTES >> 20);
                return Err(io::Error::new(io::ErrorKind::StorageFull, text));
            }
        }
    }
    file.sync_all()?;
    Ok(written)
}

/// Sends a file to a stream. A reader that has enough, or has ended, is no error: the file is read to its end all the same.
fn send(mut file: &File, mut stream: &UnixStream) -> io::Result<Written> {
    let mut piece = vec![0; PIECE_BYTES];
    let mut read = Written { bytes: 0, checksum: 0 };
    let mut is_heard = true;
    while let Some(piece) = next_piece(&mut file, &mut piece)? {
        read = read.and(piece);
        is_heard = is_heard && stream.write_all(piece).is_ok();
    }
    let _ = stream.shutdown(Shutdown::Write);
    Ok(read)
}

/// Reads what is there next; `None`: nothing follows.
fn next_piece<'a>(from: &mut impl io::Read, piece: &'a mut [u8]) -> io::Result<Option<&'a [u8]>> {
    loop {
        match from.read(piece) {
            Ok(0) => return Ok(None),
            Ok(bytes) => return Ok(piece.get(..bytes)),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

impl Written {
    fn and(self, piece: &[u8]) -> Self {
        let checksum = crc32c::crc32c_append(self.checksum, piece);
        Self { bytes: self.bytes + piece.len() as u64, checksum }
    }
}

/// Returns the bytes that the file of a VM takes at most: pages of zeroes take hardly any, and a page that its QEMU does not have in
/// the host's memory or swap is one.
fn bytes_needed(process: i32, memory_bytes: u64) -> u64 {
    let all = memory_bytes.saturating_add(DEVICES_BYTES);
    let status = std::fs::read_to_string(Path::new("/proc").join(process.to_string()).join("status"));
    status.ok().and_then(|status| resident_bytes(&status)).map_or(all, |resident| resident.min(all))
}

/// Parses the memory of a process that is not only zeroes, from the kernel's text.
fn resident_bytes(status: &str) -> Option<u64> {
    let of = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
        line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
    };
    let others = ["VmSwap", "HugetlbPages"].map(|key| of(key).unwrap_or(0)).into_iter();
    of("VmRSS").map(|resident| others.fold(resident, u64::saturating_add))
}

/// Returns why a folder with this space cannot take so many bytes; `None`: it can.
fn refusal(space: Space, needed: u64) -> Option<String> {
    if space.is_read_only {
        return Some("its file system takes no writes".to_owned());
    }
    let mebibytes = |bytes: u64| bytes.div_ceil(1 << 20);
    let needed = needed.saturating_add(RESERVE_BYTES);
    (space.free < needed).then(|| {
        format!("its memory needs up to {} MiB, and {} MiB are free", mebibytes(needed), space.free >> 20)
    })
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Seek as _, SeekFrom};

    use super::*;

    #[test]
    fn what_is_sent_is_what_was_received_and_damage_is_seen() {
        let (here, there) = UnixStream::pair().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        let content: Vec<u8> = (0..3_000_000_u32).flat_map(u32::to_le_bytes).collect();
        let sender = std::thread::spawn({
            let content = content.clone();
            move || (&there).write_all(&content)
        });
        let written = receive(&here, &file).unwrap();
        sender.join().unwrap().unwrap();
        assert_eq!(written.bytes, content.len() as u64);
        let send_again = |file: &mut File| {
            file.seek(SeekFrom::Start(0)).unwrap();
            let (here, there) = UnixStream::pair().unwrap();
            let reader = std::thread::spawn(move || {
                let mut all = Vec::new();
                (&there).read_to_end(&mut all).map(|_| all)
            });
            let sent = send(file, &here).unwrap();
            (sent, reader.join().unwrap().unwrap())
        };
        assert_eq!(send_again(&mut file), (written, content));
        file.seek(SeekFrom::Start(1_234_567)).unwrap();
        file.write_all(&[7]).unwrap();
        assert_ne!(send_again(&mut file).0, written, "a byte has changed");
        // Nobody reads: the file is compared all the same.
        file.seek(SeekFrom::Start(0)).unwrap();
        let (here, there) = UnixStream::pair().unwrap();
        drop(there);
        assert_eq!(send(&file, &here).unwrap().bytes, written.bytes);
    }

    #[test]
    fn a_full_disk_is_said_to_be_full() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let (here, there) = UnixStream::pair().unwrap();
        (&there).write_all(&[1; 5]).unwrap();
        drop(there);
        assert_eq!(receive(&here, &full).unwrap_err().kind(), io::ErrorKind::StorageFull);
    }

    #[test]
    fn space_is_needed_for_the_pages_that_a_guest_has_used_and_some_is_left_to_others() {
        let status = "Name:\tqemu\nVmRSS:\t  102400 kB\nVmSwap:\t  1024 kB\nHugetlbPages:\t  2048 kB\n";
        assert_eq!(resident_bytes(status), Some((102_400 + 1024 + 2048) << 10));
        assert_eq!((resident_bytes("Name:\tqemu\n"), resident_bytes("VmRSS:\t many kB\n")), (None, None));
        assert_eq!(
            bytes_needed(i32::MAX, 1 << 30),
            (1 << 30) + DEVICES_BYTES,
            "the kernel knows no such process"
        );
        let space = |free: u64| Space { total: 1 << 40, free, is_read_only: false };
        assert_eq!(refusal(space(RESERVE_BYTES + 5), 5), None);
        let why = refusal(space(RESERVE_BYTES + 4), 5).unwrap();
        assert!(why.contains("up to 65 MiB") && why.contains("64 MiB are free"), "{why}");
        let read_only = Space { is_read_only: true, ..space(1 << 40) };
        assert!(refusal(read_only, 5).unwrap().contains("no writes"));
    }
}
