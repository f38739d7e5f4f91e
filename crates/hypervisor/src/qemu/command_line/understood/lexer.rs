//! Splits the words of a command strictly: ambiguous text is refused.
//!
//! ```text
//!   -drive if=virtio,format=raw        pairs, each key once
//!   -device {"driver": "VGA"}          strict JSON, flattened: keys below others are written with dots
//! ```
//! QEMU has several parsers: of two equal keys, some take the last, some the first, some both. The result must
//! not depend on that.

use serde_json::Value as Json;

use crate::qemu::command_line::template::Template;

/// Longest value. QEMU cuts some of them at 1024 bytes; a kernel takes 2048.
const VALUE_BYTES_MAX: usize = 4096;
const DEPTH_MAX: usize = 8;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Pair(String, String),
    Bare(String),
}

/// Splits a value into its parts. Fails with the reason why it is ambiguous.
pub(super) fn cut(text: &str) -> Result<Vec<Part>, String> {
    check_text(text)?;
    if is_json(text) {
        return flatten(text);
    }
    let mut parts = Vec::new();
    for part in text.split(',') {
        match part.split_once('=') {
            _ if part.is_empty() => return Err("has an empty part, or two commas".to_owned()),
            Some((key, _)) if !is_key(key) => return Err(format!("{key:?} is no key")),
            Some((key, value)) => parts.push(Part::Pair(key.to_owned(), value.to_owned())),
            None => parts.push(Part::Bare(part.to_owned())),
        }
    }
    Ok(parts)
}

/// Checks that a text has only characters without meaning to a parser. Fails with the reason if not.
pub(super) fn check_text(text: &str) -> Result<(), String> {
    if text.len() > VALUE_BYTES_MAX {
        return Err(format!("has more than {VALUE_BYTES_MAX} bytes"));
    }
    if text.chars().any(char::is_control) {
        return Err("has a control character".to_owned());
    }
    Ok(())
}

/// Returns whether QEMU takes a value for JSON. A place is none: its text never begins with a brace.
fn is_json(text: &str) -> bool {
    text.starts_with('{') && !Template::parse(text).begins_with_variable()
}

fn is_key(key: &str) -> bool {
    let is_sign = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    !key.is_empty() && key.bytes().all(is_sign) && !key.split('.').any(str::is_empty)
}

fn flatten(text: &str) -> Result<Vec<Part>, String> {
    // The parser would keep the last of two equal keys, so it only checks the syntax; keys are counted in the text.
    let json: Json = serde_json::from_str(text).map_err(|error| format!("is no strict JSON: {error}"))?;
    let mut parts = Vec::new();
    collect("", &json, 0, &mut parts)?;
    // N.B. a duplicate key is lost in the parsed value.
    let (written, read) = (keys_written(text), keys_of(&json));
    if written != read {
        return Err("has a key twice".to_owned());
    }
    Ok(parts)
}

fn collect(above: &str, json: &Json, depth: usize, parts: &mut Vec<Part>) -> Result<(), String> {
    let Json::Object(fields) = json else { return Err("is no object".to_owned()) };
    if depth > DEPTH_MAX {
        return Err("is too deep".to_owned());
    }
    for (name, value) in fields {
        if !is_key(name) || name.contains('.') {
            return Err(format!("{name:?} is no key"));
        }
        let key = if above.is_empty() { name.clone() } else { format!("{above}.{name}") };
        let text = match value {
            Json::Bool(true) => "on".to_owned(),
            Json::Bool(false) => "off".to_owned(),
            Json::Number(number) if number.is_u64() => number.to_string(),
            Json::String(text) if text.contains(',') => return Err(format!("{key} has a comma")),
            Json::String(text) => {
                check_text(text).map_err(|fault| format!("{key} {fault}"))?;
                text.clone()
            }
            Json::Object(_) => {
                collect(&key, value, depth + 1, parts)?;
                continue;
            }
            Json::Array(_) => return Err(format!("{key} is a list")),
            Json::Null | Json::Number(_) => {
                return Err(format!("{key} is neither a word nor a whole number"));
            }
        };
        parts.push(Part::Pair(key, text));
    }
    Ok(())
}

/// Counts the keys in the text of a JSON value. The text is known to be JSON.
fn keys_written(text: &str) -> usize {
    let (mut in_string, mut is_escaped, mut keys) = (false, false, 0);
    for byte in text.bytes() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if in_string => is_escaped = true,
            b'"' => in_string = !in_string,
            // Outside of strings, each colon follows a key.
            b':' if !in_string => keys += 1,
            _ => {}
        }
    }
    keys
}

fn keys_of(json: &Json) -> usize {
    match json {
        Json::Object(fields) => fields.len() + fields.values().map(keys_of).sum::<usize>(),
        Json::Array(values) => values.iter().map(keys_of).sum(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_could_be_read_in_two_ways_is_refused() {
        for text in [
            "",
            "a,,b",
            "a=b,",
            ",a=b",
            "=b",
            "a..b=c",
            ".a=b",
            "a b=c",
            "a=b\nc=d",
            "{'driver': 'VGA'}",
            r#"{"a": "b"} "#.trim_end().strip_suffix('}').unwrap(),
            r#"{"a": "b", "a": "c"}"#,
            r#"{"a": "b", "\u0061": "c"}"#,
            r#"{"x": {"a": 1, "a": 1}}"#,
            r#"{"a.b": "c"}"#,
            r#"{"a": ["b"]}"#,
            r#"{"a": null}"#,
            r#"{"a": -1}"#,
            r#"{"a": 1.5}"#,
            r#"{"a": "b,c"}"#,
            r#"{"a": "b\u0000"}"#,
            r#"{"a": "b"}, "#,
        ] {
            assert!(cut(text).is_err(), "{text}");
        }
        assert!(cut(&"a".repeat(VALUE_BYTES_MAX + 1)).is_err());
        let deep = "{\"a\":".repeat(20) + "1" + &"}".repeat(20);
        assert!(cut(&deep).is_err());
    }

    #[test]
    fn pairs_and_json_are_cut_alike() {
        let pair = |key: &str, value: &str| Part::Pair(key.to_owned(), value.to_owned());
        let expected = [pair("driver", "raw"), pair("file.driver", "file"), pair("read-only", "on")];
        let json = r#"{"driver": "raw", "file": {"driver": "file"}, "read-only": true}"#;
        assert_eq!(cut(json).unwrap(), expected);
        assert_eq!(cut("driver=raw,file.driver=file,read-only=on").unwrap(), expected);
        assert_eq!(cut("{name}").unwrap(), [Part::Bare("{name}".to_owned())]);
        assert_eq!(cut("a=b=c").unwrap(), [pair("a", "b=c")]);
        let colon = r#"{"a": "b:c", "d": 1}"#;
        assert_eq!(cut(colon).unwrap(), [pair("a", "b:c"), pair("d", "1")]);
    }
}
