//! Reads options: each by its shape, each key by its kind.

use std::collections::BTreeMap;

use super::lexer::{self, Part};
use super::options::{self, Naming, Shape};
use super::value::{self, Kind, Value};
use super::{Allowed, Argument, Body, NotAllowed, Said, devices, drives, open, processor};
use crate::qemu::command_line::template::Variable;

/// The prefix of a character device's name, in a port.
pub(super) const CHARACTER_DEVICE: &str = "chardev:";

const DRIVES: [(&str, &str); 8] = [
    ("-cdrom", "index=2,media=cdrom"),
    ("-fda", "if=floppy,index=0"),
    ("-fdb", "if=floppy,index=1"),
    ("-hda", "index=0,media=disk"),
    ("-hdb", "index=1,media=disk"),
    ("-hdc", "index=2,media=disk"),
    ("-hdd", "index=3,media=disk"),
    ("-pflash", "if=pflash"),
];

pub(super) fn read_argument<'a>(
    word: &str,
    words: &mut impl Iterator<Item = &'a String>,
    allowed: Allowed<'_>,
) -> Result<Argument, NotAllowed> {
    if let Some((_, drive)) = DRIVES.iter().find(|(option, _)| *option == word) {
        let path = words.next().ok_or_else(|| NotAllowed::malformed(word, "", "has no value"))?;
        let path = Kind::File.read(path, allowed).map_err(|fault| fault.of(word, "", path))?;
        let said = drives::drive("-drive", &format!("{drive},format=raw,file={path}"), allowed)?;
        return Ok(Argument { option: "-drive".to_owned(), body: Body::Keys { implied: "", said } });
    }
    let Some((option, shape)) = options::shape(word) else {
        return open::read(word, words, allowed);
    };
    if matches!(shape, Shape::Flag) {
        return Ok(Argument { option: option.to_owned(), body: Body::Nothing });
    }
    let text = words.next().ok_or_else(|| NotAllowed::malformed(option, "", "has no value"))?;
    match read_value(option, shape, text, allowed) {
        Ok(body) => Ok(Argument { option: option.to_owned(), body }),
        // An option that the administrator allows is split as strictly, and may have other keys and values.
        Err(refused) => open::value(option, text, allowed)?.ok_or(refused),
    }
}

fn read_value(
    option: &'static str,
    shape: Shape,
    text: &str,
    allowed: Allowed<'_>,
) -> Result<Body, NotAllowed> {
    let keys = |implied, said| Body::Keys { implied, said };
    match shape {
        Shape::Flag => Ok(Body::Nothing),
        Shape::Alone(Kind::Words(words)) if !words.contains(&text) => {
            Err(NotAllowed::option(option, lead(text), None))
        }
        Shape::Alone(kind) => {
            let read = kind.read(text, allowed);
            read.map(Body::Alone).map_err(|fault| fault.of(option, "", text))
        }
        Shape::Keys { implied, keys: known } => {
            let kind = |key: &str| known.iter().find(|(known, _)| *known == key).map(|(_, kind)| *kind);
            Ok(keys(implied, read_keys(option, implied, text, kind, allowed)?))
        }
        Shape::Forms { first, naming, forms } => {
            let implied = if naming == Naming::Implied { first } else { "" };
            let (word, pairs) = formed(option, first, implied, text)?;
            let Some(form) = forms.iter().find(|form| form.words.contains(&word.as_str())) else {
                return Err(NotAllowed::option(option, &word, None));
            };
            let kind = |key: &str| form.keys.iter().find(|(known, _)| *known == key).map(|(_, kind)| *kind);
            Ok(keys(implied, read_form(option, (first, &word), pairs, kind, allowed)?))
        }
        Shape::Device => {
            let (driver, pairs) = formed(option, "driver", "driver", text)?;
            if !devices::is_known(&driver) {
                return Err(NotAllowed::option(option, &driver, None));
            }
            let kind = |key: &str| devices::property(key).map(|(_, kind)| kind);
            Ok(keys("driver", read_form(option, ("driver", &driver), pairs, kind, allowed)?))
        }
        Shape::Drive => Ok(keys("", drives::drive(option, text, allowed)?)),
        Shape::Node => Ok(keys("driver", drives::node(option, text, allowed)?)),
        Shape::Processor => Ok(keys(processor::MODEL, processor::read(option, text, allowed)?)),
        Shape::Property => Ok(keys("", property(option, text, allowed)?)),
        Shape::Port => port(option, text, allowed),
        Shape::Monitor => {
            let place = served(option, text)?.filter(|place| place.kind == "qmp");
            let place = place.ok_or_else(|| NotAllowed::option(option, lead(text), Some(("", text))))?;
            Ok(Body::Served(Value::Place(place)))
        }
    }
}

fn read_keys(
    option: &str,
    implied: &str,
    text: &str,
    kind: impl Fn(&str) -> Option<Kind>,
    allowed: Allowed<'_>,
) -> Result<Said, NotAllowed> {
    let parts = lexer::cut(text).map_err(|fault| NotAllowed::malformed(option, text, &fault))?;
    let mut said = Said::default();
    for (number, part) in parts.into_iter().enumerate() {
        let implied = if number == 0 { implied } else { "" };
        let (key, value) = keyed(option, part, implied, &kind)?;
        let Some(kind) = kind(&key) else {
            return Err(NotAllowed::option(option, "", Some((&key, &value))));
        };
        said.read(option, &key, kind, &value, allowed)?;
    }
    Ok(said)
}

