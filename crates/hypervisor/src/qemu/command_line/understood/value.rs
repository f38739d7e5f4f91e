//! The types of a command's values, and their parsed form.

use std::fmt;
use std::path::{Component, Path, PathBuf};

use super::lexer;
use super::{Allowed, NotAllowed};
use crate::qemu::command_line::movable::SYSTEM_FOLDER;
use crate::qemu::command_line::template::{Template, Variable};

const NAME_BYTES_MAX: usize = 127;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Switch,
    SwitchOrAuto,
    Number(u64),
    Size,
    Words(&'static [&'static str]),
    /// A name with a meaning within the VM only.
    Name,
    /// The type of a VM: `q35`, `pc-i440fx-8.1+pve0`.
    Machine,
    /// A word for the guest about a device: its serial number, its name.
    Label,
    Text,
    /// As [`Kind::Text`], to the end of the word, with commas.
    Line,
    /// A place on a bus: `1f.2`.
    Address,
    Mac,
    /// Addresses of a network within QEMU: `10.0.2.0/24`.
    Subnet,
    Uuid,
    /// Processors: `0-3`.
    Range,
    /// A keyboard layout: `de`, `en-us`. **N.B.** QEMU would open a file of that name.
    Keyboard,
    New(Class),
    /// A name that the command defines elsewhere.
    Of(Class),
    /// A file to read: the VM's own, or an allowed one.
    File,
    FileOrNone,
    Disk,
    Export,
    /// A socket in the VM's own folder, that of its TPM, or one below an allowed folder.
    Socket,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Class {
    Node,
    Character,
    Network,
    Object,
    Tpm,
    Audio,
    Device,
}

/// The parsed value of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// A switch: `on` or `off`.
    Switch(bool),
    /// A number in decimal.
    Number(u64),
    /// A word of a closed form: a name, a size, an address.
    Word(String),
    /// Free text for the guest.
    Text(String),
    /// A place that Sterna fills in.
    Place(Variable),
    /// A file of this host.
    Path(String),
    /// No value: a card without firmware.
    Nothing,
}

impl fmt::Display for Value {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Switch(true) => formatter.write_str("on"),
            Self::Switch(false) => formatter.write_str("off"),
            Self::Number(number) => number.fmt(formatter),
            Self::Word(text) | Self::Text(text) | Self::Path(text) => formatter.write_str(text),
            Self::Place(place) => place.fmt(formatter),
            Self::Nothing => Ok(()),
        }
    }
}

pub(super) enum Fault {
    /// It is no value of its kind; holds the expected form.
    NotOne(String),
    /// It names a forbidden file.
    Path(String),
}

impl Fault {
    pub(super) fn of(self, option: &str, key: &str, text: &str) -> NotAllowed {
        match self {
            Self::NotOne(expected) => {
                let what = if key.is_empty() {
                    format!("{option} {text}")
                } else {
                    format!("{option} {key}={text}")
                };
                NotAllowed::Malformed { what, reason: format!("is not understood: it must be {expected}") }
            }
            Self::Path(path) => NotAllowed::path(option, &path),
        }
    }
}

impl Kind {
    pub(super) fn read(self, text: &str, allowed: Allowed<'_>) -> Result<Value, Fault> {
        let not = |expected: &str| Err(Fault::NotOne(expected.to_owned()));
        if let Err(fault) = lexer::check_text(text) {
            return Err(Fault::NotOne(format!("a shorter or plainer value: it {fault}")));
        }
        if text.contains(',') && self != Self::Line {
            return not("without commas");
        }
        let word = |is_one: bool, expected: &str| {
            if is_one { Ok(Value::Word(text.to_owned())) } else { not(expected) }
        };
        match self {
            Self::Switch => switch(text).map_or_else(|| not("on or off"), |is_on| Ok(Value::Switch(is_on))),
            Self::SwitchOrAuto if text == "auto" => word(true, ""),
            Self::SwitchOrAuto => {
                switch(text).map_or_else(|| not("on, off or auto"), |is_on| Ok(Value::Switch(is_on)))
            }
            Self::Number(max) => match number(text).filter(|number| *number <= max) {
                Some(number) => Ok(Value::Number(number)),
                None => not(&format!("a whole number up to {max}")),
            },
            Self::Size => word(is_size(text), "a size, such as 512M"),
            Self::Words(words) => word(words.contains(&text), &format!("one of {}", words.join(", "))),
            Self::Name | Self::New(_) | Self::Of(_) => {
                word(is_name(text), "a name of letters, digits, dots, hyphens and underscores")
            }
            Self::Machine => word(is_name(&text.replace('+', "-")), "the type of a VM"),
            Self::Label if text.contains('/') => not("without a slash"),
            Self::Label | Self::Text | Self::Line => guest_text(text),
            Self::Address => word(is_address(text), "a slot on a bus, such as 1f.2"),
            Self::Mac => word(is_mac(text), "six pairs of hexadecimal digits"),
            Self::Subnet => {
                let is_sign = |byte: u8| byte.is_ascii_hexdigit() || b".:/".contains(&byte);
                word(text.bytes().all(is_sign), "an address, such as 10.0.2.0/24")
            }
            Self::Uuid if text == "auto" => word(true, ""),
            Self::Uuid => word(is_uuid(text), "a UUID"),
            Self::Range => {
                let (first, last) = text.split_once('-').unwrap_or((text, text));
                word(number(first).is_some() && number(last).is_some(), "a range, such as 0-3")
            }
            Self::Keyboard => {
                let is_letters = text.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-');
                word(is_letters && (2..=5).contains(&text.len()), "a layout, such as de or en-us")
            }
            Self::FileOrNone if text.is_empty() => Ok(Value::Nothing),
            Self::File | Self::FileOrNone => match place(text) {
                Some(place) if place.kind == "file" => Ok(Value::Place(place)),
                _ => path(text, allowed),
            },
            Self::Disk => only_place(text, &["disk"]),
            Self::Export => only_place(text, &["export"]),
            Self::Socket => match place(text) {
                None if !text.starts_with(SYSTEM_FOLDER) => path(text, allowed),
                _ => only_place(text, &["path", "tpm"]),
            },
        }
    }
}

