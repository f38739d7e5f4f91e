//! The page for browsers: files of the folder `web/`, and the data that they request.
//!
//! ```text
//!   GET /web/                         the page; / and /web lead there
//!   GET /web/NAME                     its scripts, its style, its picture
//!   GET /web/overview                 Overview, as /v1/overview
//!   GET /web/migrations/{id}/history  MigrationHistory, without a ticket
//!   GET /web/migrations/{id}/report   the report, a page of its own
//! ```
//! It is served on the API's socket and, if configured, on a loopback port of its own. On the socket everything below `/web/` can
//! only be read, and holds no secrets, so a web server in front of it needs to know no more than that path. The port also takes
//! orders of browsers that have signed in (`page_orders.rs`).
//! Browsers act on behalf of any page that they show. So other pages cannot read this one, frame it, or reach it by a DNS name
//! that leads here; and it can load nothing from other servers.

use std::net::IpAddr;
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{Path, Request, State};
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName, HeaderValue, REFERRER_POLICY,
    X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
};
use axum::http::{Uri, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::get;
use axum::{Json, Router};

use super::{Answer, Segment, no_method, no_route, page_orders};
use crate::error::{RequestError, RouteError};
use crate::host::Host;
use crate::migrations::registry::parse_id;

struct File {
    name: &'static str,
    media_type: &'static str,
    text: &'static str,
}

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

/// The files; the first is the page.
const FILES: [File; 10] = [
    File { name: "index.html", media_type: HTML, text: include_str!("../../../../web/index.html") },
    File {
        name: "page.css",
        media_type: "text/css; charset=utf-8",
        text: include_str!("../../../../web/page.css"),
    },
    File { name: "page.js", media_type: SCRIPT, text: include_str!("../../../../web/page.js") },
    File { name: "dom.js", media_type: SCRIPT, text: include_str!("../../../../web/dom.js") },
    File { name: "units.js", media_type: SCRIPT, text: include_str!("../../../../web/units.js") },
    File { name: "plot.js", media_type: SCRIPT, text: include_str!("../../../../web/plot.js") },
    File { name: "migrations.js", media_type: SCRIPT, text: include_str!("../../../../web/migrations.js") },
    File { name: "inventory.js", media_type: SCRIPT, text: include_str!("../../../../web/inventory.js") },
    File { name: "orders.js", media_type: SCRIPT, text: include_str!("../../../../web/orders.js") },
    File { name: "tern.svg", media_type: "image/svg+xml", text: include_str!("../../../../web/tern.svg") },
];

/// The page may load its own files and ask its own server. Text never becomes markup, not even by mistake.
const PAGE_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";
/// A report may run its own script and nothing else, as if it had no origin.
const REPORT_POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; \
     form-action 'none'; frame-ancestors 'none'; sandbox allow-scripts";

/// Returns the routes of the page for the API's socket.
pub(super) fn routes() -> Router<Arc<Host>> {
    // Clients of the socket may use any host name. A name with dots comes from the DNS, and may be an attacker's.
    readable().layer(from_fn(async |request: Request, next: Next| {
        let is_here = host_of(&request).is_none_or(|host| is_loopback(host) || !host.contains('.'));
        answer(request, next, is_here).await
    }))
}

pub(crate) fn router(host: Arc<Host>) -> Router {
    let routes = readable()
        .merge(page_orders::routes(&host))
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .with_state(host);
    routes.layer(from_fn(async |request: Request, next: Next| {
        let is_here = host_of(&request).is_some_and(is_loopback);
        answer(request, next, is_here).await
    }))
}

fn readable() -> Router<Arc<Host>> {
    let to_page = get(async || Redirect::permanent("/web/"));
    Router::new()
        .route("/", to_page.clone())
        .route("/web", to_page)
        .route("/web/", get(async || show(&FILES[0])))
        .route("/web/{name}", get(show_file))
        .route("/web/overview", get(show_overview))
        .route("/web/migrations/{id}/history", get(show_history))
        .route("/web/migrations/{id}/report", get(show_report))
}

async fn show_file(Path(name): Path<String>, uri: Uri) -> Result<Response, RequestError> {
    let file = FILES.iter().find(|file| file.name == name);
    let file = file.ok_or_else(|| RouteError::NotFound { path: uri.path().to_owned() })?;
    Ok(show(file))
}

fn show(file: &File) -> Response {
    let policy = [(CONTENT_SECURITY_POLICY, PAGE_POLICY)];
    ([(CONTENT_TYPE, file.media_type)], policy, file.text).into_response()
}

/// Returns an overview of the host, at most a second old.
#[utoipa::path(get, path = "/v1/overview",
    responses((status = 200, description = "The host at one glance, a second old at most", body = api::Overview)))]