fn formed(option: &str, first: &str, implied: &str, text: &str) -> Result<(String, Vec<Part>), NotAllowed> {
    let mut parts = lexer::cut(text).map_err(|fault| NotAllowed::malformed(option, text, &fault))?;
    let is_first = |(number, part): (usize, &Part)| match part {
        Part::Pair(key, _) => key == first,
        Part::Bare(_) => number == 0 && !implied.is_empty(),
    };
    let at = parts.iter().enumerate().position(is_first);
    let at = at.ok_or_else(|| NotAllowed::malformed(option, text, &format!("has no {first}")))?;
    // A duplicate is noticed with the other keys, because it is none of them.
    match parts.remove(at) {
        Part::Pair(_, word) | Part::Bare(word) => Ok((word, parts)),
    }
}

fn read_form(
    option: &str,
    (first, word): (&str, &str),
    parts: Vec<Part>,
    kind: impl Fn(&str) -> Option<Kind>,
    allowed: Allowed<'_>,
) -> Result<Said, NotAllowed> {
    let mut said = Said::default();
    said.add(option, first, Value::Word(word.to_owned()))?;
    for part in parts {
        let (key, value) = keyed(option, part, "", &kind)?;
        match kind(&key) {
            Some(kind) => said.read(option, &key, kind, &value, allowed)?,
            None if key == first => {
                return Err(NotAllowed::malformed(option, &value, "repeats an earlier name"));
            }
            None => return Err(NotAllowed::option(option, word, Some((&key, &value)))),
        }
    }
    Ok(said)
}

/// Returns key and value of a part: a single word is the implied key's value, or a switch.
pub(super) fn keyed(
    option: &str,
    part: Part,
    implied: &str,
    kind: impl Fn(&str) -> Option<Kind>,
) -> Result<(String, String), NotAllowed> {
    let word = match part {
        Part::Pair(key, value) => return Ok((key, value)),
        Part::Bare(word) if !implied.is_empty() => return Ok((implied.to_owned(), word)),
        Part::Bare(word) => word,
    };
    let is_switch = |key: &str| matches!(kind(key), Some(Kind::Switch | Kind::SwitchOrAuto));
    if is_switch(&word) {
        return Ok((word, "on".to_owned()));
    }
    match word.strip_prefix("no") {
        Some(key) if is_switch(key) => Ok((key.to_owned(), "off".to_owned())),
        _ => Err(NotAllowed::malformed(option, &word, "is neither a key nor something to switch on")),
    }
}

/// Reads a property of all devices of a kind: `DRIVER.PROPERTY=VALUE`, or with a key for each.
fn property(option: &str, text: &str, allowed: Allowed<'_>) -> Result<Said, NotAllowed> {
    let parts = lexer::cut(text).map_err(|fault| NotAllowed::malformed(option, text, &fault))?;
    let mut keys = BTreeMap::new();
    let mut insert = |key: &str, value: &str| keys.insert(key.to_owned(), value.to_owned()).is_none();
    let is_once = match &*parts {
        [Part::Pair(key, value)] => match key.split_once('.') {
            Some((driver, property)) => {
                insert("driver", driver) && insert("property", property) && insert("value", value)
            }
            None => false,
        },
        parts => parts.iter().all(|part| match part {
            Part::Pair(key, value) => insert(key, value),
            Part::Bare(_) => false,
        }),
    };
    let known = ["driver", "property", "value"].map(|key| keys.get(key).map_or("", String::as_str));
    let [driver, property, value] = known;
    if !is_once || keys.len() != known.len() {
        return Err(NotAllowed::malformed(option, text, "is not DRIVER.PROPERTY=VALUE"));
    }
    let found = options::PROPERTIES.iter().find(|(of, name, _)| (*of, *name) == (driver, property));
    let Some((_, _, kind)) = found else {
        return Err(NotAllowed::option(option, driver, Some((property, value))));
    };
    let mut said = Said::default();
    said.add(option, "driver", Value::Word(driver.to_owned()))?;
    said.add(option, "property", Value::Word(property.to_owned()))?;
    said.read(option, "value", *kind, value, allowed)?;
    Ok(said)
}

/// Reads a port of the VM: nothing, a character device of the command, or a socket in the VM's own folder.
fn port(option: &str, text: &str, allowed: Allowed<'_>) -> Result<Body, NotAllowed> {
    if ["none", "null"].contains(&text) {
        return Ok(Body::Alone(Value::Word(text.to_owned())));
    }
    if let Some(device) = text.strip_prefix(CHARACTER_DEVICE) {
        Kind::Of(value::Class::Character)
            .read(device, allowed)
            .map_err(|fault| fault.of(option, "chardev", device))?;
        return Ok(Body::Alone(Value::Word(text.to_owned())));
    }
    let place = served(option, text)?.filter(|place| place.kind == "path");
    let place = place.ok_or_else(|| NotAllowed::option(option, lead(text), Some(("", text))))?;
    Ok(Body::Served(Value::Place(place)))
}

/// Reads the place of a socket that QEMU serves: `unix:{…},server=on,wait=off`, or in the older form.
fn served(option: &str, text: &str) -> Result<Option<Variable>, NotAllowed> {
    let (address, rest) = text.split_once(',').unwrap_or((text, ""));
    let Some(place) = address.strip_prefix("unix:").and_then(value::place) else { return Ok(None) };
    let keys = |key: &str| ["server", "wait"].contains(&key).then_some(Kind::Switch);
    let said = read_keys(option, "", rest, keys, Allowed::default())?;
    let says = |key: &str, is_on: bool| said.get(key) == Some(&Value::Switch(is_on));
    if says("server", true) && says("wait", false) {
        return Ok(Some(place));
    }
    Err(NotAllowed::malformed(option, text, "must have server=on,wait=off"))
}

/// Returns the beginning of a value, as the configuration names it.
pub(super) fn lead(text: &str) -> &str {
    text.split([',', ':', '=']).next().unwrap_or_default()
}
