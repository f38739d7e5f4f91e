//! The part of the API about images that migrations kept.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::Uri;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{Answer, Segment, query};
use crate::host::Host;

pub(super) fn routes() -> OpenApiRouter<Arc<Host>> {
    OpenApiRouter::new().routes(routes!(list_replicas)).routes(routes!(drop_replica))
}

/// Lists the images that migrations kept, by volume.
#[utoipa::path(get, path = "/v1/replicas",
    responses((status = 200, description = "The images", body = [api::Replica])))]
async fn list_replicas(State(host): State<Arc<Host>>) -> Json<Vec<api::Replica>> {
    Json(host.volume_orders.describe_replicas().await)
}

/// Deletes a kept image and returns it. For a device or an export, only the fence is lifted.
#[utoipa::path(delete, path = "/v1/replicas/{volume}",
    params(("volume" = String, Path, description = "Name of the volume"), api::DropReplica),
    responses((status = 200, description = "What has been deleted", body = api::Replica)))]
async fn drop_replica(
    State(host): State<Arc<Host>>,
    Segment(volume): Segment,
    uri: Uri,
) -> Answer<api::Replica> {
    let which = query(&uri)?;
    host.operate(Arc::clone(&host.volume_orders).drop_replica(volume, which)).await.map(Json)
}
