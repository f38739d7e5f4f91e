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
        ReplicaCommand::Drop { name, all: true, .. } => return drop_all(client, &name, format).await,
        ReplicaCommand::Drop { name, migration, .. } => {
            let dropped = client.drop_replica(&name, &DropReplica { migration }).await?;
            output::print(format, &dropped, replicas::dropped)?;
        }
    }
    Ok(Exit::Success)
}

/// Deletes all kept images of a volume. A failure does not stop the others, and is reported at the end.
async fn drop_all(client: &Client, volume: &str, format: Format) -> Result<Exit, CommandError> {
    let kept = client.replicas().await?.into_iter().filter(|kept| kept.volume == volume);
    let migrations: Vec<Option<String>> = kept.map(|kept| Some(kept.migration)).collect();
    // If there are none, the daemon's own refusal is the best message.
    let migrations = if migrations.is_empty() { vec![None] } else { migrations };
    let (mut dropped, mut refused) = (Vec::new(), None);
    for migration in migrations {
        match client.drop_replica(volume, &DropReplica { migration }).await {
            Ok(one) => dropped.push(one),
            Err(error) => refused = Some(error),
        }
    }
    match refused {
        Some(error) if dropped.is_empty() => Err(error.into()),
        refused => {
            output::print(format, &dropped, |dropped| dropped.iter().map(replicas::dropped).collect())?;
            refused.map_or(Ok(Exit::Success), |error| Err(error.into()))
        }
    }
}
