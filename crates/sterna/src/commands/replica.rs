//! `sterna replica …`

use api::{Client, DropReplica};

use crate::args::ReplicaCommand;
use crate::commands::CommandError;
use crate::exit::Exit;
use crate::output::{self, Format, replicas};

pub(super) async fn run(
    client: &Client,
    command: ReplicaCommand,
    format: Format,
) -> Result<Exit, CommandError> {
    match command {
        ReplicaCommand::List => output::print(format, &client.replicas().await?, replicas::list)?,
        ReplicaCommand::Drop { name, migration } => {
            let dropped = client.drop_replica(&name, &DropReplica { migration }).await?;
            output::print(format, &dropped, replicas::dropped)?;
        }
    }
    Ok(Exit::Success)
}
