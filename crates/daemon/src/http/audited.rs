//! Writes every request that may change something into the audit log.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use api::ErrorCode;
use axum::extract::{Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::Response;
use serde_json::{Map, Value};

use crate::audit::{Audit, By, Entry, details};

/// Collects audit details from a request's body; in the request's extensions.
#[derive(Clone, Debug, Default)]
pub(super) struct Details(Arc<Mutex<Map<String, Value>>>);

/// An order that is being processed. Dropping this writes the entry, also if the client disconnects before the answer.
struct Order {
    audit: Audit,
    entry: Entry,
    details: Details,
    begun: Instant,
}

impl Details {
    /// Keeps those parts of a body that may be logged.
    pub(super) fn take(&self, body: &[u8]) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(details::of_body(body));
    }
}

/// Answers a request; if it may change something, logs the client and the result.
pub(super) async fn audited(State(audit): State<Audit>, mut request: Request, next: Next) -> Response {
    if matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS) {
        return next.run(request).await;
    }
    let mut order = Order::begin(audit, &request);
    request.extensions_mut().insert(order.details.clone());
    let response = next.run(request).await;
    order.answered(&response);
    response
}

impl Order {
    fn begin(audit: Audit, request: &Request) -> Self {
        let details = Details::default();
        if let Some(query) = request.uri().query() {
            details.0.lock().unwrap_or_else(PoisonError::into_inner).extend(details::of_query(query));
        }
        let entry = Entry {
            by: request.extensions().get::<By>().cloned(),
            order: details::text(request.method().as_str()),
            path: Some(details::text(request.uri().path())),
            details: Map::new(),
            status: None,
            outcome: "unanswered".to_owned(),
            seconds: 0.0,
        };
        Self { audit, entry, details, begun: Instant::now() }
    }

    fn answered(&mut self, response: &Response) {
        let refusal = response.extensions().get::<ErrorCode>();
        let refusal = refusal.and_then(|code| Some(serde_json::to_value(code).ok()?.as_str()?.to_owned()));
        self.entry.status = Some(response.status().as_u16());
        self.entry.outcome = refusal.unwrap_or_else(|| "done".to_owned());
    }
}

impl Drop for Order {
    fn drop(&mut self) {
        let details = &mut *self.details.0.lock().unwrap_or_else(PoisonError::into_inner);
        self.entry.details = std::mem::take(details);
        self.entry.seconds = self.begun.elapsed().as_secs_f64();
        self.audit.note(&self.entry);
    }
}
