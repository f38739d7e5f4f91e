//! The figures of `bench link`, as tables and sentences.

use super::{CopyReport, GuestReport};
use crate::bench::show::{Table, figure_and_spread, mebibytes, milliseconds, ratio, seconds};
use crate::bench::statistics::Summary;

impl CopyReport {
    /// Returns the copies as a table.
    pub fn table(&self) -> Table {
        let row = |contender: &super::CopyFigures| {
            let [time, spread] = figure_and_spread(&contender.seconds, seconds);
            vec![
                contender.name.to_owned(),
                time,
                spread,
                mebibytes(contender.bytes_per_second.median),
                part(contender.bytes_per_second.median / self.link_bytes_per_second),
                part_of_tcp(contender.to_tcp.as_ref()),
                part_of_tcp(contender.second_half_to_tcp.as_ref()),
            ]
        };
        let beside = self.contenders.iter().filter_map(|contender| {
            Some(format!("{}: {} × what TCP carries", contender.name, ratio(contender.to_tcp.as_ref()?)))
        });
        Table {
            header: ["", "SECONDS", "", "MiB/s", "OF LINK", "OF TCP", "SECOND HALF"]
                .map(str::to_owned)
                .to_vec(),
            rows: self.contenders.iter().map(row).collect(),
            conclusion: beside.collect::<Vec<_>>().join("; "),
        }
    }

    /// Returns a sentence about the links and their round trip.
    pub fn heading(&self) -> String {
        format!("{}; measured: {} ms", self.title, milliseconds(self.round_trip_ms))
    }
}

impl GuestReport {
    /// Returns the migrations as a table.
    pub fn table(&self) -> Table {
        let row = |contender: &super::GuestFigures| {
            let [time, spread] = figure_and_spread(&contender.seconds, seconds);
            let rounds = contender.seconds.samples.len();
            vec![
                contender.name.to_owned(),
                format!("{} of {rounds}", contender.ended),
                time,
                spread,
                mebibytes(contender.written_bytes_per_second_before.median),
                mebibytes(contender.written_bytes_per_second.median),
                part(contender.written_to_link.median),
                milliseconds(contender.worst_latency_ms.median),
                milliseconds(contender.p99_latency_ms.median),
            ]
        };
        Table {
            header: ["", "ENDED", "SECONDS", "", "MiB/s BEFORE", "DURING", "OF LINK", "WORST ms", "99 % ms"]
                .map(str::to_owned)
                .to_vec(),
            rows: self.contenders.iter().map(row).collect(),
            conclusion: format!(
                "the link carries {} MiB/s; a migration that has not ended when the image could have been brought \
                 over four times is given up",
                mebibytes(self.link_bytes_per_second)
            ),
        }
    }
}

/// Formats a share of TCP's throughput; a dash for TCP itself, and for an unknown share.
fn part_of_tcp(ratios: Option<&Summary>) -> String {
    ratios.map_or_else(|| "-".to_owned(), |ratios| part(ratios.median))
}

fn part(value: f64) -> String {
    format!("{value:.2}")
}
