//! `sterna notices …`

use api::{Client, NoticeDestination};

use crate::args::NoticesCommand;
use crate::commands::CommandError;
use crate::exit::Exit;
use crate::output::{self, Format};

pub(super) async fn run(
    client: &Client,
    command: NoticesCommand,
    format: Format,
) -> Result<Exit, CommandError> {
    match command {
        NoticesCommand::List => {
            output::print(format, &client.notices().await?, |found| list(found))?;
            Ok(Exit::Success)
        }
        NoticesCommand::Test => {
            let tested = client.test_notices().await?;
            output::print(format, &tested, |tested| tested.iter().map(tried).collect())?;
            let is_taken = tested.iter().all(|destination| destination.fault.is_none());
            Ok(if is_taken { Exit::Success } else { Exit::NotReady })
        }
    }
}

fn list(destinations: &[NoticeDestination]) -> String {
    if destinations.is_empty() {
        return "no notices are sent: set program or webhook below [notify] in the configuration\n"
            .to_owned();
    }
    destinations.iter().map(stand).collect()
}

fn stand(destination: &NoticeDestination) -> String {
    let NoticeDestination { to, waiting, lost, fault, .. } = destination;
    let lost = if *lost > 0 { format!(", {lost} lost") } else { String::new() };
    let fault = fault.as_ref().map(|fault| format!("; it does not take them: {fault}")).unwrap_or_default();
    format!("{to}: {waiting} waiting{lost}{fault}\n")
}

fn tried(destination: &NoticeDestination) -> String {
    match &destination.fault {
        None => format!("{} has taken the notice\n", destination.to),
        Some(fault) => format!("{} has not taken the notice: {fault}\n", destination.to),
    }
}
