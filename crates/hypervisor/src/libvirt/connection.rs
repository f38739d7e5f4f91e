//! A connection to libvirt's daemon: calls and answers, one after the other.
//!
//! ```text
//!   length | program version procedure type serial status | arguments or answer       numbers of 4 bytes, XDR
//! ```

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::sync::Mutex;

use super::error::LibvirtError;
use super::xdr::{Decoder, Encoder};

/// libvirt's main program, and the one for calls of its QEMU driver.
pub(super) const REMOTE: u32 = 0x2000_8086;
pub(super) const QEMU: u32 = 0x2000_8087;
const VERSION: u32 = 1;
const CALL: u32 = 0;
const REPLY: u32 = 1;
const OK: u32 = 0;
const HEADER_BYTES: usize = 28;
/// The largest message: libvirt's own limit (`VIR_NET_MESSAGE_MAX`, 32 MiB).
const MESSAGE_BYTES_MAX: usize = 32 << 20;
/// How long libvirt may take for one call. It waits up to 30 s for a domain that another call works on.
const ANSWER_DEADLINE: Duration = Duration::from_secs(60);

/// A connection to the libvirt daemon that has the QEMU driver.
#[derive(Debug)]
pub struct Connection {
    socket: PathBuf,
    stream: Mutex<Option<Open>>,
}

#[derive(Debug)]
struct Open {
    stream: UnixStream,
    serial: u32,
}

impl Connection {
    /// Connects to libvirt's socket, without authentication. Fails with [`LibvirtError::Unreachable`].
    pub(super) async fn connect(socket: &Path) -> Result<Self, LibvirtError> {
        let unreachable = |source| LibvirtError::Unreachable { socket: socket.to_owned(), source };
        let stream = UnixStream::connect(socket).await.map_err(unreachable)?;
        Ok(Self { socket: socket.to_owned(), stream: Mutex::new(Some(Open { stream, serial: 0 })) })
    }

    /// Returns the path of libvirt's socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    pub(super) async fn call(
        &self,
        program: u32,
        procedure: i32,
        arguments: Encoder,
    ) -> Result<Vec<u8>, LibvirtError> {
        let mut guard = self.stream.lock().await;
        let broken = || LibvirtError::Gone(std::io::ErrorKind::BrokenPipe.into());
        let mut open = guard.take().ok_or_else(broken)?;
        open.serial = open.serial.wrapping_add(1);
        let exchanged =
            tokio::time::timeout(ANSWER_DEADLINE, open.exchange(program, procedure, arguments)).await;
        let (status, body) = exchanged.map_err(|_| LibvirtError::Silent(ANSWER_DEADLINE))??;
        *guard = Some(open);
        if status == OK { Ok(body) } else { Err(read_error(&body)) }
    }
}

impl Open {
    async fn exchange(
        &mut self,
        program: u32,
        procedure: i32,
        arguments: Encoder,
    ) -> Result<(u32, Vec<u8>), LibvirtError> {
        let arguments = arguments.finish();
        let length = u32::try_from(HEADER_BYTES + arguments.len()).unwrap_or(u32::MAX);
        let header = Encoder::default().unsigned(length).unsigned(program).unsigned(VERSION).int(procedure);
        let mut message = header.unsigned(CALL).unsigned(self.serial).unsigned(OK).finish();
        message.extend(arguments);
        self.stream.write_all(&message).await.map_err(LibvirtError::Gone)?;
        loop {
            let (header, body) = self.receive().await?;
            let mut header = Decoder::new(&header);
            let _length = header.unsigned()?;
            let (from, _version, of) = (header.unsigned()?, header.unsigned()?, header.int()?);
            let (kind, serial, status) = (header.unsigned()?, header.unsigned()?, header.unsigned()?);
            // Events may come between answers; none were requested.
            if (from, of, kind, serial) == (program, procedure, REPLY, self.serial) {
                return Ok((status, body));
            }
        }
    }

