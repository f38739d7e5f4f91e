//! Tests of the report of a migration, from the daemon's recording, in a browser.

use std::path::Path;

use anyhow::ensure;
use e2e::{Host, Program, guest, play, until};

const DISK_BYTES: u64 = 128 << 20;

#[test]
fn a_report_renders_in_a_browser_and_survives_restarts() {
    play(|scene| {
        scene.create_volume(DISK_BYTES)?;
        let guest = guest::start(&scene.export()?, DISK_BYTES / 2)?;
        let moved = scene.migrate("b")?;
        guest::stop_and_verify(guest)?;
        let parts = ["moved from a to b", "What the guest felt", "The switch-over", "to both stores"];
        for kill in [false, true] {
            let page = render(scene, &moved.id)?;
            ensure!(samples(&page) > 0, "no samples are shown: {page}");
            for part in parts {
                ensure!(page.contains(part), "\"{part}\" is missing: {page}");
            }
            if kill {
                scene.kill()?;
            } else {
                scene.stop()?;
            }
            scene.start()?;
        }
        // The lost recording is missing only in the report.
        std::fs::remove_dir_all(scene.path("data/history"))?;
        let page = render(scene, &moved.id)?;
        ensure!(page.contains("was not recorded") && page.contains("The switch-over"), "{page}");
        scene.migrate("a")?;
        Ok(())
    });
}

#[test]
fn migrations_under_way_and_cancelled_ones_have_reports() {
    play(|scene| {
        scene.create_volume(DISK_BYTES)?;
        let guest = guest::start(&scene.export()?, DISK_BYTES / 2)?;
        let id = scene.begin_to_migrate("b", Some("4MiB/s"))?.id;
        until("something was recorded", || {
            let history: api::MigrationHistory = history(scene, &id)?;
            let recorded = history.recording.is_some_and(|recording| recording.during.is_some());
            Ok(recorded.then_some(()))
        })?;
        let page = render(scene, &id)?;
        ensure!(page.contains("is moving from a to b") && samples(&page) > 0, "{page}");
        scene.sterna(["migration", "cancel", &id])?.success()?;
        scene.wait_for_migration(&id)?;
        let page = render(scene, &id)?;
        ensure!(page.contains("was cancelled") && page.contains("at most 4.0 MiB/s"), "{page}");
        guest::stop_and_verify(guest)?;
        Ok(())
    });
}

#[test]
fn a_report_of_nothing_or_to_nowhere_is_refused_with_a_reason() {
    play(|scene| {
        let unknown = scene.sterna(["migration", "report", "m7"])?;
        unknown.expect(3)?;
        scene.create_volume(1 << 20)?;
        let moved = scene.migrate("b")?;
        let nowhere = scene.path("no/such/folder/report.html");
        let order = ["migration", "report", &moved.id, "--output"].map(std::ffi::OsStr::new);
        let refused = scene.sterna(order.into_iter().chain([nowhere.as_os_str()]))?;
        refused.expect(1)?;
        ensure!(refused.stderr.contains("choose another file with --output"), "{refused:?}");
        let written: serde_json::Value =
            scene.ask(&["migration", "report", &moved.id, "--output", "/dev/null"])?;
        ensure!(written["migration"] == moved.id.as_str() && written["report"] == "/dev/null", "{written}");
        Ok(())
    });
}

fn history(scene: &Host, id: &str) -> anyhow::Result<api::MigrationHistory> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(api::Client::new(scene.address()?).migration_history(id))?)
}

/// Makes a report, opens it in a browser, and returns the page after its scripts have run.
fn render(scene: &Host, id: &str) -> anyhow::Result<String> {
    let file = scene.path("report.html");
    let order = ["migration", "report", id, "--output"].map(std::ffi::OsStr::new);
    scene.sterna(order.into_iter().chain([file.as_os_str()]))?.success()?;
    let printed = scene.sterna(["migration", "report", id, "--output", "-"])?.success()?;
    ensure!(printed.starts_with("<!DOCTYPE html>"), "{printed}");
    browse(&file, &scene.path("browser"))
}

fn browse(page: &Path, profile: &Path) -> anyhow::Result<String> {
    let browser = Program::of_package("chromium", "chromium")
        // The browser's sandbox needs more rights than a test has, and the page is our own.
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
        .args(["--enable-logging=stderr", "--dump-dom"])
        .arg(format!("--user-data-dir={}", profile.display()))
        .arg(format!("file://{}", page.display()))
        .run()?;
    browser.expect(0)?;
    // Errors of scripts, and violations of the page's policy, are reported there.
    ensure!(!browser.stderr.contains("CONSOLE"), "{}", browser.stderr);
    ensure!(browser.stdout.contains("<h1>"), "{browser:?}");
    Ok(browser.stdout)
}

/// Returns the number of samples that the page's script has found.
fn samples(page: &str) -> usize {
    let number = page.split("data-samples=\"").nth(1).and_then(|rest| rest.split('"').next()?.parse().ok());
    number.unwrap_or(0)
}
