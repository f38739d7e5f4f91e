//! The HTTP API: requests become operations of the host, their results JSON. Nothing is decided here but who may ask.

mod access;
mod audited;
mod hosts;
mod observe;
mod openapi;
mod places;
pub(crate) mod remote;
mod replicas;
mod roles;
mod server;
mod stores;
mod vms;
mod web;

use std::sync::Arc;
use std::time::Duration;

use api::{ErrorBody, ErrorDetail, Watch};
use axum::body::Body;
use axum::extract::{FromRequestParts, Path, Query, Request, State};
use axum::http::request::Parts;
use axum::http::{Method, StatusCode, Uri, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use http_body_util::BodyExt as _;
use hyper::service::Service as _;
use hyper_util::service::TowerToHyperService;
use lane::Rest;
use serde::Serialize;
use serde::de::DeserializeOwned;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::error::{RequestError, RouteError};
use crate::grants::Granted;
use crate::host::Host;
use crate::migrations::registry::parse_id;

pub use openapi::document as openapi_document;
pub(crate) use server::serve;
pub(crate) use web::router as page_router;

/// Bytes of a body that is too large that are read all the same: a client that still writes when the connection ends
/// does not see the answer.
const DISCARDED_BYTES_MAX: usize = 4 << 20;

/// Longest that the body of a request may take. Ours are small: whoever takes longer keeps a place from others.
const BODY_WAIT_MAX: Duration = Duration::from_secs(10);

/// All that the API answers.
pub(crate) fn router(host: Arc<Host>) -> Router {
    let audit = host.audit.clone();
    Router::from(routes())
        .route(roles::OPENAPI, get(openapi::show))
        .merge(web::routes())
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .with_state(host)
        .layer(from_fn(refuse_pages))
        .layer(from_fn_with_state(audit, audited::audited))
}

/// All that is answered over TLS: the same without the page, to whom it may be answered.
pub(crate) fn remote_router(host: Arc<Host>) -> Router {
    let audit = host.audit.clone();
    Router::from(routes())
        .route(roles::OPENAPI, get(openapi::show))
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .with_state(host)
        .layer(from_fn(roles::authorized))
        .layer(from_fn(refuse_pages))
        .layer(from_fn_with_state(audit, audited::audited))
}

/// Who asks over TLS; `None`: somebody whose key is not known any more.
#[derive(Clone, Debug)]
struct Caller(Option<Granted>);

/// Tells whether a request is answered: by the routes themselves, so that clients who take all connections do not matter.
pub(crate) async fn answers(router: Router) -> bool {
    let request = Request::get("/v1/host").body(Body::empty());
    let Ok(request) = request else { return false };
    let answered = TowerToHyperService::new(router).call(request).await;
    answered.is_ok_and(|answer| answer.status().is_success())
}

/// The operations, with what the document says of them.
fn routes() -> OpenApiRouter<Arc<Host>> {
    OpenApiRouter::new()
        .routes(routes!(show_host))
        .routes(routes!(web::show_overview))
        .routes(routes!(list_volumes, create_volume))
        .routes(routes!(show_volume, remove_volume))
        .routes(routes!(resize_volume))
        .routes(routes!(migrate))
        .routes(routes!(plan_migration))
        .routes(routes!(list_migrations))
        .routes(routes!(show_migration, change_migration))
        .routes(routes!(cancel_migration))
        .routes(routes!(pause_migration))
        .routes(routes!(resume_migration))
        .routes(routes!(retry_migration))
        .routes(routes!(promote_volume))
        .routes(routes!(show_history))
        .merge(access::routes())
        .merge(hosts::routes())
        .merge(observe::routes())
        .merge(replicas::routes())
        .merge(stores::routes())
        .merge(vms::routes())
}

type Answer<T> = Result<Json<T>, RequestError>;

#[utoipa::path(get, path = "/v1/host", responses((status = 200, description = "The daemon", body = api::Host)))]
async fn show_host(State(host): State<Arc<Host>>) -> Json<api::Host> {
    Json(host.describe())
}

/// Lists the volumes, by name.
#[utoipa::path(get, path = "/v1/volumes", responses((status = 200, description = "The volumes", body = [api::Volume])))]
async fn list_volumes(State(host): State<Arc<Host>>) -> Json<Vec<api::Volume>> {
    Json(host.describe_volumes().await)
}

#[utoipa::path(get, path = "/v1/volumes/{name}", params(("name" = String, Path, description = "Name of the volume")),
    responses((status = 200, description = "The volume", body = api::Volume)))]
