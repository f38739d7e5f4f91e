//! `sterna health`

use api::{Client, Problem, Readiness};

use crate::commands::CommandError;
use crate::exit::Exit;
use crate::output::{self, Format};

pub(super) async fn run(client: &Client, format: Format) -> Result<Exit, CommandError> {
    let readiness = client.readiness().await?;
    output::print(format, &readiness, describe)?;
    Ok(if readiness.ready { Exit::Success } else { Exit::NotReady })
}

fn describe(readiness: &Readiness) -> String {
    let said = |problem: &Problem| match &problem.name {
        Some(name) => format!("{} {name}: {}\n", problem.part.name(), problem.message),
        None => format!("{}: {}\n", problem.part.name(), problem.message),
    };
    let warnings = readiness.warnings.iter().map(|warning| format!("warning: {}", said(warning)));
    if readiness.ready {
        return std::iter::once("the daemon is ready\n".to_owned()).chain(warnings).collect();
    }
    readiness.problems.iter().map(said).chain(warnings).collect()
}
