//! The command line of the demo.

use std::path::PathBuf;

use api::Strategy;
use clap::Args;
use console::units::parse_size_of_at_least;

use super::one_of;

/// The smallest disk of a demo: a smaller one would move too quickly to show anything.
const DEMO_BYTES_MIN: u64 = 128 << 20;
const THREAD_DISK_BYTES: u64 = 1 << 30;
/// Default size with a VM, which is slower.
const MACHINE_DISK_BYTES: u64 = 512 << 20;
const MOVED_DISK_BYTES: u64 = 256 << 20;

#[derive(Debug, Args)]
pub(crate) struct DemoArguments {
    /// Use a VM in QEMU as guest, instead of a thread of this program.
    #[arg(long)]
    vm: bool,
    /// Move to another host and back. As root the hosts are network namespaces, otherwise two daemons on loopback. The link is
    /// cut once. With --vm the whole VM moves, without a cut, and a client outside keeps a connection to it.
    #[arg(long)]
    hosts: bool,
    /// How the disk is copied; three-phase and post-copy only with --hosts.
    #[arg(long, default_value = "mirror", value_parser = one_of(Strategy::ALL, Strategy::name, summary))]
    #[arg(requires_ifs = [("three-phase", "hosts"), ("post-copy", "hosts")])]
    pub(crate) strategy: Strategy,
    /// Size of the disk, a multiple of 1 MiB; at least half of it is filled [default: 1GiB; with --vm 512MiB; with
    /// both --vm and --hosts 256MiB].
    #[arg(long, value_parser = parse_demo_size)]
    size: Option<u64>,
    /// The folder of the VM's kernel and initramfs; by default the one that `make demo` fills.
    #[arg(long, value_name = "DIR", requires = "vm")]
    pub(crate) image: Option<PathBuf>,
    /// Write the migration's report, an HTML page, to this file.
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
    /// The folder for temporary files; by default the system's.
    #[arg(long, value_name = "DIR")]
    pub(crate) folder: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scene {
    Stores,
    MachineOnStores,
    Hosts,
    MovedMachine,
}

impl DemoArguments {
    pub(crate) fn scene(&self) -> Scene {
        match (self.hosts, self.vm) {
            (false, false) => Scene::Stores,
            (false, true) => Scene::MachineOnStores,
            (true, false) => Scene::Hosts,
            (true, true) => Scene::MovedMachine,
        }
    }

    pub(crate) fn disk_bytes(&self) -> u64 {
        self.size.unwrap_or(match self.scene() {
            Scene::Stores | Scene::Hosts => THREAD_DISK_BYTES,
            Scene::MachineOnStores => MACHINE_DISK_BYTES,
            Scene::MovedMachine => MOVED_DISK_BYTES,
        })
    }
}

/// Returns what `--help` says about a strategy.
fn summary(strategy: Strategy) -> &'static str {
    match strategy {
        Strategy::Auto => "mirror or tracking, as the daemon chooses",
        Strategy::Mirror => "in one pass; writes to what is copied go to both stores",
        Strategy::Tracking => {
            "in rounds; writes go to the source, and the next round copies what they changed"
        }
        Strategy::ThreePhase => {
            "to another host: some rounds, then the guest runs there and missing blocks follow"
        }
        Strategy::PostCopy => "to another host: the guest runs there at once, and its disk follows",
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
  sterna demo --hosts --vm
  sterna demo --hosts --vm --strategy three-phase

It needs no root, no configuration and no daemon, and leaves nothing behind. --vm needs QEMU. The exit code is 0 only if \
all copies had the guest's writes; with --hosts also only if the copy resumed after the cut where it was, or the VM's \
connection survived.

--json prints the figures of the report. With --hosts the bytes and seconds of both moves are added up, and there are two \
more fields: resumed, which is true only if the copied amount shows that the copy did not begin anew, and longest_gap_ms, the \
longest time without progress at the other host. With --hosts and --vm these are downtime_ms, the downtime of the VM, with \
downtime_parts that add up to it, and longest_connection_gap_ms and connection_survived, which are null if there is no client \
outside. disruption_ms is the time in which the client, or else the guest, had less than 90 % of its requests of before, or a \
99th percentile of their latency above twice that of before.";

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use crate::args::Arguments;

    #[test]
    fn a_disk_is_handed_over_before_it_has_arrived_between_hosts_only() {
        let parse = |line: &str| Arguments::try_parse_from(line.split(' ')).map(drop);
        for strategy in ["three-phase", "post-copy"] {
            let error = parse(&format!("sterna demo --strategy {strategy}")).unwrap_err().to_string();
            assert!(error.contains("--hosts"), "{error}");
            parse(&format!("sterna demo --hosts --vm --strategy {strategy}")).unwrap();
        }
        parse("sterna demo --strategy tracking").unwrap();
    }
}
