//! Tests of orders on the page: the buttons of a browser that has signed in, and whom else the port refuses.

use std::io::Write as _;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;

use anyhow::{Context as _, ensure};
use api::{Migration, MigrationState, PageLink};
use e2e::browser::Browser;
use e2e::http::{self, Answer};
use e2e::remote_user::RemoteUser;
use e2e::{guest, play_pair, until};
use serde_json::Value;

use crate::page_host::play;

const DISK_BYTES: u64 = 128 << 20;

/// A client of the page's port that sends what it likes.
struct Client {
    address: SocketAddr,
    origin: Option<String>,
    token: Option<String>,
}

impl Client {
    /// Returns a client that seems to be the page, without a token.
    fn new(address: SocketAddr) -> Self {
        Self { address, origin: Some(format!("http://{address}")), token: None }
    }

    /// Returns a client that has signed in by a link.
    fn signed_in(address: SocketAddr, link: &PageLink) -> anyhow::Result<Self> {
        let mut client = Self::new(address);
        let answer = client.ask("POST", "/web/session", &key_of(link))?;
        ensure!(answer.status == 200, "{}", answer.text);
        let session: Value = serde_json::from_str(answer.body())?;
        client.token = session["token"].as_str().map(str::to_owned);
        Ok(client)
    }

    fn ask(&self, method: &str, path: &str, body: &str) -> anyhow::Result<Answer> {
        let mut head = format!("{method} {path} HTTP/1.1\r\nHost: {}", self.address);
        if let Some(origin) = &self.origin {
            head += &format!("\r\nOrigin: {origin}");
        }
        if let Some(token) = &self.token {
            head += &format!("\r\nAuthorization: Bearer {token}");
        }
        http::ask(TcpStream::connect(self.address)?, http::request(&head, body).as_bytes())
    }

    fn ensure_refused(&self, method: &str, path: &str, body: &str, words: &str) -> anyhow::Result<()> {
        let answer = self.ask(method, path, body)?;
        ensure!(answer.status == 403 && answer.text.contains(words), "{method} {path}: {}", answer.text);
        Ok(())
    }
}

fn key_of(link: &PageLink) -> String {
    let key = link.url.split("#sign-in=").nth(1).unwrap_or_default();
    serde_json::json!({ "key": key }).to_string()
}

