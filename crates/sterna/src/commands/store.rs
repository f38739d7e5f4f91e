//! `sterna store …`

use api::Client;

use crate::args::StoreCommand;
use crate::commands::CommandError;
use crate::exit::Exit;
use crate::output::{self, Format};

pub(super) async fn run(
    client: &Client,
    command: &StoreCommand,
    format: Format,
) -> Result<Exit, CommandError> {
    match command {
        StoreCommand::List => output::print(format, &client.stores().await?, output::stores)?,
        StoreCommand::Release { name } => {
            let store = client.release_store(name).await?;
            output::print(format, &store, |store| match &store.occupied {
                None => format!("{} can take a volume\n", store.name),
                Some(why) => format!("{} takes one volume, and {why}\n", store.name),
            })?;
        }
    }
    Ok(Exit::Success)
}
