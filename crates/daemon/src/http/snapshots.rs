//! The operations on snapshots.

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
    OpenApiRouter::new().routes(routes!(take_snapshots)).routes(routes!(revert_volumes))
}

/// Takes snapshots of volumes, or of all volumes of a VM, at one instant. Answers when they are served.
#[utoipa::path(post, path = "/v1/snapshots", request_body = api::NewSnapshot,
    responses((status = 201, description = "The snapshots, which are volumes", body = [api::Volume])))]
async fn take_snapshots(
    State(host): State<Arc<Host>>,
    request: Request,
) -> Result<(StatusCode, Json<Vec<api::Volume>>), RequestError> {
    let order = body(request).await?;
    let snapshots = host.operate(Arc::clone(&host.volume_orders).take_snapshots(order)).await?;
    Ok((StatusCode::CREATED, Json(snapshots)))
}

/// Reverts volumes to snapshots of them, all or none. Answers when they are served again.
#[utoipa::path(post, path = "/v1/reverts", request_body = api::RevertVolumes,
    responses((status = 200, description = "The volumes", body = [api::Volume])))]
async fn revert_volumes(State(host): State<Arc<Host>>, request: Request) -> Answer<Vec<api::Volume>> {
    let order = body(request).await?;
    host.operate(Arc::clone(&host.volume_orders).revert_volumes(order)).await.map(Json)
}
