//! `bench mirror`: the cost of moving an image, unused and under a guest.
//!
//! ```text
//!   idle   round ─ Sterna │ cp │ qemu-img convert │ storage daemon, both modes ── compare the images
//!   load   round ─ Sterna │ storage daemon, both modes ── compare what the guest left alone since the switch
//!                    guest: ── before ──┬── migration ──┬── after ──
//! ```
//!
//! Source and target are two folders of one file system: the disk that is read is the disk that is written.

mod figures;
mod idle;
mod load;
mod page;
mod table;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, ensure};

pub use self::figures::{IdleFigures, IdleReport, LoadFigures, LoadReport, MirrorReport};
use super::folder::BenchFolder;
pub use super::guest::Moment;
use super::image::{Blocks, Compared, Holes, compare, drop_caches, fill};
use super::server::{CopyMode, Sterna, StorageDaemon};
use super::tools::{CP, FIO, QEMU_IMG, STORAGE_DAEMON, check_fio_engines};
use super::{BenchOptions, Environment, Versions, in_folder};
use crate::demo::Progress;

/// The options of `bench mirror`.
#[derive(Clone, Debug)]
pub struct MirrorOptions {
    /// The options that all benchmarks share.
    pub bench: BenchOptions,
    /// The parts of the benchmark to measure.
    pub parts: Vec<Part>,
    /// How long the guest works before and after the migration, in seconds.
    pub seconds: u32,
    /// Requests that the guest makes per second; `None`: as many as it can.
    pub guest_iops: Option<u32>,
}

/// The two halves of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The image is unused during the copy.
    Idle,
    /// A guest works on the image.
    Load,
}

impl Part {
    /// Both parts, in the order of measurement.
    pub const ALL: [Self; 2] = [Self::Idle, Self::Load];

    /// Returns a short name for command lines.
    pub fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Load => "load",
        }
    }
}

/// The programs that copy the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contender {
    /// A daemon of this program migrates the volume.
    Sterna,
    /// `cp`, then a flush: the usual off-line copy.
    Cp,
    /// `qemu-img convert` past the page cache: the best off-line copy.
    Convert,
    /// QEMU's mirror, in the mode that copies again what the guest has written.
    Background,
    /// QEMU's mirror, in the mode that writes to both images before it answers the guest.
    WriteBlocking,
}

impl Contender {
    /// The contenders for an unused image.
    pub const IDLE: [Self; 5] =
        [Self::Sterna, Self::Cp, Self::Convert, Self::Background, Self::WriteBlocking];
    /// The contenders that can move an image while a guest uses it.
    pub const LOAD: [Self; 3] = [Self::Sterna, Self::Background, Self::WriteBlocking];

    /// Returns the name for tables and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sterna => "sterna",
            Self::Cp => "cp",
            Self::Convert => "qemu-img convert",
            Self::Background => "qemu mirror, background",
            Self::WriteBlocking => "qemu mirror, write-blocking",
        }
    }

    /// Returns QEMU's mode; `None` for other contenders.
    fn copy_mode(self) -> Option<CopyMode> {
        match self {
            Self::Background => Some(CopyMode::Background),
            Self::WriteBlocking => Some(CopyMode::WriteBlocking),
            Self::Sterna | Self::Cp | Self::Convert => None,
        }
    }
}

/// Runs the benchmark. Fails if a program or room is missing, or if an image differs from its source; the error ends with the
/// server's log. A signal ends it in order, with [`crate::demo::Interrupted`].
pub async fn run(options: &MirrorOptions, progress: &mut Progress) -> anyhow::Result<MirrorReport> {
    let mut versions = Versions::new();
    versions.insert("sterna".to_owned(), env!("CARGO_PKG_VERSION").to_owned());
    for tool in [CP, FIO, QEMU_IMG, STORAGE_DAEMON] {
        versions.insert(tool.program.to_owned(), tool.version().await?);
    }
    check_fio_engines().await?;
    let bench = &options.bench;
    let folder = BenchFolder::create(bench.parent.as_deref(), 2, bench.size_bytes)?;
    let environment = Environment::of(folder.root(), versions).await?;
    in_folder(folder, progress, async |folder, progress| {
        let (mut idle, mut load) = (None, None);
        if options.parts.contains(&Part::Idle) {
            idle = Some(idle::measure(options, folder, progress).await?);
        }
        if options.parts.contains(&Part::Load) {
            load = Some(load::measure(options, folder, progress).await?);
        }
        Ok(MirrorReport { environment, size_bytes: bench.size_bytes, rounds: bench.rounds, idle, load })
    })
    .await
}

