//! The part of the API about access over TLS.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::{Extension, Json};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{Answer, Caller, Segment, body};
use crate::error::{RequestError, RouteError};
use crate::host::Host;

pub(super) fn routes() -> OpenApiRouter<Arc<Host>> {
    OpenApiRouter::new()
        .routes(routes!(show_access, grant_access))
        .routes(routes!(set_access, revoke_access))
        .routes(routes!(redeem_access))
}

/// Describes who may use the API over TLS, and at which address.
#[utoipa::path(get, path = "/v1/access", responses((status = 200, description = "Who may", body = api::Access)))]
async fn show_access(State(host): State<Arc<Host>>) -> Answer<api::Access> {
    host.access.describe_access().map(Json)
}

/// Grants access to the API over TLS, to a given key or by an access token.
#[utoipa::path(post, path = "/v1/access", request_body = api::NewGrant,
    responses((status = 201, description = "What was granted, with a token if he is invited", body = api::NewlyGranted)))]
async fn grant_access(
    State(host): State<Arc<Host>>,
    request: Request,
) -> Result<(StatusCode, Json<api::NewlyGranted>), RequestError> {
    let order = body(request).await?;
    let granted = host.operate(Arc::clone(&host.access).grant_access(order)).await?;
    Ok((StatusCode::CREATED, Json(granted)))
}

/// Changes a client's rights over TLS, in effect from its next request.
#[utoipa::path(patch, path = "/v1/access/{name}", params(("name" = String, Path, description = "What he is called")),
    request_body = api::SetGrant, responses((status = 200, description = "The grant", body = api::Grant)))]
async fn set_access(
    State(host): State<Arc<Host>>,
    Segment(name): Segment,
    request: Request,
) -> Answer<api::Grant> {
    let order = body(request).await?;
    host.operate(Arc::clone(&host.access).set_access(name, order)).await.map(Json)
}

/// Revokes a client's access over TLS, in effect from its next request.
#[utoipa::path(delete, path = "/v1/access/{name}", params(("name" = String, Path, description = "What he is called")),
    responses((status = 200, description = "What he had", body = api::Grant)))]
async fn revoke_access(State(host): State<Arc<Host>>, Segment(name): Segment) -> Answer<api::Grant> {
    host.operate(Arc::clone(&host.access).revoke_access(name)).await.map(Json)
}

/// Redeems an access token: replaces the key of the token by the client's own key.
#[utoipa::path(post, path = "/v1/redemption", request_body = api::RedeemGrant,
    responses((status = 200, description = "What he may do", body = api::Grant)))]
async fn redeem_access(
    State(host): State<Arc<Host>>,
    caller: Option<Extension<Caller>>,
    request: Request,
) -> Answer<api::Grant> {
    let Some(Extension(Caller(Some(invited)))) = caller else { return Err(RouteError::NotInvited.into()) };
    let order = body(request).await?;
    host.operate(Arc::clone(&host.access).redeem_access(invited.key, order)).await.map(Json)
}
