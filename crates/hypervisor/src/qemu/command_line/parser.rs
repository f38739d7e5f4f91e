//! QEMU's command line as QEMU reads it: options, and the parts of their values.
//!
//! ```text
//!   -drive file=/srv/a,,b.raw,if=virtio     option, value: keys in order, two commas are one in a value
//!   -blockdev {"driver": "raw", …}          the same as JSON; keys below others are written with dots
//!   -S                                      an option without a value
//!   disk.raw                                no option: the first disk
//! ```
//! It parses only, and checks nothing.

use serde_json::Value;

/// Options without a value, in the versions from 7.2 on.
const FLAGS: [&str; 34] = [
    "-S",
    "-alt-grab",
    "-ctrl-grab",
    "-curses",
    "-daemonize",
    "-enable-fips",
    "-enable-kvm",
    "-enable-sync-profile",
    "-full-screen",
    "-h",
    "-help",
    "-mem-prealloc",
    "-no-acpi",
    "-no-fd-bootchk",
    "-no-hpet",
    "-no-quit",
    "-no-reboot",
    "-no-shutdown",
    "-no-user-config",
    "-nodefaults",
    "-nographic",
    "-nouserconfig",
    "-old-param",
    "-one-insn-per-tb",
    "-only-migratable",
    "-portrait",
    "-preconfig",
    "-s",
    "-sdl",
    "-semihosting",
    "-singlestep",
    "-snapshot",
    "-usb",
    "-version",
];

/// One option with its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Argument {
    /// The option, with one hyphen; empty for a word that is no option.
    pub option: String,
    /// The value; `None` for an option without one.
    pub value: Option<String>,
}

pub(super) fn is_flag(option: &str) -> bool {
    FLAGS.contains(&option)
}

/// Splits a command, without its program, into options.
pub fn parse(words: &[String]) -> Vec<Argument> {
    let mut arguments = Vec::new();
    let mut words = words.iter().peekable();
    while let Some(word) = words.next() {
        // QEMU takes options with one hyphen or with two.
        let option = word.strip_prefix('-').filter(|rest| rest.starts_with('-')).unwrap_or(word);
        if !option.starts_with('-') || option == "-" {
            arguments.push(Argument { option: String::new(), value: Some(word.clone()) });
            continue;
        }
        let value = if is_flag(option) { None } else { words.next().cloned() };
        arguments.push(Argument { option: option.to_owned(), value });
    }
    arguments
}

/// The parsed value of an option.
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    /// Keys and values in order; a part without a key has an empty one.
    Pairs(Vec<(String, String)>),
    /// A value in JSON.
    Json(Value),
}

impl Values {
    /// Parses the value of an option.
    pub fn read(value: &str) -> Self {
        if let Ok(json @ Value::Object(_)) = serde_json::from_str(value) {
            return Self::Json(json);
        }
        let mut parts = vec![String::new()];
        let mut characters = value.chars().peekable();
        while let Some(character) = characters.next() {
            // Two commas stand for one in a value.
            let is_end = character == ',' && characters.next_if_eq(&',').is_none();
            match parts.last_mut() {
                Some(part) if !is_end => part.push(character),
                _ => parts.push(String::new()),
            }
        }
        let pairs = parts.into_iter().map(|part| match part.split_once('=') {
            Some((key, value)) => (key.to_owned(), value.to_owned()),
            None => (String::new(), part),
        });
        Self::Pairs(pairs.collect())
    }

    /// Makes values from pairs.
    pub fn of(pairs: &[(&str, &str)]) -> Self {
        Self::Pairs(pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect())
    }

    /// Returns keys and values; nested keys are written with dots.
    pub fn pairs(&self) -> Vec<(String, String)> {
        match self {
            Self::Pairs(pairs) => pairs.clone(),
            Self::Json(json) => {
                let mut pairs = Vec::new();
                collect("", json, &mut pairs);
                pairs
            }
        }
    }

    /// Returns the last value of a key.
    pub fn get(&self, wanted: &str) -> Option<String> {
        let said = self.pairs().into_iter().rev();
        said.into_iter().find_map(|(key, value)| (key == wanted).then_some(value))
    }

    /// Returns whether a key is switched on, in any of QEMU's forms.
    pub fn is_on(&self, wanted: &str) -> bool {
        self.pairs().iter().any(|(key, value)| {
            key == wanted && matches!(value.as_str(), "on" | "yes" | "true" | "y")
                || key.is_empty() && value == wanted
        })
    }

