//! `sterna bench`: runs a benchmark, prints its figures, and writes its page.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use console::Format;
use console::units::bytes;
use lab::bench::link::{self, LinkOptions, LinkReport};
use lab::bench::machine::{self, MachineBenchOptions, MachineReport};
use lab::bench::mirror::{self, MirrorOptions, MirrorReport};
use lab::bench::nbd::{self, NbdOptions, NbdReport};
use lab::bench::return_home::{self, ReturnOptions, ReturnReport};
use lab::bench::strategies::{self, StrategiesOptions, StrategiesReport};
use lab::bench::{BenchOptions, Environment, Table};
use lab::vm::GuestImage;

use crate::args::{
    BenchCommand, BenchLinkArguments, BenchMachineArguments, BenchMirrorArguments, BenchNbdArguments,
    BenchReturnArguments, BenchStrategiesArguments,
};
use crate::progress;

pub(crate) async fn run(command: BenchCommand, sterna: PathBuf, format: Format) -> anyhow::Result<()> {
    match command {
        BenchCommand::Nbd(order) => run_nbd(order, sterna, format).await,
        BenchCommand::Mirror(order) => run_mirror(order, sterna, format).await,
        BenchCommand::Machine(order) => run_vm(order, sterna, format).await,
        BenchCommand::Link(order) => run_link(order, sterna, format).await,
        BenchCommand::Return(order) => run_return(order, sterna, format).await,
        BenchCommand::Strategies(order) => run_strategies(order, sterna, format).await,
    }
}

async fn run_nbd(order: BenchNbdArguments, sterna: PathBuf, format: Format) -> anyhow::Result<()> {
    let (workloads, tracing) = (order.workloads(), order.tracing());
    check_page(order.bench.html.as_deref())?;
    let bench = options(sterna, order.bench.folder, order.bench.size, order.rounds);
    let options = NbdOptions { bench, seconds: order.seconds, workloads, tracing };
    let report = nbd::run(&options, &mut progress(format)).await?;
    console::print(format, &report, nbd_text)?;
    write_page(order.bench.html.as_deref(), || report.page())
}

async fn run_mirror(order: BenchMirrorArguments, sterna: PathBuf, format: Format) -> anyhow::Result<()> {
    let (parts, seconds, guest_iops) = (order.parts(), order.seconds, order.guest_iops);
    check_page(order.bench.html.as_deref())?;
    let bench = options(sterna, order.bench.folder, order.bench.size, order.rounds);
    let options = MirrorOptions { bench, parts, seconds, guest_iops };
    let report = mirror::run(&options, &mut progress(format)).await?;
    console::print(format, &report, mirror_text)?;
    write_page(order.bench.html.as_deref(), || report.page())
}

async fn run_link(order: BenchLinkArguments, sterna: PathBuf, format: Format) -> anyhow::Result<()> {
    let (parts, seconds) = (order.parts(), order.seconds);
    check_page(order.bench.html.as_deref())?;
    let bench = options(sterna, order.bench.folder, order.bench.size, order.rounds);
    let options = LinkOptions { bench, parts, seconds };
    let report = link::run(&options, &mut progress(format)).await?;
    console::print(format, &report, link_text)?;
    write_page(order.bench.html.as_deref(), || report.page())
}

async fn run_vm(order: BenchMachineArguments, sterna: PathBuf, format: Format) -> anyhow::Result<()> {
    let image = GuestImage::find(order.image.as_deref())?;
    let bench = options(sterna, order.folder, order.size, order.rounds);
    let options = MachineBenchOptions { bench, image };
    let report = machine::run(&options, &mut progress(format)).await?;
    console::print(format, &report, machine_text)?;
    Ok(())
}

async fn run_strategies(
    order: BenchStrategiesArguments,
    sterna: PathBuf,
    format: Format,
) -> anyhow::Result<()> {
    check_page(order.html.as_deref())?;
    let (experiments, scale, mover, device) =
        (order.experiments(), order.scale(), order.mover(), order.device());
    let (size, rounds, max_downtime_ms) = (order.size(), order.rounds(), order.max_downtime);
    let bench = options(sterna, order.folder, size, rounds);
    let options = StrategiesOptions { bench, experiments, scale, mover, device, max_downtime_ms };
    let report = strategies::run(&options, &mut progress(format)).await?;
    console::print(format, &report, strategies_text)?;
    write_page(order.html.as_deref(), || report.page())
}

async fn run_return(order: BenchReturnArguments, sterna: PathBuf, format: Format) -> anyhow::Result<()> {
    check_page(order.html.as_deref())?;
    let (loads, seconds) = (order.loads(), order.seconds);
    let bench = options(sterna, order.folder, order.size, order.rounds);
    let options = ReturnOptions { bench, loads, seconds };
    let report = return_home::run(&options, &mut progress(format)).await?;
    console::print(format, &report, return_text)?;
    write_page(order.html.as_deref(), || report.page())
}

