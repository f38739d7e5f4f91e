//! The figures of `bench return`, and their table. The names of fields are a contract with readers of the JSON.

use serde::Serialize;

use super::{Load, Trip};
use crate::bench::page::{page, section};
use crate::bench::show::{Table, mebibytes, milliseconds, seconds, thousands};
use crate::bench::strategies::Figure;
use crate::bench::{Environment, Summary};
use crate::demo::Bytes;

/// All figures of `bench return`.
#[derive(Clone, Debug, Serialize)]
pub struct ReturnReport {
    /// The machine and the programs that were measured.
    pub environment: Environment,
    /// Size of the image in bytes.
    pub size_bytes: u64,
    /// Number of rounds, each of which measured everything.
    pub rounds: u32,
    /// The link's rate, in bytes a second.
    pub link_bytes_per_second: f64,
    /// The journeys' figures, a report for each load.
    pub loads: Vec<LoadReport>,
    /// The guests' throughput over time in the first round: the paper's Figures 5 and 6.
    pub figures: Vec<Figure>,
}

/// The journeys under one load.
#[derive(Clone, Debug, Serialize)]
pub struct LoadReport {
    /// The guest's load during these journeys.
    pub load: Load,
    /// The first migration: the paper's primary migration (Table I).
    pub there: WayReport,
    /// The return: the paper's incremental migration (Table II).
    pub home: WayReport,
    /// Requests a second before the first migration, when no write was marked for a return.
    pub iops_before: Summary,
    /// Requests a second at the other host, over the link.
    pub iops_away: Summary,
    /// Requests a second after the return, when writes are marked (Table III).
    pub iops_after: Summary,
    /// Bytes in which the returned image equals the other host's kept one: all but what was written since.
    pub compared_bytes: Vec<u64>,
}

/// The figures of one direction.
#[derive(Clone, Debug, Serialize)]
pub struct WayReport {
    /// Time from the order until the target was complete.
    pub seconds: Summary,
    /// Time from the order until the target owned the volume.
    pub handed_over_seconds: Summary,
    /// Bytes that were moved, in total.
    pub bytes_moved: Summary,
    /// How long requests were held at the handover, in milliseconds.
    pub downtime_ms: Summary,
    /// Bytes that followed after the handover.
    pub bytes_followed: Summary,
    /// The part of these bytes that the guest waited for: the paper's pull.
    pub bytes_pulled: Summary,
    /// Requests a second during the migration.
    pub iops: Summary,
}

impl LoadReport {
    /// Sums up journeys; `None` without journeys.
    pub(super) fn of(load: Load, trips: &[Trip]) -> Option<Self> {
        let iops = |place: usize| Summary::of(trips.iter().map(|trip| trip.iops[place]).collect());
        Some(Self {
            load,
            there: WayReport::of(trips, 0)?,
            home: WayReport::of(trips, 1)?,
            iops_before: iops(0)?,
            iops_away: iops(2)?,
            iops_after: iops(4)?,
            compared_bytes: trips.iter().map(|trip| trip.compared_bytes).collect(),
        })
    }

    /// Returns both directions as a table.
    pub fn table(&self) -> Table {
        let header = [
            "",
            "SECONDS",
            "HANDED OVER s",
            "MOVED MiB",
            "DOWNTIME ms",
            "FOLLOWED KiB",
            "PULLED KiB",
            "IOPS",
        ];
        let rows = [("there", &self.there), ("home", &self.home)];
        Table {
            header: header.map(str::to_owned).to_vec(),
            rows: rows.map(|(name, way)| way.row(name)).to_vec(),
            conclusion: format!(
                "IOPS before {}, at the other host {}, at home again {}. {}",
                thousands(self.iops_before.median),
                thousands(self.iops_away.median),
                thousands(self.iops_after.median),
                paper(self.load)
            ),
        }
    }
}

