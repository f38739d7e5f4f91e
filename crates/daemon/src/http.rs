//! The HTTP API: converts requests to operations of the host, and results to JSON. The only decision here is who may ask.

mod access;
mod attachments;
mod audited;
mod evacuation;
mod hosts;
mod observe;
mod openapi;
mod page_orders;
mod places;
pub(crate) mod remote;
mod replicas;
mod roles;
mod server;
mod snapshots;
mod standbys;
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

/// How many bytes of a body that is too large are read: a client that is still writing would not see the answer.
const DISCARDED_BYTES_MAX: usize = 4 << 20;

/// The longest time for the body of a request. Bodies are small, and a slow client keeps a place from others.
const BODY_WAIT_MAX: Duration = Duration::from_secs(10);

pub(crate) fn router(host: Arc<Host>) -> Router {
    let audit = host.access.audit.clone();
    Router::from(routes())
        .route(roles::OPENAPI, get(openapi::show))
        .merge(web::routes())
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .with_state(host)
        .layer(from_fn(refuse_pages))
        .layer(from_fn_with_state(audit, audited::audited))
}

/// Returns the routes over TLS: the same without the page, and with authorisation.
pub(crate) fn remote_router(host: Arc<Host>) -> Router {
    let audit = host.access.audit.clone();
    Router::from(routes())
        .route(roles::OPENAPI, get(openapi::show))
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .with_state(host)
        .layer(from_fn(roles::authorized))
        .layer(from_fn(refuse_pages))
        .layer(from_fn_with_state(audit, audited::audited))
}

/// The client over TLS; `None`: its key was revoked.
#[derive(Clone, Debug)]
struct Caller(Option<Granted>);

/// Returns whether a request is answered. Calls the routes directly, so that it works even when clients use all connections.
pub(crate) async fn answers(router: Router) -> bool {
    let request = Request::get("/v1/host").body(Body::empty());
    let Ok(request) = request else { return false };
    let answered = TowerToHyperService::new(router).call(request).await;
    answered.is_ok_and(|answer| answer.status().is_success())
}

/// Returns the operations, with their descriptions for the document.
fn routes() -> OpenApiRouter<Arc<Host>> {
    OpenApiRouter::new()
        .routes(routes!(show_host, change_this_host))
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
        .routes(routes!(page_orders::make_page_link))
        .merge(access::routes())
        .merge(attachments::routes())
        .merge(evacuation::routes())
        .merge(hosts::routes())
        .merge(observe::routes())
        .merge(replicas::routes())
        .merge(snapshots::routes())
        .merge(standbys::routes())
        .merge(stores::routes())
        .merge(vms::routes())
}

type Answer<T> = Result<Json<T>, RequestError>;

/// Describes the daemon that answers.
#[utoipa::path(get, path = "/v1/host", responses((status = 200, description = "The daemon", body = api::Host)))]
async fn show_host(State(host): State<Arc<Host>>) -> Json<api::Host> {
    Json(host.description.describe())
}

/// Changes this host: whether it takes anything new. Answers when that is durable.
#[utoipa::path(patch, path = "/v1/host", request_body = api::SetHost,
    responses((status = 200, description = "The daemon", body = api::Host)))]
async fn change_this_host(State(host): State<Arc<Host>>, request: Request) -> Answer<api::Host> {
    let order: api::SetHost = body(request).await?;
    let evacuations = Arc::clone(&host.evacuations);
    host.operate(async move { evacuations.set_drained(order.drained).await }).await?;
    Ok(Json(host.description.describe()))
}

/// Lists the volumes by name.
#[utoipa::path(get, path = "/v1/volumes", responses((status = 200, description = "The volumes", body = [api::Volume])))]
async fn list_volumes(State(host): State<Arc<Host>>) -> Json<Vec<api::Volume>> {
    Json(host.views.describe_volumes().await)
}

/// Describes one volume by its name.
#[utoipa::path(get, path = "/v1/volumes/{name}", params(("name" = String, Path, description = "Name of the volume")),
    responses((status = 200, description = "The volume", body = api::Volume)))]
async fn show_volume(State(host): State<Arc<Host>>, Segment(name): Segment) -> Answer<api::Volume> {
    host.views.describe_volume(&name).await.map(Json)
}

/// Creates a volume. Answers when the volume is served, which takes as long as copying a given image.
#[utoipa::path(post, path = "/v1/volumes", request_body = api::NewVolume,
    responses((status = 201, description = "The volume, once it is served", body = api::Volume)))]
