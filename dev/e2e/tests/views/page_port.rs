//! Tests of the page's port by programs: refusals, secrets, and costs.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use api::Migration;
use e2e::browser::Browser;
use e2e::http::{self, Answer};
use e2e::{LinkState, host, play_pair, until};

use crate::page_host::play;

/// A VM with a secret in its command.
const DEFINITION: &str = r#"
command = ["qemu-system-x86_64", "-M", "pc-q35-7.2", "-m", "64", "-name", "{name}", "-display", "none", "-nodefaults",
    "-smbios", "type=1,serial=SECRET", "-qmp", "unix:{qmp},server=on,wait=off",
    "-blockdev", "driver=nbd,node-name=root,server.type=unix,server.path={disk:root},export={export:root},reconnect-delay=60",
    "-device", "virtio-blk-pci,drive=root"]
[disks]
root = "v"
"#;

fn say(stream: impl Read + Write, head: &str, body: &str) -> anyhow::Result<Answer> {
    http::ask(stream, http::request(head, body).as_bytes())
}

/// Sends a request to the page's port, as a browser of this host.
fn ask(address: SocketAddr, method: &str, path: &str) -> anyhow::Result<Answer> {
    say(TcpStream::connect(address)?, &format!("{method} {path} HTTP/1.1\r\nHost: {address}"), "")
}

#[test]
fn the_page_can_only_be_read_and_has_no_secrets() {
    play("", |scene, address| {
        let secret = "QnVycm93aW5nIG93bA";
        let definition = scene.path("w.toml");
        scene.create_volume(1 << 20)?;
        std::fs::write(&definition, DEFINITION.replace("SECRET", secret))?;
        scene.sterna(["vm", "add", "w", "--definition", &definition.display().to_string()])?.success()?;
        // Users of the API get all of it.
        ensure!(scene.sterna(["vm", "show", "w", "--json"])?.success()?.contains(secret));
        until("the VM is on the page", || {
            let answer = ask(address, "GET", "/web/overview")?;
            ensure!(!answer.text.contains(secret), "the definition of a VM is told: {}", answer.text);
            Ok(answer.text.contains("\"volumes\":[\"v\"]").then_some(()))
        })?;
        for path in ["/web/", "/web/page.js", "/web/overview", "/", "/web"] {
            let answer = ask(address, "GET", path)?;
            ensure!(matches!(answer.status, 200 | 308), "{path}: {}", answer.text);
            for header in [
                "x-content-type-options: nosniff",
                "x-frame-options: DENY",
                "cross-origin-resource-policy: same-origin",
            ] {
                ensure!(answer.text.contains(header), "{path} lacks {header}: {}", answer.text);
            }
            ensure!(!answer.text.contains("access-control"), "{}", answer.text);
        }
        for path in [
            "/v1/volumes",
            "/v1/vms",
            "/v1/hosts",
            "/metrics",
            "/v1/openapi.json",
            "/web/../v1/volumes",
            "/web/%2e%2e/v1/volumes",
            "/web/x",
        ] {
            ensure!(ask(address, "GET", path)?.status == 404, "{path}");
        }
        for method in ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "BREW"] {
            for path in ["/web/", "/web/overview", "/v1/volumes/v", "/v1/volumes"] {
                let answer = ask(address, method, path)?;
                ensure!(matches!(answer.status, 404 | 405), "{method} {path}: {}", answer.text);
            }
        }
        // A foreign DNS name may point here.
        for host in ["evil.example", "localhost.evil.example", "192.0.2.1", ""] {
            let head = format!("GET /web/overview HTTP/1.1\r\nHost: {host}");
            let answer = say(TcpStream::connect(address)?, &head, "")?;
            ensure!(
                answer.status >= 400 && !answer.text.contains("taken_unix_ms"),
                "{host}: {}",
                answer.text
            );
        }
        let head = "GET http://evil.example/web/overview HTTP/1.1\r\nHost: localhost";
        ensure!(say(TcpStream::connect(address)?, head, "")?.status == 403);
        // The API's socket serves the page as well, and refuses orders of a browser for a page.
        let socket = || UnixStream::connect(scene.path("run/api.sock")).context("reach the API");
        ensure!(say(socket()?, "GET /web/ HTTP/1.1\r\nHost: sterna", "")?.status == 200);
        ensure!(say(socket()?, "GET /web/overview HTTP/1.1\r\nHost: evil.example", "")?.status == 403);
        let order = "DELETE /v1/volumes/v HTTP/1.1\r\nHost: localhost:7424\r\nOrigin: http://evil.example";
        let refused = say(socket()?, order, "")?;
        ensure!(refused.status == 403 && refused.text.contains("not_permitted"), "{}", refused.text);
        ensure!(scene.volume().is_ok());
        ensure!(std::fs::read_to_string(scene.path("data/audit.log"))?.contains("not_permitted"));
        Ok(())
    });
}

