//! The command line of `sterna notices`.

use clap::Subcommand;

#[derive(Clone, Copy, Debug, Subcommand)]
pub(crate) enum NoticesCommand {
    /// List the program and the webhook that notices go to, with what waits there.
    #[command(visible_alias = "ls", after_help = "Example:\n  sterna notices list")]
    List,
    /// Send a notice to each of them now, and say whether it was taken; the exit code is 10 if one was not.
    #[command(after_help = TEST_HELP)]
    Test,
}

const TEST_HELP: &str = "\
Example:
  sterna notices test

Notices are set in the configuration, below [notify]: a program, a webhook, or both.";
