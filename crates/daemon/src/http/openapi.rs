//! Generates the OpenAPI document from the operations and their types, so that it always matches the daemon.
//! `docs/openapi.json` is a copy of it that a test compares.

use std::sync::LazyLock;

use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use utoipa::OpenApi;

/// The parts of the document that belong to no operation.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "Sterna",
        description = "Live migration of virtual machines' disks. HTTP/1.1 with JSON on a unix socket, and over TLS. Within v1, fields \
                       and codes are only added: ignore what you do not know."
    ),
    components(schemas(api::ErrorBody))
)]
struct Frame;

/// Returns the OpenAPI document of the HTTP API as readable JSON, with a final newline.
pub fn document() -> String {
    DOCUMENT.clone()
}

pub(super) async fn show() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], DOCUMENT.as_str()).into_response()
}

static DOCUMENT: LazyLock<String> = LazyLock::new(|| {
    let mut frame = Frame::openapi();
    frame.merge(super::routes().into_openapi());
    let mut document = serde_json::to_value(&frame).unwrap_or_default();
    add_errors(&mut document);
    plain(&mut document);
    // It was serialised from a value, so this cannot fail.
    format!("{document:#}\n")
});

/// Adds the error response that every operation has.
fn add_errors(document: &mut Value) {
    let error = json!({
        "description": "An error: `code` is for programs, `message` says what to do next",
        "content": { "application/json": { "schema": { "$ref": "#/components/schemas/ErrorBody" } } }
    });
    let paths = document["paths"].as_object_mut().into_iter().flat_map(|paths| paths.values_mut());
    let operations = paths.filter_map(Value::as_object_mut).flat_map(|path| path.values_mut());
    for operation in operations {
        operation["responses"]["default"] = error.clone();
    }
}

/// Removes Rust notation from descriptions, which are the documentation of Rust types.
fn plain(value: &mut Value) {
    const WORDS: [(&str, &str); 6] = [
        ("[`", "`"),
        ("`]", "`"),
        ("`crate::", "`"),
        ("`Migration::", "`"),
        ("`Watch::", "`"),
        ("`None`", "null"),
    ];
    match value {
        Value::String(text) => {
            for (rust, json) in WORDS {
                *text = text.replace(rust, json);
            }
        }
        Value::Array(values) => values.iter_mut().for_each(plain),
        Value::Object(fields) => fields.values_mut().for_each(plain),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::document;
    use crate::hosts::LIFETIME_S_MAX;
    use crate::names::NAME_BYTES_MAX;
    use crate::vms::orders::manage::SHUT_DOWN_TIMEOUT;

    #[test]
    fn the_document_in_the_repository_is_the_one_that_is_served() {
        let kept = include_str!("../../../../docs/openapi.json");
        assert!(kept == document(), "docs/openapi.json is not up to date; run: make openapi");
    }

    #[test]
    fn what_the_document_says_of_values_is_what_is_checked() {
        let document: Value = serde_json::from_str(&document()).unwrap();
        let of = |schema: &str, field: &str, what: &str| {
            document["components"]["schemas"][schema]["properties"][field][what].clone()
        };
        assert_eq!(of("NewInvitation", "lifetime_s", "maximum"), LIFETIME_S_MAX);
        assert_eq!(of("StopVm", "wait_s", "maximum"), SHUT_DOWN_TIMEOUT.as_secs());
        assert_eq!(of("SuspendVm", "timeout_s", "maximum"), SHUT_DOWN_TIMEOUT.as_secs());
        assert_eq!(of("MigrateVolume", "memory_streams", "maximum"), api::MEMORY_STREAMS_MAX);
        let name = format!("^[A-Za-z0-9][A-Za-z0-9._-]{{0,{}}}$", NAME_BYTES_MAX - 1);
        assert_eq!(of("NewVolume", "name", "pattern"), name);
        assert_eq!(of("NewVm", "name", "pattern"), name);
    }

    #[test]
    fn every_operation_and_field_is_described_and_every_reference_leads_somewhere() {
        let document: Value = serde_json::from_str(&document()).unwrap();
        let schemas = document["components"]["schemas"].as_object().unwrap();
        assert!(schemas.len() > 20 && document["paths"].as_object().unwrap().len() > 8);
        for (name, schema) in schemas {
            assert!(schema["description"].is_string(), "{name}");
            for (field, content) in schema["properties"].as_object().into_iter().flatten() {
                let of_alternative = &content["oneOf"][0]["description"];
                let described = content["description"].is_string()
                    || content["$ref"].is_string()
                    || of_alternative.is_string();
                assert!(described, "{name}.{field}: {content}");
            }
        }
        let mut names = std::collections::BTreeSet::new();
        for (path, operations) in document["paths"].as_object().unwrap() {
            for (method, operation) in operations.as_object().unwrap() {
                // Clients have a function of this name.
                assert!(
                    names.insert(operation["operationId"].to_string()),
                    "{method} {path}: its name is taken"
                );
                assert!(operation["summary"].is_string(), "{method} {path}");
                assert!(operation["responses"]["default"]["content"].is_object(), "{method} {path}");
            }
        }
        let text = document.to_string();
        for reference in text.split("\"#/components/schemas/").skip(1) {
            let name = reference.split('"').next().unwrap();
            assert!(schemas.contains_key(name), "{name}");
        }
    }
}
