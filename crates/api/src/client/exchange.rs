//! One request and its answer, over a connection of its own.

use std::io;

use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::Bytes;
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::ClientError;
use super::way::Way;
use crate::{ErrorBody, RESPONSE_BYTES_MAX};

pub(super) struct Answer {
    status: StatusCode,
    body: Bytes,
}

/// Sends one request and reads its answer to the end.
pub(super) async fn exchange(
    way: &Way,
    method: Method,
    path: &str,
    body: Option<&impl Serialize>,
) -> Result<Answer, ClientError> {
    let unreachable = |source| ClientError::Unreachable { address: way.to_string(), source };
    let broken = |error: hyper::Error| match denied(&error) {
        Some(denied) => unreachable(denied),
        None => ClientError::Broken(error.into()),
    };
    let stream = way.connect().await.map_err(unreachable)?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
    let bytes = body.map(serde_json::to_vec).transpose();
    let bytes = bytes.map_err(|source| ClientError::Malformed { status: 0, source })?;
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(HOST, way.host())
        .header(CONTENT_TYPE, "application/json")
        .body(Full::new(Bytes::from(bytes.unwrap_or_default())))
        .map_err(|error| ClientError::Broken(error.into()))?;
    let exchange = async {
        let answer = sender.send_request(request).await.map_err(broken)?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), RESPONSE_BYTES_MAX).collect().await.map_err(|error| {
            if error.is::<LengthLimitError>() { ClientError::TooLarge } else { ClientError::Broken(error) }
        })?;
        Ok(Answer { status, body: body.to_bytes() })
    };
    // The connection is driven here rather than in a task of its own, so that dropping the request drops it too. It may end
    // before the answer has been read to its end.
    tokio::pin!(exchange, connection);
    let mut driven = true;
    loop {
        tokio::select! {
            biased;
            answer = &mut exchange => return answer,
            ended = &mut connection, if driven => {
                driven = false;
                ended.map_err(broken)?;
            }
        }
    }
}

impl Answer {
    /// The JSON of a success, or the error that it is instead.
    pub(super) fn parse<T: DeserializeOwned>(self) -> Result<T, ClientError> {
        if self.status.is_success() { self.read() } else { Err(self.refusal()) }
    }

    /// Parses as [`Answer::parse`], but also accepts an answer with this status.
    pub(super) fn parse_also<T: DeserializeOwned>(self, status: StatusCode) -> Result<T, ClientError> {
        match self.read() {
            Ok(value) if self.status == status => Ok(value),
            _ => self.parse(),
        }
    }

    /// The text of a success, or the error that it is instead.
    pub(super) fn text(self) -> Result<String, ClientError> {
        if !self.status.is_success() {
            return Err(self.refusal());
        }
        String::from_utf8(self.body.into()).map_err(|error| ClientError::Broken(error.into()))
    }

    fn refusal(&self) -> ClientError {
        self.read::<ErrorBody>().map_or_else(|error| error, |body| ClientError::Refused(body.error))
    }

    fn read<T: DeserializeOwned>(&self) -> Result<T, ClientError> {
        let malformed = |source| ClientError::Malformed { status: self.status.as_u16(), source };
        serde_json::from_slice(&self.body).map_err(malformed)
    }
}

/// That the daemon lets this client do nothing, if a connection has ended for that.
fn denied(error: &hyper::Error) -> Option<io::Error> {
    let cause = std::error::Error::source(error)?.downcast_ref::<io::Error>()?;
    let is_denied = cause.kind() == io::ErrorKind::PermissionDenied;
    is_denied.then(|| io::Error::new(cause.kind(), cause.to_string()))
}

/// A text as one segment of a path: whatever is not unreserved is percent-encoded.
pub(super) struct Segment<'a>(pub(super) &'a str);

impl std::fmt::Display for Segment<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // A segment of dots alone would be taken for a step in the path.
        let dots = self.0.bytes().all(|byte| byte == b'.');
        self.0.bytes().try_for_each(|byte| match byte {
            b'.' if dots => write!(f, "%2E"),
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                write!(f, "{}", byte as char)
            }
            _ => write!(f, "%{byte:02X}"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::Segment;

    #[test]
    fn names_cannot_leave_their_segment_of_the_path() {
        assert_eq!(Segment("disk-1.a_b~").to_string(), "disk-1.a_b~");
        assert_eq!(Segment("../a b?c").to_string(), "..%2Fa%20b%3Fc");
        assert_eq!(Segment("..").to_string(), "%2E%2E");
    }
}