pub(super) fn switch(text: &str) -> Option<bool> {
    match text {
        "on" | "yes" | "true" | "y" => Some(true),
        "off" | "no" | "false" | "n" => Some(false),
        _ => None,
    }
}

/// Parses a whole number. A leading zero means octal to some of QEMU's parsers only.
fn number(text: &str) -> Option<u64> {
    if let Some(digits) = text.strip_prefix("0x") {
        let is_hexadecimal = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        return u64::from_str_radix(digits, 16).ok().filter(|_| is_hexadecimal);
    }
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    text.parse().ok().filter(|_| is_plain)
}

fn is_size(text: &str) -> bool {
    let digits = text.trim_end_matches(|sign: char| "bBkKmMgGtTpPeE".contains(sign));
    let (whole, part) = digits.split_once('.').unwrap_or((digits, "0"));
    let is_digits =
        |text: &str| !text.is_empty() && text.len() <= 20 && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_plain = whole == "0" || !whole.starts_with('0');
    text.len() - digits.len() <= 1 && is_plain && is_digits(whole) && is_digits(part)
}

/// Returns whether a text is a name, other than QEMU's own ones (`#block1`, `/machine/…`).
pub(super) fn is_name(text: &str) -> bool {
    let is_sign = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    (1..=NAME_BYTES_MAX).contains(&text.len())
        && text.bytes().all(is_sign)
        && text.as_bytes().first().is_some_and(u8::is_ascii_alphanumeric)
        && !text.contains("..")
}

fn is_address(text: &str) -> bool {
    let is_digits = |text: &str| {
        let text = text.strip_prefix("0x").unwrap_or(text);
        (1..=2).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    text.split_once('.')
        .map_or_else(|| is_digits(text), |(slot, function)| is_digits(slot) && is_digits(function))
}

fn is_mac(text: &str) -> bool {
    let mut pairs = text.split(':');
    let is_pair = |pair: &str| pair.len() == 2 && pair.bytes().all(|byte| byte.is_ascii_hexdigit());
    pairs.clone().count() == 6 && pairs.all(is_pair)
}

fn is_uuid(text: &str) -> bool {
    let lengths: Vec<usize> = text.split('-').map(str::len).collect();
    lengths == [8, 4, 4, 4, 12] && text.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-')
}

/// Parses text for the guest; the only place in it may be the VM's name.
fn guest_text(text: &str) -> Result<Value, Fault> {
    let template = Template::parse(text);
    let stranger = template.variables().find(|place| place.kind != "name" || !place.name.is_empty());
    match stranger {
        Some(place) => Err(Fault::NotOne(format!("without {place}"))),
        None => Ok(Value::Text(text.to_owned())),
    }
}

pub(super) fn place(text: &str) -> Option<Variable> {
    let template = Template::parse(text);
    let mut variables = template.variables();
    let place = variables.next().filter(|place| place.to_string() == text)?;
    Some(place.clone())
}

fn only_place(text: &str, kinds: &[&str]) -> Result<Value, Fault> {
    match place(text) {
        Some(place) if kinds.contains(&place.kind.as_str()) => Ok(Value::Place(place)),
        _ => {
            let places: Vec<String> = kinds.iter().map(|kind| format!("{{{kind}…}}")).collect();
            Err(Fault::NotOne(format!("{} and nothing else", places.join(" or "))))
        }
    }
}

pub(super) fn path(text: &str, allowed: Allowed<'_>) -> Result<Value, Fault> {
    // Some of QEMU's parsers accept more than a path: protocols, lists, patterns.
    let is_sign = |sign: char| sign.is_alphanumeric() || "/._-+@~ ".contains(sign);
    let path = Path::new(text);
    // N.B. `components` passes over doubled slashes and single dots, and QEMU would get them.
    let is_spelled_so = path.components().collect::<PathBuf>().as_os_str() == text;
    let is_plain = path.is_absolute()
        && is_spelled_so
        && text.chars().all(is_sign)
        && path.components().all(|component| matches!(component, Component::RootDir | Component::Normal(_)));
    let is_below = |folder: &Path| path.starts_with(folder);
    let may_be_named =
        is_below(Path::new(SYSTEM_FOLDER)) || allowed.folders.iter().any(|folder| is_below(folder));
    if is_plain && may_be_named {
        Ok(Value::Path(text.to_owned()))
    } else {
        Err(Fault::Path(text.to_owned()))
    }
}
