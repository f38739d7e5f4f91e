//! The command line.

mod demo;

use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Parser, Subcommand};
use console::Format;
use lab::bench::BenchCommand;

pub(crate) use self::demo::{DemoArguments, Scene};

/// Measures and shows Sterna. `sterna bench` and `sterna demo` start this program.
#[derive(Debug, Parser)]
#[command(name = "sterna", version, max_term_width = 110)]
#[command(subcommand_required = true, arg_required_else_help = true)]
pub(crate) struct Arguments {
    /// Print JSON instead of text; errors too.
    #[arg(long, global = true)]
    json: bool,
    /// What to log to standard error: a level (error, warn, info, debug, trace) or a filter such as lab=debug.
    #[arg(long, global = true, env = "STERNA_LOG", value_name = "FILTER", default_value = "info")]
    pub(crate) log: String,
    /// The program that is measured and shown; by default `sterna` in the folder of this program.
    #[arg(long, global = true, env = "STERNA_PROGRAM", value_name = "FILE", hide = true)]
    pub(crate) sterna: Option<PathBuf>,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show how the disk of a busy guest moves between two stores or hosts of temporary daemons, and verify it.
    #[command(after_help = demo::HELP)]
    Demo(DemoArguments),
    /// Measure Sterna beside the raw disk, QEMU's storage daemon and off-line copies.
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Write manual pages for packages into a folder.
    #[command(hide = true)]
    Generate {
        /// The folder, which exists.
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
}

impl Arguments {
    pub(crate) fn format(&self) -> Format {
        if self.json { Format::Json } else { Format::Text }
    }
}

impl Command {
    pub(crate) fn error_code(&self) -> &'static str {
        match self {
            Self::Demo(_) => "demo_failed",
            Self::Bench(_) => "bench_failed",
            Self::Generate { .. } => "client_failed",
        }
    }
}

/// Returns a parser for the names of `all`, which `--help` lists with their titles.
fn one_of<T: Copy + Send + Sync + 'static, const COUNT: usize>(
    all: [T; COUNT],
    name: fn(T) -> &'static str,
    title: fn(T) -> &'static str,
) -> impl TypedValueParser<Value = T> {
    let named = all.map(|one| PossibleValue::new(name(one)).help(title(one)));
    PossibleValuesParser::new(named).try_map(move |given| {
        all.into_iter().find(|one| name(*one) == given).ok_or("there is nothing of that name")
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::Arguments;

    #[test]
    fn command_line_is_consistent_and_every_leaf_has_an_example() {
        let mut command = Arguments::command();
        command.clone().debug_assert();
        command.build();
        let mut folders = vec![command];
        while let Some(folder) = folders.pop() {
            for command in folder.get_subcommands() {
                if command.get_name() == "help" || command.is_hide_set() {
                    continue;
                }
                if command.has_subcommands() {
                    folders.push(command.clone());
                    continue;
                }
                let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
                assert!(help.contains("Example"), "{} has no example", command.get_name());
            }
        }
    }
}
