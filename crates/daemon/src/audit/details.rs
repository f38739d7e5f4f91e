//! Selects what the audit log keeps of an order besides its path: a closed list of keys, so that a new secret is not logged.

use serde_json::{Map, Value};

/// The keys that are kept of a request. Left out on purpose: `token` and `ticket`, which are secrets, and `definition`, a
/// command that may contain passwords.
const KEPT: [&str; 53] = [
    "address",
    "allocation",
    "allow_machines",
    "bandwidth_bytes_per_second",
    "connections_max",
    "deadline_unix_ms",
    "delete_image",
    "device",
    "disks",
    "drained",
    "export",
    "fenced",
    "file",
    "force",
    "format",
    "full",
    "host",
    "ignore_hot_blocks",
    "image",
    "keep_chain",
    "keep_image",
    "keep_source",
    "key",
    "kind",
    "lifetime_s",
    "listen",
    "max_downtime_ms",
    "memory",
    "memory_streams",
    "migration",
    "monitor",
    "name",
    "nbd",
    "not_incremental",
    "now",
    "or_mirror",
    "priority",
    "read_only",
    "restored",
    "role",
    "serve_here",
    "shared_target",
    "size_bytes",
    "socket_mode",
    "socket_owner",
    "source",
    "standby_untold",
    "stop_rest",
    "store",
    "strategy",
    "to",
    "together_with",
    "wait_s",
];
const TEXT_BYTES_MAX: usize = 256;
/// How many elements of a list are kept: a migration has no more volumes.
const LIST_MAX: usize = 64;
/// How deep objects may be nested.
const DEPTH_MAX: usize = 3;
/// The beginnings of tokens and tickets, wherever a client has put one.
const SECRETS: [&str; 3] = ["sterna-access-", "sterna-invitation-", "sterna-ticket-"];
/// Replaces a text that is not kept.
const WITHHELD: &str = "(withheld)";

/// Returns what is kept of a request's body; nothing if it is not a JSON object.
pub(crate) fn of_body(bytes: &[u8]) -> Map<String, Value> {
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(object)) => kept(object, DEPTH_MAX),
        _ => Map::new(),
    }
}

pub(crate) fn of_query(query: &str) -> Map<String, Value> {
    let pairs = query.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    let kept = pairs.filter(|(key, _)| is_kept(key));
    kept.map(|(key, value)| (key.to_owned(), Value::String(text(value)))).collect()
}

/// Returns a text without secrets, cut to a useful length.
pub(crate) fn text(text: &str) -> String {
    if SECRETS.iter().any(|secret| text.contains(secret)) {
        return WITHHELD.to_owned();
    }
    if text.len() <= TEXT_BYTES_MAX {
        return text.to_owned();
    }
    // A character has four bytes at most.
    let end = (0..=TEXT_BYTES_MAX).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    format!("{}…", &text[..end])
}

fn is_kept(key: &str) -> bool {
    KEPT.binary_search(&key).is_ok()
}

fn kept(object: Map<String, Value>, depth: usize) -> Map<String, Value> {
    let fields = object.into_iter().filter(|(key, _)| is_kept(key));
    fields.filter_map(|(key, value)| Some((key, value_of(value, depth)?))).collect()
}

/// Returns what is kept of a value; `None`: it is empty, or nested too deep.
fn value_of(value: Value, depth: usize) -> Option<Value> {
    match value {
        Value::Null => None,
        Value::Bool(_) | Value::Number(_) => Some(value),
        Value::String(value) => Some(Value::String(text(&value))),
        _ if depth == 0 => None,
        Value::Array(values) => {
            let values = values.into_iter().take(LIST_MAX);
            Some(values.filter_map(|value| value_of(value, depth - 1)).collect())
        }
        Value::Object(object) => Some(Value::Object(kept(object, depth - 1))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{KEPT, TEXT_BYTES_MAX, WITHHELD, of_body, of_query, text};

    fn of(body: &serde_json::Value) -> serde_json::Value {
        of_body(&serde_json::to_vec(body).unwrap()).into()
    }

    #[test]
    fn the_list_is_in_order() {
        assert!(KEPT.is_sorted_by(|a, b| a < b));
    }

    #[test]
    fn what_was_ordered_is_kept_and_what_is_secret_or_not_known_is_not() {
        let promoted = json!({"ticket": "t", "force": true});
        assert_eq!(of(&promoted), json!({"force": true}));
        let joined = json!({"token": "sterna-invitation-1-x", "address": "a:1", "allow_machines": null});
        assert_eq!(of(&joined), json!({"address": "a:1"}));
        let vm = json!({"name": "web1", "definition": "command = ['secret']"});
        assert_eq!(of(&vm), json!({"name": "web1"}));
        let source = json!({"kind": "empty", "size_bytes": 4096, "password": "x"});
        let volume = json!({"name": "v", "source": source, "new": 1});
        assert_eq!(of(&volume), json!({"name": "v", "source": {"kind": "empty", "size_bytes": 4096}}));
        assert_eq!(
            serde_json::Value::from(of_query("force=true&token=x&delete_image")),
            json!({"force": "true", "delete_image": ""})
        );
    }

    #[test]
    fn an_invitation_in_a_wrong_place_is_withheld_and_long_or_deep_values_are_cut() {
        assert_eq!(of(&json!({"name": "x sterna-invitation-1-abc"})), json!({"name": WITHHELD}));
        assert_eq!(text("/v1/volumes/sterna-ticket-1-abc"), WITHHELD);
        let long = text(&"ä".repeat(TEXT_BYTES_MAX));
        assert!(long.len() <= TEXT_BYTES_MAX + '…'.len_utf8() && long.ends_with('…'), "{long}");
        let mut deep = json!(1);
        for _ in 0..20 {
            deep = json!({"source": deep});
        }
        assert!(of(&deep).to_string().len() < 80);
        for bytes in [&b""[..], b"{", b"[1]", b"\xff"] {
            assert!(of_body(bytes).is_empty());
        }
    }
}
