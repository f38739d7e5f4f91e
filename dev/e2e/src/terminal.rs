//! A terminal by tmux, in which a test runs a shell line, reads the screen, and sends keys, sizes and signals.

use anyhow::Context as _;
use tempfile::TempDir;
use testbed::{Program, until};

/// A terminal. Dropping it ends its programs.
pub struct Terminal {
    /// The folder of the socket of this terminal's own tmux server.
    folder: TempDir,
}

impl Terminal {
    /// Runs a shell line in a terminal of this size.
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

    /// Returns the screen, with a line for each row.
    ///
    /// # Errors
    /// If the terminal has ended.
    pub fn screen(&self) -> anyhow::Result<String> {
        self.tmux(["capture-pane", "-p"]).succeed()
    }

    /// Returns the screen with its colour codes.
    ///
    /// # Errors
    /// If the terminal has ended.
    pub fn coloured_screen(&self) -> anyhow::Result<String> {
        self.tmux(["capture-pane", "-p", "-e"]).succeed()
    }

    /// Presses keys, by tmux's names.
    ///
    /// # Errors
    /// If the terminal has ended.
    pub fn press(&self, keys: &[&str]) -> anyhow::Result<()> {
        self.tmux(["send-keys"]).args(keys).succeed().map(drop)
    }

    /// Sets the size of the terminal.
    ///
    /// # Errors
    /// If the terminal has ended.
    pub fn resize(&self, columns: u16, rows: u16) -> anyhow::Result<()> {
        let order = ["resize-window", "-x", &columns.to_string(), "-y", &rows.to_string()];
        self.tmux(order).succeed().map(drop)
    }

    /// Returns the number of the shell's process.
    ///
    /// # Errors
    /// If the terminal has ended.
    pub fn shell(&self) -> anyhow::Result<i32> {
        let number = self.tmux(["display-message", "-p", "#{pane_pid}"]).succeed()?;
        number.trim().parse().with_context(|| format!("the number of the shell: {number:?}"))
    }

    /// Waits until `is_so` holds for the screen, and returns the screen.
    ///
    /// # Errors
    /// If that does not happen in time; the message has the screen.
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
        // The server may have ended by itself.
        let _ = self.tmux(["kill-server"]).run();
    }
}
