//! Makes the pictures of the documents: two paired hosts with busy guests and migrations under way.
//!
//! ```text
//!   fio ──NBD──► rack3-a ──links──► rack3-b
//!                   └─► the page, a report, sterna top ──► Chromium ──► PNG
//! ```
//! A terminal is drawn as a page, with tmux's characters and colours.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Context as _;
use api::Migration;
use testbed::program::Running;
use testbed::{Host, Program, own_address, until};

use crate::browser::{Browser, Colours};
use crate::host;
use crate::program;
use crate::terminal::Terminal;

/// The volumes in the pictures, with size and filled part in MiB, and requests a second of their guests.
const VOLUMES: [(&str, u32, u32, u32); 7] = [
    ("web1", 2048, 900, 420),
    ("db-data", 1024, 600, 260),
    ("db-log", 512, 128, 180),
    ("mail", 4096, 200, 45),
    ("build-7", 1024, 64, 0),
    ("scratch", 256, 16, 0),
    ("archive-2024", 8192, 32, 0),
];
/// A VM without a system, which waits for a boot device.
const IDLE_VM: &str = r#"
command = ["qemu-system-x86_64", "-M", "pc-q35-7.2", "-m", "128", "-name", "{name}", "-display", "none", "-nodefaults",
    "-qmp", "unix:{qmp},server=on,wait=off",
    "-blockdev", "driver=nbd,node-name=root,server.type=unix,server.path={disk:root},export={export:root},reconnect-delay=60",
    "-device", "virtio-blk-pci,drive=root"]
[disks]
root = "build-7"
"#;
/// Number of overviews in a picture, enough for visible lines.
const LOOKS: u32 = 45;
const PAGE_HEIGHT: u32 = 1300;
const REPORT_HEIGHT: u32 = 965;
/// Rate of the migration whose report is shown.
const REPORTED_RATE: &str = "120MiB/s";
/// Recorded time after a migration that is shown.
const RECORDED_AFTER_S: f64 = 2.0;

/// Makes all pictures of the documents.
///
/// # Errors
/// If a part of a picture does not appear.
pub fn make(folder: &Path) -> anyhow::Result<()> {
    let (mut alpha, mut beta) = (host()?, host()?);
    let page = own_address()?;
    begin(&mut alpha, "rack3-a", &["fast", "large", "archive"], &format!("[web]\nlisten = '{page}'\n"))?;
    begin(&mut beta, "rack3-b", &["fast"], "")?;
    let invitation: api::Invitation = beta.ask(&["host", "invite", "--allow-machines"])?;
    alpha
        .sterna(["host", "join", &invitation.addresses[0], &invitation.token, "--allow-machines"])?
        .success()?;
    let guests = make_volumes(&alpha)?;
    let definition = alpha.path("build.toml");
    std::fs::write(&definition, IDLE_VM).context("write the definition of a VM")?;
    alpha.sterna(["vm", "add", "build", "--definition", &definition.display().to_string()])?.success()?;
    alpha.sterna(["vm", "start", "build"])?.success()?;
    make_history(&alpha)?;

    let mut browser = Browser::start()?;
    let url = format!("http://{page}/web/");
    until("the page's port answers", || Ok(browser.open(&url).is_ok().then_some(())))?;
    let terminal = show_top(&alpha)?;
    begin_to_move(&alpha, "web1", "large", "14MiB/s")?;
    begin_to_move(&alpha, "db-data", "rack3-b:fast", "9MiB/s")?;
    let looks = format!(
        "(document.querySelector('.tile .line').getAttribute('d').match(/[ML]/g) ?? []).length >= {LOOKS} && \
         document.querySelectorAll('.card.migration').length === 2"
    );
    browser.until("there is a course to be seen", &looks)?;
    browser.prefer(Colours::Light)?;
    browser.take_picture(&folder.join("page.png"), PAGE_HEIGHT)?;
    browser.prefer(Colours::Dark)?;
    browser.take_picture(&folder.join("page-dark.png"), u32::MAX)?;
    let screen = terminal.coloured_screen()?;
    let moved = move_home(&alpha)?;
    drop(guests);
    take_picture_of_report(&mut browser, &alpha, &moved, folder)?;
    browser.resize(1000, 400)?;
    let drawn = alpha.path("top.html");
    std::fs::write(&drawn, terminal_page(&screen)).context("write the page of a terminal")?;
    browser.open(&format!("file://{}", drawn.display()))?;
    browser.until("the terminal is drawn", "document.querySelector('pre')")?;
    browser.take_picture(&folder.join("top.png"), REPORT_HEIGHT)?;
    alpha.sterna(["vm", "stop", "build", "--now"])?.success().map(drop)
}