fn options(sterna: PathBuf, folder: Option<PathBuf>, size_bytes: u64, rounds: u32) -> BenchOptions {
    BenchOptions { program: sterna, parent: folder, size_bytes, rounds }
}

/// Checks that the page can be written, before minutes of measuring.
fn check_page(path: Option<&Path>) -> anyhow::Result<()> {
    let Some(path) = path else { return Ok(()) };
    let existed = path.exists();
    let opened = std::fs::File::options().append(true).create(true).open(path);
    let checked = opened.and_then(|_| if existed { Ok(()) } else { std::fs::remove_file(path) });
    checked.with_context(|| unwritten(path))
}

fn write_page(path: Option<&Path>, page: impl FnOnce() -> String) -> anyhow::Result<()> {
    let Some(path) = path else { return Ok(()) };
    std::fs::write(path, page()).with_context(|| unwritten(path))
}

fn unwritten(path: &Path) -> String {
    format!("the page {} cannot be written", path.display())
}

fn nbd_text(report: &NbdReport) -> String {
    let NbdReport { environment, size_bytes, rounds, seconds, workloads } = report;
    let mut text = heading(environment, *size_bytes, &format!("{rounds} rounds of {seconds} s each"));
    for workload in workloads {
        let _ = write!(text, "\n{}\n{}", workload.title, lines(&workload.table()));
        if let Some(table) = workload.trace_table() {
            let _ = write!(text, "\n{}", lines(&table));
        }
    }
    text
}

fn machine_text(report: &MachineReport) -> String {
    let MachineReport { environment, size_bytes, rounds, memory_bytes, .. } = report;
    let machine = format!("VMs of {}, {rounds} rounds", bytes(*memory_bytes));
    heading(environment, *size_bytes, &machine) + "\nHow long a VM is paused\n" + &lines(&report.table())
}

fn mirror_text(report: &MirrorReport) -> String {
    let MirrorReport { environment, size_bytes, rounds, idle, load } = report;
    let mut text = heading(environment, *size_bytes, &format!("{rounds} rounds"));
    if let Some(idle) = idle {
        let data = bytes(idle.data_bytes);
        let table = lines(&idle.table());
        let _ = write!(text, "\nNo guest uses the image; {data} of it are data, the rest holes\n{table}");
    }
    if let Some(load) = load {
        let _ = write!(text, "\nUnder a guest: {}\n{}", load.guest(), lines(&load.table()));
    }
    text + "every copy was compared with its source\n"
}

fn link_text(report: &LinkReport) -> String {
    let LinkReport { environment, congestion_control, size_bytes, rounds, copies, guest } = report;
    let mut text =
        heading(environment, *size_bytes, &format!("{rounds} rounds, TCP with {congestion_control}"));
    for copy in copies {
        let _ = write!(text, "\nNo guest uses the image: {}\n{}", copy.heading(), lines(&copy.table()));
    }
    if let Some(guest) = guest {
        let _ = write!(text, "\nUnder {}\n{}", guest.title, lines(&guest.table()));
    }
    text + "every copy was compared with its source\n"
}

fn return_text(report: &ReturnReport) -> String {
    let ReturnReport { environment, size_bytes, rounds, loads, .. } = report;
    let mut text = heading(environment, *size_bytes, &format!("{rounds} rounds, three-phase"));
    for load in loads {
        let _ = write!(text, "\n{}\n{}", load.load.title(), lines(&load.table()));
    }
    text + "every image that returned was compared\n"
}

fn strategies_text(report: &StrategiesReport) -> String {
    let [machine, programs] = report.environment.lines();
    let mut text = format!("{machine}\n{programs}\n{}\n", report.lead());
    for figure in &report.figures {
        let Some(table) = figure.table() else { continue };
        let _ = write!(text, "\n{}\n{}", figure.heading(), lines(&table));
    }
    text
}

fn heading(environment: &Environment, size_bytes: u64, rounds: &str) -> String {
    let [machine, programs] = environment.lines();
    let size = bytes(size_bytes);
    format!("{machine}\n{programs}\nAn image of {size}, {rounds}: medians, and from the least to the most.\n")
}

fn lines(table: &Table) -> String {
    let figures: Vec<usize> = (1..table.header.len()).collect();
    let header: Vec<&str> = table.header.iter().map(String::as_str).collect();
    let mut text = console::table(&header, &figures);
    for row in &table.rows {
        text.add_row(row);
    }
    format!("{}{}\n", console::lines(&text), table.conclusion)
}

#[cfg(test)]
mod tests;
