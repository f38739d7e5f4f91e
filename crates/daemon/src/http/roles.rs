//! The role that each operation of the API needs over TLS, in one table.
//!
//! ```text
//!   request ─► key ─► operation of the table ─► role high enough? ─► handler ─► answer, without secrets
//!                └─ none: refused          └─ not there: administrators only
//! ```
//! Clients of the API's socket may do everything. A test compares the table with the existing operations.

use api::Role;
use axum::body::{Body, to_bytes};
use axum::extract::{MatchedPath, Request};
use axum::http::{HeaderValue, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde_json::Value;

use super::Caller;
use crate::error::{RequestError, RouteError};
use crate::grants::Standing;

/// What an operation needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Takes {
    Invitation,
    /// This role, or a higher one.
    Role(Role),
}

const INVITATION: Takes = Takes::Invitation;
const READ: Takes = Takes::Role(Role::Read);
/// Operations that lose nothing: no bytes of a volume, no copy of one, and no trust.
const OPERATE: Takes = Takes::Role(Role::Operate);
/// Includes all operations that name files, devices and commands of the host: reading any file is as much as being root.
const ADMIN: Takes = Takes::Role(Role::Admin);

const TABLE: [(&str, &str, Takes); 82] = [
    ("GET", "/health", READ),
    ("GET", "/metrics", READ),
    ("GET", "/ready", READ),
    ("GET", "/v1/access", ADMIN),
    ("POST", "/v1/access", ADMIN),
    ("DELETE", "/v1/access/{name}", ADMIN),
    ("PATCH", "/v1/access/{name}", ADMIN),
    ("GET", "/v1/divergences", READ),
    ("DELETE", "/v1/divergences/{name}", ADMIN),
    ("GET", "/v1/divergences/{name}", ADMIN),
    ("GET", "/v1/evacuation", READ),
    ("POST", "/v1/evacuation", OPERATE),
    ("POST", "/v1/evacuation/abort", OPERATE),
    ("POST", "/v1/evacuation/plan", READ),
    ("GET", "/v1/host", READ),
    ("PATCH", "/v1/host", OPERATE),
    ("GET", "/v1/hosts", READ),
    ("POST", "/v1/hosts", ADMIN),
    ("DELETE", "/v1/hosts/{name}", ADMIN),
    ("GET", "/v1/hosts/{name}", READ),
    ("PATCH", "/v1/hosts/{name}", ADMIN),
    ("GET", "/v1/identity", READ),
    ("POST", "/v1/identity", ADMIN),
    ("POST", "/v1/invitations", ADMIN),
    ("GET", "/v1/migrations", READ),
    ("GET", "/v1/migrations/{id}", READ),
    ("PATCH", "/v1/migrations/{id}", OPERATE),
    ("POST", "/v1/migrations/{id}/cancel", OPERATE),
    ("GET", "/v1/migrations/{id}/history", READ),
    ("POST", "/v1/migrations/{id}/pause", OPERATE),
    ("POST", "/v1/migrations/{id}/resume", OPERATE),
    ("POST", "/v1/migrations/{id}/retry", OPERATE),
    ("GET", "/v1/notices", READ),
    ("POST", "/v1/notices/test", OPERATE),
    ("GET", OPENAPI, READ),
    ("GET", "/v1/overview", READ),
    ("POST", "/v1/page-links", OPERATE),
    ("POST", "/v1/redemption", INVITATION),
    ("GET", "/v1/replicas", READ),
    ("DELETE", "/v1/replicas/{volume}", ADMIN),
    ("POST", "/v1/reverts", ADMIN),
    ("POST", "/v1/snapshots", OPERATE),
    ("GET", "/v1/standbys", READ),
    ("POST", "/v1/standbys", ADMIN),
    ("DELETE", "/v1/standbys/{name}", ADMIN),
    ("GET", "/v1/standbys/{name}", READ),
    ("PATCH", "/v1/standbys/{name}", OPERATE),
    ("POST", "/v1/standbys/{name}/check", OPERATE),
    ("DELETE", "/v1/standbys/{name}/export", ADMIN),
    ("POST", "/v1/standbys/{name}/export", ADMIN),
    ("POST", "/v1/standbys/{name}/promote", ADMIN),
    ("POST", "/v1/standbys/{name}/reprotect", ADMIN),
    ("POST", "/v1/standbys/{name}/seed", ADMIN),
    ("DELETE", "/v1/standbys/{name}/test", ADMIN),
    ("POST", "/v1/standbys/{name}/test", ADMIN),
    ("GET", "/v1/stores", READ),
    ("GET", "/v1/stores/{name}/files", READ),
    ("DELETE", "/v1/stores/{name}/files/{file}", ADMIN),
    ("POST", "/v1/stores/{name}/release", ADMIN),
    ("POST", "/v1/vm-starts", OPERATE),
    ("GET", "/v1/vms", READ),
    ("POST", "/v1/vms", ADMIN),
    ("DELETE", "/v1/vms/{name}", ADMIN),
    ("GET", "/v1/vms/{name}", READ),
    ("PATCH", "/v1/vms/{name}", OPERATE),
    ("POST", "/v1/vms/{name}/adopt", OPERATE),
    ("POST", "/v1/vms/{name}/release", OPERATE),
    ("POST", "/v1/vms/{name}/resume", OPERATE),
    ("POST", "/v1/vms/{name}/start", OPERATE),
    ("POST", "/v1/vms/{name}/stop", OPERATE),
    ("POST", "/v1/vms/{name}/suspend", OPERATE),
    ("GET", "/v1/volumes", READ),
    ("POST", "/v1/volumes", ADMIN),
    ("DELETE", "/v1/volumes/{name}", ADMIN),
    ("GET", "/v1/volumes/{name}", READ),
    ("POST", "/v1/volumes/{name}/attach", OPERATE),
    ("POST", "/v1/volumes/{name}/detach", OPERATE),
    ("POST", "/v1/volumes/{name}/migrate", OPERATE),
    ("POST", "/v1/volumes/{name}/plan", READ),
    ("POST", "/v1/volumes/{name}/promote", ADMIN),
    ("POST", "/v1/volumes/{name}/resize", OPERATE),
    ("POST", "/v1/volumes/{name}/yield", ADMIN),
];
pub(super) const OPENAPI: &str = "/v1/openapi.json";
/// Fields of answers that only administrators see, in all answers. A definition is a command, which may contain passwords, and
/// a ticket lets its reader promote a volume.
const WITHHELD: [&str; 2] = ["definition", "ticket"];

