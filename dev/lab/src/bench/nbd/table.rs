//! The figures of one workload, as a table and a sentence.

use super::{ContenderFigures, WorkloadFigures};
use crate::bench::show::{Table, figure_and_spread, mebibytes, median, microseconds, ratio, thousands};

impl WorkloadFigures {
    /// Returns the figures of this workload as a table.
    pub fn table(&self) -> Table {
        let throughput = if self.is_sequential() { "MiB/s" } else { "IOPS" };
        Table {
            header: ["", throughput, "", "OF RAW", "ADDED us", "LATENCY us", "99 % us", "CPU us"]
                .map(str::to_owned)
                .to_vec(),
            rows: self.contenders.iter().map(|contender| self.row(contender)).collect(),
            conclusion: self.conclusion(),
        }
    }

    fn row(&self, contender: &ContenderFigures) -> Vec<String> {
        let ContenderFigures { server_cpu_us_per_request, added_us_per_request, iops_to_raw, .. } = contender;
        // Without a server, the client itself uses the disk.
        let cpu = server_cpu_us_per_request.as_ref().unwrap_or(&contender.client_cpu_us_per_request);
        let [throughput, spread] = match self.is_sequential() {
            true => figure_and_spread(&contender.bytes_per_second, mebibytes),
            false => figure_and_spread(&contender.iops, thousands),
        };
        vec![
            contender.name.to_owned(),
            throughput,
            spread,
            median(iops_to_raw.as_ref(), |ratio| format!("{ratio:.2}")),
            median(added_us_per_request.as_ref(), microseconds),
            microseconds(contender.mean_latency_us.median),
            microseconds(contender.p99_latency_us.median),
            microseconds(cpu.median),
        ]
    }

    fn conclusion(&self) -> String {
        let added = self.added_sterna_to_peer.as_ref();
        let cpu = self.cpu_sterna_to_peer.as_ref();
        let mut parts = vec![format!("{} × its throughput", ratio(&self.iops_sterna_to_peer))];
        parts.extend(added.map(|added| format!("{} × its added time", ratio(added))));
        parts.extend(cpu.map(|cpu| format!("{} × its CPU time", ratio(cpu))));
        format!("sterna beside qemu-storage-daemon: {}", parts.join(", "))
    }
}
