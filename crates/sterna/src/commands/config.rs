//! `sterna config …`: checks configurations.

use std::fmt::Write as _;

use daemon::config::Overrides;
use daemon::{ConfigCheck, Folders};
use serde_json::json;

use crate::args::ConfigCommand;
use crate::commands::CommandError;
use crate::exit::Exit;
use crate::output::{self, Format};

/// Name of the configuration if there is no file.
const DEFAULTS: &str = "the configuration without a file";

pub(super) fn run(command: ConfigCommand, format: Format) -> Result<Exit, CommandError> {
    let ConfigCommand::Check { file } = command;
    let overrides = Overrides { config_file: file, ..Overrides::default() };
    let found = ConfigCheck::of(&overrides, &Folders::of_this_user());
    output::print(format, &value(&found), |_| text(&found))?;
    Ok(if found.problems.is_empty() { Exit::Success } else { Exit::Unexpected })
}

fn value(found: &ConfigCheck) -> serde_json::Value {
    let problems = found.problems.iter();
    let problems: Vec<_> =
        problems.map(|found| json!({ "problem": found.problem, "advice": found.advice })).collect();
    json!({ "file": found.file, "starts": found.config.is_some(), "problems": problems })
}

fn text(found: &ConfigCheck) -> String {
    let file = found.file.as_ref().map_or(DEFAULTS.to_owned(), |file| file.display().to_string());
    let mut text = match (&found.config, found.problems.len()) {
        (Some(config), 0) => {
            let stores: Vec<_> = config.stores.keys().map(String::as_str).collect();
            let (data, api) = (config.data_dir.display(), &config.api);
            return format!(
                "{file} is correct\n  stores  {}\n  data    {data}\n  API     {api}\n",
                stores.join(", ")
            );
        }
        (Some(_), 1) => format!("{file} has 1 problem; a daemon would start anyway\n"),
        (Some(_), many) => format!("{file} has {many} problems; a daemon would start anyway\n"),
        (None, 1) => format!("{file} has 1 problem; no daemon would start with it\n"),
        (None, many) => format!("{file} has {many} problems; no daemon would start with it\n"),
    };
    for found in &found.problems {
        // A syntax error has several lines.
        let problem = found.problem.replace('\n', "\n    ");
        // Writing to a string does not fail.
        let _ = write!(text, "\n  {problem}\n    → {}\n", found.advice);
    }
    text
}