/// Starts a daemon with these stores.
fn begin(host: &mut Host, name: &str, stores: &[&str], more: &str) -> anyhow::Result<()> {
    let address = own_address()?;
    let mut text = format!("data_dir = '{}'\napi = '{}'\n", host.path("data").display(), host.address()?);
    for store in stores {
        let path = host.path(store);
        std::fs::create_dir_all(&path).context("make a store")?;
        write!(text, "[stores.{store}]\npath = '{}'\n", path.display())?;
    }
    write!(
        text,
        "[hosts]\nlisten = ['{address}']\nlinks = [{{ address = '{address}', speed_mbit = 10000 }}]\n{more}"
    )?;
    std::fs::write(host.folder().configuration(), text).context("write the configuration")?;
    host.start()?;
    host.sterna(["host", "init", "--name", name])?.success().map(drop)
}

/// Makes the volumes, fills them, and starts guests on them.
fn make_volumes(host: &Host) -> anyhow::Result<Vec<Running>> {
    let mut guests = Vec::new();
    for (name, size, filled, rate) in VOLUMES {
        let store = if name.starts_with("archive") { "archive" } else { "fast" };
        host.sterna(["volume", "create", name, "--size", &format!("{size}MiB"), "--store", store])?
            .success()?;
        fio(host, name)?.args(["--rw=write", "--bs=1m", &format!("--size={filled}m")]).succeed()?;
        if rate > 0 {
            let size = format!("--size={filled}m");
            let work =
                ["--rw=randrw", "--rwmixread=70", "--bs=8k", "--iodepth=4", "--time_based", "--runtime=3600"];
            guests.push(fio(host, name)?.args(work).args([&size, &format!("--rate_iops={rate}")]).start()?);
        }
    }
    Ok(guests)
}

fn fio(host: &Host, name: &str) -> anyhow::Result<Program> {
    let volume: api::Volume = host.ask(&["volume", "show", name])?;
    let fio = Program::of_package("fio", "fio").args(["--ioengine=nbd", "--name=guest"]);
    Ok(fio.arg(format!("--uri={}", volume.uri)))
}

/// Makes ended migrations: to another store and back, to the other host, and a cancelled one.
fn make_history(host: &Host) -> anyhow::Result<()> {
    for (name, store) in [
        ("scratch", "large"),
        ("db-log", "large"),
        ("scratch", "rack3-b:fast"),
        ("mail", "large"),
        ("db-log", "fast"),
    ] {
        host.sterna(["migrate", name, "--to", store])?.success()?;
    }
    let regretted: Migration = begin_to_move(host, "mail", "fast", "2MiB/s")?;
    host.sterna(["migration", "cancel", &regretted.id])?.success()?;
    host.wait_for_migration(&regretted.id).map(drop)
}

fn begin_to_move(host: &Host, name: &str, to: &str, bandwidth: &str) -> anyhow::Result<Migration> {
    host.ask(&["migrate", name, "--to", to, "--bandwidth", bandwidth, "--detach"])
}

