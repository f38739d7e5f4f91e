//! The operations on standbys.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::http::{StatusCode, Uri};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{Answer, Segment, body, query};
use crate::error::RequestError;
use crate::host::Host;

pub(super) fn routes() -> OpenApiRouter<Arc<Host>> {
    OpenApiRouter::new()
        .routes(routes!(list_standbys, add_standby))
        .routes(routes!(yield_volume))
        .routes(routes!(show_standby, change_standby, remove_standby))
        .routes(routes!(promote_standby))
        .routes(routes!(seed_standby))
        .routes(routes!(export_standby, cancel_export))
        .routes(routes!(check_standby))
        .routes(routes!(reprotect_standby))
        .routes(routes!(list_divergences))
        .routes(routes!(export_divergence, drop_divergence))
        .routes(routes!(test_standby, end_standby_test))
}

/// Lists the standbys of this host's volumes, and those that it keeps for other hosts.
#[utoipa::path(get, path = "/v1/standbys", responses((status = 200, description = "The standbys", body = [api::Standby])))]
async fn list_standbys(State(host): State<Arc<Host>>) -> Json<Vec<api::Standby>> {
    Json(host.standbys.list().await)
}

/// Orders a standby of volumes at another host. Answers when that host has made room; the copying follows.
#[utoipa::path(post, path = "/v1/standbys", request_body = api::NewStandby,
    responses((status = 201, description = "The standby", body = api::Standby)))]
async fn add_standby(
    State(host): State<Arc<Host>>,
    request: Request,
) -> Result<(StatusCode, Json<api::Standby>), RequestError> {
    let order = body(request).await?;
    let standby = host.operate(Arc::clone(&host.standbys).add(order)).await?;
    Ok((StatusCode::CREATED, Json(standby)))
}

/// Describes one standby, with its recovery points if it is kept here.
#[utoipa::path(get, path = "/v1/standbys/{name}", params(("name" = String, Path, description = "Name of the standby, or of its volume")),
    responses((status = 200, description = "The standby", body = api::Standby)))]
async fn show_standby(State(host): State<Arc<Host>>, Segment(name): Segment) -> Answer<api::Standby> {
    host.standbys.show(&name).await.map(Json)
}

/// Changes a standby at the host that has its volumes.
#[utoipa::path(patch, path = "/v1/standbys/{name}", params(("name" = String, Path, description = "Name of the standby, or of its volume")),
    request_body = api::SetStandby,
    responses((status = 200, description = "The standby", body = api::Standby)))]
async fn change_standby(
    State(host): State<Arc<Host>>,
    Segment(name): Segment,
    request: Request,
) -> Answer<api::Standby> {
    let change = body(request).await?;
    host.operate(Arc::clone(&host.standbys).set(name, change)).await.map(Json)
}

/// Removes a standby: its images and recovery points are deleted.
#[utoipa::path(delete, path = "/v1/standbys/{name}",
    params(("name" = String, Path, description = "Name of the standby, or of its volume"), api::RemoveStandby),
    responses((status = 200, description = "What it was", body = api::Standby)))]
async fn remove_standby(
    State(host): State<Arc<Host>>,
    Segment(name): Segment,
    uri: Uri,
) -> Answer<api::Standby> {
    let how = query(&uri)?;
    host.operate(Arc::clone(&host.standbys).remove(name, how)).await.map(Json)
}

/// Makes the images of a standby volumes of this host, and serves them. The host that had the volumes must be lost.
#[utoipa::path(post, path = "/v1/standbys/{name}/promote", params(("name" = String, Path, description = "Name of the standby, or of its volume")),
    request_body = api::PromoteStandby,
    responses((status = 200, description = "The standby, once its volumes are served", body = api::Standby)))]
async fn promote_standby(
    State(host): State<Arc<Host>>,
    Segment(name): Segment,
    request: Request,
) -> Answer<api::Standby> {
    let order = body(request).await?;
    host.operate(Arc::clone(&host.standbys).promote(name, order)).await.map(Json)
}

/// Turns the direction of a standby round that was promoted here: the host that had the volumes before, and has given them up, keeps a
/// standby of them. Answers when that host has accepted it; what its images lack is sent afterwards.
#[utoipa::path(post, path = "/v1/standbys/{name}/reprotect", params(("name" = String, Path, description = "Name of the standby, or of its volume")),
    request_body = api::ReprotectStandby,
    responses((status = 200, description = "The standby, whose source is here now", body = api::Standby)))]
async fn reprotect_standby(
    State(host): State<Arc<Host>>,
    Segment(name): Segment,
    request: Request,
) -> Answer<api::Standby> {
    let order = body(request).await?;
    host.operate(Arc::clone(&host.standbys).reprotect(name, order)).await.map(Json)
}

/// Lists what only this host has of volumes that it has given up after a promotion.
#[utoipa::path(get, path = "/v1/divergences",
    responses((status = 200, description = "The divergences", body = [api::Divergence])))]
async fn list_divergences(State(host): State<Arc<Host>>) -> Answer<Vec<api::Divergence>> {
    Arc::clone(&host.standbys).divergences().await.map(Json)
}

/// Returns a piece of what only this host has of a volume. The answer names where the next piece is.
#[utoipa::path(get, path = "/v1/divergences/{name}",
    params(("name" = String, Path, description = "Name of the divergence"), api::DivergenceFrom),
    responses((status = 200, description = "A piece", body = api::DivergencePiece)))]