#[derive(Debug)]
struct Stage<'a> {
    options: &'a MirrorOptions,
    folder: &'a BenchFolder,
    source: std::path::PathBuf,
    target: std::path::PathBuf,
}

/// Name of the source's image in the folder. The fenced image's name begins with this too.
const SOURCE: &str = "source.img";

impl<'a> Stage<'a> {
    async fn set(
        options: &'a MirrorOptions,
        folder: &'a BenchFolder,
        holes: Holes,
        progress: &mut Progress,
    ) -> anyhow::Result<Self> {
        let (source, target) = (folder.path(SOURCE), folder.path("target.img"));
        progress.begin("filling the image");
        fill(&source, options.bench.size_bytes, holes, progress).await?;
        Ok(Self { options, folder, source, target })
    }

    /// Makes an empty target of the right size, which QEMU's mirror needs.
    fn make_target(&self) -> anyhow::Result<()> {
        let target = std::fs::File::create(&self.target).context("make the target")?;
        target.set_len(self.options.bench.size_bytes).context("make the target")
    }

    async fn flush(target: &Path) -> anyhow::Result<()> {
        let file = std::fs::File::options().write(true).open(target).context("open the target")?;
        tokio::task::spawn_blocking(move || file.sync_all()).await?.context("flush the target")
    }

    /// Checks that the copy is equal to its source. Both must be unused.
    async fn verify(&self, source: &Path, target: &Path, except: Blocks) -> anyhow::Result<u64> {
        let Compared { bytes, first_difference } = compare(source, target, except).await?;
        if let Some(offset) = first_difference {
            anyhow::bail!("the target differs from the source at byte {offset}");
        }
        ensure!(bytes > 0, "the guest has written every block since the switch: nothing could be compared");
        Ok(bytes)
    }

    /// Returns the source image's path after a migration: Sterna fences the source by renaming it.
    fn fenced_source(&self) -> anyhow::Result<std::path::PathBuf> {
        for entry in std::fs::read_dir(self.folder.root()).context("look for the source's image")? {
            let entry = entry.context("look for the source's image")?;
            if entry.file_name().to_string_lossy().starts_with(SOURCE) {
                return Ok(entry.path());
            }
        }
        anyhow::bail!("the source's image has gone, though it was served in place")
    }

    /// Stops the daemon, compares the images, and puts the source back for the next turn.
    async fn finish_sterna(&self, server: Sterna, target: &Path, except: Blocks) -> anyhow::Result<Finished> {
        server.daemon.stop().await?;
        let source = self.fenced_source()?;
        let allocated_bytes = super::image::allocated_bytes(target)?;
        let compared_bytes = self.verify(&source, target, except).await?;
        std::fs::rename(&source, &self.source).context("put the source's image back")?;
        server.folder.remove()?;
        Ok(Finished { allocated_bytes, compared_bytes })
    }

    async fn finish_storage_daemon(&self, server: StorageDaemon, except: Blocks) -> anyhow::Result<Finished> {
        server.stop().await?;
        self.finish_copy(except).await
    }

    async fn finish_copy(&self, except: Blocks) -> anyhow::Result<Finished> {
        let allocated_bytes = super::image::allocated_bytes(&self.target)?;
        let compared_bytes = self.verify(&self.source, &self.target, except).await?;
        std::fs::remove_file(&self.target).context("delete the target")?;
        Ok(Finished { allocated_bytes, compared_bytes })
    }
}

#[derive(Clone, Copy, Debug)]
struct Finished {
    allocated_bytes: u64,
    compared_bytes: u64,
}

fn show_turn(
    progress: &mut Progress,
    part: Part,
    (round, rounds): (usize, u32),
    contenders: usize,
    place: usize,
) {
    let (name, number) = (part.name(), round + 1);
    if place == 0 {
        progress.begin(&format!("{name}: round {number} of {rounds}"));
    }
    let turn = round * contenders + place;
    progress.advance(turn as f64 / (rounds as usize * contenders) as f64);
}

fn cpu_seconds(before: Duration, after: Duration) -> f64 {
    after.saturating_sub(before).as_secs_f64()
}
