//! `sterna serve`: the daemon, until it is told to stop.

use daemon::config::Overrides;
use daemon::{Config, Folders};

use crate::args::ServeArguments;
use crate::commands::CommandError;
use crate::exit::Exit;

pub(super) async fn run(arguments: ServeArguments) -> Result<Exit, CommandError> {
    let overrides =
        Overrides { config_file: arguments.config, data_dir: arguments.data_dir, api: arguments.api };
    let config = Config::load(&overrides, &Folders::of_this_user())?;
    daemon::serve(config).await?;
    Ok(Exit::Success)
}
