//! Posts a notice to a web server: HTTP/1.1, over TLS unless the address says otherwise. One connection a notice, no redirects.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;

use api::Notice;
use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{CONTENT_TYPE, HOST, USER_AGENT};
use hyper::http::uri::Authority;
use hyper::{Request, Uri};
use hyper_util::rt::TokioIo;
use ring::hmac;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::config::read_secret;
use crate::journal::now_unix_ms;

/// The header with the time of the request, and the one with the signature of that time and the body.
const TIME: &str = "x-sterna-time-unix-ms";
const SIGNATURE: &str = "x-sterna-signature";

/// Where notices are posted to.
pub(super) struct Webhook {
    /// With a scheme and a host; the configuration has checked both.
    pub(super) address: Uri,
    /// The file with the key of signatures.
    pub(super) secret_file: Option<PathBuf>,
}

impl Webhook {
    /// Returns the address without its path, which may be a secret.
    pub(super) fn name(&self) -> String {
        let authority = self.address.authority().map_or("", |authority| host_and_port(authority));
        format!("{}://{authority}/…", self.address.scheme_str().unwrap_or_default())
    }

    /// Posts a notice; an error says why that failed. The answer has to be a success.
    pub(super) async fn post(&self, notice: &Notice) -> Result<(), String> {
        let body = serde_json::to_vec(notice).map_err(|error| error.to_string())?;
        let request = self.request(body).await?;
        let host = self.address.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
        let is_plain = self.address.scheme_str() == Some("http");
        let port = self.address.port_u16().unwrap_or(if is_plain { 80 } else { 443 });
        let unreachable = |error: io::Error| format!("it cannot be reached: {error}");
        let stream = TcpStream::connect((host.as_str(), port)).await.map_err(unreachable)?;
        if is_plain {
            return exchange(stream, request).await;
        }
        let name = ServerName::try_from(host).map_err(|error| error.to_string())?;
        let connector = tokio::task::spawn_blocking(connector).await.map_err(|error| error.to_string())??;
        exchange(connector.connect(name, stream).await.map_err(unreachable)?, request).await
    }

    async fn request(&self, body: Vec<u8>) -> Result<Request<Full<Bytes>>, String> {
        let path = self.address.path_and_query().map_or("/", |path| path.as_str());
        let host = self.address.authority().map_or("", |authority| host_and_port(authority));
        let mut request = Request::post(path)
            .header(HOST, host)
            .header(CONTENT_TYPE, "application/json")
            .header(USER_AGENT, concat!("sterna/", env!("CARGO_PKG_VERSION")));
        if let Some(file) = self.secret_file.clone() {
            let secret = tokio::task::spawn_blocking(move || secret_in(&file)).await;
            let secret = secret.map_err(|error| error.to_string())??;
            let time = now_unix_ms().to_string();
            request = request.header(SIGNATURE, signature(&secret, &time, &body)).header(TIME, time);
        }
        request.body(Full::new(Bytes::from(body))).map_err(|error| error.to_string())
    }
}

fn secret_in(file: &Path) -> Result<Vec<u8>, String> {
    read_secret(file)
        .map_err(|problem| format!("its secret_file {} cannot be used: {problem}", file.display()))
}

/// Returns `sha256=` and the HMAC of the time, a dot and the body, in hexadecimal digits.
fn signature(secret: &[u8], time: &str, body: &[u8]) -> String {
    let mut signing = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA256, secret));
    signing.update(time.as_bytes());
    signing.update(b".");
    signing.update(body);
    let digits = signing.sign().as_ref().iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    format!("sha256={digits}")
}

/// Returns what connects to servers whose certificates this system trusts.
fn connector() -> Result<TlsConnector, String> {
    let mut roots = RootCertStore::empty();
    let found = rustls_native_certs::load_native_certs();
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        return Err("this system trusts no certificates: install the package ca-certificates".to_owned());
    }
    Ok(TlsConnector::from(Arc::new(
        ClientConfig::builder().with_root_certificates(roots).with_no_client_auth(),
    )))
}

/// Sends the request, and takes the head of its answer.
async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send,
    request: Request<Full<Bytes>>,
) -> Result<(), String> {
    let broken = |error: hyper::Error| format!("the connection is broken: {error}");
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
    // The connection is driven here, so that it ends with this. It may end in the same moment as the answer comes.
    let (mut answer, mut connection) = (pin!(sender.send_request(request)), pin!(connection));
    let answer = tokio::select! {
        biased;
        answer = &mut answer => answer,
        ended = &mut connection => {
            ended.map_err(broken)?;
            answer.await
        }
    };
    let status = answer.map_err(broken)?.status();
    if status.is_success() { Ok(()) } else { Err(format!("it answers {status}")) }
}

/// Returns an authority without a user and a password.
fn host_and_port(authority: &Authority) -> &str {
    let text = authority.as_str();
    text.rsplit_once('@').map_or(text, |(_, host)| host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_no_secrets() {
        let address = "https://user:word@example.net:8443/hooks/T0/B1/secret?key=secret".parse().unwrap();
        let webhook = Webhook { address, secret_file: None };
        assert_eq!(webhook.name(), "https://example.net:8443/…");
    }

    /// The signature of `openssl dgst -sha256 -hmac key` over `1.{}`.
    #[test]
    fn a_signature_is_what_other_programs_compute() {
        let digits = "1ba6b8171186efc613e8bcc0cbdab2748f24984d7c5a84faa2637afa0e40d224";
        assert_eq!(signature(b"key", "1", b"{}"), format!("sha256={digits}"));
    }
}