/// Answers a client with sufficient rights, and refuses any other. Without a client in the request it refuses.
pub(super) async fn authorized(request: Request, next: Next) -> Response {
    let Some(Caller(Some(who))) = request.extensions().get::<Caller>().cloned() else {
        let mut refused = RequestError::from(RouteError::Revoked).into_response();
        // The connection ends with this answer.
        refused.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        return refused;
    };
    let path = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    let takes = path.as_deref().map(|path| takes(request.method(), path));
    let refusal = match (who.standing, takes) {
        (Standing::Invited, Some(Takes::Invitation)) => None,
        (Standing::Invited, _) => Some(RouteError::Invited(who.name)),
        (Standing::Has(_), Some(Takes::Invitation)) => Some(RouteError::NotInvited),
        (Standing::Has(role), Some(Takes::Role(needed))) if role < needed => {
            Some(RouteError::Role { name: who.name, role, needed })
        }
        // The client learns that the path is unknown.
        (Standing::Has(_), _) => None,
    };
    if let Some(refusal) = refusal {
        return RequestError::from(refusal).into_response();
    }
    let answer = next.run(request).await;
    match who.standing {
        Standing::Has(Role::Admin) | Standing::Invited => answer,
        // The document has the names of fields without values.
        Standing::Has(_) if path.as_deref() == Some(OPENAPI) => answer,
        Standing::Has(_) => veiled(answer).await,
    }
}