async fn show_volume(State(host): State<Arc<Host>>, Segment(name): Segment) -> Answer<api::Volume> {
    host.describe_volume(&name).await.map(Json)
}

/// Makes a volume; answers when it is being served, which takes as long as copying the image takes.
#[utoipa::path(post, path = "/v1/volumes", request_body = api::NewVolume,
    responses((status = 201, description = "The volume, once it is served", body = api::Volume)))]
async fn create_volume(
    State(host): State<Arc<Host>>,
    request: Request,
) -> Result<(StatusCode, Json<api::Volume>), RequestError> {
    let order = body(request).await?;
    let volume = host.operate(Arc::clone(&host).create_volume(order)).await?;
    Ok((StatusCode::CREATED, Json(volume)))
}

/// Stops serving a volume; answers when it is no longer served.
#[utoipa::path(delete, path = "/v1/volumes/{name}",
    params(("name" = String, Path, description = "Name of the volume"), api::RemoveVolume),
    responses((status = 200, description = "What has become of it", body = api::RemovedVolume)))]
async fn remove_volume(
    State(host): State<Arc<Host>>,
    Segment(name): Segment,
    uri: Uri,
) -> Answer<api::RemovedVolume> {
    let how = query(&uri)?;
    host.operate(Arc::clone(&host).remove_volume(name, how)).await.map(Json)
}

/// Makes a volume larger, while it is used and also while it moves; answers when whoever connects is told the new size.
#[utoipa::path(post, path = "/v1/volumes/{name}/resize", params(("name" = String, Path, description = "Name of the volume")),
    request_body = api::ResizeVolume,
    responses((status = 200, description = "The volume, with its new size", body = api::Volume)))]
async fn resize_volume(
    State(host): State<Arc<Host>>,
    Segment(name): Segment,
    request: Request,
) -> Answer<api::Volume> {
    let order = body(request).await?;
    host.operate(Arc::clone(&host).resize_volume(name, order)).await.map(Json)
}

/// Begins to move a volume or a VM; answers when that has begun, or waits for its turn.
#[utoipa::path(post, path = "/v1/volumes/{name}/migrate", params(("name" = String, Path, description = "Name of the volume")),
    request_body = api::MigrateVolume,
    responses((status = 202, description = "The migration, once it has begun or waits", body = api::Migration)))]
async fn migrate(
    State(host): State<Arc<Host>>,
    Segment(name): Segment,
    request: Request,
) -> Result<(StatusCode, Json<api::Migration>), RequestError> {
    let order = body(request).await?;
    let migration = host.operate(Arc::clone(&host).migrate(name, order)).await?;
    Ok((StatusCode::ACCEPTED, Json(migration)))
}

/// Says what a migration would do, and everything that is in its way; begins nothing, and leaves nothing.
#[utoipa::path(post, path = "/v1/volumes/{name}/plan", params(("name" = String, Path, description = "Name of the volume, or of the VM")),
    request_body = api::MigrateVolume,
    responses((status = 200, description = "What it would do", body = api::MigrationPlan)))]
async fn plan_migration(
    State(host): State<Arc<Host>>,
    Segment(name): Segment,
    request: Request,
) -> Answer<api::MigrationPlan> {
    let order = body(request).await?;
    host.operate(Arc::clone(&host).plan_migration(name, order)).await.map(Json)
}

/// Lists the migrations under way and those that are remembered, oldest first.
#[utoipa::path(get, path = "/v1/migrations", responses((status = 200, description = "The migrations", body = [api::Migration])))]
async fn list_migrations(State(host): State<Arc<Host>>) -> Json<Vec<api::Migration>> {
    Json(host.migrations.list(&host.journal))
}

/// Describes one migration; with `wait_ms`, as soon as it has changed.
#[utoipa::path(get, path = "/v1/migrations/{id}",
    params(("id" = String, Path, description = "Identity of the migration, for example m7"), Watch),
    responses((status = 200, description = "The migration", body = api::Migration)))]
