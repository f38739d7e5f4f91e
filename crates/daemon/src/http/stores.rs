//! The part of the API about stores and their content.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{Answer, Segment};
use crate::host::Host;

pub(super) fn routes() -> OpenApiRouter<Arc<Host>> {
    OpenApiRouter::new()
        .routes(routes!(list_stores))
        .routes(routes!(release_store))
        .routes(routes!(show_content))
        .routes(routes!(drop_half_made))
}

/// Lists the stores by name.
#[utoipa::path(get, path = "/v1/stores", responses((status = 200, description = "The stores", body = [api::Store])))]
async fn list_stores(State(host): State<Arc<Host>>) -> Json<Vec<api::Store>> {
    Json(host.views.describe_stores().await)
}

/// Frees a store that holds one volume: gives up what a migration left there.
#[utoipa::path(
    post, path = "/v1/stores/{name}/release",
    params(("name" = String, Path, description = "Name of the store")),
    responses((status = 200, description = "The store", body = api::Store))
)]
async fn release_store(State(host): State<Arc<Host>>, Segment(name): Segment) -> Answer<api::Store> {
    host.operate(Arc::clone(&host.volume_orders).release_store(name)).await.map(Json)
}

/// Lists the content of a store: images with their owners, half-made targets, kept images, and other files.
#[utoipa::path(get, path = "/v1/stores/{name}/files", params(("name" = String, Path, description = "Name of the store")),
    responses((status = 200, description = "What lies there", body = api::StoreContent)))]
async fn show_content(State(host): State<Arc<Host>>, Segment(name): Segment) -> Answer<api::StoreContent> {
    host.volume_orders.describe_content(name).await.map(Json)
}

/// Deletes an unclaimed half-made target and returns it.
#[utoipa::path(delete, path = "/v1/stores/{name}/files/{file}",
    params(
        ("name" = String, Path, description = "Name of the store"),
        ("file" = String, Path, description = "Name of the file in it"),
    ),
    responses((status = 200, description = "What has been deleted", body = api::StoreFile)))]
async fn drop_half_made(
    State(host): State<Arc<Host>>,
    Segment((name, file)): Segment<(String, String)>,
) -> Answer<api::StoreFile> {
    host.operate(Arc::clone(&host.volume_orders).drop_half_made(name, file)).await.map(Json)
}
