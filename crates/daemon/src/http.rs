//! The HTTP API: requests become operations of the host, their results JSON. Nothing is decided here.

mod listener;

use std::sync::Arc;
use std::time::Duration;

use api::{ErrorBody, ErrorDetail, Watch};
use axum::body::Body;
use axum::extract::{FromRequestParts, Path, Query, Request, State};
use axum::http::request::Parts;
use axum::http::{Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use http_body_util::BodyExt as _;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::RequestError;
use crate::host::Host;
use crate::migrations::parse_id;

pub(crate) use listener::BoundedListener;

/// Bytes of a body that is too large that are read all the same: a client that still writes when the connection ends
/// does not see the answer.
const DISCARDED_BYTES_MAX: usize = 4 << 20;

/// All that the API answers.
pub(crate) fn router(host: Arc<Host>) -> Router {
    Router::new()
        .route("/v1/host", get(show_host))
        .route("/v1/stores", get(list_stores))
        .route("/v1/volumes", get(list_volumes).post(create_volume))
        .route("/v1/volumes/{name}", get(show_volume).delete(remove_volume))
        .route("/v1/volumes/{name}/migrate", post(migrate))
        .route("/v1/migrations", get(list_migrations))
        .route("/v1/migrations/{id}", get(show_migration))
        .route("/v1/migrations/{id}/cancel", post(cancel_migration))
        .route("/v1/migrations/{id}/history", get(show_history))
        .fallback(no_route)
        .method_not_allowed_fallback(no_route)
        .with_state(host)
}

type Answer<T> = Result<Json<T>, RequestError>;

async fn show_host(State(host): State<Arc<Host>>) -> Json<api::Host> {
    Json(host.describe())
}

async fn list_stores(State(host): State<Arc<Host>>) -> Json<Vec<api::Store>> {
    Json(host.describe_stores().await)
}

async fn list_volumes(State(host): State<Arc<Host>>) -> Json<Vec<api::Volume>> {
    Json(host.describe_volumes().await)
}

async fn show_volume(State(host): State<Arc<Host>>, Segment(name): Segment) -> Answer<api::Volume> {
    host.describe_volume(&name).await.map(Json)
}

async fn create_volume(
    State(host): State<Arc<Host>>,
    request: Request,
) -> Result<(StatusCode, Json<api::Volume>), RequestError> {
    let order = body(request).await?;
    let volume = host.operate(Arc::clone(&host).create_volume(order)).await?;
    Ok((StatusCode::CREATED, Json(volume)))
}

async fn remove_volume(
    State(host): State<Arc<Host>>,
    Segment(name): Segment,
    uri: Uri,
) -> Answer<api::RemovedVolume> {
    let how = query(&uri)?;
    host.operate(Arc::clone(&host).remove_volume(name, how)).await.map(Json)
}

async fn migrate(
    State(host): State<Arc<Host>>,
    Segment(name): Segment,
    request: Request,
) -> Result<(StatusCode, Json<api::Migration>), RequestError> {
    let order = body(request).await?;
    let migration = host.operate(Arc::clone(&host).migrate(name, order)).await?;
    Ok((StatusCode::ACCEPTED, Json(migration)))
}

async fn list_migrations(State(host): State<Arc<Host>>) -> Json<Vec<api::Migration>> {
    Json(host.migrations.list(&host.journal))
}

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

async fn cancel_migration(State(host): State<Arc<Host>>, Segment(id): Segment) -> Answer<api::Migration> {
    host.operate(Arc::clone(&host).cancel_migration(id)).await.map(Json)
}

async fn show_history(State(host): State<Arc<Host>>, Segment(id): Segment) -> Answer<api::MigrationHistory> {
    Arc::clone(&host).migration_history(parse_id(&id)?).await.map(Json)
}

async fn no_route(method: Method, uri: Uri) -> RequestError {
    RequestError::RouteNotFound { method: method.to_string(), path: uri.path().to_owned() }
}

/// The name or identity in a path.
struct Segment(String);

impl<S: Send + Sync> FromRequestParts<S> for Segment {
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
    let mut body = request.into_body();
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
    serde_json::from_slice(&bytes).map_err(|error| {
        RequestError::Invalid(format!("the body of the request is not as expected: {error}"))
    })
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
        json(status, &ErrorBody { error: ErrorDetail { code, message } })
    }
}

fn json(status: StatusCode, value: &impl Serialize) -> Response {
    match serde_json::to_vec(value) {
        Ok(bytes) => (status, [(header::CONTENT_TYPE, "application/json")], bytes).into_response(),
        // Neither a code nor a text can be unserialisable; an answer without a body says at least the status.
        Err(_) => (status, Body::empty()).into_response(),
    }
}
