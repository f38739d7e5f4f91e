//! HTTP requests as bytes, as programs send them that do not know Sterna.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use anyhow::Context as _;
use testbed::Host;

/// An answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Its status code.
    pub status: u16,
    /// Its whole text, with the head.
    pub text: String,
}

impl Answer {
    /// Returns the text below the head.
    pub fn body(&self) -> &str {
        self.text.split_once("\r\n\r\n").map_or("", |(_, body)| body)
    }
}

/// Returns a request with this head, whose answer ends the connection.
pub fn request(head: &str, body: &str) -> String {
    format!("{head}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

/// Sends bytes, and reads the answer up to the end of the connection.
///
/// # Errors
/// If what comes is no answer.
pub fn ask(mut stream: impl Read + Write, request: &[u8]) -> anyhow::Result<Answer> {
    // A server that has heard enough may close the connection before everything is sent.
    let _ = stream.write_all(request);
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let status = text.split(' ').nth(1).and_then(|status| status.parse().ok());
    Ok(Answer { status: status.with_context(|| format!("no status: {text:?}"))?, text })
}

/// Sends bytes to the socket of a host's API.
///
/// # Errors
/// If nobody listens there, or what comes is no answer.
pub fn ask_api(host: &Host, request: &[u8]) -> anyhow::Result<Answer> {
    let stream = UnixStream::connect(host.path("run/api.sock")).context("reach the API")?;
    ask(stream, request)
}
