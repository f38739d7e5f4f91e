//! `bench mirror`: what it costs to move an image, without a guest and under one.
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

/// How `bench mirror` is run.
#[derive(Clone, Debug)]
pub struct MirrorOptions {
    /// What all benchmarks are told.
    pub bench: BenchOptions,
    /// What is measured.
    pub parts: Vec<Part>,
    /// How long the guest works before and after the migration, in seconds.
    pub seconds: u32,
    /// Requests a second that the guest makes; `None`: as many as it can.
    pub guest_iops: Option<u32>,
}

/// The two halves of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Nobody uses the image meanwhile.
    Idle,
    /// A guest works on it.
    Load,
}

impl Part {
    /// Both of them.
    pub const ALL: [Self; 2] = [Self::Idle, Self::Load];

    /// A short name for command lines.
    pub fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Load => "load",
        }
    }
}

/// Who copies the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contender {
    /// A daemon of this program migrates the volume.
    Sterna,
    /// `cp`, then a flush: what everybody would do off-line.
    Cp,
    /// `qemu-img convert` past the page cache: the best that can be done off-line.
    Convert,
    /// QEMU's mirror, which copies again what the guest has written.
    Background,
    /// QEMU's mirror, which writes to both images before it answers the guest.
    WriteBlocking,
}

impl Contender {
    /// Those that copy an image that nobody uses.
    pub const IDLE: [Self; 5] =
        [Self::Sterna, Self::Cp, Self::Convert, Self::Background, Self::WriteBlocking];
    /// Those that can do it under a guest.
    pub const LOAD: [Self; 3] = [Self::Sterna, Self::Background, Self::WriteBlocking];

    /// Its name, for people and programs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sterna => "sterna",
            Self::Cp => "cp",
            Self::Convert => "qemu-img convert",
            Self::Background => "qemu mirror, background",
            Self::WriteBlocking => "qemu mirror, write-blocking",
        }
    }

    /// QEMU's mode, if this is QEMU's mirror.
    fn copy_mode(self) -> Option<CopyMode> {
        match self {
            Self::Background => Some(CopyMode::Background),
            Self::WriteBlocking => Some(CopyMode::WriteBlocking),
            Self::Sterna | Self::Cp | Self::Convert => None,
        }
    }
}

/// Measures. Ctrl-C, SIGTERM and SIGHUP end it early and in order.
///
/// # Errors
/// A program or room that is missing, with what to do; an image that differs from its source; what went wrong, with the
/// log of the server; [`crate::demo::Interrupted`] after a signal.
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

/// One image, and the place of its copy.
#[derive(Debug)]
struct Stage<'a> {
    options: &'a MirrorOptions,
    folder: &'a BenchFolder,
    source: std::path::PathBuf,
    target: std::path::PathBuf,
}

/// Name of the source's image in the folder. What Sterna leaves of it begins with this too.
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

    /// Makes an empty target of the right size, as a mirror of QEMU needs it.
    fn make_target(&self) -> anyhow::Result<()> {
        let target = std::fs::File::create(&self.target).context("make the target")?;
        target.set_len(self.options.bench.size_bytes).context("make the target")
    }

    /// Waits until what was written to `target` is on the disk.
    async fn flush(target: &Path) -> anyhow::Result<()> {
        let file = std::fs::File::options().write(true).open(target).context("open the target")?;
        tokio::task::spawn_blocking(move || file.sync_all()).await?.context("flush the target")
    }

    /// Makes sure that the copy is one. Nobody may use the images meanwhile.
    async fn verify(&self, source: &Path, target: &Path, except: Blocks) -> anyhow::Result<u64> {
        let Compared { bytes, first_difference } = compare(source, target, except).await?;
        if let Some(offset) = first_difference {
            anyhow::bail!("the target differs from the source at byte {offset}");
        }
        ensure!(bytes > 0, "the guest has written every block since the switch: nothing could be compared");
        Ok(bytes)
    }

    /// Where the source's image is after a migration of Sterna, which fences what it leaves by renaming it.
    fn fenced_source(&self) -> anyhow::Result<std::path::PathBuf> {
        for entry in std::fs::read_dir(self.folder.root()).context("look for the source's image")? {
            let entry = entry.context("look for the source's image")?;
            if entry.file_name().to_string_lossy().starts_with(SOURCE) {
                return Ok(entry.path());
            }
        }
        anyhow::bail!("the source's image has gone, though it was served in place")
    }

    /// Lets the daemon end, compares, and puts the source back for the next turn.
    async fn finish_sterna(&self, server: Sterna, target: &Path, except: Blocks) -> anyhow::Result<Finished> {
        server.daemon.stop().await?;
        let source = self.fenced_source()?;
        let allocated_bytes = super::image::allocated_bytes(target)?;
        let compared_bytes = self.verify(&source, target, except).await?;
        std::fs::rename(&source, &self.source).context("put the source's image back")?;
        server.folder.remove()?;
        Ok(Finished { allocated_bytes, compared_bytes })
    }

    /// Lets QEMU's daemon end, compares, and deletes the target.
    async fn finish_storage_daemon(&self, server: StorageDaemon, except: Blocks) -> anyhow::Result<Finished> {
        server.stop().await?;
        self.finish_copy(except).await
    }

    /// Compares, and deletes the target.
    async fn finish_copy(&self, except: Blocks) -> anyhow::Result<Finished> {
        let allocated_bytes = super::image::allocated_bytes(&self.target)?;
        let compared_bytes = self.verify(&self.source, &self.target, except).await?;
        std::fs::remove_file(&self.target).context("delete the target")?;
        Ok(Finished { allocated_bytes, compared_bytes })
    }
}

/// A copy that was compared.
#[derive(Clone, Copy, Debug)]
struct Finished {
    /// Bytes that the target took on the disk.
    allocated_bytes: u64,
    /// Bytes in which source and target were compared, and equal.
    compared_bytes: u64,
}

/// Shows whose turn it is.
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

/// CPU time between two readings, in seconds.
fn cpu_seconds(before: Duration, after: Duration) -> f64 {
    after.saturating_sub(before).as_secs_f64()
}
