//! Tests of the API over TLS: the rights of each role, and strangers. The clients are curl, openssl, and raw bytes.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};
use transport::pinned::{AccessToken, Connector};

use crate::scene::{DEADLINE, Outcome, Scene, code, outcome_of, until, wait_until};

/// Limits of handshakes under way, for one network and in total; see `crates/daemon/src/http/remote.rs`.
const OF_ONE_NETWORK: usize = 16;
const IN_ALL: usize = 64;

/// A host whose API is served over TLS.
struct Served {
    scene: Scene,
    port: u16,
}

/// A user with a home folder, who uses the daemon over TLS.
struct User {
    home: tempfile::TempDir,
    address: String,
}

impl Served {
    fn start() -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let scene = Scene::new();
        scene.configure(&format!("[api_tls]\nlisten = '127.0.0.1:{port}'\n"));
        let mut served = Self { scene, port };
        served.begin();
        served
    }

    fn begin(&mut self) {
        self.scene.start(None);
        assert!(self.scene.wait_for_log("the API is served over TLS"));
    }

    fn address(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream
    }

    /// Connects from another address of this machine.
    fn connect_from(&self, address: Ipv4Addr) -> TcpStream {
        let socket =
            rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None)
                .unwrap();
        rustix::net::bind(&socket, &SocketAddr::from((address, 0))).unwrap();
        rustix::net::connect(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, self.port))).unwrap();
        let stream = TcpStream::from(socket);
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream
    }

    fn invite(&self, name: &str, role: &str) -> String {
        let (exit, granted) = self.scene.json(&["access", "grant", name, "--role", role]);
        assert_eq!(exit, 0, "{granted}");
        granted["token"].as_str().unwrap().to_owned()
    }

    /// Returns a user who has redeemed an invitation.
    fn user(&self, name: &str, role: &str) -> User {
        let (user, token) = (User::new(self), self.invite(name, role));
        let added = user.redeem(&token);
        assert_eq!(added.code, 0, "{added:?}");
        user
    }

    /// Requests a path by curl with these options.
    fn curl(&self, path: &str, options: &[&str]) -> Outcome {
        let mut curl = Command::new("curl");
        curl.args([
            "--silent",
            "--show-error",
            "--insecure",
            "--max-time",
            "60",
            "--write-out",
            "%{http_code}",
        ]);
        curl.args(options).arg(format!("{}{path}", self.address())).stdin(Stdio::null());
        outcome_of(curl)
    }

    fn audit(&self, is_it: impl Fn(&Value) -> bool) -> Value {
        until("the audit log has the entry", || {
            let text = std::fs::read_to_string(self.scene.path("data/audit.log")).unwrap_or_default();
            let mut lines = text.lines().filter_map(|line| serde_json::from_str(line).ok());
            lines.find(&is_it)
        })
    }
}

impl User {
    fn new(served: &Served) -> Self {
        Self { home: tempfile::tempdir().unwrap(), address: served.address() }
    }

    fn command(&self, scene: &Scene, arguments: &[&str]) -> Command {
        let mut command = scene.command(arguments);
        command.env("STERNA_HOST", &self.address).env("XDG_CONFIG_HOME", self.home.path());
        command
    }

    fn redeem(&self, token: &str) -> Outcome {
        outcome_of(self.redemption(token))
    }

    fn redemption(&self, token: &str) -> Command {
        let mut command = Command::new(crate::scene::program());
        command.args(["remote", "add", &self.address]).env("STERNA_INVITATION", token);
        command.env("XDG_CONFIG_HOME", self.home.path()).stdin(Stdio::null());
        command
    }

    fn run(&self, served: &Served, arguments: &[&str]) -> Outcome {
        outcome_of(self.command(&served.scene, arguments))
    }

    fn file(&self, name: &str) -> PathBuf {
        self.home.path().join("sterna/identity").join(name)
    }

    /// Returns curl's options for this user's key.
    fn as_options(&self) -> Vec<String> {
        let text = |name| self.file(name).display().to_string();
        vec!["--cert".to_owned(), text("certificate.pem"), "--key".to_owned(), text("key.pem")]
    }

    fn curl(&self, served: &Served, path: &str, options: &[&str]) -> Outcome {
        let own = self.as_options();
        served.curl(path, &own.iter().map(String::as_str).chain(options.iter().copied()).collect::<Vec<_>>())
    }
}

