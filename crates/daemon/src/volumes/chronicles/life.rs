//! Notes that this daemon is alive, in a file of the data folder. A thread writes it in place, so it needs no space.
//!
//! ```text
//!   started ──► signs of earlier runs are read ──► a sign at intervals, as soon as an image is in use ──► the last handle goes
//! ```

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use migration::stay::life::{SIGN_EVERY, SLOT_BYTES};
use migration::stay::{Lives, Run};

use crate::files::folder_entries::sync_folder_of;
use crate::files::whole_file;

const NAME: &str = "alive";

/// The signs of life, and the thread that gives them; a clone is another handle to both.
#[derive(Clone, Debug)]
pub(super) struct SignsOfLife {
    shared: Arc<Shared>,
    /// The thread ends when every handle is gone.
    _handle: mpsc::Sender<()>,
}

#[derive(Debug)]
struct Shared {
    lives: Mutex<Lives>,
    /// Until an image is in use, nobody needs a sign.
    is_needed: AtomicBool,
}

impl SignsOfLife {
    /// Begins a run of the daemon, and starts the thread.
    pub(super) fn begin(data_dir: &Path) -> io::Result<Self> {
        let path = data_dir.join(NAME);
        let bytes = whole_file::read(&path, 2 * SLOT_BYTES as u64)?.unwrap_or_default();
        let lives = Lives::begin(&bytes, now());
        let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path)?;
        // N.B. The first sign is written before an image is in use: the daemon may be killed before the next one.
        if let Err(error) = first_sign(&file, &lives).and_then(|()| sync_folder_of(&path)) {
            unwritten(&error);
        }
        let shared = Arc::new(Shared { lives: Mutex::new(lives), is_needed: AtomicBool::new(false) });
        let (handle, handles) = mpsc::channel::<()>();
        let signing = Arc::clone(&shared);
        std::thread::Builder::new().name("alive".into()).spawn(move || signing.run(&file, &handles))?;
        Ok(Self { shared, _handle: handle })
    }

    /// Returns the run that an image is in use by from now on.
    pub(super) fn run(&self) -> Run {
        self.shared.is_needed.store(true, Ordering::Relaxed);
        self.lives().run()
    }

    /// Returns the signs of all runs.
    pub(super) fn lives(&self) -> Lives {
        self.shared.lives.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Shared {
    fn run(&self, file: &File, handles: &mpsc::Receiver<()>) {
        let mut fails = false;
        while handles.recv_timeout(SIGN_EVERY) == Err(RecvTimeoutError::Timeout) {
            if !self.is_needed.load(Ordering::Relaxed) {
                continue;
            }
            let (at, bytes) = {
                let mut lives = self.lives.lock().unwrap_or_else(PoisonError::into_inner);
                lives.sign(now());
                lives.encode()
            };
            let written = file.write_all_at(&bytes, at).and_then(|()| file.sync_data());
            if let Some(error) = written.as_ref().err().filter(|_| !fails) {
                unwritten(error);
            }
            fails = written.is_err();
        }
    }
}

/// Writes the first sign of a run; the file has its full size from then on.
fn first_sign(file: &File, lives: &Lives) -> io::Result<()> {
    let (at, bytes) = lives.encode();
    file.write_all_at(&bytes, at)?;
    if file.metadata()?.len() < 2 * SLOT_BYTES as u64 {
        let other = if at == 0 { SLOT_BYTES as u64 } else { 0 };
        file.write_all_at(&[0; SLOT_BYTES], other)?;
    }
    file.sync_all()
}

fn unwritten(error: &io::Error) {
    tracing::warn!(%error, "cannot note in the data folder that the daemon is alive; if it is killed, copies at other hosts will \
        count as empty");
}

/// Returns nanoseconds since 1970.
fn now() -> i128 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i128::try_from(now.as_nanos()).unwrap_or(i128::MAX)
}
