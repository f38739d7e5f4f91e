//! What strangers try in the handshake, at either end.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use rustls::client::{ResolvesClientCert, Resumption};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::*;

#[derive(Debug)]
struct Shows(Arc<CertifiedKey>);

impl ResolvesClientCert for Shows {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0))
    }

    fn has_certs(&self) -> bool {
        true
    }
}

impl ResolvesServerCert for Shows {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0))
    }
}

fn identity(name: &str) -> Identity {
    Identity::in_memory(name).unwrap()
}

fn anybody() -> Judge {
    Box::new(|_| Ok(()))
}

/// Presents these certificates with the key of any identity.
fn shows(certificates: &[&Identity], key: &Identity) -> Arc<Shows> {
    let key = ring::sign::any_supported_type(key.key()).unwrap();
    let certificates = certificates.iter().map(|of| of.certificate().clone()).collect();
    Arc::new(Shows(Arc::new(CertifiedKey::new(certificates, key))))
}

/// Returns the key that the server saw, and what the client could read.
async fn shake_hands(
    client: &Arc<ClientConfig>,
    server: &Arc<ServerConfig>,
) -> (io::Result<Option<HostId>>, io::Result<u8>) {
    let (near, far) = tokio::io::duplex(1 << 16);
    let serve = async {
        let mut stream = TlsAcceptor::from(Arc::clone(server)).accept(far).await?;
        stream.write_all(&[7]).await?;
        stream.flush().await?;
        Ok(host_of(stream.get_ref().1.peer_certificates()))
    };
    let call = async {
        let name = server_name().map_err(io::Error::other)?;
        TlsConnector::from(Arc::clone(client)).connect(name, near).await?.read_u8().await
    };
    tokio::join!(serve, call)
}

/// Returns a client and a server that accept every key, and the identity of one.
fn both() -> (ClientConfig, ServerConfig, HostId) {
    let (client, server) = (identity("c"), identity("s"));
    let id = client.id();
    let client = client_config(&client, PROTOCOL, anybody()).unwrap();
    (client, server_config(&server, PROTOCOL, anybody()).unwrap(), id)
}

#[tokio::test]
async fn who_shows_anothers_certificate_without_its_key_is_refused_at_either_end() {
    let (client, server, id) = both();
    let (seen, read) = shake_hands(&Arc::new(client), &Arc::new(server)).await;
    assert_eq!((seen.unwrap(), read.unwrap()), (Some(id), 7), "everybody with a key of his own is let in");

    let (mut client, server, _) = both();
    let (victim, thief) = (identity("victim"), identity("thief"));
    client.client_auth_cert_resolver = shows(&[&victim], &thief);
    let (seen, read) = shake_hands(&Arc::new(client), &Arc::new(server)).await;
    assert!(seen.is_err() && read.is_err(), "{seen:?} {read:?}");

    let (client, mut server, _) = both();
    server.cert_resolver = shows(&[&victim], &thief);
    let (seen, read) = shake_hands(&Arc::new(client), &Arc::new(server)).await;
    assert!(seen.is_err() && read.is_err(), "{seen:?} {read:?}");
}

#[tokio::test]
async fn one_certificate_is_shown_and_no_chain() {
    let (first, second) = (identity("first"), identity("second"));
    for at_server in [false, true] {
        let (mut client, mut server, _) = both();
        match at_server {
            true => server.cert_resolver = shows(&[&first, &second], &first),
            false => client.client_auth_cert_resolver = shows(&[&first, &second], &first),
        }
        let (seen, read) = shake_hands(&Arc::new(client), &Arc::new(server)).await;
        assert!(seen.is_err() && read.is_err(), "{at_server}: {seen:?} {read:?}");
    }
}

#[tokio::test]
async fn a_client_of_another_protocol_or_without_a_certificate_is_refused() {
    let (mut client, server, _) = both();
    client.alpn_protocols = vec![b"h2".to_vec()];
    let (seen, read) = shake_hands(&Arc::new(client), &Arc::new(server)).await;
    assert!(seen.is_err() && read.is_err(), "{seen:?} {read:?}");

    let (_, server, _) = both();
    let provider = Arc::new(ring::default_provider());
    let verifier = Arc::new(HoldsItsKey::of(&provider, anybody()));
    let mut nobody = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    nobody.alpn_protocols = vec![PROTOCOL.to_vec()];
    let (seen, read) = shake_hands(&Arc::new(nobody), &Arc::new(server)).await;
    assert!(seen.is_err() && read.is_err(), "{seen:?} {read:?}");
}

#[tokio::test]
async fn who_is_not_known_any_more_does_not_come_back_by_what_he_was_given_before() {
    let (mut client, _, id) = both();
    client.resumption = Resumption::in_memory_sessions(8);
    let is_known = Arc::new(AtomicBool::new(true));
    let judge = {
        let is_known = Arc::clone(&is_known);
        move |_| match is_known.load(Ordering::SeqCst) {
            true => Ok(()),
            false => Err(CertificateError::ApplicationVerificationFailure.into()),
        }
    };
    let server = Arc::new(server_config(&identity("s"), PROTOCOL, Box::new(judge)).unwrap());
    let client = Arc::new(client);
    let (seen, read) = shake_hands(&client, &server).await;
    assert_eq!((seen.unwrap(), read.unwrap()), (Some(id), 7));
    is_known.store(false, Ordering::SeqCst);
    let (seen, read) = shake_hands(&client, &server).await;
    assert!(seen.is_err() && read.is_err(), "{seen:?} {read:?}");
}
