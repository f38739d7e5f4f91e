//! `bench link`: how much of a link a migration uses, beside plain TCP and QEMU's mirror.
//!
//! ```text
//!   copy    link ─ round ─ TCP │ Sterna │ QEMU's mirror ── compare the images
//!   guest   round ─ Sterna │ QEMU's mirror, both modes ── compare what the guest has not written since the switch
//!
//!   host a                                              host b
//!   image ► daemon of the source ► TCP ► WideAreaLink ► TCP ► daemon of the target ► image
//! ```
//!
//! Hosts are network namespaces ([`crate::network`]), so this needs root. Both images are on one disk. It must be much faster
//! than the link, so that the link is what limits.

mod copy;
mod figures;
mod guest;
mod page;
mod stage;
mod table;

use std::time::Duration;

use anyhow::Context as _;

pub use self::figures::{CopyFigures, CopyReport, GuestFigures, GuestReport, LinkReport};
use self::stage::Stage;
use super::image::Holes;
use super::tools::{FIO, STORAGE_DAEMON, check_fio_engines};
use super::{BenchOptions, Environment, Versions, in_folder};
use crate::bench::folder::BenchFolder;
use crate::demo::Progress;
use crate::network::BitRate;

/// The options of `bench link`.
#[derive(Clone, Debug)]
pub struct LinkOptions {
    /// The options that all benchmarks share.
    pub bench: BenchOptions,
    /// The parts of the benchmark to measure.
    pub parts: Vec<Part>,
    /// How long the guest works before the migration, in seconds.
    pub seconds: u32,
}

/// The parts of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Copies over 1 Gbit/s within a building.
    Near,
    /// Copies over 1 Gbit/s within a metropolis: the longest distance that vSphere 5.1 supports.
    Metro,
    /// Copies over 1 Gbit/s to another continent.
    Far,
    /// Copies over two links of different speed, within a building.
    TwoLinks,
    /// Migrations of a guest that writes faster than its link carries.
    Guest,
}

impl Part {
    /// All parts, in the order of measurement.
    pub const ALL: [Self; 5] = [Self::Near, Self::Metro, Self::Far, Self::TwoLinks, Self::Guest];

    /// Returns a short name for command lines.
    pub fn name(self) -> &'static str {
        match self {
            Self::Near => "near",
            Self::Metro => "metro",
            Self::Far => "far",
            Self::TwoLinks => "two-links",
            Self::Guest => "guest",
        }
    }

    /// Returns a title for tables and pages.
    pub fn title(self) -> &'static str {
        match self {
            Self::Near => "1 Gbit/s, round trip 0.5 ms",
            Self::Metro => "1 Gbit/s, round trip 10 ms",
            Self::Far => "1 Gbit/s, round trip 180 ms",
            Self::TwoLinks => "1 and 0.5 Gbit/s, round trip 0.5 ms",
            Self::Guest => "a guest that writes at twice the link's rate: 1 Gbit/s, round trip 10 ms",
        }
    }

    /// Returns the links' rates, the fastest first.
    fn rates(self) -> &'static [BitRate] {
        const RATES: &[BitRate] = &[BitRate::megabits(1000), BitRate::megabits(500)];
        match self {
            Self::Near | Self::Metro | Self::Far | Self::Guest => &RATES[..1],
            Self::TwoLinks => RATES,
        }
    }

    fn round_trip(self) -> Duration {
        match self {
            Self::Near | Self::TwoLinks => Duration::from_micros(500),
            Self::Metro | Self::Guest => Duration::from_millis(10),
            Self::Far => Duration::from_millis(180),
        }
    }
}

/// The ways to bring an image to the other host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contender {
    /// One TCP connection over each link, from memory to memory: the limit.
    Tcp,
    /// A daemon of this program migrates the volume to a daemon on the other host.
    Sterna,
    /// A daemon of this program migrates the volume to a store that is a volume of a daemon on the other host.
    SternaNbd,
    /// QEMU's mirror, in the mode that copies again what the guest has written, to an export of another QEMU.
    Background,
    /// QEMU's mirror, in the mode that writes to both images before it answers the guest.
    WriteBlocking,
}

impl Contender {
    /// The contenders for an unused image. There the modes of QEMU's mirror do not differ.
    pub const COPY: &[Self] = &[Self::Tcp, Self::Sterna, Self::SternaNbd, Self::Background];
    /// The contenders that can move an image while a guest uses it.
    pub const GUEST: &[Self] = &[Self::Sterna, Self::SternaNbd, Self::Background, Self::WriteBlocking];

    /// Returns the name for tables and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Sterna => "sterna",
            Self::SternaNbd => "sterna, to an nbd store",
            Self::Background => "qemu mirror, background",
            Self::WriteBlocking => "qemu mirror, write-blocking",
        }
    }
}

/// Runs the benchmark. Fails if something is missing, for example root, or if an image differs from its source; the error ends
/// with the server's log. A signal ends it in order, with [`crate::demo::Interrupted`].
pub async fn run(options: &LinkOptions, progress: &mut Progress) -> anyhow::Result<LinkReport> {
    let mut versions = Versions::new();
    versions.insert("sterna".to_owned(), env!("CARGO_PKG_VERSION").to_owned());
    for tool in [FIO, STORAGE_DAEMON] {
        versions.insert(tool.program.to_owned(), tool.version().await?);
    }
    check_fio_engines().await?;
    crate::network::check().context("the benchmark needs two hosts with a link")?;
    let bench = &options.bench;
    let folder = BenchFolder::create(bench.parent.as_deref(), 2, bench.size_bytes)?;
    let environment = Environment::of(folder.root(), versions).await?;
    let congestion_control = stage::congestion_control()?;
    in_folder(folder, progress, async |folder, progress| {
        let source = folder.path("source.img");
        progress.begin("filling the image");
        super::image::fill(&source, bench.size_bytes, Holes::None, progress).await?;
        let (mut copies, mut guest) = (Vec::new(), None);
        for &part in &options.parts {
            let stage = Stage::set(options, folder, part, &source)?;
            match part {
                Part::Guest => guest = Some(guest::measure(&stage, progress).await?),
                _ => copies.push(copy::measure(&stage, progress).await?),
            }
        }
        let (size_bytes, rounds) = (bench.size_bytes, bench.rounds);
        Ok(LinkReport { environment, congestion_control, size_bytes, rounds, copies, guest })
    })
    .await
}

/// Returns the turns of all rounds; the contender that begins changes from round to round.
fn turns(rounds: u32, contenders: &[Contender]) -> impl Iterator<Item = (u32, usize)> {
    let count = contenders.len();
    (0..rounds).flat_map(move |round| (0..count).map(move |place| (round, (place + round as usize) % count)))
}

fn show_turn(progress: &mut Progress, part: Part, (round, rounds): (u32, u32), contender: Contender) {
    progress.begin(&format!("{}: round {} of {rounds}: {}", part.name(), round + 1, contender.name()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everybody_has_one_turn_in_each_round_and_each_is_first_once() {
        let turns: Vec<_> = turns(3, &Contender::COPY[..3]).collect();
        let expected = [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (1, 0), (2, 2), (2, 0), (2, 1)];
        assert_eq!(turns, expected);
    }

    #[test]
    fn the_first_link_of_a_part_is_its_fastest() {
        for part in Part::ALL {
            assert!(part.rates().is_sorted_by(|first, second| first >= second), "{}", part.name());
        }
    }
}
