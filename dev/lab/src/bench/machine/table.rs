//! The figures of `bench machine` as a table.

use super::figures::{LoadFigures, MachineReport};
use crate::bench::Table;
use crate::bench::show::{figure_and_spread, median, milliseconds};

impl MachineReport {
    /// Returns the downtimes, a row for each load.
    pub fn table(&self) -> Table {
        let header = ["", "STERNA ms", "", "OF WHICH MEMORY", "QEMU ms", "", "ADDED ms", ""]
            .map(str::to_owned)
            .to_vec();
        let conclusions: Vec<String> = self.loads.iter().map(conclusion).collect();
        Table { header, rows: self.loads.iter().map(cells).collect(), conclusion: conclusions.join(" ") }
    }
}

fn cells(load: &LoadFigures) -> Vec<String> {
    let [sterna, sterna_spread] = figure_and_spread(&load.sterna_downtime_ms, milliseconds);
    let [qemu, qemu_spread] = figure_and_spread(&load.qemu_downtime_ms, milliseconds);
    let [added, added_spread] = figure_and_spread(&load.added_ms, milliseconds);
    let memory = median(Some(&load.sterna_memory_ms), milliseconds);
    vec![load.name.to_owned(), sterna, sterna_spread, memory, qemu, qemu_spread, added, added_spread]
}

fn conclusion(load: &LoadFigures) -> String {
    let LoadFigures { name, added_ms, .. } = load;
    format!("{name}: moving the disk, too, adds {} ms (median of the rounds).", milliseconds(added_ms.median))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::Summary;

    #[test]
    fn a_row_has_as_many_cells_as_the_header() {
        let summary = |samples: &[f64]| Summary::of(samples.to_vec()).unwrap();
        let load = LoadFigures::of(
            "idle",
            summary(&[20.0, 30.0, 25.0]),
            summary(&[10.0, 11.0, 12.0]),
            summary(&[12.0, 20.0, 19.0]),
        )
        .unwrap();
        assert_eq!(load.added_ms.samples, [8.0, 10.0, 6.0]);
        let cells = cells(&load);
        assert_eq!(cells, ["idle", "25", "20–30", "11", "19", "12–20", "8.00", "6.00–10"]);
        assert_eq!(conclusion(&load), "idle: moving the disk, too, adds 8.00 ms (median of the rounds).");
    }
}
