//! The page of `bench strategies`: each figure with its table, its plot, and what the paper says.

use report::escape;

use super::plot::draw;
use super::{Figure, StrategiesReport};
use crate::bench::page::{page, section};
use crate::demo::Bytes;

impl StrategiesReport {
    /// Returns the report as an HTML page.
    pub fn page(&self) -> String {
        let sections: String = self.figures.iter().map(Figure::section).collect();
        page("Strategies beside each other", &self.lead(), &self.environment, &sections)
    }

    /// Describes the measurement in a sentence.
    pub fn lead(&self) -> String {
        let Self { size_bytes, rounds, mover, device, max_downtime_ms, .. } = self;
        format!(
            "An image of {} is moved between two stores of this machine, {rounds} rounds. Each store is slowed down to {} us more \
             a request, {} requests and {} a second; the mover copies {} chunks of {} at once; rounds may hold guests for \
             {max_downtime_ms} ms. Off-line: the same mover, and no guest. Every image that has moved was compared.",
            Bytes(*size_bytes),
            device.latency_us,
            device.operations_per_second,
            Bytes(device.bytes_per_second),
            mover.depth,
            Bytes(mover.chunk_bytes),
        )
    }
}

impl Figure {
    /// Returns the figure's heading, for tables and pages.
    pub fn heading(&self) -> String {
        format!("{}: {}", self.name, self.title)
    }

    pub(in crate::bench) fn section(&self) -> String {
        let caption = escape(&format!("{} by {}", self.y, self.x));
        let plot = format!("<figure><figcaption>{caption}</figcaption>\n{}</figure>\n", draw(self));
        match self.table() {
            Some(table) => section(&self.heading(), &table, &plot),
            None => {
                let (heading, note) = (escape(&self.heading()), escape(self.note));
                format!("<section>\n<h2>{heading}</h2>\n{plot}<p>{note}</p>\n</section>\n")
            }
        }
    }
}
