//! Families of samples in Prometheus' format. `host/description/metrics.rs` collects the values.
//! Names follow Prometheus' conventions: base units, `_total` for counters. Labels are names of objects of which a host has few
//! (volumes, stores, hosts, links) or words of closed lists (states, phases, reasons), never identities of migrations.

use std::time::Duration;

use lane::Latencies;
use prometheus::TextEncoder;
use prometheus::proto::{Bucket, Counter, Gauge, Histogram, LabelPair, Metric, MetricFamily, MetricType};

pub(crate) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The smallest and the largest bound of a histogram, as powers of two of microseconds: 64 µs and 17 s. At powers of
/// two latencies are counted exactly.
const BOUNDS: std::ops::RangeInclusive<u32> = 6..=24;

/// Labels of a sample: names and values.
pub(crate) type Labels<'a> = &'a [(&'a str, &'a str)];

/// The samples of one answer.
#[derive(Default)]
pub(crate) struct Exposition {
    families: Vec<MetricFamily>,
}

pub(crate) struct Family<'a> {
    family: &'a mut MetricFamily,
}

impl Exposition {
    pub(crate) fn counter(&mut self, name: &str, help: &str) -> Family<'_> {
        self.begin(name, help, MetricType::COUNTER)
    }

    pub(crate) fn gauge(&mut self, name: &str, help: &str) -> Family<'_> {
        self.begin(name, help, MetricType::GAUGE)
    }

    pub(crate) fn histogram(&mut self, name: &str, help: &str) -> Family<'_> {
        self.begin(name, help, MetricType::HISTOGRAM)
    }

    /// Returns the text; leaves out families without samples. Fails if a family has no name.
    pub(crate) fn text(mut self) -> Result<String, prometheus::Error> {
        self.families.retain(|family| !family.get_metric().is_empty());
        TextEncoder::new().encode_to_string(&self.families)
    }

    fn begin(&mut self, name: &str, help: &str, kind: MetricType) -> Family<'_> {
        let mut family = MetricFamily::default();
        family.set_name(name.to_owned());
        family.set_help(help.to_owned());
        family.set_field_type(kind);
        self.families.push(family);
        let last = self.families.len() - 1;
        Family { family: &mut self.families[last] }
    }
}

impl Family<'_> {
    pub(crate) fn add(&mut self, labels: Labels, value: f64) {
        let mut metric = labelled(labels);
        if self.family.get_field_type() == MetricType::COUNTER {
            let mut counter = Counter::default();
            counter.set_value(value);
            metric.set_counter(counter);
        } else {
            let mut gauge = Gauge::default();
            gauge.set_value(value);
            metric.set_gauge(gauge);
        }
        self.push(metric);
    }

    pub(crate) fn count(&mut self, labels: Labels, count: u64) {
        self.add(labels, count as f64);
    }

    /// Adds 1 for true, 0 for false.
    pub(crate) fn flag(&mut self, labels: Labels, is_so: impl Into<bool>) {
        self.add(labels, f64::from(u8::from(is_so.into())));
    }

    pub(crate) fn times(&mut self, labels: Labels, latencies: &Latencies) {
        let buckets = BOUNDS.map(|power| {
            let bound = Duration::from_micros(1 << power);
            let mut bucket = Bucket::default();
            bucket.set_upper_bound(bound.as_secs_f64());
            bucket.set_cumulative_count(latencies.count_below(bound));
            bucket
        });
        let mut histogram = Histogram::default();
        histogram.set_bucket(buckets.collect());
        histogram.set_sample_count(latencies.count());
        histogram.set_sample_sum(latencies.sum().as_secs_f64());
        let mut metric = labelled(labels);
        metric.set_histogram(histogram);
        self.push(metric);
    }

    fn push(&mut self, metric: Metric) {
        self.family.mut_metric().push(metric);
    }
}

fn labelled(labels: Labels) -> Metric {
    let pairs = labels.iter().map(|(name, value)| {
        let mut pair = LabelPair::default();
        pair.set_name((*name).to_owned());
        pair.set_value((*value).to_owned());
        pair
    });
    Metric::from_label(pairs.collect())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use lane::Latencies;

    use super::Exposition;

    #[test]
    fn families_are_told_in_their_order_and_those_without_samples_not_at_all() {
        let mut told = Exposition::default();
        told.counter("sterna_a_total", "What grows.").count(&[("volume", "a\"b")], 3);
        told.gauge("sterna_b", "Nothing.");
        told.gauge("sterna_c", "What is so.").flag(&[], true);
        let text = told.text().unwrap();
        let expected = "# HELP sterna_a_total What grows.\n# TYPE sterna_a_total counter\n\
                        sterna_a_total{volume=\"a\\\"b\"} 3\n\
                        # HELP sterna_c What is so.\n# TYPE sterna_c gauge\nsterna_c 1\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn times_are_told_as_a_cumulative_histogram_in_seconds() {
        let mut latencies = Latencies::default();
        for micros in [10, 100, 1500, 1500, 40_000_000] {
            latencies.add(Duration::from_micros(micros));
        }
        let mut told = Exposition::default();
        told.histogram("sterna_t_seconds", "How long.").times(&[("volume", "v")], &latencies);
        let text = told.text().unwrap();
        for line in [
            "sterna_t_seconds_bucket{volume=\"v\",le=\"0.000064\"} 1",
            "sterna_t_seconds_bucket{volume=\"v\",le=\"0.000128\"} 2",
            "sterna_t_seconds_bucket{volume=\"v\",le=\"0.002048\"} 4",
            "sterna_t_seconds_bucket{volume=\"v\",le=\"16.777216\"} 4",
            "sterna_t_seconds_bucket{volume=\"v\",le=\"+Inf\"} 5",
            "sterna_t_seconds_sum{volume=\"v\"} 40.00311",
            "sterna_t_seconds_count{volume=\"v\"} 5",
        ] {
            assert!(text.lines().any(|told| told == line), "{line}: {text}");
        }
    }
}
