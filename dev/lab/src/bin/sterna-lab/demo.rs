//! `sterna demo`: moves the disk of a working guest to another store, or to another host and back, with or without
//! the guest, and verifies it.

use std::path::PathBuf;

use anyhow::Context as _;
use api::MigrationHistory;
use console::Format;
use lab::demo::{self, DemoOptions, HostsOptions, MovedVmOptions, Progress};

use crate::args::{DemoArguments, Scene};
use crate::{Outcome, progress};

pub(crate) async fn run(
    arguments: DemoArguments,
    program: PathBuf,
    format: Format,
) -> anyhow::Result<Outcome> {
    let mut progress = progress(format);
    let ended = match arguments.scene() {
        Scene::Stores => {
            let options = DemoOptions::with_thread(program, arguments.disk_bytes());
            between_stores(options, &arguments, &mut progress).await?
        }
        Scene::MachineOnStores => {
            let options = DemoOptions::with_vm(program, arguments.image.as_deref(), arguments.disk_bytes())?;
            between_stores(options, &arguments, &mut progress).await?
        }
        Scene::Hosts => between_hosts(program, &arguments, &mut progress).await?,
        Scene::MovedMachine => whole_machine(program, &arguments, &mut progress).await?,
    };
    if let Some(path) = &arguments.report {
        let history = ended.history.as_ref();
        let history =
            history.context("the daemon gave no history of the migration, so there is no report")?;
        std::fs::write(path, report::page(history)).with_context(|| {
            format!("the report cannot be written to {}; choose another file with --report", path.display())
        })?;
    }
    match format {
        Format::Text => console::print_text(&ended.text)?,
        Format::Json => console::print_text_line(&ended.json?)?,
    }
    Ok(ended.outcome)
}

struct Ended {
    text: String,
    json: serde_json::Result<String>,
    history: Option<MigrationHistory>,
    outcome: Outcome,
}

async fn between_stores(
    mut options: DemoOptions,
    arguments: &DemoArguments,
    progress: &mut Progress,
) -> anyhow::Result<Ended> {
    options.parent.clone_from(&arguments.folder);
    options.strategy = arguments.strategy;
    let report = demo::run(options, progress).await?;
    let outcome = if report.figures.verified { Outcome::Good } else { Outcome::Wrong };
    Ok(Ended { text: report.to_string(), json: report.json(), history: report.history, outcome })
}

async fn between_hosts(
    program: PathBuf,
    arguments: &DemoArguments,
    progress: &mut Progress,
) -> anyhow::Result<Ended> {
    let mut options = HostsOptions::new(program, arguments.disk_bytes());
    options.parent.clone_from(&arguments.folder);
    options.strategy = arguments.strategy;
    let report = demo::run_hosts(options, progress).await?;
    let good = report.figures.demo.verified && report.figures.resumed;
    let outcome = if good { Outcome::Good } else { Outcome::Wrong };
    Ok(Ended { text: report.to_string(), json: report.json(), history: report.history, outcome })
}

async fn whole_machine(
    program: PathBuf,
    arguments: &DemoArguments,
    progress: &mut Progress,
) -> anyhow::Result<Ended> {
    let image = arguments.image.as_deref();
    let mut options = MovedVmOptions::new(program, image, arguments.disk_bytes())?;
    options.parent.clone_from(&arguments.folder);
    options.strategy = arguments.strategy;
    let report = demo::run_vm(options, progress).await?;
    let outcome = if report.is_good() { Outcome::Good } else { Outcome::Wrong };
    Ok(Ended { text: report.to_string(), json: report.json(), history: report.history, outcome })
}