async fn create_volume(
    State(host): State<Arc<Host>>,
    request: Request,
) -> Result<(StatusCode, Json<api::Volume>), RequestError> {
    let order = body(request).await?;
    let volume = host.operate(Arc::clone(&host.volume_orders).create_volume(order)).await?;
    Ok((StatusCode::CREATED, Json(volume)))
}

/// Stops serving a volume and forgets it. Answers when the volume is not served.
#[utoipa::path(delete, path = "/v1/volumes/{name}",
    params(("name" = String, Path, description = "Name of the volume"), api::RemoveVolume),
    responses((status = 200, description = "What has become of it", body = api::RemovedVolume)))]
async fn remove_volume(
    State(host): State<Arc<Host>>,
    Segment(name): Segment,
    uri: Uri,
) -> Answer<api::RemovedVolume> {
    let how = query(&uri)?;
    host.standbys.refuse_removal(&name, how)?;
    host.operate(Arc::clone(&host.volume_orders).remove_volume(name, how)).await.map(Json)
}

/// Grows a volume, also while it is used or moves. Answers when new connections see the new size.
#[utoipa::path(post, path = "/v1/volumes/{name}/resize", params(("name" = String, Path, description = "Name of the volume")),
    request_body = api::ResizeVolume,
    responses((status = 200, description = "The volume, with its new size", body = api::Volume)))]
async fn resize_volume(
    State(host): State<Arc<Host>>,
    Segment(name): Segment,
    request: Request,
) -> Answer<api::Volume> {
    let order = body(request).await?;
    host.operate(Arc::clone(&host.volume_orders).resize_volume(name, order)).await.map(Json)
}

/// Begins to move a volume or a VM. Answers when the migration has begun or waits for its turn.
#[utoipa::path(post, path = "/v1/volumes/{name}/migrate", params(("name" = String, Path, description = "Name of the volume")),
    request_body = api::MigrateVolume,
    responses((status = 202, description = "The migration, once it has begun or waits", body = api::Migration)))]
async fn migrate(
    State(host): State<Arc<Host>>,
    Segment(name): Segment,
    request: Request,
) -> Result<(StatusCode, Json<api::Migration>), RequestError> {
    let order = body(request).await?;
    let migration = host.operate(Arc::clone(&host.migration_orders).migrate(name, order)).await?;
    Ok((StatusCode::ACCEPTED, Json(migration)))
}

/// Returns what a migration would do, and everything that is in its way. Changes nothing.
#[utoipa::path(post, path = "/v1/volumes/{name}/plan", params(("name" = String, Path, description = "Name of the volume, or of the VM")),
    request_body = api::MigrateVolume,
    responses((status = 200, description = "What it would do", body = api::MigrationPlan)))]
async fn plan_migration(
    State(host): State<Arc<Host>>,
    Segment(name): Segment,
    request: Request,
) -> Answer<api::MigrationPlan> {
    let order = body(request).await?;
    host.operate(Arc::clone(&host.migration_orders).plan_migration(name, order)).await.map(Json)
}

/// Lists the running migrations and the remembered ones, oldest first.
#[utoipa::path(get, path = "/v1/migrations", responses((status = 200, description = "The migrations", body = [api::Migration])))]
async fn list_migrations(State(host): State<Arc<Host>>) -> Json<Vec<api::Migration>> {
    Json(host.migration_orders.list())
}

/// Describes one migration. With `wait_ms`, answers as soon as it has changed.
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
        return host.migration_orders.describe(id).map(Json);
    }
    let wait = Duration::from_millis(wait_ms.min(api::WAIT_MAX_MS));
    tokio::select! {
        shown = host.migration_orders.watch(id, after.unwrap_or(0), wait) => shown.map(Json),
        // A watching client must not keep the daemon from stopping.
        () = host.stopping.begins() => Err(RequestError::ShuttingDown),
    }
}

/// Changes a running migration. Answers when the change is in effect.
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
    host.operate(Arc::clone(&host.migration_orders).set_migration(id, order)).await.map(Json)
}

/// Cancels a migration. Answers when the cancellation is certain, before the migration has ended.
#[utoipa::path(post, path = "/v1/migrations/{id}/cancel",
    params(("id" = String, Path, description = "Identity of the migration, for example m7")),
    responses((status = 200, description = "The migration", body = api::Migration)))]
async fn cancel_migration(State(host): State<Arc<Host>>, Segment(id): Segment) -> Answer<api::Migration> {
    host.operate(Arc::clone(&host.migration_orders).cancel_migration(id)).await.map(Json)
}

