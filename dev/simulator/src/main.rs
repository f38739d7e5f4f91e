//! Runs the product's core and lanes, with all their filters, in virtual time against disks that lie.
//!
//! ```text
//!   seed ──► scenario: volumes, guests, disks, migrations, faults
//!                │
//!   guests ──► align ──► probe ──► lane: volume (gate, tracker, mirror) ──► disks       lane, core: the product's
//!                │                                                      │             │
//!                └──────────────── checkers ◄───────────────────────────┴── journal ◄─┘
//! ```
//! The same seed gives the same simulation, event for event. A seed that breaks a rule is printed with the command
//! that replays it.

mod campaign;
mod checker;
mod clock;
mod coverage;
mod custody;
mod disk;
mod faults;
mod fleet;
mod grown;
mod guest;
mod journal;
mod orders;
mod pacing;
mod paused;
#[cfg(feature = "planted-bugs")]
mod planted;
mod probe;
mod random;
mod restored;
mod scenario;
mod sides;
mod simulation;
mod small;
mod standbys;
mod standing;
#[cfg(test)]
mod tests;
mod trace;
mod world;

use std::process::ExitCode;

use clap::Parser;

use crate::campaign::{Order, Summary, Until};
use crate::coverage::{ByStrategy, Cell, Coverage};
#[cfg(feature = "planted-bugs")]
use crate::planted::run as run_planted;
use crate::restored::Telling;
use crate::scenario::{Options, Rounds};
use crate::trace::Audience;

/// Runs migrations in virtual time against disks that fail, reorder, tear and hang, and checks what must hold.
#[derive(Clone, Debug, Parser)]
#[command(name = "simulator")]
struct Arguments {
    /// Number of seeds to run.
    #[arg(long, default_value_t = 1000)]
    seeds: u64,
    /// First seed to run.
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// Minimum number of guest requests of each simulation.
    #[arg(long, default_value_t = 200)]
    operations: u32,
    /// Number of threads, each of which runs its own seeds.
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Number of hosts, with a link between any two; on one host volumes move between its stores.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=5))]
    hosts: u8,
    /// Copy volumes by this strategy; by default each seed draws one.
    #[arg(long, value_enum)]
    strategy: Option<Strategy>,
    /// Run this seed only.
    #[arg(long)]
    seed: Option<u64>,
    /// Seeds with a known, unexplained violation: they are run and shown, but do not fail the run. A listed seed
    /// without a violation does.
    #[arg(long, value_delimiter = ',')]
    known: Vec<u64>,
    /// Simulate journals that are restored from backups.
    #[arg(long, conflicts_with_all = ["hosts", "strategy", "known"])]
    restored: bool,
    /// Run the small simulations: hooks whose daemon is killed, and hosts that exceed their share.
    #[arg(long, conflicts_with_all = ["hosts", "strategy", "known", "restored"])]
    small: bool,
    /// Simulate the deletion, renaming and adoption of images that others use as well.
    #[arg(long, conflicts_with_all = ["hosts", "strategy", "known", "restored"])]
    custody: bool,
    /// Simulate orders of administrators at any moment, and hosts that are lost for good.
    #[arg(long, conflicts_with_all = ["hosts", "strategy", "known", "restored"])]
    orders: bool,
    /// Simulate copies beside guests on one disk, and compare the guests with the same seed without copies.
    #[arg(long, conflicts_with_all = ["hosts", "strategy", "known", "restored"])]
    pacing: bool,
    /// Simulate the standby of a group of volumes at another host, and its promotion.
    #[arg(long, conflicts_with_all = ["hosts", "strategy", "known", "restored"])]
    standbys: bool,
    /// Print the events of the simulation; with --seed.
    #[arg(long, requires = "seed")]
    trace: bool,
    /// Run the seeds with one, two and three hosts. In addition require that each strategy meets each possible fault in each
    /// phase, in 10 of 100,000 seeds, and proportionally in fewer.
    #[arg(long, conflicts_with_all = ["hosts", "strategy", "seed", "known", "planted"])]
    coverage: bool,
    /// Break a rule on purpose (a name, or `all`), and require that it is noticed within 10,000 seeds, or, with --seed, in that
    /// one. Needs a build with `--features planted-bugs`.
    #[arg(long)]
    planted: Option<String>,
}

