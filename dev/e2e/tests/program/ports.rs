//! Volumes on ports of their own, for clients of other hosts; sockets for other users; exports that are only read.

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;

use rustix::process::Signal;
use testbed::own_address;

use crate::scene::{DEADLINE, Scene, code, stop_and_verify};

/// What `nbdinfo` says of an export; empty if it could not be used.
fn nbdinfo(uri: &str) -> String {
    let output =
        Command::new("timeout").args([&DEADLINE.as_secs().to_string(), "nbdinfo", uri]).output().unwrap();
    if output.status.success() { String::from_utf8(output.stdout).unwrap() } else { String::new() }
}

#[test]
fn volume_has_a_port_of_its_own_that_survives_restarts_and_moves() {
    let mut scene = Scene::started();
    let address = own_address().unwrap().to_string();
    let create = ["volume", "create", "v", "--store", "a", "--size", "32MiB", "--listen", &address];
    scene.succeed(&[&create[..], &["--connections-max", "3"]].concat());
    let uri = format!("nbd://{address}/v");
    assert_eq!(scene.json(&["volume", "show", "v"]).1["tcp_uri"], uri.as_str());
    assert!(nbdinfo(&uri).contains("export-size: 33554432"), "{}", nbdinfo(&uri));
    let guest = scene.start_guest();
    scene.succeed(&["migrate", "v", "--to", "b"]);
    assert!(nbdinfo(&uri).contains("is_read_only: false"));
    scene.kill();
    scene.start(None);
    assert_eq!(scene.store_of_volume(), "b");
    assert!(nbdinfo(&uri).contains("export-size: 33554432"));
    stop_and_verify(guest);
    // The port is the volume's.
    let taken = ["volume", "create", "w", "--store", "a", "--size", "1MiB", "--listen", &address];
    let (exit, refused) = scene.json(&taken);
    assert_eq!((exit, code(&refused)), (4, "volume_unavailable"), "{refused}");
    for nonsense in ["here", "127.0.0.1", "127.0.0.1:0", ":10809"] {
        let (exit, refused) =
            scene.json(&["volume", "create", "x", "--store", "a", "--size", "1MiB", "--listen", nonsense]);
        assert_eq!((exit, code(&refused)), (2, "invalid_request"), "{refused}");
    }
}

/// The files of a server's certificate, and a folder of what clients trust.
struct Certificate {
    address: SocketAddr,
    certificate: String,
    key: String,
    trust: String,
}

impl Certificate {
    /// Makes one, which is its own authority.
    fn make(scene: &Scene, address: SocketAddr) -> Self {
        let path = |name: &str| scene.path(name).display().to_string();
        let (certificate, key, trust) = (path("server.pem"), path("server.key"), path("trust"));
        std::fs::create_dir(&trust).unwrap();
        let made = Self { address, certificate, key, trust };
        made.renew();
        made
    }

    /// Puts others in their place, which clients trust instead.
    fn renew(&self) {
        let names = format!("subjectAltName=DNS:localhost,IP:{}", self.address.ip());
        let made = Command::new("openssl")
            .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"])
            .args(["-days", "2", "-subj", "/CN=localhost", "-addext", &names])
            .args(["-out", &self.certificate, "-keyout", &self.key])
            .output()
            .unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        std::fs::copy(&self.certificate, format!("{}/ca-cert.pem", self.trust)).unwrap();
    }

    /// A daemon that uses it, and demands it, with a volume on the address; returns where a client that trusts it finds that.
    fn serve(&self, scene: &mut Scene) -> String {
        let (certificate, key) = (&self.certificate, &self.key);
        scene.configure(&format!("[nbd]\ntls = {{ certificate = '{certificate}', key = '{key}' }}\n"));
        scene.start(None);
        let address = self.address.to_string();
        scene.succeed(&["volume", "create", "v", "--store", "a", "--size", "1MiB", "--listen", &address]);
        let uri = scene.json(&["volume", "show", "v"]).1["tcp_uri"].as_str().unwrap().to_owned();
        assert_eq!(uri, format!("nbds://{address}/v"));
        format!("{uri}?tls-certificates={}", self.trust)
    }
}

#[test]
fn where_tls_is_demanded_nobody_gets_in_without() {
    let mut scene = Scene::new();
    let certificate = Certificate::make(&scene, own_address().unwrap());
    let trusting = certificate.serve(&mut scene);
    assert_eq!(nbdinfo(&format!("nbd://{}/v", certificate.address)), "");
    assert!(nbdinfo(&trusting).contains("export-size: 1048576"), "{}", nbdinfo(&trusting));
    scene.stop();
    std::fs::remove_file(&certificate.key).unwrap();
    scene.start(None);
    assert_eq!(scene.wait(), 8, "a daemon without its key would serve volumes in the clear");
}

#[test]
fn certificates_are_read_again_at_a_hang_up_and_what_cannot_be_read_changes_nothing() {
    let mut scene = Scene::new();
    let certificate = Certificate::make(&scene, own_address().unwrap());
    let trusting = certificate.serve(&mut scene);
    assert!(nbdinfo(&trusting).contains("export-size: 1048576"));
    certificate.renew();
    assert_eq!(nbdinfo(&trusting), "", "the daemon has the former one until it is told");
    scene.signal(Signal::HUP).unwrap();
    assert!(scene.wait_for_log("reloaded certificates"));
    assert!(nbdinfo(&trusting).contains("export-size: 1048576"));
    std::fs::write(&certificate.certificate, "half of it").unwrap();
    scene.signal(Signal::HUP).unwrap();
    assert!(scene.wait_for_log("the previous ones stay in use"));
    assert!(nbdinfo(&trusting).contains("export-size: 1048576"));
}

#[test]
fn read_only_volume_is_read_and_sockets_have_the_mode_that_was_asked_for() {
    let scene = Scene::new();
    scene.configure("[api_socket]\nmode = '0660'\n[volume_sockets]\nmode = '0666'\n");
    let mut scene = scene;
    scene.start(None);
    let mode = |path: &str| std::fs::metadata(scene.path(path)).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode("run"), mode("run/volumes"), mode("run/api.sock")), (0o711, 0o711, 0o660));
    let image = scene.path("raw");
    std::fs::write(&image, [7; 8192]).unwrap();
    let path = image.display().to_string();
    scene.succeed(&["volume", "add", "v", "--image", &path, "--read-only", "--socket-mode", "0640"]);
    scene.succeed(&["volume", "create", "w", "--store", "a", "--size", "1MiB"]);
    assert_eq!((mode("run/volumes/v.sock"), mode("run/volumes/w.sock")), (0o640, 0o666));
    let uri = |name: &str| scene.json(&["volume", "show", name]).1["uri"].as_str().unwrap().to_owned();
    assert!(nbdinfo(&uri("v")).contains("is_read_only: true"));
    assert!(nbdinfo(&uri("w")).contains("is_read_only: false"));
    // It moves as any other, and stays what it is.
    scene.succeed(&["migrate", "v", "--to", "a"]);
    assert!(nbdinfo(&uri("v")).contains("is_read_only: true"));
    assert_eq!(std::fs::read(scene.path("a/v.img")).unwrap(), [7; 8192]);
    let bad = ["volume", "create", "x", "--store", "a", "--size", "1MiB", "--socket-owner", "no-such-user"];
    let (exit, refused) = scene.json(&bad);
    assert_eq!((exit, code(&refused)), (2, "invalid_request"), "{refused}");
}
