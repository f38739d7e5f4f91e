//! Reads lines of bounded length from a monitor.

use std::io;

use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, BufReader};

/// The longest accepted line. The longest useful answers describe every block node of a VM, a few KiB each; the description of
/// the whole protocol has some 300 KiB.
pub(super) const LINE_BYTES_MAX: usize = 8 << 20;

#[derive(Debug)]
pub(in crate::qemu) struct Lines<R> {
    input: BufReader<R>,
}

impl<R: AsyncRead + Unpin> Lines<R> {
    pub(in crate::qemu) fn new(input: R) -> Self {
        Self { input: BufReader::new(input) }
    }

    /// Returns the next line, without its end. Do not call it again after an error, or after its future was dropped. Fails if the
    /// connection ends or a line is too long.
    pub(super) async fn next(&mut self) -> io::Result<Vec<u8>> {
        let mut line = Vec::new();
        let limit = LINE_BYTES_MAX as u64;
        (&mut self.input).take(limit).read_until(b'\n', &mut line).await?;
        if line.pop_if(|last| *last == b'\n').is_some() {
            return Ok(line);
        }
        Err(match line.len() {
            0 => io::Error::new(io::ErrorKind::UnexpectedEof, "the connection was closed"),
            LINE_BYTES_MAX => {
                let message = format!("a line is longer than {LINE_BYTES_MAX} bytes");
                io::Error::new(io::ErrorKind::InvalidData, message)
            }
            _ => io::Error::new(io::ErrorKind::UnexpectedEof, "the connection was closed within a line"),
        })
    }
}
