//! Writes the fields of an event as text. Each value is cleaned, so that it cannot begin a line or control the terminal.

use std::fmt;

use tracing::field::{Field, Visit};
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::Writer;

/// The field that is written without its name.
const MESSAGE: &str = "message";

/// Writes the message, then each other field as `name=value`.
pub(super) struct CleanFields;

impl<'writer> FormatFields<'writer> for CleanFields {
    fn format_fields<R: RecordFields>(&self, writer: Writer<'writer>, fields: R) -> fmt::Result {
        let mut visitor = Visitor { writer, is_first: true, result: Ok(()) };
        fields.record(&mut visitor);
        visitor.result
    }
}

struct Visitor<'writer> {
    writer: Writer<'writer>,
    is_first: bool,
    result: fmt::Result,
}

impl Visitor<'_> {
    fn write(&mut self, field: &Field, value: &str) -> fmt::Result {
        if !std::mem::take(&mut self.is_first) {
            self.writer.write_char(' ')?;
        }
        if field.name() == MESSAGE {
            return self.writer.write_str(value);
        }
        let name = field.name().trim_start_matches("r#");
        match self.writer.has_ansi_escapes() {
            true => write!(self.writer, "\x1b[3m{name}\x1b[0m\x1b[2m=\x1b[0m{value}"),
            false => write!(self.writer, "{name}={value}"),
        }
    }
}

impl Visit for Visitor<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if self.result.is_ok() {
            let value = words::clean(&format!("{value:?}"));
            self.result = self.write(field, &value);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use tracing_subscriber::fmt::MakeWriter;

    use super::CleanFields;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl<'a> MakeWriter<'a> for Written {
        type Writer = Self;

        fn make_writer(&'a self) -> Self {
            self.clone()
        }
    }

    #[test]
    fn a_value_cannot_forge_a_line_or_reach_the_terminal() {
        let written = Written::default();
        let subscriber =
            tracing_subscriber::fmt().with_writer(written.clone()).with_ansi(false).without_time();
        tracing::subscriber::with_default(subscriber.fmt_fields(CleanFields).finish(), || {
            let said = "no\n2026-01-01 ERROR all is lost\u{1b}[2J\u{202e}";
            tracing::info!(%said, text = said, count = 3, "it said: {said}");
        });
        let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        assert_eq!(text.matches('\n').count(), 1, "{text}");
        assert!(!text.contains('\u{1b}') && !text.contains('\u{202e}'), "{text}");
        assert!(
            text.contains("it said: no\\n2026")
                && text.contains("said=no\\n2026")
                && text.contains("count=3"),
            "{text}"
        );
    }
}