#[test]
fn a_ticket_is_told_to_whoever_may_use_the_api_and_not_on_the_page() {
    play_pair(|pair| {
        pair.alpha.create_volume(1 << 20)?;
        let page = testbed::own_address()?;
        pair.alpha.stop()?;
        pair.alpha.configure(&format!("[web]\nlisten = '{page}'\n"))?;
        pair.alpha.start_with(&[("STERNA_FAIL_POINT", "after-released")])?;
        // It may be killed before it has answered.
        pair.alpha.sterna(["migrate", "v", "--to", "beta:a", "--detach"])?;
        ensure!(pair.alpha.wait_for_end()? == 137, "the daemon is to be killed at its commit point");
        pair.link.set(LinkState::Cut);
        pair.alpha.start()?;
        let all: Vec<Migration> = pair.alpha.ask(&["migration", "list"])?;
        let id = &all.first().context("the migration is in the journal")?.id;
        let ticket = until("the source prints its ticket", || Ok(pair.alpha.migration(id)?.ticket))?;
        until("the page's port answers", || Ok(TcpStream::connect(page).is_ok().then_some(())))?;
        for path in [
            "/web/overview",
            &format!("/web/migrations/{id}/history"),
            &format!("/web/migrations/{id}/report"),
        ] {
            let answer = ask(page, "GET", path)?;
            ensure!(answer.status == 200 && answer.text.contains(id.as_str()), "{path}: {}", answer.text);
            ensure!(!answer.text.contains(&ticket), "{path} tells the ticket");
        }
        // The same holds for commands whose output may go to a log.
        let told = pair.alpha.sterna(["top", "--json"])?.success()?;
        ensure!(told.contains(id.as_str()) && !told.contains(&ticket), "{told}");
        Ok(())
    });
}

#[test]
fn garbage_and_dawdlers_on_the_pages_port_harm_nobody() {
    play("", |scene, address| {
        scene.create_volume(1 << 20)?;
        let mut idle = Vec::new();
        for _ in 0..300 {
            idle.push(TcpStream::connect(address)?);
        }
        for garbage in [
            "\0\0\0\0",
            "GET / HTTP/9.9\r\n\r\n",
            "GET\r\n\r\n",
            "\r\n\r\n\r\n",
            "GET /web/overview HTTP/1.1\r\n\r\n",
        ] {
            let mut stream = TcpStream::connect(address)?;
            stream.write_all(garbage.as_bytes())?;
            let mut answer = Vec::new();
            // The connection may end without an answer.
            let _ = stream.take(4096).read_to_end(&mut answer);
            ensure!(!String::from_utf8_lossy(&answer).contains("taken_unix_ms"));
        }
        ensure!(ask(address, "GET", "/web/overview")?.status == 200);
        ensure!(scene.volume().is_ok());
        scene.ensure_alive()
    });
}

#[test]
fn a_port_that_somebody_has_is_waited_for_and_one_beyond_this_host_is_refused() {
    let played = host().and_then(|mut scene| {
        let taken = std::net::TcpListener::bind(testbed::own_address()?)?;
        let address = taken.local_addr()?;
        scene.configure(&format!("[web]\nlisten = '{address}'\n"))?;
        scene.start()?;
        ensure!(scene.wait_for_log("the page is not served yet")?);
        scene.create_volume(1 << 20)?;
        drop(taken);
        until("the page is served", || {
            // A child that another test has just started has inherited the port until its exec.
            let answered = ask(address, "GET", "/web/").is_ok_and(|answer| answer.status == 200);
            Ok(answered.then_some(()))
        })?;
        scene.stop()?;
        scene.folder().set_configuration("[web]\nlisten = '0.0.0.0:7424'\n")?;
        let checked =
            scene.sterna(["config", "check", &scene.folder().configuration().display().to_string()])?;
        ensure!(
            checked.code != 0 && (checked.stdout + &checked.stderr).contains("127.0.0.1"),
            "it is not refused"
        );
        Ok(())
    });
    if let Err(error) = played {
        panic!("{error:#}");
    }
}

#[test]
fn two_hundred_volumes_are_on_the_page_and_are_looked_at_once_a_second_however_many_ask() {
    const VOLUMES: usize = 200;
    const QUESTIONS: usize = 100;
    play("", |scene, address| {
        for number in 0..VOLUMES {
            let name = format!("volume-{number:03}");
            scene.sterna(["volume", "create", &name, "--size", "1MiB", "--store", "a"])?.success()?;
        }
        let begun = Instant::now();
        let mut looks = BTreeSet::new();
        let mut longest = 0;
        for _ in 0..QUESTIONS {
            let answer = ask(address, "GET", "/web/overview")?;
            let json = answer.body();
            let overview: api::Overview = serde_json::from_str(json)?;
            ensure!(overview.volumes.len() == VOLUMES);
            longest = longest.max(json.len());
            looks.insert(overview.taken_unix_ms);
        }
        let most = begun.elapsed().as_secs_f64() / 0.9 + 2.0;
        ensure!(looks.len() as f64 <= most, "{} looks in {:?}", looks.len(), begun.elapsed());
        // Half a KiB for each volume is a small answer.
        ensure!(longest < VOLUMES * 700, "{longest} bytes");
        let mut browser = Browser::start()?;
        browser.open(&format!("http://{address}/"))?;
        let rows = "document.querySelectorAll('#volume-table tbody tr').length";
        browser.until("all of them are shown", &format!("{rows} === {VOLUMES}"))?;
        browser.evaluate::<bool>("document.getElementById('filter').focus(), true")?;
        browser.type_text("volume-199")?;
        browser.until("the filter finds one", &format!("{rows} === 1"))?;
        // The page sends few requests.
        let asked = "performance.getEntriesByType('resource').filter((entry) => entry.name.endsWith('/overview')).length";
        browser.until("it has asked a few times", &format!("{asked} >= 4"))?;
        let (asked, seconds): (f64, f64) =
            browser.evaluate(&format!("[{asked}, performance.now() / 1000]"))?;
        ensure!(asked <= seconds + 1.0, "{asked} questions in {seconds} s");
        ensure!(browser.take_complaints()?.is_empty());
        Ok(())
    });
}