/// Returns what an operation needs; the administrator's role if it is not in the table.
fn takes(method: &Method, path: &str) -> Takes {
    // HTTP has a HEAD for every GET.
    let method = if method == Method::HEAD { "GET" } else { method.as_str() };
    let entry = TABLE.iter().find(|(of, at, _)| *of == method && *at == path);
    entry.map_or(ADMIN, |(_, _, takes)| *takes)
}

/// Returns the least role for an operation; `None`: no role suffices.
pub(super) fn needed(method: &Method, path: &str) -> Option<Role> {
    match takes(method, path) {
        Takes::Role(role) => Some(role),
        Takes::Invitation => None,
    }
}

/// Removes the fields that only administrators see.
pub(super) async fn veiled(answer: Response) -> Response {
    let is_json = answer.headers().get(header::CONTENT_TYPE).is_some_and(|kind| kind == "application/json");
    if !is_json {
        return answer;
    }
    let (mut head, body) = answer.into_parts();
    let veiled = async {
        let bytes = to_bytes(body, api::RESPONSE_BYTES_MAX).await.ok()?;
        let text = std::str::from_utf8(&bytes).ok()?;
        if !WITHHELD.iter().any(|field| text.contains(field)) {
            return Some(bytes.into());
        }
        let mut value = serde_json::from_str(text).ok()?;
        veil(&mut value);
        serde_json::to_vec(&value).ok()
    };
    let Some(bytes) = veiled.await else {
        return RequestError::Internal("an answer cannot be read".to_owned()).into_response();
    };
    head.headers.remove(header::CONTENT_LENGTH);
    Response::from_parts(head, Body::from(bytes))
}

