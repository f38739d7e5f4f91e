//! `sterna-lab`: the benchmarks and the demo of Sterna. `sterna bench` and `sterna demo` start it.
//!
//! It measures the program `sterna` from outside, as a child process, and uses the library of this package.

mod args;
mod demo;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser as _};
use console::Format;
use lab::demo::{Interrupted, Progress};
use tracing_subscriber::EnvFilter;

use crate::args::{Arguments, Command};

/// Exit codes of docs/exit-codes.md.
mod exit {
    pub(crate) const UNEXPECTED: u8 = 1;
    pub(crate) const USAGE: u8 = 2;
    pub(crate) const INTERRUPTED: u8 = 130;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Good,
    /// The demo's guest, or its image, has wrong content.
    Wrong,
}

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return not_understood(&error),
    };
    let format = arguments.format();
    let code = arguments.command.error_code();
    let Ok(filter) = EnvFilter::builder().parse(&arguments.log) else {
        let wrong = format!("\"{}\" is no log filter: write a level, for example debug", arguments.log);
        // Standard output may be closed; the exit code has the result as well.
        let _ = console::report_value(&wrong, format);
        return exit::USAGE.into();
    };
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    match run(arguments) {
        Ok(Outcome::Good) => ExitCode::SUCCESS,
        Ok(Outcome::Wrong) => exit::UNEXPECTED.into(),
        Err(error) if error.is::<Interrupted>() => {
            console::say(&format!("sterna: {error}"));
            exit::INTERRUPTED.into()
        }
        Err(error) => {
            // Standard output may be closed: the exit code says the same.
            let _ = report(&error, code, format);
            exit::UNEXPECTED.into()
        }
    }
}

fn not_understood(error: &clap::Error) -> ExitCode {
    let is_for_programs = error.use_stderr() && std::env::args_os().any(|argument| argument == "--json");
    // Standard output may be closed: the exit code says the same.
    let _ = if is_for_programs { console::report_usage(error) } else { error.print() };
    u8::try_from(error.exit_code()).map_or(exit::USAGE.into(), ExitCode::from)
}

fn report(error: &anyhow::Error, code: &str, format: Format) -> std::io::Result<()> {
    let message = format!("{error:#}");
    match format {
        Format::Text => console::say(&format!("sterna: {message}")),
        Format::Json => console::print_error(&code.into(), &message)?,
    }
    Ok(())
}

fn run(arguments: Arguments) -> anyhow::Result<Outcome> {
    let format = arguments.format();
    let sterna = match arguments.sterna {
        Some(program) => program,
        None => beside_this()?,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("the system gives this process no event loop")?;
    let outcome = match arguments.command {
        Command::Bench(command) => {
            let mut progress = progress(format);
            let measured = lab::bench::run(&command, &sterna, format, &mut progress);
            runtime.block_on(measured).map(|()| Outcome::Good)
        }
        Command::Demo(order) => runtime.block_on(demo::run(order, sterna, format)),
        Command::Generate { folder } => generate(&folder).map(|()| Outcome::Good),
    };
    // A hanging read of a disk must not keep the process.
    runtime.shutdown_background();
    outcome
}

/// Returns the path of `sterna`: in this program's folder, or where a package installs it.
fn beside_this() -> anyhow::Result<PathBuf> {
    let this = std::env::current_exe().context("the program cannot find itself")?;
    let folder = this.parent().unwrap_or(&this);
    let found =
        ["sterna", "../../bin/sterna"].map(|name| folder.join(name)).into_iter().find(|path| path.is_file());
    found.with_context(|| {
        format!("there is no program `sterna` beside {}; name it with --sterna, or build it with: cargo build -p sterna", this.display())
    })
}

/// Writes the manual pages of the subcommands, without one of this program: to its users it is `sterna`.
fn generate(folder: &std::path::Path) -> anyhow::Result<()> {
    let mut command = Arguments::command().disable_help_subcommand(true);
    command.build();
    for subcommand in command.get_subcommands().filter(|command| !command.is_hide_set()) {
        console::write_manual(subcommand, env!("CARGO_PKG_VERSION"), folder)
            .with_context(|| format!("manual pages cannot be written to {}", folder.display()))?;
    }
    Ok(())
}

fn progress(format: Format) -> Progress {
    match format {
        Format::Text => Progress::on_stderr(),
        Format::Json => Progress::silent(),
    }
}
