//! The orders that a browser may give on the page, once it has signed in (`sign_ins.rs`). They are on the page's port only.
//!
//! ```text
//!   POST   /v1/page-links          an API client asks for a link      -> api::PageLink
//!   POST   /web/session            the browser signs in by its key    -> SignedIn
//!   GET    /web/session            whether its token is valid         -> SignedIn
//!   DELETE /web/session            signs out
//!   POST   /web/v1/...             the same operations as /v1/..., with the role of the token
//!
//!   order ─► from this very page? ─► token ─► its owner's role ─► high enough? ─► handler ─► answer, without secrets
//! ```
//! No other page can give an order: browsers say in `Origin` which page asks, and only this page has the token. It is sent in a
//! header that other pages cannot set, and never as a cookie, which browsers would add by themselves.

use std::sync::Arc;
use std::time::Instant;

use api::{PageLink, Role};
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Extension, Json, Router};
use serde::{Deserialize, Serialize};

use super::{Answer, Caller, audited, body, roles};
use crate::audit::By;
use crate::error::{RequestError, RouteError};
use crate::grants::Standing;
use crate::host::Host;
use crate::sign_ins::{KEY_LIFETIME, Owner, SESSION_LIFETIME};

/// The prefix of the operations' paths on the page's port.
const PREFIX: &str = "/web";

/// A key from a link.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SignIn {
    key: String,
}

/// The rights of a browser.
#[derive(Serialize)]
struct SignedIn {
    role: Role,
    /// The token; `None` if the browser has sent it.
    #[serde(skip_serializing_if = "Option::is_none")]
    token: Option<String>,
}

/// Returns a link with which one browser signs in to the page.
#[utoipa::path(post, path = "/v1/page-links",
    responses((status = 201, description = "The link", body = PageLink)))]
pub(super) async fn make_page_link(
    State(host): State<Arc<Host>>,
    caller: Option<Extension<Caller>>,
    by: Option<Extension<By>>,
) -> Result<(StatusCode, Json<PageLink>), RequestError> {
    let owner = match caller {
        None => Owner::Local(by.map(|Extension(by)| by)),
        Some(Extension(Caller(who))) => Owner::Remote(who.ok_or(RouteError::Revoked)?.key),
    };
    let address = host.config.web.listen.ok_or(RouteError::NoPage)?;
    if !host.access.sign_ins.is_listening() {
        return Err(RouteError::NoPageYet(address).into());
    }
    let role = role_of(&host, &owner).ok_or(RouteError::Revoked)?;
    let key = host.access.sign_ins.invite(owner, Instant::now());
    let key =
        key.ok_or_else(|| RequestError::Internal("the system has no randomness for a key".to_owned()))?;
    let link = PageLink {
        // A browser does not send the part behind the hash to any server, and no log has it.
        url: format!("http://{address}/web/#sign-in={key}"),
        role,
        lifetime_s: KEY_LIFETIME.as_secs(),
        session_s: SESSION_LIFETIME.as_secs(),
    };
    Ok((StatusCode::CREATED, Json(link)))
}

/// Returns the routes of the page's port for orders.
pub(super) fn routes(host: &Arc<Host>) -> Router<Arc<Host>> {
    let orders = Router::new()
        .route("/web/v1/volumes/{name}/plan", post(super::plan_migration))
        .route("/web/v1/volumes/{name}/migrate", post(super::migrate))
        .route("/web/v1/migrations/{id}/pause", post(super::pause_migration))
        .route("/web/v1/migrations/{id}/resume", post(super::resume_migration))
        .route("/web/v1/migrations/{id}/cancel", post(super::cancel_migration))
        .route("/web/v1/migrations/{id}/retry", post(super::retry_migration))
        .route_layer(from_fn(authorized))
        // The audit log has only orders of browsers that have signed in: any process of the host can send others without end.
        .route_layer(from_fn_with_state(host.access.audit.clone(), audited::audited))
        .route_layer(from_fn_with_state(Arc::clone(host), signed_in));
    let session = post(sign_in).get(show_session).delete(sign_out);
    orders.route("/web/session", session).layer(from_fn(refuse_other_pages))
}

/// The role of the browser that sends a request.
#[derive(Clone, Copy, Debug)]
struct Signed(Role);

async fn sign_in(State(host): State<Arc<Host>>, request: Request) -> Answer<SignedIn> {
    let SignIn { key } = body(request).await?;
    let token = host.access.sign_ins.sign_in(&key, Instant::now()).ok_or(RouteError::SignInRefused)?;
    let owner = host.access.sign_ins.owner(&token, Instant::now());
    let role = owner.and_then(|owner| role_of(&host, &owner)).ok_or(RouteError::SignInRefused)?;
    Ok(Json(SignedIn { role, token: Some(token) }))
}