    async fn receive(&mut self) -> Result<([u8; HEADER_BYTES], Vec<u8>), LibvirtError> {
        let mut header = [0; HEADER_BYTES];
        self.stream.read_exact(&mut header).await.map_err(LibvirtError::Gone)?;
        let length = Decoder::new(&header).unsigned()? as usize;
        if !(HEADER_BYTES..=MESSAGE_BYTES_MAX).contains(&length) {
            return Err(LibvirtError::Malformed("a message of a length that it does not send"));
        }
        let mut body = vec![0; length - HEADER_BYTES];
        self.stream.read_exact(&mut body).await.map_err(LibvirtError::Gone)?;
        Ok((header, body))
    }
}

fn read_error(body: &[u8]) -> LibvirtError {
    let mut decoder = Decoder::new(body);
    let mut read = || {
        let (code, _domain) = (decoder.int()?, decoder.int()?);
        let message = decoder.optional_string()?.unwrap_or_else(|| "nothing".to_owned());
        Ok(LibvirtError::Refused { code, message: words::clean(&message) })
    };
    read().unwrap_or_else(|error| error)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers one call at the other end of a connection, after a foreign message.
    async fn answer(mut stream: UnixStream, status: u32, body: Vec<u8>) {
        let mut call = [0; HEADER_BYTES];
        stream.read_exact(&mut call).await.unwrap();
        let mut header = Decoder::new(&call);
        let length = header.unsigned().unwrap() as usize;
        let (program, version, procedure) =
            (header.unsigned().unwrap(), header.unsigned().unwrap(), header.int().unwrap());
        let (_kind, serial) = (header.unsigned().unwrap(), header.unsigned().unwrap());
        stream.read_exact(&mut vec![0; length - HEADER_BYTES]).await.unwrap();
        let message = |kind: u32, serial: u32, status: u32, body: &[u8]| {
            let length = u32::try_from(HEADER_BYTES + body.len()).unwrap();
            let header = Encoder::default().unsigned(length).unsigned(program).unsigned(version);
            let header = header.int(procedure).unsigned(kind).unsigned(serial).unsigned(status);
            [header.finish(), body.to_vec()].concat()
        };
        stream.write_all(&message(2, 0, OK, b"an event")).await.unwrap();
        stream.write_all(&message(REPLY, serial, status, &body)).await.unwrap();
    }

    fn pair() -> (Connection, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let stream = Mutex::new(Some(Open { stream: ours, serial: 0 }));
        (Connection { socket: PathBuf::new(), stream }, theirs)
    }

    #[tokio::test]
    async fn answers_are_told_from_what_else_comes() {
        let (connection, theirs) = pair();
        let call = connection.call(REMOTE, 4, Encoder::default().string("argument"));
        let (answered, ()) = tokio::join!(call, answer(theirs, OK, vec![0, 0, 0, 7]));
        assert_eq!(answered.unwrap(), [0, 0, 0, 7]);
    }

    #[tokio::test]
    async fn what_libvirt_refuses_has_its_words() {
        let (connection, theirs) = pair();
        let error = Encoder::default().int(42).int(10).present_string("Domain not found").finish();
        let call = connection.call(REMOTE, 23, Encoder::default());
        let (refused, ()) = tokio::join!(call, answer(theirs, 1, error));
        let refused = refused.unwrap_err();
        assert!(
            refused.is_no_domain() && refused.to_string() == "libvirt says: Domain not found",
            "{refused}"
        );
    }

    #[tokio::test]
    async fn a_message_of_no_length_ends_the_connection() {
        for length in [0, 27, 40 << 20] {
            let (connection, mut theirs) = pair();
            let sent = Encoder::default().unsigned(length).fixed(&[0; 24]).finish();
            theirs.write_all(&sent).await.unwrap();
            let failed = connection.call(REMOTE, 1, Encoder::default()).await;
            assert!(matches!(failed, Err(LibvirtError::Malformed(_))), "{failed:?}");
            let next = connection.call(REMOTE, 1, Encoder::default()).await;
            assert!(matches!(next, Err(LibvirtError::Gone(_))), "{next:?}");
        }
    }
}