async fn show_migration(
    State(host): State<Arc<Host>>,
    Segment(id): Segment,
    uri: Uri,
) -> Answer<api::Migration> {
    let Watch { after, wait_ms } = query(&uri)?;
    let id = parse_id(&id)?;
    if wait_ms == 0 {
        return host.migrations.get(&host.journal, id).map(Json);
    }
    let wait = Duration::from_millis(wait_ms.min(api::WAIT_MAX_MS));
    tokio::select! {
        shown = host.migrations.watch(&host.journal, id, after.unwrap_or(0), wait) => shown.map(Json),
        // Who watches must not keep the daemon from stopping.
        () = host.stopping() => Err(RequestError::ShuttingDown),
    }
}

/// Changes a migration that is under way; answers when that holds.
#[utoipa::path(patch, path = "/v1/migrations/{id}",
    params(("id" = String, Path, description = "Identity of the migration, for example m7")),
    request_body = api::SetMigration,
    responses((status = 200, description = "The migration", body = api::Migration)))]
async fn change_migration(
    State(host): State<Arc<Host>>,
    Segment(id): Segment,
    request: Request,
) -> Answer<api::Migration> {
    let order = body(request).await?;
    host.operate(Arc::clone(&host).set_migration(id, order)).await.map(Json)
}

/// Asks for a migration to be cancelled; answers when that is under way, not when it has ended.
#[utoipa::path(post, path = "/v1/migrations/{id}/cancel",
    params(("id" = String, Path, description = "Identity of the migration, for example m7")),
    responses((status = 200, description = "The migration", body = api::Migration)))]
async fn cancel_migration(State(host): State<Arc<Host>>, Segment(id): Segment) -> Answer<api::Migration> {
    host.operate(Arc::clone(&host).cancel_migration(id)).await.map(Json)
}

/// Lets a migration rest: nothing is copied, and it is not handed over.
#[utoipa::path(post, path = "/v1/migrations/{id}/pause",
    params(("id" = String, Path, description = "Identity of the migration, for example m7")),
    responses((status = 200, description = "The migration", body = api::Migration)))]
async fn pause_migration(State(host): State<Arc<Host>>, Segment(id): Segment) -> Answer<api::Migration> {
    host.operate(Arc::clone(&host).rest_migration(id, Rest::Pause)).await.map(Json)
}

/// Goes on with a migration that rests.
#[utoipa::path(post, path = "/v1/migrations/{id}/resume",
    params(("id" = String, Path, description = "Identity of the migration, for example m7")),
    responses((status = 200, description = "The migration", body = api::Migration)))]
async fn resume_migration(State(host): State<Arc<Host>>, Segment(id): Segment) -> Answer<api::Migration> {
    host.operate(Arc::clone(&host).rest_migration(id, Rest::Resume)).await.map(Json)
}

/// Begins once more what a migration did not come to; answers with the new migration.
#[utoipa::path(post, path = "/v1/migrations/{id}/retry",
    params(("id" = String, Path, description = "Identity of the migration, for example m7")),
    responses((status = 202, description = "The new migration, once it has begun or waits", body = api::Migration)))]
async fn retry_migration(
    State(host): State<Arc<Host>>,
    Segment(id): Segment,
) -> Result<(StatusCode, Json<api::Migration>), RequestError> {
    let migration = host.operate(Arc::clone(&host).retry_migration(id)).await?;
    Ok((StatusCode::ACCEPTED, Json(migration)))
}

/// Takes over a volume that another host has prepared here and released, without hearing from that host.
#[utoipa::path(post, path = "/v1/volumes/{name}/promote", params(("name" = String, Path, description = "Name of the volume")),
    request_body = api::PromoteVolume,
    responses((status = 200, description = "The volume, once it is served", body = api::Volume)))]
async fn promote_volume(
    State(host): State<Arc<Host>>,
    Segment(name): Segment,
    request: Request,
) -> Answer<api::Volume> {
    let order = body(request).await?;
    host.operate(Arc::clone(&host).promote_volume(name, order)).await.map(Json)
}

