//! `bench mirror`: the cost of moving an image, unused and under a guest.
//!
//! ```text
//!   idle   Sterna │ cp │ qemu-img convert │ storage daemon, both modes ── compare the images
//!   load   Sterna │ storage daemon, both modes ── compare what the guest left alone since the switch
//!            guest: ── before ──┬── migration ──┬── after ──
//! ```
//!
//! Source and target are two folders of one file system: the disk that is read is the disk that is written. Other tests check,
//! with guests that know their data, that the guest reads what it wrote.

use std::ffi::OsStr;
use std::time::{Duration, Instant};

use serde_json::json;

use super::copying::{
    BEFORE, CPU, Copying, DURING, Guested, LOST, P99, SECONDS, SPEED, TAKES, TIME_X_LOSS, WORST, idle_sample,
};
use super::guest::Load;
use super::image::{Blocks, Holes, Images, drop_caches};
use super::metric::{Metric, Unit};
use super::report::{Comparison, Sample, Section};
use super::runner::{About, Ground, Part, Scenario, Turn};
use super::server::{CopyMode, Sterna, StorageDaemon};
use super::tools::{CP, FIO, QEMU_IMG, STORAGE_DAEMON, Tool};
use super::{Common, chosen, one_of};
use crate::demo::{Progress, STORES};

/// Measures migrations, idle and under load, beside off-line copies and QEMU's mirror.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct MirrorOptions {
    #[command(flatten)]
    common: Common,
    /// How long the guest works before and after each migration under load.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=3600))]
    seconds: u32,
    /// Measure only this part.
    #[arg(long, value_name = "PART", value_parser = one_of(PARTS.iter().map(|(name, _, title)| (*name, *title))))]
    only: Vec<String>,
    /// Requests a second of the guest under load; by default as many as it can.
    #[arg(long, value_name = "IOPS", value_parser = clap::value_parser!(u32).range(10..))]
    guest_iops: Option<u32>,
}

const HELP: &str = "\
Examples:
  sterna bench mirror
  sterna bench mirror --html mirror.html
  sterna bench mirror --only load --rounds 3 --folder /srv/fast
  sterna bench mirror --only load --guest-iops 5000 --json > mirror.json

Idle: an image with a quarter of holes is migrated by a temporary daemon, copied by cp and qemu-img, and \
mirrored by qemu-storage-daemon in both modes, in turns. Load: the same of Sterna and qemu-storage-daemon while fio works \
on the image. Every copy is compared with its source. The image has 2 GiB, and there are 7 rounds, unless you say otherwise. It \
needs no root (but drops only the images' own cache then) and leaves nothing behind; it needs fio, qemu-img and \
qemu-storage-daemon (Debian: fio, qemu-utils, qemu-system-common). Let the machine be idle meanwhile.";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    Idle,
    Load,
}

