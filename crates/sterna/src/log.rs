//! Formats the log on standard error for a terminal, a file or systemd's journal.
//!
//! ```text
//!   events ──► filter ──► Flood (limits lines of a kind) ──► format, each value cleaned ──► daemon::log ──► standard error
//! ```
//! A terminal gets colours, a file the time. systemd's journal adds the time and the program, and reads the level from a number
//! in front of each line, so that `journalctl -p warning` works.

mod fields;
mod flood;

use std::fmt;
use std::io::{self, IsTerminal as _};
use std::os::fd::AsFd;

use daemon::log::{Line, Log};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::{Format, Full, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer};

use self::fields::CleanFields;
use self::flood::Flood;
use crate::args::LogFormat;

/// The variable that names the journal's stream as `DEVICE:INODE`.
const JOURNAL_VARIABLE: &str = "JOURNAL_STREAM";

/// Starts logging with this filter and format. The caller flushes the log when the program ends.
///
/// # Errors
/// The thread of the log cannot be started.
pub(crate) fn start(filter: EnvFilter, format: LogFormat) -> io::Result<Log> {
    let errors = io::stderr();
    let log = Log::start(io::stderr())?;
    let flood = Flood::start()?;
    let lines =
        || tracing_subscriber::fmt::layer().with_writer(Lines(log.clone())).log_internal_errors(false);
    let named = std::env::var(JOURNAL_VARIABLE);
    let written = if format == LogFormat::Json {
        lines().json().boxed()
    } else if named.is_ok_and(|stream| is_stream(&errors, &stream)) {
        let line = tracing_subscriber::fmt::format().without_time().with_level(false).with_ansi(false);
        lines().fmt_fields(CleanFields).with_ansi(false).event_format(ForJournal(line)).boxed()
    } else {
        lines().fmt_fields(CleanFields).with_ansi(errors.is_terminal()).boxed()
    };
    tracing_subscriber::registry().with(filter).with(flood).with(written).init();
    report_panics(log.clone());
    Ok(log)
}

/// Writes panics as lines of the log. The hook of the standard library would wait for the reader of standard error.
fn report_panics(log: Log) {
    std::panic::set_hook(Box::new(move |panic| {
        use std::io::Write as _;
        let thread = std::thread::current();
        let said = words::clean(&panic.to_string());
        let trace = std::backtrace::Backtrace::capture();
        let trace = match trace.status() {
            std::backtrace::BacktraceStatus::Captured => format!("{trace}\n"),
            _ => String::new(),
        };
        let name = words::clean(thread.name().unwrap_or("without a name"));
        // Writing to the log cannot fail.
        let _ = write!(log.line(), "thread {name}: {said}\n{trace}");
    }));
}

struct Lines(Log);

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Line;

    fn make_writer(&'a self) -> Line {
        self.0.line()
    }
}

/// Returns whether a descriptor is the named stream. An inherited variable may name another one.
fn is_stream(descriptor: impl AsFd, named: &str) -> bool {
    let status = rustix::fs::fstat(descriptor);
    status.is_ok_and(|status| format!("{}:{}", status.st_dev, status.st_ino) == named)
}

/// Returns the number of a level in syslog(3).
fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    }
}

/// Writes the level in front of each line, as in sd-daemon(3).
struct ForJournal(Format<Full, ()>);

impl<S, N> FormatEvent<S, N> for ForJournal
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        write!(writer, "<{}>", priority(*event.metadata().level()))?;
        self.0.format_event(context, writer, event)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::is_stream;

    #[test]
    fn only_the_stream_that_is_named_goes_to_the_journal() {
        let file = tempfile::tempfile().unwrap();
        let metadata = file.metadata().unwrap();
        assert!(is_stream(&file, &format!("{}:{}", metadata.dev(), metadata.ino())));
        for other in ["", "0:0", &format!("{}:{}", metadata.dev(), metadata.ino() + 1)] {
            assert!(!is_stream(&file, other), "{other}");
        }
    }
}