/// The strategy of copying volumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Strategy {
    /// In one pass, while writes go to both stores.
    Mirror,
    /// In rounds, before the handover.
    Tracking,
    /// Between hosts: in a few rounds or none; the rest follows after the handover. On one host: by mirror.
    PostCopy,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let passed = match (&arguments.planted, arguments.seed) {
        (Some(planted), seed) => run_planted(&arguments, planted, seed),
        (None, seed) if arguments.restored => run_restored(&arguments, seed),
        (None, seed) if arguments.small => run_small(&arguments, seed),
        (None, seed) if arguments.custody => run_custody(&arguments, seed),
        (None, seed) if arguments.orders => run_orders(&arguments, seed),
        (None, seed) if arguments.pacing => run_pacing(&arguments, seed),
        (None, seed) if arguments.standbys => run_standbys(&arguments, seed),
        (None, Some(seed)) => run_one(&arguments, seed),
        (None, None) if arguments.coverage => run_coverage(&arguments),
        (None, None) => run_many(&arguments).1,
    };
    if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

impl Arguments {
    fn order(&self, count: u64, until: Until) -> Order {
        Order { first: self.first, count, threads: self.threads, options: self.options(), until }
    }

    fn options(&self) -> Options {
        let rounds = match self.strategy {
            None => Rounds::Drawn,
            Some(Strategy::Tracking) => Rounds::Always,
            Some(Strategy::Mirror) => Rounds::Never,
            Some(Strategy::PostCopy) => Rounds::LeavesBlocks,
        };
        Options { operations: self.operations, hosts: self.hosts, rounds }
    }
}

fn run_one(arguments: &Arguments, seed: u64) -> bool {
    let audience = if arguments.trace { Audience::StandardOutput } else { Audience::Nobody };
    let finding = simulation::simulate(seed, &arguments.options(), audience);
    println!("seed {seed}: {} guest requests, trace {:016x}", finding.operations, finding.hash);
    if let Some(violation) = &finding.violation {
        println!("violation ({}) at {:?}: {}", violation.checker, violation.at, violation.detail);
    }
    finding.violation.is_none()
}

fn run_small(arguments: &Arguments, seed: Option<u64>) -> bool {
    if let Some(seed) = seed {
        let telling = if arguments.trace { Telling::Printed } else { Telling::Silent };
        let violation = small::replay(seed, telling);
        println!("seed {seed}: {}", violation.as_deref().unwrap_or("no violation"));
        return violation.is_none();
    }
    let shown = small::campaign(arguments.first, arguments.seeds, false);
    println!(
        "{} seeds: {} hooks begun, {} daemons killed; {} arrivals, {} refused, {} abandoned",
        shown.seeds, shown.hooks_begun, shown.kills, shown.arrivals, shown.refused, shown.abandoned
    );
    println!("{} violations", shown.violations.len());
    for (seed, violation) in &shown.violations {
        println!("  seed {seed}: {violation}");
        println!("    cargo run -p simulator --release -- --small --seed {seed} --trace");
    }
    shown.violations.is_empty()
}

fn run_restored(arguments: &Arguments, seed: Option<u64>) -> bool {
    if let Some(seed) = seed {
        let telling = if arguments.trace { Telling::Printed } else { Telling::Silent };
        let violation = restored::replay(seed, telling);
        println!("seed {seed}: {}", violation.as_deref().unwrap_or("no violation"));
        return violation.is_none();
    }
    let shown = restored::campaign(arguments.first, arguments.seeds, false);
    println!(
        "{} seeds, {} writes; {} journals were put back, of which other hosts confirmed {} volumes, people ordered {} and forgot {}, \
         and {} orders were refused",
        shown.seeds,
        shown.writes,
        shown.restores,
        shown.confirmed,
        shown.ordered,
        shown.given_up,
        shown.refused
    );
    println!("{} violations", shown.violations.len());
    for (seed, violation) in &shown.violations {
        println!("  seed {seed}: {violation}");
        println!("    cargo run -p simulator --release -- --restored --seed {seed} --trace");
    }
    shown.violations.is_empty()
}

