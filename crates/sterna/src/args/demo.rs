//! The command line of the demo.

use std::path::PathBuf;

use clap::Args;

use super::parse_size_of_at_least;

/// The smallest disk of a demo: on a smaller one there would be nothing to see.
const DEMO_BYTES_MIN: u64 = 128 << 20;

#[derive(Debug, Args)]
pub(crate) struct DemoArguments {
    /// With a virtual machine in QEMU as guest, rather than a thread of this program.
    #[arg(long)]
    vm: bool,
    /// Between two hosts, there and home again, over a link that is cut once: network namespaces as root, otherwise two
    /// daemons on loopback.
    #[arg(long, conflicts_with = "vm")]
    pub(crate) hosts: bool,
    /// Size of the disk, a multiple of 1 MiB; three quarters of it are filled.
    #[arg(long, default_value = "1GiB", value_parser = parse_demo_size, conflicts_with = "vm")]
    pub(crate) size: u64,
    /// The folder that holds the machine's kernel and initramfs; by default the one that `make demo` fills.
    #[arg(long, value_name = "DIR", requires = "vm")]
    pub(crate) image: Option<PathBuf>,
    /// Write the migration's report, an HTML page, to this file.
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
    /// Where the temporary folder is made; by default where temporary files are.
    #[arg(long, value_name = "DIR")]
    pub(crate) folder: Option<PathBuf>,
}

/// Who works on the disk of the demo.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Guest {
    /// A thread of this program.
    Thread,
    /// A virtual machine.
    Machine,
}

impl DemoArguments {
    /// Who works on the disk.
    pub(crate) fn guest(&self) -> Guest {
        if self.vm { Guest::Machine } else { Guest::Thread }
    }
}

fn parse_demo_size(text: &str) -> Result<u64, String> {
    parse_size_of_at_least(text, DEMO_BYTES_MIN)
}

pub(super) const HELP: &str = "\
Examples:
  sterna demo
  sterna demo --json
  sterna demo --report demo.html
  sterna demo --vm
  sterna demo --hosts
  sterna demo --hosts --size 256MiB --json

It needs no root, no configuration and no daemon, and leaves nothing behind. --vm needs QEMU. The exit code is 0 only if \
everything held what the guest had written; with --hosts also only if the copy went on after the cut where it was.

--json prints the figures of the report; bytes and seconds of both ways of --hosts are added up, and two fields more are \
printed: resumed, which is true only if what was copied shows that the copy did not begin anew, and longest_gap_ms, the \
longest time in which nothing more arrived at the other host.";
