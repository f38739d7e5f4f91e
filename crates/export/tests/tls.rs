//! TLS with real clients, and with clients that misuse it.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use block::engine::EngineChoice;
use export::nbd::protocol::{OPTION_MAGIC, option, option_reply};
use export::nbd::{ClientCertificates, CredentialFiles, Credentials, CredentialsError, Encryption, Limits};
use support::authority::{Authority, Role};
use support::clients::{run, run_python, text, write_sparse_image};
use support::{PATIENCE, Running, on_each_engine};

fn required(files: &CredentialFiles) -> Encryption {
    Encryption::Required(Credentials::load(files).unwrap())
}

fn start(encryption: Encryption) -> Running {
    Running::start_encrypted(EngineChoice::Threads, Limits::STANDARD, encryption)
}

/// Returns an address for clients that verify the server by the files in `certificates`.
fn uri(server: &Running, certificates: &Path) -> String {
    format!("nbds://{}/disk?tls-certificates={}", server.address, certificates.display())
}

fn nbdinfo(uri: &str) -> Output {
    Command::new("nbdinfo").args(["--size", uri]).output().unwrap()
}

#[track_caller]
fn assert_connects(uri: &str) {
    let output = nbdinfo(uri);
    assert!(output.status.success(), "{uri}: {}", String::from_utf8_lossy(&output.stderr));
}

#[track_caller]
fn assert_refused(uri: &str) {
    let output = nbdinfo(uri);
    assert!(!output.status.success(), "{uri} was let in");
}

#[test]
fn libnbd_does_over_tls_whatever_it_does_without() {
    on_each_engine(|choice| {
        let authority = Authority::new();
        let encryption = required(&authority.files());
        let server = Running::start_encrypted(choice, Limits::STANDARD, encryption);
        let address = format!(
            "'nbds://{}/' + name + '?tls-certificates={}'",
            server.address,
            authority.path().display()
        );
        run_python(&address, include_str!("clients/commands.py"));
    });
}

#[test]
fn nbdcopy_brings_an_image_in_and_out_over_several_encrypted_connections() {
    on_each_engine(|choice| {
        let authority = Authority::new();
        let encryption = required(&authority.files());
        let server = Running::start_encrypted(choice, Limits::STANDARD, encryption);
        let (image, copy) = (server.path("image"), server.path("copy"));
        write_sparse_image(&image);
        let uri = uri(&server, authority.path());
        run("nbdcopy", "libnbd-bin", &["--connections=4", "--flush", text(&image), &uri]);
        run("nbdcopy", "libnbd-bin", &["--connections=4", &uri, text(&copy)]);
        assert!(std::fs::read(&image).unwrap() == std::fs::read(&copy).unwrap(), "the copy equals the image");
    });
}

#[test]
fn qemu_img_writes_reads_and_compares_with_certificates_on_both_sides() {
    on_each_engine(|choice| {
        let authority = Authority::new();
        let clients = ClientCertificates::Required(authority.path().join("ca-cert.pem"));
        let encryption = required(&CredentialFiles { clients, ..authority.files() });
        let server = Running::start_encrypted(choice, Limits::STANDARD, encryption);
        let image = server.path("image");
        write_sparse_image(&image);
        let credentials =
            format!("tls-creds-x509,id=tls0,endpoint=client,dir={}", authority.path().display());
        let disk =
            format!("driver=nbd,host=127.0.0.1,port={},export=disk,tls-creds=tls0", server.address.port());
        let from = format!("driver=raw,file.driver=file,file.filename={}", text(&image));
        let qemu_img = |arguments: &[&str]| {
            run(
                "qemu-img",
                "qemu-utils",
                &[&arguments[..1], &["--object", &credentials], &arguments[1..]].concat(),
            )
        };
        qemu_img(&["convert", "-n", "--image-opts", "--target-image-opts", &from, &disk]);
        qemu_img(&["compare", "--image-opts", &from, &disk]);
        let arguments =
            ["--object", &credentials, "--image-opts", "-c", "write -z 0 1M", "-c", "read -P 0 0 1M"];
        run(
            "qemu-io",
            "qemu-utils",
            &[&arguments[..], &["-c", "aio_write -P 7 5 300000", "-c", "aio_flush", &disk]].concat(),
        );
    });
}

#[test]
fn who_does_not_encrypt_is_told_to_where_that_is_required_and_served_where_it_is_not() {
    let authority = Authority::new();
    let credentials = Credentials::load(&authority.files()).unwrap();
    let server = start(Encryption::Required(credentials.clone()));
    let plain = nbdinfo(&format!("nbd://{}/disk", server.address));
    assert!(!plain.status.success());
    let local = nbdinfo(&server.uri("disk"));
    assert!(local.status.success(), "the other listener does not ask for it");
    let server = start(Encryption::Offered(credentials));
    assert_connects(&format!("nbd://{}/disk", server.address));
    assert_connects(&uri(&server, authority.path()));
    let server = start(Encryption::Off);
    assert_refused(&uri(&server, authority.path()));
}

#[test]
fn clients_are_known_by_their_certificates_where_these_are_asked_for() {
    let (authority, other) = (Authority::new(), Authority::new());
    let ca = authority.path().join("ca-cert.pem");
    let files = |clients| CredentialFiles { clients, ..authority.files() };
    let bare = authority.without_client_certificate();
    // This client trusts our authority, and has a certificate of the other.
    let stranger = authority.without_client_certificate();
    for file in ["client-cert.pem", "client-key.pem"] {
        std::fs::copy(other.path().join(file), stranger.path().join(file)).unwrap();
    }
    let server = start(required(&files(ClientCertificates::Required(ca.clone()))));
    assert_connects(&uri(&server, authority.path()));
    assert_refused(&uri(&server, bare.path()));
    assert_refused(&uri(&server, stranger.path()));
    let server = start(required(&files(ClientCertificates::Optional(ca))));
    assert_connects(&uri(&server, authority.path()));
    assert_connects(&uri(&server, bare.path()));
    // A client that is asked for certificates of our authority does not show one of another.
    let server = start(required(&files(ClientCertificates::NotAsked)));
    assert_connects(&uri(&server, stranger.path()));
    assert_refused(&uri(&server, other.path()));
}

