//! `sterna demo`: the disk of a working guest moves from one store to another, and is judged.

use lab::demo::{self, DemoOptions, Interrupted, Progress};

use crate::args::{DemoArguments, Guest};
use crate::commands::CommandError;
use crate::commands::report::write as write_report;
use crate::exit::Exit;
use crate::output::Format;

pub(super) async fn run(arguments: DemoArguments, format: Format) -> Result<Exit, CommandError> {
    let program = std::env::current_exe().map_err(CommandError::Program)?;
    let mut options = match arguments.guest() {
        Guest::Thread => DemoOptions::with_thread(program),
        Guest::Machine => {
            DemoOptions::with_machine(program, arguments.image.as_deref()).map_err(CommandError::Demo)?
        }
    };
    options.parent = arguments.folder;
    let mut progress = match format {
        Format::Text => Progress::on_stderr(),
        Format::Json => Progress::silent(),
    };
    let report = match demo::run(options, &mut progress).await {
        Ok(report) => report,
        Err(error) => match error.downcast::<Interrupted>() {
            Ok(interrupted) => {
                eprintln!("sterna: {interrupted}");
                return Ok(Exit::Interrupted);
            }
            Err(error) => return Err(CommandError::Demo(error)),
        },
    };
    if let Some(path) = &arguments.report {
        let history = report.history.as_ref();
        let missing =
            || anyhow::anyhow!("the daemon gave no history of the migration, so there is no report");
        write_report(path, history.ok_or_else(missing).map_err(CommandError::Demo)?)?;
    }
    match format {
        Format::Text => print!("{report}"),
        Format::Json => println!("{}", report.json().map_err(|error| CommandError::Unwritten(error.into()))?),
    }
    Ok(if report.figures.verified { Exit::Success } else { Exit::Unexpected })
}
