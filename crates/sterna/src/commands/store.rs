//! `sterna store …`

use api::{Client, NewVolume, StoreContent, VolumeSource};

use crate::args::{ImportArguments, StoreCommand};
use crate::commands::{CommandError, volume};
use crate::exit::Exit;
use crate::output::{self, Format, store_content};

/// Endings of files that are left out of a volume's name.
const ENDINGS: [&str; 4] = [".img", ".raw", ".qcow2", ".qcow"];

pub(super) async fn run(
    client: &Client,
    command: StoreCommand,
    format: Format,
) -> Result<Exit, CommandError> {
    match command {
        StoreCommand::List => output::print(format, &client.stores().await?, output::stores)?,
        StoreCommand::Scan { name } => return scan(client, name, format).await,
        StoreCommand::Import(order) => import(client, order, format).await?,
        StoreCommand::Drop { file } => {
            let dropped = client.drop_half_made(&file.store, &file.file).await?;
            output::print(format, &dropped, store_content::dropped)?;
        }
        StoreCommand::Release { name } => {
            let store = client.release_store(&name).await?;
            output::print(format, &store, |store| match &store.occupied {
                None => format!("{} can take a volume\n", store.name),
                Some(why) => format!("{} takes one volume, and {why}\n", store.name),
            })?;
        }
    }
    Ok(Exit::Success)
}

/// Lists files of stores. An unreadable store does not stop the others, but makes the command fail.
async fn scan(client: &Client, name: Option<String>, format: Format) -> Result<Exit, CommandError> {
    let names = match name {
        Some(name) => vec![name],
        None => client.stores().await?.into_iter().map(|store| store.name).collect(),
    };
    let mut found: Vec<StoreContent> = Vec::new();
    for name in names {
        found.push(client.store_content(&name).await?);
    }
    output::print(format, &found, store_content::list)?;
    let is_whole = found.iter().all(|store| store.problem.is_none());
    Ok(if is_whole { Exit::Success } else { Exit::Unexpected })
}

async fn import(client: &Client, order: ImportArguments, format: Format) -> Result<(), CommandError> {
    let ImportArguments { file, name, format: image_format, export } = order;
    let of_file = ENDINGS.iter().find_map(|ending| file.file.strip_suffix(ending));
    let name = name.unwrap_or_else(|| of_file.unwrap_or(&file.file).to_owned());
    let source =
        VolumeSource::Import { store: file.store, file: file.file, format: image_format.map(Into::into) };
    volume::make(client, NewVolume { name, source, export: export.into() }, format).await
}
