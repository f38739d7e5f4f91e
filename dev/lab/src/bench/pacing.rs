//! `bench pacing`: what guests lose to a migration that gives way to them, and how long it takes.
//!
//! ```text
//!   Sterna  --impact 5% │ 10% │ 20% │ none      QEMU's mirror, at constant rates
//!            guest: ── before ──┬── migration ──┬── after ──
//! ```
//! QEMU's mirror has a rate, which somebody has to know: the table shows what each of some rates costs this guest on this disk.
//! At the same loss, the shorter time is better.

use std::time::Duration;

use serde_json::json;

use super::copying::{BEFORE, CPU, DURING, ENDED, Guested, LOST, P99, SECONDS, TIME_X_LOSS, WORST};
use super::fio::{Job, Pattern};
use super::guest::{Limit, Load};
use super::image::{Holes, Images};
use super::mirror::{sterna, storage_daemon};
use super::report::{Sample, Section};
use super::runner::{About, Ground, Part, Scenario, Turn};
use super::server::CopyMode;
use super::tools::{FIO, STORAGE_DAEMON};
use super::{Common, chosen, one_of};
use crate::demo::Progress;

/// Measures what guests lose to migrations that give way to them.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct PacingOptions {
    #[command(flatten)]
    common: Common,
    /// How long the guest works before and after each migration.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=3600))]
    seconds: u32,
    /// Measure only this guest.
    #[arg(long, value_name = "GUEST", value_parser = one_of(GUESTS.iter().map(|(name, _, title)| (*name, *title))))]
    only: Vec<String>,
    /// Requests a second of the guest that does not wait for its answers: about half of what the disk does.
    #[arg(long, default_value_t = 5000, value_name = "IOPS", value_parser = clap::value_parser!(u32).range(10..))]
    half: u32,
}

const HELP: &str = "\
Examples:
  sterna bench pacing
  sterna bench pacing --only depth-16 --rounds 3 --folder /srv/fast
  sterna bench pacing --half 20000 --json > pacing.json

An image is moved between two folders of one disk while fio works on it: by Sterna with several impacts, and by \
qemu-storage-daemon at several constant rates, in turns. Every copy is compared with its source. The image has 256 MiB, and there \
are 3 rounds, unless you say otherwise: about an hour. A copy that has not ended after two minutes is given up. It needs fio and qemu-storage-daemon (Debian: fio, qemu-system-common). Let the \
machine be idle meanwhile.";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Guest {
    /// As many requests as it can, so many at a time.
    Depth(u32),
    /// Requests at a rate.
    Half,
    /// As many as it can, mostly writes, of some blocks much more often than of others.
    ZipfWrites,
}

const GUESTS: [(&str, Guest, &str); 5] = [
    ("depth-1", Guest::Depth(1), "8 KiB random, 70 % reads, one at a time"),
    ("depth-4", Guest::Depth(4), "the same, 4 at a time"),
    ("depth-16", Guest::Depth(16), "the same, 16 at a time"),
    ("half", Guest::Half, "the same, at a rate"),
    ("zipf-writes", Guest::ZipfWrites, "8 KiB, 80 % writes, some blocks much more often, 32 at a time"),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Copier {
    /// Sterna, with this impact in percent.
    Sterna(u8),
    /// QEMU's mirror, with this limit in bytes a second; 0: none.
    Mirror(u64),
}

const MIB: u64 = 1 << 20;
const COPIERS: [(&str, Copier); 8] = [
    ("sterna, 5 %", Copier::Sterna(5)),
    ("sterna, 10 %", Copier::Sterna(10)),
    ("sterna, 20 %", Copier::Sterna(20)),
    ("sterna, full speed", Copier::Sterna(api::FULL_SPEED_PERCENT)),
    ("qemu mirror, 50 MiB/s", Copier::Mirror(50 * MIB)),
    ("qemu mirror, 100 MiB/s", Copier::Mirror(100 * MIB)),
    ("qemu mirror, 200 MiB/s", Copier::Mirror(200 * MIB)),
    ("qemu mirror, full speed", Copier::Mirror(0)),
];

/// QEMU's mirror never ends at a rate below that of the guest's writes.
const GIVE_UP_AFTER: Duration = Duration::from_secs(120);

impl Scenario for PacingOptions {
    type Case = Guest;
    type Stage = Images;
    type Variant = Copier;

    fn about(&self) -> anyhow::Result<About> {
        Ok(About {
            name: "pacing",
            title: "Migrations that give way to guests",
            words: "What guests lose to a migration between two folders of one disk, and how long it takes. Every copy was \
                    compared with its source."
                .to_owned(),
            tools: &[FIO, STORAGE_DAEMON],
            images: 2,
            usual: (3, 256 << 20),
            settings: json!({ "seconds": self.seconds, "half": self.half }),
        })
    }

    fn common(&self) -> &Common {
        &self.common
    }

    fn stages(&self, _: &Ground<'_>) -> Vec<Vec<Part<Guest, Copier>>> {
        let part = |(name, guest, title): (&str, Guest, &str)| {
            let section = Section {
                name: name.to_owned(),
                title: title.to_owned(),
                columns: vec![SECONDS, ENDED, BEFORE, DURING, LOST, TIME_X_LOSS, WORST, P99, CPU],
                ..Section::default()
            };
            vec![Part { section, points: vec![(None, guest)], variants: COPIERS.to_vec() }]
        };
        chosen(&GUESTS, |(name, ..)| name, &self.only).map(part).collect()
    }

    async fn set(&self, ground: &Ground<'_>, _: Guest, progress: &mut Progress) -> anyhow::Result<Images> {
        Images::make(&ground.folder, ground.size_bytes, Holes::None, progress).await
    }

    async fn play(
        &self,
        ground: &Ground<'_>,
        images: &mut Images,
        turn: Turn<'_, Guest, Copier>,
    ) -> anyhow::Result<Vec<Sample>> {
        let copying = match turn.variant {
            Copier::Sterna(percent) => sterna(ground, images, Some(percent)).await?,
            Copier::Mirror(speed) => storage_daemon(ground, images, CopyMode::Background, speed).await?,
        };
        let margin = Duration::from_secs(self.seconds.into());
        let load = self.load(turn.case);
        let guest = Guested { load, before: margin, after: margin, give_up_after: GIVE_UP_AFTER };
        Ok(vec![copying.loaded(ground, images, guest).await?])
    }
}

impl PacingOptions {
    fn load(&self, guest: Guest) -> Load {
        let pattern = Pattern::RandomMixed { reads_percent: 70 };
        match guest {
            Guest::Depth(depth) => Load { job: Job { pattern, block_bytes: 8 << 10, depth }, limit: None },
            Guest::Half => {
                let job = Job { pattern, block_bytes: 8 << 10, depth: 16 };
                Load { job, limit: Some(Limit::Requests(self.half)) }
            }
            Guest::ZipfWrites => Load::zipf_writes(),
        }
    }
}