impl WayReport {
    fn of(trips: &[Trip], way: usize) -> Option<Self> {
        let ways = || trips.iter().map(|trip| &trip.ways[way]);
        let bytes =
            |of: fn(&api::Migration) -> u64| Summary::of(ways().map(|way| of(&way.ended) as f64).collect());
        let handed_over = ways().map(super::Course::handed_over_seconds).collect::<Option<Vec<_>>>()?;
        let held =
            ways().map(|way| Some(way.ended.switch_over?.gate_closed_ms)).collect::<Option<Vec<_>>>()?;
        Some(Self {
            seconds: Summary::of(ways().map(super::Course::seconds).collect())?,
            handed_over_seconds: Summary::of(handed_over)?,
            bytes_moved: bytes(|migration| migration.bytes_moved)?,
            downtime_ms: Summary::of(held)?,
            bytes_followed: Summary::of(ways().map(|way| way.decisions.bytes_followed as f64).collect())?,
            bytes_pulled: Summary::of(ways().map(|way| way.decisions.bytes_pulled as f64).collect())?,
            iops: Summary::of(trips.iter().map(|trip| trip.iops[2 * way + 1]).collect())?,
        })
    }

    fn row(&self, name: &str) -> Vec<String> {
        let kibibytes = |summary: &Summary| format!("{:.0}", summary.median / 1024.0);
        vec![
            name.to_owned(),
            seconds(self.seconds.median),
            format!("{:.3}", self.handed_over_seconds.median),
            mebibytes(self.bytes_moved.median),
            milliseconds(self.downtime_ms.median),
            kibibytes(&self.bytes_followed),
            kibibytes(&self.bytes_pulled),
            thousands(self.iops.median),
        ]
    }
}

impl ReturnReport {
    /// Returns the report as an HTML page.
    pub fn page(&self) -> String {
        let Self { environment, size_bytes, rounds, loads, figures, .. } = self;
        let lead = format!(
            "An image of {} goes to another host and comes home, by three-phase migration, under a guest: {rounds} rounds. Every \
             image that has come home was compared with what the other host had kept.",
            Bytes(*size_bytes)
        );
        let sections = loads.iter().map(|load| section(load.load.title(), &load.table(), ""));
        let sections: String = sections.chain(figures.iter().map(Figure::section)).collect();
        page("There and home again", &lead, environment, &sections)
    }
}

/// Returns the paper's figures, for a disk of 39 070 MB and a link of 1 Gbit/s.
fn paper(load: Load) -> &'static str {
    match load {
        Load::Web => {
            "The paper (39 GB): 796 s, 60 ms of downtime, 39 097 MB; 62 blocks followed in 349 ms, one of them pulled."
        }
        Load::Streaming => {
            "The paper (39 GB): 798 s, 62 ms of downtime, 39 072 MB; 5 blocks followed in 380 ms, none pulled."
        }
        Load::Diabolical => {
            "The paper (39 GB): 957 s, 110 ms of downtime, 40 934 MB. Marking writes cost its benchmark less than 1 %."
        }
        Load::DiabolicalLimited => "The paper: half of the loss, and 37 % more time.",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_as_many_cells_as_the_header() {
        let one = |value: f64| Summary::of(vec![value]).unwrap();
        let way = WayReport {
            seconds: one(4.5),
            handed_over_seconds: one(4.25),
            bytes_moved: one(f64::from(300 << 20)),
            downtime_ms: one(3.2),
            bytes_followed: one(8192.0),
            bytes_pulled: one(0.0),
            iops: one(600.0),
        };
        let load = LoadReport {
            load: Load::Web,
            there: way.clone(),
            home: way,
            iops_before: one(600.0),
            iops_away: one(590.0),
            iops_after: one(600.0),
            compared_bytes: vec![1],
        };
        let table = load.table();
        assert_eq!(table.rows[0], ["there", "4.50", "4.250", "300", "3.20", "8", "0", "600"]);
        assert!(table.rows.iter().all(|row| row.len() == table.header.len()));
        assert!(
            table.conclusion.starts_with("IOPS before 600, at the other host 590,"),
            "{}",
            table.conclusion
        );
    }
}