#[test]
fn a_new_certificate_is_used_for_new_connections_and_old_ones_live_on() {
    let (old, new) = (Authority::new(), Authority::new());
    let credentials = Credentials::load(&old.files()).unwrap();
    let server = start(Encryption::Required(credentials.clone()));
    // It reads until it is stopped, or for about a minute.
    let script = format!(
        "import os\n\
         h = nbd.NBD()\nh.connect_uri(uri('disk'))\nh.pwrite(b'x' * 4096, 0)\n\
         for _ in range(300000):\n    h.pread(4096, 0)\n    if os.path.exists('{}'):\n        break\n\
         assert h.get_tls_negotiated()\nassert h.pread(4096, 0) == bytearray(b'x' * 4096)\nh.shutdown()\n",
        server.path("go").display()
    );
    let address = format!("'{}'", uri(&server, old.path()));
    std::thread::scope(|scope| {
        let client = scope.spawn(|| run_python(&address, &script));
        server.wait_for("an encrypted client", |connections| {
            connections.iter().any(|connection| connection.encrypted && connection.requests_answered > 1)
        });
        credentials.reload(&new.files()).unwrap();
        assert_connects(&uri(&server, new.path()));
        assert_refused(&uri(&server, old.path()));
        std::fs::write(server.path("go"), "").unwrap();
        client.join().unwrap();
    });
}

#[test]
fn credentials_that_cannot_be_used_are_named_and_those_in_use_stay() {
    let authority = Authority::new();
    let credentials = Credentials::load(&authority.files()).unwrap();
    let missing = CredentialFiles { key: authority.path().join("nothing"), ..authority.files() };
    assert!(matches!(
        credentials.reload(&missing),
        Err(CredentialsError::Read { content: "private key", .. })
    ));
    let empty = authority.path().join("empty");
    std::fs::write(&empty, "no PEM at all").unwrap();
    let empty = CredentialFiles { certificate: empty, ..authority.files() };
    assert!(matches!(credentials.reload(&empty), Err(CredentialsError::Empty { .. })));
    let other = CredentialFiles { key: authority.path().join("client-key.pem"), ..authority.files() };
    assert!(matches!(credentials.reload(&other), Err(CredentialsError::Unusable { .. })));
    let server = start(Encryption::Required(credentials.clone()));
    assert_connects(&uri(&server, authority.path()));
    authority.issue(Role::Server);
    credentials.reload(&authority.files()).unwrap();
    assert_connects(&uri(&server, authority.path()));
}

/// Connects over TCP and requests TLS, sending `more` at once. The reply to the request has been read.
fn ask_for_tls(server: &Running, more: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(server.address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut bytes = 3_u32.to_be_bytes().to_vec();
    bytes.extend(OPTION_MAGIC.to_be_bytes());
    bytes.extend([option::STARTTLS, 0].map(u32::to_be_bytes).concat());
    bytes.extend(more);
    stream.read_exact(&mut [0; 18]).unwrap();
    stream.write_all(&bytes).unwrap();
    stream
}

fn acknowledged(stream: &mut TcpStream) -> bool {
    let mut reply = [0; 20];
    stream.read_exact(&mut reply).is_ok() && reply[12..16] == option_reply::ACK.to_be_bytes()
}

fn rest(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    bytes
}

#[test]
fn what_is_smuggled_in_before_the_handshake_ends_the_connection() {
    on_each_engine(|choice| {
        let encryption = required(&Authority::new().files());
        let server = Running::start_encrypted(choice, Limits::STANDARD, encryption);
        let mut list = OPTION_MAGIC.to_be_bytes().to_vec();
        list.extend([option::LIST, 0].map(u32::to_be_bytes).concat());
        let mut stream = ask_for_tls(&server, &list);
        assert_eq!(rest(&mut stream), [], "not even the acknowledgement");
    });
}

#[test]
fn a_handshake_that_is_none_is_answered_by_an_alert_and_the_end() {
    on_each_engine(|choice| {
        let encryption = required(&Authority::new().files());
        let server = Running::start_encrypted(choice, Limits::STANDARD, encryption);
        let mut stream = ask_for_tls(&server, &[]);
        assert!(acknowledged(&mut stream));
        stream.write_all(&[0x55; 300]).unwrap();
        let alert = rest(&mut stream);
        assert!(alert.is_empty() || alert[0] == 21, "{alert:?}");
        let mut stream = ask_for_tls(&server, &[]);
        assert!(acknowledged(&mut stream));
        drop(stream);
        server.wait_for("both to leave", <[_]>::is_empty);
    });
}

#[test]
fn a_handshake_that_never_ends_loses_its_place() {
    on_each_engine(|choice| {
        // Long enough for the earlier options, also on a busy machine.
        let limits = Limits { negotiation_timeout: Duration::from_secs(3), ..Limits::STANDARD };
        let server = Running::start_encrypted(choice, limits, required(&Authority::new().files()));
        let mut stream = ask_for_tls(&server, &[]);
        assert!(acknowledged(&mut stream));
        // This is the head of a record whose rest never comes.
        stream.write_all(&[22, 3, 1, 2, 0]).unwrap();
        assert_eq!(rest(&mut stream), []);
    });
}
