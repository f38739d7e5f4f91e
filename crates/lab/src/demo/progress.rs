//! How far the demo is: a bar on a terminal, plain lines elsewhere. Both go to standard error, so that standard output
//! holds nothing but the report.

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Lines come no more often than this: a log is read afterwards.
const LINE_INTERVAL: Duration = Duration::from_secs(2);

/// Shows one step after the other.
#[derive(Debug)]
pub struct Progress(Form);

#[derive(Debug)]
enum Form {
    /// A bar that redraws itself.
    Bar(ProgressBar),
    /// A line for each step, and now and then one that tells how far it is.
    Lines {
        step: String,
        told: Instant,
    },
    Silent,
}

impl Progress {
    /// A bar if standard error is a terminal, lines otherwise.
    pub fn on_stderr() -> Self {
        if !std::io::stderr().is_terminal() {
            return Self(Form::Lines { step: String::new(), told: Instant::now() });
        }
        let bar = ProgressBar::with_draw_target(Some(1000), ProgressDrawTarget::stderr_with_hz(20));
        // A template that does not parse costs the looks, nothing else.
        if let Ok(style) =
            ProgressStyle::with_template("{elapsed:>4} {msg:<38!} [{bar:24}] {percent:>3} %  {prefix}")
        {
            bar.set_style(style.progress_chars("=> "));
        }
        Self(Form::Bar(bar))
    }

    /// Shows nothing.
    pub fn silent() -> Self {
        Self(Form::Silent)
    }

    /// Begins a step.
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

    /// Tells how much of the step is done, 0 to 1. It is shown as 100 % only when all of it is.
    pub fn advance(&mut self, fraction: f64) {
        match &mut self.0 {
            Form::Bar(bar) => bar.set_position((fraction * 1000.0) as u64),
            Form::Lines { step, told } => {
                if told.elapsed() >= LINE_INTERVAL {
                    *told = Instant::now();
                    // Cut, not rounded: 100 % means that nothing is left.
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

    /// Takes the bar away.
    pub fn end(&mut self) {
        if let Form::Bar(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}
