//! A second way to a QEMU that takes memory while its VM runs, for when its main thread waits for that memory itself.
//!
//! ```text
//!   this daemon, or the next ──► NAME.in  ──► the monitor's own thread ──► migrate-recover, at once
//!                            ◄── NAME.out ◄──        (the main thread may hang in a page)
//! ```
//! QEMU carries commands out of band only for a client that has agreed on that with it, and it agrees in its main thread, anew
//! with each connection to a socket. So a daemon that is started when that thread hangs already would come too late. Pipes have
//! no connections: what is agreed on stays agreed on for whoever opens them, as long as QEMU lives.
//!
//! **N.B.** one reader at a time: what one has read, another does not hear.

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

/// What its character device is called in QEMU.
const NAME: &str = "sterna-lifeline";
/// Only who steers VMs may use it.
const MODE: Mode = Mode::RUSR.union(Mode::WUSR);

/// The way to one QEMU.
///
/// Dropping it changes nothing in QEMU. As long as it is held, what QEMU tells is read and dropped, so that it does not pile
/// up.
#[derive(Debug)]
pub struct Lifeline {
    exchange: Exchange,
}

impl Lifeline {
    /// Makes the pipes for a QEMU that is to be started, and returns the words of its command that make it use them. What is
    /// left of an earlier one is removed.
    ///
    /// # Errors
    /// The system's; that the path is none that QEMU can be told.
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

    /// Gives the pipes to the user that the QEMU runs as which is to be started.
    ///
    /// # Errors
    /// The system's.
    pub fn give(path: &Path, user: u32) -> io::Result<()> {
        pipes(path).into_iter().try_for_each(|pipe| lchown(pipe, Some(user), None))
    }

    /// Takes the pipes' names away. A QEMU that has opened them keeps them, and nobody else finds them any more.
    ///
    /// # Errors
    /// The system's; that there are none is no error.
    pub fn remove(path: &Path) -> io::Result<()> {
        for pipe in pipes(path) {
            match std::fs::remove_file(pipe) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Opens the way to a QEMU that was started with [`Self::make`]'s words; to be called on a runtime.
    ///
    /// # Errors
    /// If there are no pipes, or no QEMU has opened them.
    pub fn open(path: &Path) -> Result<Self, QmpError> {
        let failed = |source| QmpError::Connect { socket: path.to_owned(), source };
        let [into, out_of] = pipes(path);
        let sender = pipe::OpenOptions::new().open_sender(into).map_err(failed)?;
        let receiver = pipe::OpenOptions::new().open_receiver(out_of).map_err(failed)?;
        // Answers to commands of an earlier daemon may be in the pipe: its identities are lower than the time is now.
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let first_identity = u64::try_from(since.as_micros()).unwrap_or_default();
        // So may the rest of a line that it has begun to read.
        let exchange = Exchange::begin(Lines::new(receiver), sender, first_identity, Garbled::IsSkipped);
        Ok(Self { exchange })
    }

    /// Agrees with QEMU that it carries commands out of band; once, while its main thread answers.
    ///
    /// # Errors
    /// If QEMU refuses or does not answer.
    pub async fn agree(&self) -> Result<(), HypervisorError> {
        let wanted = json!({ "enable": ["oob"] });
        self.exchange.execute(Band::InOrder, "qmp_capabilities", wanted, ANSWER_DEADLINE).await?;
        Ok(())
    }

    /// As [`Qemu::recover_memory`](super::Qemu::recover_memory), whatever QEMU's main thread does.
    ///
    /// # Errors
    /// As there.
    pub async fn recover_memory(&self, socket: &Path) -> Result<(), HypervisorError> {
        let arguments = json!({ "uri": memory::address(socket)? });
        self.exchange.execute(Band::OutOfBand, "migrate-recover", arguments, ANSWER_DEADLINE).await?;
        Ok(())
    }
}

/// What goes into QEMU, and what comes out of it: QEMU adds these endings itself.
fn pipes(path: &Path) -> [PathBuf; 2] {
    [".in", ".out"].map(|ending| {
        let mut pipe = path.as_os_str().to_owned();
        pipe.push(ending);
        pipe.into()
    })
}
