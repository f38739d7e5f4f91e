//! The log: lines on standard error, as whoever reads them there wants them.
//!
//! A terminal gets colours, a file the time. systemd's journal knows the time and the program, and wants the level as a
//! number in front: then `journalctl -p warning` shows what somebody should look at.

use std::fmt;
use std::io::IsTerminal as _;
use std::os::fd::AsFd;

use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::{Format, Full, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::args::LogFormat;

/// Names the stream that goes to the journal, as `DEVICE:INODE`.
const JOURNAL_VARIABLE: &str = "JOURNAL_STREAM";

/// Logs from here on what passes the filter, in this format.
pub(crate) fn start(filter: EnvFilter, format: LogFormat) {
    let errors = std::io::stderr();
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    if format == LogFormat::Json {
        // Each object has its level.
        return log.json().init();
    }
    let named = std::env::var(JOURNAL_VARIABLE);
    if named.is_ok_and(|stream| is_stream(&errors, &stream)) {
        let line = tracing_subscriber::fmt::format().without_time().with_level(false).with_ansi(false);
        log.with_ansi(false).event_format(ForJournal(line)).init();
    } else {
        log.with_ansi(errors.is_terminal()).init();
    }
}

/// Tells whether a descriptor is the stream of that name. A variable that was inherited may speak of another one.
fn is_stream(descriptor: impl AsFd, named: &str) -> bool {
    let status = rustix::fs::fstat(descriptor);
    status.is_ok_and(|status| format!("{}:{}", status.st_dev, status.st_ino) == named)
}

/// The number of a level, as syslog(3) has them.
fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    }
}

/// Puts the level in front of each line, as sd-daemon(3) has it.
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
