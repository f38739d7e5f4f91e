//! `sterna health`

use api::{Client, Readiness};

use crate::commands::CommandError;
use crate::exit::Exit;
use crate::output::{self, Format};

pub(super) async fn run(client: &Client, format: Format) -> Result<Exit, CommandError> {
    let readiness = client.readiness().await?;
    output::print(format, &readiness, describe)?;
    Ok(if readiness.ready { Exit::Success } else { Exit::NotReady })
}

fn describe(readiness: &Readiness) -> String {
    if readiness.ready {
        return "the daemon is ready\n".to_owned();
    }
    let problems = readiness.problems.iter().map(|problem| match &problem.name {
        Some(name) => format!("{} {name}: {}\n", problem.part.name(), problem.message),
        None => format!("{}: {}\n", problem.part.name(), problem.message),
    });
    problems.collect()
}