fn run_custody(arguments: &Arguments, seed: Option<u64>) -> bool {
    if let Some(seed) = seed {
        let telling = if arguments.trace { Telling::Printed } else { Telling::Silent };
        let violation = custody::replay(seed, telling);
        println!("seed {seed}: {}", violation.as_deref().unwrap_or("no violation"));
        return violation.is_none();
    }
    let shown = custody::campaign(arguments.first, arguments.seeds, false);
    println!(
        "{} seeds: {} steps on images were taken and {} refused, and {} volumes came home into a kept image",
        shown.seeds, shown.taken, shown.refused, shown.taken_back
    );
    println!("{} violations", shown.violations.len());
    for (seed, violation) in &shown.violations {
        println!("  seed {seed}: {violation}");
        println!("    cargo run -p simulator --release -- --custody --seed {seed} --trace");
    }
    shown.violations.is_empty()
}

fn run_orders(arguments: &Arguments, seed: Option<u64>) -> bool {
    if let Some(seed) = seed {
        let telling = if arguments.trace { Telling::Printed } else { Telling::Silent };
        let violation = orders::replay(seed, telling);
        println!("seed {seed}: {}", violation.as_deref().unwrap_or("no violation"));
        return violation.is_none();
    }
    let shown = orders::campaign(arguments.first, arguments.seeds, false);
    println!("{}", shown.met);
    println!(
        "{} seeds: {} orders were carried out and {} refused; {} hosts were lost for good; in the end {} orders were needed",
        shown.seeds, shown.done, shown.refused, shown.lost, shown.needed
    );
    println!("{} violations", shown.violations.len());
    for (seed, violation) in &shown.violations {
        println!("  seed {seed}: {violation}");
        println!("    cargo run -p simulator --release -- --orders --seed {seed} --trace");
    }
    let wrong = shown.met.wrong(shown.seeds);
    wrong.iter().for_each(|wrong| println!("coverage: {wrong}"));
    shown.violations.is_empty() && wrong.is_empty()
}

fn run_pacing(arguments: &Arguments, seed: Option<u64>) -> bool {
    if let Some(seed) = seed {
        let telling = if arguments.trace { Telling::Printed } else { Telling::Silent };
        let violation = pacing::replay(seed, telling);
        println!("seed {seed}: {}", violation.as_deref().unwrap_or("no violation"));
        return violation.is_none();
    }
    let shown = pacing::campaign(arguments.first, arguments.seeds, false);
    let of = |sorted: &[f64], part: f64| {
        sorted.get((part * sorted.len() as f64) as usize).copied().unwrap_or_default()
    };
    println!(
        "{} seeds; where guests wait for answers on a disk without trouble, they lost {:.2} of what was ordered (median; 95 of 100: \
         {:.2}), and copies had {:.2} of what that frees (median; 5 of 100: {:.2})",
        shown.seeds,
        of(&shown.losses, 0.5),
        of(&shown.losses, 0.95),
        of(&shown.gains, 0.5),
        of(&shown.gains, 0.05)
    );
    println!("{} violations", shown.violations.len());
    for (seed, violation) in &shown.violations {
        println!("  seed {seed}: {violation}");
        println!("    cargo run -p simulator --release -- --pacing --seed {seed} --trace");
    }
    shown.violations.is_empty()
}

/// One of this many seeds must catch up with a guest that writes everywhere.
const CAUGHT_UP_OF: u64 = 50;
/// One of so many seeds turns the direction of a promotion round by the difference at least.
const TURNED_OF: u64 = 10;

