//! A second connection to a QEMU that receives memory while its VM runs, for when its main thread waits for that memory itself.
//!
//! ```text
//!   this daemon, or the next ──► NAME.in  ──► the monitor's own thread ──► migrate-recover, at once
//!                            ◄── NAME.out ◄──        (the main thread may hang in a page)
//! ```
//! QEMU carries out commands out of band only after the client has agreed on that. The main thread makes that agreement, for each
//! connection to a socket. So a daemon that starts when that thread already hangs would be too late. Pipes have no connections:
//! the agreement holds for every later user of the pipes, as long as QEMU lives.
//!
//! **N.B.** Only one reader at a time: each answer reaches one of them only.

use std::io;
use std::os::unix::fs::lchown;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{CWD, FileType, Mode};
use serde_json::json;
use tokio::net::unix::pipe;

use super::error::QmpError;
use super::memory;
use super::process::ANSWER_DEADLINE;
use super::qmp::exchange::{Band, Exchange, Garbled};
use super::qmp::reader::Lines;
use crate::HypervisorError;

const NAME: &str = "sterna-lifeline";
/// The mode of the pipes: only the user that controls VMs may use them.
const MODE: Mode = Mode::RUSR.union(Mode::WUSR);

/// The pipes to one QEMU.
///
/// Dropping it changes nothing in QEMU. While it is held, QEMU's messages are read and dropped, so that they do not accumulate.
#[derive(Debug)]
pub struct Lifeline {
    exchange: Exchange,
}

impl Lifeline {
    /// Makes the pipes for a QEMU that is to be started, and returns the words of its command for them. Removes remains
    /// of an earlier one.
    ///
    /// # Errors
    /// The system's; an error if QEMU cannot take the path.
    pub fn make(path: &Path) -> io::Result<[String; 4]> {
        Self::remove(path)?;
        let told = path.to_str().ok_or(io::ErrorKind::InvalidFilename)?.replace(',', ",,");
        for pipe in pipes(path) {
            rustix::fs::mknodat(CWD, &pipe, FileType::Fifo, MODE, 0)?;
        }
        let device = format!("pipe,id={NAME},path={told}");
        let monitor = format!("chardev={NAME},mode=control");
        Ok(["-chardev".to_owned(), device, "-mon".to_owned(), monitor])
    }

    /// Gives the pipes to the user of the QEMU that is to be started.
    pub fn give(path: &Path, user: u32) -> io::Result<()> {
        pipes(path).into_iter().try_for_each(|pipe| lchown(pipe, Some(user), None))
    }

    /// Removes the pipes' names. A QEMU that has opened them keeps them, and no other process can find them.
    ///
    /// # Errors
    /// The system's; missing pipes are no error.
    pub fn remove(path: &Path) -> io::Result<()> {
        for pipe in pipes(path) {
            match std::fs::remove_file(pipe) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Opens the pipes to a QEMU that was started with [`Self::make`]'s words; call it on a runtime.
    ///
    /// # Errors
    /// If there are no pipes, or no QEMU has opened them.
    pub fn open(path: &Path) -> Result<Self, QmpError> {
        let failed = |source| QmpError::Connect { socket: path.to_owned(), source };
        let [into, out_of] = pipes(path);
        let sender = pipe::OpenOptions::new().open_sender(into).map_err(failed)?;
        let receiver = pipe::OpenOptions::new().open_receiver(out_of).map_err(failed)?;
        // Answers to an earlier daemon's commands may be in the pipe: its identities are lower than the present time.
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let first_identity = u64::try_from(since.as_micros()).unwrap_or_default();
        // So may the rest of a line that it has begun to read.
        let exchange = Exchange::begin(Lines::new(receiver), sender, first_identity, Garbled::IsSkipped);
        Ok(Self { exchange })
    }

    /// Agrees with QEMU on commands out of band; once, while its main thread answers.
    pub async fn agree(&self) -> Result<(), HypervisorError> {
        let wanted = json!({ "enable": ["oob"] });
        self.exchange.execute(Band::InOrder, "qmp_capabilities", wanted, ANSWER_DEADLINE).await?;
        Ok(())
    }

    /// Recovers memory like [`Qemu::recover_memory`](super::Qemu::recover_memory), even if QEMU's main thread hangs.
    ///
    /// # Errors
    /// Those of [`Qemu::recover_memory`](super::Qemu::recover_memory).
    pub async fn recover_memory(&self, socket: &Path) -> Result<(), HypervisorError> {
        let arguments = json!({ "uri": memory::address(socket)? });
        self.exchange.execute(Band::OutOfBand, "migrate-recover", arguments, ANSWER_DEADLINE).await?;
        Ok(())
    }
}

/// Returns the pipes into and out of QEMU, which adds these endings itself.
fn pipes(path: &Path) -> [PathBuf; 2] {
    [".in", ".out"].map(|ending| {
        let mut pipe = path.as_os_str().to_owned();
        pipe.push(ending);
        pipe.into()
    })
}
