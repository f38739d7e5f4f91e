//! `bench prediction`: how well forecasts hold.
//!
//! ```text
//!   guest works ─► dry run: its forecast ─► migration ─► what it took        again and again, there and back
//! ```
//! One daemon moves one volume between two stores, beside guests of several kinds, and learns from each migration. Of ten outcomes
//! eight are to lie in the range that was forecast.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use api::{Forecast, MigrateVolume};
use serde_json::json;
use testbed::{Daemon, Folder};
use tokio::time::sleep;

use super::Common;
use super::copying::SECONDS;
use super::guest::{Limit, Load, Work, under_guest};
use super::image::{Holes, fill};
use super::metric::{Metric, Unit};
use super::migration::{Course, copy_in};
use super::report::{Sample, Section};
use super::runner::{About, Ground, Part, Scenario, Turn};
use super::server::NAME;
use super::tools::FIO;
use crate::demo::{Progress, STORES, start_daemon};

/// Measures how well forecasts hold.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct PredictionOptions {
    #[command(flatten)]
    common: Common,
    /// How long a guest works before each dry run, which tells what it writes.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=600))]
    seconds: u32,
}

const HELP: &str = "\
Examples:
  sterna bench prediction
  sterna bench prediction --rounds 30 --size 1GiB --json > prediction.json

A daemon moves a volume between two folders of one disk, there and back, beside a guest (fio) that changes from migration to \
migration. Before each one a dry run says how long it will take. The volume has 512 MiB, and there are 15 rounds of four \
migrations, unless you say otherwise: some ten minutes. The first rounds are forecasts of ways that nothing has gone yet. It needs \
fio. Let the machine be idle meanwhile.";

const EXPECTED: Metric = Metric::less("forecast_seconds", "FORECAST s", Unit::Seconds);
const LEAST: Metric = Metric::less("forecast_least_seconds", "FROM s", Unit::Seconds);
const MOST: Metric = Metric::less("forecast_most_seconds", "TO s", Unit::Seconds);
const OFF: Metric = Metric::less("off", "OFF", Unit::Part);
const WITHIN: Metric = Metric::more("within_range", "IN RANGE", Unit::Happened);

/// The guests; `None`: nobody uses the volume.
fn guests() -> [(&'static str, Option<Load>); 4] {
    let database = |limit| Load { limit, ..Load::database_in_flight(4) };
    [
        ("idle", None),
        ("300 requests/s", Some(database(Some(Limit::Requests(300))))),
        ("2,000 requests/s", Some(database(Some(Limit::Requests(2000))))),
        ("zipf, 1,000 requests/s", Some(Load::zipf(Some(1000)))),
    ]
}

/// The daemon, and where its volume is.
pub(super) struct Host {
    daemon: Daemon,
    folder: Folder,
    image: PathBuf,
    uri: String,
    at: usize,
}

impl Scenario for PredictionOptions {
    type Case = ();
    type Stage = Host;
    type Variant = Option<Load>;

    fn about(&self) -> anyhow::Result<About> {
        Ok(About {
            name: "prediction",
            title: "Forecasts",
            words: "What dry runs expected of migrations between two folders of one disk, and what came. OFF is the difference \
                    as a part of what came."
                .to_owned(),
            tools: &[FIO],
            images: 3,
            usual: (15, 512 << 20),
            settings: json!({ "seconds": self.seconds }),
        })
    }

    fn common(&self) -> &Common {
        &self.common
    }

    fn stages(&self, _: &Ground<'_>) -> Vec<Vec<Part<(), Option<Load>>>> {
        let section = Section {
            name: "forecasts".to_owned(),
            title: "Beside guests of several kinds".to_owned(),
            columns: vec![SECONDS, EXPECTED, LEAST, MOST, OFF, WITHIN],
            ..Section::default()
        };
        vec![vec![Part { section, points: vec![(None, ())], variants: guests().to_vec() }]]
    }

    async fn set(&self, ground: &Ground<'_>, (): (), progress: &mut Progress) -> anyhow::Result<Host> {
        let image = ground.folder.path("image");
        fill(&image, ground.size_bytes, Holes::None, progress).await?;
        let folder = Folder::create(ground.folder.root(), STORES)?;
        let daemon = start_daemon(Command::new(ground.program), &folder).await?;
        let uri = copy_in(&daemon, &image).await?;
        Ok(Host { daemon, folder, image, uri, at: 0 })
    }

    async fn play(
        &self,
        ground: &Ground<'_>,
        host: &mut Host,
        turn: Turn<'_, (), Option<Load>>,
    ) -> anyhow::Result<Vec<Sample>> {
        let order = MigrateVolume::to(STORES[1 - host.at]);
        let moves = forecast_and_move(&host.daemon, &order);
        let before = Duration::from_secs(self.seconds.into());
        let (forecast, course) = match turn.variant {
            None => {
                sleep(before).await;
                moves.await?
            }
            Some(load) => {
                let (uri, server) = (host.uri.as_str(), host.daemon.process_id());
                let work =
                    Work { uri, server, size_bytes: ground.size_bytes, load, before, after: Duration::ZERO };
                under_guest(&ground.folder, work, moves).await?.1
            }
        };
        ensure!(course.has_moved()?, "it was given up");
        host.at = 1 - host.at;
        let seconds = course.ended.seconds;
        let expected = forecast.seconds;
        let is_within = (expected.least..=expected.most).contains(&seconds);
        Ok(vec![Sample::of([
            (SECONDS, seconds),
            (EXPECTED, expected.middle),
            (LEAST, expected.least),
            (MOST, expected.most),
            (OFF, (expected.middle - seconds).abs() / seconds),
            (WITHIN, f64::from(u8::from(is_within))),
        ])])
    }

    async fn end(&self, host: Host, played: anyhow::Result<()>, _: &mut Progress) -> anyhow::Result<()> {
        let Host { daemon, folder, image, .. } = host;
        daemon.stop().await?;
        folder.remove()?;
        std::fs::remove_file(image)?;
        played
    }
}

async fn forecast_and_move(daemon: &Daemon, order: &MigrateVolume) -> anyhow::Result<(Forecast, Course)> {
    let plan = daemon.client().plan_migration(NAME, order).await.context("ask for a forecast")?;
    let forecast = plan.forecast.context("the dry run has no forecast")?;
    Ok((forecast, Course::of(daemon, order).await?))
}