const ORDERS: [(&str, &str); 6] = [
    ("/web/v1/volumes/v/plan", r#"{"to":"b"}"#),
    ("/web/v1/volumes/v/migrate", r#"{"to":"b"}"#),
    ("/web/v1/migrations/m1/pause", ""),
    ("/web/v1/migrations/m1/resume", ""),
    ("/web/v1/migrations/m1/cancel", ""),
    ("/web/v1/migrations/m1/retry", ""),
];

#[test]
fn without_a_token_or_from_another_page_the_port_takes_no_order() {
    play("", |scene, address| {
        scene.create_volume(1 << 20)?;
        let link: PageLink = scene.ask(&["page"])?;
        ensure!(link.role == api::Role::Operate && link.url.starts_with(&format!("http://{address}/web/#")));
        // The key is no token, and another page cannot use it.
        let mut stranger = Client::new(address);
        for (path, body) in ORDERS {
            stranger.ensure_refused("POST", path, body, "not signed in")?;
        }
        stranger.ensure_refused("GET", "/web/session", "", "not signed in")?;
        stranger.ensure_refused("POST", "/web/session", r#"{"key":"00"}"#, "sterna page again")?;
        stranger.token = link.url.split("#sign-in=").nth(1).map(str::to_owned);
        stranger.ensure_refused("POST", ORDERS[1].0, ORDERS[1].1, "not signed in")?;
        for origin in [None, Some("null"), Some("http://evil.example"), Some("http://127.0.0.1:1")] {
            stranger.origin = origin.map(str::to_owned);
            stranger.ensure_refused("POST", "/web/session", &key_of(&link), "only the page itself")?;
        }
        let mut page = Client::signed_in(address, &link)?;
        Client::new(address).ensure_refused("POST", "/web/session", &key_of(&link), "used already")?;
        for origin in [None, Some("null"), Some("http://evil.example"), Some("http://127.0.0.1:1")] {
            page.origin = origin.map(str::to_owned);
            for (path, body) in ORDERS {
                page.ensure_refused("POST", path, body, "only the page itself")?;
            }
        }
        let migrations: Vec<Migration> = scene.ask(&["migration", "list"])?;
        ensure!(migrations.is_empty(), "{migrations:?}");
        page.origin = Some(format!("http://{address}"));
        // Nothing else of the API is at the port, and none of this is at the API's socket.
        for (method, path) in [
            ("DELETE", "/web/v1/volumes/v"),
            ("POST", "/web/v1/volumes"),
            ("POST", "/web/v1/volumes/v/promote"),
            ("POST", "/web/v1/page-links"),
            ("POST", "/v1/volumes/v/migrate"),
            ("GET", "/web/v1/migrations/m1/pause"),
        ] {
            let answer = page.ask(method, path, r#"{"to":"b"}"#)?;
            ensure!(matches!(answer.status, 404 | 405), "{method} {path}: {}", answer.text);
        }
        let head = format!(
            "POST /web/v1/volumes/v/migrate HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {}",
            page.token.as_deref().unwrap_or_default()
        );
        let socket = UnixStream::connect(scene.path("run/api.sock")).context("reach the API")?;
        let answer = http::ask(socket, http::request(&head, r#"{"to":"b"}"#).as_bytes())?;
        ensure!(answer.status == 404, "{}", answer.text);
        // The same order is accepted from the page, and logged with the user who made the link.
        let answer = page.ask("POST", ORDERS[0].0, ORDERS[0].1)?;
        ensure!(answer.status == 200 && answer.text.contains("can_begin"), "{}", answer.text);
        let answer = page.ask("POST", ORDERS[1].0, ORDERS[1].1)?;
        ensure!(answer.status == 202, "{}", answer.text);
        until("the audit log has the order", || {
            let log = std::fs::read_to_string(scene.path("data/audit.log"))?;
            let mut entries = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
            let uid = rustix::process::getuid().as_raw();
            let is_it = |entry: &Value| entry["path"] == ORDERS[1].0 && entry["by"]["uid"] == uid;
            Ok(entries.any(|entry| is_it(&entry)).then_some(()))
        })?;
        // A restart ends the token, and so does signing out.
        let link: PageLink = scene.ask(&["page"])?;
        let other = Client::signed_in(address, &link)?;
        ensure!(other.ask("GET", "/web/session", "")?.status == 200);
        ensure!(other.ask("DELETE", "/web/session", "")?.status == 204);
        other.ensure_refused("GET", "/web/session", "", "not signed in")?;
        scene.stop()?;
        scene.start()?;
        until("the page's port answers", || Ok(TcpStream::connect(address).is_ok().then_some(())))?;
        page.ensure_refused("POST", ORDERS[1].0, ORDERS[1].1, "not signed in")
    });
}

#[test]
fn a_browser_has_the_rights_of_the_key_that_signed_it_in_and_loses_them_with_it() {
    let played = testbed::own_address().map(|tls| {
        play(&format!("[api_tls]\nlisten = '{tls}'\n"), |scene, address| {
            ensure!(scene.wait_for_log("the API is served over TLS")?);
            scene.create_volume(1 << 20)?;
            let ann = RemoteUser::admit(scene, tls, "ann", "read")?;
            // A reader gets no link.
            let refused = ann.run(scene, &["page"])?;
            ensure!(
                refused.code == 9 && refused.stderr.contains("access set ann --role operate"),
                "{refused:?}"
            );
            scene.sterna(["access", "set", "ann", "--role", "admin"])?.success()?;
            let told = ann.run(scene, &["page", "--json"])?.success()?;
            let link: PageLink = serde_json::from_str(&told)?;
            ensure!(link.role == api::Role::Operate, "a page never has more rights: {link:?}");
            let page = Client::signed_in(address, &link)?;
            let answer = page.ask("POST", ORDERS[1].0, ORDERS[1].1)?;
            ensure!(answer.status == 202, "{}", answer.text);
            scene.sterna(["access", "set", "ann", "--role", "read"])?.success()?;
            ensure!(page.ask("POST", ORDERS[0].0, r#"{"to":"a"}"#)?.status == 200, "a reader may look");
            page.ensure_refused("POST", ORDERS[1].0, r#"{"to":"a"}"#, "has the role read")?;
            scene.sterna(["access", "revoke", "ann"])?.success()?;
            page.ensure_refused("POST", ORDERS[0].0, ORDERS[0].1, "not signed in")
        });
    });
    assert!(played.is_ok());
}

#[test]
fn a_browser_that_has_signed_in_gives_orders_and_no_other_does() {
    const BUTTONS: &str =
        "[...document.querySelectorAll('.orders button')].filter((button) => button.offsetParent)";
    let press = |name: &str| {
        format!(
            "(() => {{ const found = [...document.querySelectorAll('button')].find((button) => button.offsetParent && \
             !button.disabled && (button.ariaLabel === {name:?} || button.innerText === {name:?})); found?.click(); return Boolean(found) }})()"
        )
    };
    play("", |scene, address| {
        scene.create_volume(DISK_BYTES)?;
        let working = guest::start(&scene.export()?, DISK_BYTES / 2)?;
        let mut browser = Browser::start()?;
        browser.open(&format!("http://{address}/"))?;
        browser.until(
            "the volume is there",
            "document.querySelector('#volume-table tbody th')?.innerText === 'v'",
        )?;
        let seen: usize = browser.evaluate(&format!("{BUTTONS}.length"))?;
        ensure!(seen == 0, "a viewer has {seen} buttons");
        let link: PageLink = scene.ask(&["page"])?;
        browser.open(&link.url)?;
        browser
            .until("it is signed in", "document.getElementById('rights').innerText.includes('operate')")?;
        let is_in_address: bool = browser.evaluate("location.href.includes('sign-in')")?;
        ensure!(!is_in_address, "the key stays in the browser's history");
        browser.until("it can migrate", &press("Migrate v"))?;
        // An order that would be refused cannot be given.
        let write = |to: &str| {
            format!(
                "(() => {{ const to = document.querySelector('dialog input'); to.value = {to:?}; to.dispatchEvent(new Event('input')); return true }})()"
            )
        };
        browser.evaluate::<bool>(&write("nowhere"))?;
        browser.until("it can be checked", &press("Show what would happen"))?;
        browser.until(
            "the obstacle is named",
            "document.querySelector('dialog .plan').innerText.includes('nowhere')",
        )?;
        let can: bool = browser.evaluate(&press("Migrate"))?;
        ensure!(!can, "what is refused can be ordered");
        browser.evaluate::<bool>(&write("b"))?;
        browser.evaluate::<bool>("(() => { const rate = document.querySelector('dialog input[type=number]'); rate.value = 4; rate.dispatchEvent(new Event('input')); return true })()")?;
        browser.until("it can be checked", &press("Show what would happen"))?;
        browser.until(
            "the dry run is shown",
            "document.querySelector('dialog .plan').innerText.includes('v would move')",
        )?;
        ensure!(scene.ask::<Vec<Migration>>(&["migration", "list"])?.is_empty(), "the dry run has begun it");
        if let Some(folder) = std::env::var_os("STERNA_PICTURES") {
            browser.take_picture(&std::path::Path::new(&folder).join("dialog.png"), 1300)?;
        }
        browser.until("it can begin", &press("Migrate"))?;
        let state = |wanted: MigrationState| {
            until("the migration is in its state", || {
                let all: Vec<Migration> = scene.ask(&["migration", "list"])?;
                Ok(all.into_iter().find(|migration| migration.state == wanted))
            })
        };
        let begun = state(MigrationState::Running)?;
        browser.until("it can pause", &press(&format!("Pause migration {}", begun.id)))?;
        state(MigrationState::Paused)?;
        if let Some(folder) = std::env::var_os("STERNA_PICTURES") {
            browser.until(
                "it is paused",
                "document.querySelector('.card.migration .pill').innerText === 'paused'",
            )?;
            browser.take_picture(&std::path::Path::new(&folder).join("orders.png"), 1300)?;
        }
        browser.until("it can resume", &press(&format!("Resume migration {}", begun.id)))?;
        state(MigrationState::Running)?;
        browser.until("it can cancel", &press(&format!("Cancel migration {}", begun.id)))?;
        browser.until("it confirms", &press("Cancel the migration"))?;
        state(MigrationState::Cancelled)?;
        browser.until("it can repeat", &press(&format!("Retry migration {}", begun.id)))?;
        let again = state(MigrationState::Running)?;
        until("it names what it repeats", || {
            Ok((scene.migration(&again.id)?.retry_of.as_deref() == Some(&begun.id)).then_some(()))
        })?;
        scene.sterna(["migration", "set", &again.id, "--bandwidth", "none"])?.success()?;
        scene.wait_for_migration(&again.id)?;
        guest::stop_and_verify(working)?;
        browser.evaluate::<bool>("location.reload(), true")?;
        browser.until("a reload keeps it", &format!("{BUTTONS}.length > 0"))?;
        browser.until("it signs out", &press("Sign out"))?;
        browser.until("the buttons are gone", &format!("{BUTTONS}.length === 0"))?;
        // A refused check is reported by the browser itself.
        let complaints = browser.take_complaints()?;
        ensure!(
            complaints.iter().all(|text| !text.contains("policy") && !text.contains("Error")),
            "{complaints:#?}"
        );
        Ok(())
    });
}

#[test]
fn the_page_of_the_target_does_not_repeat_what_another_host_has_ordered() {
    play_pair(|pair| {
        let address = testbed::own_address()?;
        let mut configuration =
            std::fs::OpenOptions::new().append(true).open(pair.beta.folder().configuration())?;
        write!(configuration, "[web]\nlisten = '{address}'\n")?;
        pair.beta.stop()?;
        pair.beta.start()?;
        pair.alpha.create_volume(DISK_BYTES)?;
        let working = guest::start(&pair.alpha.export()?, DISK_BYTES / 2)?;
        let begun = pair.alpha.begin_to_migrate("beta:a", Some("4KiB/s"))?;
        until("it arrives", || Ok((pair.alpha.migration(&begun.id)?.bytes_copied > 0).then_some(())))?;
        pair.alpha.sterna(["migration", "cancel", &begun.id])?.success()?;
        pair.alpha.wait_for_migration(&begun.id)?;
        let link: PageLink = pair.beta.ask(&["page"])?;
        let mut browser = Browser::start()?;
        until("the page's port answers", || Ok(browser.open(&link.url).is_ok().then_some(())))?;
        let outcome = "document.querySelector('#history-table tbody')?.innerText ?? ''";
        browser.until("it is history", &format!("({outcome}).includes('cancelled')"))?;
        browser
            .until("it is signed in", "document.getElementById('rights').innerText.includes('operate')")?;
        let told: String = browser.evaluate(outcome)?;
        ensure!(told.contains("other host") && !told.to_lowercase().contains("retry"), "{told}");
        guest::stop_and_verify(working).map(drop)
    });
}
