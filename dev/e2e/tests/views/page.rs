//! Tests of the page in a browser: its content, restarts of the daemon, and foreign texts.

use anyhow::ensure;
use e2e::browser::{Browser, Colours};
use e2e::{Host, guest, host, until};

const DISK_BYTES: u64 = 128 << 20;
/// A VM with the volume `v`.
const DEFINITION: &str = r#"
command = ["qemu-system-x86_64", "-name", "{name}", "-nodefaults", "-display", "none", "-qmp", "unix:{qmp},server=on,wait=off",
    "-blockdev", "driver=nbd,node-name=root,server.type=unix,server.path={disk:root},export={export:root},reconnect-delay=60",
    "-device", "virtio-blk-pci,drive=root"]
[disks]
root = "v"
"#;

/// Runs a test on a host whose daemon serves the page at `url`, with more configuration.
fn play_with_page(more: &str, test: impl FnOnce(&mut Host, &mut Browser, &str) -> anyhow::Result<()>) {
    let played = host().and_then(|mut host| {
        let address = testbed::own_address()?;
        host.configure(&format!("{more}[web]\nlisten = '{address}'\n"))?;
        host.start()?;
        let mut browser = Browser::start()?;
        let url = format!("http://{address}/");
        until("the page's port answers", || Ok(browser.open(&url).is_ok().then_some(())))?;
        browser.take_complaints()?;
        let tested = test(&mut host, &mut browser, &url);
        tested.and_then(|()| ensure_content(&mut browser)).map_err(|error| host.with_log(error))
    });
    #[expect(clippy::panic, reason = "this is how a test fails")]
    if let Err(error) = played {
        panic!("{error:#}");
    }
}

/// Checks that scripts had no errors, and no violations of the policy.
fn ensure_content(browser: &mut Browser) -> anyhow::Result<()> {
    let complaints = browser.take_complaints()?;
    ensure!(complaints.is_empty(), "the page complains: {complaints:#?}");
    Ok(())
}

/// Returns a JavaScript expression for "a row of a table has these words".
fn row(table: &str, words: &[&str]) -> String {
    let words = serde_json::json!(words);
    format!(
        "[...document.querySelectorAll('#{table} tbody tr')].some((row) => {words}.every((word) => row.innerText.includes(word)))"
    )
}

#[test]
fn a_migration_is_seen_from_its_beginning_to_its_report() {
    play_with_page("", |scene, browser, url| {
        scene.create_volume(DISK_BYTES)?;
        let working = guest::start(&scene.export()?, DISK_BYTES / 2)?;
        browser.until("the volume is there", &row("volume-table", &["v", "serving", "a"]))?;
        // A busy guest has a latency, and a line of its rate.
        browser.until("the guest's latency is there", &row("volume-table", &["ms"]))?;
        let moving = scene.begin_to_migrate("b", Some("4MiB/s"))?;
        browser.until(
            "its card is there",
            "document.querySelector('.card.migration h3')?.innerText.includes('v a → b')",
        )?;
        let drawn = "[...document.querySelectorAll('.card .plot')].map((plot) => \
             [...plot.querySelectorAll('.line')].some((line) => (line.getAttribute('d') ?? '').includes('L')))";
        browser.until(
            "all its plots are drawn",
            &format!("({drawn}).length === 3 && ({drawn}).every((is) => is)"),
        )?;
        let seen: String = browser.evaluate("document.querySelector('.steps .now').innerText")?;
        ensure!(seen == "copying", "{seen}");
        let at: Option<String> =
            browser.evaluate("document.querySelector('[role=progressbar]').getAttribute('aria-valuenow')")?;
        ensure!(at.as_deref().is_some_and(|at| at.parse::<u8>().is_ok_and(|at| at < 100)), "{at:?}");
        for (width, colours) in [(1280, Colours::Dark), (390, Colours::Light), (320, Colours::Dark)] {
            browser.resize(width, 844)?;
            browser.prefer(colours)?;
            let wide: u32 = browser.evaluate("document.documentElement.scrollWidth")?;
            ensure!(wide <= width, "the page is {wide} pixels wide in a window of {width}");
        }
        scene.sterna(["migration", "set", &moving.id, "--bandwidth", "none"])?.success()?;
        scene.wait_for_migration(&moving.id)?;
        browser.resize(1280, 900)?;
        browser.until("it is history", &row("history-table", &[&moving.id, "moved", "report"]))?;
        guest::stop_and_verify(working)?;
        ensure_content(browser)?;
        let report: String = browser.evaluate("document.querySelector('#history-table a').href")?;
        browser.open(&report)?;
        browser.until(
            "its report is there",
            "document.querySelector('h1')?.innerText === 'v moved from a to b'",
        )?;
        browser.until("the report's script works", "document.querySelector('#plots').dataset.samples > 0")?;
        ensure!(report.starts_with(url), "{report}");
        Ok(())
    });
}

