//! The part of the API for monitoring.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Answer;
use crate::error::RequestError;
use crate::host::Host;
use crate::metrics;

pub(super) fn routes() -> OpenApiRouter<Arc<Host>> {
    OpenApiRouter::new()
        .routes(routes!(show_metrics))
        .routes(routes!(show_health))
        .routes(routes!(show_readiness))
        .routes(routes!(list_destinations))
        .routes(routes!(test_notices))
}

/// Lists where notices go, and what waits there.
#[utoipa::path(get, path = "/v1/notices",
    responses((status = 200, description = "The destinations", body = Vec<api::NoticeDestination>)))]
async fn list_destinations(State(host): State<Arc<Host>>) -> Json<Vec<api::NoticeDestination>> {
    Json(host.notices.describe())
}

/// Sends a notice to each destination at once. Answers when all have taken it, or have failed.
#[utoipa::path(post, path = "/v1/notices/test",
    responses((status = 200, description = "The destinations, each with the fault of this notice", body = Vec<api::NoticeDestination>)))]
async fn test_notices(State(host): State<Arc<Host>>) -> Answer<Vec<api::NoticeDestination>> {
    host.operate(Arc::clone(&host.notices).test()).await.map(Json)
}

/// Returns metrics of volumes, migrations, links, stores and the journal, in Prometheus' text format.
#[utoipa::path(get, path = "/metrics",
    responses((status = 200, description = "The figures", body = String, content_type = "text/plain")))]
async fn show_metrics(State(host): State<Arc<Host>>) -> Result<Response, RequestError> {
    let text = host.description.metrics().await?;
    Ok(([(CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response())
}

/// Returns that the daemon is alive, without checking anything else.
#[utoipa::path(get, path = "/health", responses((status = 200, description = "It is alive", body = api::Health)))]
async fn show_health(State(host): State<Arc<Host>>) -> Json<api::Health> {
    Json(host.description.health())
}

/// Returns whether the daemon works completely, and which parts do not.
#[utoipa::path(get, path = "/ready",
    responses((status = 200, description = "It does", body = api::Readiness),
        (status = 503, description = "Something is in the way", body = api::Readiness)))]
async fn show_readiness(State(host): State<Arc<Host>>) -> (StatusCode, Json<api::Readiness>) {
    let readiness = host.description.readiness().await;
    let status = if readiness.ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(readiness))
}