/// Ends the migrations under way, moves a volume back, and waits until the time after that is recorded.
fn move_home(host: &Host) -> anyhow::Result<Migration> {
    let migrations: Vec<Migration> = host.ask(&["migration", "list"])?;
    for migration in migrations.iter().filter(|migration| !migration.state.has_ended()) {
        host.sterna(["migration", "set", &migration.id, "--bandwidth", "none"])?.success()?;
        host.wait_for_migration(&migration.id)?;
    }
    let moved: Migration = host.ask(&["migrate", "web1", "--to", "fast", "--bandwidth", REPORTED_RATE])?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let client = api::Client::new(host.address()?);
    until("the time after the move is recorded", || {
        let history = runtime.block_on(client.migration_history(&moved.id))?;
        let after = history.recording.and_then(|recording| recording.after);
        Ok(after.filter(|after| after.seconds > RECORDED_AFTER_S).map(|_| ()))
    })?;
    Ok(moved)
}

fn take_picture_of_report(
    browser: &mut Browser,
    host: &Host,
    migration: &Migration,
    folder: &Path,
) -> anyhow::Result<()> {
    let report = host.path("report.html");
    let written = report.display().to_string();
    host.sterna(["migration", "report", &migration.id, "--output", &written])?.success()?;
    browser.prefer(Colours::Light)?;
    browser.resize(1000, 900)?;
    browser.open(&format!("file://{written}"))?;
    browser.until("the report is drawn", "document.querySelector('#plots')?.dataset.samples > 0")?;
    browser.take_picture(&folder.join("report.png"), REPORT_HEIGHT)
}

fn show_top(host: &Host) -> anyhow::Result<Terminal> {
    let line =
        format!("unset NO_COLOR; STERNA_HOST={} {} top; cat", host.address()?, program::sterna()?.display());
    Terminal::start(&line, 118, 24)
}

/// Converts the screen of a terminal, with its colour codes, to a page.
fn terminal_page(screen: &str) -> String {
    let lines = coloured(screen.trim_end());
    format!(
        "<!DOCTYPE html><meta charset=\"utf-8\"><style>body {{ margin: 0; padding: 16px 18px; background: #12181f; color: #dbe3ea }} \
         pre {{ margin: 0; font: 13.5px/1.32 'DejaVu Sans Mono', monospace }} b {{ color: #fff }} .r {{ background: #dbe3ea; color: #12181f }} \
         {COLOURS}</style><pre>{lines}</pre>"
    )
}

/// The first eight colours of a terminal, and grey.
const COLOURS: &str = ".f31 { color: #ff7b72 } .f32 { color: #5fdca2 } .f33 { color: #f0c674 } .f34 { color: #6cb0ff } \
     .f35 { color: #b596ff } .f36 { color: #4fd0c0 } .f90 { color: #8b98a6 }";

/// Converts colour codes to markup. A colour holds until the next code, also on later lines.
fn coloured(screen: &str) -> String {
    let (mut drawn, mut classes) = (String::new(), Vec::<String>::new());
    for (index, piece) in screen.split("\u{1b}[").enumerate() {
        let mut text = piece;
        if index > 0
            && let Some((codes, rest)) = piece.split_once('m')
        {
            text = rest;
            // A colour is 30 to 37, or 38;5 with its number.
            let codes = codes.replace("38;5;8", "90").replace("38;5;", "3");
            for code in codes.split(';') {
                match code {
                    "" | "0" => classes.clear(),
                    "1" => classes.push("b".to_owned()),
                    "7" => classes.push("r".to_owned()),
                    // The background is the same everywhere.
                    ground if ground.starts_with('4') => {}
                    colour => {
                        // The former colour ends, also if 39 selects the default.
                        classes.retain(|class| !class.starts_with('f'));
                        classes.push(format!("f{colour}"));
                    }
                }
            }
        }
        let escaped = text.replace('&', "&amp;").replace('<', "&lt;");
        let is_bold = classes.iter().any(|class| class == "b");
        let name = classes.join(" ");
        let (open, close) = if is_bold { ("<b", "</b>") } else { ("<span", "</span>") };
        drawn += &format!("{open} class=\"{name}\">{escaped}{close}");
    }
    drawn
}
