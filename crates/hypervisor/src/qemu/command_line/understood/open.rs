//! Options that the administrator of this host allows besides the closed set. Their keys are unknown, so they are split strictly,
//! their paths are checked, and they are written anew from their parts.

use super::names::Names;
use super::reading::lead;
use super::value::{self, Class};
use super::{Allowed, Argument, Body, NotAllowed, lexer};
use crate::qemu::command_line::parser::is_flag;

/// Keys that QEMU takes more than once.
const LISTS: [&str; 3] = ["hostfwd", "guestfwd", "dnssearch"];

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Open {
    parts: Option<Vec<(String, Option<String>)>>,
    names: Names,
}

impl Open {
    pub(super) fn names(&self) -> &Names {
        &self.names
    }

    /// Returns the first value, whether or not its key is written.
    pub(super) fn first(&self) -> &str {
        let parts = self.parts.iter().flatten();
        let words = parts.map(|(key, value)| match value {
            Some(value) => (FIRST.contains(&key.as_str()), value.as_str()),
            None => (true, key.as_str()),
        });
        words.filter(|(is_first, _)| *is_first).map(|(_, word)| word).next().unwrap_or_default()
    }

    /// Its keys with their values.
    pub(super) fn pairs(&self) -> impl Iterator<Item = (&str, &str)> {
        let parts = self.parts.iter().flatten();
        parts.filter_map(|(key, value)| Some((key.as_str(), value.as_deref()?)))
    }

    pub(super) fn write(&self) -> Option<String> {
        let parts = self.parts.as_ref()?.iter();
        let words =
            parts.map(|(word, value)| value.as_ref().map_or(word.clone(), |value| format!("{word}={value}")));
        Some(words.collect::<Vec<_>>().join(","))
    }
}

pub(super) fn read<'a>(
    option: &str,
    words: &mut impl Iterator<Item = &'a String>,
    allowed: Allowed<'_>,
) -> Result<Argument, NotAllowed> {
    let name = option.strip_prefix('-').unwrap_or_default();
    let is_option = !name.is_empty()
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_');
    if !is_option || name.starts_with('-') {
        return Err(NotAllowed::malformed(option, "", "is no option that is written with one hyphen"));
    }
    if is_flag(option) {
        if !allowed.names(option, "") {
            return Err(NotAllowed::option(option, "", None));
        }
        let body = Body::Open(Open { parts: None, names: Names::default() });
        return Ok(Argument { option: option.to_owned(), body });
    }
    let text = words.next().ok_or_else(|| NotAllowed::malformed(option, "", "has no value"))?;
    value(option, text, allowed)?.ok_or_else(|| NotAllowed::option(option, lead(text), None))
}

pub(super) fn value(option: &str, text: &str, allowed: Allowed<'_>) -> Result<Option<Argument>, NotAllowed> {
    let parts = lexer::cut(text).map_err(|fault| NotAllowed::malformed(option, text, &fault))?;
    let pairs: Vec<(String, Option<String>)> = parts
        .into_iter()
        .map(|part| match part {
            lexer::Part::Pair(key, value) => (key, Some(value)),
            lexer::Part::Bare(word) => (word, None),
        })
        .collect();
    let first = pairs.first().map_or("", |(key, value)| match (FIRST.contains(&key.as_str()), value) {
        (true, Some(value)) => lead(value),
        _ => lead(key),
    });
    if !allowed.names(option, first) {
        return Ok(None);
    }
    let mut names = Names::default();
    for (number, (key, value)) in pairs.iter().enumerate() {
        let is_list = LISTS.contains(&key.as_str());
        let is_again = pairs.iter().take(number).any(|(known, _)| known == key);
        // QEMU takes this for the first key if its name is left out.
        let is_first_again = number > 0 && FIRST.contains(&key.as_str());
        if !is_list && (is_again || is_first_again) {
            return Err(NotAllowed::malformed(option, key, "is said twice"));
        }
        let said = value.as_deref().unwrap_or(key);
        if said.contains('/') || said.contains("..") {
            let path = said.strip_prefix("unix:").unwrap_or(said);
            value::path(path, allowed).map_err(|fault| fault.of(option, key, said))?;
        }
        match (option, key.as_str(), value) {
            ("-chardev", "id", Some(name)) => names.makes(Class::Character, name),
            ("-netdev" | "-nic", "id", Some(name)) => names.makes(Class::Network, name),
            ("-object", "id", Some(name)) => names.makes(Class::Object, name),
            ("-device", "id", Some(name)) => names.makes(Class::Device, name),
            ("-audiodev", "id", Some(name)) => names.makes(Class::Audio, name),
            ("-blockdev", "node-name", Some(name)) | ("-drive", "id" | "node-name", Some(name)) => {
                names.makes(Class::Node, name);
            }
            _ => {}
        }
    }
    let body = Body::Open(Open { parts: Some(pairs), names });
    Ok(Some(Argument { option: option.to_owned(), body }))
}

/// Names of keys that QEMU takes for the first one.
const FIRST: [&str; 5] = ["driver", "type", "backend", "qom-type", "accel"];
