//! What is kept of the comparisons of a standby: shown once it is durable.

use standby::verification::{Compared, Comparison};

use super::{Source, Surroundings};
use crate::error::RequestError;
use crate::host::blocking;
use crate::journal::now_unix_ms;

impl Source {
    /// Reads what was noted before a restart of the daemon.
    pub(super) async fn recall_comparisons(&self, with: &Surroundings) {
        let (book, id) = (with.book.clone(), self.config().id);
        let read = blocking(move || Ok::<_, RequestError>(book.compared(&id))).await;
        let mut compared = read.unwrap_or_default();
        compared.restarted();
        self.show(|shown| shown.compared = Some(compared));
    }

    /// Notes a comparison that begins or has ended.
    pub(super) async fn note_comparison(&self, with: &Surroundings, comparison: Comparison) {
        let mut compared = self.compared();
        compared.note(comparison);
        let (book, id, written) = (with.book.clone(), self.config().id, compared.clone());
        let noted = blocking(move || {
            book.write_compared(&id, &written).map_err(|error| RequestError::Internal(error.to_string()))
        });
        if let Err(error) = noted.await {
            let (standby, error) = (self.config().name, error.message());
            tracing::warn!(standby, error, "cannot note a comparison of a standby: a restart forgets it");
        }
        self.show(|shown| shown.compared = Some(compared));
    }

    /// Notes that the comparison under way has ended early, if there is one.
    pub(super) async fn note_interruption(&self, with: &Surroundings, reason: &str) {
        let under_way = self.compared().last.filter(|last| last.ended_ms.is_none());
        if let Some(mut comparison) = under_way {
            comparison.interrupt(now_unix_ms(), reason, false);
            self.note_comparison(with, comparison).await;
        }
    }

    /// Changes what is shown of the comparison under way.
    pub(super) fn show_comparison(&self, change: impl FnOnce(&mut Comparison)) {
        self.show(|shown| {
            if let Some(last) = shown.compared.as_mut().and_then(|compared| compared.last.as_mut()) {
                change(last);
            }
        });
    }

    fn compared(&self) -> Compared {
        self.shown().compared.unwrap_or_default()
    }
}