const PARTS: [(&str, Use, &str); 2] = [
    ("idle", Use::Idle, "No guest uses the image; a quarter of it is holes"),
    ("load", Use::Load, "Under a guest: 8 KiB random, 70 % reads, depth 16"),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Copier {
    Sterna,
    /// `cp`, then a flush: the usual off-line copy.
    Cp,
    /// `qemu-img convert` past the page cache: the best off-line copy.
    Convert,
    /// QEMU's mirror.
    Mirror(CopyMode),
}

const BACKGROUND: &str = "qemu mirror, background";
const BLOCKING: &str = "qemu mirror, write-blocking";
const COPIERS: [(&str, Copier); 5] = [
    ("sterna", Copier::Sterna),
    ("cp", Copier::Cp),
    ("qemu-img convert", Copier::Convert),
    (BACKGROUND, Copier::Mirror(CopyMode::Background)),
    (BLOCKING, Copier::Mirror(CopyMode::WriteBlocking)),
];

const TO_COPY: Metric =
    Metric::less("seconds_to_best_copy", "time ÷ that of the best off-line copy", Unit::Ratio);
const TO_MIRROR: Metric =
    Metric::less("seconds_to_best_mirror", "time ÷ that of the better mode of QEMU", Unit::Ratio);
const WORST_TO_MIRROR: Metric =
    Metric::less("worst_latency_to_best_mirror", "worst latency ÷ its worst latency", Unit::Ratio);
/// A difference: for a guest that loses nothing, a ratio says nothing.
const LOSS_LESS_MIRROR: Metric =
    Metric::less("seconds_times_lost_less_best_mirror", "time × loss, s more than its", Unit::Seconds);

/// Longer than any migration on a working disk.
const GIVE_UP_AFTER: Duration = Duration::from_secs(3600);

/// Returns a comparison of Sterna with the better mode of QEMU's mirror.
const fn beside_mirror(of: Metric, gives: Metric) -> Comparison {
    Comparison { of, rows: &["sterna"], beside: &[BACKGROUND, BLOCKING], gives }
}

impl Scenario for MirrorOptions {
    type Case = Use;
    type Stage = Images;
    type Variant = Copier;

    fn about(&self) -> anyhow::Result<About> {
        Ok(About {
            name: "mirror",
            title: "Migrations beside copies and QEMU's mirror",
            words: "What it costs to move the image between two folders of one disk. Every copy was compared with its source.".to_owned(),
            tools: &[CP, FIO, QEMU_IMG, STORAGE_DAEMON],
            images: 2,
            usual: (7, 2 << 30),
            settings: json!({ "seconds": self.seconds, "guest_iops": self.guest_iops }),
        })
    }

    fn common(&self) -> &Common {
        &self.common
    }

    fn stages(&self, _: &Ground<'_>) -> Vec<Vec<Part<Use, Copier>>> {
        let part = |(name, how, title): (&str, Use, &str)| {
            let section = Section { name: name.to_owned(), title: title.to_owned(), ..Section::default() };
            let (section, variants) = match how {
                Use::Idle => {
                    let beside_copies = Comparison {
                        of: SECONDS,
                        rows: &["sterna"],
                        beside: &["cp", "qemu-img convert"],
                        gives: TO_COPY,
                    };
                    let section = Section {
                        columns: vec![SECONDS, SPEED, CPU, TAKES],
                        comparisons: vec![beside_copies, beside_mirror(SECONDS, TO_MIRROR)],
                        ..section
                    };
                    (section, COPIERS.to_vec())
                }
                Use::Load => {
                    let comparisons =
                        [(SECONDS, TO_MIRROR), (WORST, WORST_TO_MIRROR), (TIME_X_LOSS, LOSS_LESS_MIRROR)];
                    let section = Section {
                        columns: vec![SECONDS, BEFORE, DURING, LOST, TIME_X_LOSS, WORST, P99, CPU],
                        comparisons: comparisons.map(|(of, gives)| beside_mirror(of, gives)).to_vec(),
                        ..section
                    };
                    let can_move =
                        |(_, copier): &(&str, Copier)| !matches!(copier, Copier::Cp | Copier::Convert);
                    (section, COPIERS.into_iter().filter(can_move).collect())
                }
            };
            vec![Part { section, points: vec![(None, how)], variants }]
        };
        chosen(&PARTS, |(name, ..)| name, &self.only).map(part).collect()
    }

    async fn set(&self, ground: &Ground<'_>, case: Use, progress: &mut Progress) -> anyhow::Result<Images> {
        Images::make(&ground.folder, ground.size_bytes, holes(case), progress).await
    }

    async fn play(
        &self,
        ground: &Ground<'_>,
        images: &mut Images,
        turn: Turn<'_, Use, Copier>,
    ) -> anyhow::Result<Vec<Sample>> {
        let data_bytes = holes(turn.case).data_bytes_of(ground.size_bytes);
        let copying = match turn.variant {
            Copier::Cp => return Ok(vec![cp(images, data_bytes).await?]),
            Copier::Convert => return Ok(vec![convert(images, data_bytes).await?]),
            Copier::Sterna => sterna(ground, images, None).await?,
            Copier::Mirror(mode) => storage_daemon(ground, images, mode, 0).await?,
        };
        let margin = Duration::from_secs(self.seconds.into());
        let load = Load::database(self.guest_iops);
        let guest = Guested { load, before: margin, after: margin, give_up_after: GIVE_UP_AFTER };
        Ok(vec![match turn.case {
            Use::Idle => copying.idle(images, data_bytes).await?,
            Use::Load => copying.loaded(ground, images, guest).await?,
        }])
    }
}

fn holes(case: Use) -> Holes {
    match case {
        Use::Idle => Holes::Quarter,
        Use::Load => Holes::None,
    }
}

pub(super) async fn sterna(
    ground: &Ground<'_>,
    images: &Images,
    impact_percent: Option<u8>,
) -> anyhow::Result<Copying> {
    let Sterna { daemon, folder, volume } = Sterna::start(ground, &images.source, &[]).await?;
    let (folders, to) = (vec![folder], STORES[1].to_owned());
    let (source, uri) = (Box::new(daemon), volume.uri);
    Ok(Copying::Sterna { source, target: None, folders, uri, to, impact_percent, copy: None })
}

pub(super) async fn storage_daemon(
    ground: &Ground<'_>,
    images: &Images,
    mode: CopyMode,
    speed: u64,
) -> anyhow::Result<Copying> {
    images.make_target()?;
    let nodes = [("source", images.source.as_path()), ("target", images.target.as_path())];
    let source = Box::new(StorageDaemon::start(&ground.folder, &nodes).await?);
    Ok(Copying::Mirror { source, target: None, node: "target", mode, speed })
}

/// Preserves holes, as the other contenders do. Cloned extents would copy nothing, and are switched off.
async fn cp(images: &Images, data_bytes: u64) -> anyhow::Result<Sample> {
    off_line(images, data_bytes, CP, &["--reflink=never", "--sparse=auto"]).await
}

/// Copies past the page cache on both sides, with eight requests in flight that may end in any order.
async fn convert(images: &Images, data_bytes: u64) -> anyhow::Result<Sample> {
    let options = ["convert", "-f", "raw", "-O", "raw", "-T", "none", "-t", "none", "-W", "-m", "8"];
    off_line(images, data_bytes, QEMU_IMG, &options).await
}

async fn off_line(images: &Images, data_bytes: u64, tool: Tool, options: &[&str]) -> anyhow::Result<Sample> {
    drop_caches(&[&images.source]).await?;
    let mut arguments: Vec<&OsStr> = options.iter().map(OsStr::new).collect();
    arguments.extend([images.source.as_os_str(), images.target.as_os_str()]);
    let begun = Instant::now();
    tool.run(&arguments).await?;
    images.flush().await?;
    let seconds = begun.elapsed().as_secs_f64();
    let finished = images.finish(&images.target, Blocks::default()).await?;
    Ok(idle_sample(images, seconds, data_bytes, &[]).with(finished.values()))
}
