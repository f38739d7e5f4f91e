//! Benchmarks: Sterna beside the raw disk, beside `qemu-storage-daemon`, and beside off-line copies.
//!
//! ```text
//!   nbd ─────┐                             ┌─► report ─► JSON
//!   mirror ──┤                             │     ├─► table ─► text
//!   pacing ──┤
//!   link ────┼─► runner: variants in turns ┤     └─► page, chart ─► HTML
//!   machine ─┤                             └─ results: samples of metrics, and their comparisons
//!   return ──┤
//!   strategies
//! ```
//!
//! A benchmark is a scenario ([`runner::Scenario`]) in a file of its own: its options, its variants, how one round of one variant
//! is played, and which metrics that gives. The rest is the same for all:
//!
//! ```text
//!   environment   the measured machine        tools     the programs, their versions and packages
//!   folder        a temporary folder          image     random data, holes, comparing, dropping caches
//!   server, qmp   a measured server           process   CPU time and bytes of a process
//!   guest, fio    fio, with a request log     two_hosts a volume, and a host to move to
//!   migration     a measured migration: its times, and whether the copy is equal
//!   copying       a copy by Sterna or by QEMU's mirror, of an unused image or under a guest
//! ```
//!
//! `docs/performance.md` says what the figures mean.

mod chart;
mod copying;
mod environment;
mod fio;
mod folder;
mod guest;
mod image;
mod link;
mod machine;
mod metric;
mod migration;
mod mirror;
mod nbd;
mod pacing;
mod page;
mod prediction;
mod process;
mod qmp;
mod report;
mod return_home;
mod runner;
mod server;
mod statistics;
mod strategies;
mod table;
mod tools;
mod two_hosts;

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::builder::{PossibleValue, PossibleValuesParser};
use console::Format;

use self::runner::Scenario;
use crate::demo::Progress;

/// The benchmarks.
#[derive(Debug, clap::Subcommand)]
pub enum BenchCommand {
    /// Measure the performance of NBD clients, beside the raw file and qemu-storage-daemon.
    Nbd(nbd::NbdOptions),
    /// Measure migrations, idle and under load, beside off-line copies and QEMU's mirror.
    Mirror(mirror::MirrorOptions),
    /// Measure what guests lose to migrations that give way to them, and how long these take.
    Pacing(pacing::PacingOptions),
    /// Measure how well forecasts of migrations hold.
    Prediction(prediction::PredictionOptions),
    /// Measure the downtime of VMs that move, beside QEMU's own migration.
    Machine(machine::MachineOptions),
    /// Compare the strategies, after the figures of a paper.
    Strategies(strategies::StrategiesOptions),
    /// Measure how a volume moves to another host and returns, after the tables of a paper.
    Return(return_home::ReturnOptions),
    /// Measure how well migrations use a link between two hosts, beside plain TCP and QEMU's mirror.
    Link(link::LinkOptions),
}

/// The options that all benchmarks share.
#[derive(Clone, Debug, Default, clap::Args)]
struct Common {
    /// How often everything is measured; medians are taken of that.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: Option<u32>,
    /// Size of the image, a multiple of 1 MiB.
    #[arg(long, value_parser = parse_image_size)]
    size: Option<u64>,
    /// Where the temporary folder is made, on the disk to measure; by default where temporary files are.
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
    /// Write a page to this file: the tables, and plots of what varies over time or along an axis.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// The smallest image: smaller ones would only measure the disk's cache.
const SIZE_BYTES_MIN: u64 = 32 << 20;

fn parse_image_size(text: &str) -> Result<u64, String> {
    console::units::parse_size_of_at_least(text, SIZE_BYTES_MIN)
}

/// Returns a parser for names, which `--help` lists with their titles.
fn one_of(all: impl Iterator<Item = (&'static str, &'static str)>) -> PossibleValuesParser {
    PossibleValuesParser::new(all.map(|(name, title)| PossibleValue::new(name).help(title)))
}

/// Returns those of `all` whose names were given, in the order of `all`; all if none was given.
fn chosen<T: Copy>(all: &[T], name: fn(&T) -> &'static str, only: &[String]) -> impl Iterator<Item = T> {
    let is_chosen = move |one: &T| only.is_empty() || only.iter().any(|given| given == name(one));
    all.iter().copied().filter(is_chosen)
}

/// Runs a benchmark on `program`, prints its report, and writes its page.
pub async fn run(
    command: &BenchCommand,
    program: &Path,
    format: Format,
    progress: &mut Progress,
) -> anyhow::Result<()> {
    match command {
        BenchCommand::Nbd(scenario) => show(scenario, program, format, progress).await,
        BenchCommand::Mirror(scenario) => show(scenario, program, format, progress).await,
        BenchCommand::Pacing(scenario) => show(scenario, program, format, progress).await,
        BenchCommand::Prediction(scenario) => show(scenario, program, format, progress).await,
        BenchCommand::Machine(scenario) => show(scenario, program, format, progress).await,
        BenchCommand::Strategies(scenario) => show(scenario, program, format, progress).await,
        BenchCommand::Return(scenario) => show(scenario, program, format, progress).await,
        BenchCommand::Link(scenario) => show(scenario, program, format, progress).await,
    }
}

async fn show<S: Scenario>(
    scenario: &S,
    program: &Path,
    format: Format,
    progress: &mut Progress,
) -> anyhow::Result<()> {
    let html = scenario.common().html.as_deref();
    html.map_or(Ok(()), check_page)?;
    let report = runner::run(scenario, program, progress).await?;
    console::print(format, &report, report::Report::text)?;
    html.map_or(Ok(()), |path| std::fs::write(path, report.page()).with_context(|| unwritten(path)))
}

/// Checks that the page can be written, before minutes of measuring.
fn check_page(path: &Path) -> anyhow::Result<()> {
    let existed = path.exists();
    let opened = std::fs::File::options().append(true).create(true).open(path);
    let checked = opened.and_then(|_| if existed { Ok(()) } else { std::fs::remove_file(path) });
    checked.with_context(|| unwritten(path))
}

fn unwritten(path: &Path) -> String {
    format!("the page {} cannot be written", path.display())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(subcommand)]
        command: BenchCommand,
    }

    #[test]
    fn chosen_parts_are_measured_once_and_in_the_usual_order() {
        let all = ["near", "far", "guest"];
        let of = |only: &[&str]| -> Vec<&str> {
            let only: Vec<String> = only.iter().map(|&name| name.to_owned()).collect();
            chosen(&all, |name| name, &only).collect()
        };
        assert_eq!(of(&[]), all);
        assert_eq!(of(&["guest", "near", "near"]), ["near", "guest"]);
    }

    #[test]
    fn what_cannot_be_measured_is_refused() {
        assert!(Line::try_parse_from(["bench", "nbd", "--only", "mixed-1", "--size", "32MiB"]).is_ok());
        for line in ["--size 1MiB", "--size 4100KiB", "--rounds 0", "--seconds 0", "--only writes"] {
            let line = format!("bench nbd {line}");
            assert!(Line::try_parse_from(line.split(' ')).is_err(), "{line}");
        }
    }
}
