//! `sterna serve`: runs the daemon until a signal stops it.

use std::sync::Arc;

use daemon::config::Overrides;
use daemon::{Config, Folders, Start};

use crate::args::ServeArguments;
use crate::commands::CommandError;
use crate::exit::Exit;

pub(super) async fn run(arguments: ServeArguments) -> Result<Exit, CommandError> {
    let overrides =
        Overrides { config_file: arguments.config, data_dir: arguments.data_dir, api: arguments.api };
    let read = move || Config::load(&overrides, &Folders::of_this_user());
    let config = read()?;
    let start = if arguments.take_over { Start::TakeOver } else { Start::Alone };
    daemon::serve(config, start, Arc::new(read)).await?;
    Ok(Exit::Success)
}
