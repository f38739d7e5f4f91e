//! Runs many seeds on a few threads, and merges their results.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use migration::Phase;

use crate::coverage::{Coverage, Given, Orders, Struck, Table};
use crate::faults::Fault;
use crate::fleet::tally::Tally;
use crate::scenario::Options;
use crate::simulation::{Finding, simulate};
use crate::trace::Audience;
use crate::world::Violation;

const VIOLATIONS_MAX: usize = 100;

#[derive(Clone, Debug)]
pub(crate) struct Order {
    pub(crate) first: u64,
    pub(crate) count: u64,
    pub(crate) threads: usize,
    pub(crate) options: Options,
    pub(crate) until: Until,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Until {
    AllAreRun,
    OneIsFound,
}

#[derive(Debug, Default)]
pub(crate) struct Summary {
    pub(crate) seeds: u64,
    pub(crate) operations: u64,
    pub(crate) recoveries_hit: u64,
    /// The fewest guest requests of a simulation without a violation.
    pub(crate) operations_min: Option<u64>,
    pub(crate) coverage: Coverage,
    pub(crate) orders: Orders,
    pub(crate) tally: Tally,
    pub(crate) violations: Vec<(u64, Violation)>,
    /// Reached cells of the table that are listed as impossible, by seed.
    pub(crate) contradictions: Vec<(u64, Fault, Phase)>,
    /// Simulations with a violation, with those that were not kept.
    pub(crate) violated: u64,
    pub(crate) took: Duration,
}

pub(crate) fn run(order: &Order, prepare: impl Fn() + Sync) -> Summary {
    let began = Instant::now();
    let next = AtomicU64::new(order.first);
    let end = AtomicU64::new(order.first.saturating_add(order.count));
    let table = order.options.table();
    let empty = || Summary { coverage: Coverage::of(table), orders: Orders::of(table), ..Summary::default() };
    let mut summary = empty();
    std::thread::scope(|scope| {
        let work = || {
            prepare();
            let mut part = empty();
            loop {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if seed >= end.load(Ordering::Relaxed) {
                    return part;
                }
                let finding = simulate_caught(seed, &order.options);
                if finding.violation.is_some() && order.until == Until::OneIsFound {
                    end.fetch_min(seed, Ordering::Relaxed);
                }
                part.add(seed, finding, table);
            }
        };
        let threads: Vec<_> = (0..order.threads.max(1)).map(|_| scope.spawn(work)).collect();
        for part in threads.into_iter().filter_map(|thread| thread.join().ok()) {
            summary.merge(part);
        }
    });
    summary.violations.sort_by_key(|(seed, _)| *seed);
    summary.contradictions.sort_unstable_by_key(|(seed, ..)| *seed);
    summary.violations.truncate(VIOLATIONS_MAX);
    summary.took = began.elapsed();
    summary
}

fn simulate_caught(seed: u64, options: &Options) -> Finding {
    catch_unwind(AssertUnwindSafe(|| simulate(seed, options, Audience::Nobody))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
        let detail = text.unwrap_or_else(|| "without words".to_owned());
        let violation = Violation { checker: "panic", at: Duration::ZERO, detail };
        Finding {
            violation: Some(violation),
            operations: 0,
            recoveries_hit: 0,
            struck: Struck::default(),
            given: Given::default(),
            tally: Tally::default(),
            hash: 0,
        }
    })
}

impl Summary {
    fn add(&mut self, seed: u64, finding: Finding, table: Table) {
        self.seeds += 1;
        self.operations += finding.operations;
        self.recoveries_hit += finding.recoveries_hit;
        self.coverage.add(&finding.struck);
        self.orders.add(&finding.given);
        self.tally.add_seed(&finding.tally);
        let contradictions = finding.struck.contradictions(table);
        self.contradictions.extend(contradictions.into_iter().map(|(fault, phase)| (seed, fault, phase)));
        match finding.violation {
            Some(violation) => {
                self.violated += 1;
                if self.violations.len() < VIOLATIONS_MAX {
                    self.violations.push((seed, violation));
                }
            }
            None => {
                let fewest = self.operations_min.unwrap_or(u64::MAX);
                self.operations_min = Some(fewest.min(finding.operations));
            }
        }
    }

    fn merge(&mut self, other: Self) {
        self.seeds += other.seeds;
        self.operations += other.operations;
        self.recoveries_hit += other.recoveries_hit;
        self.operations_min = [self.operations_min, other.operations_min].into_iter().flatten().min();
        self.coverage.merge(&other.coverage);
        self.orders.merge(&other.orders);
        self.tally.merge(&other.tally);
        self.contradictions.extend(other.contradictions);
        self.violations.extend(other.violations);
        self.violated += other.violated;
    }
}
