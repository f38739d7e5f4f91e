//! The part of the API that Prometheus reads.

use std::sync::Arc;

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::error::RequestError;
use crate::host::Host;
use crate::metrics;

pub(super) fn routes() -> OpenApiRouter<Arc<Host>> {
    OpenApiRouter::new().routes(routes!(show_metrics))
}

/// Tells the figures of volumes, migrations, links, stores and the journal, in Prometheus' text format.
#[utoipa::path(get, path = "/metrics",
    responses((status = 200, description = "The figures", body = String, content_type = "text/plain")))]
async fn show_metrics(State(host): State<Arc<Host>>) -> Result<Response, RequestError> {
    let text = host.metrics().await?;
    Ok(([(CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response())
}
