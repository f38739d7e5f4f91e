//! Tests of notices: a program and a web server of Python's, which checks signatures, are told of what goes wrong.

use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use crate::scene::{Scene, qemu_io, until};

/// Prints its port, writes each notice with a good signature to the file, and fails the first request.
const SERVER: &str = r#"
import hashlib, hmac, http.server, ssl, sys
certificate, secret, notices = sys.argv[1:]
class Hook(http.server.BaseHTTPRequestHandler):
    requests = 0
    def do_POST(self):
        Hook.requests += 1
        body = self.rfile.read(int(self.headers["content-length"]))
        signed = self.headers["x-sterna-time-unix-ms"].encode() + b"." + body
        good = "sha256=" + hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest()
        is_good = hmac.compare_digest(good, self.headers["x-sterna-signature"]) and self.path == "/hook?key=hush"
        if is_good and Hook.requests > 1:
            with open(notices, "ab") as file: file.write(body + b"\n")
        self.send_response(500 if Hook.requests == 1 else 204 if is_good else 403)
        self.end_headers()
    def log_message(self, *words): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Hook)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(certificate)
server.socket = context.wrap_socket(server.socket, server_side=True)
print(server.server_address[1], flush=True)
server.serve_forever()
"#;

/// A web server that is ended with the test.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A host that tells a program and a web server.
struct Told {
    scene: Scene,
    certificate: PathBuf,
    _server: Server,
}

impl Told {
    fn new() -> Self {
        let scene = Scene::new();
        let certificate = scene.path("certificate.pem");
        let make = format!(
            "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout {0} -out {0}.crt -subj /CN=localhost \
             -addext subjectAltName=DNS:localhost -addext basicConstraints=critical,CA:FALSE -days 2 2>/dev/null && cat {0}.crt >>{0}",
            certificate.display()
        );
        let made = Command::new("sh").args(["-c", &make]).status().unwrap();
        assert!(made.success(), "openssl (package openssl): {made:?}");
        let server = Command::new("python3")
            .args(["-c", SERVER])
            .args([&certificate, &PathBuf::from("word"), &scene.path("posted")])
            .stdout(Stdio::piped())
            .spawn();
        let mut server = Server(server.unwrap());
        let mut port = String::new();
        BufReader::new(server.0.stdout.take().unwrap()).read_line(&mut port).unwrap();
        let (program, secret) = (scene.path("tell"), scene.path("secret"));
        std::fs::write(&secret, "word\n").unwrap();
        std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::fs::write(&program, format!("#!/bin/sh\ncat >>{0}; echo >>{0}\n", scene.path("told").display()))
            .unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        scene.configure(&format!(
            "[notify]\nprogram = '{}'\nwebhook = 'https://localhost:{}/hook?key=hush'\nsecret_file = '{}'\n\
             [stores.b.fault]\noperations = ['write']\n",
            program.display(),
            port.trim(),
            secret.display()
        ));
        Self { scene, certificate, _server: server }
    }

    fn start(&mut self) {
        let trusted = self.certificate.with_extension("pem.crt").display().to_string();
        self.scene.start_with(&[("SSL_CERT_FILE", &trusted)]).unwrap();
    }

    /// Returns what the program or the web server was told. A kill may have it told the same notice twice.
    fn of(&self, file: &str) -> Vec<Value> {
        let text = std::fs::read_to_string(self.scene.path(file)).unwrap_or_default();
        let mut notices: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        notices.dedup_by_key(|notice| notice["id"].clone());
        notices
    }

    /// Waits until both were told of this, and returns the message.
    fn until_told(&self, event: &str, part: &str) -> String {
        let is_it = |notice: &&Value| notice["event"] == event && notice["part"] == part;
        let found = |file| {
            until("it is told", || {
                self.of(file).iter().find(is_it).map(|notice| notice["message"].to_string())
            })
        };
        let message = found("told");
        assert_eq!(found("posted"), message);
        message
    }
}

#[test]
fn a_program_and_a_web_server_are_told_of_problems_their_ends_and_failed_migrations() {
    let mut told = Told::new();
    told.start();
    told.scene.create_volume();
    told.scene.stop();
    let (image, away) = (told.scene.path("a/v.img"), told.scene.path("away"));
    std::fs::rename(&image, &away).unwrap();
    told.start();
    assert!(told.until_told("begun", "volume").contains("v.img"));
    // The web server has failed the first time. A restart repeats nothing, and misses no end.
    told.scene.kill();
    std::fs::rename(&away, &image).unwrap();
    told.start();
    told.until_told("ended", "volume");
    for file in ["told", "posted"] {
        let events: Vec<Value> = told.of(file).into_iter().map(|notice| notice["event"].clone()).collect();
        assert_eq!(events, ["begun", "ended"], "{file}");
    }

    let socket = told.scene.path("run/volumes/v.sock");
    qemu_io(&["-f", "raw", "-c", "write -P 7 0 64k", &format!("nbd+unix:///v?socket={}", socket.display())]);
    told.scene.run(&["migrate", "v", "--to", "b"]);
    let failed = told.scene.json(&["migration", "list"]).1;
    assert_eq!(failed[0]["state"], "failed", "{failed}");
    assert!(told.until_told("happened", "migration").contains("sterna migration show m0"));

    let tested = told.scene.succeed(&["notices", "test"]);
    assert_eq!(tested.matches("has taken the notice").count(), 2, "{tested}");
    assert!(!tested.contains("hush"), "{tested}");
    told.until_told("test", "daemon");
    let listed = told.scene.json(&["notices", "list"]).1;
    assert_eq!((listed.as_array().unwrap().len(), &listed[0]["waiting"]), (2, &0.into()), "{listed}");
}

#[test]
fn a_destination_that_takes_nothing_is_named_and_holds_nobody_up() {
    let mut scene = Scene::new();
    let program = scene.path("tell");
    std::fs::write(&program, "#!/bin/sh\necho no mail today >&2; exit 1\n").unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    // Nobody listens there.
    scene.configure(&format!(
        "[notify]\nprogram = '{}'\nwebhook = 'http://127.0.0.1:9/'\n",
        program.display()
    ));
    scene.start(None);
    let tested = scene.run(&["notices", "test"]);
    assert_eq!(tested.code, 10, "{tested:?}");
    for words in ["no mail today", "cannot be reached"] {
        assert!(tested.stdout.contains(words), "{tested:?}");
    }
    // What anybody may change is not run as root.
    if rustix::process::geteuid().is_root() {
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(scene.run(&["notices", "test"]).stdout.contains("only root may write"));
    }
    scene.create_volume();
    scene.succeed(&["migrate", "v", "--to", "b"]);
    scene.stop();
    scene.configure("[notify]\nwebhook = 'example.net'\n");
    let file = scene.path("sterna.toml").display().to_string();
    let wrong = scene.run(&["config", "check", &file]);
    assert!(wrong.code == 1 && wrong.stdout.contains("no address of a web server"), "{wrong:?}");
    scene.configure("");
    scene.start(None);
    let none = scene.run(&["notices", "test"]);
    assert!(none.code == 2 && none.stderr.contains("[notify]"), "{none:?}");
}
