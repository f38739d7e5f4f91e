//! A terminal with a shell line in it, by tmux: what a program draws there, and what it makes of keys, sizes and signals.

use anyhow::Context as _;
use tempfile::TempDir;
use testbed::{Program, until};

/// A terminal. Dropping it ends what runs in it.
pub struct Terminal {
    /// The server is this terminal's own: its socket is in a folder of its own.
    folder: TempDir,
}

impl Terminal {
    /// Runs a line of shell in a terminal of so many columns and rows.
    ///
    /// # Errors
    /// If there is no tmux.
    pub fn start(line: &str, columns: u16, rows: u16) -> anyhow::Result<Self> {
        let terminal = Self { folder: tempfile::tempdir().context("make a folder for a terminal")? };
        let size = ["-x".to_owned(), columns.to_string(), "-y".to_owned(), rows.to_string()];
        let begun = terminal.tmux(["-f", "/dev/null", "new-session", "-d"]).args(size).arg(line);
        begun.env("TERM", "xterm-256color").succeed()?;
        Ok(terminal)
    }

    /// What is on the screen, a line for each row.
    ///
    /// # Errors
    /// If the terminal has ended.
    pub fn screen(&self) -> anyhow::Result<String> {
        self.tmux(["capture-pane", "-p"]).succeed()
    }

    /// The same, with the codes of its colours.
    ///
    /// # Errors
    /// If the terminal has ended.
    pub fn coloured_screen(&self) -> anyhow::Result<String> {
        self.tmux(["capture-pane", "-p", "-e"]).succeed()
    }

    /// Presses keys, by the names that tmux has for them.
    ///
    /// # Errors
    /// If the terminal has ended.
    pub fn press(&self, keys: &[&str]) -> anyhow::Result<()> {
        self.tmux(["send-keys"]).args(keys).succeed().map(drop)
    }

    /// Gives it another size.
    ///
    /// # Errors
    /// If the terminal has ended.
    pub fn resize(&self, columns: u16, rows: u16) -> anyhow::Result<()> {
        let order = ["resize-window", "-x", &columns.to_string(), "-y", &rows.to_string()];
        self.tmux(order).succeed().map(drop)
    }

    /// Number of the shell's process.
    ///
    /// # Errors
    /// If the terminal has ended.
    pub fn shell(&self) -> anyhow::Result<i32> {
        let number = self.tmux(["display-message", "-p", "#{pane_pid}"]).succeed()?;
        number.trim().parse().with_context(|| format!("the number of the shell: {number:?}"))
    }

    /// Waits until the screen has such a text, and returns it.
    ///
    /// # Errors
    /// If that does not come to be; the message has the screen.
    pub fn until(&self, what: &str, is_so: impl Fn(&str) -> bool) -> anyhow::Result<String> {
        let seen = until(what, || {
            let screen = self.screen()?;
            Ok(is_so(&screen).then_some(screen))
        });
        seen.map_err(|error| error.context(format!("the screen has:\n{}", self.screen().unwrap_or_default())))
    }

    fn tmux<'a>(&self, arguments: impl IntoIterator<Item = &'a str>) -> Program {
        let tmux =
            Program::of_package("tmux", "tmux").args(["-u", "-S"]).arg(self.folder.path().join("tmux"));
        tmux.args(arguments)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.tmux(["kill-server"]).run();
    }
}