fn run_standbys(arguments: &Arguments, seed: Option<u64>) -> bool {
    if let Some(seed) = seed {
        let telling = if arguments.trace { Telling::Printed } else { Telling::Silent };
        let violation = standbys::replay(seed, telling);
        println!("seed {seed}: {}", violation.as_deref().unwrap_or("no violation"));
        return violation.is_none();
    }
    let shown = standbys::campaign(arguments.first, arguments.seeds, false);
    println!("{}", shown.met);
    println!(
        "{} seeds: {} cuts, {} points, {} promotions; in the end {} standbys were current",
        shown.seeds, shown.cuts, shown.points, shown.promotions, shown.current
    );
    println!("{} of them have caught up with a guest that wrote everywhere", shown.caught_up);
    println!(
        "{} times the direction was turned round after a promotion, {} times by the difference",
        shown.turned, shown.turned_by_difference
    );
    println!("{} violations", shown.violations.len());
    for (seed, violation) in &shown.violations {
        println!("  seed {seed}: {violation}");
        println!("    cargo run -p simulator --release -- --standbys --seed {seed} --trace");
    }
    let mut wrong = shown.met.wrong(shown.seeds);
    let (caught_up, wanted) = (shown.caught_up, shown.seeds / CAUGHT_UP_OF);
    if caught_up < wanted {
        wrong.push(format!("scattered writes were caught up with in {caught_up} seeds, {wanted} are wanted"));
    }
    let (turned, wanted) = (shown.turned_by_difference, shown.seeds / TURNED_OF);
    if turned < wanted {
        wrong.push(format!(
            "the direction was turned round by the difference {turned} times, {wanted} are wanted"
        ));
    }
    wrong.iter().for_each(|wrong| println!("coverage: {wrong}"));
    shown.violations.is_empty() && wrong.is_empty()
}

/// Runs seeds with each relevant number of hosts; returns whether all rules were kept, and every strategy has met its cells.
fn run_coverage(arguments: &Arguments) -> bool {
    let (mut met, mut passed) = (ByStrategy::default(), true);
    for hosts in [1, 2, 3] {
        println!("hosts: {hosts}");
        let (coverage, kept) = run_many(&Arguments { hosts, ..arguments.clone() });
        met.add(&coverage);
        passed &= kept;
        println!();
    }
    println!("with one, two and three hosts:\n{met}\n");
    let wanted = coverage::wanted_of_kind(arguments.seeds);
    let below = met.below(wanted);
    for (kind, Cell { fault, phase, seeds }) in &below {
        let (strategy, fault) = (kind.name(), fault.name());
        println!("coverage: {fault} in {phase} struck {strategy} in {seeds} seeds, {wanted} are wanted");
    }
    let contradictions = met.contradictions();
    for (kind, Cell { fault, phase, .. }) in &contradictions {
        println!(
            "coverage: {} in {phase} is said to be impossible, and struck {}",
            fault.name(),
            kind.name()
        );
    }
    println!("each strategy has met what it can in {} seeds at least; {wanted} are wanted", met.fewest());
    passed && below.is_empty() && contradictions.is_empty()
}

/// Runs seeds; returns the coverage, and whether all rules were kept and enough cells were met.
fn run_many(arguments: &Arguments) -> (Coverage, bool) {
    let summary = campaign::run(&arguments.order(arguments.seeds, Until::AllAreRun), || {});
    print_summary(arguments, &summary);
    let is_covered = print_gaps(arguments, &summary);
    let (found, end) = (&summary.violations, arguments.first + arguments.seeds);
    let is_known = |seed: &u64| arguments.known.contains(seed);
    let known = found.iter().filter(|(seed, _)| is_known(seed)).count() as u64;
    let expected = arguments.known.iter().filter(|seed| (arguments.first..end).contains(seed)).count() as u64;
    println!("{known} violations are known and open, of {expected} that were expected");
    let passed = summary.violated == known && known == expected && is_covered;
    (summary.coverage, passed)
}