/// Makes a certificate with openssl. Returns options of curl, and the digest of its key.
fn openssl_certificate(scene: &Scene, name: &str) -> (Vec<String>, String) {
    let [key, certificate] =
        ["key", "pem"].map(|end| scene.path(&format!("{name}.{end}")).display().to_string());
    let script = format!(
        "openssl req -x509 -newkey ed25519 -nodes -keyout {key} -out {certificate} -subj /CN={name} -days 2 2>/dev/null &&
         openssl x509 -in {certificate} -pubkey -noout | openssl pkey -pubin -outform der | sha256sum"
    );
    let made = Command::new("sh").args(["-c", &script]).output().unwrap();
    assert!(made.status.success(), "openssl (package openssl): {made:?}");
    let digest = String::from_utf8(made.stdout).unwrap()[..64].to_owned();
    (vec!["--cert".to_owned(), certificate, "--key".to_owned(), key], digest)
}

/// Returns whether the daemon has closed a connection without an HTTP answer.
fn is_ended_without_http(mut stream: TcpStream) -> bool {
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Ok(_) => !answer.windows(5).any(|window| window == b"HTTP/"),
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    }
}

#[test]
fn each_role_may_do_what_it_is_for_and_is_told_what_more_would_take() {
    let served = Served::start();
    served.scene.create_volume();
    let [reader, operator, admin] =
        [("ann", "read"), ("bob", "operate"), ("cid", "admin")].map(|(name, role)| served.user(name, role));
    let exit = |user: &User, arguments: &[&str]| user.run(&served, arguments).code;
    for user in [&reader, &operator, &admin] {
        let looks: [&[&str]; 6] = [
            &["volume", "list"],
            &["top", "--once"],
            &["metrics"],
            &["health"],
            &["migration", "list"],
            &["migrate", "v", "--to", "b", "--dry-run"],
        ];
        for look in looks {
            assert_eq!(exit(user, look), 0, "{look:?}");
        }
    }
    let operations: [&[&str]; 3] =
        [&["migrate", "v", "--to", "b"], &["volume", "resize", "v", "64MiB"], &["migration", "cancel", "m0"]];
    let of_admins: [&[&str]; 6] = [
        &["volume", "remove", "v"],
        &["volume", "create", "w", "--size", "8MiB", "--store", "a"],
        &["volume", "promote", "v", "--force"],
        &["host", "init"],
        &["replica", "drop", "v"],
        &["access", "grant", "dan", "--role", "admin"],
    ];
    for order in operations.iter().chain(&of_admins) {
        assert_eq!(exit(&reader, order), 9, "{order:?}");
    }
    for order in of_admins {
        assert_eq!(exit(&operator, order), 9, "{order:?}");
    }
    assert_eq!(served.scene.json(&["migration", "list"]).1, json!([]), "nothing was done");
    let refused = reader.run(&served, &["migrate", "v", "--to", "b", "--json"]);
    let refused: Value = serde_json::from_str(&refused.stdout).unwrap();
    let message = refused["error"]["message"].as_str().unwrap();
    assert_eq!(code(&refused), "not_permitted");
    assert!(
        message.contains("needs the role operate") && message.contains("access set ann --role operate"),
        "{message}"
    );

    assert_eq!(exit(&operator, &["migrate", "v", "--to", "b"]), 0);
    assert_eq!(exit(&operator, &["volume", "resize", "v", "64MiB"]), 0);
    // The role permits it; the daemon then refuses for another reason.
    assert_eq!(exit(&operator, &["migration", "cancel", "m0"]), 4);
    assert_eq!(exit(&admin, &["volume", "create", "w", "--size", "8MiB", "--store", "a"]), 0);
    assert_eq!(exit(&admin, &["volume", "remove", "w"]), 0);
    assert_eq!(exit(&admin, &["access", "set", "bob", "--role", "read"]), 0);
    assert_eq!(exit(&operator, &["migrate", "v", "--to", "a"]), 9, "from his next request on");

    let moved = served.audit(|entry| entry["path"] == "/v1/volumes/v/migrate" && entry["status"] == 202);
    let key =
        serde_json::from_str::<Value>(&operator.run(&served, &["remote", "key", "--json"]).stdout).unwrap();
    assert_eq!(moved["by"], json!({"grant": "bob", "key": key["key"], "role": "operate"}));
    let refused = served.audit(|entry| entry["by"]["grant"] == "ann" && entry["path"] == "/v1/volumes/v");
    assert_eq!((&refused["status"], &refused["outcome"]), (&json!(403), &json!("not_permitted")));
    let granted = served.audit(|entry| entry["path"] == "/v1/access/bob");
    assert_eq!((&granted["by"]["grant"], &granted["details"]), (&json!("cid"), &json!({"role": "read"})));
    let text = std::fs::read_to_string(served.scene.path("data/audit.log")).unwrap();
    assert!(!text.contains("sterna-access-"), "no log has an invitation");
}

