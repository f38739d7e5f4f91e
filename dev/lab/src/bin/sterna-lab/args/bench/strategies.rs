//! The command line of `bench strategies`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use console::units::{parse_rate, parse_size};
use lab::bench::strategies::{Device, Experiment, Mover, Scale};

use super::{one_of, parse_image_size, wanted};

/// Range of chunks in flight, as in the daemon's configuration.
const DEPTH: std::ops::RangeInclusive<i64> = 1..=64;
/// Range of chunk sizes, as in the daemon's configuration.
const CHUNK_BYTES: std::ops::RangeInclusive<u64> = 65_536..=4_194_304;

#[derive(Debug, Args)]
pub(crate) struct BenchStrategiesArguments {
    /// Extent of the measurement.
    #[arg(long, value_enum, default_value_t = BenchScale::Full)]
    scale: BenchScale,
    /// The same as --scale quick: everything in six minutes.
    #[arg(long, conflicts_with = "scale")]
    quick: bool,
    /// How often everything is measured; medians are taken of that.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: Option<u32>,
    /// Size of the image, a multiple of 1 MiB.
    #[arg(long, value_parser = parse_image_size)]
    size: Option<u64>,
    /// Chunks that the mover copies at once.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(DEPTH))]
    depth: u32,
    /// Bytes of each chunk.
    #[arg(long, default_value = "64KiB", value_parser = parse_chunk_size)]
    chunk: u64,
    /// Extra time of each read and write of a store, in milliseconds; usually 2.
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(0..=1000))]
    store_latency: Option<u64>,
    /// Rate of a store; usually 64MiB/s, which the mover uses completely.
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    store_rate: Option<u64>,
    /// Requests a second of a store; usually 3500.
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    store_operations: Option<u64>,
    /// Longest hold of guests at the end of rounds, in milliseconds.
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    pub(crate) max_downtime: u64,
    /// Where the temporary folder is made, on the disk to measure; by default where temporary files are.
    #[arg(long, value_name = "DIR")]
    pub(crate) folder: Option<PathBuf>,
    /// Write a page with plots to this file.
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
    /// Measure this alone; may be given several times.
    #[arg(long, value_name = "EXPERIMENT", value_parser = one_of(Experiment::ALL, Experiment::name, Experiment::title))]
    only: Vec<Experiment>,
}

/// Extent of the measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchScale {
    /// Everything, with enough rounds for conclusions.
    Full,
    /// Everything in six minutes.
    Quick,
    /// Everything in half a minute, only to test that every figure is made.
    Tiny,
}

impl BenchStrategiesArguments {
    pub(crate) fn experiments(&self) -> Vec<Experiment> {
        wanted(Experiment::ALL, &self.only)
    }

    pub(crate) fn scale(&self) -> Scale {
        match self.scale {
            _ if self.quick => Scale::Quick,
            BenchScale::Full => Scale::Full,
            BenchScale::Quick => Scale::Quick,
            BenchScale::Tiny => Scale::Tiny,
        }
    }

    pub(crate) fn size(&self) -> u64 {
        self.size.unwrap_or_else(|| self.scale().size_bytes())
    }

    pub(crate) fn rounds(&self) -> u32 {
        self.rounds.unwrap_or_else(|| self.scale().rounds())
    }

    pub(crate) fn mover(&self) -> Mover {
        Mover { depth: self.depth, chunk_bytes: self.chunk }
    }

    pub(crate) fn device(&self) -> Device {
        let usual = self.scale().device();
        let latency_us = self.store_latency.map(|milliseconds| milliseconds * 1000);
        Device {
            latency_us: latency_us.unwrap_or(usual.latency_us),
            bytes_per_second: self.store_rate.unwrap_or(usual.bytes_per_second),
            operations_per_second: self.store_operations.unwrap_or(usual.operations_per_second),
        }
    }
}

fn parse_chunk_size(text: &str) -> Result<u64, String> {
    match parse_size(text).map_err(|error| error.to_string())? {
        bytes if CHUNK_BYTES.contains(&bytes) && bytes.is_multiple_of(*CHUNK_BYTES.start()) => Ok(bytes),
        _ => Err("it must be a multiple of 64KiB, and at most 4MiB".to_owned()),
    }
}

pub(super) const HELP: &str = "\
Examples:
  sterna bench strategies --quick --html strategies.html
  sterna bench strategies --only outstanding --rounds 5
  sterna bench strategies --only outstanding --store-latency 10 --store-rate 128MiB/s
  sterna bench strategies --only rounds --depth 8 --chunk 512KiB --json > rounds.json

Each strategy moves an image between two stores of this machine, while fio works on it. Both stores are slowed down, so that \
they behave as two devices on one disk. Every migration is shown beside the time of an idle image, and \
beside the figures of the paper that compared such strategies first. For \"hosts\" the image moves to a second daemon instead, \
over a slow link, also by the strategies that need two hosts. It needs no root, leaves nothing behind, and needs fio \
(Debian: fio). Let the machine be idle meanwhile. Without --quick it takes about two hours.";
