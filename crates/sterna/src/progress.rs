//! Follows a migration to its end, with a bar on a terminal, or with lines.

use std::io::{IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

use api::{Client, ClientError, ErrorCode, Migration, Watch};
use indicatif::{ProgressBar, ProgressStyle};

use crate::commands::CommandError;
use crate::moments::local;
use crate::output::{self, Format, remaining, waiting};
use console::units::bytes;

/// Longest time that a request waits at the daemon for a change.
const WAIT_MS: u64 = 5_000;
/// Time between two lines where there is no terminal, unless the phase changes.
const LINE_INTERVAL: Duration = Duration::from_secs(5);
/// Longest wait for a daemon that does not answer. It may be restarting, and then knows the outcome.
const RESTART_WAIT: Duration = Duration::from_secs(20);
/// Time between two attempts to reach such a daemon.
const RESTART_INTERVAL: Duration = Duration::from_millis(250);

/// Cause of the failure of a migration that a restart has ended.
const INTERRUPTED: &str = "daemon-stopped";

/// Waits that are shorter than this are not shown.
const WORTH_A_WORD: Duration = Duration::from_secs(1);

/// Follows the migration until it has ended, and returns its last state.
///
/// Can be dropped at any moment; the migration continues.
pub(crate) async fn follow(
    client: &Client,
    first: Migration,
    shown: &mut Display,
) -> Result<Migration, CommandError> {
    let mut migration = first;
    let mut lost_since = None;
    let mut wait = Wait::default();
    loop {
        if lost_since.is_none() {
            if matches!(shown, Display::Bar(_) | Display::Lines { .. }) {
                wait.see(&mut migration, Instant::now());
            }
            shown.update(&migration);
        }
        if let Some(next) = next_of(&migration) {
            let next = next.to_owned();
            shown.say(&format!(
                "{}: a restart of the daemon has interrupted it; it begins again as {next}",
                migration.id
            ));
            (migration.id, migration.change) = (next, 0);
        } else if migration.state.has_ended() && !migration.goes_on {
            return Ok(migration);
        } else if migration.state.has_ended() {
            // The next daemon will report the number of the new migration.
            lost_since.get_or_insert_with(Instant::now);
            (migration.change, migration.state) = (0, api::MigrationState::Running);
            tokio::time::sleep(RESTART_INTERVAL).await;
        }
        let watch = Watch { after: Some(migration.change), wait_ms: wait.news_within_ms() };
        match client.migration(&migration.id, watch).await {
            Ok(news) => {
                migration = news;
                lost_since = None;
            }
            Err(error) if is_gone(&error) => {
                let since = *lost_since.get_or_insert_with(Instant::now);
                if since.elapsed() > RESTART_WAIT {
                    return Err(CommandError::Lost { id: migration.id, source: error });
                }
                shown.lost();
                // A restarted daemon counts changes from the beginning.
                migration.change = 0;
                tokio::time::sleep(RESTART_INTERVAL).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Returns the migration that repeats one which an orderly restart has interrupted.
fn next_of(migration: &Migration) -> Option<&str> {
    let is_interrupted = migration.state.has_ended()
        && migration.failure.as_deref() == Some(INTERRUPTED)
        && !migration.goes_on;
    migration.retried_as.as_deref().filter(|_| is_interrupted)
}

/// The reason of a migration's wait, with its beginning.
#[derive(Default)]
struct Wait {
    seen: Option<(String, Instant)>,
}

impl Wait {
    /// Removes the reason of a wait that is still short. Then the next request must follow soon.
    fn see(&mut self, migration: &mut Migration, now: Instant) {
        let is_worth_a_word =
            self.is_worth_a_word(migration.waiting_for.as_ref().map(|waiting| waiting.reason.as_str()), now);
        // A wait for the administrator is shown at once.
        if migration.state == api::MigrationState::Running && !is_worth_a_word {
            migration.waiting_for = None;
        }
    }

    fn is_worth_a_word(&mut self, reason: Option<&str>, now: Instant) -> bool {
        let since = match (&self.seen, reason) {
            (Some((seen, since)), Some(reason)) if seen == reason => *since,
            _ => now,
        };
        self.seen = reason.map(|reason| (reason.to_owned(), since));
        now.saturating_duration_since(since) >= WORTH_A_WORD
    }

    /// Returns how long the daemon may wait for a change before it answers.
    fn news_within_ms(&self) -> u64 {
        if self.seen.is_some() { WORTH_A_WORD.as_millis() as u64 } else { WAIT_MS }
    }
}

pub(crate) enum Display {
    /// A bar on the terminal behind standard error.
    Bar(ProgressBar),
    /// Lines on standard error.
    Lines {
        /// When the latest line was printed.
        printed: Option<Instant>,
        /// The phase in the latest line.
        phase: Option<api::Phase>,
        /// Whether the latest line reported that the daemon does not answer.
        gone: bool,
    },
    /// One line of JSON on standard output for each change.
    Json,
    Nowhere,
}

impl Display {
    /// Returns the display for a command that prints the outcome itself.
    pub(crate) fn for_people(format: Format) -> Self {
        match format {
            Format::Json => Self::Nowhere,
            Format::Text if std::io::stderr().is_terminal() => Self::Bar(bar()),
            Format::Text => Self::Lines { printed: None, phase: None, gone: false },
        }
    }

    pub(crate) fn say(&self, text: &str) {
        match self {
            Self::Bar(bar) => bar.suspend(|| output::say(text)),
            _ => output::say(text),
        }
    }

    pub(crate) fn close(&self) {
        if let Self::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }

    fn update(&mut self, migration: &Migration) {
        match self {
            Self::Bar(bar) => {
                bar.set_position((migration.fraction.clamp(0.0, 1.0) * BAR_STEPS as f64) as u64);
                bar.set_message(words::clean(&format!("{} {}", called(migration), describe(migration))));
            }
            Self::Lines { printed, phase, gone } => {
                *gone = false;
                let is_due = printed.is_none_or(|printed| printed.elapsed() >= LINE_INTERVAL);
                if (is_due || *phase != Some(migration.phase)) && !migration.state.has_ended() {
                    output::say(&format!("{}: {}", called(migration), describe(migration)));
                    *printed = Some(Instant::now());
                    *phase = Some(migration.phase);
                }
            }
            Self::Json => {
                // If the output is closed, the command continues: its exit code is the outcome.
                let _ = output::print_line(migration);
            }
            Self::Nowhere => {}
        }
        let _ = std::io::stderr().flush();
    }

    /// Reports once that the daemon does not answer.
    fn lost(&mut self) {
        const LOST: &str = "the daemon has stopped; waiting until it is back";
        match self {
            Self::Bar(bar) => bar.set_message(LOST),
            Self::Lines { gone, .. } => {
                if !std::mem::replace(gone, true) {
                    output::say(LOST);
                }
            }
            Self::Json | Self::Nowhere => {}
        }
    }
}

const BAR_STEPS: u64 = 10_000;

fn bar() -> ProgressBar {
    let bar = ProgressBar::new(BAR_STEPS);
    // The template is a constant; should it not parse, the default one is shown.
    if let Ok(style) = ProgressStyle::with_template("{bar:20} {wide_msg}") {
        bar.set_style(style.progress_chars("█▉▊▋▌▍▎▏ "));
    }
    bar
}

/// Returns the migration's number with the name of what moves.
fn called(migration: &Migration) -> String {
    let name = if migration.name.is_empty() { &migration.volume } else { &migration.name };
    format!("{} {name}", migration.id)
}

fn describe(migration: &Migration) -> String {
    if migration.state == api::MigrationState::Queued {
        let turn = migration.queue.as_ref().map(output::turn);
        return format!("queued, {}", turn.unwrap_or_else(|| "its turn has come".to_owned()));
    }
    let mut text = format!(
        "{} {}  {} moved, {}/s, {}",
        migration.phase.name(),
        output::share(migration),
        bytes(migration.bytes_moved),
        bytes(migration.bytes_per_second as u64),
        remaining(migration),
    );
    let memory = migration.machine.as_ref().and_then(|machine| machine.memory.as_ref());
    if let (Some(memory), api::Phase::Memory) = (memory, migration.phase) {
        let left = bytes(memory.remaining_bytes);
        text = format!("{text}; {left} of its memory left after {} rounds", memory.rounds);
    }
    if let Some(limit) = output::limit(migration) {
        text = format!("{text}; limited by {limit}");
    }
    if let Some(deadline) = migration.deadline.filter(|told| told.late || told.raised_to_percent.is_some()) {
        text = format!("{text}; {}", output::hurry(&deadline, format!("due {}", local(deadline.unix_ms))));
    }
    if let Some(waiting) = waiting(migration) {
        text = match waiting.strip_prefix("its limit of ") {
            Some(limit) => format!("{text}; limited to {limit}"),
            None => format!("{text}; waits for {waiting}"),
        };
    }
    if let Some(reason) = &migration.suspended {
        text = format!("{text}; suspended: {reason}");
    }
    text
}

fn is_gone(error: &ClientError) -> bool {
    matches!(error, ClientError::Unreachable { .. } | ClientError::Broken(_))
        || error.code() == Some(ErrorCode::ShuttingDown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_told_when_it_has_lasted_a_second() {
        let (mut wait, begun) = (Wait::default(), Instant::now());
        let mut told =
            |reason, after_ms| wait.is_worth_a_word(Some(reason), begun + Duration::from_millis(after_ms));
        assert!(!told("the target to answer", 0));
        assert!(!told("the target to answer", 999));
        assert!(told("the target to answer", 1000));
        assert!(!told("something else", 1001));
        assert!(told("something else", 2001));
    }
}
