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
    }
    Ok(Exit::Success)
}