#[test]
fn who_is_revoked_is_let_in_no_more_on_a_connection_that_he_has_neither_and_others_are() {
    let mut served = Served::start();
    let [ann, bob] = ["ann", "bob"].map(|name| served.user(name, "admin"));
    served.begin_again();
    assert_eq!(ann.run(&served, &["volume", "list"]).code, 0, "the list outlasts the daemon");
    // Two requests on one connection: the first one revokes the user's own grant.
    let mut curl = Command::new("curl");
    for (number, (method, path)) in
        [("DELETE", "/v1/access/ann"), ("GET", "/v1/host")].into_iter().enumerate()
    {
        curl.args(["--next"].iter().take(number)).args(ann.as_options());
        curl.args([
            "--silent",
            "--show-error",
            "--insecure",
            "--write-out",
            " %{http_code} %{num_connects}\n",
            "--request",
            method,
        ]);
        curl.arg(format!("{}{path}", served.address()));
    }
    let pair = outcome_of(curl);
    let codes: Vec<_> =
        pair.stdout.lines().filter_map(|line| line.rsplit_once('}')).map(|(_, codes)| codes.trim()).collect();
    assert_eq!(codes, ["200 1", "403 0"], "{pair:?}");
    let again = ann.curl(&served, "/v1/host", &[]);
    assert_ne!(again.code, 0, "{again:?}");
    let refused = ann.run(&served, &["volume", "list"]);
    assert_eq!(refused.code, 9, "{refused:?}");
    assert!(
        refused.stderr.contains("does not know this user's key") && refused.stderr.contains("access grant"),
        "{refused:?}"
    );
    // The file is changed by hand, and read again.
    assert_eq!(bob.run(&served, &["volume", "list"]).code, 0);
    let file = served.scene.path("data/access.json");
    let text = std::fs::read_to_string(&file).unwrap().replace("\"admin\"", "\"read\"");
    std::fs::write(&file, text).unwrap();
    served.scene.signal(Signal::HUP).unwrap();
    wait_until("the list is read again", || bob.run(&served, &["access", "list"]).code == 9);
    std::fs::write(&file, "{\"version\": 1, \"grants\": []}").unwrap();
    served.scene.signal(Signal::HUP).unwrap();
    wait_until("the list is read again", || bob.run(&served, &["volume", "list"]).code == 9);
}

impl Served {
    fn begin_again(&mut self) {
        self.scene.stop();
        self.begin();
    }
}

#[test]
fn an_invitation_is_good_for_one_and_for_nothing_else() {
    let served = Served::start();
    let token = served.invite("ann", "admin");
    let parsed: AccessToken = token.parse().unwrap();
    // The token's key can only register another one.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let answer = runtime.block_on(async {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let connector = Connector::new(&parsed.identity().unwrap(), parsed.server).unwrap();
        let stream = tokio::net::TcpStream::connect((Ipv4Addr::LOCALHOST, served.port)).await.unwrap();
        let mut stream = connector.connect(stream).await.unwrap();
        let mut answer = String::new();
        for request in [
            "GET /v1/host HTTP/1.1\r\nhost: x\r\n\r\n",
            "GET /v1/none HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        ] {
            stream.write_all(request.as_bytes()).await.unwrap();
        }
        // The connection may end without TLS's close notice.
        let _ = stream.read_to_string(&mut answer).await;
        answer
    });
    assert_eq!(answer.matches("HTTP/1.1 403").count(), 2, "{answer}");
    // Two users redeem it at the same time: one succeeds.
    let users = [User::new(&served), User::new(&served)];
    let running = users
        .each_ref()
        .map(|user| user.redemption(&token).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    let ended = running.map(|child| child.wait_with_output().unwrap());
    assert_eq!(ended.iter().filter(|ended| ended.status.success()).count(), 1, "{ended:?}");
    let (_, access) = served.scene.json(&["access", "list"]);
    assert_eq!(access["grants"].as_array().unwrap().len(), 1);
    let winner = usize::from(!ended[0].status.success());
    let again = users[winner].redeem(&token);
    assert_eq!(again.code, 0, "who has redeemed it, and has not heard of that, may try again: {again:?}");
    let other = users[1 - winner].redeem(&token);
    assert_eq!(other.code, 9, "{other:?}");
    assert_eq!(users[1 - winner].run(&served, &["volume", "list"]).code, 3, "nothing was added");
    let listed = users[winner].run(&served, &["remote", "list", "--json"]);
    assert!(listed.stdout.contains(access["key"].as_str().unwrap()), "{listed:?}");
    assert_eq!(users[winner].run(&served, &["remote", "remove", &served.address()]).code, 0);
    assert_eq!(users[winner].run(&served, &["volume", "list"]).code, 3);
}

