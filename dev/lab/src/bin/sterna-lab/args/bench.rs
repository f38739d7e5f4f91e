//! The command line of the benchmarks.

mod strategies;

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use console::units::parse_size_of_at_least;
use lab::bench::link::Part as LinkPart;
use lab::bench::mirror::Part;
use lab::bench::nbd::{Tracing, Workload};
use lab::bench::return_home::Load;

pub(crate) use self::strategies::BenchStrategiesArguments;
use super::one_of;

/// The smallest image: smaller ones would only measure the disk's cache.
const SIZE_BYTES_MIN: u64 = 32 << 20;

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Measure the performance of NBD clients, beside the raw file and qemu-storage-daemon.
    #[command(after_help = NBD_HELP)]
    Nbd(BenchNbdArguments),
    /// Measure migrations, idle and under load, beside off-line copies and QEMU's mirror.
    #[command(after_help = MIRROR_HELP)]
    Mirror(BenchMirrorArguments),
    /// Measure the downtime of VMs that move, beside QEMU's own migration.
    #[command(after_help = MACHINE_HELP)]
    Machine(BenchMachineArguments),
    /// Compare the strategies, after the figures of a paper.
    #[command(after_help = strategies::HELP)]
    Strategies(BenchStrategiesArguments),
    /// Measure how a volume moves to another host and returns, after the tables of a paper.
    #[command(after_help = RETURN_HELP)]
    Return(BenchReturnArguments),
    /// Measure how well migrations use a link between two hosts, beside plain TCP and QEMU's mirror.
    #[command(after_help = LINK_HELP)]
    Link(BenchLinkArguments),
}

