//! Tests of comparisons of everything with a standby: by themselves, and what is known of them after a restart.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use api::{Readiness, Standby};
use e2e::{Host, Pair, play_pair, until};
use rustix::process::Signal;

use crate::standbys::{DISK_BYTES, connect, until_current, write};

const DAMAGED_BYTES: usize = 3 * 4096;

fn shown(host: &Host) -> anyhow::Result<Standby> {
    host.ask(&["standby", "show", "v"])
}

/// Makes a volume with a standby, which a restarted daemon compares every ten seconds.
fn begin(pair: &mut Pair) -> anyhow::Result<Standby> {
    pair.alpha.configure("[standby]\nverify = \"10s\"\n")?;
    pair.alpha.stop()?;
    pair.alpha.start()?;
    pair.alpha.create_volume(DISK_BYTES)?;
    let mut client = connect(&pair.alpha, "v")?;
    (0..64).try_for_each(|number| write(&mut client, number << 18, number + 1))?;
    pair.alpha.sterna(["standby", "add", "v", "--to", "beta:a", "--every", "1s"])?.success()?;
    until_current(&pair.alpha)
}

fn note(host: &Host, id: &str) -> PathBuf {
    host.folder().data().join("standbys").join(format!("{id}.compared"))
}

/// Lets the disk of the standby forget something.
fn damage(beta: &Host, id: &str) -> anyhow::Result<()> {
    let image = beta.path("a").join(".sterna-standbys").join(id).join("image-0");
    Ok(File::options().write(true).open(image)?.write_all_at(&[7; DAMAGED_BYTES], 5 << 20)?)
}

#[test]
fn a_standby_is_compared_by_itself_and_damage_is_told_mended_and_remembered() {
    play_pair(|pair| {
        let id = begin(pair)?.id;
        let Pair { alpha, beta, .. } = pair;
        until("it is compared", || Ok(shown(alpha)?.compared.map(drop)))?;
        let well = shown(alpha)?;
        ensure!(well.check.as_ref().is_some_and(|check| !check.ordered), "{well:?}");
        ensure!(well.verify_seconds == Some(10.0), "{well:?}");
        let checked = alpha.sterna(["standby", "check"])?;
        ensure!(checked.code == 0 && checked.stdout.contains("compared"), "{checked:?}");
        damage(beta, &id)?;
        let differed = until("the damage is found", || {
            let compared = shown(alpha)?.compared.context("it is not known any more")?;
            Ok((compared.bytes_differing > 0).then_some(compared))
        })?;
        ensure!(differed.bytes_differing == DAMAGED_BYTES as u64, "{differed:?}");
        // What was found is known before anything can be compared again, and a killed daemon has forgotten nothing.
        alpha.kill()?;
        beta.signal(Signal::STOP)?;
        alpha.start()?;
        let remembered = shown(alpha)?.compared;
        ensure!(remembered.as_ref() == Some(&differed), "{remembered:?}, not {differed:?}");
        let health = alpha.sterna(["health", "--json"])?;
        let told: Readiness = serde_json::from_str(&health.stdout)?;
        let is_told = told.problems.iter().any(|problem| problem.message.contains("12288 bytes differed"));
        ensure!(health.code == 10 && is_told, "{health:?}");
        let checked = alpha.sterna(["standby", "check"])?;
        ensure!(checked.code == 10 && checked.stdout.contains("12.0 KiB differed"), "{checked:?}");
        let metrics = alpha.sterna(["metrics"])?.success()?;
        let metric = "sterna_standby_differing_bytes{standby=\"v@beta\"} 12288";
        ensure!(metrics.contains(metric), "{metrics}");
        beta.signal(Signal::CONT)?;
        until("the next comparison finds no difference", || {
            let compared = shown(alpha)?.compared.context("it is not known any more")?;
            Ok((compared.bytes_differing == 0).then_some(()))
        })?;
        until_current(alpha)?;
        alpha.sterna(["standby", "check"])?.success()?;
        Ok(())
    });
}

#[test]
fn a_comparison_that_a_kill_interrupts_is_tried_again_and_a_torn_note_says_never() {
    play_pair(|pair| {
        let id = begin(pair)?.id;
        let Pair { alpha, beta, .. } = pair;
        until("it is compared", || Ok(shown(alpha)?.compared.map(drop)))?;
        // No answer comes.
        beta.signal(Signal::STOP)?;
        let order = alpha.command(["standby", "check", "v", "--deep"])?.start()?;
        let begun = until("a comparison waits for its answer", || {
            Ok(shown(alpha)?.check.filter(|check| check.ended_unix_ms.is_none()))
        })?;
        alpha.kill()?;
        ensure!(order.wait()?.code != 0, "the daemon has gone");
        alpha.start()?;
        let check = shown(alpha)?.check.context("it is not known any more")?;
        ensure!(check.begun_unix_ms == begun.begun_unix_ms, "{check:?}, not {begun:?}");
        ensure!(check.interrupted.is_some_and(|why| why.contains("restarted")));
        let before = shown(alpha)?.compared.context("what an earlier one has found is forgotten")?;
        beta.signal(Signal::CONT)?;
        until("it is compared again", || {
            let compared = shown(alpha)?.compared.context("it is not known any more")?;
            Ok((compared.unix_ms > before.unix_ms).then_some(()))
        })?;
        alpha.stop()?;
        let note = note(alpha, &id);
        let bytes = std::fs::read(&note)?;
        for torn in [&bytes[..bytes.len() - 1], &[], &[0xff; 4096]] {
            std::fs::write(&note, torn)?;
            beta.signal(Signal::STOP)?;
            alpha.start()?;
            let torn = shown(alpha)?;
            beta.signal(Signal::CONT)?;
            ensure!(torn.compared.is_none() && torn.check.is_none(), "{torn:?}");
            until("it is compared anew", || Ok(shown(alpha)?.compared.map(drop)))?;
            alpha.stop()?;
        }
        alpha.start()?;
        alpha.sterna(["standby", "remove", "v"])?.success()?;
        ensure!(!note.exists(), "the note of a standby that is removed");
        Ok(())
    });
}
