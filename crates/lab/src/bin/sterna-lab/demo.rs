//! `sterna demo`: moves the disk of a working guest to another store, or to another host and back, with or without
//! the guest, and verifies it.

use std::path::PathBuf;

use api::MigrationHistory;
use lab::demo::{self, DemoOptions, HostsOptions, Interrupted, MovedVmOptions, Progress};

use crate::args::{DemoArguments, Scene};
use crate::commands::CommandError;
use crate::commands::report::write as write_report;
use crate::exit::Exit;
use crate::output::{self, Format};

pub(super) async fn run(arguments: DemoArguments, format: Format) -> Result<Exit, CommandError> {
    let program = std::env::current_exe().map_err(CommandError::Program)?;
    let mut progress = match format {
        Format::Text => Progress::on_stderr(),
        Format::Json => Progress::silent(),
    };
    let ended = match arguments.scene() {
        Scene::Stores => {
            let options = DemoOptions::with_thread(program, arguments.disk_bytes());
            between_stores(options, &arguments, &mut progress).await
        }
        Scene::MachineOnStores => {
            let options = DemoOptions::with_vm(program, arguments.image.as_deref(), arguments.disk_bytes());
            match options {
                Ok(options) => between_stores(options, &arguments, &mut progress).await,
                Err(error) => Err(error),
            }
        }
        Scene::Hosts => between_hosts(program, &arguments, &mut progress).await,
        Scene::MovedMachine => whole_machine(program, &arguments, &mut progress).await,
    };
    let ended = match ended {
        Ok(ended) => ended,
        Err(error) => match error.downcast::<Interrupted>() {
            Ok(interrupted) => {
                output::say(&format!("sterna: {interrupted}"));
                return Ok(Exit::Interrupted);
            }
            Err(error) => return Err(CommandError::Demo(error)),
        },
    };
    if let Some(path) = &arguments.report {
        let history = ended.history.as_ref();
        let missing =
            || anyhow::anyhow!("the daemon gave no history of the migration, so there is no report");
        write_report(path, history.ok_or_else(missing).map_err(CommandError::Demo)?)?;
    }
    match format {
        Format::Text => output::print_text(&ended.text)?,
        Format::Json => {
            output::print_text_line(&ended.json.map_err(|error| CommandError::Unwritten(error.into()))?)?;
        }
    }
    Ok(ended.exit)
}

struct Ended {
    text: String,
    json: serde_json::Result<String>,
    history: Option<MigrationHistory>,
    exit: Exit,
}

async fn between_stores(
    mut options: DemoOptions,
    arguments: &DemoArguments,
    progress: &mut Progress,
) -> anyhow::Result<Ended> {
    options.parent.clone_from(&arguments.folder);
    options.strategy = arguments.strategy.into();
    let report = demo::run(options, progress).await?;
    let exit = if report.figures.verified { Exit::Success } else { Exit::Unexpected };
    Ok(Ended { text: report.to_string(), json: report.json(), history: report.history, exit })
}

async fn between_hosts(
    program: PathBuf,
    arguments: &DemoArguments,
    progress: &mut Progress,
) -> anyhow::Result<Ended> {
    let mut options = HostsOptions::new(program, arguments.disk_bytes());
    options.parent.clone_from(&arguments.folder);
    options.strategy = arguments.strategy.into();
    let report = demo::run_hosts(options, progress).await?;
    let good = report.figures.demo.verified && report.figures.resumed;
    let exit = if good { Exit::Success } else { Exit::Unexpected };
    Ok(Ended { text: report.to_string(), json: report.json(), history: report.history, exit })
}

async fn whole_machine(
    program: PathBuf,
    arguments: &DemoArguments,
    progress: &mut Progress,
) -> anyhow::Result<Ended> {
    let image = arguments.image.as_deref();
    let mut options = MovedVmOptions::new(program, image, arguments.disk_bytes())?;
    options.parent.clone_from(&arguments.folder);
    options.strategy = arguments.strategy.into();
    let report = demo::run_vm(options, progress).await?;
    let exit = if report.is_good() { Exit::Success } else { Exit::Unexpected };
    Ok(Ended { text: report.to_string(), json: report.json(), history: report.history, exit })
}
