//! The program: parses the command line, runs one command, and ends with its exit code.
//!
//! The commands are in [`commands`]; [`exit`] and `docs/exit-codes.md` describe the codes.

mod args;
mod commands;
mod complete;
mod exit;
mod happenings;
mod hints;
mod log;
mod moments;
mod output;
mod progress;
mod remotes;
mod top;
mod tunnel;

use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser as _;
use tracing_subscriber::EnvFilter;

use crate::args::Arguments;
use crate::commands::CommandError;
use crate::exit::Exit;

fn main() -> ExitCode {
    complete::answer_a_shell();
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return not_understood(&error),
    };
    match run(arguments) {
        Ok(exit) => exit.into(),
        Err(error) => {
            output::say(&format!("sterna: {error:#}"));
            Exit::Unexpected.into()
        }
    }
}

/// Prints what is wrong with the command line, or the help.
fn not_understood(error: &clap::Error) -> ExitCode {
    // Nothing was parsed, so the format must be found in the raw arguments.
    let is_for_programs = error.use_stderr() && std::env::args_os().any(|argument| argument == "--json");
    // Standard output may be closed; the exit code has the result as well.
    let _ = if is_for_programs { console::report_usage(error) } else { error.print() };
    let words: Vec<String> = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    if let Some(command) = hints::hint(error, &words).filter(|_| !is_for_programs) {
        output::say(&format!("\n  hint: {command}"));
    }
    u8::try_from(error.exit_code()).map_or(Exit::Usage.into(), ExitCode::from)
}

fn run(arguments: Arguments) -> anyhow::Result<Exit> {
    let filter = match EnvFilter::builder().parse(&arguments.log) {
        Ok(filter) => filter,
        Err(error) => {
            let wrong =
                format!("\"{}\" is no log filter ({error}): write a level, for example debug", arguments.log);
            console::report_value(&wrong, arguments.format()).context("standard output cannot be written")?;
            return Ok(Exit::Usage);
        }
    };
    let log = log::start(filter, arguments.log_format).context("the system gives this process no threads")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("the system gives this process no event loop")?;
    let format = arguments.format();
    let exit = match runtime.block_on(commands::run(arguments)) {
        Ok(exit) => exit,
        // A reader such as `head` may close the pipe; that is no failure.
        Err(CommandError::Unwritten(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => {
            Exit::Success
        }
        Err(error) => {
            output::report_error(&error, format).context("standard output cannot be written")?;
            Exit::of(&error)
        }
    };
    // An abandoned read of standard input or of a hung disk must not keep the process alive.
    runtime.shutdown_background();
    log.flush();
    Ok(exit)
}