/// Arguments of several benchmarks.
#[derive(Debug, Args)]
pub(crate) struct BenchArguments {
    /// Size of the image, a multiple of 1 MiB.
    #[arg(long, default_value = "2GiB", value_parser = parse_image_size)]
    pub(crate) size: u64,
    /// Where the temporary folder is made, on the disk to measure; by default where temporary files are.
    #[arg(long, value_name = "DIR")]
    pub(crate) folder: Option<PathBuf>,
    /// Write a page with plots to this file.
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct BenchNbdArguments {
    /// How often everything is measured; medians are taken of that.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) rounds: u32,
    /// Duration of each measurement.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub(crate) seconds: u32,
    #[command(flatten)]
    pub(crate) bench: BenchArguments,
    /// Measure this alone; may be given several times.
    #[arg(long, value_name = "WORKLOAD", value_parser = one_of(Workload::ALL, Workload::name, Workload::title))]
    only: Vec<Workload>,
    /// Also measure the parts of a request's time inside the daemon, which slows it a little.
    #[arg(long)]
    trace: bool,
}

#[derive(Debug, Args)]
pub(crate) struct BenchMirrorArguments {
    /// How often everything is measured; medians are taken of that.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) rounds: u32,
    /// How long the guest works before and after each migration under load.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub(crate) seconds: u32,
    #[command(flatten)]
    pub(crate) bench: BenchArguments,
    /// Measure only this part.
    #[arg(long, value_name = "PART")]
    pub(crate) only: Option<BenchPart>,
    /// Requests a second of the guest under load; by default as many as it can.
    #[arg(long, value_name = "IOPS", value_parser = clap::value_parser!(u32).range(10..))]
    pub(crate) guest_iops: Option<u32>,
}

#[derive(Debug, Args)]
pub(crate) struct BenchLinkArguments {
    /// How often everything is measured; medians are taken of that.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) rounds: u32,
    /// How long the guest works before its disk begins to move.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub(crate) seconds: u32,
    #[command(flatten)]
    pub(crate) bench: BenchArguments,
    /// Measure this alone; may be given several times.
    #[arg(long, value_name = "PART", value_parser = one_of(LinkPart::ALL, LinkPart::name, LinkPart::title))]
    only: Vec<LinkPart>,
}

#[derive(Debug, Args)]
pub(crate) struct BenchReturnArguments {
    /// How often everything is measured; medians are taken of that.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) rounds: u32,
    /// How long the guest works before, between and after the migrations.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub(crate) seconds: u32,
    /// Size of the image, a multiple of 1 MiB.
    #[arg(long, default_value = "512MiB", value_parser = parse_image_size)]
    pub(crate) size: u64,
    /// Where the temporary folder is made; by default where temporary files are.
    #[arg(long, value_name = "DIR")]
    pub(crate) folder: Option<PathBuf>,
    /// Write a page to this file.
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
    /// Measure this load alone; may be given several times.
    #[arg(long, value_name = "LOAD", value_parser = one_of(Load::ALL, Load::name, Load::title))]
    only: Vec<Load>,
}

impl BenchReturnArguments {
    pub(crate) fn loads(&self) -> Vec<Load> {
        wanted(Load::ALL, &self.only)
    }
}

#[derive(Debug, Args)]
pub(crate) struct BenchMachineArguments {
    /// How often everything is measured; medians are taken of that.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) rounds: u32,
    /// Size of either VM's disk, a multiple of 1 MiB.
    #[arg(long, default_value = "256MiB", value_parser = parse_image_size)]
    pub(crate) size: u64,
    /// Where the temporary folder is made; by default where temporary files are.
    #[arg(long, value_name = "DIR")]
    pub(crate) folder: Option<PathBuf>,
    /// The folder that holds the VMs' kernel and initramfs; by default the one that `make demo` fills.
    #[arg(long, value_name = "DIR")]
    pub(crate) image: Option<PathBuf>,
}

impl BenchLinkArguments {
    pub(crate) fn parts(&self) -> Vec<LinkPart> {
        wanted(LinkPart::ALL, &self.only)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchPart {
    /// Copies of an image without clients.
    Idle,
    /// Migrations under a guest.
    Load,
}

impl BenchMirrorArguments {
    pub(crate) fn parts(&self) -> Vec<Part> {
        match self.only {
            Some(BenchPart::Idle) => vec![Part::Idle],
            Some(BenchPart::Load) => vec![Part::Load],
            None => Part::ALL.to_vec(),
        }
    }
}

impl BenchNbdArguments {
    pub(crate) fn workloads(&self) -> Vec<Workload> {
        wanted(Workload::ALL, &self.only)
    }

    pub(crate) fn tracing(&self) -> Tracing {
        if self.trace { Tracing::On } else { Tracing::Off }
    }
}

/// Returns the selected values in the order of `all`; without a selection, all.
fn wanted<T: PartialEq, const COUNT: usize>(all: [T; COUNT], only: &[T]) -> Vec<T> {
    all.into_iter().filter(|one| only.is_empty() || only.contains(one)).collect()
}

fn parse_image_size(text: &str) -> Result<u64, String> {
    parse_size_of_at_least(text, SIZE_BYTES_MIN)
}

const NBD_HELP: &str = "\
Examples:
  sterna bench nbd
  sterna bench nbd --only mixed-16 --rounds 3 --folder /srv/fast
  sterna bench nbd --only mixed-1 --only mixed-16 --trace
  sterna bench nbd --html nbd.html --json > nbd.json

One image is measured raw, through a temporary daemon, and through qemu-storage-daemon, in turns, by \
fio. It needs no root and leaves nothing behind; it needs fio and qemu-storage-daemon (Debian: fio, qemu-system-common). \
Let the machine be idle meanwhile.";

const MIRROR_HELP: &str = "\
Examples:
  sterna bench mirror
  sterna bench mirror --html mirror.html
  sterna bench mirror --only load --rounds 3 --folder /srv/fast
  sterna bench mirror --only load --guest-iops 5000 --json > mirror.json

Idle: an image with a quarter of holes is migrated by a temporary daemon, copied by cp and qemu-img, and \
mirrored by qemu-storage-daemon in both modes, in turns. Load: the same of Sterna and qemu-storage-daemon while fio works \
on the image. Every copy is compared with its source. It needs no root (but drops only the images' own cache then) and \
leaves nothing behind; it needs fio, qemu-img and qemu-storage-daemon (Debian: fio, qemu-utils, qemu-system-common). \
Let the machine be idle meanwhile.";

const LINK_HELP: &str = "\
Examples:
  sterna bench link
  sterna bench link --size 4GiB --html link.html
  sterna bench link --only metro --only far --rounds 1 --size 512MiB
  sterna bench link --only guest --json > link.json

Two hosts are made on this machine, with links that carry so much and take so long, and an image goes from one to the other: \
over plain TCP, by temporary daemons, and by qemu-storage-daemon. Then the same while a guest writes more than \
the link carries. Every copy is compared with its source. It needs root, for hosts are network namespaces, and leaves nothing \
behind; it needs ip and tc, fio and qemu-storage-daemon (Debian: iproute2, fio, qemu-system-common), and two processors. \
Let the machine be idle meanwhile. All of it takes the time of about 50 copies at 1 Gbit/s: half an hour for 2 GiB.";

const RETURN_HELP: &str = "\
Examples:
  sterna bench return
  sterna bench return --only web --rounds 1 --size 256MiB
  sterna bench return --html return.html --json > return.json

A volume moves to another host and returns, by three-phase migration, while fio works on it; the return sends only the writes \
since. As root the hosts are network namespaces with a link of 1 Gbit/s, otherwise two daemons on loopback \
with a proxy of that rate. Every returned image is compared with the image that the other host has kept. It leaves nothing \
behind; it needs fio (Debian: fio). Let the machine be idle meanwhile.";

const MACHINE_HELP: &str = "\
Examples:
  sterna bench machine
  sterna bench machine --rounds 9 --json > machine.json

Two machines in QEMU do the same beside each other, first nothing and then work on their disks. One is moved by temporary \
daemons, with its memory and its disk; the other by QEMU alone, from process to process, with its memory: both \
processes are clients of one volume. It needs no root and leaves nothing behind; it needs QEMU and the guest image \
(scripts/install-packages demo, scripts/guest-image). Let the machine be idle meanwhile.";

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use lab::bench::nbd::Workload;

    use super::{BenchCommand, LinkPart};
    use crate::args::{Arguments, Command};

    fn workloads(line: &str) -> Vec<Workload> {
        let arguments = Arguments::try_parse_from(line.split(' ')).unwrap();
        let Command::Bench(BenchCommand::Nbd(order)) = arguments.command else { unreachable!("{line}") };
        order.workloads()
    }

    #[test]
    fn workloads_are_measured_once_and_in_the_usual_order() {
        assert_eq!(workloads("sterna bench nbd"), Workload::ALL);
        let two = workloads("sterna bench nbd --only reads-16 --only mixed-1 --only mixed-1");
        assert_eq!(two, [Workload::Mixed1, Workload::Reads16]);
    }

    #[test]
    fn parts_of_links_are_measured_once_and_in_the_usual_order() {
        let parts = |line: &str| {
            let arguments = Arguments::try_parse_from(line.split(' ')).unwrap();
            let Command::Bench(BenchCommand::Link(order)) = arguments.command else { unreachable!("{line}") };
            order.parts()
        };
        assert_eq!(parts("sterna bench link"), LinkPart::ALL);
        assert_eq!(parts("sterna bench link --only guest --only near"), [LinkPart::Near, LinkPart::Guest]);
    }

    #[test]
    fn what_cannot_be_measured_is_refused() {
        for line in ["--size 1MiB", "--size 4100KiB", "--rounds 0", "--seconds 0", "--only writes"] {
            let line = format!("sterna bench nbd {line}");
            assert!(Arguments::try_parse_from(line.split(' ')).is_err(), "{line}");
        }
    }
}