#[test]
fn the_page_outlives_the_daemon_and_goes_on_when_it_is_back() {
    play_with_page("", |scene, browser, _| {
        scene.create_volume(DISK_BYTES)?;
        browser.until("the volume is there", &row("volume-table", &["v", "serving"]))?;
        scene.kill()?;
        browser.until("the daemon is missed", "!document.getElementById('away').hidden")?;
        let health: String = browser.evaluate("document.getElementById('health').innerText")?;
        ensure!(health == "not reachable", "{health}");
        let kept: bool = browser.evaluate(&row("volume-table", &["v", "serving"]))?;
        ensure!(kept, "what was there before is gone");
        // The browser itself reports failed requests.
        browser.take_complaints()?;
        scene.start()?;
        browser.until("the daemon is back", "document.getElementById('away').hidden && document.getElementById('health').innerText === 'ready'")?;
        browser.take_complaints()?;
        scene.sterna(["volume", "remove", "v"])?.success()?;
        browser.until(
            "the volume is gone",
            "document.querySelector('#volume-table .empty').innerText.startsWith('There are no volumes')",
        )
    });
}

#[test]
fn hostile_texts_are_texts_on_the_page() {
    let hostile = "<img src=x onerror=document.title=1><script>document.title=2</script>";
    let unseen = "\u{202e}gnp.live";
    let stores = format!("[stores.h]\ndevice = '/dev/{hostile}'\n[stores.u]\ndevice = '/dev/{unseen}'\n");
    play_with_page(&stores, |_, browser, _| {
        let text = serde_json::json!(hostile);
        // It is the path of the store, and a part of the error message about it.
        let told = format!("document.getElementById('store-list').innerText.split({text}).length > 2");
        browser.until("the hostile text is there to be read", &told)?;
        let images: u32 = browser.evaluate("document.querySelectorAll('main img, main script').length")?;
        let title: String = browser.evaluate("document.title")?;
        ensure!(images == 0 && title.ends_with("Sterna"), "{images} {title}");
        let is_shown: bool = browser.evaluate("!document.body.textContent.includes('\\u202e') && document.body.textContent.includes('/dev/\\ufffdgnp')")?;
        ensure!(is_shown, "what turns the writing round is not made visible");
        ensure_content(browser)?;
        // The policy also forbids to convert any string to markup.
        let refused: bool = browser.evaluate(
            "(() => { try { document.body.innerHTML = '<b>x</b>'; return false } catch { return true } })()",
        )?;
        ensure!(refused, "the page's policy lets texts become markup");
        browser.take_complaints().map(drop)
    });
}

