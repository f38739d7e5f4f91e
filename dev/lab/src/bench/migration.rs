//! One measured migration: its times, and a comparison at its end.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use api::{Decisions, MigrateVolume, Migration, MigrationState, NewVolume, Phase, VolumeSource, Watch};
use testbed::Daemon;

use super::guest::{Requests, now_ms};
use super::image::{Blocks, Compared, compare};
use super::server::NAME;
use crate::demo::STORES;

/// The impact of a measured migration: the pacer has a bench of its own, and other movers do not give way either.
pub(super) const AT_FULL_SPEED: Option<u8> = Some(api::FULL_SPEED_PERCENT);

/// Gates may have closed this much before their record, by the guest's clock: both clocks are rounded, and the record is later.
const SWITCH_SLACK_MS: u64 = 100;

/// A migration's progress at one moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Progressed {
    /// Time since the order, in seconds.
    pub(super) seconds: f64,
    /// Synchronised part of the image, 0 to 1.
    pub(super) fraction: f64,
    pub(super) bytes_copied: u64,
}

/// The times of a migration, in milliseconds since 1970.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    pub(super) begun_ms: u64,
    /// Until this time every write also went to the source.
    pub(super) switched_ms: u64,
    pub(super) ended_ms: u64,
}

impl Times {
    pub(super) fn seconds(self) -> f64 {
        self.ended_ms.saturating_sub(self.begun_ms).max(1) as f64 / 1e3
    }
}

/// A measured migration of Sterna's.
#[derive(Debug)]
pub(super) struct Course {
    pub(super) times: Times,
    pub(super) decisions: Decisions,
    pub(super) progress: Vec<Progressed>,
    pub(super) ended: Migration,
}

impl Course {
    /// Orders `daemon` to move the volume and waits for the end, whatever the outcome.
    pub(super) async fn of(daemon: &Daemon, order: &MigrateVolume) -> anyhow::Result<Self> {
        let client = daemon.client();
        let begun_ms = now_ms();
        let mut progress = Vec::new();
        let ordered = client.migrate(NAME, order).await.context("order the migration");
        let mut seen = ordered.map_err(|error| daemon.with_log(error))?;
        while !seen.state.has_ended() {
            let now = now_ms();
            progress.push(Progressed {
                seconds: now.saturating_sub(begun_ms) as f64 / 1e3,
                fraction: seen.fraction,
                bytes_copied: seen.bytes_copied,
            });
            let watch = Watch { after: Some(seen.change), wait_ms: api::WAIT_MAX_MS };
            seen = client.migration(&seen.id, watch).await.context("watch the migration")?;
        }
        let ended_ms = now_ms();
        let history = daemon.history(&seen.id).await.and_then(|history| history.recording);
        let history = history.context("nothing was recorded of the migration")?;
        let closing = history.phases.iter().rev().find(|entered| entered.phase == Phase::Closing);
        let closed_ms = closing.map_or(0.0, |entered| entered.at_ms.max(0.0)) as u64;
        let switched_ms = (seen.started_unix_ms + closed_ms).saturating_sub(SWITCH_SLACK_MS);
        let decisions = history.decisions;
        Ok(Self { times: Times { begun_ms, switched_ms, ended_ms }, decisions, progress, ended: seen })
    }

    /// Returns whether the volume has moved. Fails unless the migration succeeded or was given up for a reason that is a figure.
    pub(super) fn has_moved(&self) -> anyhow::Result<bool> {
        let Migration { state, failure, message, .. } = &self.ended;
        let moved = *state == MigrationState::Moved;
        ensure!(moved || failure.as_deref() == Some("not-converging"), "it failed: {message:?}");
        Ok(moved)
    }

    /// Returns seconds from the order until the gates closed for the last time; `None`: the volume has not moved.
    pub(super) fn handed_over_seconds(&self) -> Option<f64> {
        let closed_ms = (self.times.switched_ms + SWITCH_SLACK_MS).saturating_sub(self.times.begun_ms);
        (self.ended.state == MigrationState::Moved).then_some(closed_ms as f64 / 1e3)
    }

    fn told(&self) -> String {
        let Times { begun_ms, switched_ms, ended_ms } = self.times;
        let at = |ms: u64| ms.saturating_sub(begun_ms);
        format!("the gates closed {} ms after the order, it ended after {} ms", at(switched_ms), at(ended_ms))
    }
}

/// Creates the volume in a daemon's first store from a copy of an image, and returns the URI of its export.
pub(super) async fn copy_in(daemon: &Daemon, image: &Path) -> anyhow::Result<String> {
    let image = image.to_str().context("the folder's name is no Unicode")?;
    let source = VolumeSource::Create {
        size_bytes: None,
        store: Some(STORES[0].to_owned()),
        image: Some(image.to_owned()),
        format: None,
    };
    let order = NewVolume { name: NAME.to_owned(), source, export: api::ExportSettings::default() };
    let made = daemon.client().create_volume(&order).await.context("make the volume");
    Ok(made.map_err(|error| daemon.with_log(error))?.uri)
}

/// Compares the source's kept image with the target's, each the only one in its folder. They may differ in blocks that the guest
/// has written since the switch, and in as many unlogged writes as its depth. Returns the number of equal bytes.
pub(super) async fn compared(
    stores: &[PathBuf; 2],
    block_bytes: u64,
    course: &Course,
    requests: &Requests,
    mut unlogged: u64,
) -> anyhow::Result<u64> {
    let mut except = requests.written_since(course.times.switched_ms);
    loop {
        let compared = compare_copies(stores, except.clone()).await?;
        let Some(offset) = compared.first_difference else { return Ok(compared.bytes) };
        if unlogged == 0 {
            let when = match requests.written_last(offset) {
                None => "nobody wrote there".to_owned(),
                Some(at) => {
                    let before_ms = (course.times.switched_ms + SWITCH_SLACK_MS).saturating_sub(at);
                    format!("by its clock the guest wrote there last {before_ms} ms before")
                }
            };
            bail!("the target differs from the source at byte {offset}: {}; {when}", course.told());
        }
        unlogged -= 1;
        except.add(offset / block_bytes * block_bytes, block_bytes);
    }
}

/// Compares two images, each the only one in its folder, except for some blocks. Fails if nothing is left to compare.
pub(super) async fn compare_copies(
    [source, target]: &[PathBuf; 2],
    except: Blocks,
) -> anyhow::Result<Compared> {
    let compared = compare(&only_image(source)?, &only_image(target)?, except).await?;
    ensure!(
        compared.bytes > 0 || compared.first_difference.is_some(),
        "the guest has written every block since the switch: nothing could be compared"
    );
    Ok(compared)
}

fn only_image(store: &Path) -> anyhow::Result<PathBuf> {
    for entry in std::fs::read_dir(store).context("look for an image")? {
        let entry = entry.context("look for an image")?;
        if entry.file_name().to_string_lossy().starts_with(NAME) {
            return Ok(entry.path());
        }
    }
    bail!("there is no image in {}", store.display())
}
