//! Results and errors on standard output and standard error.

use std::io::{self, Write as _};

use serde::Serialize;

/// The form in which results are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Text, for a terminal.
    Text,
    /// JSON, for other programs.
    Json,
}

/// Prints a result as JSON, or as the text that `text` returns.
pub fn print<T: Serialize>(format: Format, value: &T, text: impl FnOnce(&T) -> String) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match format {
        Format::Json => {
            serde_json::to_writer_pretty(&mut out, value)?;
            writeln!(out)
        }
        Format::Text => write!(out, "{}", words::printable(&text(value))),
    }
}

/// Prints a text without characters that a terminal would obey.
pub fn print_text(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    write!(out, "{}", words::printable(text))?;
    out.flush()
}

/// Prints a remark on standard error. Errors are ignored.
pub fn say(text: &str) {
    let _ = writeln!(io::stderr(), "{}", words::printable(text));
}

/// Replaces the former remark of this function on standard error; an empty text removes it.
pub fn say_in_place(text: &str) {
    let _ = write!(io::stderr(), "\r\x1b[K{}", words::printable(text));
}

/// Prints a value as one line of JSON.
pub fn print_line(value: &impl Serialize) -> io::Result<()> {
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, value)?;
    writeln!(out)?;
    out.flush()
}

/// Prints a line of text and flushes it.
pub fn print_text_line(line: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{}", words::printable(line))?;
    out.flush()
}

/// Prints as JSON why a command line is invalid.
pub fn report_usage(error: &clap::Error) -> io::Result<()> {
    let text = error.render().to_string();
    // The paragraphs after the first are the usage.
    let message = text.split("\n\n").next().unwrap_or_default().trim_start_matches("error: ").trim_end();
    print_error(&"invalid_command_line".into(), message)
}

/// Prints why a given value is wrong.
pub fn report_value(message: &str, format: Format) -> io::Result<()> {
    match format {
        Format::Text => writeln!(io::stderr(), "sterna: {message}"),
        Format::Json => print_error(&"invalid_command_line".into(), message),
    }
}

/// Prints an error as JSON: `{"error": {"code": …, "message": …}}`.
pub fn print_error(code: &serde_json::Value, message: &str) -> io::Result<()> {
    let body = serde_json::json!({ "error": { "code": code, "message": message } });
    print(Format::Json, &body, |_| String::new())
}

/// Returns an error with its causes, as one line.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let detail = error.to_string();
        // Some errors contain the text of their cause.
        if !text.contains(&detail) {
            text = format!("{text}: {detail}");
        }
        cause = error.source();
    }
    text
}