pub(super) async fn show_overview(State(host): State<Arc<Host>>) -> Result<Response, RequestError> {
    let json: Bytes = host.description.overview().await?;
    Ok(([(CONTENT_TYPE, "application/json")], json).into_response())
}

async fn show_history(State(host): State<Arc<Host>>, Segment(id): Segment) -> Answer<api::MigrationHistory> {
    let mut history = Arc::clone(&host.migration_orders).migration_history(parse_id(&id)?).await?;
    history.migration.ticket = None;
    Ok(Json(history))
}

async fn show_report(State(host): State<Arc<Host>>, Segment(id): Segment) -> Result<Response, RequestError> {
    let history = Arc::clone(&host.migration_orders).migration_history(parse_id(&id)?).await?;
    let page = tokio::task::spawn_blocking(move || report::page(&history)).await;
    let page = page.map_err(|error| RequestError::Internal(error.to_string()))?;
    Ok(([(CONTENT_TYPE, HTML)], [(CONTENT_SECURITY_POLICY, REPORT_POLICY)], page).into_response())
}

/// Answers a client that uses a local name of the host, with the headers that tell browsers what they may do.
async fn answer(request: Request, next: Next, is_here: bool) -> Response {
    let refused = || RequestError::from(RouteError::Elsewhere).into_response();
    let mut response = if is_here { next.run(request).await } else { refused() };
    let headers = response.headers_mut();
    for (name, value) in [
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (X_FRAME_OPTIONS, "DENY"),
        (REFERRER_POLICY, "no-referrer"),
        (CACHE_CONTROL, "no-store"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Returns the host name in the request, without its port.
fn host_of(request: &Request) -> Option<&str> {
    let in_head = || request.headers().get(header::HOST).and_then(|value| value.to_str().ok());
    let authority = request.uri().authority().map(axum::http::uri::Authority::as_str).or_else(in_head)?;
    let end =
        if authority.starts_with('[') { authority.find(']').map(|end| end + 1) } else { authority.find(':') };
    Some(&authority[..end.unwrap_or(authority.len())])
}

/// Returns whether a name is local for every browser, whatever the DNS says.
fn is_loopback(name: &str) -> bool {
    let bare = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    bare.eq_ignore_ascii_case("localhost")
        || bare.parse::<IpAddr>().is_ok_and(|address| address.to_canonical().is_loopback())
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    #[test]
    fn only_names_that_no_dns_decides_are_this_hosts() {
        let called = |host: &str| {
            let request = Request::get("/").header("host", host).body(Body::empty()).unwrap();
            host_of(&request).is_some_and(is_loopback)
        };
        for good in
            ["localhost", "localhost:7424", "LOCALHOST:1", "127.0.0.1:7424", "[::1]:7424", "127.9.9.9"]
        {
            assert!(called(good), "{good}");
        }
        for bad in [
            "",
            "evil.example",
            "evil.example:7424",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "192.0.2.1:7424",
            "[::2]:7424",
            "localhost.",
            "[::1",
            "2130706433",
            "evil.example@localhost",
        ] {
            assert!(!called(bad), "{bad}");
        }
    }

    #[test]
    fn the_page_names_only_files_that_are_served_and_all_of_them_are_named() {
        let named = |text: &str| {
            FILES[1..]
                .iter()
                .filter(|file| text.contains(&format!("{}\"", file.name)))
                .map(|file| file.name)
                .collect::<Vec<_>>()
        };
        let mut used: Vec<_> = FILES.iter().flat_map(|file| named(file.text)).collect();
        used.sort_unstable();
        used.dedup();
        let mut all: Vec<_> = FILES[1..].iter().map(|file| file.name).collect();
        all.sort_unstable();
        assert_eq!(used, all);
    }
}
