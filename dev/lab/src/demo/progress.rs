//! The demo's progress: a bar on a terminal, lines otherwise. Both go to standard error; standard output holds only the report.

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// The least interval between lines, for readable logs.
const LINE_INTERVAL: Duration = Duration::from_secs(2);

/// Shows one step after the other.
#[derive(Debug)]
pub struct Progress(Form);

#[derive(Debug)]
enum Form {
    Bar(ProgressBar),
    /// A line for each step, and now and then one with the progress.
    Lines {
        step: String,
        told: Instant,
    },
    Silent,
}

impl Progress {
    /// Returns a bar if standard error is a terminal, otherwise lines.
    pub fn on_stderr() -> Self {
        if !std::io::stderr().is_terminal() {
            return Self(Form::Lines { step: String::new(), told: Instant::now() });
        }
        let bar = ProgressBar::with_draw_target(Some(1000), ProgressDrawTarget::stderr_with_hz(20));
        // An invalid template only changes the bar's looks.
        if let Ok(style) =
            ProgressStyle::with_template("{elapsed:>4} {msg:<38!} [{bar:24}] {percent:>3} %  {prefix}")
        {
            bar.set_style(style.progress_chars("=> "));
        }
        Self(Form::Bar(bar))
    }

    /// Returns a progress that shows nothing.
    pub fn silent() -> Self {
        Self(Form::Silent)
    }

    /// Begins a step called `name`.
    pub fn begin(&mut self, name: &str) {
        match &mut self.0 {
            Form::Bar(bar) => {
                bar.set_message(name.to_owned());
                bar.set_prefix("");
                bar.set_position(0);
            }
            Form::Lines { step, told } => {
                name.clone_into(step);
                *told = Instant::now();
                eprintln!("{step}");
            }
            Form::Silent => {}
        }
    }

    /// Sets the done part of the step, 0 to 1. Only 1 is shown as 100 %.
    pub fn advance(&mut self, fraction: f64) {
        match &mut self.0 {
            Form::Bar(bar) => bar.set_position((fraction * 1000.0) as u64),
            Form::Lines { step, told } => {
                if told.elapsed() >= LINE_INTERVAL {
                    *told = Instant::now();
                    // Rounded down: 100 % means that nothing is left.
                    eprintln!("{step}: {} %", (fraction * 100.0) as u32);
                }
            }
            Form::Silent => {}
        }
    }

    /// Adds a few words to the step, on a terminal.
    pub fn note(&mut self, words: &str) {
        if let Form::Bar(bar) = &self.0 {
            bar.set_prefix(words.to_owned());
        }
    }

    /// Removes the bar from the terminal.
    pub fn end(&mut self) {
        if let Form::Bar(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}
