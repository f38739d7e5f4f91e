//! Minimal NBD and HTTP for invalid messages.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};

/// Longest wait for bytes, longer than any of the daemon's deadlines.
const PATIENCE: Duration = Duration::from_secs(120);
const GREETING_BYTES: usize = 18;
const REQUEST_MAGIC: u32 = 0x2560_9513;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) magic: u32,
    pub(crate) flags: u16,
    pub(crate) command: u16,
    pub(crate) cookie: u64,
    pub(crate) offset: u64,
    pub(crate) length: u32,
}

impl Request {
    pub(crate) fn read(offset: u64, length: u32) -> Self {
        Self { magic: REQUEST_MAGIC, flags: 0, command: 0, cookie: 7, offset, length }
    }

    pub(crate) fn command(self, command: u16) -> Self {
        Self { command, ..self }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        [
            &self.magic.to_be_bytes()[..],
            &self.flags.to_be_bytes(),
            &self.command.to_be_bytes(),
            &self.cookie.to_be_bytes(),
            &self.offset.to_be_bytes(),
            &self.length.to_be_bytes(),
        ]
        .concat()
    }
}

/// Connects, with a deadline for reads and writes.
pub(crate) fn connect(socket: impl AsRef<Path>) -> anyhow::Result<UnixStream> {
    let socket = socket.as_ref();
    let stream = UnixStream::connect(socket).with_context(|| format!("connect to {}", socket.display()))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// Returns whether the server sends its greeting; `false` if it closes.
pub(crate) fn is_greeted(stream: &mut UnixStream) -> anyhow::Result<bool> {
    let mut greeting = [0; GREETING_BYTES];
    match stream.read_exact(&mut greeting) {
        Ok(()) => Ok(true),
        Err(error) if is_end(&error) => Ok(false),
        Err(error) => Err(error).context("wait for the greeting"),
    }
}

/// Waits for the other side to close.
pub(crate) fn wait_for_end(mut stream: UnixStream) -> anyhow::Result<()> {
    let mut bytes = [0; 4096];
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => return Ok(()),
            Ok(_) => {}
            Err(error) if is_end(&error) => return Ok(()),
            Err(error) => return Err(error).context("wait for the connection's end"),
        }
    }
}

/// Connects to a volume and negotiates, with simple replies.
pub(crate) fn attach(socket: impl AsRef<Path>) -> anyhow::Result<UnixStream> {
    const ACKNOWLEDGED: u32 = 1;
    const ERROR: u32 = 1 << 31;
    let mut stream = connect(socket)?;
    ensure!(is_greeted(&mut stream)?, "the server has closed");
    // Client flags, then GO for the default export without information requests.
    stream.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x07\0\0\0\x06\0\0\0\0\0\0")?;
    loop {
        let mut header = [0; 20];
        stream.read_exact(&mut header)?;
        let kind = u32::from_be_bytes(header[12..16].try_into()?);
        let length = u32::from_be_bytes(header[16..20].try_into()?);
        let mut data = vec![0; length as usize];
        stream.read_exact(&mut data)?;
        match kind {
            ACKNOWLEDGED => return Ok(stream),
            kind if kind & ERROR != 0 => bail!("GO was answered with {kind:#x}"),
            _ => {}
        }
    }
}

/// Reads a simple reply without data, and returns its error.
pub(crate) fn reply(stream: &mut UnixStream) -> anyhow::Result<u32> {
    let mut reply = [0; 16];
    stream.read_exact(&mut reply).context("wait for a reply")?;
    ensure!(reply[..4] == 0x6744_6698_u32.to_be_bytes(), "no reply: {reply:x?}");
    Ok(u32::from_be_bytes(reply[4..8].try_into()?))
}

/// Sends bytes to the API on a new connection, and returns its answer until the end.
pub(crate) fn ask_api(socket: impl AsRef<Path>, bytes: &[u8]) -> anyhow::Result<String> {
    let mut stream = connect(socket)?;
    // The daemon may close the connection before everything is sent.
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Err(error) if !is_end(&error) => Err(error).context("wait for the API"),
        _ => Ok(String::from_utf8_lossy(&answer).into_owned()),
    }
}

fn is_end(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}