/// Prints the cells with a wrong count; returns whether there are none.
fn print_gaps(arguments: &Arguments, summary: &Summary) -> bool {
    let wanted = coverage::wanted(arguments.options().table(), summary.seeds);
    let below = summary.coverage.below(wanted);
    for cell in &below {
        let (fault, phase) = (cell.fault.name(), cell.phase);
        println!("coverage: {fault} in {phase} struck {} seeds, {wanted} are wanted", cell.seeds);
    }
    for (seed, fault, phase) in &summary.contradictions {
        println!("coverage: {} in {phase} is said to be impossible, and struck seed {seed}", fault.name());
        println!("    {}", replay(arguments, *seed, ""));
    }
    let wanted_of_kind = coverage::wanted_of_kind(summary.seeds);
    let mut met_by_all = true;
    for (kind, table) in summary.coverage.by_strategy() {
        let strategy = kind.name();
        println!("\n{strategy}:\n{table}");
        let mut below = table.below(wanted_of_kind);
        below.retain(|cell| kind.is_to_meet(cell.phase));
        met_by_all &= below.is_empty() || arguments.strategy.is_some();
        for cell in below {
            let (fault, phase) = (cell.fault.name(), cell.phase);
            println!(
                "coverage: {fault} in {phase} struck {strategy} in {} seeds, {wanted_of_kind} are wanted",
                cell.seeds
            );
        }
    }
    println!("{}\n", summary.orders);
    let wrong = if arguments.strategy.is_none() { summary.orders.wrong(summary.seeds) } else { Vec::new() };
    wrong.iter().for_each(|wrong| println!("coverage: {wrong}"));
    let mut unseen = Vec::new();
    if arguments.hosts > 1 {
        unseen = summary.tally.below(wanted, arguments.hosts);
        for (what, seeds) in &unseen {
            println!("coverage: {what} in {seeds} seeds, {wanted} are wanted");
        }
    }
    if below.is_empty() {
        let fewest = summary.coverage.fewest();
        println!(
            "each fault struck each phase in which it can in {fewest} seeds at least; {wanted} are wanted"
        );
    }
    met_by_all
        && below.is_empty()
        && wrong.is_empty()
        && unseen.is_empty()
        && summary.contradictions.is_empty()
}

fn print_summary(arguments: &Arguments, summary: &Summary) {
    println!("{}\n", summary.coverage);
    if arguments.hosts > 1 {
        println!("{}", summary.tally);
    }
    let seconds = summary.took.as_secs_f64().max(1e-9);
    println!(
        "{} seeds in {seconds:.1} s: {:.0} a second on {} threads",
        summary.seeds,
        summary.seeds as f64 / seconds,
        arguments.threads
    );
    let fewest = summary.operations_min.map_or_else(|| "none".to_owned(), |fewest| fewest.to_string());
    println!("{} guest requests, {fewest} a seed at least", summary.operations);
    println!("{} recoveries were hit by another crash", summary.recoveries_hit);
    println!("{} violations", summary.violated);
    for (seed, violation) in &summary.violations {
        println!("  seed {seed} ({}) at {:?}: {}", violation.checker, violation.at, violation.detail);
        println!("    {}", replay(arguments, *seed, ""));
    }
}

fn replay(arguments: &Arguments, seed: u64, more: &str) -> String {
    let operations = match arguments.operations {
        200 => String::new(),
        operations => format!(" --operations {operations}"),
    };
    let hosts = match arguments.hosts {
        1 => String::new(),
        hosts => format!(" --hosts {hosts}"),
    };
    let strategy = match arguments.strategy {
        None => "",
        Some(Strategy::Mirror) => " --strategy mirror",
        Some(Strategy::Tracking) => " --strategy tracking",
        Some(Strategy::PostCopy) => " --strategy post-copy",
    };
    let features = if more.is_empty() { "" } else { " --features planted-bugs" };
    format!(
        "cargo run -p simulator --release{features} -- --seed {seed} --trace{hosts}{operations}{strategy}{more}"
    )
}

#[cfg(not(feature = "planted-bugs"))]
fn run_planted(_: &Arguments, _: &str, _: Option<u64>) -> bool {
    println!("this build has no rules that can be broken: build it with --features planted-bugs");
    false
}
