//! The console connections of a VM, from which its work, its verdict and its failures are read.

use std::io::Read;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail};

use tokio::sync::watch;
use tokio::time::timeout;

use super::console::Console;
use super::locked;
use crate::daemon::with_tail;

/// Longest silence of a VM. While it works, it reports ten times a second.
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// Bytes of one read from a console.
const CHUNK_BYTES: usize = 4096;
/// Longest line. The checker's lines are shorter; the rest of a longer line is dropped.
const LINE_BYTES_MAX: usize = 4096;

/// The console of a VM; clones share it.
#[derive(Clone, Debug)]
pub(super) struct Talk {
    console: Arc<Mutex<Console>>,
    /// Changes with every line, and when a connection ends.
    changed: Arc<watch::Sender<()>>,
}

/// An unfinished line. Connections share it if one continues where the other has ended.
pub(super) type Unfinished = Arc<Mutex<Vec<u8>>>;

impl Talk {
    /// Returns a console without connections.
    pub(super) fn new() -> Self {
        Self { console: Arc::default(), changed: Arc::new(watch::Sender::new(())) }
    }

    pub(super) fn console(&self) -> MutexGuard<'_, Console> {
        locked(&self.console)
    }

    /// Reads one more connection of the VM to its end, in a thread.
    pub(super) fn listen(&self, output: impl Read + Send + 'static, unfinished: Unfinished) {
        self.console().open();
        let (console, changed) = (Arc::clone(&self.console), Arc::clone(&self.changed));
        thread::spawn(move || {
            hear(output, &console, &changed, &unfinished);
            locked(&console).close();
            changed.send_replace(());
        });
    }

    /// Waits until `condition` holds for the console. `what` describes it in errors.
    ///
    /// # Errors
    /// If that takes longer than `deadline`, or the VM has failed or ended; the message ends with its console.
    pub(super) async fn wait_for(
        &self,
        what: &str,
        deadline: Duration,
        condition: impl Fn(&Console) -> bool,
    ) -> anyhow::Result<()> {
        let mut lines = self.changed.subscribe();
        let said = async {
            loop {
                {
                    let console = self.console();
                    if condition(&console) {
                        return Ok(());
                    }
                    if let Some(why) = console.failure() {
                        bail!("the VM could not {what}: {why}");
                    }
                    if console.is_closed() {
                        bail!("the VM ended before it could {what}");
                    }
                }
                // The sender is ours.
                let _ = lines.changed().await;
            }
        };
        let seconds = deadline.as_secs();
        let said = timeout(deadline, said).await;
        said.unwrap_or_else(|_| Err(anyhow!("the VM did not {what} within {seconds} s")))
            .map_err(|error| self.with_console(error))
    }

    /// Returns the reason once the VM has failed, ended or fallen silent.
    pub(super) async fn failure(&self) -> anyhow::Error {
        let mut lines = self.changed.subscribe();
        loop {
            {
                let console = self.console();
                let silent = console.last_word().is_none_or(|last_word| last_word.elapsed() >= SILENCE_MAX);
                let why = match console.failure() {
                    Some(why) => Some(why.to_owned()),
                    None if console.is_closed() => Some("QEMU ended".to_owned()),
                    None if silent => Some(format!("it has said nothing for {} s", SILENCE_MAX.as_secs())),
                    None => None,
                };
                drop(console);
                if let Some(why) = why {
                    return self.with_console(anyhow!("the VM stopped working: {why}"));
                }
            }
            let _ = timeout(SILENCE_MAX, lines.changed()).await;
        }
    }

    /// Adds the last lines of the console to an error.
    pub(super) fn with_console(&self, error: anyhow::Error) -> anyhow::Error {
        with_tail(error, "the VM's console", &self.console().text())
    }
}

/// Reads a connection to its end, line by line.
fn hear(
    mut output: impl Read,
    console: &Mutex<Console>,
    changed: &watch::Sender<()>,
    unfinished: &Mutex<Vec<u8>>,
) {
    let mut chunk = vec![0; CHUNK_BYTES];
    while let Ok(length @ 1..) = output.read(&mut chunk) {
        let mut line = locked(unfinished);
        for &byte in &chunk[..length] {
            if byte == b'\n' {
                locked(console).take(String::from_utf8_lossy(&line).trim_end(), Instant::now());
                line.clear();
            } else if line.len() < LINE_BYTES_MAX {
                line.push(byte);
            }
        }
        drop(line);
        changed.send_replace(());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_line_that_was_begun_here_may_end_there() {
        let talk = Talk::new();
        let unfinished = Unfinished::default();
        talk.listen(&b"sterna: tick at_ms=100 requ"[..], Arc::clone(&unfinished));
        let first = talk.wait_for("say more", Duration::from_secs(60), Console::works).await;
        assert!(first.unwrap_err().to_string().contains("ended before it could say more"));
        talk.listen(&b"ests=7 stall_us=1 p99_us=1 errors=0\n"[..], unfinished);
        talk.wait_for("say more", Duration::from_secs(60), |console| console.requests() == 7).await.unwrap();
        assert!(talk.failure().await.to_string().contains("QEMU ended"));
    }

    #[tokio::test]
    async fn what_the_machine_gives_up_for_is_told_with_its_last_words() {
        let talk = Talk::new();
        talk.listen(&b"hello\nsterna: failed flush: no\n"[..], Unfinished::default());
        let error = talk.wait_for("work", Duration::from_secs(60), Console::works).await.unwrap_err();
        let error = error.to_string();
        assert!(error.contains("could not work: flush: no") && error.contains("  hello"), "{error}");
    }
}