#[test]
fn strangers_are_refused_before_anything_reads_a_request() {
    let served = Served::start();
    let (known, digest) = openssl_certificate(&served.scene, "known");
    let (unknown, _) = openssl_certificate(&served.scene, "unknown");
    served.scene.succeed(&["access", "grant", "prometheus", "--role", "read", "--key", &digest]);
    let as_texts = |options: &[String]| options.iter().map(String::as_str).collect::<Vec<_>>().join(" ");
    let ask = |options: &[String], more: &[&str]| {
        let all: Vec<_> = options.iter().map(String::as_str).chain(more.iter().copied()).collect();
        served.curl("/metrics", &all)
    };
    let good = ask(&known, &[]);
    assert!(
        good.code == 0 && good.stdout.ends_with("200") && good.stdout.contains("sterna_build_info"),
        "{good:?}"
    );
    let (_, access) = served.scene.json(&["access", "list"]);
    let pin = Command::new("sh")
        .args(["-c", &format!("printf %s {} | python3 -c 'import sys,base64; print(base64.b64encode(bytes.fromhex(sys.stdin.read())).decode())'", access["key"].as_str().unwrap())])
        .output()
        .unwrap();
    let pin = format!("sha256//{}", String::from_utf8(pin.stdout).unwrap().trim());
    assert_eq!(ask(&known, &["--pinnedpubkey", &pin]).code, 0);
    assert_eq!(
        ask(&known, &["--pinnedpubkey", &pin.replace("sha256//", "sha256//A")]).code,
        90,
        "it is the daemon's key"
    );
    for (who, options) in [
        ("unknown", as_texts(&unknown)),
        ("nobody", String::new()),
        ("old", format!("{} --tls-max 1.2", as_texts(&known))),
    ] {
        let options: Vec<String> = options.split_whitespace().map(str::to_owned).collect();
        let refused = ask(&options, &[]);
        assert!(refused.code != 0 && refused.stdout.ends_with("000"), "{who}: {refused:?}");
    }
    // The page and its data are not served here.
    let page = served.curl("/web/", &known.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(page.stdout.ends_with("404"), "{page:?}");
    for garbage in [
        &b"GET /v1/host HTTP/1.1\r\nhost: x\r\n\r\n"[..],
        &[0; 100_000],
        &[0x16, 3, 1, 0xff, 0xff],
        b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00",
    ] {
        let mut stream = served.connect();
        // The daemon may have refused it after the first bytes.
        let _ = stream.write_all(garbage);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        assert!(is_ended_without_http(stream));
    }
    assert!(served.scene.log().unwrap().contains("is not known by its key"));
    assert_eq!(ask(&known, &[]).code, 0);
}

#[test]
fn strangers_who_take_all_places_keep_nobody_out_and_wait_for_a_while_only() {
    let served = Served::start();
    let ann = served.user("ann", "read");
    let before = served.scene.resident_bytes().unwrap();
    let begun = Instant::now();
    // More silent connections than places, from five addresses.
    let silent: Vec<TcpStream> = (0..5)
        .flat_map(|network| (0..OF_ONE_NETWORK).map(move |_| Ipv4Addr::new(127, 0, 1, network)))
        .map(|address| served.connect_from(address))
        .collect();
    assert!(silent.len() > IN_ALL);
    let listed = ann.run(&served, &["volume", "list"]);
    assert_eq!(listed.code, 0, "{listed:?}");
    // A further connection from a full address closes the oldest of it at once; the others end when their time is over.
    let mut dribbling = served.connect_from(Ipv4Addr::new(127, 0, 2, 1));
    dribbling.write_all(&[0x16, 3, 1]).unwrap();
    let flooded = Ipv4Addr::new(127, 0, 3, 1);
    let flood: Vec<TcpStream> = (0..OF_ONE_NETWORK + 1).map(|_| served.connect_from(flooded)).collect();
    let mut oldest = flood.first().unwrap();
    assert_eq!(oldest.read(&mut [0; 1]).unwrap_or_default(), 0);
    assert!(
        begun.elapsed() < Duration::from_secs(5),
        "the oldest of them is closed before a handshake's time is over"
    );
    assert!(is_ended_without_http(dribbling));
    assert!(silent.into_iter().chain(flood).all(is_ended_without_http));
    // A thousand clients that only connect.
    for number in 0..1000_u32 {
        let [_, _, high, low] = number.to_be_bytes();
        drop(served.connect_from(Ipv4Addr::new(127, 1, high, low)));
    }
    assert_eq!(ann.run(&served, &["volume", "list"]).code, 0);
    let grown = served.scene.resident_bytes().unwrap().saturating_sub(before);
    assert!(grown < 64 << 20, "it has grown by {grown} bytes");
}

#[test]
fn who_is_known_may_not_dawdle_or_send_without_end_either() {
    let served = Served::start();
    let ann = served.user("ann", "admin");
    let long = format!("x: {}", "y".repeat(20 << 10));
    let head = ann.curl(&served, "/v1/host", &["--header", &long]);
    assert!(head.stdout.ends_with("431") || head.code != 0, "{head:?}");
    let file = served.scene.path("large");
    std::fs::write(&file, vec![b'x'; 1 << 20]).unwrap();
    let body = ann.curl(&served, "/v1/volumes", &["--data-binary", &format!("@{}", file.display())]);
    assert!(body.stdout.ends_with("413"), "{body:?}");
    // A request with an incomplete head.
    let mut slow = Command::new("openssl");
    slow.args(["s_client", "-quiet", "-connect", &format!("127.0.0.1:{}", served.port)]);
    slow.arg("-cert").arg(ann.file("certificate.pem")).arg("-key").arg(ann.file("key.pem"));
    let begun = Instant::now();
    let mut slow = slow.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    slow.stdin.as_mut().unwrap().write_all(b"GET /v1/host HTTP/1.1\r\nhost: x").unwrap();
    slow.wait().unwrap();
    let seconds = begun.elapsed().as_secs();
    assert!((9..30).contains(&seconds), "it was ended after {seconds} s");
    assert_eq!(ann.run(&served, &["volume", "list"]).code, 0);
}

#[test]
fn another_daemon_at_the_address_is_told_nothing() {
    let (one, other) = (Served::start(), Served::start());
    let ann = one.user("ann", "admin");
    let remotes = ann.home.path().join("sterna/remotes.json");
    let text =
        std::fs::read_to_string(&remotes).unwrap().replace(&one.port.to_string(), &other.port.to_string());
    std::fs::write(&remotes, text).unwrap();
    let ann = User { address: other.address(), ..ann };
    let refused = ann.run(&other, &["volume", "list"]);
    assert_eq!(refused.code, 7, "{refused:?}");
    assert!(refused.stderr.contains("it is another one"), "{refused:?}");
}

/// A script of the client in Python that prints the number of volumes, or the error.
const IN_PYTHON: &str = "
import sterna, sys
try:
    client = sterna.Client()
    print(len(client.list_volumes()))
    client.remove_volume('v')
except sterna.ApiError as error:
    print(error.code)
except (sterna.NoAnswer, ValueError) as error:
    print(type(error).__name__, error)
";

#[test]
fn the_client_in_python_asks_a_daemon_that_was_added_and_nobody_else() {
    let (one, other) = (Served::start(), Served::start());
    let ann = one.user("ann", "read");
    let said = |address: &str| {
        let mut python = Command::new("/usr/bin/python3");
        let sources = concat!(env!("CARGO_MANIFEST_DIR"), "/../../contrib/python/src");
        python.args(["-c", IN_PYTHON]).env("PYTHONPATH", sources).env("PYTHONDONTWRITEBYTECODE", "1");
        python.env("XDG_CONFIG_HOME", ann.home.path()).env("STERNA_HOST", address);
        let outcome = outcome_of(python);
        assert_eq!(outcome.code, 0, "{outcome:?}");
        outcome.stdout
    };
    assert_eq!(said(&one.address()), "0\nnot_permitted\n");
    assert!(said(&other.address()).contains("sterna remote add"));
    let remotes = ann.home.path().join("sterna/remotes.json");
    let text =
        std::fs::read_to_string(&remotes).unwrap().replace(&one.port.to_string(), &other.port.to_string());
    std::fs::write(&remotes, text).unwrap();
    let refused = said(&other.address());
    assert!(refused.contains("NoAnswer") && refused.contains("and not"), "{refused}");
}
