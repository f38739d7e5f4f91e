//! Feeds the API's socket of a whole daemon.

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use daemon::config::Overrides;
use daemon::{Config, Daemon, Folders};

/// Time for the daemon's answer before the client ends its side.
const ANSWER: Duration = Duration::from_millis(3);
/// Longest time until the connection then ends.
const PATIENCE: Duration = Duration::from_secs(20);
/// Largest number of bytes that are read of a connection's answers.
const ANSWER_BYTES_MAX: u64 = 64 << 20;

/// Sends the bytes to the daemon, and checks that it still answers another client.
#[expect(clippy::expect_used, reason = "a daemon that does not answer is a defect")]
pub(crate) fn feed(bytes: &[u8]) {
    static API: OnceLock<PathBuf> = OnceLock::new();
    let api = API.get_or_init(|| start().expect("a daemon starts"));
    let answer = exchange(api, bytes).expect("a connection ends");
    // Volumes must not accumulate over the inputs.
    if find(&answer, b"201 Created").is_some() {
        remove_volumes(api).expect("volumes can be removed");
    }
}

fn exchange(api: &Path, bytes: &[u8]) -> anyhow::Result<Vec<u8>> {
    let mut stream = UnixStream::connect(api)?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.set_read_timeout(Some(ANSWER))?;
    let mut answer = Vec::new();
    // The daemon may close the connection before everything is sent.
    let said = stream.write_all(bytes);
    let mut first = [0; 4096];
    if let Ok(count) = stream.read(&mut first) {
        answer.extend_from_slice(&first[..count]);
    }
    stream.set_read_timeout(Some(PATIENCE))?;
    let began = Instant::now();
    let _ = stream.shutdown(Shutdown::Write);
    // A reset also ends the connection.
    let ended = stream.take(ANSWER_BYTES_MAX).read_to_end(&mut answer);
    ensure!(began.elapsed() < PATIENCE, "it goes on after {PATIENCE:?}: {said:?}, {ended:?}");
    Ok(answer)
}

fn remove_volumes(api: &Path) -> anyhow::Result<()> {
    let answer = request(api, "GET", "/v1/volumes")?;
    let text = String::from_utf8_lossy(&answer);
    for part in text.split("\"name\":\"").skip(1) {
        let name = part.split('"').next().unwrap_or_default();
        request(api, "DELETE", &format!("/v1/volumes/{name}"))?;
    }
    Ok(())
}

fn request(api: &Path, method: &str, path: &str) -> anyhow::Result<Vec<u8>> {
    let mut stream = UnixStream::connect(api)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    write!(stream, "{method} {path} HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    ensure!(answer.starts_with(b"HTTP/1.1 "), "{method} {path} was not answered");
    Ok(answer)
}

fn find(text: &[u8], part: &[u8]) -> Option<usize> {
    text.windows(part.len()).position(|window| window == part)
}

/// Starts a daemon in a folder of its own, which is left in the temporary folder.
fn start() -> anyhow::Result<PathBuf> {
    let folder = tempfile::Builder::new().prefix("sterna-hostile-").tempdir()?.keep();
    let folders =
        Folders { config_file: None, data_dir: Some(folder.join("data")), runtime_dir: folder.join("run") };
    let config = Config::parse(Path::new("none"), "", &Overrides::default(), &folders)?;
    let (ready, started) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return };
        runtime.block_on(async move {
            let daemon = Daemon::start(config).await;
            let failed = daemon.as_ref().err().map(ToString::to_string);
            // The caller may have stopped waiting.
            let _ = ready.send(failed);
            if let Ok(daemon) = daemon {
                let _ = daemon.run(std::future::pending()).await;
            }
        });
    });
    let failed = started.recv().context("the daemon's thread ended")?;
    ensure!(failed.is_none(), "the daemon did not start: {failed:?}");
    Ok(folders.api_socket())
}