    /// Returns the first part of most options: `driver=` or a word without a key.
    pub fn driver(&self) -> String {
        let first =
            || self.pairs().into_iter().next().filter(|(key, _)| key.is_empty()).map(|(_, value)| value);
        self.get("driver").or_else(first).unwrap_or_default()
    }

    /// Sets a value, in place of an earlier one of that key.
    pub fn set(&mut self, key: &str, value: &str) {
        match self {
            Self::Pairs(pairs) => match pairs.iter_mut().rev().find(|(known, _)| known == key) {
                Some((_, known)) => value.clone_into(known),
                None => pairs.push((key.to_owned(), value.to_owned())),
            },
            Self::Json(json) => {
                let mut place = json;
                for name in key.split('.') {
                    if !place.is_object() {
                        *place = Value::Object(serde_json::Map::new());
                    }
                    place = &mut place[name];
                }
                *place = Value::from(value);
            }
        }
    }

    /// Keeps the values that `keeps` accepts; of JSON, considers the top level only.
    pub fn retain(&mut self, keeps: impl Fn(&str, &str) -> bool) {
        match self {
            Self::Pairs(pairs) => pairs.retain(|(key, value)| keeps(key, value)),
            Self::Json(Value::Object(fields)) => {
                fields.retain(|key, value| keeps(key, value.as_str().unwrap_or_default()));
            }
            Self::Json(_) => {}
        }
    }

    /// Writes the value in QEMU's form.
    pub fn write(&self) -> String {
        match self {
            Self::Json(json) => json.to_string(),
            Self::Pairs(pairs) => {
                let parts = pairs.iter().map(|(key, value)| {
                    let value = value.replace(',', ",,");
                    if key.is_empty() { value } else { format!("{key}={value}") }
                });
                parts.collect::<Vec<_>>().join(",")
            }
        }
    }
}

fn collect(key: &str, value: &Value, pairs: &mut Vec<(String, String)>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let key = if key.is_empty() { name.clone() } else { format!("{key}.{name}") };
                collect(&key, value, pairs);
            }
        }
        Value::Bool(true) => pairs.push((key.to_owned(), "on".to_owned())),
        Value::String(text) => pairs.push((key.to_owned(), text.clone())),
        other => pairs.push((key.to_owned(), other.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_cut_as_qemu_cuts_it() {
        let words =
            ["-m", "32", "--nographic", "disk.raw", "-S", "-cdrom", "-odd", "-usb"].map(str::to_owned);
        let read: Vec<_> = parse(&words)
            .into_iter()
            .map(|argument| (argument.option, argument.value.unwrap_or_default()))
            .collect();
        let expected = [
            ("-m", "32"),
            ("-nographic", ""),
            ("", "disk.raw"),
            ("-S", ""),
            ("-cdrom", "-odd"),
            ("-usb", ""),
        ];
        assert_eq!(read, expected.map(|(option, value)| (option.to_owned(), value.to_owned())));
    }

    #[test]
    fn values_are_read_changed_and_written() {
        for text in ["", "a", "file=/x,,y,if=none", "socket,id=a,server,nowait", "a=,b=c=d"] {
            assert_eq!(Values::read(text).write(), text);
        }
        let mut values = Values::read("file=/x,,y,if=none,readonly=on");
        assert_eq!(values.get("file").as_deref(), Some("/x,y"));
        values.set("file", "{file:a}");
        values.set("format", "raw");
        values.retain(|key, _| key != "if");
        assert!(values.is_on("readonly") && !values.is_on("if"));
        assert_eq!(values.write(), "file={file:a},readonly=on,format=raw");
        assert!(Values::read("socket,server").is_on("server"));
    }

    #[test]
    fn json_is_read_and_changed_below_its_keys() {
        let text = r#"{"driver":"raw","file":{"driver":"file","filename":"/x"},"read-only":true}"#;
        let mut values = Values::read(text);
        assert_eq!((values.driver().as_str(), values.get("file.filename").as_deref()), ("raw", Some("/x")));
        assert!(values.is_on("read-only"));
        assert_eq!(values.write(), text);
        values.set("file.filename", "{file:a}");
        assert_eq!(values.get("file.filename").as_deref(), Some("{file:a}"));
        values.retain(|key, _| key != "read-only");
        assert_eq!(values.write(), r#"{"driver":"raw","file":{"driver":"file","filename":"{file:a}"}}"#);
    }
}