fn veil(value: &mut Value) {
    match value {
        Value::Array(values) => values.iter_mut().for_each(veil),
        Value::Object(fields) => {
            for (name, value) in fields {
                match WITHHELD.contains(&name.as_str()) {
                    true => *value = Value::Null,
                    false => veil(value),
                }
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use hyper::service::Service as _;
    use hyper_util::service::TowerToHyperService;
    use serde_json::json;

    use super::*;
    use crate::grants::Granted;

    #[test]
    fn every_operation_has_one_role_and_every_role_an_operation() {
        let document: Value = serde_json::from_str(&super::super::openapi_document()).unwrap();
        let mut there: Vec<(String, String)> = vec![("GET".to_owned(), OPENAPI.to_owned())];
        for (path, operations) in document["paths"].as_object().unwrap() {
            let methods = operations.as_object().unwrap().keys();
            there.extend(methods.map(|method| (method.to_uppercase(), path.clone())));
        }
        there.sort();
        let mut listed: Vec<_> =
            TABLE.iter().map(|(method, path, _)| ((*method).to_owned(), (*path).to_owned())).collect();
        listed.sort();
        let without: Vec<_> = there.iter().filter(|operation| !listed.contains(operation)).collect();
        assert_eq!(without, Vec::<&(String, String)>::new(), "these need a line in TABLE");
        assert_eq!(listed, there, "a line of TABLE has no operation, or is there twice");
    }

    #[test]
    fn what_changes_nothing_is_for_readers_and_what_loses_something_for_administrators() {
        for (method, path, takes) in TABLE {
            let is_look = method == "GET" || path.ends_with("/plan");
            // Who has access, and what is in a volume.
            let is_secret = ["/v1/access", "/v1/divergences/{name}"].contains(&path);
            assert_eq!(is_look && !is_secret, takes == READ, "{method} {path}");
            assert!(method != "DELETE" || takes == ADMIN, "{method} {path}");
        }
        let admins = [
            "/v1/volumes/{name}/promote",
            "/v1/volumes",
            "/v1/vms",
            "/v1/hosts",
            "/v1/invitations",
            "/v1/access",
        ];
        for path in admins {
            assert_eq!(takes(&Method::POST, path), ADMIN, "{path}");
        }
        assert_eq!(takes(&Method::HEAD, "/v1/volumes"), READ);
        // Operations that are not in the table.
        for (method, path) in
            [(Method::GET, "/v1/new"), (Method::PUT, "/v1/volumes"), (Method::OPTIONS, "/v1/host")]
        {
            assert_eq!(takes(&method, path), ADMIN, "{method} {path}");
        }
    }

    #[test]
    fn the_roles_of_the_table_are_those_of_the_documentation() {
        let page = include_str!("../../../../docs/api.md");
        let mut rows = BTreeMap::new();
        for row in page.lines().filter(|line| line.starts_with("| `")) {
            let cells: Vec<_> = row.split(" | ").map(|cell| cell.trim_matches([' ', '|'])).collect();
            let Some((method, rest)) = cells[0].trim_matches('`').split_once(' ') else { continue };
            // `/pause`, `…/resume`
            for path in rest.split(['`', ',', ' ']).filter(|part| part.starts_with(['/', '…'])) {
                let first = rest.split('`').next().unwrap_or_default();
                let parent = first.rsplit_once('/').map_or("", |(parent, _)| parent);
                rows.insert(
                    (method.to_owned(), path.replace('…', parent)),
                    cells[cells.len() - 1].to_owned(),
                );
            }
        }
        for (method, path, takes) in TABLE {
            let expected = match takes {
                Takes::Invitation => "an access token".to_owned(),
                Takes::Role(role) => role.to_string(),
            };
            assert_eq!(rows.get(&(method.to_owned(), path.to_owned())), Some(&expected), "{method} {path}");
        }
    }

    /// Returns the answer of an operation with secret fields.
    async fn answer(standing: Option<Standing>, path: &'static str) -> (u16, String) {
        let shown = || async {
            axum::Json(json!({ "name": "v", "ticket": "hush", "list": [{ "definition": "hush" }] }))
        };
        let route = axum::routing::get(shown).post(shown);
        let router = axum::Router::new().route(path, route).layer(axum::middleware::from_fn(authorized));
        let method = if path.ends_with("redemption") { "POST" } else { "GET" };
        let mut request = Request::builder().method(method).uri(path).body(Body::empty()).unwrap();
        let key = transport::HostId([1; 32]);
        let who = standing.map(|standing| Granted { name: "ann".to_owned(), key, standing });
        request.extensions_mut().insert(Caller(who));
        let answer = TowerToHyperService::new(router).call(request).await.unwrap();
        let status = answer.status().as_u16();
        let bytes = to_bytes(answer.into_body(), 1 << 20).await.unwrap();
        (status, String::from_utf8(bytes.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn answers_of_others_than_administrators_lack_what_gives_power() {
        for (role, hushes) in [(Role::Read, 0), (Role::Operate, 0), (Role::Admin, 2)] {
            let (status, text) = answer(Some(Standing::Has(role)), "/v1/migrations").await;
            assert_eq!((status, text.matches("hush").count()), (200, hushes), "{role}: {text}");
            assert!(text.contains("\"ticket\""), "what a client expects is there");
        }
    }

    #[tokio::test]
    async fn who_is_nobody_or_was_invited_gets_no_answer_but_to_redeem_that() {
        for path in ["/v1/migrations", "/v1/redemption", "/v1/new"] {
            assert_eq!(answer(None, path).await.0, 403, "{path}");
        }
        assert_eq!(answer(Some(Standing::Invited), "/v1/migrations").await.0, 403);
        assert_eq!(answer(Some(Standing::Invited), "/v1/redemption").await.0, 200);
        for role in Role::ALL {
            assert_eq!(answer(Some(Standing::Has(role)), "/v1/redemption").await.0, 403, "{role}");
            // An operation that is not in the table.
            let expected = if role == Role::Admin { 200 } else { 403 };
            assert_eq!(answer(Some(Standing::Has(role)), "/v1/new").await.0, expected, "{role}");
        }
    }

    #[test]
    fn tickets_and_definitions_are_taken_out_wherever_they_are() {
        let mut value = json!([{ "ticket": "t", "name": "ticket", "vms": [{ "definition": { "a": 1 } }] }]);
        veil(&mut value);
        assert_eq!(value, json!([{ "ticket": null, "name": "ticket", "vms": [{ "definition": null }] }]));
    }
}
