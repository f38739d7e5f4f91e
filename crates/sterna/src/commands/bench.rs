//! `sterna bench`: runs a benchmark, and prints what it has measured.

mod mirror;
mod nbd;
mod show;

use lab::bench::BenchOptions;
use lab::demo::{Interrupted, Progress};

use crate::args::BenchCommand;
use crate::commands::CommandError;
use crate::exit::Exit;
use crate::output::Format;

pub(super) async fn run(command: BenchCommand, format: Format) -> Result<Exit, CommandError> {
    let result = match command {
        BenchCommand::Nbd(order) => nbd::run(order, format).await,
        BenchCommand::Mirror(order) => mirror::run(order, format).await,
    };
    match result {
        Err(CommandError::Bench(error)) => match error.downcast::<Interrupted>() {
            Ok(interrupted) => {
                eprintln!("sterna: {interrupted}");
                Ok(Exit::Interrupted)
            }
            Err(error) => Err(CommandError::Bench(error)),
        },
        result => result.map(|()| Exit::Success),
    }
}

fn progress(format: Format) -> Progress {
    match format {
        Format::Text => Progress::on_stderr(),
        Format::Json => Progress::silent(),
    }
}

fn options(
    folder: Option<std::path::PathBuf>,
    size_bytes: u64,
    rounds: u32,
) -> Result<BenchOptions, CommandError> {
    let program = std::env::current_exe().map_err(CommandError::Program)?;
    Ok(BenchOptions { program, parent: folder, size_bytes, rounds })
}