/// Describes one migration with what was recorded of it.
#[utoipa::path(get, path = "/v1/migrations/{id}/history",
    params(("id" = String, Path, description = "Identity of the migration, for example m7")),
    responses((status = 200, description = "The migration and its recording", body = api::MigrationHistory)))]
async fn show_history(State(host): State<Arc<Host>>, Segment(id): Segment) -> Answer<api::MigrationHistory> {
    Arc::clone(&host).migration_history(parse_id(&id)?).await.map(Json)
}

/// Refuses orders that a browser gives for some page: who leads a port to the socket does not mean every page that is looked at there.
/// Browsers say for which page they work whenever they ask for anything but reading.
async fn refuse_pages(request: Request, next: Next) -> Response {
    let is_from_page = request.headers().contains_key(header::ORIGIN);
    if is_from_page && !request.method().is_safe() {
        return RequestError::from(RouteError::FromPage).into_response();
    }
    next.run(request).await
}

async fn no_route(uri: Uri) -> RequestError {
    RouteError::NotFound { path: uri.path().to_owned() }.into()
}

async fn no_method(method: Method, uri: Uri) -> RequestError {
    RouteError::Method { method: method.to_string(), path: uri.path().to_owned() }.into()
}

/// The name or identity in a path; a pair of them where there are two.
struct Segment<T = String>(T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for Segment<T> {
    type Rejection = RequestError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, RequestError> {
        let path = Path::from_request_parts(parts, state).await;
        path.map(|Path(segment)| Self(segment)).map_err(|error| {
            RequestError::Invalid(format!("the path is not as expected: {}", error.body_text()))
        })
    }
}

/// The body of a request. Its type is not asked for: there is only one.
async fn body<T: DeserializeOwned>(request: Request) -> Result<T, RequestError> {
    let details = request.extensions().get::<audited::Details>().cloned().unwrap_or_default();
    let bytes = tokio::time::timeout(BODY_WAIT_MAX, read(request.into_body())).await.map_err(|_| {
        RequestError::Invalid(format!("the request was not sent within {} s", BODY_WAIT_MAX.as_secs()))
    })??;
    details.take(&bytes);
    serde_json::from_slice(&bytes).map_err(|error| {
        RequestError::Invalid(format!("the body of the request is not as expected: {error}"))
    })
}

async fn read(mut body: Body) -> Result<Vec<u8>, RequestError> {
    let mut bytes = Vec::new();
    let mut length = 0;
    while let Some(frame) = body.frame().await {
        let frame =
            frame.map_err(|error| RequestError::Invalid(format!("the request broke off: {error}")))?;
        let Some(data) = frame.data_ref() else { continue };
        length += data.len();
        if length <= api::REQUEST_BYTES_MAX {
            bytes.extend_from_slice(data);
        } else if length > DISCARDED_BYTES_MAX {
            break;
        }
    }
    if length > api::REQUEST_BYTES_MAX {
        return Err(RequestError::TooLarge);
    }
    Ok(bytes)
}

fn query<T: DeserializeOwned>(uri: &Uri) -> Result<T, RequestError> {
    let query = Query::try_from_uri(uri);
    query.map(|Query(query)| query).map_err(|error| {
        RequestError::Invalid(format!("the query is not as expected: {}", error.body_text()))
    })
}

impl IntoResponse for RequestError {
    fn into_response(self) -> Response {
        let code = self.code();
        let message = self.message();
        if code.http_status() >= 500 {
            tracing::warn!(?code, %message, "a request failed");
        } else {
            tracing::debug!(?code, %message, "a request was refused");
        }
        let status = StatusCode::from_u16(code.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut answer = json(status, &ErrorBody { error: ErrorDetail { code, message } });
        // For the audit log.
        answer.extensions_mut().insert(code);
        answer
    }
}

fn json(status: StatusCode, value: &impl Serialize) -> Response {
    match serde_json::to_vec(value) {
        Ok(bytes) => (status, [(header::CONTENT_TYPE, "application/json")], bytes).into_response(),
        // Neither a code nor a text can be unserialisable; an answer without a body says at least the status.
        Err(_) => (status, Body::empty()).into_response(),
    }
}
