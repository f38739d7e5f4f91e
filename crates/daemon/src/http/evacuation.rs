//! The operations on evacuations.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{Answer, body};
use crate::error::RequestError;
use crate::host::Host;

pub(super) fn routes() -> OpenApiRouter<Arc<Host>> {
    OpenApiRouter::new()
        .routes(routes!(show_evacuation, begin_evacuation))
        .routes(routes!(plan_evacuation))
        .routes(routes!(abort_evacuation))
}

/// Describes the evacuation that runs, or the last one.
#[utoipa::path(get, path = "/v1/evacuation",
    responses((status = 200, description = "The evacuation", body = api::Evacuation)))]
async fn show_evacuation(State(host): State<Arc<Host>>) -> Answer<api::Evacuation> {
    host.evacuations.show().map(Json)
}

/// Begins to empty this host. Answers when the order is durable.
#[utoipa::path(post, path = "/v1/evacuation", request_body = api::NewEvacuation,
    responses((status = 202, description = "The evacuation, which has begun", body = api::Evacuation)))]
async fn begin_evacuation(
    State(host): State<Arc<Host>>,
    request: Request,
) -> Result<(StatusCode, Json<api::Evacuation>), RequestError> {
    let order = body(request).await?;
    let evacuation = host.operate(Arc::clone(&host.evacuations).begin(order)).await?;
    Ok((StatusCode::ACCEPTED, Json(evacuation)))
}

/// Returns what an evacuation would do, and what would stay. Changes nothing.
#[utoipa::path(post, path = "/v1/evacuation/plan", request_body = api::NewEvacuation,
    responses((status = 200, description = "What it would do", body = api::Evacuation)))]
async fn plan_evacuation(State(host): State<Arc<Host>>, request: Request) -> Answer<api::Evacuation> {
    let order = body(request).await?;
    host.operate(Arc::clone(&host.evacuations).plan(order)).await.map(Json)
}

/// Aborts the evacuation that runs: nothing more begins, and what moves is cancelled. Answers before that has ended.
#[utoipa::path(post, path = "/v1/evacuation/abort",
    responses((status = 200, description = "The evacuation", body = api::Evacuation)))]
async fn abort_evacuation(State(host): State<Arc<Host>>) -> Answer<api::Evacuation> {
    host.operate(Arc::clone(&host.evacuations).abort()).await.map(Json)
}
