//! The lines of the protocol: one JSON object each. They are decoded without trust, and unknown parts are no error.

use serde_json::{Value, json};

use crate::qemu::error::ErrorClass;
use crate::qemu::version::Version;

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Message {
    Answer {
        identity: u64,
        answer: Result<Value, Refusal>,
    },
    Event(Event),
    /// An unknown object, or an answer without an identity.
    Unknown,
}

/// Something that has happened in QEMU.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Its name in QEMU's words, such as `MIGRATION`.
    pub name: String,
    /// QEMU's data about it; null if there is none.
    pub data: Value,
    /// The time by the host's clock, in microseconds since 1970; `None` if QEMU could not tell.
    pub at_us: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) class: ErrorClass,
    pub(super) description: String,
}

#[derive(Debug, thiserror::Error)]
#[error("it sent a line that is no object of the protocol")]
pub(super) struct Garbled;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::qemu) enum Band {
    /// After earlier commands, by its main thread.
    InOrder,
    /// At once, by the monitor's own thread, whatever the main thread does: for few commands only, and by agreement.
    OutOfBand,
}

pub(super) fn encode(band: Band, command: &str, arguments: &Value, identity: u64) -> Vec<u8> {
    let execute = match band {
        Band::InOrder => "execute",
        Band::OutOfBand => "exec-oob",
    };
    let mut line = json!({ execute: command, "arguments": arguments, "id": identity }).to_string();
    line.push('\n');
    line.into_bytes()
}

pub(super) fn decode_greeting(line: &[u8]) -> Option<Version> {
    let greeting: Value = serde_json::from_slice(line).ok()?;
    Version::read(&greeting["QMP"]["version"])
}

pub(super) fn decode(line: &[u8]) -> Result<Message, Garbled> {
    let Ok(Value::Object(mut message)) = serde_json::from_slice(line) else { return Err(Garbled) };
    if let Some(Value::String(name)) = message.remove("event") {
        let data = message.remove("data").unwrap_or(Value::Null);
        return Ok(Message::Event(Event { name, data, at_us: read_time(message.get("timestamp")) }));
    }
    let Some(identity) = message.get("id").and_then(Value::as_u64) else { return Ok(Message::Unknown) };
    let answer = match (message.remove("return"), message.remove("error")) {
        (Some(value), None) => Ok(value),
        (None, Some(error)) => Err(read_refusal(&error)),
        _ => return Ok(Message::Unknown),
    };
    Ok(Message::Answer { identity, answer })
}

fn read_refusal(error: &Value) -> Refusal {
    let class = match error["class"].as_str() {
        Some("GenericError") | None => ErrorClass::Generic,
        Some("CommandNotFound") => ErrorClass::CommandNotFound,
        Some("DeviceNotActive") => ErrorClass::DeviceNotActive,
        Some("DeviceNotFound") => ErrorClass::DeviceNotFound,
        Some("KVMMissingCap") => ErrorClass::KvmMissingCapability,
        Some(other) => ErrorClass::Other(words::clean(other)),
    };
    // The monitor may be a foreign program.
    Refusal { class, description: words::clean(error["desc"].as_str().unwrap_or("no reason is given")) }
}

/// QEMU sends -1 for both numbers if its host has no clock.
fn read_time(timestamp: Option<&Value>) -> Option<u64> {
    let timestamp = timestamp?;
    let seconds = timestamp["seconds"].as_u64()?;
    seconds.checked_mul(1_000_000)?.checked_add(timestamp["microseconds"].as_u64()?)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decoded(line: &str) -> Message {
        decode(line.as_bytes()).unwrap()
    }

    #[test]
    fn what_a_monitor_says_is_one_visible_line() {
        let line = r#"{"id": 8, "error": {"class": "\u001b[2JX", "desc": "no\n\u001b]0;x\u0007\u202e d0"}}"#;
        let Ok(Message::Answer { answer: Err(refusal), .. }) = decode(line.as_bytes()) else { panic!() };
        assert_eq!(refusal.description, "no\\n\\u{1b}]0;x\\u{7}\\u{202e} d0");
        assert_eq!(refusal.class, ErrorClass::Other("\\u{1b}[2JX".to_owned()));
    }

    #[test]
    fn what_a_monitor_sends_is_understood() {
        let answer = decoded(r#"{"return": {"x": 1}, "id": 7, "new-field": []}"#);
        assert_eq!(answer, Message::Answer { identity: 7, answer: Ok(json!({"x": 1})) });
        let refusal = decoded(r#"{"id": 8, "error": {"class": "DeviceNotFound", "desc": "no d0"}}"#);
        let expected = Refusal { class: ErrorClass::DeviceNotFound, description: "no d0".to_owned() };
        assert_eq!(refusal, Message::Answer { identity: 8, answer: Err(expected) });
        let event = decoded(r#"{"timestamp": {"seconds": 2, "microseconds": 5}, "event": "STOP"}"#);
        let expected = Event { name: "STOP".to_owned(), data: Value::Null, at_us: Some(2_000_005) };
        assert_eq!(event, Message::Event(expected));
    }

    #[test]
    fn what_is_new_or_odd_is_no_error() {
        let no_clock = r#"{"event": "NEW", "data": {}, "timestamp": {"seconds": -1, "microseconds": -1}}"#;
        assert!(matches!(decoded(no_clock), Message::Event(Event { at_us: None, .. })));
        for line in [
            "{}",
            r#"{"greeting": 1}"#,
            r#"{"return": {}}"#,
            r#"{"return": {}, "id": "seven"}"#,
            r#"{"return": {}, "error": {}, "id": 1}"#,
            r#"{"event": 7}"#,
        ] {
            assert_eq!(decoded(line), Message::Unknown, "{line}");
        }
        let unclassed = decoded(r#"{"error": 3, "id": 1}"#);
        assert!(
            matches!(unclassed, Message::Answer { answer: Err(refusal), .. } if refusal.class == ErrorClass::Generic)
        );
    }

    #[test]
    fn what_is_no_object_is_garbled() {
        for line in ["", "hello", "7", "[]", "{", "\"event\"", &"[".repeat(100_000)] {
            assert!(decode(line.as_bytes()).is_err(), "{line:.20}");
            assert_eq!(decode_greeting(line.as_bytes()), None);
        }
    }

    #[test]
    fn a_command_is_one_line_whatever_is_in_it() {
        let line = encode(Band::InOrder, "x", &json!({"path": "a\nb\"\u{0}"}), 1);
        assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1);
        assert_eq!(line.last(), Some(&b'\n'));
    }

    proptest! {
        #[test]
        fn no_line_can_upset_the_decoder(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
            words in proptest::collection::vec(
                proptest::sample::select(vec![
                    "{", "}", "[", "]", ":", ",", "\"event\"", "\"return\"", "\"error\"", "\"id\"", "\"class\"",
                    "\"timestamp\"", "\"seconds\"", "\"QMP\"", "\"version\"", "\"qemu\"", "1", "-1", "1e99", "null",
                    "18446744073709551615",
                ]),
                0..20,
            ),
        ) {
            for line in [bytes, words.concat().into_bytes()] {
                let _ = decode(&line);
                let _ = decode_greeting(&line);
            }
        }
    }
}