#[test]
fn vms_come_first_with_their_state_and_disks() {
    play_with_page("", |scene, browser, _| {
        scene.create_volume(1 << 20)?;
        let definition = scene.path("vm.toml");
        std::fs::write(&definition, DEFINITION)?;
        scene.sterna(["vm", "add", "web", "--definition", &definition.display().to_string()])?.success()?;
        browser.until("its state and its disk are there", &row("vm-table", &["web", "stopped", "v (a)"]))?;
        let sections: Vec<String> = browser
            .evaluate("[...document.querySelectorAll('main section')].map((section) => section.id)")?;
        let links: Vec<String> = browser
            .evaluate("[...document.querySelectorAll('nav a')].map((link) => link.hash.replace('#', ''))")?;
        ensure!(sections == links && sections.starts_with(&["vms".to_owned()]), "{sections:?} {links:?}");
        Ok(())
    });
}

#[test]
fn a_standby_is_there_with_its_state_and_age_on_the_pages_of_both_hosts() {
    e2e::play_pair(|pair| {
        pair.alpha.create_volume(1 << 20)?;
        let mut pages = Vec::new();
        for host in [&mut pair.alpha, &mut pair.beta] {
            let address = testbed::own_address()?;
            host.stop()?;
            host.configure(&format!("[web]\nlisten = '{address}'\n"))?;
            host.start()?;
            pages.push(format!("http://{address}/"));
        }
        let order = ["standby", "add", "v", "--to", "beta:a", "--every", "1s"];
        until("it is ordered", || Ok((pair.alpha.sterna(order)?.code == 0).then_some(())))?;
        for (url, role) in pages.iter().zip(["kept at beta", "kept for alpha"]) {
            let mut browser = Browser::start()?;
            until("the page's port answers", || Ok(browser.open(url).is_ok().then_some(())))?;
            browser.take_complaints()?;
            browser.until("it is current", &row("standby-table", &["v@", "current", role, " s"]))?;
            ensure_content(&mut browser)?;
        }
        Ok(())
    });
}

#[test]
fn the_filter_the_order_and_the_colours_are_the_readers_choice() {
    play_with_page("", |scene, browser, _| {
        for name in ["alpha", "beta", "gamma"] {
            scene.sterna(["volume", "create", name, "--size", "1MiB", "--store", "a"])?.success()?;
        }
        let names = "[...document.querySelectorAll('#volume-table tbody th')].map((cell) => cell.innerText).join(' ')";
        browser.until("all volumes are there", &format!("{names} === 'alpha beta gamma'"))?;
        browser.evaluate::<bool>("document.querySelector('#volume-table thead button').click(), true")?;
        browser.until("they are sorted the other way", &format!("{names} === 'gamma beta alpha'"))?;
        let sorted: String =
            browser.evaluate("document.querySelector('#volume-table th').getAttribute('aria-sort')")?;
        ensure!(sorted == "descending", "{sorted}");
        browser.evaluate::<bool>("document.getElementById('filter').focus(), true")?;
        browser.type_text("bet")?;
        browser.until("one is left", &format!("{names} === 'beta'"))?;
        let dark = "getComputedStyle(document.body).backgroundColor";
        browser.prefer(Colours::Light)?;
        let light: String = browser.evaluate(dark)?;
        // It changes from the system's colours to light, and then to dark.
        browser.evaluate::<bool>(
            "document.getElementById('theme').click(), document.getElementById('theme').click(), true",
        )?;
        let chosen: String = browser.evaluate(dark)?;
        ensure!(light != chosen, "{light}");
        browser.evaluate::<bool>("location.reload(), true")?;
        browser.until(
            "the choice is remembered",
            "document.documentElement.dataset.theme === 'dark' && document.readyState === 'complete'",
        )?;
        // The page is complete once its script has drawn the data.
        browser.until("the volumes are there again", &format!("{names}.includes('beta')"))?;
        // Each part has a text for keyboards and screen readers.
        let nameless: Vec<String> = browser.evaluate(
            "[...document.querySelectorAll('button, a, input')].filter((part) => !(part.innerText.trim() || part.ariaLabel || \
             part.labels?.length)).map((part) => part.outerHTML)",
        )?;
        ensure!(nameless.is_empty(), "{nameless:?}");
        Ok(())
    });
}