async fn export_divergence(
    State(host): State<Arc<Host>>,
    Segment(name): Segment,
    uri: Uri,
) -> Answer<api::DivergencePiece> {
    let api::DivergenceFrom { from } = query(&uri)?;
    Arc::clone(&host.standbys).divergence_piece(name, from).await.map(Json)
}

/// Releases what only this host has of a volume: what is kept of it is deleted.
#[utoipa::path(delete, path = "/v1/divergences/{name}", params(("name" = String, Path, description = "Name of the divergence")),
    responses((status = 200, description = "What it was", body = api::Divergence)))]
async fn drop_divergence(State(host): State<Arc<Host>>, Segment(name): Segment) -> Answer<api::Divergence> {
    host.operate(Arc::clone(&host.standbys).drop_divergence(name)).await.map(Json)
}

/// Has all blocks of a standby compared with those of its volumes, which are here. Answers when that has begun; the standby shows how far it is.
/// What differs is sent again.
#[utoipa::path(post, path = "/v1/standbys/{name}/check", params(("name" = String, Path, description = "Name of the standby, or of its volume")),
    responses((status = 200, description = "The standby", body = api::Standby)))]
async fn check_standby(State(host): State<Arc<Host>>, Segment(name): Segment) -> Answer<api::Standby> {
    host.operate(Arc::clone(&host.standbys).check(name)).await.map(Json)
}

/// Begins a standby that is kept here with images from its store, which become the standby's. What they have already is not sent. The
/// standby must not have a recovery point yet.
#[utoipa::path(post, path = "/v1/standbys/{name}/seed", params(("name" = String, Path, description = "Name of the standby, or of its volume")),
    request_body = api::SeedStandby,
    responses((status = 200, description = "The standby", body = api::Standby)))]
async fn seed_standby(
    State(host): State<Arc<Host>>,
    Segment(name): Segment,
    request: Request,
) -> Answer<api::Standby> {
    let order = body(request).await?;
    host.operate(Arc::clone(&host.standbys).seed(name, order)).await.map(Json)
}

/// Begins to export a standby that has nothing yet: its first copy goes into a new folder of this host, for somebody to carry. Answers once
/// that has begun; the standby shows how far it is. The standby is paused from then on.
#[utoipa::path(post, path = "/v1/standbys/{name}/export", params(("name" = String, Path, description = "Name of the standby, or of its volume")),
    request_body = api::ExportStandby,
    responses((status = 200, description = "The standby", body = api::Standby)))]
async fn export_standby(
    State(host): State<Arc<Host>>,
    Segment(name): Segment,
    request: Request,
) -> Answer<api::Standby> {
    let order = body(request).await?;
    host.operate(Arc::clone(&host.standbys).export(name, order)).await.map(Json)
}

/// Cancels the export of a standby: the folder that is being made is deleted.
#[utoipa::path(delete, path = "/v1/standbys/{name}/export", params(("name" = String, Path, description = "Name of the standby, or of its volume")),
    responses((status = 200, description = "The standby", body = api::Standby)))]
async fn cancel_export(State(host): State<Arc<Host>>, Segment(name): Segment) -> Answer<api::Standby> {
    host.operate(Arc::clone(&host.standbys).cancel_export(name)).await.map(Json)
}

/// Begins a test of a standby: a clone of a recovery point becomes volumes of this host under other names, for a time. Answers once
/// the test is recorded; the clone is made afterwards. The standby shows how far it is.
#[utoipa::path(post, path = "/v1/standbys/{name}/test", params(("name" = String, Path, description = "Name of the standby, or of its volume")),
    request_body = api::TestStandby,
    responses((status = 200, description = "The standby, with its test", body = api::Standby)))]
async fn test_standby(
    State(host): State<Arc<Host>>,
    Segment(name): Segment,
    request: Request,
) -> Answer<api::Standby> {
    let order = body(request).await?;
    host.operate(Arc::clone(&host.standbys).test(name, order)).await.map(Json)
}

/// Ends the test of a standby: all that belongs to it is deleted.
#[utoipa::path(delete, path = "/v1/standbys/{name}/test", params(("name" = String, Path, description = "Name of the standby, or of its volume")),
    responses((status = 200, description = "The standby, once nothing of the test is left", body = api::Standby)))]
async fn end_standby_test(State(host): State<Arc<Host>>, Segment(name): Segment) -> Answer<api::Standby> {
    host.operate(Arc::clone(&host.standbys).end_test(name)).await.map(Json)
}

/// Gives up the volumes of a standby that was promoted, at one of the two hosts that have them. Images are kept.
#[utoipa::path(post, path = "/v1/volumes/{name}/yield", params(("name" = String, Path, description = "Name of a volume, its VM, or the standby")),
    request_body = api::YieldVolume,
    responses((status = 200, description = "The volumes, and where their images are", body = [api::RemovedVolume])))]
async fn yield_volume(
    State(host): State<Arc<Host>>,
    Segment(name): Segment,
    request: Request,
) -> Answer<Vec<api::RemovedVolume>> {
    let how = body(request).await?;
    host.operate(Arc::clone(&host.standbys).yield_volumes(name, how)).await.map(Json)
}