async fn show_session(State(host): State<Arc<Host>>, headers: HeaderMap) -> Answer<SignedIn> {
    let (_, role) = browser(&host, &headers).ok_or(RouteError::NotSignedIn)?;
    Ok(Json(SignedIn { role, token: None }))
}

async fn sign_out(State(host): State<Arc<Host>>, headers: HeaderMap) -> StatusCode {
    if let Some(token) = token_in(&headers) {
        host.access.sign_ins.sign_out(token);
    }
    StatusCode::NO_CONTENT
}

/// Lets requests of browsers pass that have signed in, and marks them with their role and owner.
async fn signed_in(State(host): State<Arc<Host>>, mut request: Request, next: Next) -> Response {
    let Some((owner, role)) = browser(&host, request.headers()) else {
        return RequestError::from(RouteError::NotSignedIn).into_response();
    };
    let by = match owner {
        Owner::Local(by) => by,
        Owner::Remote(key) => host.access.grants.who(key).map(|who| By::from(&who)),
    };
    if let Some(by) = by {
        request.extensions_mut().insert(by);
    }
    request.extensions_mut().insert(Signed(role));
    next.run(request).await
}

/// Lets requests pass whose role suffices for the operation, by the table of all operations.
async fn authorized(request: Request, next: Next) -> Response {
    let path = request.extensions().get::<MatchedPath>();
    let operation = path.and_then(|path| path.as_str().strip_prefix(PREFIX)).unwrap_or_default();
    let needed = roles::needed(request.method(), operation);
    match request.extensions().get::<Signed>() {
        Some(Signed(role)) if needed.is_some_and(|needed| *role >= needed) => {
            roles::veiled(next.run(request).await).await
        }
        Some(Signed(role)) => RequestError::from(RouteError::PageRole { role: *role }).into_response(),
        None => RequestError::from(RouteError::NotSignedIn).into_response(),
    }
}

/// Refuses whatever is not only reading, and does not come from this page. A browser names the page in each such request.
async fn refuse_other_pages(request: Request, next: Next) -> Response {
    if request.method().is_safe() || is_from_this_page(request.headers()) {
        return next.run(request).await;
    }
    RequestError::from(RouteError::OtherPage).into_response()
}

fn is_from_this_page(headers: &HeaderMap) -> bool {
    let only = |name| {
        let mut values = headers.get_all(name).iter();
        values.next().filter(|_| values.next().is_none()).and_then(|value| value.to_str().ok())
    };
    let (Some(origin), Some(host)) = (only(header::ORIGIN), only(header::HOST)) else { return false };
    origin.strip_prefix("http://").is_some_and(|origin| !host.is_empty() && origin.eq_ignore_ascii_case(host))
}

/// Returns the owner of the browser that sends these headers, and its present role.
fn browser(host: &Host, headers: &HeaderMap) -> Option<(Owner, Role)> {
    let owner = host.access.sign_ins.owner(token_in(headers)?, Instant::now())?;
    let role = role_of(host, &owner)?;
    Some((owner, role))
}

fn token_in(headers: &HeaderMap) -> Option<&str> {
    headers.get(header::AUTHORIZATION)?.to_str().ok()?.strip_prefix("Bearer ")
}

/// Returns the role of an owner's browsers: no page needs more than [`Role::Operate`]. `None`: the owner's rights were revoked.
fn role_of(host: &Host, owner: &Owner) -> Option<Role> {
    match owner {
        Owner::Local(_) => Some(Role::Operate),
        Owner::Remote(key) => match host.access.grants.who(*key)?.standing {
            Standing::Has(role) => Some(role.min(Role::Operate)),
            Standing::Invited => None,
        },
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn only_the_page_itself_gives_orders() {
        let sent = |origins: &[&'static str], host: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, HeaderValue::from_static(host));
            for origin in origins {
                headers.append(header::ORIGIN, HeaderValue::from_static(origin));
            }
            is_from_this_page(&headers)
        };
        assert!(sent(&["http://127.0.0.1:7424"], "127.0.0.1:7424"));
        assert!(sent(&["http://localhost:8000"], "LOCALHOST:8000"));
        assert!(!sent(&[], "127.0.0.1:7424"), "not a browser's page");
        for other in [
            "null",
            "",
            "http://",
            "http://evil.example",
            "http://127.0.0.1",
            "http://127.0.0.1:7425",
            "http://localhost:7424",
            "https://127.0.0.1:7424",
            "http://127.0.0.1:7424.evil.example",
            "127.0.0.1:7424",
        ] {
            assert!(!sent(&[other], "127.0.0.1:7424"), "{other}");
        }
        assert!(!sent(&["http://127.0.0.1:7424", "http://evil.example"], "127.0.0.1:7424"));
        assert!(!sent(&["http://"], ""));
    }
}
