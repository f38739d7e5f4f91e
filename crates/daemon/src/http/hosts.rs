//! The part of the API about other hosts.

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
        .routes(routes!(show_identity, create_identity))
        .routes(routes!(invite))
        .routes(routes!(list_hosts, join_host))
        .routes(routes!(show_other_host, change_host, remove_host))
}

/// Describes this host's identity for other hosts.
#[utoipa::path(get, path = "/v1/identity",
    responses((status = 200, description = "This host's identity", body = api::Identity)))]
async fn show_identity(State(host): State<Arc<Host>>) -> Answer<api::Identity> {
    Ok(Json(host.hosts.describe_identity()?))
}

/// Creates this host's identity, once. Other hosts can be paired with it afterwards.
#[utoipa::path(post, path = "/v1/identity", request_body = api::NewIdentity,
    responses((status = 201, description = "This host's identity", body = api::Identity)))]
async fn create_identity(
    State(host): State<Arc<Host>>,
    request: Request,
) -> Result<(StatusCode, Json<api::Identity>), RequestError> {
    let order = body(request).await?;
    let identity = host.operate(Arc::clone(&host.pairing).create_identity(order)).await?;
    Ok((StatusCode::CREATED, Json(identity)))
}

/// Creates a host invitation, by which one other host can be paired with this one.
#[utoipa::path(post, path = "/v1/invitations", request_body = api::NewInvitation,
    responses((status = 201, description = "The invitation", body = api::Invitation)))]
async fn invite(
    State(host): State<Arc<Host>>,
    request: Request,
) -> Result<(StatusCode, Json<api::Invitation>), RequestError> {
    let order = body(request).await?;
    let invitation = host.operate(Arc::clone(&host.pairing).invite(order)).await?;
    Ok((StatusCode::CREATED, Json(invitation)))
}

/// Lists the paired hosts by name.
#[utoipa::path(get, path = "/v1/hosts", responses((status = 200, description = "The hosts", body = [api::Peer])))]
async fn list_hosts(State(host): State<Arc<Host>>) -> Answer<Vec<api::Peer>> {
    Ok(Json(host.pairing.describe_hosts()?))
}

/// Redeems another host's invitation. Answers when both hosts know each other.
#[utoipa::path(post, path = "/v1/hosts", request_body = api::JoinHost,
    responses((status = 201, description = "The other host", body = api::Peer)))]
async fn join_host(
    State(host): State<Arc<Host>>,
    request: Request,
) -> Result<(StatusCode, Json<api::Peer>), RequestError> {
    let order = body(request).await?;
    let peer = host.operate(Arc::clone(&host.pairing).join_host(order)).await?;
    Ok((StatusCode::CREATED, Json(peer)))
}

/// Describes another host and the connections with it.
#[utoipa::path(get, path = "/v1/hosts/{name}", params(("name" = String, Path, description = "Name of the host")),
    responses((status = 200, description = "The host", body = api::Peer)))]
async fn show_other_host(State(host): State<Arc<Host>>, Segment(name): Segment) -> Answer<api::Peer> {
    Ok(Json(host.pairing.describe_other_host(&name)?))
}

/// Changes what another host is trusted with, and at which addresses it is reached.
#[utoipa::path(patch, path = "/v1/hosts/{name}", params(("name" = String, Path, description = "Name of the host")),
    request_body = api::SetPeer, responses((status = 200, description = "The host", body = api::Peer)))]
async fn change_host(
    State(host): State<Arc<Host>>,
    Segment(name): Segment,
    request: Request,
) -> Answer<api::Peer> {
    let order = body(request).await?;
    host.operate(Arc::clone(&host.pairing).set_host(name, order)).await.map(Json)
}

/// Forgets another host, which is refused from then on.
#[utoipa::path(delete, path = "/v1/hosts/{name}",
    params(("name" = String, Path, description = "Name of the host"), api::RemovePeer),
    responses((status = 200, description = "What has been forgotten", body = api::RemovedPeer)))]
async fn remove_host(
    State(host): State<Arc<Host>>,
    Segment(name): Segment,
    uri: Uri,
) -> Answer<api::RemovedPeer> {
    let how = query(&uri)?;
    host.operate(Arc::clone(&host.pairing).remove_host(name, how)).await.map(Json)
}