/// Pauses a migration: nothing is copied or handed over meanwhile.
#[utoipa::path(post, path = "/v1/migrations/{id}/pause",
    params(("id" = String, Path, description = "Identity of the migration, for example m7")),
    responses((status = 200, description = "The migration", body = api::Migration)))]
async fn pause_migration(State(host): State<Arc<Host>>, Segment(id): Segment) -> Answer<api::Migration> {
    host.operate(Arc::clone(&host.migration_orders).rest_migration(id, Rest::Pause)).await.map(Json)
}

/// Resumes a paused migration.
#[utoipa::path(post, path = "/v1/migrations/{id}/resume",
    params(("id" = String, Path, description = "Identity of the migration, for example m7")),
    responses((status = 200, description = "The migration", body = api::Migration)))]
async fn resume_migration(State(host): State<Arc<Host>>, Segment(id): Segment) -> Answer<api::Migration> {
    host.operate(Arc::clone(&host.migration_orders).rest_migration(id, Rest::Resume)).await.map(Json)
}

/// Repeats a failed or cancelled migration with the same options. Answers with the new migration.
#[utoipa::path(post, path = "/v1/migrations/{id}/retry",
    params(("id" = String, Path, description = "Identity of the migration, for example m7")),
    responses((status = 202, description = "The new migration, once it has begun or waits", body = api::Migration)))]
async fn retry_migration(
    State(host): State<Arc<Host>>,
    Segment(id): Segment,
) -> Result<(StatusCode, Json<api::Migration>), RequestError> {
    let migration = host.operate(Arc::clone(&host.migration_orders).retry_migration(id)).await?;
    Ok((StatusCode::ACCEPTED, Json(migration)))
}

/// Promotes a complete copy at this host without its source host.
#[utoipa::path(post, path = "/v1/volumes/{name}/promote", params(("name" = String, Path, description = "Name of the volume")),
    request_body = api::PromoteVolume,
    responses((status = 200, description = "The volume, once it is served", body = api::Volume)))]
async fn promote_volume(
    State(host): State<Arc<Host>>,
    Segment(name): Segment,
    request: Request,
) -> Answer<api::Volume> {
    let order = body(request).await?;
    host.operate(Arc::clone(&host.ownership).promote_volume(name, order)).await.map(Json)
}

/// Describes one migration with its recorded history.
#[utoipa::path(get, path = "/v1/migrations/{id}/history",
    params(("id" = String, Path, description = "Identity of the migration, for example m7")),
    responses((status = 200, description = "The migration and its recording", body = api::MigrationHistory)))]
async fn show_history(State(host): State<Arc<Host>>, Segment(id): Segment) -> Answer<api::MigrationHistory> {
    Arc::clone(&host.migration_orders).migration_history(parse_id(&id)?).await.map(Json)
}

/// Refuses orders that a browser sends for another page: forwarding a port to the socket does not trust every page in that
/// browser. Browsers name their page with every request that is not only reading.
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

/// The name or identity in a path, or a pair of them.
struct Segment<T = String>(T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for Segment<T> {
    type Rejection = RequestError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, RequestError> {
        let path = Path::from_request_parts(parts, state).await;
        path.map(|Path(segment)| Self(segment))
            .map_err(|error| RequestError::Invalid(format!("the path is not valid: {}", error.body_text())))
    }
}

/// Returns the body of a request. Its media type is ignored, because there is only one.
async fn body<T: DeserializeOwned>(request: Request) -> Result<T, RequestError> {
    let details = request.extensions().get::<audited::Details>().cloned().unwrap_or_default();
    let bytes = tokio::time::timeout(BODY_WAIT_MAX, read(request.into_body())).await.map_err(|_| {
        RequestError::Invalid(format!("the request was not sent within {} s", BODY_WAIT_MAX.as_secs()))
    })??;
    details.take(&bytes);
    serde_json::from_slice(&bytes)
        .map_err(|error| RequestError::Invalid(format!("the body of the request is not valid: {error}")))
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
    query
        .map(|Query(query)| query)
        .map_err(|error| RequestError::Invalid(format!("the query is not valid: {}", error.body_text())))
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
        // The audit log reads this.
        answer.extensions_mut().insert(code);
        answer
    }
}

fn json(status: StatusCode, value: &impl Serialize) -> Response {
    match serde_json::to_vec(value) {
        Ok(bytes) => (status, [(header::CONTENT_TYPE, "application/json")], bytes).into_response(),
        // Codes and texts can always be serialised; an answer without a body at least has the status.
        Err(_) => (status, Body::empty()).into_response(),
    }
}
